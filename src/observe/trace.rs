//! A log of the durations of calls, written as a file in Chrome's Trace Event Format.
//!
//! Each rank of a job has one log. A communicator that is made from another one writes to the same log, in tracks of
//! its own. Times come from the monotonic clock. This clock and the wall clock are read once at the beginning, so that
//! the logs of several ranks can be aligned.

use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::CallReport;
use crate::base::event;
use crate::base::fork::Process;
use crate::base::own_thread::is_own;
use crate::base::tuning::trace::MOST_EVENTS;
use crate::call::CallKind;
use crate::call::algorithm::Algorithm;
use crate::error::{Peer, Result};
use crate::flight::{self, Json, write_whole};

/// The value of `format` in the files.
const FORMAT: &str = "collectives trace";
const VERSION: u32 = 1;

/// The track of a trace that shows a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Track {
    Collectives,
    Messages,
    Device,
    /// Background messages. Background messages overlap other calls, so each message has its own line.
    Background,
}

/// The tracks of one communicator. The last is for background messages, each on its own line.
const LANES: [(Track, &str); 4] =
    [(Track::Collectives, "collectives"), (Track::Messages, "messages"), (Track::Device, "device"), (Track::Background, "background")];

/// One call.
#[derive(Debug, Clone)]
struct Event {
    /// Nanoseconds since the log began.
    start_ns: u64,
    /// `None` if the end was not timed.
    duration_ns: Option<u64>,
    communicator: u32,
    track: Track,
    kind: CallKind,
    sequence: Option<u64>,
    op: Option<Cow<'static, str>>,
    element: Cow<'static, str>,
    count: u64,
    bytes: Option<u64>,
    root: Option<usize>,
    peer: Option<usize>,
    tag: Option<u64>,
    algorithm: Option<Algorithm>,
    error: Option<String>,
    /// Whether a thread of this crate ran the call in the background.
    is_background: bool,
}

/// A communicator whose calls are in the log.
#[derive(Debug, Clone)]
struct Admitted {
    name: String,
    /// The ranks of its members in the job, in the order of their ranks in the communicator.
    world_ranks: Arc<[usize]>,
}

#[derive(Debug, Clone, Default)]
struct Kept {
    events: VecDeque<Event>,
    dropped: u64,
    communicators: Vec<Admitted>,
}

/// The log of one rank.
#[derive(Debug)]
pub(crate) struct TraceLog {
    /// The id of the first communicator, which names the file.
    id: u64,
    rank: usize,
    world_size: usize,
    me: Peer,
    began: Instant,
    /// The same moment, in nanoseconds since 1970.
    began_ns: u64,
    folder: Option<PathBuf>,
    /// The process that keeps the log. A process forked from it writes nothing.
    process: Process,
    kept: Mutex<Kept>,
}

