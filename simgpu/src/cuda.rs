//! Steers the simulated driver.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fakecuda::{Access, Configuration, Counts};

use crate::library;

/// Calls a function of the simulated driver that gives a `CUresult`.
macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),*)) => {{
        // SAFETY: the function is of this workspace and has this signature; it copies what it is given.
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

/// Says what machine to simulate.
///
/// # Panics
///
/// If the driver was initialised before.
pub fn configure(configuration: Configuration) {
    expect("configuring; was it initialised before?", call!(simgpu_configure(&raw const configuration => *const Configuration)));
}

/// The `nth` call of `function` from now on, counted from 1, by whatever thread, returns the `CUresult` `code` and does nothing.
pub fn fail_call(function: &str, nth: u64, code: u32) {
    plant(function, nth, code, false);
}

/// As [`fail_call`], counting only what this thread calls.
pub fn fail_call_of_this_thread(function: &str, nth: u64, code: u32) {
    plant(function, nth, code, true);
}

fn plant(function: &str, nth: u64, code: u32, this_thread: bool) {
    let name = c_text(function);
    let this_thread = u8::from(this_thread);
    expect("planting", call!(simgpu_fail_call(name.as_ptr() => *const c_char, nth => u64, code => u32, this_thread => u8)));
}

/// Lets the memory of a device run out when `bytes` of it are in use.
///
/// # Panics
///
/// If there is no such device, or the driver was not initialised.
pub fn limit_memory(device: i32, bytes: u64) {
    expect("limiting memory", call!(simgpu_limit_memory(device => c_int, bytes => u64)));
}

/// Takes back all that [`fail_call`] and [`limit_memory`] planted.
pub fn clear_faults() {
    expect("clearing faults", call!(simgpu_clear_faults()));
}

/// Loads PTX into the current context as the code of a library that knows nothing of the simulation: files, or folders of files, with
/// colons between their names. Gives the `CUmodule`.
///
/// # Errors
///
/// The `CUresult`; what is wrong is in the reports.
pub fn load_library_kernels(names: &str) -> Result<*mut c_void, u32> {
    let names = c_text(names);
    let mut module = std::ptr::null_mut();
    let place = &raw mut module;
    match call!(simgpu_load_kernels(place => *mut *mut c_void, names.as_ptr() => *const c_char)) {
        0 => Ok(module),
        code => Err(code),
    }
}

/// Puts a job into `stream` that fails with the `CUresult` `code` when its turn comes, and breaks the context as a kernel would.
///
/// # Panics
///
/// If there is no such stream, or its context is broken.
pub fn fail_stream(stream: *mut c_void, code: u32) {
    expect("planting a job that fails", call!(simgpu_fail_stream(stream => *mut c_void, code => u32)));
}

/// Puts a host function into `stream` that is known to read and write `accesses`. Gives the `CUresult`.
///
/// # Safety
///
/// `function` may be called with `data` on another thread, once, or if the stream captures at every launch of the graph.
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

/// While it lives, a stream begins no job: the host runs ahead as far as the test wants it to.
#[derive(Debug)]
pub struct Gate {
    stream: *mut c_void,
}

// SAFETY: a stream may be named by any thread.
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

    /// Opens it again, as dropping does.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A stream that is gone has no gate.
        call!(simgpu_set_gate(self.stream => *mut c_void, 0 => u8));
    }
}

/// What was found wrong since the last call: races, buffers freed while in use, faults of kernels. Empty is good.
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

/// Adds a report of one's own.
pub fn report(text: &str) {
    let text = c_text(text);
    expect("reporting", call!(simgpu_report(text.as_ptr() => *const c_char)));
}

/// What is alive, for tests that look for leaks.
pub fn counts() -> Counts {
    let mut counts = Counts::default();
    expect("counting", call!(simgpu_counts(&raw mut counts => *mut Counts)));
    counts
}

/// A test that has the simulation for itself: reports, faults and counts are one for the whole process.
#[derive(Debug)]
pub struct Alone(#[allow(dead_code, reason = "held, never read")] MutexGuard<'static, ()>);

/// Installs the simulation and waits until no other test has it for itself; without planted faults, without old reports.
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
