//! How long calls should take on this communicator: a short measurement, and predictions by it.

use std::time::{Duration, Instant};

use super::Communicator;
use crate::call::Kind;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::host::plane::{Model, probes};
use crate::host::shm::Task;
use crate::op::ReduceOp;

/// How often all calls are measured: of what disturbs one, the next is free.
const ROUNDS: usize = 2;
/// For how long each of the calls is measured each time, and the least of a sample.
const PROBE: Duration = Duration::from_millis(6);
const SAMPLE: Duration = Duration::from_micros(200);
/// How many samples, at least.
const LEAST_SAMPLES: u32 = 3;
/// A page of elements.
const PAGE_ELEMENTS: usize = 4096 / size_of::<f32>();

/// What calls of one communicator cost, as [`Communicator::measure_costs`] has measured it. The same on every rank.
#[derive(Debug, Clone)]
pub struct Costs {
    model: Model,
}

/// How a call is done, and how long it should take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prediction {
    /// Over TCP the algorithm, by its name in [`Config::algorithm`](crate::Config::algorithm). In shared memory the way of the data:
    /// `flags` (there is none), `lanes` (beside the flags), `slots` (through the ranks' areas, in steps), or `shares` (the same, each
    /// rank folding its share for all).
    pub algorithm: &'static str,
    /// From the call until it returns, where all ranks call at once and one call follows another.
    pub time: Duration,
}

impl Costs {
    /// How the collective of this name (`all_reduce`, `barrier` …, as the method without `_into`) is done, and how long it should take, on
    /// ordinary memory with a built-in op. `bytes`: the whole vector; where there are blocks, all of them together, taken to be equal.
    /// `in_place`: on one buffer. The fold is taken to cost as much for each byte as a sum of `f32`.
    ///
    /// `None` for names that are no collective's, and for the collectives that the model leaves out: those of shared memory whose blocks
    /// vary from pair to pair or are known to the root alone.
    #[must_use]
    pub fn predict(&self, collective: &str, bytes: usize, dtype: DType, in_place: bool) -> Option<Prediction> {
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == collective)?;
        let (algorithm, nanoseconds) = self.model.predict(&Task { kind, bytes, element_bytes: dtype.size_bytes(), in_place })?;
        Some(Prediction { algorithm, time: Duration::try_from_secs_f64(nanoseconds / 1e9).unwrap_or(Duration::MAX) })
    }
}

impl Communicator {
    /// Measures what calls on host memory cost here, for predictions of calls of any size. Every rank calls it. It takes under half a second on
    /// shared memory, and longer where 30 calls, the largest of 12 MiB, take longer.
    ///
    /// ```
    /// # use collectives::{Communicator, DType};
    /// let predicted = Communicator::run_local(2, |comm| {
    ///     let costs = comm.measure_costs()?;
    ///     Ok(costs.predict("all_gather", 1 << 20, DType::F32, false))
    /// })?;
    /// let prediction = predicted[0].expect("a collective that the model knows");
    /// println!("by {}, in about {:?}", prediction.algorithm, prediction.time);
    /// assert_eq!(predicted[0], predicted[1]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Unsupported` for one rank, and where some ranks share a host and others do not; those common to all collectives.
    pub fn measure_costs(&self) -> Result<Costs> {
        let model = self.with_plane(|plane| plane.model());
        let Some(mut model) = model.ok_or_else(|| self.not_entered("measure_costs"))? else {
            let reason = "the model knows several ranks of one host, or of a host each".to_owned();
            return Err(Error::Unsupported { what: "predicting how long calls take".to_owned(), reason });
        };
        let tasks: Vec<Task> = probes(self.world_size()).collect();
        let longest = tasks.iter().map(|task| task.bytes / size_of::<f32>()).max().unwrap_or(0);
        let [mut source, mut target] = [(); 2].map(|()| vec![0.5; longest + PAGE_ELEMENTS]);
        let (source, target) = (from_page(&mut source), from_page(&mut target));
        let mut measured: Vec<(Task, f64)> = tasks.into_iter().map(|task| (task, f64::INFINITY)).collect();
        for _ in 0..ROUNDS {
            for (task, least) in &mut measured {
                *least = least.min(self.time_of(task, source, target)?);
            }
        }
        model.calibrate(&measured);
        Ok(Costs { model })
    }