impl TraceLog {
    /// Begins a log that is written to `folder` when it is dropped.
    pub(crate) fn new(id: u64, (rank, world_size): (usize, usize), me: Peer, folder: Option<PathBuf>) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (began, began_ns) = (Instant::now(), nanoseconds(since_1970));
        Self { id, rank, world_size, me, began, began_ns, folder, process: Process::this(), kept: Mutex::default() }
    }

    /// Makes a log from the records of a flight recorder, with the times that it recorded.
    pub(crate) fn of_records(id: u64, ranks: (usize, usize), me: Peer, name: &str, records: &[flight::Record]) -> Self {
        let mut log = Self::new(id, ranks, me, None);
        log.began_ns = records.iter().filter_map(|record| record.started_ns).min().unwrap_or(log.began_ns);
        let communicator = log.admit(name, (0..ranks.1).collect());
        let events = records.iter().filter_map(|record| Event::of_record(record, communicator, log.began_ns));
        log.kept().events.extend(events);
        log
    }

    fn kept(&self) -> event::Locked<'_, Kept> {
        event::lock(&self.kept)
    }

    /// Adds a communicator and returns its number.
    pub(crate) fn admit(&self, name: &str, world_ranks: Arc<[usize]>) -> u32 {
        let mut kept = self.kept();
        kept.communicators.push(Admitted { name: name.to_owned(), world_ranks });
        kept.communicators.len() as u32 - 1
    }

    /// Returns a copy of the log, so that no call waits while the file is written. Returns an empty one in a forked
    /// process, where a thread of the parent may have held the lock.
    fn copy(&self) -> Kept {
        if self.process.is_foreign() { Kept::default() } else { self.kept().clone() }
    }

    /// Adds a call that has ended.
    pub(crate) fn add(&self, communicator: u32, track: Track, began: Instant, report: &CallReport<'_>) {
        if self.process.is_foreign() {
            return;
        }
        let start_ns = nanoseconds(began.saturating_duration_since(self.began));
        let event = Event::of_report(report, communicator, track, start_ns);
        let mut kept = self.kept();
        if kept.events.len() == MOST_EVENTS {
            kept.events.pop_front();
            kept.dropped += 1;
        }
        kept.events.push_back(event);
    }

    /// Writes the log into a folder, completely or not at all, and returns the path of the file.
    pub(crate) fn write(&self, folder: &Path) -> Result<PathBuf> {
        let name = format!("trace-{:016x}-rank{}.json", self.id, self.rank);
        write_whole(folder, &name, &self.to_json(), "the trace")
    }

    /// Returns the text of the file.
    pub(crate) fn to_json(&self) -> String {
        let kept = self.copy();
        let mut json = Json::default();
        json.object(|json| {
            json.key("displayTimeUnit").text("ns");
            json.key("otherData").object(|json| {
                json.key("format").text(FORMAT);
                json.key("version").number(VERSION);
                json.key("base_time_ns").number(self.began_ns);
                json.key("rank").number(self.rank);
                json.key("world_size").number(self.world_size);
                json.key("host_name").text(&self.me.host);
                json.key("pid").number(self.me.pid);
                json.key("pg_id").text(&format!("{:016x}", self.id));
                json.key("dropped").number(kept.dropped);
                json.key("communicators").array(&kept.communicators, |json, Admitted { name, world_ranks }| {
                    json.object(|json| {
                        json.key("pg_name").text(name);
                        json.key("world_ranks").array(world_ranks.iter(), |json, rank| json.number(rank));
                    });
                });
            });
            let names = self.names(&kept).into_iter().map(Line::Name);
            let events = (0..).zip(&kept.events).map(|(number, event)| Line::Call(number, event));
            json.key("traceEvents").array(names.chain(events), |json, line| self.line(json, &line));
        });
        json.into_text()
    }

    /// Returns the names of the rank and its tracks, and their order.
    fn names(&self, kept: &Kept) -> Vec<Name> {
        let Peer { host, pid, .. } = &self.me;
        let process = |what, value| Name { what, thread: 0, value };
        let mut names = vec![
            process("process_name", Value::Text(format!("rank {} ({host}, pid {pid})", self.rank))),
            process("process_sort_index", Value::Number(self.rank)),
        ];
        let threads: BTreeSet<u32> = kept.events.iter().map(|event| thread(event.communicator, event.track)).collect();
        for (communicator, Admitted { name, .. }) in (0..).zip(&kept.communicators) {
            for (track, what) in LANES {
                let thread = thread(communicator, track);
                if threads.contains(&thread) {
                    names.push(Name { what: "thread_name", thread, value: Value::Text(format!("{name}: {what}")) });
                    names.push(Name { what: "thread_sort_index", thread, value: Value::Number(thread as usize) });
                }
            }
        }
        names
    }

    fn line(&self, json: &mut Json, line: &Line<'_>) {
        match line {
            Line::Name(Name { what, thread, value }) => json.object(|json| {
                json.key("ph").text("M");
                json.key("name").text(what);
                json.key("pid").number(self.rank);
                json.key("tid").number(thread);
                json.key("args").object(|json| match value {
                    Value::Text(text) => json.key("name").text(text),
                    Value::Number(number) => json.key("sort_index").number(number),
                });
            }),
            Line::Call(_, event @ Event { duration_ns: None, .. }) => self.event(json, event, "i", event.start_ns, |json| {
                json.key("s").text("t");
                json.key("args").object(|json| event.arguments(json));
            }),
            Line::Call(_, event @ Event { duration_ns: Some(duration), track, .. }) if *track != Track::Background => {
                self.event(json, event, "X", event.start_ns, |json| {
                    json.key("dur").number(Microseconds(*duration));
                    json.key("args").object(|json| event.arguments(json));
                });
            }
            Line::Call(number, event) => {
                self.event(json, event, "b", event.start_ns, |json| {
                    json.key("id").number(number);
                    json.key("args").object(|json| event.arguments(json));
                });
                let end = event.start_ns + event.duration_ns.unwrap_or_default();
                self.event(json, event, "e", end, |json| json.key("id").number(number));
            }
        }
    }

    /// Writes the keys that all phases of events have in common.
    fn event(&self, json: &mut Json, event: &Event, phase: &str, at_ns: u64, more: impl FnOnce(&mut Json)) {
        json.object(|json| {
            json.key("ph").text(phase);
            json.key("name").text(event.kind.name());
            json.key("cat").text(match event.track {
                Track::Collectives => "collective",
                Track::Messages | Track::Background => "message",
                Track::Device => "device",
            });
            json.key("pid").number(self.rank);
            json.key("tid").number(thread(event.communicator, event.track));
            json.key("ts").number(Microseconds(at_ns));
            more(json);
        });
    }
}

