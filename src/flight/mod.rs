//! The flight recorder: the last calls of a communicator, kept for when one of them gets stuck.
//!
//! It is on, for the last [`Config::flight_recorder_calls`](crate::Config::flight_recorder_calls) calls of each kind. What is on record is
//! read from any thread by a [`Recorder`] ([`Communicator::flight_recorder`](crate::Communicator::flight_recorder)). It is written to files by
//! [`write_records`], by `kill -USR1` after [`write_records_on_sigusr1`], and when a call fails for lack of a peer, where
//! [`Config::flight_recorder_dir`](crate::Config::flight_recorder_dir) names a folder. `collperf --explain-hang FOLDER` compares the files of all ranks.
//!
//! # When a call goes on record
//!
//! A call of the host backend goes on record when this rank has told the others of it and has to wait for one of them: recording then costs
//! time that would pass anyway. The clock is read at that moment. It is read again at the end of calls that took a while or moved much; the
//! others are over too soon for a second look. A call for which everybody else was there already goes on record when it is over, and one in
//! 16 of these has a time.
//!
//! # Design
//!
//! The last calls of each communicator are kept in three rings (collectives, messages, device calls). Each has one writer at a time: whoever
//! has the backend, holds the progress engine's lock, or has the turn at the device backend. A slot is one cache line of relaxed atomics under a sequence
//! lock, so that any thread can read while a call is stuck (model-checked with loom). Writing is a dozen plain stores, and 10 ns for the
//! time-stamp counter, which becomes a time when records are read. (`benches/record/2026-11-22-design-figures.md` has what that costs.)
//!
//! Waiters that sleep say whom they wait for every 50 ms at least, and warn there of stalls: the fast path reads no clock. Records are
//! written as JSON with PyTorch's names (`file.rs`). `collperf --explain-hang` groups them by communicator, and compares calls of one number
//! where the rings overlap. It says that a rank is behind only where others are stuck in a call that this rank has not come to: a collective
//! that is over anywhere was entered everywhere. The handler of SIGUSR1 is installed on request, over no other. It writes to an eventfd; a
//! thread does the rest.
//!
//! The recorders of a process know of each other (`living.rs`): where a deadline passes, the error says what else the process has waited in
//! meanwhile, on other communicators (`meanwhile.rs`).

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
use crate::base::tuning::flight::{ERRORS, LOOK_EVERY, TELL_EVERY};
use crate::call::Call;
use crate::error::{Error, Peer, list_peers};

use clock::{Clock, since_1970};
use ring::{Ring, Stage};

pub(crate) use file::{Json, write_whole};
pub(crate) use living::enlist;
pub(crate) use record::{About, Message};
pub use record::{Backend, Record, State};
pub use recorder::Recorder;
pub use signal::{write_records, write_records_on_sigusr1};

/// Where the collective that is under way stands; one at a time.
mod phase {
    /// None is on record.
    pub(super) const CLOSED: u8 = 0;
    /// On record.
    pub(super) const OPEN: u8 = 1;
    /// On record, and waiting for so long that the clock may be read at its end.
    pub(super) const SLOW: u8 = 2;
    /// Nothing is recorded.
    pub(super) const OFF: u8 = 3;
}

/// Which ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    Collective,
    Message,
    Device,
}

/// An error, with the record that it belongs to.
#[derive(Debug)]
struct Failure {
    ring: Kept,
    id: u64,
    error: Error,
}

/// What is touched only where a call takes long anyway.
#[derive(Debug, Default)]
struct Slowly {
    /// Calls that were started and that the worker has not taken up, with when they were.
    queued: VecDeque<(Call, Duration)>,
    /// The number of the last collective that waited for long.
    waiting: Option<u64>,
    /// Whom it waits for. There is room for all ranks: a wait allocates nothing.
    awaited: Vec<u32>,
    /// The last collective that a warning was given of.
    warned: Option<u64>,
    errors: VecDeque<Failure>,
    /// Whether the records were written when the communicator ended.
    has_written: bool,
}

/// What a recorder is told to do.
#[derive(Debug, Clone, Default)]
pub(crate) struct Orders {
    /// How many calls to keep; 0 for none.
    pub(crate) calls: usize,
    /// When to warn of a call that does not end, at the latest; 0 for never.
    pub(crate) stall_warning: Duration,
    /// Where to write when something goes wrong.
    pub(crate) folder: Option<PathBuf>,
}

/// One communicator's recorder. Collectives, messages and device calls have a ring each, since they have one writer each.
#[derive(Debug)]
pub(crate) struct Flight {
    phase: AtomicU8,
    clock: Clock,
    collectives: Ring,
    messages: OnceLock<Ring>,
    device: OnceLock<Ring>,
    /// The last look at the clock for messages.
    looked: AtomicU64,
    orders: Orders,
    about: OnceLock<About>,
    slowly: Mutex<Slowly>,
    /// Children of this process may have inherited the lock for good.
    process: Process,
}

impl Default for Flight {
    /// Records nothing.
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

