//! The face of the flight recorder.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Communicator;
use crate::error::Result;
use crate::flight::{Flight, FlightRecord};

/// The last calls of a communicator, for any thread, also while a call is stuck; see [`Communicator::flight_recorder`].
#[derive(Clone)]
pub struct FlightRecorder {
    flight: Arc<Flight>,
}

impl FlightRecorder {
    /// What is on record: collectives of the host, then messages, then device calls, each oldest first, then started calls that no
    /// thread has taken up. Costs some tens of nanoseconds for each, and disturbs no call.
    #[must_use]
    pub fn records(&self) -> Vec<FlightRecord> {
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

impl fmt::Debug for FlightRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlightRecorder").finish_non_exhaustive()
    }
}

/// # The flight recorder
///
/// The last calls of every communicator are kept ([`Config::flight_recorder_calls`](crate::Config::flight_recorder_calls)), with how
/// far each is. Where a call fails for lack of a peer they are written to a folder, if one was named
/// ([`Config::flight_recorder_dir`](crate::Config::flight_recorder_dir)); otherwise when somebody asks, from any thread, or by a
/// signal ([`write_flight_records_on_sigusr1`](crate::write_flight_records_on_sigusr1)).
impl Communicator {
    /// A handle on this communicator's records, which any thread can read.
    ///
    /// ```
    /// # use collectives::{Communicator, FlightState};
    /// Communicator::run_local(2, |comm| {
    ///     comm.barrier()?;
    ///     let records = comm.flight_recorder().records();
    ///     let last = records.last().expect("a barrier");
    ///     assert_eq!((last.kind, last.state), ("barrier", FlightState::Finished));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn flight_recorder(&self) -> FlightRecorder {
        FlightRecorder { flight: Arc::clone(self.core.shared.health.flight()) }
    }

    /// What is on record; see [`FlightRecorder::records`].
    #[must_use]
    pub fn flight_records(&self) -> Vec<FlightRecord> {
        self.core.shared.health.flight().records()
    }

    /// The name of the communicator that these ranks are about to make, as all of this one's ranks count them.
    pub(super) fn name_child(&self, members: &[usize]) -> String {
        let number = self.core.children.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let first = members.first().map_or_else(|| "nobody".to_owned(), ToString::to_string);
        let flight = self.core.shared.health.flight();
        format!("{}/{number} from rank {first}", flight.name())
    }
}
