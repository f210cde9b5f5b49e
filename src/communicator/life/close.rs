//! The end of a communicator: closed by all ranks together, or aborted by one.

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
    // Weak: an observer that owns this handle is itself owned by these objects, and a dropped communicator needs no
    // end.
    health: Weak<Health>,
    recorder: Weak<Flight>,
    progress: Weak<ProgressEngine>,
    #[cfg(feature = "cuda")]
    device: Weak<NcclComm>,
}

impl AbortHandle {
    /// Ends the communicator. A call that is under way on this rank soon returns `Aborted`, and so do calls of peers
    /// that wait for this rank. Later calls are refused. If no call is under way on this rank, the peers learn of the
    /// end when this rank makes its next call or drops the communicator. Does nothing after the first time, in a forked
    /// child, or after the communicator was dropped.
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
    /// Returns a handle that any thread can use to end this communicator while a call is under way.
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

    /// Ends the communicator on this rank and on its peers, without waiting for them. Does nothing after the first
    /// time.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) {
        self.abort_handle().abort();
        // Another thread may be in a call. That call ends now, and notifies the peers as well.
        let _ = self.core.shared.backend.with(ABORTING, HostBackend::propagate);
    }

    /// Waits until every rank has called `close` and all background calls have ended, and then closes the communicator
    /// for all its clones. Later calls return [`Error::Closed`]. If another thread still waits in a call for a message,
    /// that call also returns `Error::Closed`.
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
    /// The errors of [`Communicator::barrier`], and `Closed` if the communicator was closed before. The communicator is
    /// closed even if `close` returns an error, except in these cases:
    /// - `close` was called from within a call of this communicator.
    /// - `close` did not get its turn within the timeout.
    /// - CUDA graphs still contain device calls of this communicator. Drop the graphs first. (The error is
    ///   `InvalidArgument`.)
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
            // Without the check of threads: two threads may close at the same time, and one of them gets `Closed`.
            self.turn("close").and_then(|_turn| self.close_in_turn())
        };
        // Outside of the turn: calls that were started behind it are refused now, and their callbacks may wait for a
        // turn. Dropping a store may run the program's code.
        if shared.health.is_closed() {
            self.core.finish();
            self.core.lanes.clear();
            self.keep_store(None);
        }
        closed
    }

    /// Closes while no other thread's collective runs; later ones are refused.
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
