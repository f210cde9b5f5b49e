//! What the benchmarks have in common: ranks, the lines of the table, and the decision when a size is finished.

use std::time::{Duration, Instant};

use collectives::{Communicator, ReduceOp};

use super::Common;
use super::amounts::{Amount, Amounts, Range};
use super::columns::{Cell, Columns, verdict};
use crate::failure::{CHECK, Failure};
use crate::job;
use crate::launch::{self, Asked};
use crate::report::{Progress, answer, say};
use crate::run::binding;
use crate::sizes::human;
use crate::tails::{Chart, Histogram, Pauses};

/// A rank's run of one benchmark.
pub(super) struct Session<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) common: &'a Common,
    name: &'a str,
    amounts: Amounts,
    /// The pauses of the machine, if a histogram was requested.
    pauses: Option<Pauses>,
    /// The progress, on rank 0 once the sizes are known.
    progress: Option<Progress>,
    /// How long each size is measured, if that was requested.
    lasting: Option<Duration>,
}

/// The figures of one size, on the rank that reports them.
pub(super) struct Figures<'a> {
    pub(super) bytes: usize,
    pub(super) cells: Vec<Cell>,
    /// The times of the iterations.
    pub(super) times: &'a Histogram,
    /// The number by which the table divides the times: two for half a round trip.
    pub(super) parts: f64,
    /// Returns a percentile as the table shows it.
    pub(super) tail: &'a dyn Fn(f64) -> f64,
    /// Bytes or elements that were wrong, over all ranks.
    pub(super) wrong: u64,
}

impl<'a> Session<'a> {
    /// Binds the ranks, and prints the text above the table. Every rank calls it.
    pub(super) fn begin(comm: &'a Communicator, common: &'a Common, name: &'a str, amounts: Amounts) -> Result<Self, Failure> {
        let notes = job::busy_hosts(comm)?;
        let asked = common.bind.map_or(Asked::Nothing, Asked::For);
        let bound = binding::bind(comm, asked, common.job.launcher_of_ranks())?;
        let told = launch::told(&bound.to, bound.why_none.as_deref(), 0, &bound.processors);
        let pauses = common.histogram.then(|| Pauses::observe(comm)).transpose()?;
        let session = Self { comm, common, name, amounts, pauses, progress: None, lasting: None };
        let ranks = comm.world_size();
        session.print(&format!(
            "\n# collperf {}: {name}, {ranks} ranks, transport {}\n# bound to: {told}\n{notes}{}",
            env!("CARGO_PKG_VERSION"),
            common.job.transport(),
            session.pauses.as_ref().map_or(String::new(), |pauses| format!("# {}\n", pauses.told())),
        ))?;
        Ok(session)
    }

    /// Makes each size last this long.
    pub(super) fn lasting(self, lasting: Option<Duration>) -> Self {
        Self { lasting, ..self }
    }

    /// Returns the sizes to measure. The arguments are the benchmark's defaults.
    pub(super) fn sizes(&mut self, least: usize, most: usize) -> Result<Vec<usize>, Failure> {
        let sizes = Range::sizes(self.common.range, least, most).map_err(|reason| Failure::usage(format!("-m: {reason}")))?;
        self.progress = (self.comm.rank() == 0).then(|| Progress::begin(sizes.iter().copied(), 1));
        Ok(sizes)
    }

    /// Returns how many iterations a size gets, which is now measured.
    pub(super) fn amount(&self, bytes: usize) -> Amount {
        if let Some(progress) = &self.progress {
            progress.working_on(&human(bytes));
        }
        self.amounts.of(bytes, self.common.warmup, self.common.iterations)
    }

    /// Prints on rank 0.
    pub(super) fn print(&self, text: &str) -> Result<(), Failure> {
        match &self.progress {
            Some(progress) => progress.suspend(|| answer(text)),
            None if self.comm.rank() == 0 => answer(text),
            None => Ok(()),
        }
    }

    /// Prints the names of the columns.
    pub(super) fn header(&self, type_name: &str, columns: &Columns) -> Result<(), Failure> {
        self.print(&format!("# Datatype: {type_name}.\n{}", columns.header()))
    }

    /// Prints the line of a size on rank 0.
    pub(super) fn line(&self, columns: &Columns, figures: Figures<'_>) -> Result<(), Failure> {
        let Figures { bytes, mut cells, times, parts, tail, wrong } = figures;
        cells.extend(self.common.is_checked.then(|| verdict(wrong)));
        cells.extend(self.common.percentiles.iter().map(|percent| Cell::Number(tail(*percent))));
        self.print(&columns.line(bytes, &cells))?;
        if let Some(progress) = &self.progress {
            progress.done(bytes);
        }
        match &self.pauses {
            Some(pauses) => self.print(&Chart { calls: times, pauses, parts }.to_string()),
            None => Ok(()),
        }
    }

    /// Adds up what all ranks found wrong. If anything was, rank 0 prints it, and the result is an exit code.
    pub(super) fn wrong(&self, bytes: usize, mine: u64) -> Result<(u64, Option<u8>), Failure> {
        let mut all = [mine];
        self.comm.all_reduce(&mut all[..], ReduceOp::Sum)?;
        if all[0] == 0 {
            return Ok((0, None));
        }
        if self.comm.rank() == 0 {
            let (name, size) = (self.name, human(bytes));
            say(&format!("{name}: {} bytes or elements of {size} messages arrived with wrong values; check the machine's memory", all[0]));
        }
        Ok((all[0], Some(CHECK)))
    }

    /// Whether another batch of iterations follows, after `since` was the start of the first. Rank 0 decides.
    pub(super) fn goes_on(&self, since: Instant) -> Result<bool, Failure> {
        let Some(lasting) = self.lasting else { return Ok(false) };
        let mut goes_on = [u8::from(since.elapsed() < lasting)];
        self.comm.broadcast(&mut goes_on[..], 0)?;
        Ok(goes_on[0] == 1)
    }
}

/// Returns nanoseconds, for a histogram.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns "is 1" or "are" with the number.
pub(super) fn are(ranks: usize) -> String {
    if ranks == 1 { "is 1".to_owned() } else { format!("are {ranks}") }
}
