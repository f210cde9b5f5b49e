//! A new communicator of those who are left.
//!
//! The survivors meet behind the recovery listener of the lowest of them (see `recovery`). It leads: it opens a round, waits until everyone has
//! come whom it has no reason to take for gone, says who the members are, and they join at its store as ranks join at the start of a
//! job. Whoever dies meanwhile, the leader among them, fails the round for all, and there is another. Who lives is found out by
//! probing. Who is stopped, or cut off, is guessed at by what the failed communicator knew: a rank that others gave up waiting for gets
//! a short while. That may have been another one's fault, and ranks may know different things, so whoever comes in time is taken, and a
//! leader steps back where it finds a lower rank leading after all.
//!
//! # Design
//!
//! `Communicator::shrink` makes a new communicator of whoever is left (`communicator/shrink/`, `communicator/recovery.rs`). The store of the start
//! may have died with rank 0, so every rank of a job has a *recovery listener*: a port at which it listens from the start and serves nothing. A refused
//! connection then means that a process is gone, an accepted one that it is not, and silence that nobody knows. The lowest survivor opens
//! its recovery listener, which makes it a store; the others come there, say whom they had given up, wait for the list of members, and found the new
//! communicator as at the start of a job. Whoever dies meanwhile, the leader too, fails the round, and there is another.
//!
//! - **Who is stopped or cut off** cannot be told from who is slow. A rank that ended the old communicator by being late is waited for during a
//!   second; it may be innocent (held up by another), so it is taken when it comes. Once the others are complete it gets `LeftBehind`, also when it
//!   wakes up much later and would lead: the recovery listeners of those who went on stay open and say so.
//! - **Nobody splits.** Each member says at its own recovery listener that it has gone on, and a rank that is about to close a round says so before it looks at the
//!   others' recovery listeners. It may have been stopped right after it looked, and given up; so whoever is through with the setup says so and looks once
//!   more at the recovery listeners of all that are not members, as often as it has been held up meanwhile, before `shrink` returns. Where ranks cannot be reached at all, only the larger part of what is not known to be dead goes on, of two halves the one
//!   with the lowest rank. A host that loses its power counts as cut off, so of two hosts the second cannot go on without the first.
//! - **Explored, not only argued**: what a shrink asks of the world is a trait (`communicator/shrink/protocol.rs`), and the tests' world has its own
//!   clock, deaths, sleeps and cuts, in an order drawn from a seed.
//! - **What this trusts**: that a refused connection means a process that is gone. A firewall that refuses for hosts it cuts off makes both sides go
//!   on; a forked child without `exec` keeps its parent's recovery listener, so a dead parent looks alive until it has been waited for. A sleeper that wakes after all
//!   the others have ended finds nobody, and goes on alone; so does one that comes when those who left it behind, being late, are cut off or stopped.
//! - Splits of a communicator share the recovery listeners of the one they came from; keys carry the failed communicator's random number.

mod protocol;
pub(super) mod recovery;
mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use super::bootstrap::{Origin, connect_over_store};
#[cfg(feature = "cuda")]
use super::device::{DeviceChoice, DeviceRequest};
#[cfg(feature = "cuda")]
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::host::abort_reason::AbortReason;
use crate::observe::LIFE;
use crate::rendezvous::Store;
use crate::tuning::recovery::SERVICE;
use protocol::{Given, GroupSetup, Shrinking, World};
use recovery::{Probe, RecoveryGroup};

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
    /// The new communicator has this one's settings and, where this one had it, a device plane on the same GPU. Buffers from
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
            let reason = "this process was forked from the one that made the communicator".to_owned();
            return Err(Error::Unsupported { what: "shrink".to_owned(), reason });
        }
        let comm = self.shrink_host()?;
        #[cfg(feature = "cuda")]
        let comm = self.with_device_of_this(comm)?;
        Ok(comm)
    }

    /// The same, without devices.
    fn shrink_host(&self) -> Result<Self> {
        crate::event::info!(target: LIFE, communicator = self.core.shared.recorder.name(), rank = self.rank(), "shrinking");
        self.abort();
        let world = Ranks { comm: self, recovery: self.core.shared.recovery.clone() };
        let prefix = self.core.shared.id.iter().fold("shrink/".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        Shrinking::new(&world, self.rank(), prefix, self.timeout(), self.given_up()).run()
    }

    /// What the end of this communicator tells of who is missing.
    fn given_up(&self) -> Given {
        let health = &self.core.shared.health;
        let mut doubts: BTreeSet<usize> = health.late_ranks().into_iter().collect();
        let mut left = BTreeSet::new();
        match health.abort_reason() {
            Some(AbortReason::TimedOut { missing, .. }) => drop(doubts.insert(*missing as usize)),
            Some(AbortReason::Lost { rank }) => drop(doubts.insert(*rank as usize)),
            Some(AbortReason::Left { rank }) => drop(left.insert(*rank as usize)),
            _ => {}
        }
        #[cfg(feature = "cuda")]
        doubts.extend(self.late_on_device());
        // Who is named itself is here all the same.
        doubts.remove(&self.rank());
        left.remove(&self.rank());
        Given { doubts, left }
    }

    /// Whom a deadline of the device plane was waiting for.
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
struct Ranks<'a> {
    comm: &'a Communicator,
    recovery: RecoveryGroup,
}

impl Ranks<'_> {
    fn patience(&self) -> Duration {
        SERVICE.min(self.comm.timeout() / 4)
    }
}

impl World for Ranks<'_> {
    type Connected = Communicator;

    fn peers(&self) -> &[Peer] {
        self.comm.peers()
    }

    fn probe(&self, rank: usize) -> Probe {
        self.recovery.listeners.probe(self.recovery.places[rank])
    }

    fn visit(&self, rank: usize) -> Option<Arc<dyn Store>> {
        let store = self.recovery.listeners.visit(self.recovery.places[rank], self.patience())?;
        Some(store)
    }

    fn host(&self) -> Result<Arc<dyn Store>> {
        self.recovery.listeners.host()
    }

    fn pause(&self, limit: Duration) {
        std::thread::sleep(limit);
    }

    fn connect(&self, store: Arc<dyn Store>, setup: &GroupSetup<'_>) -> Result<Communicator> {
        let shared = &self.comm.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.comm.timeout();
        let name = format!("{}, shrunk", shared.recorder.name());
        let recovery = self.recovery.of(setup.members);
        let watch = setup.leads.then(|| recovery.watch());
        let origin = Origin::Communicator { recovery, name, trace: shared.trace.clone() };
        connect_over_store(store, (setup.place, setup.members.len()), config, shared.listen, origin, watch, setup.deadline)
    }
}
