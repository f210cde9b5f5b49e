//! Errors that occur before NCCL itself is called: there is no library, or the library lacks a function.

use std::error::Error;
use std::fmt;

use crate::{Version, ncclResult_t};

/// No NCCL library could be opened. The error lists every file that was tried, with the reason why that file was not
/// used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    pub(crate) attempts: Vec<Attempt>,
}

/// One file that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The name of the file, as it was passed to the system's loader.
    pub name: String,
    /// The reason why this file was not used.
    pub reason: Reason,
}

/// The reason why a file was not used as NCCL.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The system's loader could not open the file. Contains the loader's text.
    NotOpened(String),
    /// The file is a library without a function `ncclGetVersion`.
    NotNccl,
    /// The library's `ncclGetVersion` failed with this code.
    VersionFailed(ncclResult_t),
}

impl LoadError {
    /// Returns the attempts, in the order in which they were made.
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
            ". Install NCCL (the package libnccl2, or the Python wheel nvidia-nccl-cu12 or nvidia-nccl-cu13), \
             or give the full path of libnccl.so.2"
        )
    }
}

impl Error for LoadError {}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            // The loader's text usually begins with the name.
            Reason::NotOpened(words) if words.starts_with(&self.name) => write!(f, "{words}"),
            Reason::NotOpened(words) => write!(f, "{}: {words}", self.name),
            Reason::NotNccl => write!(f, "{}: this file is not NCCL, because it has no function ncclGetVersion", self.name),
            Reason::VersionFailed(code) => write!(f, "{}: its ncclGetVersion failed with code {}", self.name, code.0),
        }
    }
}

/// The loaded library does not have the function that was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingSymbol {
    /// The name of the function.
    pub symbol: &'static str,
    /// The first release that has the function.
    pub since: Version,
    /// The release of the loaded library.
    pub loaded: Version,
}

impl fmt::Display for MissingSymbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { symbol, since, loaded } = self;
        if loaded < since {
            write!(f, "{symbol} needs NCCL {since} or later, but the loaded library is {loaded}")
        } else {
            write!(
                f,
                "{symbol} is missing from the loaded library, although the library reports NCCL {loaded} \
                 and NCCL has had this function since {since}"
            )
        }
    }
}

impl Error for MissingSymbol {}
