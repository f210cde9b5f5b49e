//! Makes a new communicator of the remaining ranks.
//!
//! # Design
//!
//! The store of the start may have died with rank 0. So every rank of a job has a *recovery listener* (`recovery.rs`):
//! a port at which it listens from the start, and at which it serves nothing before a shrink. A refused connection
//! means that the process is gone. An accepted connection means that the process is alive. If there is no answer, the
//! process may be gone or alive.
//!
//! The lowest survivor leads. The leader turns its recovery listener into a store, and opens a round there. The others
//! join the round, and report which ranks they had given up. The leader waits for every rank that it has no reason to
//! consider gone, then publishes the members. These connect over the leader's store, as at the start of a job. If a
//! rank dies meanwhile, even the leader, the round fails for all, and another begins. A leader steps back if it finds a
//! lower rank leading.
//!
//! - **Stopped and unreachable ranks** cannot be distinguished from slow ones. The failed communicator gives hints: if
//!   others gave up waiting for a rank, the leader waits for that rank for only one second. The hint may be wrong,
//!   because a third rank may have delayed this rank. So the rank is accepted if it joins in time. If it joins after
//!   the round has closed, it gets `LeftBehind`, even if it wakes up much later and would lead: the recovery listeners
//!   of the ranks that continued stay open and report this.
//! - **The ranks never split.** Each member reports at its own recovery listener that it has continued. A rank that is
//!   about to close a round reports this intention before it looks at the others' recovery listeners. But it may be
//!   stopped right after it has looked, and the others may give up waiting for it. So before `shrink` returns, each
//!   member reports that it continues, and looks once more at the recovery listeners of all non-members. A member
//!   repeats both steps if the look took too long. If ranks cannot be reached, only the larger part of the ranks
//!   continues. Ranks that are known to be dead do not count. Of two equal halves, the half with the lowest rank
//!   continues. A host that loses its power counts as unreachable, so of two hosts the second cannot continue without
//!   the first.
//! - **A death leaves no living rank behind.** If a rank dies while the members connect, some are connected and others are
//!   not. So the members vote at the leader's store, and continue only if all have connected (`protocol/completion.rs`). If
//!   the leader dies during the vote, a member that does not know the decision keeps its connected communicator, and begins
//!   another round. It continues in the kept communicator if it finds that another member has done so.
//! - **Ranks that do not answer hold up the others once**, not once each: a rank probes and visits many ranks at the same
//!   time.
//! - **This is tested, not only argued**: a trait (`protocol.rs`) contains everything that a shrink needs from its
//!   environment. The tests simulate this environment: a clock, and deaths, sleeps and network cuts in an order drawn
//!   from a seed.
//! - **Assumption**: a refused connection means that a process is gone. If a firewall cuts hosts off and refuses
//!   connections to them, both sides continue. A forked child without `exec` keeps its parent's recovery listener, so a
//!   dead parent looks alive until the others have finished waiting for it. A stopped rank that wakes after all the
//!   others have ended finds no rank, and continues alone. So does a late rank if the ranks that left it behind are
//!   stopped, or if they are unreachable and not the larger part.
//! - Splits of a communicator share its recovery listeners. Keys contain the failed communicator's random number.

pub(super) mod protocol;
mod status;
#[cfg(test)]
pub(super) mod tests;

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
use crate::communicator::recovery::{Probe, at_once};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::{Peer, Result};
use crate::host::abort_reason::AbortReason;
use crate::host::health::forked;
use crate::observe::LIFE;
use crate::rendezvous::Store;
use protocol::{Given, GroupSetup, Shrinking, Shrunk, Unmet, Visited, World, read};

impl Communicator {
    /// Makes a new communicator of the remaining ranks, in their old order, and numbered from 0 without gaps. Call
    /// `shrink` after a lost peer, a timeout or an abort has ended this communicator. Every remaining rank must call
    /// it. If this communicator has not ended yet, `shrink` ends it. Peers that are inside a call then get `Aborted`,
    /// and should also call `shrink`.
    ///
    /// `shrink` immediately leaves out ranks whose process has ended, and ranks that have closed this communicator. It
    /// waits one second for a rank whose lateness ended this communicator, and half the [`timeout`](Self::timeout) for
    /// any other rank. A rank whose process ends during this wait is left out too. If the ranks are cut off from each
    /// other, for example by a broken network, only the larger part of the ranks continues. Of two equal halves, the
    /// half with the lowest rank continues. `shrink` needs neither rank 0 nor the store at which the job met.
    ///
    /// The new communicator has the same settings, and a device backend on the same GPU if this one had a device
    /// backend. Buffers from [`alloc`](Self::alloc) still belong to this communicator. Cost: about a dozen requests
    /// to a store by each rank, and then as much as the start of a job.
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
    /// - `LeftBehind` if the others continued without this rank.
    /// - `Timeout` if the remaining ranks did not agree.
    /// - `Unsupported` if this rank could not listen when the job began.
    /// - The errors that joining a job can return (see [`Communicator::from_env`]).
    #[doc(alias("ncclCommShrink", "MPIX_Comm_shrink", "shrink_group"))]
    pub fn shrink(&self) -> Result<Self> {
        if self.core.shared.health.is_foreign() {
            return Err(forked("shrink".to_owned()));
        }
        match self.shrink_during_admission(None)? {
            Shrunk::Into(comm) => Ok(comm),
            Shrunk::Grown(error) => Err(error),
        }
    }

