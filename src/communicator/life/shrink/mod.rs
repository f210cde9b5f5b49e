//! A new communicator of those who are left.
//!
//! # Design
//!
//! The store of the start may have died with rank 0. So every rank of a job has a *recovery listener* (`recovery.rs`): a port at which it
//! listens from the start and serves nothing. A refused connection means that the process is gone, an accepted one that it is not. Silence
//! says neither.
//!
//! The lowest survivor leads. It opens its recovery listener, which makes it a store, and opens a round there. The others come, and say whom
//! they had given up. The leader waits for everyone whom it has no reason to take for gone, then says who the members are. They connect over
//! its store as at the start of a job. Whoever dies meanwhile fails the round for all, the leader included, and there is another round. A
//! leader steps back where it finds a lower rank leading.
//!
//! - **Who is stopped or cut off** cannot be told from who is slow. The failed communicator gives hints: a rank that others gave up waiting for
//!   is waited for during a second. It may be innocent (held up by another), and ranks may know different things, so it is taken when it comes
//!   in time. Once the others are complete it gets `LeftBehind`, also when it wakes up much later and would lead: the recovery listeners of
//!   those who went on stay open and say so.
//! - **Nobody splits.** Each member says at its own recovery listener that it has gone on. A rank that is about to close a round says so before
//!   it looks at the others' recovery listeners. It may have been stopped right after it looked, and given up. So before `shrink` returns, each
//!   member says that it goes on, and looks once more at the recovery listeners of all that are not members; again, as often as that held it up.
//!   Where ranks cannot be reached, only the larger part of what is not known to be dead goes on, and of two halves the one with the lowest
//!   rank. A host that loses its power counts as cut off, so of two hosts the second cannot go on without the first.
//! - **Explored, not only argued**: what a shrink asks of the world is a trait (`protocol.rs`). The tests' world has its own clock, deaths, sleeps
//!   and cuts, in an order drawn from a seed.
//! - **What this trusts**: that a refused connection means a process that is gone. With a firewall that refuses for hosts it cuts off, both sides
//!   go on. A forked child without `exec` keeps its parent's recovery listener, so a dead parent looks alive until it has been waited for. A
//!   sleeper that wakes after all the others have ended finds nobody, and goes on alone. So does one that comes late, when those who left it
//!   behind are cut off or stopped.
//! - Splits of a communicator share the recovery listeners of the one they came from. Keys carry the failed communicator's random number.

mod protocol;
mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use crate::base::deadline::Deadline;
use crate::base::tuning::recovery::SERVICE;
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::device::{DeviceChoice, DeviceRequest};
use crate::communicator::life::bootstrap::{Origin, Start, connect_over_store};
use crate::communicator::recovery::Probe;
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::{Peer, Result};
use crate::host::abort_reason::AbortReason;
use crate::host::health::forked;
use crate::observe::LIFE;
use crate::rendezvous::Store;
use protocol::{Given, GroupSetup, Shrinking, World};

impl Communicator {
    /// A new communicator of the ranks that are left, in their old order and numbered from 0 without gaps; also of one that has been
    /// ended by a lost peer, a deadline or an abort. Every rank that is left calls it; so a whole communicator is ended by it, and
    /// peers that are inside a call get `Aborted` and should call it too.
    ///
    /// Ranks whose process is gone are left out at once, as are those that had closed this communicator. Those whose lateness had ended
    /// it are waited for during a second, any other rank during half the [`timeout`](Self::timeout). A rank that dies meanwhile is left
    /// out too. Where ranks cannot be reached at all, as when a network is cut, only the larger part goes on, or of two halves that with
    /// the lowest rank. It needs neither the store of the start nor rank 0.
    ///
    /// The new communicator has this one's settings and, where this one had it, a device backend on the same GPU. Buffers from
    /// [`alloc`](Self::alloc) stay with this one. Cost: some ten store requests for each rank, and what a start costs.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # let counts = Communicator::run_local(2, |comm| {
    /// let comm = comm.shrink()?; // after an error, in practice
    /// let mut x = [1_u32];
    /// comm.all_reduce(&mut x, ReduceOp::Sum)?;
    /// # Ok(x[0])
    /// # })?;
    /// # assert_eq!(counts, [2, 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `LeftBehind` where the others went on without this rank, `Timeout` where they did not come to an agreement, `Unsupported`
    /// where this rank could not listen when the job began, and those of a start.
    #[doc(alias("ncclCommShrink", "MPIX_Comm_shrink", "shrink_group"))]
    pub fn shrink(&self) -> Result<Self> {
        if self.core.shared.health.is_foreign() {
            return Err(forked("shrink".to_owned()));
        }
        // A rank takes part once: of several threads the others find that it has.
        let shrunk = self.core.shrinking.with(self.timeout(), |()| self.shrink_host());
        let comm = shrunk.unwrap_or_else(|why| Err(self.no_turn("shrink", why)))?;
        #[cfg(feature = "cuda")]
        let comm = self.with_device_of_this(comm)?;
        Ok(comm)
    }

