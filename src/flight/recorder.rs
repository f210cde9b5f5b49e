//! The handle by which a program reads what is on record.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Flight, Record};
use crate::error::Result;

/// The last calls of a communicator, for any thread, also while a call is stuck; see [`Communicator::flight_recorder`](crate::Communicator::flight_recorder).
#[derive(Clone)]
pub struct Recorder {
    flight: Arc<Flight>,
}

impl Recorder {
    pub(crate) fn new(flight: &Arc<Flight>) -> Self {
        Self { flight: Arc::clone(flight) }
    }

    /// What is on record: collectives of the host, then messages, then device calls, each oldest first, then started calls that no
    /// thread has taken up. Costs some tens of nanoseconds for each, and disturbs no call.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.flight.records()
    }

    /// Writes what is on record into a folder, as `flight-ID-rankR.json`, whole or not at all; the file. An older one of the same rank
    /// and communicator is replaced. `collperf --explain-hang FOLDER` compares the files of all ranks.
    ///
    /// # Errors
    ///
    /// `Io` where it cannot be written.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        self.flight.write(folder.as_ref(), "asked for")
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}
