//! Controls the simulated NCCL.

mod older;

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::library;

pub use fakenccl::SYMBOLS;
pub use fakenccl::abi::Config;

/// The version that is installed by default: 2.32.3.
pub const NEWEST: i32 = 23203;

/// Calls a control function of the simulated NCCL.
macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),*) -> $result:ty) => {{
        // SAFETY: the function belongs to this workspace and has this signature; it copies its arguments.
        let result: $result = unsafe {
            let function = library().get::<unsafe extern "C" fn($($kind),*) -> $result>(concat!(stringify!($name), "\0").as_bytes());
            function.unwrap_or_else(|error| panic!("the simulated NCCL has no {}: {error}", stringify!($name)))($($argument),*)
        };
        result
    }};
}

static LIBRARY: OnceLock<(i32, Library)> = OnceLock::new();

fn installed(version: i32) -> &'static (i32, Library) {
    LIBRARY.get_or_init(|| {
        assert!(crate::real::nccl().is_none(), "a real NCCL is in place, which tests cannot steer: skip this test");
        library::cuda();
        let path = library::path(library::NCCL);
        let library = if version >= NEWEST { library::open(&path) } else { older::open(&path, version) };
        (version, library)
    })
}

pub(crate) fn library() -> &'static Library {
    &installed(NEWEST).1
}

/// Installs the simulated driver and NCCL of this version (22809 is 2.28.9) for this process. Functions of later
/// releases cannot be looked up. Calls after the first do nothing.
///
/// # Panics
///
/// If another version of NCCL is installed, or the library was not built.
pub fn install(version: i32) {
    let before = installed(version).0;
    assert_eq!(before, version, "NCCL {before} is in place in this process, so {version} cannot be");
    call!(simgpu_nccl_set_version(version => c_int) -> ());
}

/// Clears planted faults and reports, if NCCL is installed.
pub(crate) fn forget() {
    if LIBRARY.get().is_some() {
        reset();
    }
}

fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_else(|_| panic!("{text:?} has a NUL inside"))
}

fn known(function: &str) -> CString {
    assert!(SYMBOLS.iter().any(|(name, _)| *name == function), "the simulated NCCL has no {function}");
    c_text(function)
}

/// Makes the `nth` call of `function` from now on (1 is the next), on any thread, return `code` and do nothing.
///
/// # Panics
///
/// If there is no such function.
pub fn fail_call(function: &str, nth: u64, code: i32) {
    call!(simgpu_nccl_fail(known(function).as_ptr() => *const c_char, nth => u64, code => c_int, 1 => c_int) -> ());
}

/// Does the same as [`fail_call`], but counts only the calls of this thread.
///
/// # Panics
///
/// If there is no such function.
pub fn fail_call_of_this_thread(function: &str, nth: u64, code: i32) {
    call!(simgpu_nccl_fail(known(function).as_ptr() => *const c_char, nth => u64, code => c_int, 0 => c_int) -> ());
}

/// Makes a non-blocking communicator answer at least `polls` polls with "in progress" after each call of `function`; a
/// collective is launched after the last of these polls. The default is 2 for functions that make communicators and for
/// finalize, and 0 for all others. `ncclGroupEnd` stands for whole groups.
///
/// # Panics
///
/// If there is no such function.
pub fn in_progress(function: &str, polls: u32) {
    call!(simgpu_nccl_in_progress(known(function).as_ptr() => *const c_char, polls => u32) -> ());
}

/// Makes launches of `rank` in this process hang until the rank's communicator is aborted or revoked. The next `after`
/// launches still succeed.
pub fn hang(rank: usize, after: u32) {
    call!(simgpu_nccl_hang(rank => usize, i64::from(after) => i64) -> ());
}

/// Simulates the death of the process of `rank`, for all communicators in which a thread of this process has this rank.
/// The rank itself and its peers get the asynchronous error 6 and, as with NCCL, stay blocked until they abort. Returns
/// the number of these communicators.
pub fn lose(rank: usize) -> usize {
    call!(simgpu_nccl_lose(rank => usize) -> usize)
}

/// Returns the key that NCCL encrypts with in this process, or an empty text if there is none.
pub fn encryption_key() -> String {
    let mut key = vec![0_u8; 256];
    let length = call!(simgpu_nccl_encryption_key(key.as_mut_ptr().cast() => *mut c_char, key.len() => usize) -> usize);
    key.truncate(length);
    String::from_utf8_lossy(&key).into_owned()
}

/// Hides the death of other processes from this process until [`reset`], as between devices of one host, where NCCL
/// has no connection that could break. A rank that waits for a dead rank then waits until it aborts itself.
pub fn silence_deaths() {
    call!(simgpu_nccl_silence_deaths() -> ());
}

/// Makes a rank that aborts or revokes also end, for the other ranks, the collectives that it has begun: there they
/// succeed, and nothing is written. This applies until [`reset`]. NCCL does so over peer access and shared memory: once
/// aborted, its kernels go on without waiting.
pub fn let_aborted_kernels_go_on() {
    call!(simgpu_nccl_let_aborted_kernels_go_on() -> ());
}

