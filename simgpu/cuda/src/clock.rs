//! Vector clocks: which jobs are known to have come before which.
//!
//! A component is a stream, a lane of a graph, or the host. The host is one component for all of its threads: a wait
//! of one thread counts for all, because communication between threads cannot be seen from here.

use std::sync::Arc;

/// The component of the host.
pub(crate) const HOST: usize = 0;

/// For each component, the last of its jobs that is known to be over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, component: usize) -> u64 {
        self.0.get(component).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, component: usize, epoch: u64) {
        if self.0.len() <= component {
            self.0.resize(component + 1, 0);
        }
        self.0[component] = epoch;
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// The position of one job in the order of all.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    pub(crate) component: usize,
    pub(crate) epoch: u64,
    pub(crate) clock: Arc<Clock>,
}

impl Stamp {
    /// Whether this job is over before `other` begins, whatever the order in which the streams run.
    pub(crate) fn before(&self, other: &Stamp) -> bool {
        self.epoch <= other.clock.get(self.component)
    }

    pub(crate) fn ordered(&self, other: &Stamp) -> bool {
        self.before(other) || other.before(self)
    }
}

/// Hands out components. An unused one is reused only when the host has waited for all of its work: that work then
/// cannot appear unordered with the work of the next owner.
#[derive(Debug)]
pub(crate) struct Components {
    epochs: Vec<u64>,
    free: Vec<usize>,
}

impl Default for Components {
    fn default() -> Self {
        Components { epochs: vec![0], free: Vec::new() }
    }
}

impl Components {
    pub(crate) fn take(&mut self, host: &Clock) -> usize {
        if let Some(at) = self.free.iter().position(|&component| host.get(component) >= self.epochs[component]) {
            return self.free.swap_remove(at);
        }
        self.epochs.push(0);
        self.epochs.len() - 1
    }

    pub(crate) fn give_back(&mut self, component: usize) {
        self.free.push(component);
    }

    /// Returns the stamp of the next job of `component`, which begins after everything in `clock`; then adds the job
    /// to the clock.
    pub(crate) fn tick(&mut self, component: usize, clock: &mut Clock) -> Stamp {
        self.epochs[component] += 1;
        clock.set(component, self.epochs[component]);
        Stamp { component, epoch: self.epochs[component], clock: Arc::new(clock.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_ordered_by_what_was_joined_and_by_nothing_else() {
        let mut components = Components::default();
        let host = Clock::default();
        let (a, b) = (components.take(&host), components.take(&host));
        let (mut on_a, mut on_b) = (Clock::default(), Clock::default());
        let first = components.tick(a, &mut on_a);
        let apart = components.tick(b, &mut on_b);
        assert!(!first.ordered(&apart));
        on_b.join(&on_a);
        let after = components.tick(b, &mut on_b);
        assert!(first.before(&after) && apart.before(&after) && !after.before(&first));
        let later = components.tick(a, &mut on_a);
        assert!(!later.ordered(&after));
    }

    #[test]
    fn a_component_is_given_again_only_after_the_host_has_waited_for_it() {
        let mut components = Components::default();
        let mut host = Clock::default();
        let first = components.take(&host);
        let mut clock = Clock::default();
        components.tick(first, &mut clock);
        components.give_back(first);
        assert_ne!(components.take(&host), first);
        host.join(&clock);
        assert_eq!(components.take(&host), first);
    }
}
