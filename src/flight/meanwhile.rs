//! Finds the other calls in which a process waited while a deadline passed. If two ranks or threads use two
//! communicators in different orders, they wait for each other: the error of one call then names the other call.
//!
//! This runs only when a deadline has passed. It reads the last records of each ring, because a call that hangs is
//! among them. That costs some microseconds per communicator.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Timeline;
use super::living::living;
use super::record::{Backend, in_words};
use super::ring::{Raw, Ring, Stage};
use super::{About, Flight};
use crate::base::event;
use crate::base::tuning::flight::{LOOKED_AT, MEANWHILE, SHARE};
use crate::error::Error;

/// A call of another communicator that waited at the same time.
#[derive(Debug)]
struct Waiting {
    /// The id of the call's communicator.
    id: u64,
    name: String,
    call: String,
    /// The ranks of this process that wait in the call.
    ranks: Vec<usize>,
    nanoseconds: u64,
}

impl Waiting {
    /// Describes the call: `all_reduce(sum, f32, count 4) number 0 of communicator world/0 from rank 0 (as rank 1)
    /// for 2.000 s`.
    fn in_words(mut self) -> String {
        self.ranks.sort_unstable();
        let ranks: Vec<String> = self.ranks.iter().map(ToString::to_string).collect();
        let who = if ranks.len() == 1 { "rank" } else { "ranks" };
        let seconds = Duration::from_nanos(self.nanoseconds).as_secs_f64();
        format!("{} of communicator {} (as {who} {}) for {seconds:.3} s", self.call, self.name, ranks.join(", "))
    }
}

/// The time during which a call waited without success, in nanoseconds since 1970.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
}

impl Flight {
    /// Adds to a timeout error the calls in which this process waited meanwhile. Returns any other error unchanged.
    #[cold]
    pub(crate) fn with_meanwhile(&self, mut error: Error) -> Error {
        if let Error::Timeout { elapsed, meanwhile, .. } = &mut error
            && self.is_on()
            && !elapsed.is_zero()
        {
            *meanwhile = self.meanwhile(*elapsed);
        }
        error
    }

    fn meanwhile(&self, elapsed: Duration) -> Vec<String> {
        let Some(own) = self.about.get() else { return Vec::new() };
        let line = Timeline::new();
        let end = line.now();
        let span = Span { start: end.saturating_sub(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)), end };
        let flights = living();
        let mut found: Vec<Waiting> = Vec::new();
        for (flight, about) in
            flights.iter().filter_map(|flight| Some((flight, flight.about.get()?))).filter(|(_, about)| about.id != own.id)
        {
            flight.add_waiting(about, &line, span, &mut found);
        }
        forget(flights);
        found.sort_by_key(|waiting| std::cmp::Reverse(waiting.nanoseconds));
        let more = found.len().saturating_sub(MEANWHILE);
        let mut words: Vec<String> = found.into_iter().take(MEANWHILE).map(Waiting::in_words).collect();
        words.extend((more > 0).then(|| format!("{more} more calls")));
        words
    }

    /// Adds the calls of this communicator that waited for a considerable part of the time.
    fn add_waiting(&self, about: &About, line: &Timeline, span: Span, found: &mut Vec<Waiting>) {
        let rings = [(Some(&self.collectives), Backend::Host), (self.messages.get(), Backend::Host), (self.device.get(), Backend::Device)];
        for (ring, backend) in rings {
            let Some((nanoseconds, raw)) = ring.and_then(|ring| longest(ring, line, span)) else { continue };
            let Some(call) = in_words(backend, raw.what) else { continue };
            match found.iter_mut().find(|waiting| (waiting.id, &waiting.call) == (about.id, &call)) {
                Some(known) => {
                    known.ranks.push(about.rank);
                    known.nanoseconds = known.nanoseconds.max(nanoseconds);
                }
                None => found.push(Waiting { id: about.id, name: about.name.clone(), call, ranks: vec![about.rank], nanoseconds }),
            }
        }
    }
}

/// Returns the record of a ring that waited longest, and how long. A call that has failed counts until it failed,
/// because one of two deadlines passes first.
fn longest(ring: &Ring, line: &Timeline, span: Span) -> Option<(u64, Raw)> {
    let waited = |raw: &Raw| {
        let end = if raw.stage == Stage::Failed { line.nanoseconds(raw.finished)? } else { span.end };
        let waited = end.checked_sub(line.nanoseconds(raw.started)?.max(span.start))?;
        (raw.stage != Stage::Finished && waited >= (span.end - span.start) / SHARE).then_some(waited)
    };
    let records = ring.read_last(LOOKED_AT).into_iter();
    records.filter_map(|raw| Some((waited(&raw)?, raw))).max_by_key(|(waited, raw)| (*waited, std::cmp::Reverse(raw.id)))
}

/// Drops recorders. Called only when no lock is held that the program's code might need.
fn forget(flights: Vec<Arc<Flight>>) {
    event::tell("the destructor of records", move || drop(flights));
}

#[cfg(test)]
mod tests {
    use super::super::clock::Clock;
    use super::*;

    #[test]
    fn what_waited_for_a_good_part_of_the_time_is_found_and_nothing_else() {
        let ring = Ring::new(8);
        let begun = Clock::choose().ticks();
        let line = Timeline::new();
        let at = line.nanoseconds(begun).unwrap();
        let quick = ring.begin([1; 4], begun, Stage::Started);
        ring.end(quick, Stage::Finished, begun);
        let span = |before, after| Span { start: at - before, end: at + after };
        assert!(longest(&ring, &line, span(0, 1000)).is_none(), "it went well");
        let failed = ring.begin([2; 4], begun, Stage::Started);
        ring.end(failed, Stage::Failed, begun);
        assert!(longest(&ring, &line, span(10, 1000)).is_none(), "it failed at once");
        for number in 3..5 {
            ring.begin([number; 4], begun, Stage::Started);
        }
        let found = |span| longest(&ring, &line, span).map(|(waited, raw)| (waited, raw.what[0]));
        assert_eq!(found(span(900, 100)), Some((100, 3)), "of two the first");
        assert_eq!(found(span(901, 99)), None, "less than a tenth of the time");
        assert_eq!(found(Span { start: at + 50, end: at + 100 }), Some((50, 3)), "it came before");
    }
}
