//! Serialises launches on a device. Every wait for a lock is bounded.

use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::base::deadline::Deadline;
use crate::base::tuning::device::{AWAKE, FENCE, NAP_SHARE, NAPS, SPINS};
use crate::device::driver::Gpu;

/// One device of this process, however many communicators it has.
#[derive(Debug)]
pub(crate) struct Device {
    /// The number that gives the order in which several devices are locked.
    pub(super) number: usize,
    uuid: [u8; 16],
    lock: Mutex<()>,
    /// The number of turns so far.
    turns: AtomicU64,
    /// Whether a thread waited for the lock without success, and it has not been released since.
    is_held_long: AtomicBool,
}

/// A thread's turn on a device.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    device: &'a Device,
    _lock: MutexGuard<'a, ()>,
}

impl<'a> Turn<'a> {
    #[inline]
    fn new(device: &'a Device, lock: MutexGuard<'a, ()>) -> Self {
        // Only the holder of the lock writes it.
        device.turns.store(device.turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Self { device, _lock: lock }
    }
}

impl Drop for Turn<'_> {
    #[inline]
    fn drop(&mut self) {
        // This runs before the lock is free, because fields are dropped afterwards.
        if self.device.is_held_long.load(Ordering::Relaxed) {
            self.device.is_held_long.store(false, Ordering::Relaxed);
        }
    }
}

/// The devices that have had a communicator. They are never freed: there are few, and locks must outlive their waiters.
static DEVICES: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

impl Device {
    fn new(number: usize, uuid: [u8; 16]) -> Self {
        Self { number, uuid, lock: Mutex::new(()), turns: AtomicU64::new(0), is_held_long: AtomicBool::new(false) }
    }

    /// Returns the one entry of this device, regardless of the context through which it is used.
    pub(crate) fn of(gpu: &Gpu) -> &'static Self {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = devices.iter().find(|device| device.uuid == gpu.uuid) {
            return known;
        }
        let device = Box::leak(Box::new(Self::new(devices.len(), gpu.uuid)));
        devices.push(device);
        device
    }

    /// Waits for this thread's turn to launch on the device; returns `None` if the limit expires first. Serialising the
    /// launches of several communicators is required by some NCCL settings (`launchOrderImplicit`). Most launches end
    /// at once.
    ///
    /// But the thread that has the turn may wait for ranks to which it connects, and these may wait for another
    /// communicator's call on this device. So no thread waits longer than a launch ever takes. After that time the
    /// inner value is `None`: the thread continues without the turn, and until the turn is over, other threads do so at
    /// once. Memory safety does not depend on the turn.
    #[inline]
    pub(super) fn turn(&self, limit: Duration) -> Option<Option<Turn<'_>>> {
        match try_lock(&self.lock) {
            Some(lock) => Some(Some(Turn::new(self, lock))),
            None => self.late_turn(limit),
        }
    }

    #[cold]
    fn late_turn(&self, limit: Duration) -> Option<Option<Turn<'_>>> {
        if limit > FENCE && self.is_held_long.load(Ordering::Relaxed) {
            return Some(None);
        }
        let deadline = Deadline::after(limit);
        loop {
            let turns = self.turns.load(Ordering::Relaxed);
            let patience = deadline.remaining();
            if let Some(lock) = lock_within(&self.lock, patience.min(FENCE)) {
                return Some(Some(Turn::new(self, lock)));
            }
            if patience <= FENCE {
                return None;
            }
            // If many threads take turns, none of them may have taken long.
            if self.turns.load(Ordering::Relaxed) == turns {
                self.is_held_long.store(true, Ordering::Relaxed);
                return Some(None);
            }
        }
    }
}

/// Locks, or gives up after `limit`. A free lock costs no more than usual: the clock is read only if the lock is not
/// free.
#[inline]
pub(super) fn lock_within<T>(mutex: &Mutex<T>, limit: Duration) -> Option<MutexGuard<'_, T>> {
    try_lock(mutex).or_else(|| wait_for(mutex, limit))
}

#[cold]
fn wait_for<T>(mutex: &Mutex<T>, limit: Duration) -> Option<MutexGuard<'_, T>> {
    let deadline = Deadline::after(limit);
    let mut back_off = BackOff::default();
    while !deadline.has_passed() {
        if let Some(guard) = try_lock(mutex) {
            return Some(guard);
        }
        back_off.rest();
    }
    None
}

/// Locks if no other thread has the lock. A panic of an earlier holder does not matter: these locks hold nothing that
/// could be half changed.
#[inline]
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Pauses between two polls of a device or another thread. The first pauses are very short; later ones are sleeps for a
/// share of the time waited so far. So the end of the wait is noticed late by at most that share. Each wait has its own
/// value.
///
/// While awake it does not yield the core: on a busy host, others would then keep the core for milliseconds, whereas a
/// sleeping thread is woken at once.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    looks: u32,
    /// When the clock was first read.
    began: Option<Instant>,
    slack: Option<TimerSlack>,
}

/// The action between two polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    Spin,
    Nap(Duration),
}

/// Returns the pause after this many polls and this time.
fn pause(looks: u32, waited: impl FnOnce() -> Duration) -> Pause {
    if looks < SPINS {
        return Pause::Spin;
    }
    match waited() {
        waited if waited < AWAKE => Pause::Spin,
        waited => Pause::Nap((waited / NAP_SHARE).clamp(NAPS.0, NAPS.1)),
    }
}

