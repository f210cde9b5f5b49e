//! An executor of one future, which polls it only where it was woken.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Wakes a thread, and counts.
struct Unpark(std::thread::Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.unpark();
    }
}

/// Runs a future on this thread; it is polled again only where it was woken. How often it was.
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
            // A token may be left of something else.
            std::thread::park_timeout(Duration::from_secs(20));
            assert!(began.elapsed() < Duration::from_secs(20), "nobody woke the task");
        }
        woken = unpark.1.load(Ordering::Relaxed);
    }
}
