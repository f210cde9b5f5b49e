//! What tests steer the simulation with.

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
    /// As `cuLaunchHostFunc`, with what the function reads and writes.
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

    /// Loads the kernels of a library into the current context, from files with PTX: their names with colons between, each of a file or of
    /// a folder with such files.
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

/// A text of the caller's.
///
/// # Safety
///
/// It is null or ends with a NUL.
unsafe fn text(text: *const c_char) -> Outcome<String> {
    if text.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: it is not null, and the caller vouches for the rest.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Says what to simulate; refused once `cuInit` was called.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_configure(configuration: *const Configuration) -> u32 {
    control(|| {
        let mut state = state::lock();
        if configuration.is_null() || state.initialised {
            return Err(Code::ILLEGAL_STATE);
        }
        // SAFETY: it is not null; the caller vouches for the rest.
        state.configuration = unsafe { *configuration };
        Ok(())
    })
}

/// The `nth` call of `function` from now on, of this thread or of any, returns `code` without being made.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_fail_call(function: *const c_char, nth: u64, code: u32, this_thread: u8) -> u32 {
    control(|| {
        // SAFETY: the caller vouches for it.
        let function = unsafe { text(function)? };
        let thread = (this_thread != 0).then(|| std::thread::current().id());
        state::lock().faults.plant(function, nth, Code(code), thread);
        Ok(())
    })
}

/// Takes back what was planted, memory limits among it.
#[unsafe(no_mangle)]
extern "C" fn simgpu_clear_faults() -> u32 {
    control(|| {
        let mut state = state::lock();
        state.faults.clear();
        state.devices.iter_mut().for_each(|device| device.limit = None);
        Ok(())
    })
}

/// The memory of a device runs out when this many bytes are in use.
#[unsafe(no_mangle)]
extern "C" fn simgpu_limit_memory(device: c_int, bytes: u64) -> u32 {
    control(|| {
        let mut state = state::lock();
        let device = state.device(device)?;
        state.devices[device].limit = Some(bytes);
        Ok(())
    })
}

/// Closes or opens the gate of a stream: while it is closed, no job of the stream is begun.
#[unsafe(no_mangle)]
extern "C" fn simgpu_set_gate(named: usize, closed: u8) -> u32 {
    control(|| {
        let mut state = state::lock();
        // Also that of a stream which is broken, or which ends when its jobs are done.
        let stream = if state.streams.contains_key(&named) { named } else { state.stream(named)? };
        stream::set_gate(&mut state, stream, closed != 0);
        Ok(())
    })
}

/// A job that fails with `code`, and breaks the context, when its turn in the stream comes.
#[unsafe(no_mangle)]
extern "C" fn simgpu_fail_stream(named: usize, code: u32) -> u32 {
    control(|| {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        let task = Task { work: Work::Fail(Code(code)), what: "a job".into(), spans: Vec::new() };
        submit::submit(&mut state, stream, task).map(drop)
    })
}

/// Adds a report: other parts of the simulation tell here what they find.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_report(report: *const c_char) -> u32 {
    control(|| {
        // SAFETY: the caller vouches for it.
        let report = unsafe { text(report)? };
        state::lock().reports.add(report);
        Ok(())
    })
}

/// Writes the reports, each followed by a NUL, and forgets them; if `room` is too small for all, only says how much it takes.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_take_reports(place: *mut u8, room: usize, needed: *mut usize) -> u32 {
    control(|| {
        let mut state = state::lock();
        let text = state.reports.text();
        // SAFETY: the caller vouches for it.
        unsafe { put(needed, text.len())? };
        if text.len() <= room && !place.is_null() {
            // SAFETY: there is room for it, as the caller vouches.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), place, text.len()) };
            state.reports.clear();
        }
        Ok(())
    })
}

/// What is alive.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_counts(counts: *mut Counts) -> u32 {
    // SAFETY: the caller vouches for it.
    control(|| unsafe { put(counts, state::lock().counts()) })
}
