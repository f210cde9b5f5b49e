//! The exported functions with which tests control this library; `simgpu` wraps them.

#![expect(unsafe_code, reason = "exported to C")]
#![allow(clippy::missing_safety_doc, reason = "strings are null-terminated, buffers as long as their callers say")]

use crate::abi::{Code, Config, Handle};
use crate::operation::Verb;
use crate::report;
use crate::{comm, control, group, other_calls, threads};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::thread::ThreadId;
use std::time::Duration;

/// # Safety
/// The string is null-terminated, or null.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

fn caller(anyone: c_int) -> Option<ThreadId> {
    (anyone == 0).then(|| std::thread::current().id())
}

/// Sets the result of `ncclGetVersion` and everything that depends on it.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_set_version(version: c_int) {
    control::set_version(version);
}

/// Makes the `nth` call of a function from now on (1 is the next), by this thread or by any, fail with a code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_fail(function: *const c_char, nth: u64, code: c_int, anyone: c_int) {
    // SAFETY: promised by the caller.
    control::fail(&unsafe { text(function) }, nth, Code(code), caller(anyone));
}

/// Makes a non-blocking communicator report `polls` times that it is in progress after each call of a function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_in_progress(function: *const c_char, polls: u32) {
    // SAFETY: promised by the caller.
    control::set_polls(&unsafe { text(function) }, polls);
}

/// Writes the key that this process encrypts with, without a zero, and returns its length; writes nothing if it does
/// not fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_encryption_key(into: *mut c_char, room: usize) -> usize {
    let key = other_calls::encryption_key();
    if key.len() <= room {
        // SAFETY: the caller's buffer holds `room` bytes, which was checked to suffice.
        unsafe { std::ptr::copy_nonoverlapping(key.as_ptr().cast(), into, key.len()) };
    }
    key.len()
}

/// Makes launches of a rank hang, after `after` that succeed, until the communicator is aborted. A negative number
/// ends that for later launches.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_hang(rank: usize, after: i64) {
    control::set_hang(rank, u64::try_from(after).ok());
}

/// Simulates the death of a rank's process, for the communicators of this process in which it has this rank. Returns
/// how many there were.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_lose(rank: usize) -> usize {
    let lost: Vec<_> = comm::live().into_iter().filter(|comm| comm.member().is_ok_and(|member| member.rank == rank)).collect();
    lost.iter().for_each(|comm| comm.lose());
    lost.len()
}

/// Hides the death of other processes from this process from now on, as between devices of one host.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_silence_deaths() {
    control::silence_deaths();
}

/// Lets a rank that aborts or revokes from now on end the collectives that it has begun for the others, too: they
/// succeed, and nothing is written.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_let_aborted_kernels_go_on() {
    control::let_aborted_kernels_go_on();
}

/// Lets the first collective of a communicator wait, inside the call, until all ranks have come to connect.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_connect_lazily() {
    control::connect_lazily();
}

/// Sets whether the devices have symmetric memory.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_symmetric_memory(there: c_int) {
    control::set_symmetric_memory(there != 0);
}

/// Makes each call take `microseconds` longer, so that calls which must not overlap do overlap.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_linger(microseconds: u64) {
    control::set_linger(Duration::from_micros(microseconds));
}

/// Clears everything planted and counted. Communicators stay alive.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_reset() {
    control::reset();
}

/// Passes every report so far to `sink`, with `data`, and forgets them.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_take_reports(sink: extern "C" fn(*mut c_void, *const u8, usize), data: *mut c_void) {
    report::take().iter().for_each(|text| sink(data, text.as_ptr(), text.len()));
}

/// Counts live objects: "communicators", "registrations", "windows", "captured" (launches of live graphs), "operations",
/// "allocations" or "threads" (those that no call has joined).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_live(what: *const c_char) -> usize {
    // SAFETY: promised by the caller.
    match unsafe { text(what) }.as_str() {
        "allocations" => other_calls::allocations(),
        "threads" => threads::unjoined(),
        what => comm::census().get(what).copied().unwrap_or(0),
    }
}

/// Returns how often a function was called, by this thread or by any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_calls(function: *const c_char, anyone: c_int) -> u64 {
    // SAFETY: promised by the caller.
    control::calls(&unsafe { text(function) }, caller(anyone))
}

/// Returns the bytes sent by ranks of this process, as the plain algorithms would send them: by one verb ("AllReduce"
/// …) or all of them (""), by one rank or all (negative).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_bytes_sent(verb: *const c_char, rank: c_int) -> u64 {
    // SAFETY: promised by the caller.
    let verb = unsafe { text(verb) };
    let known = Verb::ALL.into_iter().find(|known| format!("{known:?}") == verb);
    if known.is_none() && !verb.is_empty() { 0 } else { control::sent(known, usize::try_from(rank).ok()) }
}

/// Returns how many threads this library has started for groups and for parallel jobs.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_threads_started() -> u64 {
    threads::started()
}

/// Returns how many of these were started in calls of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_threads_started_by_this_thread() -> u64 {
    threads::started_here()
}

/// Returns how many groups this thread has open.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_nccl_group_depth() -> usize {
    group::depth()
}

/// Writes the configuration of a communicator, as this library read it. Returns whether there is such a communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_nccl_config(comm: Handle, config: *mut Config) -> c_int {
    let found = comm::live().into_iter().find(|live| live.handle == comm as usize);
    // SAFETY: promised by the caller.
    found.map_or(0, |live| unsafe {
        config.write(live.config);
        1
    })
}
