//! How long calls of a communicator should take: the estimate of the route that they go, with costs that are measured on it.

use super::HostPlane;
use super::fit::fit;
use super::flat::Chooser;
use crate::call::Kind;
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
            Some(group) if self.topology.is_one_island() => Route::Island(group.estimate(), Costs::default()),
            _ if self.topology.is_scattered() => Route::Flat(Box::new(self.chooser.clone()), self.chooser.cost()),
            _ => return None,
        };
        Some(Model { ranks, route })
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
                let from = |[call, step, piece, copy, fold, memory]: [f64; 6]| Costs { call, step, piece, copy, fold, memory };
                let Costs { call, step, piece, copy, fold, memory } = *costs;
                *costs =
                    from(agree([call, step, piece, copy, fold, memory], measured, |tried, task| estimate.predict(task, &from(*tried))));
            }
            Route::Flat(chooser, cost) => {
                let (ranks, segment_bytes) = (self.ranks, cost.segment_bytes);
                let from = |[latency, message, byte, fold]: [f64; 4]| LinkCost { latency, message, byte, fold, segment_bytes };
                let LinkCost { latency, message, byte, fold, .. } = *cost;
                let start = [latency, message, byte, fold];
                *cost = from(agree(start, measured, |tried, task| chooser.predict(task, ranks, &from(*tried))));
            }
        }
        tracing::debug!(?self, "what calls cost");
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
    fit(start, |tried| {
        let distance = |time: f64, other: f64| (time / other).ln().powi(2);
        let of_times = measured.iter().filter_map(|(task, time)| Some(distance(predict(tried, task)?.1.max(LEAST), time.max(LEAST))));
        let of_parameters = tried.iter().zip(&start).map(|(parameter, before)| INERTIA * distance(*parameter, *before));
        of_times.sum::<f64>() + of_parameters.sum::<f64>()
    })
}

/// The calls to measure: of sizes that reach every part of an estimate, each in a few kinds.
pub(crate) fn probes(ranks: usize) -> impl Iterator<Item = Task> {
    use Kind::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
    let kinds = [AllReduce, Broadcast, ReduceScatter, AllGather, AllToAll];
    let sizes = [16, 3 << 10, 24 << 10, 192 << 10, 6 << 20];
    let element_bytes = size_of::<f32>();
    let task =
        move |kind, bytes: usize| Task { kind, bytes: bytes.next_multiple_of(ranks * element_bytes), element_bytes, in_place: false };
    sizes.into_iter().flat_map(move |bytes| kinds.map(|kind| task(kind, bytes)))
}
