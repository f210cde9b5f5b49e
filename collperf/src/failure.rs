//! Why a run ended, and the exit code that says so: nccl-tests' codes.

use std::fmt;
use std::io;

use crate::launch;

/// An end that is not the planned one.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) code: u8,
    /// What went wrong, in words.
    pub(crate) message: String,
    /// Whether it is another rank's end that ended this one.
    pub(crate) lost_a_peer: bool,
}

/// A file or a process could not be had.
const INTERNAL: u8 = 1;
/// A collective failed.
pub(crate) const COLLECTIVE: u8 = 3;
/// Time ran out.
const TIMEOUT: u8 = 4;
/// Something that is not there was asked for.
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

    /// Whether something was asked for that is not there.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.code == UNSUPPORTED
    }

    /// An error of the system while doing this, with the limit that it comes from.
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
