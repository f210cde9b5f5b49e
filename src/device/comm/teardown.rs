//! How communicators end: closed, revoked, aborted, or failed.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::NcclComm;
use super::lock::lock_within;
use super::state::{Inner, NONE, settle};
use crate::deadline::Deadline;
use crate::device::driver;
use crate::device::nccl::{self, Refusal};
use crate::error::{Error, Peer, Result};
use crate::tuning::device::{ABORT_WAIT, FENCE};

impl NcclComm {
    /// Ends the communicator at once: work on streams that waits for other ranks returns, its results are worth nothing. All ranks should
    /// do so. Any thread may, also while others are in a call, which then fail; doing it again does nothing.
    pub(crate) fn abort(&self) {
        let inner = self.inner();
        let by = Peer::unknown(inner.rank);
        inner.fail(Error::Aborted { doing: format!("rank {} of {}", inner.rank, inner.world_size), by }, ABORT_WAIT);
    }

    /// Stops what is in flight and refuses collectives from now on; splits, shrinks and the end remain. NCCL 2.28.7.
    pub(crate) fn revoke(&self, deadline: &Deadline) -> Result<()> {
        let inner = self.inner();
        let doing = || format!("revoking the communicator of rank {} of {}", inner.rank, inner.world_size);
        if inner.is_ended() {
            return Err(inner.refuse(&doing));
        }
        if !inner.library.has("ncclCommRevoke") {
            return Err(Error::unsupported(doing(), format!("it needs NCCL 2.28.7, and this is {}: abort instead", self.version())));
        }
        // Whoever is in a call sees this and leaves, so that the gate need not be waited for.
        inner.revoked.store(true, Ordering::Release);
        inner.inside(&doing, deadline.remaining(), |raw| {
            // SAFETY: the handle is alive, and the flags are the only ones there are.
            let answer = unsafe { raw.library.ncclCommRevoke(raw.handle, nccl_sys::NCCL_REVOKE_DEFAULT) };
            nccl::check(raw.library, raw.handle, "ncclCommRevoke", answer).map(|_| ())
        })?;
        inner.settled(&doing, deadline)
    }

    /// Waits for what is in flight, and gives everything back. All ranks do this; it may have to wait for them.
    pub(crate) fn finalize(&self, deadline: &Deadline) -> Result<()> {
        let inner = self.inner();
        let doing = || format!("closing the communicator of rank {} of {}", inner.rank, inner.world_size);
        let Some(_gate) = lock_within(&inner.gate, deadline.remaining()) else {
            return Err(inner.expire(&doing, deadline.elapsed()));
        };
        // NCCL would wait for them, also in an abort.
        let graphs = inner.live_graphs_within(&Deadline::after(deadline.remaining().min(FENCE)));
        if graphs > 0 {
            let reason = format!(
                "{graphs} captured graphs hold its calls, and NCCL keeps it for them: drop the graphs first, and what was made of them"
            );
            return Err(Error::argument("close", reason));
        }
        if !inner.revoked.load(Ordering::Acquire) {
            inner.inside(&doing, deadline.remaining(), |raw| {
                // SAFETY: the handle is alive, and the gate keeps everyone else from using it.
                let answer = unsafe { raw.library.ncclCommFinalize(raw.handle) };
                nccl::check(raw.library, raw.handle, "ncclCommFinalize", answer).map(|_| ())
            })?;
            inner.settled(&doing, deadline)?;
        }
        inner.destroy(&doing, deadline)
    }
}

impl Inner {
    /// The error of a refused call, which ends the communicator unless it is harmless.
    #[cold]
    pub(super) fn refused(self: &Arc<Self>, refusal: Refusal, doing: &dyn Fn() -> String) -> Error {
        // A communicator that does not block may keep even a wrong argument as its error, and then refuses all that follows.
        let harmless = refusal.is_harmless() && !matches!(self.state(FENCE), Some(Err(_)));
        let error = refusal.into_error(doing());
        if harmless { error } else { self.end(error, doing) }
    }

    /// Ends the communicator because a deadline passed.
    #[cold]
    pub(super) fn expire(self: &Arc<Self>, doing: &dyn Fn() -> String, elapsed: Duration) -> Error {
        self.end(self.timeout(doing(), elapsed), doing)
    }

