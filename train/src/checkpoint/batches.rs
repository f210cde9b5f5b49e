//! Joins reads of ranges of a file that are close together. Pure.

use super::piece::Run;
use crate::tuning::checkpoint::RANGES_AT_ONCE;

/// Ranges of one source that are read at once.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) source: usize,
    /// The elements of the source that are read.
    pub(super) start: usize,
    pub(super) end: usize,
    /// The parts of these elements that are wanted.
    pub(super) runs: Vec<Run>,
}

/// The limits of one read, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) most: usize,
    /// The largest gap between two ranges that are read together.
    pub(super) gap: usize,
}

impl Batch {
    fn of(run: Run) -> Self {
        Self { source: run.source, start: run.from, end: run.from + run.len, runs: vec![run] }
    }

    /// Appends a range, if it is close enough and the batch does not become too large.
    fn take(&mut self, run: Run, limits: Limits) -> bool {
        let end = run.from + run.len;
        let is_close = run.from >= self.end && run.from - self.end <= limits.gap;
        let takes = is_close && end - self.start <= limits.most && self.runs.len() < RANGES_AT_ONCE;
        if takes {
            self.end = end;
            self.runs.push(run);
        }
        takes
    }
}

/// Reads all runs, each in one batch. Runs of different sources may alternate.
pub(super) fn read_all<E>(
    runs: impl Iterator<Item = Run>,
    sources: usize,
    limits: Limits,
    mut read: impl FnMut(&Batch) -> Result<(), E>,
) -> Result<(), E> {
    let mut open: Vec<Option<Batch>> = Vec::new();
    open.resize_with(sources, || None);
    for run in runs {
        let batch = &mut open[run.source];
        if !batch.as_mut().is_some_and(|batch| batch.take(run, limits))
            && let Some(full) = batch.replace(Batch::of(run))
        {
            read(&full)?;
        }
    }
    open.iter().flatten().try_for_each(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(runs: &[(usize, usize, usize)]) -> Vec<(usize, usize, usize)> {
        let mut to = 0;
        let runs = runs.iter().map(|(source, from, len)| {
            to += len;
            Run { source: *source, from: *from, to: to - len, len: *len }
        });
        let mut read = Vec::new();
        let done: Result<(), ()> = read_all(runs, 3, Limits { most: 20, gap: 4 }, |batch| {
            read.push((batch.source, batch.start, batch.end));
            Ok(())
        });
        done.unwrap();
        read
    }

    #[test]
    fn ranges_that_lie_close_are_read_at_once() {
        assert_eq!(batches(&[(0, 0, 5), (0, 9, 5), (0, 19, 2)]), [(0, 0, 14), (0, 19, 21)]);
        // Too much at once; then a range before what was read.
        assert_eq!(batches(&[(0, 0, 15), (0, 15, 6), (0, 0, 1)]), [(0, 0, 15), (0, 15, 21), (0, 0, 1)]);
        assert_eq!(batches(&[(2, 0, 2), (1, 0, 2), (2, 2, 2), (1, 2, 2)]), [(1, 0, 4), (2, 0, 4)]);
        assert_eq!(batches(&[]), []);
    }
}
