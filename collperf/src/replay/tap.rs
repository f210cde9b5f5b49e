//! Times the calls of a replay as a trace does: by the reports of the library.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use collectives::Communicator;
use collectives::observe::CallReport;

use super::recording::Kind;
use super::script::Script;
use super::shape::Shape;
use crate::failure::Failure;

/// How long reports of background messages may take to arrive after the messages.
const PATIENCE: Duration = Duration::from_secs(10);

/// The calls whose reports come in the order in which they were made: the collectives of a communicator, or the messages
/// with the same ends and tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stream {
    Collectives { group: usize },
    Messages { group: usize, kind: Kind, peer: usize, tag: u64 },
}

/// A reported call.
#[derive(Debug, Clone, Copy)]
struct Seen {
    kind: Kind,
    count: u64,
    ns: u64,
}

#[derive(Debug, Default)]
struct State {
    is_on: bool,
    /// The communicator whose name the next report shows.
    asked: Option<usize>,
    groups: HashMap<String, usize>,
    seen: HashMap<Stream, Vec<Seen>>,
    /// The number of reports.
    count: usize,
}

/// The observer of a rank.
#[derive(Debug, Default)]
pub(super) struct Tap(Mutex<State>);

impl Tap {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns the name of a communicator by a barrier.
    pub(super) fn learn(&self, group: usize, comm: &Communicator) -> Result<(), Failure> {
        self.state().asked = Some(group);
        comm.barrier()?;
        self.state().asked = None;
        Ok(())
    }

    /// Begins or stops to keep reports.
    pub(super) fn turn(&self, on: bool) {
        self.state().is_on = on;
    }

    /// Receives a report.
    pub(super) fn receive(&self, report: &CallReport<'_>) {
        let mut state = self.state();
        if let Some(group) = state.asked {
            state.groups.insert(report.communicator.to_owned(), group);
        }
        if !state.is_on {
            return;
        }
        let Some(group) = state.groups.get(report.communicator).copied() else { return };
        let kind = Kind::of(report.kind);
        let stream = match (kind.is_message(), report.peer) {
            (true, peer) => Stream::Messages { group, kind, peer: peer.unwrap_or(usize::MAX), tag: report.tag.unwrap_or(0) },
            (false, _) => Stream::Collectives { group },
        };
        let ns = u64::try_from(report.elapsed.as_nanos()).unwrap_or(u64::MAX);
        state.seen.entry(stream).or_default().push(Seen { kind, count: report.count, ns });
        state.count += 1;
    }

    /// Waits until this many calls were reported.
    pub(super) fn wait_for(&self, count: usize) -> Result<(), Failure> {
        let began = Instant::now();
        while self.state().count < count {
            if began.elapsed() > PATIENCE {
                let seen = self.state().count;
                return Err(Failure::internal(format!("the replay made {count} calls, but the library reported only {seen}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Returns the time of each step of each repetition, in nanoseconds. Fails if other calls were reported than those of
    /// the script.
    pub(super) fn times(&self, script: &Script, repetitions: usize) -> Result<Vec<u64>, Failure> {
        let state = self.state();
        let mut next: HashMap<Stream, usize> = HashMap::new();
        let steps = (0..repetitions).flat_map(|_| &script.steps).enumerate();
        steps
            .map(|(number, step)| {
                let shape = &script.shapes[step.shape];
                let stream = stream(shape);
                let place = next.entry(stream).or_default();
                let seen = state.seen.get(&stream).and_then(|list| list.get(*place)).filter(|seen| seen.is_of(shape));
                *place += 1;
                let missing = || Failure::internal(format!("call {number} of the replay, {}, was not reported as such", shape.kind));
                seen.map(|seen| seen.ns).ok_or_else(missing)
            })
            .collect()
    }
}

impl Seen {
    fn is_of(&self, shape: &Shape) -> bool {
        self.kind == shape.kind && shape.count().is_none_or(|count| count == self.count)
    }
}

fn stream(shape: &Shape) -> Stream {
    let Shape { group, kind, peer, tag, .. } = *shape;
    if kind.is_message() { Stream::Messages { group, kind, peer, tag } } else { Stream::Collectives { group } }
}