    /// Ends the communicator with an error, and gives the one for the caller: the same, unless something else had ended it before.
    pub(super) fn end(self: &Arc<Self>, error: Error, doing: &dyn Fn() -> String) -> Error {
        let error = self.explained(error);
        let first = self.fail(error.clone(), ABORT_WAIT);
        if first || error.is_poisoned() { error } else { self.refuse(doing) }
    }

    /// Ends the communicator with an error and aborts it, waiting for no longer than `patience`. Whether it was the first to.
    pub(in crate::device) fn fail(self: &Arc<Self>, error: Error, patience: Duration) -> bool {
        let closed = self.is_ended() && self.failure.get().is_none();
        let first = !closed && self.failure.set(Arc::new(error.clone())).is_ok();
        self.ended.store(true, Ordering::Release);
        if let Some(flight) = self.flight().filter(|_| first) {
            flight.device_has_failed(&error);
        }
        self.release(patience);
        first
    }

    /// Waits for a call to end that is in progress. What fails, or does not end in time, ends the communicator.
    pub(super) fn settled(self: &Arc<Self>, doing: &dyn Fn() -> String, deadline: &Deadline) -> Result<()> {
        settle(&[self], doing, deadline, |_| false).map_err(|(_, error)| self.end(error, doing))
    }

    /// Aborts on a thread of its own, for NCCL may not come back from it.
    fn release(self: &Arc<Self>, patience: Duration) {
        if self.handle.load(Ordering::Acquire).is_null() {
            return;
        }
        let inner = Arc::clone(self);
        let (done, wait) = mpsc::channel::<()>();
        let abort = move || {
            inner.abort_now();
            drop(done);
        };
        match thread::Builder::new().name("collectives-abort".to_owned()).spawn(abort) {
            // Nothing is ever sent: the channel closes when it is over.
            Ok(_) => drop(wait.recv_timeout(patience)),
            Err(_) => self.abort_now(),
        }
    }

    fn abort_now(&self) {
        let lock = lock_within(&self.device.lock, FENCE);
        let handle = self.handle.swap(NONE, Ordering::AcqRel);
        // Without the lock: other ranks of this process may have to abort before NCCL comes back.
        drop(lock);
        if handle.is_null() {
            return;
        }
        // No context is made current: the driver may hold that up until NCCL's kernels are told to leave, which NCCL does before it asks for its
        // device itself.
        // SAFETY: whoever takes the handle out, which is done once, is its last user: others load it under the lock of the device. Where the
        // lock was not to be had, a thread has been inside NCCL for longer than a call ever takes, and abort is what brings it back.
        let answer = unsafe { self.library.ncclCommAbort(handle) };
        if matches!(answer, Ok(code) if [0, 7].contains(&code.0)) {
            self.gone.store(true, Ordering::Release);
        } else {
            crate::event::warn!(rank = self.rank, ?answer, "NCCL did not abort a communicator");
        }
    }

    /// Frees a communicator that is at rest, for which NCCL needs nobody else.
    fn destroy(self: &Arc<Self>, doing: &dyn Fn() -> String, deadline: &Deadline) -> Result<()> {
        let Some(_lock) = lock_within(&self.device.lock, deadline.remaining()) else {
            return Err(self.expire(doing, deadline.elapsed()));
        };
        self.ended.store(true, Ordering::Release);
        let handle = self.handle.swap(NONE, Ordering::AcqRel);
        if handle.is_null() {
            return Err(self.refuse(doing));
        }
        let bound = driver::bind(&self.context).map_err(|error| Refusal::driver("cuCtxSetCurrent", error));
        let destroyed = bound.and_then(|()| {
            // SAFETY: the handle was taken out above, so nobody else has it; the context is current.
            let answer = unsafe { self.library.ncclCommDestroy(handle) };
            nccl::check(self.library, NONE, "ncclCommDestroy", answer)
        });
        self.gone.store(destroyed.is_ok(), Ordering::Release);
        destroyed.map(|_| ()).map_err(|refusal| refusal.into_error(doing()))
    }
}