    /// The nanoseconds of one call: the median of samples, each the slowest rank's.
    fn time_of(&self, task: &Task, source: &[f32], target: &mut [f32]) -> Result<f64> {
        let mut batch = |calls: u32| -> Result<f64> {
            self.barrier()?;
            let began = Instant::now();
            (0..calls).try_for_each(|_| self.probe(task, source, target))?;
            Ok(began.elapsed().as_secs_f64() * 1e9 / f64::from(calls))
        };
        // All ranks must come to the same numbers, so they go by the slowest; not by the first call, which finds memory.
        batch(1)?;
        let mut trial = [batch(1)?];
        self.all_reduce(&mut trial, ReduceOp::Max)?;
        let once = Duration::from_secs_f64(trial[0].max(1.0) / 1e9);
        let times = |whole: Duration, part: Duration| (whole.as_nanos() / part.as_nanos().max(1)) as u32;
        let calls = times(SAMPLE, once) + 1;
        let samples = times(PROBE, once * calls).max(LEAST_SAMPLES);
        batch(calls)?;
        let mut samples: Vec<f64> = (0..samples).map(|_| batch(calls)).collect::<Result<_>>()?;
        self.all_reduce(&mut samples, ReduceOp::Max)?;
        samples.sort_unstable_by(f64::total_cmp);
        Ok(samples[samples.len() / 2])
    }

    /// One call that is measured.
    fn probe(&self, task: &Task, source: &[f32], target: &mut [f32]) -> Result<()> {
        let whole = task.bytes / size_of::<f32>();
        let block = whole / self.world_size();
        let (blocks, target) = (&source[..whole], &mut target[..whole]);
        match task.kind {
            Kind::AllReduce => self.all_reduce_into(blocks, target, ReduceOp::Sum),
            Kind::Broadcast => self.broadcast(target, 0),
            Kind::ReduceScatter => self.reduce_scatter_into(blocks, &mut target[..block], ReduceOp::Sum),
            Kind::AllGather => self.all_gather_into(&blocks[..block], target),
            Kind::AllToAll => self.all_to_all_into(blocks, target),
            _ => self.barrier(),
        }
    }
}

/// The part of a buffer that begins at a page.
fn from_page(buffer: &mut [f32]) -> &mut [f32] {
    let start = buffer.as_ptr().align_offset(PAGE_ELEMENTS * size_of::<f32>());
    &mut buffer[start.min(PAGE_ELEMENTS)..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Transport;

    /// What rank 0 of `ranks` threads has measured, and whether all have measured the same.
    fn measured(ranks: usize, transport: Transport) -> Costs {
        let program = |comm: &Communicator| comm.measure_costs();
        let mut all = Communicator::builder().transport(transport).run_local(ranks, program).unwrap();
        let words = |costs: &Costs| format!("{costs:?}");
        assert!(all.iter().all(|costs| words(costs) == words(&all[0])), "ranks differ");
        all.remove(0)
    }

    #[test]
    fn predictions_are_the_same_on_every_rank_and_grow_with_the_size() {
        for transport in [Transport::Shm, Transport::Tcp] {
            let costs = measured(2, transport);
            for name in ["all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "reduce", "gather", "scatter"] {
                let time = |bytes| costs.predict(name, bytes, DType::F32, false).unwrap().time;
                assert!(!time(8).is_zero() && time(64 << 10) > time(8) && time(16 << 20) > time(1 << 20), "{name} {costs:?}");
            }
            assert!(costs.predict("barrier", 0, DType::U8, false).is_some());
            assert_eq!(costs.predict("all reduce", 8, DType::F32, false), None);
        }
    }

    #[test]
    fn one_rank_has_nothing_to_predict() {
        let comm = Communicator::local(1).unwrap().remove(0);
        assert!(comm.measure_costs().unwrap_err().is_unsupported());
    }
}
