//! The flight recorder: keeps the last calls of a communicator, in case one of them hangs.
//!
//! The recorder is on by default, and keeps the last
//! [`Config::flight_recorder_calls`](crate::Config::flight_recorder_calls) calls of each kind. A [`Recorder`]
//! ([`Communicator::flight_recorder`](crate::Communicator::flight_recorder)) reads the records from any thread. There
//! are three ways to write them to files:
//!
//! - a call of [`write_records`],
//! - `kill -USR1`, after a call of [`write_records_on_sigusr1`],
//! - [`Config::flight_recorder_dir`](crate::Config::flight_recorder_dir): the records are written to this folder when a
//!   call fails because of a peer.
//!
//! `collperf --explain-hang FOLDER` compares the files of all ranks. `collperf ps` asks running processes for the latest
//! records.
//!
//! # When a call is recorded
//!
//! If this rank has to wait for another rank in a call on the host backend, it records the call when it begins to wait,
//! after it has notified the others. So recording takes time in which the rank would only wait. The clock is read at
//! that moment, and again at the end of calls that took long or moved much data. Other calls end too soon for a second
//! reading. If all other ranks were already waiting for this one, the call is recorded when it has ended. One in 16 of
//! these records has a time.
//!
//! # Design
//!
//! The last calls of each communicator are kept in three rings (collectives, messages, device calls). Each ring has
//! one writer at a time: the thread that has the host backend, holds the progress engine's lock, or has the turn at
//! the device backend. A slot is one cache line of relaxed atomics under a sequence lock, so that any thread can read
//! while a call hangs (model-checked with loom). Writing costs a dozen plain stores, and 10 ns for the time-stamp
//! counter, which is converted to a time when records are read. (`benches/record/design-figures.md` has
//! the cost.)
//!
//! At least every 50 ms, a thread that sleeps in a wait records the ranks that it waits for. It also warns of stalls at
//! these times, because the fast path reads no clock. Records are written as JSON with PyTorch's names (`file.rs`).
//! `collperf --explain-hang` groups the files by communicator, and compares calls with the same number as far as the
//! rings overlap. It reports a rank as behind only if others are stuck in a call that this rank has not reached. A
//! collective that has finished on any rank does not count, because every rank has entered it.
//!
//! The handler of SIGUSR1 is installed on request, and replaces no other handler. It writes to an eventfd; a thread
//! does the rest.
//!
//! The recorders of a process know each other (`living.rs`). When a deadline passes, the error lists the calls on
//! other communicators in which the process waited meanwhile (`meanwhile.rs`).

mod answers;
mod clock;
mod file;
mod living;
mod meanwhile;
mod record;
mod recorder;
mod ring;
mod signal;

use std::collections::VecDeque;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::fork::Process;
use crate::base::tuning::flight::{ERRORS, LOOK_EVERY, TELL_EVERY, WARN_EVERY};
use crate::call::Call;
use crate::error::{Error, Peer, list_peers};

use clock::{Clock, since_1970};
use ring::{Ring, Stage};

pub(crate) use file::{Json, write_whole};
pub(crate) use living::{enlist, living};
pub(crate) use record::{About, Message};
pub use record::{Backend, Record, State};
pub use recorder::Recorder;
pub use signal::{write_records, write_records_on_sigusr1};

/// The state of the current collective. Only one is under way at a time.
mod phase {
    /// The collective is not recorded.
    pub(super) const CLOSED: u8 = 0;
    /// The collective is recorded.
    pub(super) const OPEN: u8 = 1;
    /// The collective is recorded, and has waited so long that the clock may be read at its end.
    pub(super) const SLOW: u8 = 2;
    /// Recording is off.
    pub(super) const OFF: u8 = 3;
}

/// Identifies a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    Collective,
    Message,
    Device,
}

/// An error and the record that it belongs to.
#[derive(Debug)]
struct Failure {
    ring: Kept,
    id: u64,
    error: Error,
}

