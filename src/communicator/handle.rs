//! A communicator: what it is made of, and what it tells of itself. All else that it does is in the files that name it.

#![expect(unsafe_code, reason = "the caller's side of the hand-off")]

use std::cell::{Cell, OnceCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;

use super::hand_off::CallerSide;
use super::state::Shared;
use super::worker::Worker;
use crate::call::Kind;
use crate::config::Config;
#[cfg(feature = "cuda")]
use crate::device::NcclCommunicator;
use crate::element::DType;
use crate::error::{Error, Peer};
use crate::host::health::forked;
use crate::host::plane::HostPlane;
use crate::observe::LIFE;

/// One rank of a group of processes or threads that call collectives together.
///
/// Every rank makes the same calls in the same order; ranks that do not are told so by an error that names both calls.
/// Blocking calls run on the calling thread; `start_*` calls run in the background, in the order in which they were
/// started, and blocking collectives wait for them. Messages ([`send`](Self::send), [`recv`](Self::recv) …) are independent
/// of collectives.
///
/// A communicator can be moved to another thread and not be shared: give each thread its own with [`split`](Self::split), or
/// put it behind a mutex.
///
/// After a lost peer, a mismatch, an abort or a deadline that passed inside a collective the communicator is ended: further
/// calls are refused with an error that carries the first one; [`shrink`](Self::shrink) makes a new one of the ranks that are left.
///
/// Dropping it waits a short while for started calls, tells the peers and closes its connections; see also
/// [`close`](Self::close).
pub struct Communicator {
    pub(super) core: Rc<Core>,
    /// Where device calls are queued; `None` for the device plane's own stream.
    #[cfg(feature = "cuda")]
    pub(super) stream: Option<Arc<CudaStream>>,
}

// SAFETY: the counter of `core` is not atomic, but everything else in it may be sent. The only other handles to it are those of
// `OnStream`, which cannot be sent themselves and borrow this one, so while it is moved none is in use; one that was leaked is never
// used again.
unsafe impl Send for Communicator {}

/// What a communicator is, whatever stream its calls are queued on. Dropped by the thread that drops the communicator.
pub(super) struct Core {
    pub(super) shared: Arc<Shared>,
    pub(super) caller: CallerSide,
    pub(super) worker: OnceCell<Worker>,
    pub(super) timeout: Cell<Duration>,
    /// The number of the next monitored barrier.
    pub(super) monitored: Cell<u64>,
    /// How many communicators were made from this one.
    pub(super) children: Cell<u64>,
    /// The device plane, once it was asked for, or why there is none.
    #[cfg(feature = "cuda")]
    pub(super) device: OnceCell<std::result::Result<NcclCommunicator, String>>,
}

/// Everything in a core may be sent to another thread.
const _: () = {
    const fn sendable<T: Send>() {}
    sendable::<Core>();
};

impl Communicator {
    /// Of what its threads share.
    pub(super) fn new(shared: Shared) -> Self {
        let timeout = shared.config.timeout;
        let core = Core {
            shared: Arc::new(shared),
            caller: CallerSide::default(),
            worker: OnceCell::new(),
            timeout: Cell::new(timeout),
            monitored: Cell::new(0),
            children: Cell::new(0),
            #[cfg(feature = "cuda")]
            device: OnceCell::new(),
        };
        Self {
            core: Rc::new(core),
            #[cfg(feature = "cuda")]
            stream: None,
        }
    }

    /// This process's number in the group, from 0.
    #[must_use]
    #[doc(alias = "ncclCommUserRank")]
    pub fn rank(&self) -> usize {
        self.core.shared.rank
    }

    /// How many ranks the group has.
    #[must_use]
    #[doc(alias = "ncclCommCount")]
    pub fn world_size(&self) -> usize {
        self.core.shared.peers.len()
    }

    /// This rank's number among the group's ranks on the same host, from 0, as found by host identity.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.core.shared.local.0
    }

    /// How many of the group's ranks share this host.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.core.shared.local.1
    }

    /// Every rank's host and process, indexed by rank.
    #[must_use]
    pub fn peers(&self) -> &[Peer] {
        &self.core.shared.peers
    }

    /// The settings this communicator was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core.shared.config
    }

    /// How calls of this communicator are done, in words: over shared memory, over TCP, and between hosts which collective takes which
    /// algorithm at which size (in the form that [`Config::algorithm`] understands). For people; the text may change.
    #[must_use]
    pub fn explain(&self) -> String {
        if self.core.shared.health.is_foreign() {
            return forked("explain".to_owned()).to_string();
        }
        let said = self.with_plane(|plane| plane.explain());
        said.unwrap_or_else(|| "in use by a reduction that is under way".to_owned())
    }

    /// How the collective of this name (`all_reduce`, `barrier` …, as the method without `_into`) is done on this rank, on ordinary host memory
    /// with a built-in op. `bytes`: the whole vector; where there are blocks, all of them together.
    ///
    /// Over TCP the algorithm, by its name in [`Config::algorithm`]. In shared memory the way of the data: `flags` (there is none), `mailboxes`
    /// (beside the flags), `slots` (through the ranks' areas, in steps), `shares` (the same, each rank folding its share for all), or `links` (as
    /// between hosts). `copy` on one rank, `hierarchical` between several hosts of several ranks each.
    ///
    /// `None` for names that are no collective's, while a reduction is under way that calls this, and in a forked child.
    ///
    /// ```
    /// # use collectives::{Communicator, DType};
    /// let ways = Communicator::run_local(2, |comm| Ok(comm.algorithm("all_reduce", 1 << 20, DType::F32)))?;
    /// assert_eq!(ways, [Some("shares"); 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn algorithm(&self, collective: &str, bytes: usize, dtype: DType) -> Option<&'static str> {
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == collective)?;
        if self.core.shared.health.is_foreign() {
            return None;
        }
        // SAFETY: `caller` is made with the communicator and never leaves it, so it is this hand-off's only caller's side.
        unsafe { self.core.shared.plane.as_caller(&self.core.caller, |plane| plane.algorithm(kind, bytes, dtype.size_bytes())) }
    }

    /// How long a call may wait for its peers.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.core.timeout.get()
    }

    /// Sets how long later calls may wait for their peers. Local to this rank.
    pub fn set_timeout(&self, timeout: Duration) {
        self.core.timeout.set(timeout);
    }

    /// Why the plane could not be had for a call.
    #[cold]
    pub(super) fn not_entered(&self, call: &'static str) -> Error {
        if self.core.shared.health.is_foreign() {
            return forked(call.to_owned());
        }
        Error::argument(call, "called from within a reduction of the same communicator")
    }

    /// Reaches for the host plane on this thread, after the started calls; `None` where it cannot be had.
    #[inline]
    pub(super) fn with_plane<R>(&self, work: impl FnOnce(&mut HostPlane) -> R) -> Option<R> {
        // SAFETY: a core has the only caller's side of its plane's hand-off: both are made together in `new`, and neither can be cloned. The
        // handles that share a core (`OnStream`) share that side, and are on its thread: none of them can be sent or shared.
        unsafe { self.core.shared.plane.as_caller(&self.core.caller, work) }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let worker = self.worker.take();
        if self.shared.health.is_foreign() {
            // Its thread is the parent's, and so is what the device plane has of the driver and NCCL.
            #[cfg(feature = "cuda")]
            std::mem::forget(self.device.take());
            return std::mem::forget(worker);
        }
        crate::event::debug!(target: LIFE, communicator = self.shared.recorder.name(), rank = self.shared.rank, "dropped");
        if let Some(worker) = worker {
            worker.stop(&self.shared);
        }
        self.shared.write_unwritten();
        self.shared.progress.close();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("rank", &self.rank()).field("world_size", &self.world_size()).finish_non_exhaustive()
    }
}