    /// Shrinks this communicator. If `unmet` is given, an admission has made it, and its ranks have not met yet.
    pub(super) fn shrink_during_admission(&self, unmet: Option<Unmet>) -> Result<Shrunk<Self>> {
        // A rank takes part once; its other threads find that it already has.
        let shrunk = self.core.shrinking.with(self.timeout(), |()| self.shrink_host(unmet));
        let shrunk = shrunk.unwrap_or_else(|why| Err(self.no_turn("shrink", why)))?;
        #[cfg(feature = "cuda")]
        let shrunk = match shrunk {
            Shrunk::Into(comm) => Shrunk::Into(self.with_device_of_this(comm)?),
            Shrunk::Grown(error) => Shrunk::Grown(error),
        };
        Ok(shrunk)
    }

    /// Publishes that this rank continues in the communicator that an admission made.
    ///
    /// # Errors
    ///
    /// `Io` if this rank's recovery listener does not answer.
    pub(super) fn publish_grown(&self) -> Result<()> {
        self.shrinking(Given::default()).publish_grown()
    }

    /// Finds out whether the other ranks continued without this one before it published that.
    ///
    /// # Errors
    ///
    /// `LeftBehind` if they did.
    pub(super) fn look_after_grown(&self) -> Result<()> {
        self.shrinking(Given::default()).look_after_grown()
    }

    /// Shrinks without devices.
    fn shrink_host(&self, unmet: Option<Unmet>) -> Result<Shrunk<Self>> {
        crate::base::event::info!(target: LIFE, communicator = self.core.shared.recorder.name(), rank = self.rank(), "shrinking");
        self.abort();
        self.shrinking(Given { unmet, ..self.given_up() }).run()
    }

    fn shrinking(&self, given: Given) -> Shrinking<'_, Self> {
        Shrinking::new(self, self.rank(), self.shrink_prefix(), self.timeout(), given)
    }

    /// Returns the prefix of the keys of a shrink of this communicator.
    pub(super) fn shrink_prefix(&self) -> String {
        self.core.shared.id.iter().fold("shrink/".to_owned(), |text, byte| format!("{text}{byte:02x}"))
    }

    /// Returns the ranks that were reported as missing when this communicator ended.
    fn given_up(&self) -> Given {
        let health = &self.core.shared.health;
        let mut doubts: BTreeSet<usize> = health.late_ranks().into_iter().collect();
        let mut left = BTreeSet::new();
        match health.abort_reason() {
            Some(AbortReason::TimedOut { missing, .. }) => drop(doubts.insert(*missing as usize)),
            Some(AbortReason::Lost { rank, .. } | AbortReason::Silent { rank, .. }) => drop(doubts.insert(*rank as usize)),
            Some(AbortReason::Left { rank }) => drop(left.insert(*rank as usize)),
            _ => {}
        }
        #[cfg(feature = "cuda")]
        doubts.extend(self.late_on_device());
        // Others may have named this rank itself.
        doubts.remove(&self.rank());
        left.remove(&self.rank());
        Given { doubts, left, unmet: None }
    }

    /// Returns the ranks that a deadline of the device backend was waiting for.
    #[cfg(feature = "cuda")]
    fn late_on_device(&self) -> Vec<usize> {
        match self.device().and_then(|device| device.failure()) {
            Some(Error::Timeout { missing, .. }) => missing.iter().map(|peer| peer.rank).collect(),
            _ => Vec::new(),
        }
    }

    /// Gives a shrunk communicator the GPU of this one. If a rank is lost meanwhile, the new communicator is shrunk
    /// once more: the others have already left the old one behind.
    #[cfg(feature = "cuda")]
    fn with_device_of_this(&self, mut comm: Self) -> Result<Self> {
        let Some(device) = self.device() else { return Ok(comm) };
        loop {
            let request = DeviceRequest { choice: DeviceChoice::Context(Arc::clone(device.context())), required: false };
            match comm.connect_device(&request, &Deadline::after(comm.timeout())) {
                Ok(()) => return Ok(comm),
                Err(error) if error.is_peer_lost() || matches!(error.root(), Error::Aborted { .. }) => comm = comm.shrink()?,
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

    fn probe_all(&self, ranks: &[usize]) -> Vec<Probe> {
        self.core.shared.recovery.probe_all(ranks)
    }

    fn visit_all(&self, ranks: &[usize], key: &str) -> Vec<Option<Visited>> {
        at_once(ranks, |rank| {
            let store: Arc<dyn Store> = self.core.shared.recovery.visit(*rank, SERVICE.min(self.timeout() / 4))?;
            Some((read(&*store, key).ok()??, store))
        })
    }

    fn host(&self) -> Result<Arc<dyn Store>> {
        self.core.shared.recovery.listeners.host("shrink", self.timeout())
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
