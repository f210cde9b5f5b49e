//! How a communicator ends: closed by all ranks together, or aborted by one.

use std::sync::{Arc, Weak};

use crate::base::ticket_lock::NoTurn;
use crate::base::tuning::ticket_lock::ABORTING;
use crate::communicator::Communicator;
use crate::communicator::progress::ProgressEngine;
#[cfg(feature = "cuda")]
use crate::device::NcclComm;
use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::host::abort_reason::AbortReason;
use crate::host::backend::HostBackend;
use crate::host::health::{Health, forked};
use crate::observe::LIFE;

/// Ends a communicator from any thread; see [`Communicator::abort_handle`].
#[derive(Debug, Clone)]
pub struct AbortHandle {
    rank: usize,
    // Not held: an observer that has this handle is itself held by what it leads to, and a communicator that is gone is not to be ended.
    health: Weak<Health>,
    recorder: Weak<Flight>,
    progress: Weak<ProgressEngine>,
    #[cfg(feature = "cuda")]
    device: Weak<NcclComm>,
}

impl AbortHandle {
    /// Ends the communicator: a call that is under way here returns `Aborted` soon, as do those of its peers that wait for this
    /// rank, and later calls are refused. Where none is under way here, the peers hear of it when this rank makes its next call or
    /// drops the communicator. Idempotent; does nothing once the communicator is gone, nor in a forked child.
    pub fn abort(&self) {
        let Some(health) = self.health.upgrade().filter(|health| !health.is_foreign()) else { return };
        if let (None, Some(recorder)) = (health.abort_reason(), self.recorder.upgrade()) {
            crate::base::event::info!(target: LIFE, communicator = recorder.name(), rank = self.rank, "aborted");
        }
        health.end(AbortReason::Aborted { by: self.rank as u32 });
        if let Some(progress) = self.progress.upgrade() {
            progress.announce_end();
        }
        #[cfg(feature = "cuda")]
        if let Some(device) = self.device.upgrade() {
            device.abort();
        }
    }
}

impl Communicator {
    /// A handle that any thread can use to end this communicator while a call is under way.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let mut comms = Communicator::local(2)?;
    /// let (comm, abort) = (comms.remove(0), comms[0].abort_handle()); // of rank 1, which makes no call
    /// let waiting = std::thread::spawn(move || comm.barrier().unwrap_err());
    /// abort.abort();
    /// drop(comms);
    /// println!("{}", waiting.join().unwrap());
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        let shared = &self.core.shared;
        AbortHandle {
            rank: shared.rank,
            health: Arc::downgrade(&shared.health),
            recorder: Arc::downgrade(&shared.recorder),
            progress: Arc::downgrade(&shared.progress),
            #[cfg(feature = "cuda")]
            device: self.backend("abort_handle").map_or_else(|_| Weak::new(), |backend| Arc::downgrade(backend.comm())),
        }
    }

    /// Ends the communicator at once, on this rank and on its peers, without waiting for anyone. Idempotent.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) {
        self.abort_handle().abort();
        // Another thread may be in a call, which ends now, and tells the peers as well.
        let _ = self.core.shared.backend.with(ABORTING, HostBackend::propagate);
    }

    /// Waits until every rank has come this far and all started calls have ended, then closes the communicator, for all its clones: later
    /// calls get [`Error::Closed`], messages that others wait for end.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// Communicator::run_local(2, |comm| {
    ///     let kept = comm.clone();
    ///     comm.close()?;
    ///     assert!(kept.barrier().is_err_and(|error| error.is_closed()));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::barrier`]: the communicator is closed all the same, but where this is called from within a call of it, or its turn
    /// does not come within the timeout, and where CUDA graphs are alive that hold device calls of it (`InvalidArgument`: drop them first). `Closed` where it
    /// was closed before.
    #[doc(alias("ncclCommFinalize", "destroy_process_group"))]
    pub fn close(&self) -> Result<()> {
        let shared = &self.core.shared;
        if shared.health.is_foreign() {
            return Err(forked("close".to_owned()));
        }
        if shared.backend.is_inside() {
            return Err(self.no_turn("close", NoTurn::Inside));
        }
        crate::base::event::debug!(target: LIFE, communicator = shared.recorder.name(), rank = self.rank(), "closing");
        let closed = {
            #[cfg(feature = "cuda")]
            let _turn = self.device_turn("close")?;
            self.composite("close", || self.close_in_turn())
        };
        // Without the turn: what was started behind it ends now, refused, and callbacks may wait for a turn. A store may be the program's, and so its
        // drop.
        if shared.health.is_closed() {
            self.core.finish();
            self.keep_store(None);
        }
        closed
    }

    /// Closes while no other thread's collective runs; those that come later are refused.
    fn close_in_turn(&self) -> Result<()> {
        let shared = &self.core.shared;
        if shared.health.is_closed() {
            return Err(Error::Closed { call: "close".to_owned() });
        }
        #[cfg(feature = "cuda")]
        self.refuse_live_graphs()?;
        #[cfg(feature = "cuda")]
        let device = self.close_device();
        let closed = self.barrier().map_err(|error| error.part_of("close", self.rank()));
        #[cfg(feature = "cuda")]
        let closed = device.and(closed);
        shared.write_unwritten();
        shared.progress.close();
        let _ = self.with_backend(HostBackend::close);
        closed
    }
}
