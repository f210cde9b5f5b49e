//! Steers the simulated NCCL.

mod older;

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::library;

pub use fakenccl::SYMBOLS;
pub use fakenccl::abi::Config;

/// The version that is installed where no other is asked for: 2.32.3.
pub const NEWEST: i32 = 23203;

/// Calls a control function of the simulated NCCL.
macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),*) -> $result:ty) => {{
        // SAFETY: the function is of this workspace and has this signature; it copies what it is given.
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
        assert!(crate::real::nccl().is_none(), "a real NCCL is in place, which nobody can steer: a test that does is skipped");
        library::cuda();
        let path = library::path(library::NCCL);
        let library = if version >= NEWEST { library::open(&path) } else { older::open(&path, version) };
        (version, library)
    })
}

pub(crate) fn library() -> &'static Library {
    &installed(NEWEST).1
}

/// Puts the simulated driver and NCCL of this version (22809 is 2.28.9) in place for this process: what later releases brought cannot be
/// looked up. Calls after the first do nothing.
///
/// # Panics
///
/// If NCCL is in place with another version, or was not built.
pub fn install(version: i32) {
    let before = installed(version).0;
    assert_eq!(before, version, "NCCL {before} is in place in this process, so {version} cannot be");
    call!(simgpu_nccl_set_version(version => c_int) -> ());
}

/// Forgets what was planted and reported, where NCCL is in place.
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

/// The `nth` call of `function` from now on, counted from 1, by whatever thread, returns `code` and does nothing.
///
/// # Panics
///
/// If there is no such function.
pub fn fail_call(function: &str, nth: u64, code: i32) {
    call!(simgpu_nccl_fail(known(function).as_ptr() => *const c_char, nth => u64, code => c_int, 1 => c_int) -> ());
}

/// As [`fail_call`], counting only what this thread calls.
///
/// # Panics
///
/// If there is no such function.
pub fn fail_call_of_this_thread(function: &str, nth: u64, code: i32) {
    call!(simgpu_nccl_fail(known(function).as_ptr() => *const c_char, nth => u64, code => c_int, 0 => c_int) -> ());
}

/// After each call of `function`, a non-blocking communicator answers so many polls with "in progress", at least; a collective is launched
/// after the last. 2 for what makes communicators and for finalize, else 0. `ncclGroupEnd` stands for whole groups.
///
/// # Panics
///
/// If there is no such function.
pub fn in_progress(function: &str, polls: u32) {
    call!(simgpu_nccl_in_progress(known(function).as_ptr() => *const c_char, polls => u32) -> ());
}

/// Launches of `rank` in this process hang, after `after` more that go well, until its communicator is aborted or revoked.
pub fn hang(rank: usize, after: u32) {
    call!(simgpu_nccl_hang(rank => usize, i64::from(after) => i64) -> ());
}

/// As if the process of `rank` died, for all communicators of this process in which a thread of it has this rank: its peers and itself get
/// the asynchronous error 6, and stay blocked, as with NCCL, until they abort. Says how many communicators there were.
pub fn lose(rank: usize) -> usize {
    call!(simgpu_nccl_lose(rank => usize) -> usize)
}

/// The key that NCCL encrypts with in this process; empty where there is none.
pub fn encryption_key() -> String {
    let mut key = vec![0_u8; 256];
    let length = call!(simgpu_nccl_encryption_key(key.as_mut_ptr().cast() => *mut c_char, key.len() => usize) -> usize);
    key.truncate(length);
    String::from_utf8_lossy(&key).into_owned()
}

/// From now on, until [`reset`], nobody in this process hears of the death of another process: as between devices of one host, where NCCL
/// has no connection that could break. Who waits for a dead rank then waits until it aborts.
pub fn silence_deaths() {
    call!(simgpu_nccl_silence_deaths() -> ());
}

