//! Ends tests that are stuck: time limits for the processes that they started, and for the test itself.

use std::process::Child;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};

/// Long enough for anything that is not stuck. The thread sanitizer is slow.
pub const PATIENCE: Duration = Duration::from_secs(if cfg!(one_mapping) { 600 } else { 120 });

/// Kills a process that has not ended when its time is over, or when this value is dropped.
pub struct Limit {
    dropped: Option<Sender<()>>,
    watching: Option<JoinHandle<()>>,
}

impl Limit {
    /// Limits a child that has not been waited for yet.
    pub fn on(child: &Child) -> Self {
        Self::of(Pid::from_child(child))
    }

    fn of(child: Pid) -> Self {
        let process = pidfd_open(child, PidfdFlags::empty()).unwrap();
        let (dropped, waiting) = channel::<()>();
        let watching = std::thread::spawn(move || {
            let _ = waiting.recv_timeout(PATIENCE);
            // A child that has been waited for is not found, which is fine.
            let _ = pidfd_send_signal(process, Signal::KILL);
        });
        Self { dropped: Some(dropped), watching: Some(watching) }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        drop(self.dropped.take());
        self.watching.take().map(JoinHandle::join);
    }
}

/// Returns the exit status of a forked child. Kills it if it is stuck.
pub fn exit_status(child: i32) -> Option<i32> {
    let child = Pid::from_raw(child).unwrap();
    let _limit = Limit::of(child);
    let (_, status) = waitpid(Some(child), WaitOptions::empty()).unwrap().unwrap();
    status.exit_status()
}

/// Returns what `work` returns, or panics as it does. Ends the process if `work` is stuck, since its thread cannot be
/// ended.
pub fn within<R: Send + 'static>(what: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, ended) = channel();
    let thread = std::thread::spawn(move || {
        let _done = done;
        work()
    });
    if ended.recv_timeout(PATIENCE) == Err::<(), _>(RecvTimeoutError::Timeout) {
        eprintln!("{what}: stuck for {PATIENCE:?}");
        std::process::abort();
    }
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
