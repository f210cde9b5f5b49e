//! One rank's pass through all measurements.

use collectives::Communicator;

use super::backend::Backend;
use super::check::Checks;
use super::curve::Curve;
use super::subjects::{Subject, has_extra_types, subjects};
use super::words::share;
use crate::collective::Collective;
use crate::failure::Failure;
use crate::inputs::with_element;
use crate::report::{Report, say};
use crate::row::Row;
use crate::settings::Settings;
use crate::sizes::human;
use crate::tails::Pauses;

/// The state of a rank during its run.
pub(super) struct Session<'a, P> {
    /// All ranks.
    pub(super) world: &'a Communicator,
    /// The ranks that make the calls: all, or a group of them.
    pub(super) comm: &'a Communicator,
    pub(super) backend: &'a P,
    pub(super) settings: &'a Settings,
    /// The report, on rank 0 only.
    pub(super) report: Option<Report<'a>>,
    pub(super) checks: Checks<'a>,
    /// The cost of calls of the current collective, if predictions were requested.
    pub(super) curve: Curve,
    /// The pauses of the machine, if histograms were requested.
    pub(super) pauses: Option<Pauses>,
    /// Sampled cells whose check failed, and which therefore have no row.
    pub(super) wrong_cells: usize,
}

impl<P: Backend> Session<'_, P> {
    /// Measures everything that was requested for one collective.
    pub(super) fn collective(&mut self, collective: Collective) -> Result<(), Failure> {
        if self.settings.columns.predictions {
            // Measured for each collective: after a virtual processor has been moved, a flag takes ten times as long
            // for a while.
            self.curve = self.curve_of(collective)?;
        }
        if let Some(report) = &mut self.report {
            report.begin(collective)?;
        }
        if collective == Collective::Barrier {
            self.barrier()?;
        } else {
            for (dtype, op, root) in subjects(self.settings, collective, self.comm.world_size()) {
                let subject = Subject { collective, op, root };
                let unknown = || Err(Failure::unsupported(format!("{dtype}: collperf has no inputs of this type")));
                let swept = with_element!(dtype, T => self.sweep::<T>(subject), unknown());
                swept.or_else(|failure| self.forgive(failure))?;
            }
        }
        self.report.as_mut().map_or(Ok(()), |report| report.end(collective))
    }

    /// Records a refusal of the library if several combinations were requested, as by `all`; returns other failures.
    pub(super) fn forgive(&mut self, failure: Failure) -> Result<(), Failure> {
        let by_all = self.settings.collectives.len() > 1 || self.settings.ops.len() > 1 || self.settings.dtypes.len() > 1;
        if !failure.is_unsupported() || !by_all {
            return Err(failure);
        }
        if let Some(report) = &mut self.report {
            report.refuse(failure.message);
        }
        Ok(())
    }

    /// Reports the memory in use on the device with the most in use.
    pub(super) fn tell_memory(&mut self) -> Result<(), Failure> {
        let all = share(self.world, &self.backend.memory_use()?)?;
        let most = all.chunks_exact(3).max_by_key(|of_rank| of_rank[1]);
        match (&mut self.report, most) {
            (Some(report), Some([buffers, used, total])) => report.memory([*buffers, *used, *total].map(|bytes| bytes as usize)),
            _ => Ok(()),
        }
    }

    /// Shows on a terminal what is being measured.
    pub(super) fn announce(&self, row: &Row) {
        if let Some(report) = &self.report {
            report.working_on(&format!("{} {} {} {}", row.collective, row.op_name(), row.type_name(), human(row.bytes)));
        }
    }

    /// Adds a row to rank 0's report.
    pub(super) fn give(&mut self, mut row: Row) -> Result<(), Failure> {
        let prediction = self.forecast(&row);
        for half in [&mut row.out_of_place, &mut row.in_place].into_iter().flatten() {
            half.prediction = prediction;
        }
        self.report.as_mut().map_or(Ok(()), |report| report.row(row))
    }

    /// Prints comment lines below a row of the table.
    pub(super) fn remark(&mut self, lines: &str) -> Result<(), Failure> {
        self.report.as_mut().filter(|_| !lines.is_empty()).map_or(Ok(()), |report| report.remark(lines))
    }

    /// Prints a message to standard error, once for all ranks.
    pub(super) fn tell(&self, text: &str) {
        if self.report.is_some() {
            say(text);
        }
    }

    /// Whether all-reduces are also sampled in 16-bit floats.
    pub(super) fn has_extra_types(&self) -> bool {
        has_extra_types(self.settings)
    }
}
