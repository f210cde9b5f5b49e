//! Launches on a device one after the other, and no lock that is waited for without an end.

use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::base::deadline::Deadline;
use crate::base::tuning::device::{AWAKE, FENCE, NAP_SHARE, NAPS, SPINS};
use crate::device::driver::Gpu;

/// One device of this process, whatever the number of its communicators.
#[derive(Debug)]
pub(crate) struct Device {
    /// The order in which several devices are locked.
    pub(super) number: usize,
    uuid: [u8; 16],
    lock: Mutex<()>,
    /// How many turns there were.
    turns: AtomicU64,
    /// Whether somebody waited for the lock in vain, and it has not been given back since.
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
        // Whoever has the lock is the only one to write it.
        device.turns.store(device.turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Self { device, _lock: lock }
    }
}

impl Drop for Turn<'_> {
    #[inline]
    fn drop(&mut self) {
        // Before the lock is free, as fields are dropped afterwards.
        if self.device.is_held_long.load(Ordering::Relaxed) {
            self.device.is_held_long.store(false, Ordering::Relaxed);
        }
    }
}

/// The devices that have had a communicator. They stay: there are few, and locks must outlive whoever waits for them.
static DEVICES: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

impl Device {
    fn new(number: usize, uuid: [u8; 16]) -> Self {
        Self { number, uuid, lock: Mutex::new(()), turns: AtomicU64::new(0), is_held_long: AtomicBool::new(false) }
    }

    /// The one entry of this device, whichever context it is used through.
    pub(crate) fn of(gpu: &Gpu) -> &'static Self {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = devices.iter().find(|device| device.uuid == gpu.uuid) {
            return known;
        }
        let device = Box::leak(Box::new(Self::new(devices.len(), gpu.uuid)));
        devices.push(device);
        device
    }

    /// A thread's turn to launch on this device; nothing where it does not come within the limit. Some settings of NCCL's want launches of
    /// several communicators one after the other (`launchOrderImplicit`), and most end at once.
    ///
    /// Whoever has the turn may also wait for ranks to connect to, which may wait for another communicator's call on this device. So nobody
    /// waits for longer than a launch ever takes: the inner `None` goes on without, and others do so at once until the turn is over. Nothing that is
    /// safe depends on the turn.
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
            // Where many take turns, none of them may have taken long.
            if self.turns.load(Ordering::Relaxed) == turns {
                self.is_held_long.store(true, Ordering::Relaxed);
                return Some(None);
            }
        }
    }
}

/// Locks, or gives up after `limit`. Free locks cost as much as ever; the clock is read only where one is not.
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

/// Locks where nobody else has. A panic of whoever held it does not matter: nothing is kept in these locks that could be half changed.
#[inline]
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Rests between two looks at what a device or another thread brings about: hardly at all, then asleep for a share of what has been waited, so that
/// the end is seen late by no more than that share. One value is for one wait.
///
/// The core is not given up in between: on a host whose cores are busy others keep it for milliseconds then, where a sleeper is woken at once.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    looks: u32,
    /// Where the clock was read first.
    began: Option<Instant>,
    slack: Option<TimerSlack>,
}

/// What to do between two looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    Spin,
    Nap(Duration),
}

/// After so long a wait without the clock, and one by it.
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

    /// As [`BackOff::rest`], for no longer than that.
    pub(crate) fn rest_within(&mut self, limit: Duration) {
        self.rest_on(|nap| thread::sleep(nap.min(limit)));
    }

    /// As [`BackOff::rest`], asleep on something that may wake the sleeper.
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

/// Has this thread woken when it asked to be, and not up to 50 µs later, until it is dropped: then it has the program's setting again.
#[derive(Debug)]
struct TimerSlack {
    before: Option<NonZeroU64>,
    /// It is a thread's.
    _stays: PhantomData<*const ()>,
}

impl TimerSlack {
    fn none() -> Self {
        let before = rustix::thread::current_timer_slack().ok().and_then(NonZeroU64::new);
        // A kernel without this setting wakes threads late, and that is all.
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
        // Nobody waits now, so that these are no wait of an hour.
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

    /// How often a wait of this length looks, and how often it sleeps, where looks take `look` and sleeps take as long as they are asked to.
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
