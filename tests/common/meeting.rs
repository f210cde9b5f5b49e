//! Waits between the threads of a test. If a wait takes too long, because another thread has failed, it panics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Returns a limit of `seconds` for what is not stuck, and a longer one under the thread sanitizer or Miri.
pub const fn patience(seconds: u64) -> Duration {
    Duration::from_secs(if cfg!(any(one_mapping, miri)) { 10 * seconds } else { seconds })
}

/// The limit of a wait.
const PATIENCE: Duration = patience(20);

/// A barrier between the ranks of a test that does not use their communicator. A wait that takes too long panics.
pub struct Meeting {
    ranks: usize,
    arrived: Mutex<usize>,
    bell: Condvar,
}

impl Meeting {
    pub fn new(ranks: usize) -> Self {
        Self { ranks, arrived: Mutex::new(0), bell: Condvar::new() }
    }

    /// Returns when every rank has arrived as often as this one.
    #[track_caller]
    pub fn meet(&self) {
        let mut arrived = self.arrived.lock().unwrap();
        let target = (*arrived / self.ranks + 1) * self.ranks;
        *arrived += 1;
        self.bell.notify_all();
        let (arrived, wait) = self.bell.wait_timeout_while(arrived, PATIENCE, |arrived| *arrived < target).unwrap();
        drop(arrived);
        assert!(!wait.timed_out(), "the other ranks did not come");
    }
}

/// Polls until `condition` holds. Panics if that takes too long.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// A flag that is set on drop, so however its thread ends.
pub struct End<'a>(pub &'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
