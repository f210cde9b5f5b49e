//! The small shared words of a region: which ranks are present, how many sleep, and why the group ended.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::base::sync::{AtomicU32, AtomicU64, Futex, Ordering, fence};
use crate::base::tuning::waiting::LIGHT_FOR;
use crate::host::abort_reason::AbortReason;
use crate::host::processors::{Processors, WORDS};

/// A value on cache lines of its own.
#[repr(C, align(128))]
struct Line<T>(T);

/// The counts of sleeping ranks.
#[repr(C)]
struct Sleepers {
    /// Number of ranks that sleep, or are about to.
    announced: AtomicU32,
    /// Number of ranks that sleep often, and want every publish to be followed by a fence and a check for sleepers.
    light: AtomicU32,
}

/// State that the whole group shares. Initially all zero.
#[repr(C, align(128))]
pub(super) struct Control {
    /// The counts of sleepers, which are rarely written. Every rank reads them in each step.
    sleepers: Line<Sleepers>,
    /// The futex that sleepers wait on. It changes with every wake.
    futex: Line<Futex>,
    /// Why the group ended.
    abort_record: Line<AbortRecord>,
    /// Why a rank has given up on the group's devices, as a word of `DeviceEnd`; 0 while no rank has. Present in every
    /// build: ranks with and without devices share one region.
    device_end: Line<AtomicU64>,
}

/// Builds with other features share regions, so the layout must be the same in each.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Control>() == 4 * size_of::<Line<u8>>());

impl Control {
    /// Whether ranks sleep, or are about to, as far as this rank can see.
    #[inline]
    pub(super) fn has_sleepers(&self) -> bool {
        self.sleepers.announced.load(Ordering::Relaxed) != 0
    }

    /// Returns how many ranks sleep, or are about to.
    #[cfg(test)]
    pub(super) fn sleepers(&self) -> u32 {
        self.sleepers.announced.load(Ordering::SeqCst)
    }

    /// Returns how often sleepers were woken.
    #[cfg(test)]
    pub(super) fn wakes(&self) -> u32 {
        self.futex.read()
    }

    /// Whether ranks sleep often. If so, [`Control::fence`] comes between publishing and the check for sleepers.
    #[inline]
    pub(super) fn has_light_sleepers(&self) -> bool {
        self.sleepers.light.load(Ordering::Relaxed) != 0
    }

