//! One thread per process that notices calls that do not end, and aborts their communicators.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::device::comm::Inner;
use crate::device::driver;

/// The time between two rounds: a tenth of the shortest timeout, within these.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Watch {
    communicators: Vec<Weak<Inner>>,
    running: bool,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { communicators: Vec::new(), running: false });
/// A communicator came: the next round may be due earlier.
static CAME: Condvar = Condvar::new();

/// Has a communicator watched until it ends. The thread is there while any communicator is.
pub(super) fn watch(communicator: &Arc<Inner>) -> io::Result<()> {
    let mut watch = lock();
    if !watch.running {
        thread::Builder::new().name("collectives-watchdog".to_owned()).spawn(run)?;
        watch.running = true;
    }
    watch.communicators.push(Arc::downgrade(communicator));
    drop(watch);
    CAME.notify_one();
    Ok(())
}

fn run() {
    driver::ignore_captures();
    let mut watch = lock();
    while let Some(communicators) = living(&mut watch) {
        drop(watch);
        let mut rest = LONGEST;
        for communicator in communicators {
            communicator.watchdog_check(Instant::now());
            rest = rest.min(communicator.limit() / 10);
        }
        watch = lock();
        let waited = CAME.wait_timeout(watch, rest.max(SHORTEST));
        watch = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    watch.running = false;
}

/// The communicators that have not ended; nothing where there is none.
fn living(watch: &mut Watch) -> Option<Vec<Arc<Inner>>> {
    let alive = |communicator: &Weak<Inner>| communicator.upgrade().filter(|communicator| !communicator.is_ended());
    let mut living = Vec::with_capacity(watch.communicators.len());
    watch.communicators.retain(|communicator| alive(communicator).map(|communicator| living.push(communicator)).is_some());
    (!living.is_empty()).then_some(living)
}

fn lock() -> MutexGuard<'static, Watch> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}
