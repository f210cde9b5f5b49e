//! The output of a recorder: typed records on request, and a file when a call fails.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::clock::Timeline;
use super::record::{Backend, Record, State};
use super::ring::{Raw, Ring, Stage};
use super::{Flight, Json, Kept, Slowly, file};
use crate::base::tuning::flight::LOOKED_AT;
use crate::call::Call;
use crate::error::{Error, Result};

impl Flight {
    /// Returns all records: collectives, then messages, then device calls, each oldest first. Background calls that the
    /// worker has not begun yet come last.
    pub(crate) fn records(&self) -> Vec<Record> {
        self.records_among(|raws| raws)
    }

    /// Does the same for the records of each ring that `choose` returns.
    fn records_among(&self, choose: impl Fn(Vec<Raw>) -> Vec<Raw>) -> Vec<Record> {
        if !self.is_on() || self.is_foreign() {
            return Vec::new();
        }
        let line = Timeline::new();
        let collectives = choose(self.collectives.read());
        let slowly = self.slowly();
        let next = collectives.last().map_or(0, |raw| raw.what[0] + 1);
        let mut records = Vec::with_capacity(collectives.len() + slowly.queued.len());
        records.extend(collectives.iter().filter_map(|raw| described(raw, Kept::Collective, &line, &slowly)));
        for (ring, kept) in [(&self.messages, Kept::Message), (&self.device, Kept::Device)] {
            let raws = choose(ring.get().map_or_else(Vec::new, Ring::read));
            records.extend(raws.iter().filter_map(|raw| described(raw, kept, &line, &slowly)));
        }
        let begun = self.collectives.begun();
        let queued = slowly.queued.iter().zip(0..);
        records.extend(queued.filter_map(|((call, since), ahead)| waiting_for_its_turn(call, *since, next + ahead, begun + ahead)));
        records
    }

    /// Writes the latest records as an object, in the form of the file: the last `most` of each kind, and up to
    /// `unfinished` older calls of each kind that have not ended.
    pub(crate) fn describe(&self, json: &mut Json, most: usize, unfinished: usize) {
        let Some(about) = self.about.get() else { return };
        let records = self.records_among(|raws| latest(raws, most, unfinished));
        file::add(json, about, "asked for by collperf ps", &records);
    }

    /// Returns how long the oldest of the latest calls that have not ended has taken; zero if there is none. A device call
    /// that an ended one follows does not count, because its stream may not be followed.
    pub(crate) fn longest_wait(&self) -> Duration {
        if !self.is_on() || self.is_foreign() {
            return Duration::ZERO;
        }
        let line = Timeline::new();
        let mut open: Vec<Raw> = [Some(&self.collectives), self.messages.get()]
            .into_iter()
            .flatten()
            .flat_map(|ring| ring.read_last(LOOKED_AT))
            .filter(Raw::is_under_way)
            .collect();
        let queued = self.device.get().map_or_else(Vec::new, Ring::read);
        open.extend(queued.into_iter().rev().take_while(Raw::is_under_way));
        let waited = open.iter().filter_map(|raw| line.now().checked_sub(line.nanoseconds(raw.started)?));
        Duration::from_nanos(waited.max().unwrap_or(0))
    }

    /// Whether one of the latest calls has not ended.
    pub(crate) fn is_busy(&self) -> bool {
        let rings = [Some(&self.collectives), self.messages.get(), self.device.get()];
        rings.into_iter().flatten().any(|ring| ring.read_last(LOOKED_AT).iter().any(Raw::is_under_way))
    }

    /// Returns the communicator's name.
    pub(crate) fn name(&self) -> &str {
        self.about.get().map_or("a communicator that is being made", |about| &about.name)
    }