    /// Records that a rank sleeps often from now on. Others may see that a moment late, so its first sleep must be
    /// short.
    pub(super) fn add_light_sleeper(&self) {
        self.sleepers.light.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that a rank no longer sleeps often.
    pub(super) fn remove_light_sleeper(&self) {
        self.sleepers.light.fetch_sub(1, Ordering::SeqCst);
    }

    /// Orders what this rank has published before its check for sleepers. So at least one of the two sees what the
    /// other has stored: a sleeper in its last look, or this rank in its check.
    #[inline]
    pub(super) fn fence() {
        fence(Ordering::SeqCst);
    }

    /// Returns why the group ended, if a rank has recorded it.
    pub(super) fn abort_reason(&self) -> Option<AbortReason> {
        self.abort_record.read()
    }

    /// Records for the whole group why it ended, and wakes all sleepers, unless another rank already has.
    pub(super) fn propagate(&self, abort_reason: &AbortReason) {
        if self.abort_record.post(abort_reason) {
            self.wake();
        }
    }

    /// Wakes every sleeper.
    pub(super) fn wake(&self) {
        self.futex.change();
    }

    /// Returns the word that holds why a rank has given up on the devices.
    #[cfg(feature = "cuda")]
    pub(super) fn device_end(&self) -> &AtomicU64 {
        &self.device_end
    }

    /// Announces a sleep. Returns the value of the futex after that.
    fn announce(&self) -> u32 {
        self.sleepers.announced.fetch_add(1, Ordering::SeqCst);
        let heard = self.futex.read();
        // The sleeper's last look comes after the announcement, just as a publisher's check for announcements comes
        // after what it has stored.
        Self::fence();
        heard
    }

    /// Sleeps until woken, for at most `limit`, unless `done` returns true after the sleep has been announced.
    pub(super) fn sleep(&self, limit: Duration, done: impl FnOnce() -> bool) {
        let heard = self.announce();
        if !done() {
            self.futex.wait(heard, limit);
        }
        self.sleepers.announced.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether this rank sleeps often, as far as the others of its group need to know.
#[derive(Debug, Default)]
pub(super) struct Lightness {
    /// Number of publishes until the others no longer need to know this; 0 if they do not need to know it now.
    publishes: std::sync::atomic::AtomicU32,
}

impl Lightness {
    /// Records that this rank sleeps and soon will again, so that the others check for it after each publish. Returns
    /// whether this is new to them.
    pub(super) fn grow(&self, control: &Control) -> bool {
        let was_heavy = self.publishes.swap(LIGHT_FOR, Relaxed) == 0;
        if was_heavy {
            control.add_light_sleeper();
        }
        was_heavy
    }

    /// Records that this rank has published once more.
    pub(super) fn fade(&self, control: &Control) {
        let less = self.publishes.fetch_update(Relaxed, Relaxed, |publishes| publishes.checked_sub(1));
        if less == Ok(1) {
            control.remove_light_sleeper();
        }
    }
}

impl<T> std::ops::Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// An abort reason that is written once.
#[repr(C)]
struct AbortRecord {
    state: AtomicU32,
    words: [AtomicU64; AbortReason::BYTES / 8],
}

impl AbortRecord {
    const EMPTY: u32 = 0;
    /// A writer has begun. If it dies now, the record stays unreadable, and its death is noticed in other ways.
    const TAKEN: u32 = 1;
    const WRITTEN: u32 = 2;

    /// Writes the abort reason if there is none yet. Returns whether it did.
    fn post(&self, abort_reason: &AbortReason) -> bool {
        if self.state.compare_exchange(Self::EMPTY, Self::TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        for (word, bytes) in self.words.iter().zip(abort_reason.to_bytes().as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.state.store(Self::WRITTEN, Ordering::Release);
        true
    }

    /// Returns the abort reason, if one has been written.
    fn read(&self) -> Option<AbortReason> {
        if self.state.load(Ordering::Acquire) != Self::WRITTEN {
            return None;
        }
        let mut bytes = [0; AbortReason::BYTES];
        for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&self.words) {
            *chunk = word.load(Ordering::Relaxed).to_le_bytes();
        }
        AbortReason::from_bytes(&bytes)
    }
}

/// What a rank publishes about itself. Initially all zero.
#[repr(C, align(128))]
pub(super) struct Member {
    departed: AtomicU32,
    locked: AtomicU32,
    /// The step in which it left a call with lent buffers early; 0 if it never has. Leaving early ends the group, so
    /// there is at most one such step.
    left_at: AtomicU64,
    /// Number of processors that the system lets it keep busy, by quota or affinity.
    available: AtomicU32,
    /// Bytes of a lap in its rings, given what this rank knows of the caches.
    lap: AtomicU64,
    /// The processors that it may run on; all zero if unknown.
    processors: [AtomicU64; WORDS],
    /// Number of its threads that sleep until one of its rings moves, or are about to.
    listening: AtomicU32,
    /// The futex that they sleep on.
    bell: Futex,
}

impl Member {
    /// Enters this rank, before any other rank looks.
    pub(super) fn enter(&self, locked: bool, lap: usize, processors: &Processors) {
        self.available.store(processors.available, Ordering::Relaxed);
        self.lap.store(lap as u64, Ordering::Relaxed);
        self.locked.store(locked.into(), Ordering::Relaxed);
        for (place, word) in self.processors.iter().zip(&processors.mask) {
            place.store(*word, Ordering::Relaxed);
        }
        self.departed.store(0, Ordering::Release);
    }

    /// Records that the rank has left voluntarily.
    pub(super) fn depart(&self) {
        self.departed.store(1, Ordering::Release);
    }

    /// Records that the rank leaves a call in this step, and reads nothing more of what others have lent. Must come
    /// before the rank's caller goes on.
    pub(super) fn leave_at(&self, step: u64) {
        self.left_at.store(step, Ordering::Release);
    }

    /// Whether it has left a call in this step, which ended the group.
    pub(super) fn has_left_at(&self, step: u64) -> bool {
        self.left_at.load(Ordering::Relaxed) == step
    }

    /// Whether it has left a call in this step or a later one. If so, all its reads come before anything that the
    /// calling rank writes.
    pub(super) fn has_left_since(&self, step: u64) -> bool {
        self.left_at.load(Ordering::Acquire) >= step
    }

    /// Whether the rank has left voluntarily.
    pub(super) fn has_departed(&self) -> bool {
        self.departed.load(Ordering::Acquire) != 0
    }

    /// Announces that a thread of the rank is about to sleep until one of its rings moves. Returns the value of the
    /// bell after that.
    pub(super) fn listen(&self) -> u32 {
        self.listening.fetch_add(1, Ordering::SeqCst);
        let heard = self.bell.read();
        Control::fence();
        heard
    }

    /// Sleeps until the bell differs from `heard`, for at most `limit`.
    pub(super) fn doze(&self, heard: u32, limit: Duration) {
        self.bell.wait(heard, limit);
    }

    /// Withdraws the announcement of [`Member::listen`].
    pub(super) fn stop_listening(&self) {
        self.listening.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes its threads that listen. Call it after storing what they wait for and a [`Control::fence`].
    pub(super) fn ring(&self) {
        if self.listening.load(Ordering::Relaxed) != 0 {
            self.bell.change();
        }
    }

    /// Whether it holds a lock for as long as it lives.
    pub(super) fn is_locked(&self) -> bool {
        self.locked.load(Ordering::Relaxed) != 0
    }

    /// Returns the bytes of a lap, given what it knows of the caches.
    pub(super) fn lap(&self) -> usize {
        usize::try_from(self.lap.load(Ordering::Relaxed)).unwrap_or(usize::MAX)
    }

    /// Returns the processors that it may use.
    pub(super) fn processors(&self) -> Processors {
        let mask = std::array::from_fn(|index| self.processors[index].load(Ordering::Relaxed));
        Processors { available: self.available.load(Ordering::Relaxed), mask }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_abort_reason_stays() {
        let abort_record = AbortRecord { state: AtomicU32::new(0), words: Default::default() };
        assert_eq!(abort_record.read(), None);
        assert!(abort_record.post(&AbortReason::Lost { rank: 7, by: 1 }));
        assert!(!abort_record.post(&AbortReason::Left { rank: 8 }));
        assert_eq!(abort_record.read(), Some(AbortReason::Lost { rank: 7, by: 1 }));
    }

    #[test]
    fn a_half_written_abort_reason_is_none() {
        let abort_record = AbortRecord { state: AtomicU32::new(AbortRecord::TAKEN), words: Default::default() };
        assert_eq!(abort_record.read(), None);
        assert!(!abort_record.post(&AbortReason::Lost { rank: 7, by: 1 }));
    }
}

#[cfg(all(test, loom))]
#[expect(unsafe_code, reason = "a model's buffer is a cell, as the real one is raw memory")]
mod models {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib shm::control`.

    use super::*;
    use crate::host::shm::flags::Flag;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const ABORTED: AbortReason = AbortReason::Aborted { by: 3 };
    const LOST: AbortReason = AbortReason::Lost { rank: 4, by: 3 };

    fn control() -> Control {
        let abort_record = AbortRecord { state: AtomicU32::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) };
        Control {
            sleepers: Line(Sleepers { announced: AtomicU32::new(0), light: AtomicU32::new(0) }),
            futex: Line(Futex::new()),
            abort_record: Line(abort_record),
            device_end: Line(AtomicU64::new(0)),
        }
    }

    /// Sleeps, without a limit, until there is an abort reason.
    fn await_abort(control: &Control) -> AbortReason {
        loop {
            if let Some(abort_reason) = control.abort_reason() {
                return abort_reason;
            }
            control.sleep(Duration::MAX, || control.abort_reason().is_some());
        }
    }

    #[test]
    fn a_sleeper_hears_of_an_abort_whenever_it_comes() {
        loom::model(|| {
            let control = Arc::new(control());
            let sleeper = Arc::clone(&control);
            let sleeper = thread::spawn(move || await_abort(&sleeper));
            control.propagate(&ABORTED);
            assert_eq!(sleeper.join().unwrap(), ABORTED);
        });
    }

    #[test]
    fn of_two_ends_everyone_hears_the_same() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(|| {
            let control = Arc::new(control());
            let (sleeper, other) = (Arc::clone(&control), Arc::clone(&control));
            let sleeper = thread::spawn(move || await_abort(&sleeper));
            let other = thread::spawn(move || other.propagate(&LOST));
            control.propagate(&ABORTED);
            let heard = sleeper.join().unwrap();
            other.join().unwrap();
            assert!([ABORTED, LOST].contains(&heard) && control.abort_reason() == Some(heard));
        });
    }

    /// Models ranks that publish, of which the last one wakes a sleeper that waits for all; `fenced` or not.
    fn publish_and_wake(publishers: usize, fenced: bool) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = (publishers > 1).then_some(2);
        builder.check(move || {
            let flags: Vec<Flag> = (0..publishers).map(|_| Flag::new()).collect();
            let shared = Arc::new((control(), flags));
            let have_all = |flags: &[Flag]| flags.iter().all(|flag| flag.has_reached(1));
            let publish = move |shared: &(Control, Vec<Flag>), me: usize| {
                shared.1[me].publish(1);
                if fenced {
                    Control::fence();
                }
                if shared.0.has_sleepers() && have_all(&shared.1) {
                    shared.0.wake();
                }
            };
            let sleeper = Arc::clone(&shared);
            let sleeper = thread::spawn(move || {
                while !have_all(&sleeper.1) {
                    sleeper.0.sleep(Duration::MAX, || have_all(&sleeper.1));
                }
            });
            let others: Vec<_> = (1..publishers)
                .map(|me| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || publish(&shared, me))
                })
                .collect();
            publish(&shared, 0);
            others.into_iter().for_each(|other| other.join().unwrap());
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn who_publishes_with_a_fence_misses_no_sleeper() {
        publish_and_wake(1, true);
    }

    #[test]
    fn of_two_that_publish_one_wakes_whoever_waits_for_both() {
        publish_and_wake(2, true);
    }

    /// Returns two counts: that of the interleavings in which the last look of a sleeper misses a flag whose owner
    /// misses the sleeper, and that of all other interleavings.
    fn misses(fenced: bool) -> [usize; 2] {
        counted(move |seen| {
            let shared = Arc::new((control(), Flag::new()));
            let (sleeper, seen) = (Arc::clone(&shared), std::sync::Arc::clone(seen));
            let sleeper = thread::spawn(move || {
                sleeper.0.announce();
                sleeper.1.has_reached(1)
            });
            shared.1.publish(1);
            if fenced {
                Control::fence();
            }
            let has_sleepers = shared.0.has_sleepers();
            let has_reached = sleeper.join().unwrap();
            count(&seen[usize::from(has_sleepers || has_reached)]);
        })
    }

    #[test]
    fn without_the_fence_a_sleeper_may_be_missed() {
        let ([fenced, _], [bare, _]) = (misses(true), misses(false));
        assert!(fenced == 0 && bare > 0, "{fenced} {bare}");
    }

    #[test]
    fn who_listens_hears_of_what_is_written_after_its_last_look() {
        loom::model(|| {
            let shared = Arc::new((member(), Flag::new()));
            let listener = Arc::clone(&shared);
            let listener = thread::spawn(move || {
                while !listener.1.has_reached(1) {
                    let heard = listener.0.listen();
                    if !listener.1.has_reached(1) {
                        listener.0.doze(heard, Duration::MAX);
                    }
                    listener.0.stop_listening();
                }
            });
            shared.1.publish(1);
            Control::fence();
            shared.0.ring();
            listener.join().unwrap();
        });
    }

    fn member() -> Member {
        let [departed, locked, available] = std::array::from_fn(|_| AtomicU32::new(0));
        let processors = std::array::from_fn(|_| AtomicU64::new(0));
        let (listening, bell) = (AtomicU32::new(0), Futex::new());
        let (left_at, lap) = (AtomicU64::new(0), AtomicU64::new(0));
        Member { departed, locked, left_at, available, lap, processors, listening, bell }
    }

    // In the models below, the reader is the thread that begins later, so that loom lets each of its looks find every
    // value that is not ruled out.

    #[test]
    fn who_sees_that_a_rank_has_left_knows_what_it_told_before() {
        let [both, neither] = counted(|seen| {
            let shared = Arc::new((control(), member()));
            let (reader, seen) = (Arc::clone(&shared), std::sync::Arc::clone(seen));
            let reader = thread::spawn(move || {
                let departed = reader.1.has_departed();
                assert!(!departed || reader.0.abort_reason() == Some(ABORTED));
                count(&seen[usize::from(!departed)]);
            });
            shared.0.propagate(&ABORTED);
            shared.1.depart();
            reader.join().unwrap();
        });
        assert!(both > 0 && neither > 0, "{both} {neither}");
    }

    /// Models the end of a call in which rank 0 has read what rank 1 lent. Rank 1 waits for its readers as `lent` does.
    fn who_waits_for_readers(step: u64, end: impl Fn(&Flag, &Member) + Copy + Send + Sync + 'static) -> [usize; 2] {
        counted(move |seen| {
            // The flag and the record of rank 0, and the buffer.
            let shared = Arc::new((Flag::new(), member(), UnsafeCell::new(LENT)));
            let (writer, seen) = (Arc::clone(&shared), std::sync::Arc::clone(seen));
            let writer = thread::spawn(move || {
                let is_done = writer.0.has_reached(step) || writer.1.has_left_since(step);
                if is_done {
                    // SAFETY: this is what is modelled; loom reports an access that is not ordered.
                    writer.2.with_mut(|buffer| unsafe { *buffer = 0 });
                }
                count(&seen[usize::from(!is_done)]);
            });
            // SAFETY: this is what is modelled; loom reports an access that is not ordered.
            shared.2.with(|buffer| assert_eq!(unsafe { *buffer }, LENT));
            end(&shared.0, &shared.1);
            writer.join().unwrap();
        })
    }

    const LENT: u64 = 7;

    #[test]
    fn what_is_lent_is_not_written_to_before_its_reader_has_come_to_the_end_of_the_call() {
        let [written, not_yet] = who_waits_for_readers(5, |flag, _| flag.publish(5));
        assert!(written > 0 && not_yet > 0, "{written} {not_yet}");
    }

    #[test]
    fn what_is_lent_is_not_written_to_before_its_reader_has_left_the_call() {
        let [written, not_yet] = who_waits_for_readers(5, |_, reader| reader.leave_at(6));
        assert!(written > 0 && not_yet > 0, "{written} {not_yet}");
    }

    #[test]
    fn who_left_an_earlier_call_may_still_come_to_read() {
        let [written, not_yet] = who_waits_for_readers(5, |_, reader| reader.leave_at(4));
        assert!(written == 0 && not_yet > 0, "{written} {not_yet}");
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn what_is_lent_is_not_safe_from_one_that_looks_at_nothing() {
        who_waits_for_readers(0, |_, _| {});
    }

    type Counts = std::sync::Arc<[std::sync::atomic::AtomicUsize; 2]>;

    /// Runs every interleaving. Returns in how many each of two things was seen.
    fn counted(model: impl Fn(&Counts) + Send + Sync + 'static) -> [usize; 2] {
        let counts = Counts::default();
        let seen = std::sync::Arc::clone(&counts);
        loom::model(move || model(&seen));
        std::array::from_fn(|index| counts[index].load(std::sync::atomic::Ordering::Relaxed))
    }

    fn count(counter: &std::sync::atomic::AtomicUsize) {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}
