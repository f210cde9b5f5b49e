//! The ways in which communicators end: close, revocation, abort, or failure.
//!
//! An abort begins with the control communicator, inside which no thread waits. NCCL raises the flags first, and the
//! data communicator's kernels, and threads inside it, are released. Once no thread is left inside, the data
//! communicator is aborted in its turn. There is one exception: NCCL may keep a thread inside the control communicator.
//! In that case no thread is inside the data communicator, whose abort raises the same flags.

#![expect(unsafe_code, reason = "NCCL is C")]

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::Duration;

use nccl_sys::{Library, ncclComm, ncclComm_t};

use super::control::{Attempted, Failed};
use super::lock::{BackOff, lock_within};
use super::state::{Inner, NONE};
use super::stream_tracker::StreamTracker;
use super::{NcclComm, control, watchdog};
use crate::base::deadline::Deadline;
use crate::base::tuning::device::{ABORT_WAIT, ANSWER_WAIT, COMMUNICATOR_DROP_WAIT, FENCE};
use crate::device::driver;
use crate::device::nccl::{self, Refusal};
use crate::error::{Error, Peer, Result};

impl NcclComm {
    /// Ends the communicator at once. Work on streams that waits for other ranks returns, and its results are invalid.
    /// All ranks should abort. Any thread may do so, even while other threads are in a call; that call then fails. A
    /// second abort does nothing.
    pub(crate) fn abort(&self) {
        let inner = self.inner();
        let by = Peer::unknown(inner.rank);
        inner.fail(Error::Aborted { doing: format!("rank {} of {}", inner.rank, inner.world_size), by }, ABORT_WAIT);
    }

    /// Stops work in flight and refuses collectives from now on; splits, shrinks and the end remain. Needs NCCL 2.28.7.
    ///
    /// If a thread does not leave a call, because it waits for other ranks, the communicator is aborted, and none of
    /// these operations remains possible.
    pub(crate) fn revoke(&self, deadline: &Deadline) -> Result<()> {
        let inner = self.inner();
        let words = format!("revoking the communicator of rank {} of {}", inner.rank, inner.world_size);
        let doing = || words.clone();
        if inner.is_ended() {
            return Err(inner.refuse(&doing));
        }
        if !inner.library.has("ncclCommRevoke") {
            return Err(Error::unsupported(words, format!("it needs NCCL 2.28.7 or later, but this is {}: abort instead", self.version())));
        }
        let _gate = inner.gate_or_abort(&words, deadline)?;
        inner.refuse_collectives();
        let revoked = inner.direct(doing(), deadline, |library, handle| {
            // SAFETY: the handle is valid, lent by `direct`, and the flags are the only ones that exist.
            let answer = unsafe { library.ncclCommRevoke(handle, nccl_sys::NCCL_REVOKE_DEFAULT) };
            nccl::check(library, handle, "ncclCommRevoke", answer).map(|_| ())
        });
        // Calls have been refused, and it is unknown which of them NCCL has stopped.
        revoked.map_err(|error| if inner.is_ended() { error } else { inner.end(error, &doing) })?;
        inner.revoked_by_nccl.store(true, Ordering::Release);
        Ok(())
    }

    /// Waits for work in flight, and gives all resources back. All ranks call this, and it may have to wait for them.
    ///
    /// NCCL would wait for captured graphs to be dropped. If there are any, the communicator is not closed, and remains
    /// as it is.
    pub(crate) fn finalize(&self, deadline: &Deadline) -> Result<()> {
        let inner = self.inner();
        let words = format!("closing the communicator of rank {} of {}", inner.rank, inner.world_size);
        let doing = || words.clone();
        let Some(_gate) = lock_within(&inner.gate, deadline.remaining()) else {
            return Err(inner.expire(&doing, deadline.elapsed()));
        };
        if inner.is_ended() {
            return Err(inner.refuse(&doing));
        }
        // Under the gate, so no thread captures another call meanwhile.
        self.refuse_live_graphs("close")?;
        if inner.is_revoked() {
            // Work that was cut off cannot be completed.
            inner.ended.store(true, Ordering::SeqCst);
            inner.release(deadline.remaining());
            return Ok(());
        }
        let closing = (Arc::clone(inner), deadline.clone(), words.clone());
        let work = move |answer: &dyn Fn(Result<()>)| {
            let (inner, deadline, words) = &closing;
            answer(inner.close(deadline, words));
        };
        let closed = control::apart(deadline, work).map_err(|error| Error::io(format!("{words}: starting a thread"), error))?;
        let error = match closed {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => inner.explained(error),
            None => inner.timeout(doing(), deadline.elapsed()),
        };
        let first = inner.fail(error.clone(), ABORT_WAIT);
        Err(if first || inner.failure.get().is_none() { error } else { inner.interruption(&doing) })
    }