/// State that is used only when a call takes long anyway.
#[derive(Debug, Default)]
struct Slowly {
    /// Background calls that the worker has not begun, with their start times.
    queued: VecDeque<(Call, Duration)>,
    /// The number of the last collective that waited long.
    waiting: Option<u64>,
    /// The ranks that this collective waits for. The capacity covers all ranks, so a wait allocates nothing.
    awaited: Vec<u32>,
    /// The last collective for which a warning was given, and how long it had waited then.
    warned: Option<(u64, Duration)>,
    errors: VecDeque<Failure>,
    /// Whether the records were written when the communicator ended.
    has_written: bool,
}

/// The settings of a recorder.
#[derive(Debug, Clone, Default)]
pub(crate) struct Orders {
    /// The number of calls to keep; 0 for none.
    pub(crate) calls: usize,
    /// The longest time before a warning about a call that does not end; 0 for never.
    pub(crate) stall_warning: Duration,
    /// The folder for records when a call fails because of a peer.
    pub(crate) folder: Option<PathBuf>,
    /// Whether the process answers `collperf ps` about the communicator.
    pub(crate) answers: bool,
}

/// The recorder of one communicator. Collectives, messages and device calls have a ring each, because each has a
/// single writer.
#[derive(Debug)]
pub(crate) struct Flight {
    phase: AtomicU8,
    clock: Clock,
    collectives: Ring,
    messages: OnceLock<Ring>,
    device: OnceLock<Ring>,
    /// The last clock reading for messages.
    looked: AtomicU64,
    orders: Orders,
    about: OnceLock<About>,
    slowly: Mutex<Slowly>,
    /// The process that created the recorder. In a forked child, the lock may have been inherited in the locked state,
    /// and is then never released.
    process: Process,
}

impl Default for Flight {
    /// Creates a recorder that records nothing.
    fn default() -> Self {
        Self::new(Orders::default())
    }
}

impl Flight {
    pub(crate) fn new(orders: Orders) -> Self {
        let phase = if orders.calls == 0 { phase::OFF } else { phase::CLOSED };
        Self {
            phase: AtomicU8::new(phase),
            clock: Clock::choose(),
            collectives: Ring::new(orders.calls),
            messages: OnceLock::new(),
            device: OnceLock::new(),
            looked: AtomicU64::new(0),
            orders,
            about: OnceLock::new(),
            slowly: Mutex::default(),
            process: Process::this(),
        }
    }

    /// Sets the communicator that the recorder belongs to, once it is known. Returns whether the recorder may have
    /// records for a signal to write ([`enlist`]).
    pub(crate) fn introduce(&self, about: About) -> bool {
        self.slowly().awaited.reserve_exact(about.peers.len());
        self.about.set(about).is_ok() && self.is_on()
    }

