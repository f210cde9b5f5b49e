//! The reason why a run ended, and its exit code, which is one of nccl-tests' codes.

use std::fmt;
use std::io;

use crate::launch;

/// The reason why a run ended early, and its exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) code: u8,
    /// The error message.
    pub(crate) message: String,
    /// Whether the run ended because another rank was lost.
    pub(crate) lost_a_peer: bool,
}

/// A file or a process was not available.
const INTERNAL: u8 = 1;
/// A collective failed.
pub(crate) const COLLECTIVE: u8 = 3;
/// Time ran out.
const TIMEOUT: u8 = 4;
/// The command line asks for something that is not supported.
const UNSUPPORTED: u8 = 5;
/// The command line is wrong.
pub(crate) const USAGE: u8 = 6;
/// Elements were wrong, or the bandwidth was below the floor.
pub(crate) const CHECK: u8 = 7;

impl Failure {
    pub(crate) fn internal(message: impl fmt::Display) -> Self {
        Self { code: INTERNAL, message: message.to_string(), lost_a_peer: false }
    }

    pub(crate) fn unsupported(message: impl fmt::Display) -> Self {
        Self { code: UNSUPPORTED, message: message.to_string(), lost_a_peer: false }
    }

    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self { code: USAGE, message: message.to_string(), lost_a_peer: false }
    }

    /// Whether the run ended because something is not supported.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.code == UNSUPPORTED
    }

    /// Creates the failure of a system call that was `doing` something. If a limit caused it, the message names the
    /// limit.
    pub(crate) fn io(doing: impl fmt::Display, error: &io::Error) -> Self {
        Self::internal(format!("{doing}: {}", launch::explained(error)))
    }
}

impl From<collectives::Error> for Failure {
    fn from(error: collectives::Error) -> Self {
        let code = match &error {
            error if error.is_timeout() => TIMEOUT,
            error if error.is_unsupported() => UNSUPPORTED,
            collectives::Error::NoDevice { .. } => UNSUPPORTED,
            collectives::Error::Config { .. } => USAGE,
            _ => COLLECTIVE,
        };
        Self { code, message: error.to_string(), lost_a_peer: error.is_peer_lost() }
    }
}
