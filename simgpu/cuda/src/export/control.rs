//! The functions with which tests control the simulation.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::call::{control, driver, put};
use crate::checker::Verb;
use crate::code::{Code, Outcome};
use crate::interface::{Access, Configuration, Counts};
use crate::job::{HostFunction, Span, Task, Work};
use crate::module;
use crate::state;
use crate::stream;
use crate::submit;

driver! {
    /// Does the same as `cuLaunchHostFunc`, with a list of what the function reads and writes.
    fn simgpu_launch_host_func_with_accesses(
        named: usize, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void, accesses: *const Access, count: usize,
    ) {
        let mut state = stream::with_room(named);
        let stream = state.stream(named)?;
        if count > 0 && accesses.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let accesses = if count == 0 { &[] } else { std::slice::from_raw_parts(accesses, count) };
        let spans = accesses.iter().filter(|access| access.bytes > 0).map(span).collect();
        let work = Work::Call(HostFunction { function: function.ok_or(Code::INVALID_VALUE)?, data });
        submit::submit(&mut state, stream, Task { work, what: "cuLaunchHostFunc".into(), spans }).map(drop)
    }

    /// Loads the kernels of a library into the current context. `names` are files with PTX, or folders with such
    /// files, separated by colons.
    fn simgpu_load_kernels(place: *mut usize, names: *const c_char) {
        if names.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        match module::load_library(CStr::from_ptr(names).to_bytes()) {
            Ok(handle) => put(place, handle),
            Err((code, text)) => {
                state::lock().reports.add(format!("the kernels of a library were not loaded: {text}"));
                Err(code)
            }
        }
    }
}

fn span(access: &Access) -> Span {
    let verb = if access.write != 0 { Verb::Write } else { Verb::Read };
    Span { start: access.address, bytes: access.bytes, verb, known: true }
}

/// Copies a text of the caller.
///
/// # Safety
///
/// It is null or ends with a NUL.
unsafe fn text(text: *const c_char) -> Outcome<String> {
    if text.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: it is not null, and the caller guarantees the rest.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Sets what to simulate; refused after `cuInit`.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_configure(configuration: *const Configuration) -> u32 {
    control(|| {
        let mut state = state::lock();
        if configuration.is_null() || state.initialised {
            return Err(Code::ILLEGAL_STATE);
        }
        // SAFETY: it is not null; the caller guarantees the rest.
        state.configuration = unsafe { *configuration };
        Ok(())
    })
}

/// Makes the `nth` call of `function` from now on, of this thread or of any, return `code` without being executed.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_fail_call(function: *const c_char, nth: u64, code: u32, this_thread: u8) -> u32 {
    control(|| {
        // SAFETY: guaranteed by the caller.
        let function = unsafe { text(function)? };
        let thread = (this_thread != 0).then(|| std::thread::current().id());
        state::lock().faults.plant(function, nth, Code(code), thread);
        Ok(())
    })
}

/// Removes planted faults and memory limits.
#[unsafe(no_mangle)]
extern "C" fn simgpu_clear_faults() -> u32 {
    control(|| {
        let mut state = state::lock();
        state.faults.clear();
        state.devices.iter_mut().for_each(|device| device.limit = None);
        Ok(())
    })
}

/// Makes the memory of a device run out when this many bytes are in use.
#[unsafe(no_mangle)]
extern "C" fn simgpu_limit_memory(device: c_int, bytes: u64) -> u32 {
    control(|| {
        let mut state = state::lock();
        let device = state.device(device)?;
        state.devices[device].limit = Some(bytes);
        Ok(())
    })
}

/// Closes or opens the gate of a stream. While it is closed, the stream begins no job.
#[unsafe(no_mangle)]
extern "C" fn simgpu_set_gate(named: usize, closed: u8) -> u32 {
    control(|| {
        let mut state = state::lock();
        // This includes a stream that is broken, or that ends when its jobs are done.
        let stream = if state.streams.contains_key(&named) { named } else { state.stream(named)? };
        stream::set_gate(&mut state, stream, closed != 0);
        Ok(())
    })
}

/// Enqueues a job that fails with `code`, and breaks the context, when it runs.
#[unsafe(no_mangle)]
extern "C" fn simgpu_fail_stream(named: usize, code: u32) -> u32 {
    control(|| {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        let task = Task { work: Work::Fail(Code(code)), what: "a job".into(), spans: Vec::new() };
        submit::submit(&mut state, stream, task).map(drop)
    })
}

/// Adds a report: other parts of the simulation report their findings here.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_report(report: *const c_char) -> u32 {
    control(|| {
        // SAFETY: guaranteed by the caller.
        let report = unsafe { text(report)? };
        state::lock().reports.add(report);
        Ok(())
    })
}

/// Writes the reports, each followed by a NUL, and forgets them; if `room` is too small for all, only returns the size
/// needed.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_take_reports(place: *mut u8, room: usize, needed: *mut usize) -> u32 {
    control(|| {
        let mut state = state::lock();
        let text = state.reports.text();
        // SAFETY: guaranteed by the caller.
        unsafe { put(needed, text.len())? };
        if text.len() <= room && !place.is_null() {
            // SAFETY: the text fits, as the caller guarantees `room` bytes.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), place, text.len()) };
            state.reports.clear();
        }
        Ok(())
    })
}

/// Returns the number of objects that are alive.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_counts(counts: *mut Counts) -> u32 {
    // SAFETY: guaranteed by the caller.
    control(|| unsafe { put(counts, state::lock().counts()) })
}
