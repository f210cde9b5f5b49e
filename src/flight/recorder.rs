//! The handle by which a program reads the records.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Flight, Record};
use crate::error::Result;

/// A handle to the records of a communicator's last calls. Any thread can use the handle, even while a call hangs; see
/// [`Communicator::flight_recorder`](crate::Communicator::flight_recorder).
#[derive(Clone)]
pub struct Recorder {
    flight: Arc<Flight>,
}

impl Recorder {
    pub(crate) fn new(flight: &Arc<Flight>) -> Self {
        Self { flight: Arc::clone(flight) }
    }

    /// Returns the records in this order: collectives on the host, messages, device calls, and finally background calls
    /// that no thread has begun. In each of these groups, the oldest call comes first. This method takes some tens of
    /// nanoseconds per record, and delays no call.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.flight.records()
    }

    /// Writes the records into the file `flight-ID-rankR.json` in `folder`, and returns the path of the file. The file
    /// is written completely or not at all. An older file of the same rank and communicator is replaced.
    /// `collperf --explain-hang FOLDER` compares the files of all ranks.
    ///
    /// # Errors
    ///
    /// `Io` if the file cannot be written.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        self.flight.write(folder.as_ref(), "asked for")
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}
