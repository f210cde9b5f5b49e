//! The host backend of one communicator: decides the route of each call and runs it.
//!
//! There are three routes:
//! - Inside one host: over shared memory alone.
//! - Between ranks that share no host: over links, by a plan.
//! - Hierarchical: the ranks of a host first agree (and reduce) in shared memory, then the hosts exchange data, then
//!   each host distributes the result.
//!
//! # Agreement
//!
//! Every collective carries its call's fingerprint (sequence, kind, op, type, count, root, hash of the counts) in its
//! first message. No rank writes to the caller's destination before it has received, directly or through others, the
//! fingerprint of every rank. If the data's own route does not inform every rank about every other, the plan begins
//! with a dissemination round of empty messages, and data is already sent alongside these messages. This costs rooted
//! collectives up to log₂ n hops (none between two ranks), and makes every collective synchronising. In return, a
//! mismatch is an error on every rank and touches no buffer. If each rank knows only some of the counts, a sum over all
//! ranks (`counts.rs`) compares them first, and the data follows. This needs no more messages than the dissemination
//! round, but makes `gather_v` and `scatter_v` one hop longer.
//!
//! A rank that finds a difference ends the communicator with an *abort reason* of 80 bytes. It is written to shared
//! memory and flooded over all links, so that ranks with no link to the culprit get the same error. A rank waits 200 ms
//! before it takes a broken link for a dead peer, so that a rank that knows the cause can report it. Without this wait,
//! the end of file could arrive before the message that reports the cause.

mod counts;
mod job;
mod joined_buffers;
mod links;
mod plans;
mod routes;
mod setup;
mod topology;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::base::deadline::Deadline;
use crate::base::tuning::backend::LONG_CALL_BYTES;
use crate::call::algorithm::Algorithm;
use crate::call::{BlockLayout, Call, Collective};
use crate::error::{self, Error, Peer};
use crate::flight::{self, Flight};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::engine::Engine;
use crate::host::health::Health;
use crate::host::scratch::Scratch;
#[cfg(feature = "cuda")]
use crate::host::shm::DeviceEnd;
use crate::host::shm::{Group, Segment, Site};
use crate::observe::{Moved, Observers, Track};

use links::BackendLinks;
use plans::{Chooser, Plans};
use topology::Topology;

pub(crate) use job::{Job, Reduction};
pub(crate) use joined_buffers::Jobs;
pub(crate) use links::MessageConnector;
pub(crate) use setup::BackendSetup;
#[cfg(feature = "__internals")]
pub(crate) use setup::fuzz;

/// The host backend. Used by one thread at a time.
pub(crate) struct HostBackend {
    rank: usize,
    peers: Arc<[Peer]>,
    health: Arc<Health>,
    recorder: Arc<Flight>,
    /// Empty until the communicator is created.
    observers: Observers,
    topology: Topology,
    /// This rank's index among the ranks of its host, and the number of these ranks, whatever links they use.
    local: (usize, usize),
    /// Whether the ranks of this host outnumber the processors that they share.
    is_crowded: bool,
    /// The shared memory of this host's ranks, if there are several and they can share memory.
    group: Option<Group>,
    /// The rank that cannot share memory, and why, as text. The ranks of its host use TCP.
    unshared: Option<String>,
    links: BackendLinks,
    engine: Engine,
    /// Plans of calls over links.
    plans: Plans,
    chooser: Chooser,
    /// The number of the next collective.
    sequence: u64,
    /// The number of a barrier whose deadline passed inside one host. The next barrier continues it.
    unfinished_barrier: Option<u64>,
    /// Memory for the result of a host's reduction before the hosts exchange it.
    scratch: Scratch,
    /// Memory that joins the small buffers of one call.
    joined: Scratch,
    /// The communicator's random number.
    id: [u8; 16],
    /// The address at which each rank is reachable if the communicator fails, as that rank reported it.
    recovery_listeners: Vec<Option<SocketAddr>>,
    /// Which ranks are threads of this process.
    #[cfg(feature = "cuda")]
    same_process: Box<[bool]>,
    /// By rank: whether this process sees that rank's process under the number that the rank itself uses.
    #[cfg(feature = "cuda")]
    same_numbers: Box<[bool]>,
    /// Whether the other ranks have been notified that this rank leaves.
    has_left: bool,
}

/// A guard for a call in progress. It is dropped only if a panic (in a custom op) interrupts the call; then the
/// communicator ends.
struct Running<'a>(&'a mut HostBackend, &'a Call);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.health.end(AbortReason::Failed { rank: self.0.rank as u32 });
        let error = Error::OpPanicked { call: self.1.kind.name() };
        self.0.health.keep_cause(&error);
        self.0.recorder.fail(self.1, &error);
        self.0.propagate();
    }
}

impl HostBackend {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns every rank's host and process, by rank.
    pub(crate) fn peers(&self) -> Arc<[Peer]> {
        Arc::clone(&self.peers)
    }