    /// The same, without devices.
    fn shrink_host(&self) -> Result<Self> {
        crate::base::event::info!(target: LIFE, communicator = self.core.shared.recorder.name(), rank = self.rank(), "shrinking");
        self.abort();
        let prefix = self.core.shared.id.iter().fold("shrink/".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        Shrinking::new(self, self.rank(), prefix, self.timeout(), self.given_up()).run()
    }

    /// What the end of this communicator tells of who is missing.
    fn given_up(&self) -> Given {
        let health = &self.core.shared.health;
        let mut doubts: BTreeSet<usize> = health.late_ranks().into_iter().collect();
        let mut left = BTreeSet::new();
        match health.abort_reason() {
            Some(AbortReason::TimedOut { missing, .. }) => drop(doubts.insert(*missing as usize)),
            Some(AbortReason::Lost { rank } | AbortReason::Silent { rank, .. }) => drop(doubts.insert(*rank as usize)),
            Some(AbortReason::Left { rank }) => drop(left.insert(*rank as usize)),
            _ => {}
        }
        #[cfg(feature = "cuda")]
        doubts.extend(self.late_on_device());
        // Others may have named this very rank.
        doubts.remove(&self.rank());
        left.remove(&self.rank());
        Given { doubts, left }
    }

    /// Whom a deadline of the device backend was waiting for.
    #[cfg(feature = "cuda")]
    fn late_on_device(&self) -> Vec<usize> {
        match self.device().and_then(|device| device.failure()) {
            Some(Error::Timeout { missing, .. }) => missing.iter().map(|peer| peer.rank).collect(),
            _ => Vec::new(),
        }
    }

    /// Gives a shrunk communicator the GPU of this one. Where a rank is lost meanwhile, the others have gone on without this one already,
    /// so the new communicator is what is shrunk once more.
    #[cfg(feature = "cuda")]
    fn with_device_of_this(&self, mut comm: Self) -> Result<Self> {
        let Some(device) = self.device() else { return Ok(comm) };
        loop {
            let request = DeviceRequest { choice: DeviceChoice::Context(Arc::clone(device.context())), required: false };
            match comm.connect_device(&request, &Deadline::after(comm.timeout())) {
                Ok(()) => return Ok(comm),
                Err(error) if error.is_peer_lost() || matches!(error.root(), Error::Aborted { .. }) => comm = comm.shrink_host()?,
                Err(error) => return Err(error),
            }
        }
    }
}

/// The ranks of a failed communicator, behind their recovery listeners.
impl World for Communicator {
    type Connected = Self;

    fn peers(&self) -> &[Peer] {
        self.peers()
    }

    fn probe(&self, rank: usize) -> Probe {
        self.core.shared.recovery.probe(rank)
    }

    fn visit(&self, rank: usize) -> Option<Arc<dyn Store>> {
        let store = self.core.shared.recovery.visit(rank, SERVICE.min(self.timeout() / 4))?;
        Some(store)
    }

    fn host(&self) -> Result<Arc<dyn Store>> {
        self.core.shared.recovery.listeners.host(self.timeout())
    }

    fn pause(&self, limit: Duration) {
        std::thread::sleep(limit);
    }

    fn connect(&self, store: Arc<dyn Store>, setup: &GroupSetup<'_>) -> Result<Self> {
        let shared = &self.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.timeout();
        let name = format!("{}, shrunk", shared.recorder.name());
        let recovery = shared.recovery.of(setup.members);
        let watch = setup.leads.then(|| recovery.watch());
        let world_ranks = shared.world_ranks_of(setup.members);
        let origin = Origin::Communicator { recovery, world_ranks, name, trace: shared.trace.clone() };
        let start = Start { rank: setup.place, world_size: setup.members.len(), config, listen: shared.listen, origin };
        connect_over_store(store, start, watch, setup.deadline).inspect(|comm| comm.keep_store(self.kept_store()))
    }
}
