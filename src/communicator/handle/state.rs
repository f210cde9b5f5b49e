//! The state that the threads of a communicator share.

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

/// The state that the caller, the background threads and abort handles share.
pub(in crate::communicator) struct Shared {
    pub(in crate::communicator) rank: usize,
    pub(in crate::communicator) peers: Arc<[Peer]>,
    /// This rank's number among the ranks of its host, and the number of those ranks.
    pub(in crate::communicator) local: (usize, usize),
    pub(in crate::communicator) config: Config,
    /// Whether the communicator has ended, and why.
    pub(in crate::communicator) health: Arc<Health>,
    /// The record of its calls.
    pub(in crate::communicator) recorder: Arc<Flight>,
    /// The observers of its device calls. The host backend and the progress engine have copies.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) observers: Observers,
    pub(in crate::communicator) backend: TicketLock<HostBackend>,
    pub(in crate::communicator) progress: Arc<ProgressEngine>,
    /// The address on which communicators split from this one listen.
    pub(in crate::communicator) listen: IpAddr,
    /// A random number that no other communicator has.
    pub(in crate::communicator) id: [u8; 16],
    /// The means by which the communicator's ranks find each other after a failure.
    pub(in crate::communicator) recovery: RecoveryGroup,
    /// Each rank's number in the job.
    pub(in crate::communicator) world_ranks: Arc<[usize]>,
    /// This rank's log, shared with the communicators that are made from this one. The log is written when the last of
    /// these communicators is dropped, so nothing that may outlive them (such as handles) may hold it.
    pub(in crate::communicator) trace: Option<Arc<TraceLog>>,
    /// The job's store, if it is kept, until the communicator is closed.
    pub(in crate::communicator) store: Mutex<Option<Arc<KeptStore>>>,
    /// The longest timeout that was ever set, packed.
    longest_timeout: AtomicU64,
}

impl Shared {
    /// Returns some ranks' numbers in the job.
    pub(in crate::communicator) fn world_ranks_of(&self, members: &[usize]) -> Arc<[usize]> {
        members.iter().map(|member| self.world_ranks[*member]).collect()
    }

    /// Makes the state of a backend whose observers are set, and of the connector that its messages use.
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

    /// Returns the longest timeout that a call of this communicator may have.
    pub(in crate::communicator) fn longest_timeout(&self) -> Duration {
        unpacked(self.longest_timeout.load(Ordering::Relaxed))
    }

    /// Allows this timeout for calls from now on.
    pub(in crate::communicator) fn allow_timeout(&self, timeout: Duration) {
        let timeout = packed(timeout);
        if self.longest_timeout.load(Ordering::Relaxed) < timeout {
            self.longest_timeout.fetch_max(timeout, Ordering::Relaxed);
        }
    }

    /// Describes the collective that is under way, if one is recorded.
    pub(in crate::communicator) fn under_way(&self) -> Option<String> {
        let records = self.recorder.records();
        let call = records.iter().rev().find(|record| record.sequence.is_some() && record.state == flight::State::Started)?;
        Some(format!("{} number {}", call.kind, call.sequence?))
    }

    /// Returns the error of a call that did not get its turn within `limit`, behind the call that `under_way` finds.
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
                let before = under_way().unwrap_or_else(|| "its name is not recorded".to_owned());
                let doing = format!("{call}, which has not begun: waiting for its turn behind an earlier call ({before})");
                let late = Error::Timeout { doing, elapsed: limit, missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() };
                self.recorder.with_meanwhile(late)
            }
        }
    }

    /// Notifies peers that wait for messages, if a failed collective has ended the communicator.
    #[cold]
    pub(in crate::communicator) fn announce_end(&self) {
        if self.health.abort_reason().is_some() {
            self.progress.announce_end();
        }
    }

    /// Notifies the peers after a failed call, and writes the records if that is enabled.
    #[cold]
    pub(in crate::communicator) fn after_failure(&self, error: &Error) {
        self.announce_end();
        self.recorder.after_error(error);
    }

    /// Writes the records, while they still exist, if peers have ended the communicator and no call here has reported
    /// that.
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
