//! Controls the simulated driver.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fakecuda::{Access, Configuration, Counts};

use crate::library;

/// Calls a function of the simulated driver that returns a `CUresult`.
macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),*)) => {{
        // SAFETY: the function belongs to this workspace and has this signature; it copies its arguments.
        let code = unsafe {
            let function = library::cuda().get::<unsafe extern "C" fn($($kind),*) -> u32>(concat!(stringify!($name), "\0").as_bytes());
            function.unwrap_or_else(|error| panic!("the simulated driver has no {}: {error}", stringify!($name)))($($argument),*)
        };
        code
    }};
}

fn expect(what: &str, code: u32) {
    assert_eq!(code, 0, "{what}: the simulated driver gave error {code}");
}

fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_else(|_| panic!("{text:?} has a NUL inside"))
}

/// Sets the machine to simulate.
///
/// # Panics
///
/// If the driver is already initialised.
pub fn configure(configuration: Configuration) {
    expect("configuring; was it initialised before?", call!(simgpu_configure(&raw const configuration => *const Configuration)));
}

/// Makes the `nth` call of `function` from now on (1 is the next), on any thread, return the `CUresult` `code` and do
/// nothing.
pub fn fail_call(function: &str, nth: u64, code: u32) {
    plant(function, nth, code, false);
}

/// Does the same as [`fail_call`], but counts only the calls of this thread.
pub fn fail_call_of_this_thread(function: &str, nth: u64, code: u32) {
    plant(function, nth, code, true);
}

fn plant(function: &str, nth: u64, code: u32, this_thread: bool) {
    let name = c_text(function);
    let this_thread = u8::from(this_thread);
    expect("planting", call!(simgpu_fail_call(name.as_ptr() => *const c_char, nth => u64, code => u32, this_thread => u8)));
}

/// Makes the memory of a device run out when `bytes` of it are in use.
///
/// # Panics
///
/// If there is no such device, or the driver is not initialised.
pub fn limit_memory(device: i32, bytes: u64) {
    expect("limiting memory", call!(simgpu_limit_memory(device => c_int, bytes => u64)));
}

/// Removes everything that [`fail_call`] and [`limit_memory`] planted.
pub fn clear_faults() {
    expect("clearing faults", call!(simgpu_clear_faults()));
}

/// Loads PTX into the current context as the code of a library that knows nothing of the simulation. `names` are
/// files, or folders of files, separated by colons. Returns the `CUmodule`.
///
/// # Errors
///
/// The `CUresult`; the cause is in the reports.
pub fn load_library_kernels(names: &str) -> Result<*mut c_void, u32> {
    let names = c_text(names);
    let mut module = std::ptr::null_mut();
    let place = &raw mut module;
    match call!(simgpu_load_kernels(place => *mut *mut c_void, names.as_ptr() => *const c_char)) {
        0 => Ok(module),
        code => Err(code),
    }
}

/// Enqueues into `stream` a job that fails with the `CUresult` `code` when it runs. Like a failing kernel, the job
/// breaks the context.
///
/// # Panics
///
/// If there is no such stream, or its context is broken.
pub fn fail_stream(stream: *mut c_void, code: u32) {
    expect("planting a job that fails", call!(simgpu_fail_stream(stream => *mut c_void, code => u32)));
}

/// Enqueues into `stream` a host function that is known to read and write `accesses`. Returns the `CUresult`.
///
/// # Safety
///
/// `function` may be called with `data` on another thread: once, or, if the stream captures, at every launch of the
/// graph.
pub unsafe fn launch_host_function(
    stream: *mut c_void,
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
    accesses: &[Access],
) -> u32 {
    type Function = unsafe extern "C" fn(*mut c_void);
    call!(simgpu_launch_host_func_with_accesses(
        stream => *mut c_void, function => Function, data => *mut c_void, accesses.as_ptr() => *const Access, accesses.len() => usize
    ))
}

/// A guard that keeps a stream from beginning any job, so that a test decides how far the host runs ahead.
#[derive(Debug)]
pub struct Gate {
    stream: *mut c_void,
}

// SAFETY: any thread may use a stream's handle.
unsafe impl Send for Gate {}

impl Gate {
    /// Closes the gate of `stream`, a `CUstream`.
    ///
    /// # Panics
    ///
    /// If there is no such stream.
    pub fn close(stream: *mut c_void) -> Gate {
        expect("closing a gate", call!(simgpu_set_gate(stream => *mut c_void, 1 => u8)));
        Gate { stream }
    }

    /// Opens the gate again, as dropping does.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A destroyed stream has no gate.
        call!(simgpu_set_gate(self.stream => *mut c_void, 0 => u8));
    }
}

/// Returns the problems found since the last call: races, buffers freed while in use, faults of kernels. Empty if all
/// is well.
pub fn reports() -> Vec<String> {
    let mut text = Vec::<u8>::new();
    loop {
        let mut needed = 0usize;
        let (place, room) = (text.as_mut_ptr(), text.len());
        let needed_place = &raw mut needed;
        expect("reading reports", call!(simgpu_take_reports(place => *mut u8, room => usize, needed_place => *mut usize)));
        if needed <= text.len() {
            let all = String::from_utf8_lossy(&text[..needed]).into_owned();
            return all.split_terminator('\0').map(str::to_string).collect();
        }
        text.resize(needed, 0);
    }
}

/// Adds the test's own report.
pub fn report(text: &str) {
    let text = c_text(text);
    expect("reporting", call!(simgpu_report(text.as_ptr() => *const c_char)));
}

/// Counts the objects that are alive, for tests that look for leaks.
pub fn counts() -> Counts {
    let mut counts = Counts::default();
    expect("counting", call!(simgpu_counts(&raw mut counts => *mut Counts)));
    counts
}

/// A guard for exclusive use of the simulation: reports, faults and counts are shared by the whole process.
#[derive(Debug)]
pub struct Alone(#[allow(dead_code, reason = "held, never read")] MutexGuard<'static, ()>);

/// Installs the simulation, waits until no other test uses it exclusively, and clears planted faults and old reports.
pub fn alone() -> Alone {
    static LOCK: Mutex<()> = Mutex::new(());
    library::install_cuda_only();
    let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    clear_faults();
    reports();
    crate::nccl::forget();
    Alone(guard)
}

impl Drop for Alone {
    fn drop(&mut self) {
        clear_faults();
    }
}