impl Drop for TraceLog {
    fn drop(&mut self) {
        let Some(folder) = self.folder.as_deref().filter(|_| !self.process.is_foreign()) else { return };
        match self.write(folder) {
            Ok(path) => event::info!(target: super::LIFE, rank = self.rank, path = %path.display(), "the trace is written"),
            Err(error) => {
                let (rank, line) = (self.rank, format!("rank {}: the trace could not be written: {error}", self.rank));
                event::tell_aloud(Some(line), move || event::warn!(target: super::LIFE, rank, %error, "the trace could not be written"));
            }
        }
    }
}

/// A line of the file.
enum Line<'a> {
    Name(Name),
    Call(usize, &'a Event),
}

struct Name {
    what: &'static str,
    thread: u32,
    value: Value,
}

enum Value {
    Text(String),
    Number(usize),
}

/// Returns the number of a track.
fn thread(communicator: u32, track: Track) -> u32 {
    let place = LANES.iter().position(|(other, _)| *other == track).unwrap_or_default();
    communicator * LANES.len() as u32 + place as u32 + 1
}

/// Nanoseconds, written as the format's microseconds, without loss.
struct Microseconds(u64);

impl fmt::Display for Microseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Event {
    fn of_report(report: &CallReport<'_>, communicator: u32, track: Track, start_ns: u64) -> Self {
        Self {
            start_ns,
            duration_ns: Some(nanoseconds(report.elapsed)),
            communicator,
            track,
            kind: report.kind,
            sequence: report.sequence,
            op: report.op.clone(),
            element: report.element.clone(),
            count: report.count,
            bytes: Some(report.bytes),
            root: report.root,
            peer: report.peer,
            tag: report.tag,
            algorithm: report.algorithm,
            error: report.error.map(ToString::to_string),
            is_background: is_own() || track == Track::Background,
        }
    }

    /// Returns `None` if the call's start was not timed, or if it has not started.
    fn of_record(record: &flight::Record, communicator: u32, began_ns: u64) -> Option<Self> {
        let started = record.started_ns.filter(|_| record.backend == flight::Backend::Device || record.state != flight::State::Queued)?;
        let start_ns = started.saturating_sub(began_ns);
        Some(Self {
            start_ns,
            duration_ns: record.finished_ns.map(|finished| finished.saturating_sub(started)),
            communicator,
            track: match (record.backend, record.sequence) {
                (flight::Backend::Device, _) => Track::Device,
                (flight::Backend::Host, Some(_)) => Track::Collectives,
                (flight::Backend::Host, None) => Track::Background,
            },
            kind: record.kind,
            sequence: record.sequence,
            op: record.op.clone().map(Cow::Owned),
            element: Cow::Owned(record.element.clone()),
            count: record.count,
            bytes: None,
            root: record.root,
            peer: record.peer,
            tag: record.tag,
            algorithm: None,
            error: record.error.as_ref().map(ToString::to_string),
            is_background: false,
        })
    }

    fn arguments(&self, json: &mut Json) {
        let numbers = [
            ("sequence", self.sequence),
            ("count", Some(self.count)),
            ("bytes", self.bytes),
            ("root", self.root.map(|root| root as u64)),
            ("peer", self.peer.map(|peer| peer as u64)),
            ("tag", self.tag),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                json.key(name).number(number);
            }
        }
        let words = [
            ("op", self.op.as_deref()),
            ("dtype", Some(&*self.element)),
            ("algorithm", self.algorithm.map(Algorithm::name)),
            ("error", self.error.as_deref()),
        ];
        for (name, word) in words {
            if let Some(word) = word {
                json.key(name).text(word);
            }
        }
        if self.is_background {
            json.key("background").boolean(true);
        }
    }
}
