//! Ctrl-C while a call blocks the main thread.
//!
//! Python runs signal handlers only on the main thread, between two instructions. While a call blocks this thread, no
//! handler runs. So a thread here reads Python's wakeup descriptor, to which Python writes the number of each signal as
//! soon as it arrives. For SIGINT, this thread ends the call that blocks the main thread: it aborts the call's group.
//! Then the main thread returns to Python, and the handler raises `KeyboardInterrupt`.
//!
//! The thread ends a call only if Python's own handler is set, which always raises. A handler of the program may only
//! set a variable, and let the call end.

use std::cell::Cell;
use std::io::{ErrorKind, PipeReader, Read};
use std::os::fd::IntoRawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use collectives::Communicator;
use pyo3::prelude::*;

/// The number of SIGINT on Linux.
const SIGINT: u8 = 2;
/// How long an interrupted call has to end by itself, so that Ctrl-C in a healthy job ends no group.
const GRACE: Duration = Duration::from_millis(300);

/// The call that blocks the main thread.
struct Blocked {
    /// The number of calls that have blocked the main thread so far.
    number: u64,
    /// `None` if no call blocks it now.
    comm: Option<Communicator>,
}

static BLOCKED: Mutex<Blocked> = Mutex::new(Blocked { number: 0, comm: None });
/// Notified when a call no longer blocks the main thread.
static ENDED: Condvar = Condvar::new();

thread_local! {
    /// Whether this is the main thread, and its signals are read.
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

fn lock() -> MutexGuard<'static, Blocked> {
    BLOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Marks the main thread as blocked until it is dropped.
struct Blocking;

impl Drop for Blocking {
    fn drop(&mut self) {
        // The communicator is dropped without the lock, because that may take long.
        let comm = lock().comm.take();
        ENDED.notify_all();
        drop(comm);
    }
}

/// Runs a call that blocks this thread. On the main thread, SIGINT ends it.
pub(crate) fn interruptible<T>(comm: &Communicator, call: impl FnOnce() -> T) -> T {
    let _blocking = IS_WATCHED.get().then(|| {
        let mut blocked = lock();
        blocked.number += 1;
        blocked.comm = Some(comm.clone());
        Blocking
    });
    call()
}

/// Starts to read the signals of the main thread, which calls this. Returns the number of the descriptor to which
/// Python must write the signals.
#[pyfunction]
pub(crate) fn read_signals() -> PyResult<i32> {
    let (reader, writer) = std::io::pipe()?;
    std::thread::Builder::new().name("collectives-sigint".to_owned()).spawn(move || read(reader))?;
    IS_WATCHED.set(true);
    // Python may write as long as the process runs.
    Ok(writer.into_raw_fd())
}

/// Ends the blocked call at each SIGINT.
fn read(mut reader: PipeReader) {
    let mut signals = [0; 64];
    loop {
        match reader.read(&mut signals) {
            Ok(count @ 1..) if signals[..count].contains(&SIGINT) => interrupt(),
            Ok(1..) => {}
            // The signal has interrupted this thread itself.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
        }
    }
}

/// Aborts the group of the call that blocks the main thread now, unless the call ends by itself.
fn interrupt() {
    let blocked = lock();
    let number = blocked.number;
    let is_still_blocked = |blocked: &mut Blocked| blocked.number == number && blocked.comm.is_some();
    let (blocked, _) = ENDED.wait_timeout_while(blocked, GRACE, is_still_blocked).unwrap_or_else(PoisonError::into_inner);
    let comm = blocked.comm.clone().filter(|_| blocked.number == number);
    drop(blocked);
    if let Some(comm) = comm
        && Python::try_attach(|py| has_default_handler(py).unwrap_or(false)) == Some(true)
    {
        comm.abort();
    }
}

/// Whether SIGINT raises `KeyboardInterrupt`.
fn has_default_handler(py: Python<'_>) -> PyResult<bool> {
    let signal = py.import("signal")?;
    Ok(signal.call_method1("getsignal", (SIGINT,))?.is(&signal.getattr("default_int_handler")?))
}
