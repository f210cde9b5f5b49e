//! How long calls of a communicator should take: the estimate of the route that they go, with costs that are measured on it.

use super::HostPlane;
use super::fit::fit;
use super::flat::Chooser;
use super::job::Job;
use crate::call::{Kind, Layout};
use crate::host::plan::cost::LinkCost;
use crate::host::shm::{Costs, Estimate, Task};

/// The route of a communicator, what it costs, and hence how long its calls should take. The same on every rank.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    ranks: usize,
    route: Route,
}

#[derive(Debug, Clone)]
enum Route {
    /// Shared memory.
    Island(Estimate, Costs),
    /// Links by plans.
    Flat(Box<Chooser>, LinkCost),
}

/// A call that was measured, and the nanoseconds that it took.
pub(crate) type Measured = (Task, f64);

impl HostPlane {
    /// The model for this plane; `None` for one rank, and where some ranks share a host and others do not.
    pub(crate) fn model(&self) -> Option<Model> {
        let ranks = self.peers.len();
        let route = match &self.group {
            _ if ranks == 1 => return None,
            Some(group) if self.topology.is_one_island() => {
                let estimate = group.estimate();
                Route::Island(estimate, estimate.usual_costs())
            }
            _ if self.topology.is_scattered() => Route::Flat(Box::new(self.chooser.clone()), self.chooser.cost()),
            _ => return None,
        };
        Some(Model { ranks, route })
    }

    /// How a call is done, in a word.
    pub(super) fn algorithm(&self, job: &Job) -> &'static str {
        let bytes = match (job.call.kind, &job.layout) {
            // Only the root has the whole vector.
            (Kind::Gather | Kind::Scatter, Layout::Equal(block)) => block * self.peers.len(),
            _ => job.memory.source_len.max(job.memory.destination_len),
        };
        let task = Task { kind: job.call.kind, bytes, element_bytes: job.element_bytes, in_place: job.in_place };
        let known = match &self.group {
            _ if self.peers.len() == 1 => return "copy",
            Some(_) if self.topology.is_one_island() && job.is_too_large_to_share() => None,
            Some(group) if self.topology.is_one_island() => {
                let estimate = group.estimate();
                estimate.predict(&task, &estimate.usual_costs())
            }
            _ if self.topology.is_scattered() => self.chooser.predict(&task, self.peers.len(), &self.chooser.cost()),
            _ => return "hierarchical",
        };
        known.map_or("links", |(algorithm, _)| algorithm)
    }
}

impl Model {
    /// How a call is done, and in how many nanoseconds; `None` for calls that the model does not know.
    pub(crate) fn predict(&self, task: &Task) -> Option<(&'static str, f64)> {
        match &self.route {
            Route::Island(estimate, costs) => estimate.predict(task, costs),
            Route::Flat(chooser, cost) => chooser.predict(task, self.ranks, cost),
        }
    }

    /// Takes the costs that agree best with what was measured: in ratios, so that short calls count as much as long ones.
    pub(crate) fn calibrate(&mut self, measured: &[Measured]) {
        match &mut self.route {
            Route::Island(estimate, costs) => {
                let from = |[call, step, piece, start_fold, copy, cross, fold, memory, cached]: [f64; 9]| Costs {
                    call,
                    step,
                    piece,
                    start_fold,
                    copy,
                    cross,
                    fold,
                    memory,
                    cached,
                };
                let Costs { call, step, piece, start_fold, copy, cross, fold, memory, cached } = *costs;
                let start = [call, step, piece, start_fold, copy, cross, fold, memory, cached];
                *costs = from(agree(start, measured, |tried, task| estimate.predict(task, &from(*tried))));
            }
            Route::Flat(chooser, cost) => {
                let (ranks, segment_bytes) = (self.ranks, cost.segment_bytes);
                let from =
                    |[latency, message, byte, fold, memory]: [f64; 5]| LinkCost { latency, message, byte, fold, memory, segment_bytes };
                let LinkCost { latency, message, byte, fold, memory, .. } = *cost;
                let start = [latency, message, byte, fold, memory];
                *cost = from(agree(start, measured, |tried, task| chooser.predict(task, ranks, &from(*tried))));
            }
        }
        crate::event::debug!(costs = ?self, "what calls cost");
    }
}

