//! The signals that a launcher receives, and what they request of its job.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

/// Two signals within this time are one request that arrived twice, as from `timeout`, which signals a program and its
/// group.
const ONE_PRESS: Duration = Duration::from_millis(50);

/// The request that a signal makes to the launcher. The signal is also passed on to the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Nothing.
    Nothing,
    /// The ranks must end within their grace period.
    Stop,
    /// The ranks must end immediately.
    Kill,
}

/// The requests to stop that have arrived so far.
#[derive(Debug, Default)]
pub struct Interrupts {
    first: Option<Instant>,
}

impl Interrupts {
    /// Records a signal and returns what it requests. The second Ctrl-C kills the ranks. A second SIGTERM does not kill
    /// them, because schedulers repeat SIGTERM.
    pub fn heard(&mut self, signal: i32, now: Instant) -> Request {
        match (signal, self.first) {
            (SIGKILL, _) => Request::Kill,
            (SIGINT | SIGQUIT | SIGTERM, None) => {
                self.first = Some(now);
                Request::Stop
            }
            (SIGINT | SIGQUIT, Some(first)) if now.saturating_duration_since(first) >= ONE_PRESS => Request::Kill,
            _ => Request::Nothing,
        }
    }
}

/// Whether a signal ends the job: it is not restarted afterwards.
pub(super) fn ends_jobs(signal: i32) -> bool {
    [SIGINT, SIGTERM, SIGQUIT, SIGHUP, SIGPIPE].contains(&signal)
}

/// Returns the name of a signal: `SIGKILL` for 9.
pub fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("no name")
}

/// Starts a thread that calls `heard` with the signal whenever one of `signals` arrives. The thread ends when `heard`
/// returns `false`. A signal that was already ignored when this process started stays ignored, and `heard` is not called
/// for it.
///
/// # Errors
///
/// If a signal cannot be caught, or the thread cannot be started.
pub fn on_signals(signals: &[i32], heard: impl Fn(i32) -> bool + Send + 'static) -> io::Result<()> {
    let ignored = ignored_signals();
    // A launcher under nohup ignores SIGHUP, and keeps ignoring it.
    let wanted = signals.iter().copied().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = Signals::new(wanted)?;
    thread::Builder::new().name("signals".into()).spawn(move || signals.forever().all(heard))?;
    Ok(())
}

/// Returns the signals that this process was started to ignore, one bit each; none if the kernel does not report them.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::SIGUSR1;

    use super::*;

    /// Returns the requests of signals that arrive at these times, in milliseconds after the start.
    fn asked(signals: &[(i32, u64)]) -> Vec<Request> {
        let (mut interrupts, start) = (Interrupts::default(), Instant::now());
        signals.iter().map(|(signal, after)| interrupts.heard(*signal, start + Duration::from_millis(*after))).collect()
    }

    #[test]
    fn the_second_press_asks_no_more() {
        assert_eq!(
            asked(&[(SIGUSR1, 0), (SIGINT, 1), (SIGINT, 2), (SIGINT, 200)]),
            [Request::Nothing, Request::Stop, Request::Nothing, Request::Kill]
        );
        assert_eq!(asked(&[(SIGTERM, 0), (SIGTERM, 900), (SIGINT, 950)]), [Request::Stop, Request::Nothing, Request::Kill]);
        assert_eq!(asked(&[(SIGHUP, 0), (SIGKILL, 0)]), [Request::Nothing, Request::Kill]);
    }
}
