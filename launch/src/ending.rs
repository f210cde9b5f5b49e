//! How a rank ended.

use std::fmt;

use rustix::process::WaitIdStatus;

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It exited with this code.
    Exit(i32),
    /// This signal killed it.
    Signal(i32),
}

impl Ending {
    /// What the kernel says about a process that has ended.
    pub(super) fn of(status: &WaitIdStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self::Exit(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Exit(1),
        }
    }

    /// Whether the rank did what it should.
    pub(super) fn is_success(self) -> bool {
        self == Self::Exit(0)
    }

    /// As shells number it: the code, or 128 and the signal.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code as u8,
            Self::Signal(signal) => 128_u8.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX)),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
        }
    }
}

/// `SIGKILL` for 9.
pub(super) fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("no name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_numbered_as_shells_do() {
        assert_eq!(Ending::Exit(3).code(), 3);
        assert_eq!(Ending::Signal(9).code(), 137);
        assert_eq!(Ending::Signal(15).to_string(), "signal 15 (SIGTERM)");
        assert!(Ending::Exit(0).is_success() && !Ending::Exit(1).is_success() && !Ending::Signal(1).is_success());
    }
}
