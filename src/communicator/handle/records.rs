//! Access to the records of calls: the flight recorder and traces.

use std::path::{Path, PathBuf};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::flight::{self, About};
use crate::observe::TraceLog;

/// # The flight recorder
///
/// Every communicator keeps records of its last calls
/// ([`Config::flight_recorder_calls`](crate::Config::flight_recorder_calls)), with the state of each. When a call fails
/// because of a peer, the records are written to the folder
/// [`Config::flight_recorder_dir`](crate::Config::flight_recorder_dir), if that is set. You can also read them at any
/// time from any thread, or have them written when the process gets a signal ([`flight::write_records_on_sigusr1`]).
impl Communicator {
    /// Returns a handle to this communicator's records, which any thread can read.
    ///
    /// ```
    /// # use collectives::{Collective, Communicator, flight};
    /// Communicator::run_local(2, |comm| {
    ///     comm.barrier()?;
    ///     let records = comm.flight_recorder().records();
    ///     let last = records.last().expect("a barrier");
    ///     assert_eq!((last.kind, last.state), (Collective::Barrier.into(), flight::State::Finished));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn flight_recorder(&self) -> flight::Recorder {
        flight::Recorder::new(&self.core.shared.recorder)
    }

    /// Returns the name of the communicator that these ranks are about to make. It contains the number that all ranks
    /// of this communicator give to the new one.
    pub(in crate::communicator) fn name_child(&self, members: &[usize]) -> String {
        let number = self.core.children.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let first = members.first().map_or_else(|| "nobody".to_owned(), ToString::to_string);
        format!("{}/{number} from rank {first}", self.core.shared.recorder.name())
    }
}

/// # Traces
impl Communicator {
    /// Writes the file `trace-ID-rankR.json` into a folder, with the times of the calls of this communicator and of the
    /// communicators made from it. Returns the path of the file, which Perfetto and `collperf trace` can read. The file
    /// is written completely or not at all.
    ///
    /// If [`Config::trace`](crate::Config::trace) is on, the trace has the last 131,072 calls. If it is off, the trace
    /// contains only the records of this communicator's [flight recorder](Self::flight_recorder). These records contain
    /// start times for most calls, but end times only for calls that took more than a few microseconds.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # let folder = std::env::temp_dir().join(format!("collectives-trace-{}", std::process::id()));
    /// Communicator::builder().configure(|config| config.trace = true).run_local(2, |comm| {
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
    /// - `Io` if the file cannot be written.
    /// - `Unsupported` in a forked child.
    pub fn write_trace(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        if self.core.shared.health.is_foreign() {
            let reason =
                "this process was forked from the one that created the communicator, and does not have the communicator's trace".to_owned();
            return Err(Error::Unsupported { what: "write_trace".to_owned(), reason });
        }
        self.with_trace(|log| log.write(folder.as_ref()))
    }

    /// Returns the trace of [`write_trace`](Self::write_trace) as JSON text in Chrome's Trace Event Format. In a forked
    /// child, the text contains no calls.
    #[must_use]
    pub fn trace_json(&self) -> String {
        self.with_trace(TraceLog::to_json)
    }

    /// Passes the log that is kept, or a log made from the flight recorder's records, to `give`.
    fn with_trace<R>(&self, give: impl FnOnce(&TraceLog) -> R) -> R {
        let shared = &self.core.shared;
        if let Some(log) = &shared.trace {
            return give(log);
        }
        let records = if shared.health.is_foreign() { Vec::new() } else { shared.recorder.records() };
        let me = self.peers()[self.rank()].clone();
        let ranks = (self.rank(), self.world_size());
        give(&TraceLog::of_records(About::id_of(shared.id), ranks, me, shared.recorder.name(), &records))
    }
}
