//! The host plane of one communicator: decides the route of each call and runs it.
//!
//! Three routes: inside one host, over shared memory alone; between ranks that share no host, over links by a plan; and
//! mixed, where the ranks of a host first agree (and reduce) in shared memory, then the hosts exchange, then each host shares.

mod connector;
mod facts;
mod flat;
mod founding;
mod island;
mod job;
mod links;
mod mixed;
mod topology;

use std::sync::Arc;

use crate::call::{Call, Kind};
use crate::deadline::Deadline;
use crate::error::{self, Error, Peer};
use crate::host::engine::Engine;
use crate::host::health::Health;
use crate::host::notice::{Notice, Stop};
use crate::host::scratch::Scratch;
use crate::host::shm::Group;

use flat::Chooser;
use links::PlaneLinks;
use topology::Topology;

pub(crate) use connector::MessageConnector;
pub(crate) use founding::Founding;
pub(crate) use job::{Job, Layout, Operands};

/// The host plane. Used by one thread at a time.
pub(crate) struct HostPlane {
    rank: usize,
    peers: Arc<[Peer]>,
    health: Arc<Health>,
    topology: Topology,
    /// The shared memory of this host's ranks, where there are several.
    group: Option<Group>,
    links: PlaneLinks,
    engine: Engine,
    chooser: Chooser,
    /// The how-manieth collective is next.
    sequence: u64,
    /// The number of a barrier whose deadline passed inside one host: the next barrier takes it up again.
    unfinished_barrier: Option<u64>,
    /// Memory for what a host has reduced before hosts exchange it.
    scratch: Scratch,
    /// The error that ended the communicator.
    cause: Option<Arc<Error>>,
}

/// A plane in the midst of a call: where a panic (in a custom op) leaves it half done, the communicator ends and the peers are told.
struct Running<'a>(&'a mut HostPlane);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let Self(plane) = self;
        let notice = Notice::Failed { rank: plane.rank as u32 };
        plane.health.end(notice);
        let error = notice.to_error("a custom op that panicked", &Deadline::after(std::time::Duration::ZERO), &plane.peers);
        plane.cause.get_or_insert_with(|| Arc::new(error));
        plane.tell();
    }
}

impl HostPlane {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Every rank's host and process, by rank.
    pub(crate) fn peers(&self) -> Arc<[Peer]> {
        Arc::clone(&self.peers)
    }

    pub(crate) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }

    /// How calls are routed and, between hosts, done, in words.
    pub(crate) fn explain(&self) -> String {
        let hosts = self.topology.host_count();
        match (self.topology.is_one_island(), self.topology.is_scattered()) {
            _ if self.peers.len() == 1 => "one rank: results are copies".to_owned(),
            (true, _) => format!("{} ranks of one host: shared memory", self.peers.len()),
            (_, true) => format!("between {hosts} hosts with one rank each, over TCP:\n{}", self.chooser.explain(hosts)),
            _ => format!("shared memory inside {hosts} hosts; between them, over TCP:\n{}", self.chooser.explain(hosts)),
        }
    }

    /// This rank's place on its host by identity, and how many ranks the host has.
    pub(crate) fn local(&self) -> (usize, usize) {
        (self.topology.local(), self.topology.island().len())
    }

    /// Runs one collective.
    #[inline]
    pub(crate) fn run(&mut self, job: &Job, deadline: &Deadline) -> error::Result<()> {
        if self.health.notice().is_some() {
            return Err(self.refuse(job, deadline));
        }
        let call = Call { sequence: self.number(job.call.kind), ..job.call };
        let running = Running(self);
        let routed = running.0.route(job, &call, deadline);
        // There was no panic.
        std::mem::forget(running);
        match routed {
            Ok(()) => Ok(()),
            Err(stop) => Err(self.end(&stop, &call, deadline)),
        }
    }

    /// The number of a call of this kind.
    #[inline]
    fn number(&mut self, kind: Kind) -> u64 {
        if let Some(number) = self.unfinished_barrier.take()
            && kind == Kind::Barrier
        {
            return number;
        }
        self.sequence += 1;
        self.sequence - 1
    }

    /// Which way a call goes.
    #[inline]
    fn route(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Stop> {
        if self.peers.len() == 1 {
            job.run_alone(self.rank);
            return Ok(());
        }
        match &self.group {
            Some(_) if self.topology.is_one_island() => self.run_on_island(job, call, deadline),
            _ if self.topology.is_scattered() => self.run_flat(job, call, deadline),
            _ => self.run_mixed(job, call, deadline),
        }
    }

    /// Ends the communicator: every peer that can be reached is told, and later calls are refused.
    #[cold]
    fn end(&mut self, stop: &Stop, call: &Call, deadline: &Deadline) -> Error {
        let error = stop.to_error(&call.to_string(), deadline, &self.peers);
        if call.kind == Kind::Barrier && self.topology.is_one_island() && error.is_timeout() && self.health.notice().is_none() {
            // Everyone will still come to this step of the shared memory, so nothing is lost.
            self.unfinished_barrier = Some(call.sequence);
            return error;
        }
        tracing::debug!(rank = self.rank, %error, "the communicator is ended");
        self.health.end(stop.notice);
        self.cause.get_or_insert_with(|| Arc::new(error.clone()));
        self.tell();
        error
    }

    /// Passes the end of the communicator on to everyone who can be reached.
    fn tell(&mut self) {
        let Some(notice) = self.health.notice().copied() else { return };
        if let Some(group) = &self.group {
            group.tell(&notice);
        }
        self.engine.tell(&mut self.links, &notice);
    }

    /// Tells the peers of an end that came from outside a call (`abort`).
    pub(crate) fn announce_end(&mut self) {
        if self.cause.is_none()
            && let Some(notice) = self.health.notice()
        {
            let error = notice.to_error("abort", &Deadline::after(std::time::Duration::ZERO), &self.peers);
            self.cause = Some(Arc::new(error));
            self.tell();
        }
    }

    /// What a call on an ended communicator gets.
    #[cold]
    fn refuse(&mut self, job: &Job, _deadline: &Deadline) -> Error {
        self.announce_end();
        let call = job.call.kind.name().to_owned();
        let cause = self.cause.get_or_insert_with(|| Arc::new(Error::argument("collectives", "the communicator is ended")));
        Error::Poisoned { call, cause: Arc::clone(cause) }
    }
}

impl Drop for HostPlane {
    fn drop(&mut self) {
        self.announce_end();
        self.links.leave(&mut self.engine);
    }
}