impl BackOff {
    pub(crate) fn rest(&mut self) {
        self.rest_within(Duration::MAX);
    }

    /// Pauses like [`BackOff::rest`], for no longer than `limit`.
    pub(crate) fn rest_within(&mut self, limit: Duration) {
        self.rest_on(|nap| thread::sleep(nap.min(limit)));
    }

    /// Pauses like [`BackOff::rest`], but sleeps on something that may wake the sleeper.
    pub(crate) fn rest_on(&mut self, sleep: impl FnOnce(Duration)) {
        self.looks = self.looks.saturating_add(1);
        let began = &mut self.began;
        match pause(self.looks, || began.get_or_insert_with(Instant::now).elapsed()) {
            Pause::Spin => std::hint::spin_loop(),
            Pause::Nap(nap) => {
                self.slack.get_or_insert_with(TimerSlack::none);
                sleep(nap);
            }
        }
    }
}

/// Makes the kernel wake this thread at the requested time, and not up to 50 µs later. Dropping this value restores the
/// program's setting.
#[derive(Debug)]
struct TimerSlack {
    before: Option<NonZeroU64>,
    /// The setting belongs to a thread.
    _stays: PhantomData<*const ()>,
}

impl TimerSlack {
    fn none() -> Self {
        let before = rustix::thread::current_timer_slack().ok().and_then(NonZeroU64::new);
        // Without this setting, the kernel merely wakes the thread late.
        let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
        Self { before, _stays: PhantomData }
    }
}

impl Drop for TimerSlack {
    fn drop(&mut self) {
        if self.before.is_some() {
            let _ = rustix::thread::set_current_timer_slack(self.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_held_is_given_up_after_the_limit_and_taken_when_it_comes_free() {
        let mutex = Mutex::new(7);
        let held = lock_within(&mutex, Duration::ZERO).unwrap();
        thread::scope(|scope| {
            assert!(scope.spawn(|| lock_within(&mutex, Duration::from_millis(5)).is_none()).join().unwrap());
            let waiting = scope.spawn(|| lock_within(&mutex, Duration::from_secs(60)).map(|guard| *guard));
            drop(held);
            assert_eq!(waiting.join().unwrap(), Some(7));
        });
    }

    #[test]
    fn a_turn_that_takes_long_is_waited_for_once() {
        let device = Device::new(0, [0; 16]);
        let is_held_long = || device.is_held_long.load(Ordering::Relaxed);
        let held = device.turn(FENCE).flatten();
        assert!(held.is_some() && device.turn(Duration::ZERO).is_none() && !is_held_long());
        assert!(matches!(device.turn(2 * FENCE), Some(None)) && is_held_long());
        // The lock is marked as held long, so these calls do not wait for an hour.
        for _ in 0..3600 {
            assert!(matches!(device.turn(2 * FENCE), Some(None)));
        }
        assert!(device.turn(Duration::ZERO).is_none());
        drop(held);
        assert!(!is_held_long() && matches!(device.turn(FENCE), Some(Some(_))));
    }

    #[test]
    fn a_panic_under_a_lock_leaves_it_usable() {
        let mutex = Mutex::new(());
        let panicked = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _guard = lock_within(&mutex, Duration::ZERO);
                panic!("on purpose");
            });
            holder.join().is_err()
        });
        assert!(panicked && lock_within(&mutex, Duration::ZERO).is_some());
    }

    /// Returns how often a wait of this length polls and sleeps, if polls take `look` and sleeps take as long as
    /// requested.
    fn looks(wait: Duration, look: Duration) -> (u32, u32) {
        let (mut time, mut looks, mut naps) = (Duration::ZERO, 0, 0);
        while time < wait {
            looks += 1;
            time += look;
            if let Pause::Nap(nap) = pause(looks, || time) {
                naps += 1;
                assert!(nap <= NAPS.0.max(time / NAP_SHARE) && nap <= NAPS.1, "{nap:?} after {time:?}");
                time += nap;
            }
        }
        (looks, naps)
    }

    #[test]
    fn short_waits_do_not_sleep_and_long_ones_do_little_else() {
        let micros = Duration::from_micros;
        assert_eq!(looks(micros(200), micros(1)), (200, 0));
        assert_eq!(looks(AWAKE - micros(1), micros(1)).1, 0);
        // The shortest sleeps up to 640 µs, then each 1/128 of the time before it up to 128 ms, then the longest.
        let growing = (200_f64.ln() / (129_f64 / 128.0).ln()) as u32;
        let (looks, naps) = looks(Duration::from_secs(1), micros(1));
        assert!(naps.abs_diff(40 + growing + 872) < 60 && looks < naps + 500, "{looks} looks and {naps} sleeps");
    }

    #[test]
    fn a_thread_has_its_timer_slack_again_after_a_wait() {
        let slack = || rustix::thread::current_timer_slack().unwrap();
        let before = slack();
        assert!(before > 1, "the kernel's own is 50 µs");
        let mut back_off = BackOff::default();
        let mut asleep = None;
        while asleep.is_none() {
            assert_eq!(slack(), before, "only who sleeps needs it");
            back_off.rest_on(|nap| asleep = Some((nap, slack())));
        }
        assert_eq!(asleep.map(|(nap, slack)| (nap >= NAPS.0, slack)), Some((true, 1)));
        drop(back_off);
        assert_eq!(slack(), before);
    }
}