    /// Writes the records into a folder and returns the file.
    pub(crate) fn write(&self, folder: &Path, reason: &str) -> Result<PathBuf> {
        if self.is_foreign() {
            return Err(Error::unsupported("a flight record", "this process was forked from the process that made the calls"));
        }
        let about = self.about.get().ok_or_else(|| Error::unsupported("a flight record", "the communicator is still being made"))?;
        file::write(folder, about, reason, &self.records())
    }

    /// Reports a failed call to `tracing`; at a lower level if it was refused because the communicator had ended.
    fn tell(&self, error: &Error) {
        let (communicator, rank, result) = (self.name(), self.about.get().map(|about| about.rank), error.label());
        if error.is_poisoned() {
            crate::base::event::debug!(target: "collectives::call", communicator, rank, result, %error, "a call was refused");
        } else {
            crate::base::event::warn!(target: "collectives::call", communicator, rank, result, %error, "a call failed");
        }
    }

    /// Reports a failed call, and writes the records if required.
    #[cold]
    pub(crate) fn after_error(&self, error: &Error) {
        self.tell(error);
        self.write_after(error);
    }

    /// Writes the records if a folder is set and the error involves peers; after the communicator has ended, only once.
    pub(crate) fn write_after(&self, error: &Error) {
        let Some(folder) = self.orders.folder.as_deref().filter(|_| self.is_on() && is_about_peers(error)) else { return };
        let was_written = std::mem::replace(&mut self.slowly().has_written, true);
        if was_written && error.is_poisoned() {
            return;
        }
        match self.write(folder, &error.to_string()) {
            Ok(path) => crate::base::event::info!(path = %path.display(), "the flight record is written"),
            Err(error) => crate::base::event::warn!(%error, "the flight record could not be written"),
        }
    }
}

/// Returns the last `most` records, preceded by the newest `unfinished` of the older ones that have not ended.
fn latest(raws: Vec<Raw>, most: usize, unfinished: usize) -> Vec<Raw> {
    let (older, newest) = raws.split_at(raws.len().saturating_sub(most));
    let mut chosen: Vec<Raw> = older.iter().rev().filter(|raw| raw.is_under_way()).take(unfinished).copied().collect();
    chosen.reverse();
    chosen.extend_from_slice(newest);
    chosen
}

/// Whether an error involves other ranks, so that their records help to explain it.
fn is_about_peers(error: &Error) -> bool {
    matches!(error.root(), Error::Timeout { .. } | Error::PeerLost { .. } | Error::Mismatch { .. } | Error::Aborted { .. })
}

/// Decodes a record of a ring in full.
fn described(raw: &Raw, kept: Kept, line: &Timeline, slowly: &Slowly) -> Option<Record> {
    let backend = if kept == Kept::Device { Backend::Device } else { Backend::Host };
    let record = Record::decode(raw.id, backend, raw.what)?;
    let state = match raw.stage {
        Stage::Started => State::Started,
        Stage::Finished => State::Finished,
        Stage::Failed => State::Failed,
        Stage::Queued => State::Queued,
    };
    let failure = slowly.errors.iter().find(|failure| (failure.ring, failure.id) == (kept, raw.id));
    let is_waiting = kept == Kept::Collective && slowly.waiting == Some(raw.what[0]) && state == State::Started;
    let awaited = if is_waiting { &slowly.awaited[..] } else { &[] };
    Some(Record {
        started_ns: line.nanoseconds(raw.started),
        finished_ns: line.nanoseconds(raw.finished).filter(|_| state != State::Queued),
        state,
        error: failure.map(|failure| failure.error.clone()),
        waiting_for: awaited.iter().map(|rank| *rank as usize).collect(),
        ..record
    })
}

/// Describes a background collective that the worker has not begun, with the sequence number that it will get.
fn waiting_for_its_turn(call: &Call, since: Duration, sequence: u64, number: u64) -> Option<Record> {
    let record = Record::decode(number, Backend::Host, Call { sequence, ..*call }.record())?;
    Some(Record { state: State::Queued, started_ns: u64::try_from(since.as_nanos()).ok(), ..record })
}
