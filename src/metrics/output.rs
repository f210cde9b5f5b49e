//! The file or the port of a process, and the thread that writes the file or answers at the port.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::counters::Counters;
use super::port::{self, Place};
use super::text::{Format, Group, Snapshot, to_text};
use crate::base::event;
use crate::base::fork::Process;
use crate::base::own_thread::OwnThread;
use crate::base::tuning::metrics::{EVERY, GROUPS, LOCK};
use crate::flight::{Flight, write_whole};

/// The name of a communicator, and this rank.
type Key = (String, usize);

/// What is kept of the communicators with one name in which this process has one rank.
#[derive(Debug)]
struct Entry {
    /// The newest.
    group: Group,
    counters: Arc<Counters>,
    /// The recorders of those that have not ended.
    flights: Vec<Weak<Flight>>,
}

/// The way in which the metrics leave the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Sink {
    /// A file in this folder.
    Folder(PathBuf),
    /// A port, which is this one for the first process of a host.
    Port(SocketAddr),
}

/// The metrics of this process for one sink.
#[derive(Debug)]
pub(super) struct Output {
    sink: Sink,
    process: Process,
    entries: Mutex<BTreeMap<Key, Entry>>,
    /// Held while the file is written, so that no older text replaces a newer one.
    writing: Mutex<()>,
    has_failed: AtomicBool,
    /// The communicators that have not ended.
    living: AtomicUsize,
}

/// The outputs of this process. They are never removed, so that counters never decrease.
static OUTPUTS: Mutex<Vec<Arc<Output>>> = Mutex::new(Vec::new());

/// Takes a lock that another thread of a parent process may have held at a fork, and that is then never released.
fn lock<T>(mutex: &Mutex<T>) -> Option<event::Locked<'_, T>> {
    let began = Instant::now();
    loop {
        match event::try_lock(mutex) {
            Some(locked) => return Some(locked),
            None if began.elapsed() > LOCK => return None,
            None => std::thread::yield_now(),
        }
    }
}

impl Output {
    fn new(sink: Sink) -> Arc<Self> {
        let (entries, writing) = (Mutex::default(), Mutex::default());
        Arc::new(Self { sink, process: Process::this(), entries, writing, has_failed: AtomicBool::new(false), living: AtomicUsize::new(0) })
    }

    /// Returns this process's output for a sink. The first call for a sink starts the thread.
    pub(super) fn of_process(sink: Sink, place: Place) -> Arc<Self> {
        let Some(mut outputs) = lock(&OUTPUTS) else { return Self::new(sink) };
        // A forked child has counters of its own.
        outputs.retain(|output| !output.process.is_foreign());
        if let Some(known) = outputs.iter().find(|output| output.sink == sink) {
            return Arc::clone(known);
        }
        let output = Self::new(sink);
        outputs.push(Arc::clone(&output));
        drop(outputs);
        match &output.sink {
            Sink::Folder(_) => Arc::clone(&output).keep_file(),
            Sink::Port(first) => Arc::clone(&output).serve(*first, place),
        }
        output
    }

    /// Starts the thread that writes the file. If the system refuses the thread, the file is written only when communicators
    /// end.
    fn keep_file(self: Arc<Self>) {
        let started = OwnThread::spawn("metrics".to_owned(), move || {
            loop {
                self.write();
                std::thread::park_timeout(EVERY);
            }
        });
        if let Err(error) = started {
            event::warn!(%error, "metrics are written only when communicators end, because the system refuses a thread");
        }
    }

    /// Starts the thread that answers at the port. If the system refuses the port or the thread, the job runs without.
    fn serve(self: Arc<Self>, first: SocketAddr, place: Place) {
        let started = port::listen(first, place).and_then(|listener| {
            let address = listener.local_addr()?;
            OwnThread::spawn("metrics".to_owned(), move || port::serve(&listener, || to_text(&self.snapshots(), Format::OpenMetrics)))?;
            Ok(address)
        });
        match started {
            Ok(address) => event::debug!(%address, "metrics are served"),
            Err(error) => event::warn!(%error, %first, ranks = place.count, "no metrics are served; use ports that are free"),
        }
    }

    /// Returns the counters of a communicator: those of earlier communicators with its name and rank, if there were any.
    pub(super) fn admit(&self, group: Group, flight: Weak<Flight>) -> Arc<Counters> {
        self.living.fetch_add(1, Ordering::Relaxed);
        let Some(mut entries) = lock(&self.entries) else { return Arc::default() };
        let mut key = (group.communicator.clone(), group.rank);
        let mut group = group;
        if entries.len() >= GROUPS && !entries.contains_key(&key) {
            // Names may be endless. The rest share one entry.
            "other".clone_into(&mut group.communicator);
            key = (group.communicator.clone(), group.rank);
        }
        let new = || Entry { group: group.clone(), counters: Arc::default(), flights: Vec::new() };
        let entry = entries.entry(key).or_insert_with(new);
        entry.group = group;
        entry.flights.retain(|flight| flight.strong_count() > 0);
        entry.flights.push(flight);
        Arc::clone(&entry.counters)
    }

    /// Notes that a communicator has ended, and writes the file if no other is left.
    pub(super) fn leave(&self) {
        if self.living.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.write();
        }
    }

    fn snapshots(&self) -> Vec<Snapshot> {
        let Some(entries) = lock(&self.entries) else { return Vec::new() };
        let living = |entry: &Entry| entry.flights.iter().filter_map(Weak::upgrade).collect();
        let known: Vec<_> = entries.values().map(|entry| (entry.group.clone(), Arc::clone(&entry.counters), living(entry))).collect();
        drop(entries);
        let snapshot = |(group, counters, flights): (Group, Arc<Counters>, Vec<Arc<Flight>>)| {
            let waiting = flights.iter().map(|flight| flight.longest_wait()).max();
            // These may be the last references to errors of the program, whose drop runs the program's code.
            event::tell("the destructor of records", move || drop(flights));
            Snapshot { group, counts: counters.read(), waiting }
        };
        known.into_iter().map(snapshot).collect()
    }

    /// Writes the file, if the sink is a file.
    pub(super) fn write(&self) {
        if let Sink::Folder(folder) = &self.sink
            && !self.process.is_foreign()
        {
            self.write_to(folder);
        }
    }

    fn write_to(&self, folder: &Path) {
        let Some(writing) = lock(&self.writing) else { return };
        let text = to_text(&self.snapshots(), Format::Prometheus { pid: std::process::id() });
        let host: String = rustix::system::uname().nodename().to_string_lossy().replace('/', "_");
        let name = format!("collectives-{host}-{}.prom", std::process::id());
        let written = write_whole(folder, &name, &text, "metrics");
        drop(writing);
        match written {
            Ok(_) => self.has_failed.store(false, Ordering::Relaxed),
            // Once for each time that it begins to fail.
            Err(error) if !self.has_failed.swap(true, Ordering::Relaxed) => {
                let line = format!("metrics could not be written: {error}");
                event::tell_aloud(Some(line), move || event::warn!(%error, "metrics could not be written"));
            }
            Err(_) => {}
        }
    }
}

/// The time between two writes is short enough for a collector that asks every 15 seconds.
const _: () = assert!(EVERY.as_nanos() < Duration::from_secs(15).as_nanos());