/// From now on, until [`reset`], a rank that aborts, or revokes, ends the collectives that it has begun for the others, too: with success, and nothing
/// written. As with NCCL, whose kernels go on without waiting once they are aborted, over peer access and shared memory.
pub fn let_aborted_kernels_go_on() {
    call!(simgpu_nccl_let_aborted_kernels_go_on() -> ());
}

/// From now on, until [`reset`], the first collective of a communicator waits inside the library until all ranks have come to connect, as
/// NCCL does from 2.22 on where the driver has virtual memory management (`cuMem`).
pub fn connect_lazily() {
    call!(simgpu_nccl_connect_lazily() -> ());
}

/// From now on, until [`reset`], the devices have symmetric memory, as where nothing is said, or they have none: as between devices that
/// cannot map each other's memory, where every registration of a window is a plain registration.
pub fn symmetric_memory(there: bool) {
    call!(simgpu_nccl_symmetric_memory(c_int::from(there) => c_int) -> ());
}

/// Each call takes so much longer, so that calls which should not meet do.
pub fn linger(microseconds: u64) {
    call!(simgpu_nccl_linger(microseconds => u64) -> ());
}

/// Forgets all that was planted and counted, and all reports. Communicators stay.
pub fn reset() {
    call!(simgpu_nccl_reset() -> ());
    reports();
}

/// What was done wrong since the last call: ranks that did not agree, two threads inside, dead handles, overlapping buffers. Empty is good.
/// A real NCCL says nothing.
pub fn reports() -> Vec<String> {
    type Sink = extern "C" fn(*mut c_void, *const u8, usize);
    extern "C" fn sink(reports: *mut c_void, text: *const u8, length: usize) {
        // SAFETY: `reports` is the list below, and there are `length` bytes of text.
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

/// What is alive, for tests that look for leaks.
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
    /// Launches that graphs have captured which are still there.
    pub captured: usize,
    /// Threads of groups in the background that no poll and no abort has joined.
    pub threads: usize,
}

/// What is alive in this process. What belongs to a communicator ends with it.
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

/// How often `function` was called by anyone since the last [`reset`].
///
/// # Panics
///
/// If there is no such function.
pub fn calls(function: &str) -> u64 {
    call!(simgpu_nccl_calls(known(function).as_ptr() => *const c_char, 1 => c_int) -> u64)
}

/// How often `function` was called by this thread since the last [`reset`].
///
/// # Panics
///
/// If there is no such function.
pub fn calls_of_this_thread(function: &str) -> u64 {
    call!(simgpu_nccl_calls(known(function).as_ptr() => *const c_char, 0 => c_int) -> u64)
}

/// Bytes that `rank` sent in this process since the last [`reset`], as rings (reductions, all-gather, broadcast) or direct sends (the rest)
/// would send them: by one verb, such as "AllReduce" or "Send", or by all.
pub fn bytes_sent(verb: Option<&str>, rank: Option<usize>) -> u64 {
    let verb = c_text(verb.unwrap_or_default());
    let rank = rank.map_or(-1, |rank| rank as c_int);
    call!(simgpu_nccl_bytes_sent(verb.as_ptr() => *const c_char, rank => c_int) -> u64)
}

/// How many threads NCCL has started in this process, ever: one for each group that goes on in the background, and one for each of several
/// jobs of a group that wait for peers. What the simulation itself needs is not counted.
pub fn threads_started() -> u64 {
    call!(simgpu_nccl_threads_started() -> u64)
}

/// As [`threads_started`], in calls of this thread.
pub fn threads_started_by_this_thread() -> u64 {
    call!(simgpu_nccl_threads_started_by_this_thread() -> u64)
}

/// How many groups this thread has open.
pub fn group_depth() -> usize {
    call!(simgpu_nccl_group_depth() -> usize)
}

/// The configuration of a live communicator as NCCL read it: what it does not know, or should not look at, is not set.
pub fn config(communicator: *mut c_void) -> Option<Config> {
    let mut config = fakenccl::unset(0);
    let known = call!(simgpu_nccl_config(communicator => *mut c_void, &raw mut config => *mut Config) -> c_int);
    (known != 0).then_some(config)
}