    /// Refuses an operation that NCCL would not do before captured graphs are dropped. The driver reports dropped
    /// graphs a little late, so this waits for those reports.
    pub(crate) fn refuse_live_graphs(&self, call: &'static str) -> Result<()> {
        match self.inner.live_graphs_within(&Deadline::after(ANSWER_WAIT)) {
            0 => Ok(()),
            graphs => {
                let reason = format!(
                    "{graphs} CUDA graphs hold calls of this communicator, and NCCL would wait until the graphs are destroyed: drop the \
                     graphs first; nothing has been closed, and the communicator still works"
                );
                Err(Error::argument(call, reason))
            }
        }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if self.inner.is_given_back() {
            return;
        }
        let deadline = Deadline::after(COMMUNICATOR_DROP_WAIT);
        if !self.inner.is_ended() && self.inner.live_graphs() > 0 {
            return self.inner.close_behind_graphs();
        }
        let healthy = !self.inner.is_ended() && matches!(self.quiesce(&deadline), Ok(true));
        if !(healthy && self.finalize(&deadline).is_ok()) {
            if !self.inner.is_ended() {
                crate::base::event::error!(
                    rank = self.rank(),
                    "a communicator was dropped with calls that other ranks have not made: it is aborted, and the results of the \
                     calls are invalid"
                );
            }
            self.abort();
        }
    }
}

impl Inner {
    /// Returns the error of a refused call, which ends the communicator unless it is harmless.
    #[cold]
    pub(super) fn refused(self: &Arc<Self>, refusal: Refusal, doing: &dyn Fn() -> String) -> Error {
        let harmless = refusal.is_harmless();
        let error = refusal.into_error(doing());
        if harmless { error } else { self.end(error, doing) }
    }

    /// Ends the communicator because a deadline passed.
    #[cold]
    pub(super) fn expire(self: &Arc<Self>, doing: &dyn Fn() -> String, elapsed: Duration) -> Error {
        self.end(self.timeout(doing(), elapsed), doing)
    }

    /// Ends the communicator with an error, and returns the error for the caller. It is the same one, unless another
    /// error had ended the communicator before.
    pub(super) fn end(self: &Arc<Self>, error: Error, doing: &dyn Fn() -> String) -> Error {
        let error = self.explained(error);
        let first = self.fail(error.clone(), ABORT_WAIT);
        if first || error.is_poisoned() { error } else { self.refuse(doing) }
    }

    /// Ends the communicator with an error and aborts it, waiting no longer than `patience`. Returns whether this call
    /// was the first to do so. This thread calls neither the driver nor NCCL.
    pub(in crate::device) fn fail(self: &Arc<Self>, error: Error, patience: Duration) -> bool {
        let error = self.known_end.get().cloned().unwrap_or(error);
        let closed = self.is_ended() && self.failure.get().is_none();
        let first = !closed && self.failure.set(Arc::new(error.clone())).is_ok();
        self.ended.store(true, Ordering::SeqCst);
        if let Some(flight) = self.flight().filter(|_| first) {
            flight.device_has_failed(&error);
        }
        if !closed {
            // Even if another thread was first: it may not have sent the notification yet.
            self.tell(Some(&error));
        }
        self.release(patience);
        first
    }

