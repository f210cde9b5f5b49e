//! The face of what a communicator tells of its calls.

use std::path::{Path, PathBuf};

use super::Communicator;
use crate::error::{Error, Result};
use crate::flight::About;
use crate::observe::TraceLog;

/// # Traces
impl Communicator {
    /// Writes what the calls of this communicator and of those that were made of it took into a folder, as `trace-ID-rankR.json`, whole
    /// or not at all; the file, for Perfetto or `collperf trace`. In full where a trace was asked for beforehand
    /// ([`Config::trace`](crate::Config::trace)); otherwise what the [flight recorder](Self::flight_recorder) has of this communicator: it
    /// knows the beginning of most calls and the end of the longer ones.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # let folder = std::env::temp_dir().join(format!("collectives-trace-{}", std::process::id()));
    /// Communicator::builder().trace(true).run_local(2, |comm| {
    ///     comm.all_reduce(&mut [1.0f32; 1000], ReduceOp::Sum)?;
    ///     let file = comm.write_trace(&folder)?;
    ///     assert!(std::fs::read_to_string(file).unwrap().contains("all_reduce"));
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(folder).unwrap();
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Io` where it cannot be written, `Unsupported` in a process that was forked from the one that made the communicator.
    pub fn write_trace(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        if self.core.shared.health.is_foreign() {
            let reason = "this process was forked from the one that made the communicator, and has none of its trace".to_owned();
            return Err(Error::Unsupported { what: "write_trace".to_owned(), reason });
        }
        self.with_trace(|log| log.write(folder.as_ref()))
    }

    /// The same as text: JSON in Chrome's Trace Event Format. Without calls in a forked process.
    #[must_use]
    pub fn trace_json(&self) -> String {
        self.with_trace(TraceLog::to_json)
    }

    /// The log that is kept, or one of what the flight recorder knows.
    fn with_trace<R>(&self, give: impl FnOnce(&TraceLog) -> R) -> R {
        let shared = &self.core.shared;
        if let Some(log) = &shared.trace {
            return give(log);
        }
        let flight = shared.health.flight();
        let records = if shared.health.is_foreign() { Vec::new() } else { flight.records() };
        let me = self.peers()[self.rank()].clone();
        let ranks = (self.rank(), self.world_size());
        give(&TraceLog::of_records(About::id_of(shared.id), ranks, me, flight.name(), &records))
    }
}