    /// Says whose recorder this is, once that is known; whether there is anything for a signal to write ([`enlist`]).
    pub(crate) fn introduce(&self, about: About) -> bool {
        self.slowly().awaited.reserve_exact(about.peers.len());
        self.about.set(about).is_ok() && self.is_on()
    }

    /// Whether anything is recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.orders.calls != 0
    }

    /// Whether this process was forked from the one whose calls these are.
    fn is_foreign(&self) -> bool {
        self.process.is_foreign()
    }

    fn slowly(&self) -> event::Locked<'_, Slowly> {
        event::lock(&self.slowly)
    }

    /// Puts a collective on record, unless it is already. By the thread whose turn it is at the host backend.
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

    /// Notes that a collective went well. `is_long`: it moved so much that a look at the clock is nothing.
    #[inline]
    pub(crate) fn end(&self, call: &Call, is_long: bool) {
        match self.phase.load(Ordering::Relaxed) {
            phase::OPEN if !is_long => self.close(Stage::Finished, 0),
            phase::CLOSED if !is_long => self.note(call),
            phase::OFF => {}
            phase => self.end_late(call, phase),
        }
    }

    /// Puts a collective on record that is over, without having waited for anybody.
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
        // Without any lock: an error may hold one of the program's, whose drop is the program's code.
        if let Some(oldest) = oldest {
            event::tell("the drop of an error", move || drop(oldest));
        }
    }

    /// Notes that a collective was started in the background.
    pub(crate) fn queue(&self, call: &Call) {
        if self.is_on() {
            self.slowly().queued.push_back((*call, since_1970()));
        }
    }

    /// Notes that the worker took up the oldest one that was started.
    pub(crate) fn take_up(&self) {
        if self.is_on() {
            self.slowly().queued.pop_front();
        }
    }

    /// Notes whom a collective waits for, and warns of it when it has been waiting for long. To be called by waiters every now and
    /// then; says after how long a wait the next time is.
    #[cold]
    pub(crate) fn waits(&self, call: &Call, deadline: &Deadline, missing: impl IntoIterator<Item = u32>) -> Duration {
        let elapsed = deadline.elapsed();
        let _ = self.phase.compare_exchange(phase::OPEN, phase::SLOW, Ordering::Relaxed, Ordering::Relaxed);
        let mut slowly = self.slowly();
        slowly.waiting = Some(call.sequence);
        slowly.awaited.clear();
        slowly.awaited.extend(missing);
        if elapsed >= self.stall_after(deadline.limit()) && slowly.warned != Some(call.sequence) {
            slowly.warned = Some(call.sequence);
            self.warn(call, elapsed, deadline.limit(), &slowly.awaited);
        }
        elapsed + TELL_EVERY
    }

    /// After how long a wait that may take `limit` is warned of.
    pub(crate) fn stall_after(&self, limit: Duration) -> Duration {
        if self.orders.stall_warning.is_zero() { Duration::MAX } else { self.orders.stall_warning.min(limit / 2) }
    }

    /// Warns of a call that does not end, and of the ranks that it waits for: whoever hears of it, or on standard error where nobody would.
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
        // Of short deadlines, which may be a program's way to look now and then, only those hear who asked.
        let line = || format!("rank {own} of {communicator}: {call}: {waiting} for {missing}, and {limit}");
        let line = (elapsed >= self.orders.stall_warning).then(line);
        event::tell_aloud(line, move || {
            event::warn!(rank = own, communicator, call = %call, missing, "{waiting}, and {limit}");
        });
    }

    fn message_ring(&self) -> &Ring {
        self.messages.get_or_init(|| Ring::new(self.orders.calls))
    }

    /// Puts a message on record that is under way from now on; its number, for its end. By whoever holds the lock of the messages, as are the
    /// next three.
    pub(crate) fn begin_message(&self, message: &Message) -> u64 {
        if !self.is_on() {
            return 0;
        }
        self.looked.store(self.clock.ticks(), Ordering::Relaxed);
        self.message_ring().begin(message.words(), self.looked.load(Ordering::Relaxed), Stage::Started)
    }

    /// Puts a message on record that was over at once.
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

    /// Notes that a message went well.
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

    /// Puts a collective on record that is queued on a device, and how that went. By the thread whose turn it is at the device backend, as the next.
    #[cfg(feature = "cuda")]
    pub(crate) fn note_device_call(&self, call: &Call, tracker: u8, error: Option<&Error>) {
        self.note_on_device(call.record(), tracker, error);
    }

    /// Puts a message on record that is queued on a device, and how that went.
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

    /// How many device calls are on record. Whoever then finds that a tracker has done all it was given may say so of these.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_calls_noted(&self) -> u64 {
        self.device.get().map_or(0, Ring::begun)
    }

    /// Notes that a tracker of a device has done what it was given of the first so many calls. By any thread.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_has_done(&self, tracker: u8, calls: u64) {
        if let Some(ring) = self.device.get() {
            ring.end_queued(Some(tracker), calls, Stage::Finished, self.clock.ticks());
        }
    }

    /// Notes that nothing comes of what a device has not done, and writes the records where that was asked for. By any thread.
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
