//! Errors before NCCL itself is called: no library, or a function that it lacks.

use std::error::Error;
use std::fmt;

use crate::{Version, ncclResult_t};

/// No NCCL could be opened. Lists every file that was tried, and why each was not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    pub(crate) attempts: Vec<Attempt>,
}

/// One file that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The name as it was passed to the system's loader.
    pub name: String,
    /// Why it was not used.
    pub reason: Reason,
}

/// Why a file was not used as NCCL.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The system's loader refused it, with this text.
    NotOpened(String),
    /// It is a library without a function `ncclGetVersion`.
    NotNccl,
    /// Its `ncclGetVersion` failed with this code.
    VersionFailed(ncclResult_t),
}

impl LoadError {
    /// Returns the attempts, in order.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot open NCCL: ")?;
        for (number, attempt) in self.attempts.iter().enumerate() {
            write!(f, "{}{attempt}", if number == 0 { "" } else { "; " })?;
        }
        write!(
            f,
            ". Install NCCL (libnccl2, or the Python wheel nvidia-nccl-cu12 or -cu13), or name the file libnccl.so.2 by its whole path"
        )
    }
}

impl Error for LoadError {}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            // The loader's text mostly begins with the name.
            Reason::NotOpened(words) if words.starts_with(&self.name) => write!(f, "{words}"),
            Reason::NotOpened(words) => write!(f, "{}: {words}", self.name),
            Reason::NotNccl => write!(f, "{}: not NCCL, for it has no function ncclGetVersion", self.name),
            Reason::VersionFailed(code) => write!(f, "{}: its ncclGetVersion failed with code {}", self.name, code.0),
        }
    }
}

/// The loaded library does not have the function that was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingSymbol {
    /// The name of the function.
    pub symbol: &'static str,
    /// The first release that has it.
    pub since: Version,
    /// The release that is loaded.
    pub loaded: Version,
}

impl fmt::Display for MissingSymbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { symbol, since, loaded } = self;
        if loaded < since {
            write!(f, "{symbol} needs NCCL {since} or later, and the loaded library is {loaded}")
        } else {
            write!(f, "{symbol} is missing from the loaded library: it calls itself NCCL {loaded}, and NCCL has the function since {since}")
        }
    }
}

impl Error for MissingSymbol {}