    /// Returns the communicator's random number, which no other communicator has.
    pub(crate) fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Returns the address at which each rank is reachable if the communicator fails; `None` for ranks that reported
    /// none.
    pub(crate) fn recovery_listeners(&self) -> &[Option<SocketAddr>] {
        &self.recovery_listeners
    }

    pub(crate) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }

    /// Returns the recorder of the communicator's calls.
    pub(crate) fn recorder(&self) -> Arc<Flight> {
        Arc::clone(&self.recorder)
    }

    pub(crate) fn observers(&self) -> Observers {
        self.observers.clone()
    }

    /// Sets the observers that are notified of collectives.
    pub(crate) fn set_observers(&mut self, observers: Observers) {
        self.observers = observers;
    }

    /// Describes how calls are routed and which algorithms are used between hosts.
    pub(crate) fn explain(&self) -> String {
        let hosts = self.topology.host_count();
        let unshared = self.unshared.as_ref().map_or(String::new(), |why| format!(" (without shared memory: {why})"));
        let connections = match self.links.connections() {
            1 => String::new(),
            several => format!(", {several} connections to each peer"),
        };
        let payloads = self.group.as_ref().map_or(String::new(), |group| format!("\n{}", group.explain()));
        match (self.topology.is_one_host(), self.topology.is_scattered()) {
            _ if self.peers.len() == 1 => "one rank: results are copies".to_owned(),
            (true, _) => format!("{} ranks of one host: shared memory{payloads}", self.peers.len()),
            (_, true) => {
                format!("between {hosts} hosts with one rank each, over TCP{connections}{unshared}:\n{}", self.chooser.explain(hosts))
            }
            _ => {
                format!(
                    "shared memory inside {hosts} hosts; between them, over TCP{connections}{unshared}:\n{}{payloads}",
                    self.chooser.explain(hosts)
                )
            }
        }
    }

    /// Describes briefly how the ranks reach each other.
    pub(crate) fn wiring(&self) -> String {
        self.explain().lines().next().unwrap_or_default().trim_end_matches(':').to_owned()
    }

    /// Returns the algorithm of a call on `bytes` in total, for ordinary memory and a built-in op.
    pub(crate) fn algorithm(&self, kind: Collective, bytes: usize, element_bytes: usize) -> Algorithm {
        match &self.group {
            _ if self.peers.len() == 1 => Algorithm::Copy,
            Some(group) if self.topology.is_one_host() => group.way(kind, bytes, element_bytes).unwrap_or(Algorithm::Links),
            _ if self.topology.is_scattered() => self.chooser.algorithm_of_builtin(kind, bytes, element_bytes, self.peers.len()),
            _ => Algorithm::Hierarchical,
        }
    }

    /// Returns the algorithm of a job.
    fn algorithm_of(&self, job: &Job) -> Algorithm {
        let bytes = match (job.call.kind, &job.layout) {
            // Only the root has the whole vector.
            (Collective::Gather | Collective::Scatter, BlockLayout::Equal(block)) => block * self.peers.len(),
            _ => job.memory.source_len.max(job.memory.destination_len),
        };
        if self.peers.len() > 1 && self.topology.is_one_host() && job.is_too_large_to_share() {
            return Algorithm::Links;
        }
        self.algorithm(job.call.kind, bytes, job.element_bytes)
    }

    /// Returns which ranks are threads of this process, by rank.
    #[cfg(feature = "cuda")]
    pub(crate) fn same_process(&self) -> &[bool] {
        &self.same_process
    }

    /// Returns, by rank, whether this process sees that rank's process under the number that the rank itself uses.
    #[cfg(feature = "cuda")]
    pub(crate) fn same_numbers(&self) -> &[bool] {
        &self.same_numbers
    }

    /// Returns this rank's index among the ranks with its host's identity, and the number of these ranks.
    pub(crate) fn local(&self) -> (usize, usize) {
        self.local
    }

    /// Whether the ranks of this host outnumber the processors that they share.
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded
    }

    /// Returns the next window of this host's ranks; `None` if this rank shares no host, or no memory, with other
    /// ranks.
    pub(crate) fn site(&mut self) -> Option<Site> {
        self.group.as_mut().and_then(Group::site)
    }

    /// Returns the place where the ranks of this host announce that they give up on their devices; `None` if this rank
    /// shares no memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_end(&self) -> Option<DeviceEnd> {
        self.group.as_ref().map(Group::device_end)
    }

    /// Registers a window that all ranks have opened, so that collectives can use it.
    pub(crate) fn admit(&mut self, segment: &Segment) {
        if let Some(group) = &mut self.group {
            group.admit(segment);
        }
    }

    /// Runs one collective.
    #[inline]
    pub(crate) fn run(&mut self, job: &Job, deadline: &Deadline) -> error::Result<()> {
        if self.observers.watch().is_some() { self.run_watched(job, deadline) } else { self.run_unwatched(job, deadline) }
    }

    /// Runs one collective while there are observers.
    #[cold]
    #[inline(never)]
    fn run_watched(&mut self, job: &Job, deadline: &Deadline) -> error::Result<()> {
        let observers = self.observers.clone();
        let Some(watch) = observers.watch() else { return self.run_unwatched(job, deadline) };
        let unfinished = self.unfinished_barrier.filter(|_| job.call.kind == Collective::Barrier);
        let call = Call { sequence: unfinished.unwrap_or(self.sequence), ..job.call };
        let moved = Moved { bytes: job.memory.source_len.max(job.memory.destination_len), algorithm: Some(self.algorithm_of(job)) };
        let report = watch.call(&call, flight::Backend::Host, moved);
        watch.around(report, Track::Collectives, || self.run_unwatched(job, deadline))
    }

    #[inline]
    fn run_unwatched(&mut self, job: &Job, deadline: &Deadline) -> error::Result<()> {
        if let Some(refusal) = self.health.refusal(|| job.call.name().to_owned(), &self.peers) {
            self.propagate();
            return Err(refusal);
        }
        if let Some(group) = &mut self.group {
            group.forget_dropped();
        }
        let call = Call { sequence: self.number(job.call.kind), ..job.call };
        // Dropped last, even if a custom op panics. A rank that is alone gets its own elements.
        let others = self.peers.len() > 1;
        let normalised = others.then(|| job.normalised());
        let running = Running(self, &call);
        let result = running.0.route(job, &call, deadline);
        std::mem::forget(running);
        drop(normalised);
        match result {
            Ok(()) => {
                self.recorder.end(&call, self.is_long(job));
                Ok(())
            }
            Err(stop) => {
                let error = self.end(&stop, job, &call, deadline);
                self.recorder.fail(&call, &error);
                Err(error)
            }
        }
    }

    /// Whether a call takes so long that reading the clock costs nothing in comparison: it goes over links, or moves
    /// much data.
    #[inline]
    fn is_long(&self, job: &Job) -> bool {
        job.memory.source_len.max(job.memory.destination_len) >= LONG_CALL_BYTES || !self.topology.is_one_host()
    }

    /// Returns the number of a call of this kind.
    #[inline]
    fn number(&mut self, kind: Collective) -> u64 {
        if let Some(number) = self.unfinished_barrier.take()
            && kind == Collective::Barrier
        {
            return number;
        }
        self.sequence += 1;
        self.sequence - 1
    }

    /// Runs a call by its route.
    #[inline]
    fn route(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        if self.peers.len() == 1 {
            job.run_alone(self.rank);
            return Ok(());
        }
        match &self.group {
            Some(_) if self.topology.is_one_host() => self.run_intra_host(job, call, deadline),
            _ => self.run_between(job, call, deadline),
        }
    }

    /// Runs a call over links. It is recorded from its beginning, since reading the clock costs nothing in comparison.
    fn run_between(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        self.recorder.begin(call);
        if call.kind.is_pairwise() {
            return self.run_pairwise(job, call, deadline);
        }
        if self.topology.is_scattered() { self.run_inter_host(job, call, deadline) } else { self.run_hierarchical(job, call, deadline) }
    }

    /// Ends the communicator: notifies every peer that can be reached. Later calls are refused.
    #[cold]
    fn end(&mut self, stop: &Interrupted, job: &Job, call: &Call, deadline: &Deadline) -> Error {
        let own = self.health.own_failure(&stop.abort_reason, self.rank);
        let seen = stop.clone().seen_by(self.rank as u32, []);
        let error =
            own.unwrap_or_else(|| self.recorder.with_meanwhile(seen.to_error(&job.in_words(call), deadline, self.rank, &self.peers)));
        if call.kind == Collective::Barrier && self.topology.is_one_host() && error.is_timeout() && self.is_whole() {
            // All ranks will still arrive at this step of the shared memory, so nothing is lost.
            self.unfinished_barrier = Some(call.sequence);
            return error;
        }
        crate::base::event::debug!(rank = self.rank, %error, "the communicator has ended");
        self.health.end(stop.abort_reason);
        self.health.keep_cause(&error);
        self.propagate();
        error
    }

    /// Whether the communicator has not ended: neither here nor, as far as shared memory shows, on a rank of this host.
    fn is_whole(&self) -> bool {
        self.health.abort_reason().is_none() && self.group.as_ref().and_then(Group::abort_reason).is_none()
    }

    /// If the communicator has ended, passes that on to every peer that can be reached and was not notified before.
    pub(crate) fn propagate(&mut self) {
        let Some(abort_reason) = self.health.abort_reason().copied().filter(|_| !self.health.is_foreign()) else { return };
        if let Some(group) = &self.group {
            group.propagate(&abort_reason);
        }
        self.engine.propagate(&mut self.links, &abort_reason);
    }
}

impl HostBackend {
    /// Notifies the other ranks, once, that this rank leaves or why the communicator has ended. Later calls are
    /// refused.
    pub(crate) fn close(&mut self) {
        if self.health.is_foreign() || std::mem::replace(&mut self.has_left, true) {
            return;
        }
        self.propagate();
        self.links.leave(&mut self.engine);
        self.group = None;
        self.health.close();
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        self.close();
    }
}