/// The parameters with which predictions agree best with what was measured.
fn agree<const N: usize>(
    start: [f64; N],
    measured: &[Measured],
    predict: impl Fn(&[f64; N], &Task) -> Option<(&'static str, f64)>,
) -> [f64; N] {
    /// How much it counts that a parameter is far from where it started: so little that it only decides where nothing else does.
    const INERTIA: f64 = 0.002;
    /// Nothing takes less: a clock that shows no time at all is too coarse.
    const LEAST: f64 = 1.0;
    /// From which logarithm of a ratio on it counts as a line rather than as a square: one call that was disturbed weighs little.
    const OUTLIER: f64 = 0.2;
    fit(start, |tried| {
        let ratio = |time: f64, other: f64| (time / other).ln().abs();
        let of_times = measured.iter().filter_map(|(task, time)| Some(ratio(predict(tried, task)?.1.max(LEAST), time.max(LEAST))));
        let of_times = of_times.map(|distance| distance * distance / (OUTLIER + distance));
        let of_parameters = tried.iter().zip(&start).map(|(parameter, before)| INERTIA * ratio(*parameter, *before).powi(2));
        of_times.sum::<f64>() + of_parameters.sum::<f64>()
    })
}

/// The calls to measure: of sizes that reach every part of an estimate, each in a few kinds.
pub(crate) fn probes(ranks: usize) -> impl Iterator<Item = Task> {
    use Kind::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
    let kinds = [AllReduce, Broadcast, ReduceScatter, AllGather, AllToAll];
    let sizes = [16, 2 << 10, 24 << 10, 192 << 10, 1536 << 10, 12 << 20];
    let element_bytes = size_of::<f32>();
    let task = move |kind, bytes: usize| Task {
        kind,
        bytes: bytes.next_multiple_of(ranks * element_bytes),
        element_bytes,
        in_place: kind == Broadcast,
    };
    sizes.into_iter().flat_map(move |bytes| kinds.map(|kind| task(kind, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn links(ranks: usize) -> Model {
        let chooser = Chooser::new(&Config::default(), true).unwrap();
        let cost = chooser.cost();
        Model { ranks, route: Route::Flat(Box::new(chooser), cost) }
    }

    #[test]
    fn costs_that_were_hidden_in_times_are_found() {
        let mut hidden = links(2);
        let Route::Flat(_, cost) = &mut hidden.route else { unreachable!("links") };
        (cost.latency, cost.message, cost.byte) = (9_000.0, 20_000.0, 0.7);
        let measured: Vec<Measured> = probes(2).map(|task| (task, hidden.predict(&task).unwrap().1)).collect();
        let mut model = links(2);
        model.calibrate(&measured);
        for (task, time) in measured {
            let ratio = model.predict(&task).unwrap().1 / time;
            assert!((0.9..1.1).contains(&ratio), "{task:?}: {ratio}");
        }
    }

    #[test]
    fn times_of_nothing_leave_costs_that_can_be_used() {
        for time in [0.0, f64::MAX] {
            let mut model = links(4);
            model.calibrate(&probes(4).map(|task| (task, time)).collect::<Vec<_>>());
            for task in probes(4) {
                let predicted = model.predict(&task).unwrap().1;
                assert!(predicted.is_finite() && predicted > 0.0, "{task:?}: {predicted}");
            }
        }
        links(2).calibrate(&[]);
    }

    #[test]
    fn a_prediction_names_the_algorithm_that_is_chosen() {
        let model = links(4);
        let of = |kind, bytes| model.predict(&Task { kind, bytes, element_bytes: 4, in_place: false }).unwrap().0;
        assert_eq!((of(Kind::AllReduce, 4), of(Kind::AllReduce, 16 << 20), of(Kind::Barrier, 0)), ("doubling", "ring", "doubling"));
    }
}
