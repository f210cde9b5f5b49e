//! An executor of one future, which polls it only after a wake-up.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Wakes a thread and counts the wake-ups.
struct Unpark(std::thread::Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.unpark();
    }
}

/// Runs a future on this thread and polls it again only after a wake-up. Returns its output and the number of wake-ups.
pub fn block_on<F: Future>(future: F) -> (F::Output, usize) {
    let mut future = pin!(future);
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&unpark));
    let mut woken = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return (output, woken);
        }
        let began = Instant::now();
        while unpark.1.load(Ordering::Relaxed) == woken {
            // An unpark token of something else may be left.
            std::thread::park_timeout(Duration::from_secs(20));
            assert!(began.elapsed() < Duration::from_secs(20), "nobody woke the task");
        }
        woken = unpark.1.load(Ordering::Relaxed);
    }
}
