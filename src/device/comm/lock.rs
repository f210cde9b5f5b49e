//! Launches on a device one after the other, and no lock that is waited for without an end.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::device::driver::Gpu;
use crate::tuning::device::{FENCE, SLEEP_MICROS, SPINS, YIELDS};

/// One device of this process, whatever the number of its communicators.
#[derive(Debug)]
pub(crate) struct Device {
    /// The order in which several devices are locked.
    pub(super) number: usize,
    uuid: [u8; 16],
    pub(super) lock: Mutex<()>,
}

/// The devices that have had a communicator. They stay: there are few, and locks must outlive whoever waits for them.
static DEVICES: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

impl Device {
    /// The one entry of this device, whichever context it is used through.
    pub(crate) fn of(gpu: &Gpu) -> &'static Self {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = devices.iter().find(|device| device.uuid == gpu.uuid) {
            return known;
        }
        let device = Box::leak(Box::new(Self { number: devices.len(), uuid: gpu.uuid, lock: Mutex::new(()) }));
        devices.push(device);
        device
    }

    /// A thread's turn to launch on this device; nothing where it does not come within the limit. Some settings of NCCL's want launches of
    /// several communicators one after the other (`launchOrderImplicit`), and most end at once.
    ///
    /// Whoever has the turn may also wait for ranks to connect to, which may wait for another communicator's call on this device. So nobody
    /// waits for longer than a launch ever takes: the inner `None` goes on without. Nothing that is safe depends on the turn.
    #[inline]
    pub(super) fn turn(&self, limit: Duration) -> Option<Option<MutexGuard<'_, ()>>> {
        let turn = lock_within(&self.lock, limit.min(FENCE));
        (turn.is_some() || limit > FENCE).then_some(turn)
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

/// Rests between two looks: first hardly at all, then longer from look to look, for up to a millisecond.
#[derive(Debug, Default)]
pub(in crate::device) struct BackOff(u32);

impl BackOff {
    pub(in crate::device) fn rest(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..SPINS => std::hint::spin_loop(),
            SPINS..YIELDS => thread::yield_now(),
            looks => thread::sleep(Duration::from_micros(u64::from((looks - YIELDS).clamp(SLEEP_MICROS.0, SLEEP_MICROS.1)))),
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
}
