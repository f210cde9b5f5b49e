//! Waits between threads of a test that end: where what is waited for does not come, since its thread has failed, they panic.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long something may take that is not stuck: so many seconds, and more of them where the thread sanitizer or Miri looks on.
pub const fn patience(seconds: u64) -> Duration {
    Duration::from_secs(if cfg!(any(one_mapping, miri)) { 10 * seconds } else { seconds })
}

/// How long a wait may take.
const PATIENCE: Duration = patience(20);

/// Where the ranks of a test wait for each other without their communicator. One that waits in vain panics.
pub struct Meeting {
    ranks: usize,
    arrived: Mutex<usize>,
    bell: Condvar,
}

impl Meeting {
    pub fn new(ranks: usize) -> Self {
        Self { ranks, arrived: Mutex::new(0), bell: Condvar::new() }
    }

    /// Returns when every rank has come as often as this one.
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

/// Looks again and again until `condition` holds; panics where that takes too long.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// Sets it when it is dropped, however the thread that has it ends.
pub struct End<'a>(pub &'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
