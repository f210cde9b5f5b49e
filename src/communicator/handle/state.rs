//! What the threads of a communicator have in common.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::deadline::{packed, unpacked};
use crate::base::ticket_lock::{NoTurn, TicketLock};
use crate::communicator::handle::kept_store::KeptStore;
use crate::communicator::progress::ProgressEngine;
use crate::communicator::recovery::RecoveryGroup;
use crate::config::Config;
use crate::error::{Error, Peer};
use crate::flight::{self, Flight};
use crate::host::abort_reason::AbortReason;
use crate::host::backend::{HostBackend, MessageConnector};
use crate::host::health::{Health, forked};
#[cfg(feature = "cuda")]
use crate::observe::Observers;
use crate::observe::TraceLog;

/// What the caller, the background threads and abort handles share.
pub(in crate::communicator) struct Shared {
    pub(in crate::communicator) rank: usize,
    pub(in crate::communicator) peers: Arc<[Peer]>,
    /// This rank's number among the ranks of its host, and how many they are.
    pub(in crate::communicator) local: (usize, usize),
    pub(in crate::communicator) config: Config,
    /// Whether it has ended, and why.
    pub(in crate::communicator) health: Arc<Health>,
    /// What its calls are recorded in.
    pub(in crate::communicator) recorder: Arc<Flight>,
    /// Who is told of its device calls. The host backend and the progress engine have copies.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) observers: Observers,
    pub(in crate::communicator) backend: TicketLock<HostBackend>,
    pub(in crate::communicator) progress: Arc<ProgressEngine>,
    /// The address on which communicators split from this one listen.
    pub(in crate::communicator) listen: IpAddr,
    /// A random number that no other communicator has.
    pub(in crate::communicator) id: [u8; 16],
    /// Where its ranks find each other should it fail.
    pub(in crate::communicator) recovery: RecoveryGroup,
    /// By rank, the number in the job.
    pub(in crate::communicator) world_ranks: Arc<[usize]>,
    /// The log of this rank, which communicators hand on to those that are made of them. Written with the last of them; so nothing that
    /// may outlive them, as handles do, holds it.
    pub(in crate::communicator) trace: Option<Arc<TraceLog>>,
    /// The job's store, where it is kept, until the communicator is closed.
    pub(in crate::communicator) store: Mutex<Option<Arc<KeptStore>>>,
    /// The longest timeout that was ever set, packed.
    longest_timeout: AtomicU64,
}

impl Shared {
    /// The numbers in the job of some ranks.
    pub(in crate::communicator) fn world_ranks_of(&self, members: &[usize]) -> Arc<[usize]> {
        members.iter().map(|member| self.world_ranks[*member]).collect()
    }

    /// Of a backend whose observers are known, and what its messages travel on.
    pub(in crate::communicator) fn new(
        backend: HostBackend,
        connector: MessageConnector,
        config: Config,
        listen: IpAddr,
        recovery: RecoveryGroup,
        world_ranks: Arc<[usize]>,
        trace: Option<Arc<TraceLog>>,
    ) -> Self {
        let longest_timeout = AtomicU64::new(packed(config.timeout));
        Self {
            rank: backend.rank(),
            peers: backend.peers(),
            local: backend.local(),
            health: backend.health(),
            recorder: backend.recorder(),
            #[cfg(feature = "cuda")]
            observers: backend.observers(),
            id: backend.id(),
            progress: Arc::new(ProgressEngine::new(&backend, connector)),
            backend: TicketLock::new(backend),
            config,
            listen,
            recovery,
            world_ranks,
            trace,
            store: Mutex::new(None),
            longest_timeout,
        }
    }

    /// The longest timeout that a call of this communicator may have.
    pub(in crate::communicator) fn longest_timeout(&self) -> Duration {
        unpacked(self.longest_timeout.load(Ordering::Relaxed))
    }

    /// Calls may have this timeout from now on.
    pub(in crate::communicator) fn allow_timeout(&self, timeout: Duration) {
        let timeout = packed(timeout);
        if self.longest_timeout.load(Ordering::Relaxed) < timeout {
            self.longest_timeout.fetch_max(timeout, Ordering::Relaxed);
        }
    }

    /// The collective that is under way, in words, where one is on record.
    pub(in crate::communicator) fn under_way(&self) -> Option<String> {
        let records = self.recorder.records();
        let call = records.iter().rev().find(|record| record.sequence.is_some() && record.state == flight::State::Started)?;
        Some(format!("{} number {}", call.kind, call.sequence?))
    }

    /// Why a call did not get its turn within `limit`, behind what is found to be under way.
    #[cold]
    pub(in crate::communicator) fn no_turn(
        &self,
        call: &'static str,
        why: NoTurn,
        limit: Duration,
        under_way: impl FnOnce() -> Option<String>,
    ) -> Error {
        match why {
            NoTurn::Forked => forked(call.to_owned()),
            NoTurn::Inside => Error::argument(call, "called from within a call of the same communicator"),
            NoTurn::Late => {
                let before = under_way().unwrap_or_else(|| "calls".to_owned());
                let doing = format!("{call}, which has not begun: waiting for its turn behind {before}, called before");
                let late = Error::Timeout { doing, elapsed: limit, missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() };
                self.recorder.with_meanwhile(late)
            }
        }
    }

    /// After a collective that failed: where that ended the communicator, peers that wait for messages hear of it too.
    #[cold]
    pub(in crate::communicator) fn announce_end(&self) {
        if self.health.abort_reason().is_some() {
            self.progress.announce_end();
        }
    }

    /// After a call that failed: the peers hear of it, and the records are written where that was asked for.
    #[cold]
    pub(in crate::communicator) fn after_failure(&self, error: &Error) {
        self.announce_end();
        self.recorder.after_error(error);
    }

    /// Where peers ended the communicator and no call here has heard of it, writes the records now, while they are there.
    pub(in crate::communicator) fn write_unwritten(&self) {
        let by_trouble = matches!(
            self.health.abort_reason(),
            Some(
                AbortReason::Mismatch { .. }
                    | AbortReason::Lost { .. }
                    | AbortReason::Silent { .. }
                    | AbortReason::TimedOut { .. }
                    | AbortReason::Aborted { .. }
            )
        );
        if let Some(error) = self.health.refusal(|| "dropping the communicator".to_owned(), &self.peers).filter(|_| by_trouble) {
            self.recorder.write_after(&error);
        }
    }
}