    /// Locks the gate for a call that stops others, which NCCL permits only while no thread is inside. If a thread does
    /// not leave, the communicator is aborted.
    pub(super) fn gate_or_abort(self: &Arc<Self>, doing: &str, deadline: &Deadline) -> Result<MutexGuard<'_, Option<Arc<StreamTracker>>>> {
        lock_within(&self.gate, deadline.remaining().min(FENCE)).ok_or_else(|| {
            let what = format!("{doing}, which is blocked by a call that waits for other ranks: the communicator is aborted instead");
            self.end(Error::Aborted { doing: what, by: Peer::unknown(self.rank) }, &|| doing.to_owned())
        })
    }

    /// Whether both communicators have been given back to NCCL.
    fn is_given_back(&self) -> bool {
        self.data.load(Ordering::Acquire).is_null() && self.control.load(Ordering::Acquire).is_null()
    }

    /// Makes a call on the control communicator, on a separate thread, and waits for its end. A timeout ends the
    /// communicator, and so does an error unless it is harmless. The gate is held.
    pub(super) fn direct<T: Send + 'static>(
        self: &Arc<Self>,
        doing: String,
        deadline: &Deadline,
        work: impl FnOnce(&'static Library, ncclComm_t) -> std::result::Result<T, Refusal> + Send + 'static,
    ) -> Result<T> {
        let (inner, words, until) = (Arc::clone(self), doing.clone(), deadline.clone());
        let run = move |answer: &dyn Fn(Attempted<T>)| {
            let Some(_turn) = lock_within(&inner.control_turn, until.remaining()) else {
                return answer(Err(inner.timeout(words, until.elapsed()).into()));
            };
            let outcome = inner.under_control(&words, &until, work);
            let failure = outcome.as_ref().err().filter(|failed| !failed.harmless);
            failure.iter().for_each(|failed| inner.tell(Some(&failed.error)));
            let failed = failure.is_some();
            answer(outcome);
            if failed {
                // Work that may be in progress belongs to this thread.
                inner.abort_control();
            }
        };
        match control::apart(deadline, run).map_err(|error| Error::io(format!("{doing}: starting a thread"), error))? {
            Some(Ok(done)) => Ok(done),
            Some(Err(Failed { error, harmless: true })) => Err(error),
            Some(Err(Failed { error, .. })) => Err(self.end(error, &|| doing.clone())),
            None => Err(self.expire(&|| doing.clone(), deadline.elapsed())),
        }
    }

    /// Makes a call on the control communicator, whose turn this thread has, and waits for its end.
    fn under_control<T>(
        &self,
        doing: &str,
        deadline: &Deadline,
        work: impl FnOnce(&'static Library, ncclComm_t) -> std::result::Result<T, Refusal>,
    ) -> Attempted<T> {
        let handle = self.control.load(Ordering::Acquire);
        if handle.is_null() {
            return Err(self.refuse(&|| doing.to_owned()).into());
        }
        let refused = |refusal: Refusal| {
            let harmless = control::is_harmless(self.library, handle, &refusal);
            Failed { error: refusal.into_error(doing.to_owned()), harmless }
        };
        driver::bind(&self.context).map_err(|error| driver::cuda_error(doing, error))?;
        let done = {
            let Some(_turn) = self.device.turn(deadline.remaining()) else {
                return Err(self.timeout(doing.to_owned(), deadline.elapsed()).into());
            };
            work(self.library, handle).map_err(refused)?
        };
        control::settle(self.library, handle, doing, &|| self.why_stop(doing, deadline))?;
        Ok(done)
    }

    /// Returns the reason to give up work in progress, if there is one.
    fn why_stop(&self, doing: &str, deadline: &Deadline) -> Option<Error> {
        let doing = || doing.to_owned();
        if self.failure.get().is_some() {
            return Some(self.refuse(&doing));
        }
        let late = || deadline.has_passed().then(|| self.timeout(doing(), deadline.elapsed()));
        self.trouble(&doing, deadline.elapsed()).or_else(late)
    }

    /// Aborts the communicator, and waits no longer than `patience` for streams and threads to be released, because
    /// NCCL may not return from the abort.
    fn release(self: &Arc<Self>, patience: Duration) {
        if self.is_given_back() {
            return;
        }
        if !self.aborting.swap(true, Ordering::AcqRel) {
            self.start_abort();
        }
        let (deadline, mut back_off) = (Deadline::after(patience), BackOff::default());
        while !self.freed.load(Ordering::Acquire) && !deadline.has_passed() {
            back_off.rest();
        }
    }

    /// Aborts the communicator on another thread. This thread does so only if the timekeeper, which must not wait,
    /// cannot try again.
    pub(super) fn start_abort(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        let abort = move || inner.abort_now();
        if thread::Builder::new().name("collectives-abort".to_owned()).spawn(abort).is_err() && !watchdog::abort_later(self) {
            self.abort_now();
        }
    }

    /// Aborts both communicators. The end is already set: no thread enters them any longer, except one that is about to
    /// leave.
    fn abort_now(&self) {
        // A thread that holds the turn for long notices the end, unless it is stuck inside NCCL.
        let first = lock_within(&self.control_turn, FENCE).map(|_turn| self.abort_control());
        self.freed.fetch_or(first.is_some(), Ordering::AcqRel);
        wait_until(|| self.is_left().then_some(()));
        let data = self.data.swap(NONE, Ordering::AcqRel);
        if !data.is_null() && control::abort(self.library, data) {
            self.data_gone.store(true, Ordering::Release);
        }
        // That has also raised the flags, and threads inside leave.
        first.unwrap_or_else(|| wait_until(|| lock_within(&self.control_turn, FENCE).map(|_turn| self.abort_control())));
        self.freed.store(true, Ordering::Release);
    }

    /// Aborts the control communicator, whose turn this thread has, unless it has ended already.
    pub(super) fn abort_control(&self) {
        let handle = self.control.swap(NONE, Ordering::AcqRel);
        if !handle.is_null() && control::abort(self.library, handle) {
            self.control_gone.store(true, Ordering::Release);
        }
    }

    /// Closes both communicators, the data communicator first, on a separate thread: NCCL waits for streams, and a
    /// function that fails may leave the thread inside a group. The caller holds the gate.
    fn close(self: &Arc<Self>, deadline: &Deadline, doing: &str) -> Result<()> {
        const FINALIZE: &str = "ncclCommFinalize";
        let refused = |refusal: Refusal| refusal.into_error(doing.to_owned());
        driver::bind(&self.context).map_err(|error| driver::cuda_error(doing, error))?;
        {
            let Some(guard) = self.begin_call(deadline.remaining()) else { return Err(self.refuse(&|| doing.to_owned())) };
            let raw = guard.raw();
            // SAFETY: the handle is valid under the guard, and the gate keeps all others from using it.
            let answer = unsafe { self.library.ncclCommFinalize(raw.handle) };
            nccl::check(self.library, raw.handle, FINALIZE, answer).map_err(refused)?;
        }
        // All streams have completed, so it is known now whether anything ended calls there.
        if let Some(error) = self.told(&|| doing.to_owned(), deadline.elapsed()) {
            return Err(error);
        }
        if self.ended.swap(true, Ordering::SeqCst) {
            return Err(self.interruption(&|| doing.to_owned()));
        }
        // An abort may come meanwhile; it finds no data communicator, and releases this thread if it hangs. If this
        // call fails, the thread may be left inside a group; another thread then aborts the control communicator.
        self.destroy(&self.data, &self.data_gone).map_err(refused)?;
        let Some(_turn) = lock_within(&self.control_turn, deadline.remaining()) else {
            return Err(self.timeout(doing.to_owned(), deadline.elapsed()));
        };
        let finalized = self.under_control(doing, deadline, |library, handle| {
            // SAFETY: the handle is valid, lent by `under_control`, and the turn keeps all others from using it.
            let answer = unsafe { library.ncclCommFinalize(handle) };
            nccl::check(library, handle, FINALIZE, answer).map(|_| ())
        });
        if let Err(failed) = finalized {
            // The data communicator is at rest: no rank is misled.
            self.abort_control();
            return Err(failed.error);
        }
        self.destroy(&self.control, &self.control_gone).map_err(refused)
    }

    /// Frees a communicator that is at rest, for which NCCL needs no other rank, and notes that it is gone. Called on a
    /// thread that makes no other NCCL call after a failure.
    fn destroy(&self, place: &AtomicPtr<ncclComm>, gone: &AtomicBool) -> std::result::Result<(), Refusal> {
        let handle = place.swap(NONE, Ordering::AcqRel);
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: the handle was taken out of where others find it (the swap), and no thread is inside: the data
        // communicator's gate and the control communicator's turn are held. This is its last use.
        let answer = unsafe { self.library.ncclCommDestroy(handle) };
        nccl::check(self.library, NONE, "ncclCommDestroy", answer)?;
        gone.store(true, Ordering::Release);
        Ok(())
    }

    /// Closes a dropped communicator once the graphs that hold its calls are gone: until then the graphs may be
    /// launched, and the communicator is watched.
    fn close_behind_graphs(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        let wait = move || {
            let mut back_off = BackOff::default();
            while inner.live_graphs() > 0 && !inner.is_ended() {
                back_off.rest();
            }
            let deadline = Deadline::after(COMMUNICATOR_DROP_WAIT);
            let doing = format!("closing the communicator of rank {} of {}", inner.rank, inner.world_size);
            // A registration may be dropped at the same time, and that is another call.
            let Some(_gate) = lock_within(&inner.gate, deadline.remaining()) else {
                inner.fail(inner.timeout(doing, deadline.elapsed()), ABORT_WAIT);
                return;
            };
            if let Err(error) = inner.close(&deadline, &doing) {
                inner.fail(error, ABORT_WAIT);
            }
        };
        if thread::Builder::new().name("collectives-nccl".to_owned()).spawn(wait).is_err() {
            crate::base::event::error!(
                rank = self.rank,
                "a communicator was dropped before its captured graphs, and no thread could be started to close it after the graphs: the \
                 communicator is leaked"
            );
        }
    }
}

/// Waits, on a thread that no other thread waits for.
fn wait_until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let mut back_off = BackOff::default();
    loop {
        match look() {
            Some(seen) => return seen,
            None => back_off.rest(),
        }
    }
}
