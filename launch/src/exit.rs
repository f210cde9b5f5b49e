//! Waits for the end of a process, and describes how it ended.

use std::fmt;

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, waitid};

use super::signals::signal_name;

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitReason {
    /// The process exited with this code.
    Exit(i32),
    /// This signal killed it.
    Signal(i32),
}

impl ExitReason {
    /// Converts the kernel's status of a process that has ended.
    fn of(status: &WaitIdStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self::Exit(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Exit(1),
        }
    }

    /// Whether the process succeeded.
    pub(super) fn is_success(self) -> bool {
        self == Self::Exit(0)
    }

    /// Returns the code that shells report: the exit code, or 128 plus the signal.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code as u8,
            Self::Signal(signal) => 128_u8.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX)),
        }
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
        }
    }
}

/// Waits until a child of this process has ended, but does not reap the child. The system does not reuse the child's
/// process id before the child is reaped.
pub fn wait_for_end(process: Pid) {
    wait_for(process);
}

/// Waits until a process has ended, without reaping it.
pub(super) fn wait_for(process: Pid) -> ExitReason {
    loop {
        match waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => return ExitReason::of(&status),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            // Already reaped. Only the supervisor's drop does that, and then the result is not used.
            Err(_) => return ExitReason::Exit(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_numbered_as_shells_do() {
        assert_eq!(ExitReason::Exit(3).code(), 3);
        assert_eq!(ExitReason::Signal(9).code(), 137);
        assert_eq!(ExitReason::Signal(15).to_string(), "signal 15 (SIGTERM)");
        assert!(ExitReason::Exit(0).is_success() && !ExitReason::Exit(1).is_success() && !ExitReason::Signal(1).is_success());
    }
}
