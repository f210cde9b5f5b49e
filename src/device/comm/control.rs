//! Runs work on control communicators, and other NCCL calls that may take long. Each piece of work runs on a separate
//! thread, which ends with the work.
//!
//! Such a thread does its work from beginning to end. Up to NCCL 2.26, the state of work in progress is in the memory
//! of the thread that began the work. So this thread itself must wait for the end of the work, or abort it. A function
//! that fails may leave the thread inside a group. Some functions wait for other ranks, whatever the settings of the
//! communicator are. The caller waits for the thread until the caller's deadline, and no longer.

#![expect(unsafe_code, reason = "NCCL is C")]

use std::ffi::c_int;
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use nccl_sys::{Library, ncclComm_t, ncclResult_t};

use super::lock::BackOff;
use crate::base::deadline::Deadline;
use crate::base::tuning::device::ANSWER_WAIT;
use crate::device::nccl::{self, Refusal};
use crate::error::{Error, Result};

/// The reason why something was not done.
pub(super) struct Failed {
    pub(super) error: Error,
    /// Whether the communicator concerned, if there is one, remains usable.
    pub(super) harmless: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, harmless: false }
    }
}

pub(super) type Attempted<T> = std::result::Result<T, Failed>;

/// Whether a communicator remains usable after it refused a call. A communicator that does not block may keep even a
/// wrong argument as its error, and then refuse all later calls. The caller owns the handle.
pub(super) fn is_harmless(library: &'static Library, handle: ncclComm_t, refusal: &Refusal) -> bool {
    refusal.is_harmless() && (handle.is_null() || state(library, handle).is_ok())
}

/// Runs `work` on a separate thread, and returns its answer, or `None` if the answer has not come shortly after the
/// deadline. The work checks the deadline itself, and can report better what was late, so this function waits a little
/// longer. Nothing waits for what the work does after its answer.
pub(super) fn apart<T: Send + 'static>(deadline: &Deadline, work: impl FnOnce(&dyn Fn(T)) + Send + 'static) -> io::Result<Option<T>> {
    let (sender, answer) = mpsc::channel();
    let run = move || {
        // If the caller no longer waits, the answer is dropped.
        work(&|answer| drop(sender.send(answer)));
    };
    thread::Builder::new().name("collectives-nccl".to_owned()).spawn(run)?;
    match answer.recv_timeout(deadline.remaining().saturating_add(ANSWER_WAIT)) {
        Ok(answer) => Ok(Some(answer)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the thread ended without an answer")),
    }
}

/// Returns the state of a communicator, as NCCL reports it. The handle is valid: its owner lends it for the call.
pub(super) fn state(library: &'static Library, handle: ncclComm_t) -> std::result::Result<ncclResult_t, Refusal> {
    const CALL: &str = "ncclCommGetAsyncError";
    let mut state = ncclResult_t::ncclSuccess;
    // SAFETY: the handle is valid while its owner, who calls this, has it: control communicators are used and ended
    // under their turn, and new ones by the thread that creates them. The answer goes to our variable.
    let answer = unsafe { library.ncclCommGetAsyncError(handle, &mut state) };
    nccl::check(library, handle, CALL, answer)?;
    match state {
        ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(state),
        code => Err(nccl::refused(library, handle, CALL, code)),
    }
}

/// Waits until nothing is in progress on a communicator. From time to time, `stop` is asked for a reason to give up.
/// The caller owns the handle.
pub(super) fn settle(library: &'static Library, handle: ncclComm_t, doing: &str, stop: &dyn Fn() -> Option<Error>) -> Result<()> {
    let refused = |refusal: Refusal| refusal.into_error(doing.to_owned());
    let mut back_off = BackOff::default();
    while state(library, handle).map_err(refused)? == ncclResult_t::ncclInProgress {
        if let Some(error) = stop() {
            return Err(error);
        }
        back_off.rest();
    }
    // Up to NCCL 2.25 a communicator remembers its work in progress until it is used again, and this thread is about to
    // end.
    size(library, handle).map_err(refused).map(drop)
}

/// Returns the number of ranks of a communicator. The caller owns the handle.
pub(super) fn size(library: &'static Library, handle: ncclComm_t) -> std::result::Result<usize, Refusal> {
    let mut size: c_int = 0;
    // SAFETY: the handle is valid, its owner is the caller; the answer goes to our variable.
    let answer = unsafe { library.ncclCommCount(handle, &mut size) };
    nccl::check(library, handle, "ncclCommCount", answer)?;
    Ok(usize::try_from(size).unwrap_or(usize::MAX))
}

/// Returns this rank's number in a communicator. The caller owns the handle.
pub(super) fn rank(library: &'static Library, handle: ncclComm_t) -> std::result::Result<usize, Refusal> {
    let mut rank: c_int = 0;
    // SAFETY: the handle is valid, its owner is the caller; the answer goes to our variable.
    let answer = unsafe { library.ncclCommUserRank(handle, &mut rank) };
    nccl::check(library, handle, "ncclCommUserRank", answer)?;
    Ok(usize::try_from(rank).unwrap_or(usize::MAX))
}

/// Aborts a communicator; returns whether NCCL reports that it is gone. NCCL first releases threads inside
/// communicators that share its flags, before anything that could wait for the device. So no context is made current
/// here.
pub(super) fn abort(library: &'static Library, handle: ncclComm_t) -> bool {
    // SAFETY: the caller took the handle out of where others find it, or never put it there, and no thread is inside:
    // this is its last use.
    let answer = unsafe { library.ncclCommAbort(handle) };
    let gone = matches!(answer, Ok(ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress));
    if !gone {
        crate::base::event::warn!(?answer, "NCCL failed to abort a communicator");
    }
    gone
}
