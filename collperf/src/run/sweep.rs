//! The rows of one collective, op, type and root.

use std::cell::Cell as Mutable;

use collectives::{DType, ReduceOp};

use super::backend::{Backend, Memory};
use super::call::Call;
use super::check::Checks;
use super::session::Session;
use super::subjects::{EXTRA_TYPES, Subject};
use super::timing;
use crate::collective::Collective;
use crate::failure::Failure;
use crate::inputs::{Recipe, Sample};
use crate::layout::Layout;
use crate::row::{Forecast, Half, Row};
use crate::statistics::Spread;
use crate::tails::{Chart, Histogram};
use crate::traffic::{Exchange, Traffic};

impl<P: Backend> Session<'_, P> {
    /// Measures every size, in every cycle.
    pub(super) fn sweep<T: Sample>(&mut self, subject: Subject) -> Result<(), Failure> {
        let counts = self.counts::<T>(subject)?;
        let mut most = 0;
        for count in &counts {
            most = most.max(self.layout::<T>(subject, *count)?.largest());
        }
        let mut buffers = self.backend.buffers::<T>(most, self.settings.unalign)?;
        if self.settings.cell.is_some() {
            return self.cells(subject, &counts, &mut buffers);
        }
        let [source, target] = &mut buffers;
        source.clear(most)?;
        for count in &counts {
            let layout = self.layout::<T>(subject, *count)?;
            let call = Call::new(self.comm, subject.collective, subject.op, *count, &layout);
            for _ in 0..self.settings.warmup {
                call.out_of_place(subject.root, source, target)?;
            }
        }
        self.backend.finish()?;
        let mut cycle = 0;
        while self.settings.cycles == 0 || cycle < self.settings.cycles {
            for count in &counts {
                let row = self.timed_row(subject, *count, &mut buffers)?;
                let remarks = self.summary::<T>(subject, &row)? + &self.histograms(&row);
                self.give(row)?;
                self.remark(&remarks)?;
            }
            cycle += 1;
        }
        Ok(())
    }

    /// Returns the element counts of the sizes. With a matrix of traffic, the only size is that of the file.
    fn counts<T: Sample>(&self, subject: Subject) -> Result<Vec<usize>, Failure> {
        let world_size = self.comm.world_size();
        if subject.collective == Collective::AllToAllV && self.settings.traffic.as_ref().is_some_and(Traffic::is_matrix) {
            return Ok(vec![self.layout::<T>(subject, 0)?.largest() / world_size]);
        }
        Ok(subject.counts(&self.settings.sizes, size_of::<T>(), world_size, self.settings.subset.is_some()))
    }

    /// Returns the prediction for a row's call, if requested.
    pub(super) fn forecast(&self, row: &Row) -> Option<Forecast> {
        let time_us = self.curve.at(row.bytes)?;
        let algorithm = self.comm.algorithm(row.collective.of_library()?, row.bytes, row.dtype.unwrap_or(DType::U8))?;
        Some(Forecast { algorithm, time_us })
    }

    /// Measures a row as nccl-tests does.
    fn timed_row<T: Sample>(&mut self, subject: Subject, count: usize, buffers: &mut [P::Memory<'_, T>; 2]) -> Result<Row, Failure> {
        let layout = self.layout::<T>(subject, count)?;
        let mut row = self.empty_row::<T>(subject, &layout);
        self.announce(&row);
        let call = Call::new(self.comm, subject.collective, subject.op, count, &layout);
        let (root, together) = (subject.root, self.settings.aggregated);
        let [source, target] = buffers;
        // Values from an earlier check, especially products, could drift into numbers with which computations are slow.
        source.clear(call.whole())?;
        let half = self.timed(&row, || call.out_of_place_together(together, root, source, target))?;
        let wrong = self.check(subject, &layout, row.bytes, |backend, checks, layout, recipe| {
            checks.out_of_place::<P, T>(backend, &call, layout, recipe, root, [&mut *source, &mut *target])
        })?;
        row.out_of_place = Some(Half { wrong, ..half });
        if subject.collective.has_in_place() {
            target.clear(call.whole())?;
            let half = self.timed(&row, || call.in_place_together(together, root, target))?;
            let wrong = self.check(subject, &layout, row.bytes, |backend, checks, layout, recipe| {
                checks.in_place::<P, T>(backend, &call, layout, recipe, root, target)
            })?;
            row.in_place = Some(Half { wrong, ..half });
        }
        Ok(row)
    }

    /// Times a call and, if wanted, each call by itself.
    fn timed(&self, row: &Row, mut once: impl FnMut() -> collectives::Result<()>) -> Result<Half, Failure> {
        let mean = timing::mean(self.backend, self.world, self.settings, &mut once)?;
        let mut half = Half::new(row.collective, row.ranks, row.bytes, mean.time);
        if self.settings.device.issue_time {
            half.time_us = mean.issue;
        }
        if self.settings.wants_samples() {
            half.samples = timing::single(self.backend, self.world, self.settings, &mut once)?.split_off(self.settings.skip);
            half.spread = Spread::of(&half.samples);
        }
        Ok(half)
    }

    /// Samples every size.
    fn cells<T: Sample>(&mut self, subject: Subject, counts: &[usize], buffers: &mut [P::Memory<'_, T>; 2]) -> Result<(), Failure> {
        for count in counts {
            let row = self.cell::<T>(subject, *count, buffers)?;
            if row.out_of_place.is_some() || row.in_place.is_some() {
                self.give(row)?;
            }
        }
        Ok(())
    }

    /// Measures a row of sampled cells. In a rooted collective, each call has the next root. With one root, calls that
    /// do not wait for other ranks would queue up, and the figure would not be a latency.
    fn cell<T: Sample>(&mut self, subject: Subject, count: usize, buffers: &mut [P::Memory<'_, T>; 2]) -> Result<Row, Failure> {
        let Subject { collective, op, root: first_root } = subject;
        let layout = self.layout::<T>(subject, count)?;
        let mut row = self.empty_row::<T>(subject, &layout);
        row.root = None;
        self.announce(&row);
        let (call, world_size) = (Call::new(self.comm, collective, op, count, &layout), self.comm.world_size());
        let root = Mutable::new(0);
        let next_root = || root.replace((root.get() + 1) % world_size);
        let [source, target] = buffers;
        let forms = cell_forms(collective, T::ELEMENT_TYPE, op, row.bytes, self.has_extra_types());
        if forms.out_of_place && !(collective == Collective::SendRecv && world_size < 2) {
            let wrong = self.check(subject, &layout, row.bytes, |backend, checks, layout, recipe| {
                checks.out_of_place::<P, T>(backend, &call, layout, recipe, first_root, [&mut *source, &mut *target])
            })?;
            source.clear(call.whole())?;
            target.clear(call.whole())?;
            row.out_of_place = self.sampled(&mut row, wrong, || match collective {
                Collective::SendRecv => call.ping_pong(source, target),
                _ => call.out_of_place(next_root(), source, target),
            })?;
        }
        if forms.in_place {
            let wrong = self.check(subject, &layout, row.bytes, |backend, checks, layout, recipe| {
                checks.in_place::<P, T>(backend, &call, layout, recipe, first_root, target)
            })?;
            target.clear(call.whole())?;
            root.set(0);
            row.in_place = self.sampled(&mut row, wrong, || call.in_place(next_root(), target))?;
        }
        Ok(row)
    }

    /// Samples a call whose check found `wrong` wrong elements; the time of a wrong call is not reported.
    fn sampled(
        &mut self,
        row: &mut Row,
        wrong: Option<u64>,
        once: impl FnMut() -> collectives::Result<()>,
    ) -> Result<Option<Half>, Failure> {
        let Some(time) = self.settings.cell.filter(|_| wrong.is_none_or(|wrong| wrong == 0)) else {
            let bytes = row.bytes;
            self.wrong_cells += 1;
            self.tell(&format!("WRONG RESULT {} {} {bytes} B: {} elements", row.collective, row.op_name(), wrong.unwrap_or(0)));
            return Ok(None);
        };
        let mut cell = timing::sample(self.backend, self.world, time, row.bytes, once)?;
        if row.collective == Collective::SendRecv {
            cell.samples.iter_mut().for_each(|round_trip| *round_trip /= 2.0);
        }
        row.iterations = cell.calls;
        let spread = Spread::of(&cell.samples);
        let time_us = spread.as_ref().map_or(0.0, |spread| spread.p50);
        Ok(Some(Half { wrong, spread, samples: cell.samples, ..Half::new(row.collective, row.ranks, row.bytes, time_us) }))
    }

    /// Runs a check as often as requested, or until one fails.
    fn check(
        &mut self,
        subject: Subject,
        layout: &Layout,
        bytes: usize,
        mut once: impl FnMut(&P, &mut Checks, &Layout, Recipe) -> collectives::Result<u64>,
    ) -> Result<Option<u64>, Failure> {
        let world_size = self.comm.world_size();
        let recipe = Recipe { seed: 0, op: subject.op, world_size, period: P::period(bytes) };
        let mut wrong = None;
        for _ in 0..self.settings.check {
            wrong = Some(once(self.backend, &mut self.checks, layout, recipe)?);
            if wrong != Some(0) {
                break;
            }
        }
        Ok(wrong)
    }

    /// Returns the histograms of a row, if they were requested.
    pub(super) fn histograms(&self, row: &Row) -> String {
        let Some(pauses) = &self.pauses else { return String::new() };
        let chart = |(half, in_place): (&Half, bool)| {
            let place = if in_place { "in-place" } else { "out-of-place" };
            let calls = Histogram::of_microseconds(&half.samples);
            format!("#   {place} calls:\n{}", Chart { calls: &calls, pauses, parts: 1.0 })
        };
        row.halves().map(chart).collect()
    }

    /// Returns what every rank hands in and gets.
    fn layout<T: Sample>(&self, subject: Subject, count: usize) -> Result<Layout, Failure> {
        let (world_size, element_bytes) = (self.comm.world_size(), size_of::<T>());
        let layout = Layout::new(subject.collective, world_size, subject.root, count);
        let total = subject.collective.bytes(count, element_bytes, world_size);
        let exchange = self.settings.exchange(subject.collective, world_size, total, element_bytes)?;
        Ok(layout.with_exchange(exchange))
    }

    /// Returns the lines that `NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY` asks for; nothing for other collectives.
    fn summary<T: Sample>(&self, subject: Subject, row: &Row) -> Result<String, Failure> {
        if !self.settings.traffic_summary || subject.collective != Collective::AllToAllV {
            return Ok(String::new());
        }
        let layout = self.layout::<T>(subject, row.count)?;
        let exchange = Exchange::of(self.comm.world_size(), |rank| layout.counts(rank));
        Ok(exchange.summary(size_of::<T>(), row.out_of_place.as_ref().map_or(0.0, |half| half.time_us)))
    }

    fn empty_row<T: Sample>(&self, subject: Subject, layout: &Layout) -> Row {
        let Subject { collective, op, root } = subject;
        Row {
            collective,
            op,
            dtype: Some(T::ELEMENT_TYPE),
            root: collective.is_rooted().then_some(root),
            ranks: self.comm.world_size(),
            count: layout.count(),
            bytes: layout.largest() * size_of::<T>(),
            iterations: (self.settings.iterations * self.settings.aggregated) as u64,
            out_of_place: None,
            in_place: None,
        }
    }

    /// Measures the barrier: one row, since it has no size.
    pub(super) fn barrier(&mut self) -> Result<(), Failure> {
        let subject = Subject { collective: Collective::Barrier, op: None, root: 0 };
        let layout = self.layout::<u8>(subject, 0)?;
        let mut cycle = 0;
        while self.settings.cycles == 0 || cycle < self.settings.cycles {
            let mut row = Row { dtype: None, ..self.empty_row::<u8>(subject, &layout) };
            self.announce(&row);
            let comm = self.comm;
            let mut wrong = None;
            for _ in 0..self.settings.check {
                wrong = Some(wrong.unwrap_or(0) + self.checks.barrier(comm)?);
            }
            row.out_of_place = match self.settings.cell {
                Some(_) => self.sampled(&mut row, wrong, || comm.barrier())?,
                None => Some(Half { wrong, ..self.timed(&row, || (0..self.settings.aggregated).try_for_each(|_| comm.barrier()))? }),
            };
            if row.out_of_place.is_some() {
                let histograms = self.histograms(&row);
                self.give(row)?;
                self.remark(&histograms)?;
            }
            cycle += 1;
        }
        Ok(())
    }
}

/// The forms in which a collective is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Forms {
    out_of_place: bool,
    in_place: bool,
}

const EXTRA_LEAST_BYTES: usize = 1024;

/// Samples all-reduce in both forms, broadcast with its one buffer, all others with two buffers, as other libraries'
/// drivers do. With `extra_types`, an all-reduce of 16-bit floats is sampled only in place.
fn cell_forms(collective: Collective, dtype: DType, op: Option<ReduceOp>, bytes: usize, extra_types: bool) -> Forms {
    let is_extra = extra_types && op.is_some() && EXTRA_TYPES.contains(&dtype);
    match collective {
        Collective::AllReduce if is_extra => Forms { out_of_place: false, in_place: bytes >= EXTRA_LEAST_BYTES },
        Collective::AllReduce => Forms { out_of_place: true, in_place: true },
        Collective::Broadcast => Forms { out_of_place: false, in_place: true },
        _ => Forms { out_of_place: true, in_place: false },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_those_that_peers_have() {
        let both = Forms { out_of_place: true, in_place: true };
        let (only_in, only_out) = (Forms { out_of_place: false, in_place: true }, Forms { out_of_place: true, in_place: false });
        let sum = Some(ReduceOp::Sum);
        assert_eq!(cell_forms(Collective::AllReduce, DType::F32, sum, 4, true), both);
        assert_eq!(cell_forms(Collective::AllReduce, DType::F16, sum, 1024, true), only_in);
        assert_eq!(cell_forms(Collective::AllReduce, DType::F16, sum, 4, true), Forms { out_of_place: false, in_place: false });
        assert_eq!(cell_forms(Collective::AllReduce, DType::F16, sum, 4, false), both);
        assert_eq!(cell_forms(Collective::Broadcast, DType::F32, None, 4, true), only_in);
        assert_eq!(cell_forms(Collective::AllToAll, DType::F32, None, 4, true), only_out);
    }

    #[test]
    fn sizes_that_come_to_the_same_count_are_one_row() {
        let subject = Subject { collective: Collective::AllGather, op: None, root: 0 };
        assert_eq!(subject.counts(&[0, 4, 8, 16, 32, 64], 4, 4, false), [0, 1, 2, 4]);
        assert_eq!(subject.counts(&[0, 4, 8, 16, 32, 64], 4, 4, true), [0, 1, 1, 1, 2, 4]);
    }
}