/// Makes the first collective of a communicator wait, inside the library, until all ranks have come to connect. This
/// applies until [`reset`]. NCCL does so from 2.22 on if the driver has virtual memory management (`cuMem`).
pub fn connect_lazily() {
    call!(simgpu_nccl_connect_lazily() -> ());
}

/// Sets whether the devices have symmetric memory, until [`reset`]. By default they do. Without it, as between devices
/// that cannot map each other's memory, every registration of a window is a plain registration.
pub fn symmetric_memory(there: bool) {
    call!(simgpu_nccl_symmetric_memory(c_int::from(there) => c_int) -> ());
}

/// Makes each call take `microseconds` longer, so that calls which must not overlap do overlap.
pub fn linger(microseconds: u64) {
    call!(simgpu_nccl_linger(microseconds => u64) -> ());
}

/// Clears everything planted and counted, and all reports. Communicators stay alive.
pub fn reset() {
    call!(simgpu_nccl_reset() -> ());
    reports();
}

/// Returns the misuses found since the last call: ranks that did not agree, two threads inside NCCL, dead handles,
/// overlapping buffers. Empty if all is well. A real NCCL reports none.
pub fn reports() -> Vec<String> {
    type Sink = extern "C" fn(*mut c_void, *const u8, usize);
    extern "C" fn sink(reports: *mut c_void, text: *const u8, length: usize) {
        // SAFETY: `reports` points to the list below, and the text has `length` bytes.
        let (reports, text) = unsafe { (&mut *reports.cast::<Vec<String>>(), std::slice::from_raw_parts(text, length)) };
        reports.push(String::from_utf8_lossy(text).into_owned());
    }
    let mut reports: Vec<String> = Vec::new();
    if crate::real::nccl().is_some() {
        return reports;
    }
    let list = (&raw mut reports).cast::<c_void>();
    call!(simgpu_nccl_take_reports(sink => Sink, list => *mut c_void) -> ());
    reports
}

/// The number of objects that are alive, for tests that look for leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Communicators that were neither destroyed nor aborted.
    pub communicators: usize,
    /// Buffers of `ncclCommRegister`.
    pub registrations: usize,
    /// Windows of `ncclCommWindowRegister`.
    pub windows: usize,
    /// Operators of `ncclRedOpCreatePreMulSum`.
    pub operators: usize,
    /// Memory of `ncclMemAlloc`.
    pub allocations: usize,
    /// Captured launches whose graphs still exist.
    pub captured: usize,
    /// Background threads of groups that no poll and no abort has joined.
    pub threads: usize,
}

/// Counts the objects that are alive in this process. The objects of a communicator end with it.
pub fn counts() -> Counts {
    let live = |what: &str| call!(simgpu_nccl_live(c_text(what).as_ptr() => *const c_char) -> usize);
    Counts {
        communicators: live("communicators"),
        registrations: live("registrations"),
        windows: live("windows"),
        operators: live("operations"),
        allocations: live("allocations"),
        captured: live("captured"),
        threads: live("threads"),
    }
}

/// Returns how often any thread has called `function` since the last [`reset`].
///
/// # Panics
///
/// If there is no such function.
pub fn calls(function: &str) -> u64 {
    call!(simgpu_nccl_calls(known(function).as_ptr() => *const c_char, 1 => c_int) -> u64)
}

/// Returns how often this thread has called `function` since the last [`reset`].
///
/// # Panics
///
/// If there is no such function.
pub fn calls_of_this_thread(function: &str) -> u64 {
    call!(simgpu_nccl_calls(known(function).as_ptr() => *const c_char, 0 => c_int) -> u64)
}

/// Returns the bytes that `rank` has sent in this process since the last [`reset`], for one verb, such as "AllReduce"
/// or "Send", or for all verbs. They are counted as if reductions, all-gathers and broadcasts used rings, and all other
/// verbs direct sends.
pub fn bytes_sent(verb: Option<&str>, rank: Option<usize>) -> u64 {
    let verb = c_text(verb.unwrap_or_default());
    let rank = rank.map_or(-1, |rank| rank as c_int);
    call!(simgpu_nccl_bytes_sent(verb.as_ptr() => *const c_char, rank => c_int) -> u64)
}

/// Returns the number of threads that NCCL has ever started in this process: one for each group that runs in the
/// background, and one for each of several jobs of a group that wait for peers. Threads that only the simulation needs
/// are not counted.
pub fn threads_started() -> u64 {
    call!(simgpu_nccl_threads_started() -> u64)
}

/// Returns the number of threads that NCCL has started for calls of this thread; see [`threads_started`].
pub fn threads_started_by_this_thread() -> u64 {
    call!(simgpu_nccl_threads_started_by_this_thread() -> u64)
}

/// Returns the number of groups that this thread has open.
pub fn group_depth() -> usize {
    call!(simgpu_nccl_group_depth() -> usize)
}

/// Returns the configuration of a live communicator as NCCL read it. Fields that NCCL does not know or must not read
/// are not set.
pub fn config(communicator: *mut c_void) -> Option<Config> {
    let mut config = fakenccl::unset(0);
    let known = call!(simgpu_nccl_config(communicator => *mut c_void, &raw mut config => *mut Config) -> c_int);
    (known != 0).then_some(config)
}
