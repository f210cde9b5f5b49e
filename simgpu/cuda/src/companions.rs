//! Kernels of libraries that run on several devices at the same time. They order their accesses to each other's memory
//! by flags in it, which the driver cannot see. It relies on this instead: a kernel uses memory of another device only
//! for a kernel that runs there at the same time, and that kernel ends later.

use std::sync::Arc;

use crate::clock::Stamp;

/// One run of a kernel. Moments are counted by the beginnings and ends of runs.
#[derive(Debug)]
struct Run {
    number: u64,
    device: usize,
    stamp: Stamp,
    begun: u64,
    ended: Option<u64>,
}

/// The current runs, and those that ended during one of them.
#[derive(Debug, Default)]
pub(crate) struct Companions {
    runs: Vec<Run>,
    moment: u64,
}

impl Companions {
    fn next(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// Records that a kernel begins. Returns the number of its run.
    pub(crate) fn begin(&mut self, device: usize, stamp: Stamp) -> u64 {
        let begun = self.next();
        self.runs.push(Run { number: begun, device, stamp, begun, ended: None });
        begun
    }

    /// Records that a kernel has ended. Forgets runs that overlap no running kernel.
    pub(crate) fn end(&mut self, number: u64) {
        let moment = self.next();
        self.runs.iter_mut().filter(|run| run.number == number).for_each(|run| run.ended = Some(moment));
        let first = self.runs.iter().filter(|run| run.ended.is_none()).map(|run| run.begun).min();
        self.runs.retain(|run| run.ended.is_none_or(|ended| first.is_some_and(|first| ended > first)));
    }

    /// Whether any kernel is running.
    pub(crate) fn running(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Returns the kernels on `device` that ran at the same time as one that has not ended.
    pub(crate) fn beside(&self, number: u64, device: usize) -> Arc<[Stamp]> {
        let begun = self.runs.iter().find(|run| run.number == number).map_or(u64::MAX, |run| run.begun);
        let beside = self.runs.iter().filter(|run| run.device == device && run.number != number);
        beside.filter(|run| run.ended.is_none_or(|ended| ended > begun)).map(|run| run.stamp.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(component: usize) -> Stamp {
        Stamp { component, epoch: 1, clock: Arc::default() }
    }

    fn components(stamps: &[Stamp]) -> Vec<usize> {
        stamps.iter().map(|stamp| stamp.component).collect()
    }

    #[test]
    fn those_that_met_are_beside_each_other_and_no_others() {
        let mut companions = Companions::default();
        let early = companions.begin(1, stamp(10));
        companions.end(early);
        assert!(!companions.running());
        let long = companions.begin(0, stamp(20));
        let first = companions.begin(1, stamp(11));
        companions.end(first);
        let second = companions.begin(1, stamp(12));
        let elsewhere = companions.begin(2, stamp(30));
        assert_eq!(components(&companions.beside(long, 1)), [11, 12]);
        assert_eq!(components(&companions.beside(second, 1)), []);
        assert_eq!(components(&companions.beside(second, 0)), [20]);
        companions.end(long);
        // The first one on device 1 overlapped no kernel that still runs.
        assert_eq!(components(&companions.beside(elsewhere, 1)), [12]);
        assert_eq!(components(&companions.beside(elsewhere, 0)), [20]);
        [second, elsewhere].into_iter().for_each(|run| companions.end(run));
        assert!(!companions.running());
    }
}