    /// Whether calls are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.orders.calls != 0
    }

    /// Whether the process answers `collperf ps` about the communicator.
    pub(crate) fn answers(&self) -> bool {
        self.orders.answers
    }

    /// Whether this process was forked from the one that made the calls.
    fn is_foreign(&self) -> bool {
        self.process.is_foreign()
    }

    fn slowly(&self) -> event::Locked<'_, Slowly> {
        event::lock(&self.slowly)
    }

    /// Records a collective, unless it is already recorded. Called by the thread that has the turn at the host
    /// backend.
    #[inline]
    pub(crate) fn begin(&self, call: &Call) {
        if self.phase.load(Ordering::Relaxed) == phase::CLOSED {
            self.open(call);
        }
    }

    #[inline]
    fn open(&self, call: &Call) {
        self.collectives.begin(call.record(), self.clock.ticks(), Stage::Started);
        self.phase.store(phase::OPEN, Ordering::Relaxed);
    }

    /// Notes that a collective succeeded. If `is_long`, it moved so much data that reading the clock costs nothing in
    /// comparison.
    #[inline]
    pub(crate) fn end(&self, call: &Call, is_long: bool) {
        match self.phase.load(Ordering::Relaxed) {
            phase::OPEN if !is_long => self.close(Stage::Finished, 0),
            phase::CLOSED if !is_long => self.note(call),
            phase::OFF => {}
            phase => self.end_late(call, phase),
        }
    }

    /// Records a collective that has ended without waiting.
    #[inline]
    fn note(&self, call: &Call) {
        let started = if self.collectives.begun().is_multiple_of(LOOK_EVERY) { self.clock.ticks() } else { 0 };
        self.collectives.begin(call.record(), started, Stage::Finished);
    }

    #[inline]
    fn close(&self, stage: Stage, finished: u64) {
        self.collectives.end(self.collectives.begun() - 1, stage, finished);
        self.phase.store(phase::CLOSED, Ordering::Relaxed);
    }

    #[cold]
    fn end_late(&self, call: &Call, phase: u8) {
        if phase == phase::CLOSED {
            self.open(call);
        }
        self.close(Stage::Finished, self.clock.ticks());
    }

    /// Notes that a collective failed.
    #[cold]
    pub(crate) fn fail(&self, call: &Call, error: &Error) {
        if !self.is_on() {
            return;
        }
        self.begin(call);
        self.keep_error(Kept::Collective, self.collectives.begun() - 1, error);
        self.close(Stage::Failed, self.clock.ticks());
    }

    fn keep_error(&self, ring: Kept, id: u64, error: &Error) {
        let mut slowly = self.slowly();
        let oldest = if slowly.errors.len() == ERRORS { slowly.errors.pop_front() } else { None };
        slowly.errors.push_back(Failure { ring, id, error: error.clone() });
        drop(slowly);
        // Holds no lock here: an error may contain a value of the program, whose drop runs the program's code.
        if let Some(oldest) = oldest {
            event::tell("the destructor of an error", move || drop(oldest));
        }
    }

    /// Notes that a collective was started in the background.
    pub(crate) fn queue(&self, call: &Call) {
        if self.is_on() {
            self.slowly().queued.push_back((*call, since_1970()));
        }
    }

    /// Notes that the worker has begun the oldest background collective.
    pub(crate) fn take_up(&self) {
        if self.is_on() {
            self.slowly().queued.pop_front();
        }
    }

    /// Notes the ranks that a collective waits for, and warns if it has waited long. Waiters call this from time to
    /// time. Returns the elapsed time at which to call it again.
    #[cold]
    pub(crate) fn waits(&self, call: &Call, deadline: &Deadline, missing: impl IntoIterator<Item = u32>) -> Duration {
        let elapsed = deadline.elapsed();
        let _ = self.phase.compare_exchange(phase::OPEN, phase::SLOW, Ordering::Relaxed, Ordering::Relaxed);
        let mut slowly = self.slowly();
        slowly.waiting = Some(call.sequence);
        slowly.awaited.clear();
        slowly.awaited.extend(missing);
        let warned = slowly.warned.filter(|(sequence, _)| *sequence == call.sequence).map(|(_, at)| at);
        if self.warns_after(elapsed, deadline.limit(), warned) {
            slowly.warned = Some((call.sequence, elapsed));
            self.warn(call, elapsed, deadline.limit(), &slowly.awaited);
        }
        elapsed + TELL_EVERY
    }

    /// Returns how long a wait with the timeout `limit` may take before a warning.
    pub(crate) fn stall_after(&self, limit: Duration) -> Duration {
        if self.orders.stall_warning.is_zero() { Duration::MAX } else { self.orders.stall_warning.min(limit / 2) }
    }

    /// Whether to warn now of a wait with the timeout `limit`. `warned` is how long it had lasted at the last warning.
    pub(crate) fn warns_after(&self, elapsed: Duration, limit: Duration, warned: Option<Duration>) -> bool {
        elapsed >= warned.map_or_else(|| self.stall_after(limit), |at| at + WARN_EVERY)
    }

    /// Warns of a call that does not end, with the ranks that it waits for: to a subscriber of `tracing`, or to
    /// standard error if there is none.
    #[cold]
    pub(crate) fn warn(&self, call: &dyn Display, elapsed: Duration, limit: Duration, missing: &[u32]) {
        let own = self.about.get().map_or(0, |about| about.rank);
        let peer = |rank: &u32| {
            let known = self.about.get().and_then(|about| about.peers.get(*rank as usize));
            known.cloned().unwrap_or_else(|| Peer::unknown(*rank as usize))
        };
        let missing = list_peers(&missing.iter().map(peer).collect::<Vec<_>>());
        let (call, communicator) = (call.to_string(), self.name().to_owned());
        let waiting = format!("still waiting after {:.1} s", elapsed.as_secs_f64());
        let limit = format!("giving up after {:.1} s", limit.as_secs_f64());
        // A short timeout may be a program's way to poll, so its warning goes only to `tracing`.
        let line = || format!("rank {own} of {communicator}: {call}: {waiting} for {missing}, and {limit}");
        let line = (elapsed >= self.orders.stall_warning).then(line);
        event::tell_aloud(line, move || {
            event::warn!(rank = own, communicator, call = %call, missing, "{waiting}, and {limit}");
        });
    }

    fn message_ring(&self) -> &Ring {
        self.messages.get_or_init(|| Ring::new(self.orders.calls))
    }

    /// Records a message that is now under way and returns its number. Called, like the next three methods, by the
    /// thread that holds the lock of the messages.
    pub(crate) fn begin_message(&self, message: &Message) -> u64 {
        if !self.is_on() {
            return 0;
        }
        self.looked.store(self.clock.ticks(), Ordering::Relaxed);
        self.message_ring().begin(message.words(), self.looked.load(Ordering::Relaxed), Stage::Started)
    }

    /// Records a message that ended at once.
    #[inline]
    pub(crate) fn note_message(&self, message: &Message) {
        if !self.is_on() {
            return;
        }
        let ring = self.message_ring();
        if ring.begun().is_multiple_of(LOOK_EVERY) {
            self.looked.store(self.clock.ticks(), Ordering::Relaxed);
        }
        ring.begin(message.words(), self.looked.load(Ordering::Relaxed), Stage::Finished);
    }

    /// Notes that a message succeeded.
    pub(crate) fn end_message(&self, number: u64) {
        if let Some(ring) = self.messages.get() {
            ring.end(number, Stage::Finished, self.clock.ticks());
        }
    }

    /// Notes that a message failed.
    #[cold]
    pub(crate) fn fail_message(&self, number: u64, error: &Error) {
        if let Some(ring) = self.messages.get() {
            self.keep_error(Kept::Message, number, error);
            ring.end(number, Stage::Failed, self.clock.ticks());
        }
    }

    /// Records a collective that is queued on a device, and whether queueing failed. Called, like the next method, by
    /// the thread that has the turn at the device backend.
    #[cfg(feature = "cuda")]
    pub(crate) fn note_device_call(&self, call: &Call, tracker: u8, error: Option<&Error>) {
        self.note_on_device(call.record(), tracker, error);
    }

    /// Records a message that is queued on a device, and whether queueing failed.
    #[cfg(feature = "cuda")]
    pub(crate) fn note_device_message(&self, message: &Message, tracker: u8, error: Option<&Error>) {
        self.note_on_device(message.words(), tracker, error);
    }

    #[cfg(feature = "cuda")]
    fn note_on_device(&self, words: [u64; 4], tracker: u8, error: Option<&Error>) {
        if !self.is_on() {
            return;
        }
        let ring = self.device.get_or_init(|| Ring::new(self.orders.calls));
        let number = ring.begin_queued(words, self.clock.ticks(), tracker);
        if let Some(error) = error {
            self.keep_error(Kept::Device, number, error);
            ring.end(number, Stage::Failed, self.clock.ticks());
        }
    }

    /// Returns the number of recorded device calls. If a tracker is later found to have finished its work, the finished
    /// work includes its calls among these.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_calls_noted(&self) -> u64 {
        self.device.get().map_or(0, Ring::begun)
    }

    /// Notes that a tracker of a device has finished its calls among the first `calls`. Any thread may call this.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_has_done(&self, tracker: u8, calls: u64) {
        if let Some(ring) = self.device.get() {
            ring.end_queued(Some(tracker), calls, Stage::Finished, self.clock.ticks());
        }
    }

    /// Notes that unfinished device calls have failed, and writes the records if a folder is set. Any thread may call
    /// this.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_has_failed(&self, error: &Error) {
        if let Some(ring) = self.device.get()
            && let Some(first) = ring.end_queued(None, u64::MAX, Stage::Failed, self.clock.ticks())
        {
            self.keep_error(Kept::Device, first, error);
            self.after_error(error);
        }
    }
}

#[cfg(test)]
mod tests;
