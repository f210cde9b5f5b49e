//! Hooks: the precision of compressed means, and custom hooks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use collectives::{Communicator, Error, ReduceOp, Result, Work, bf16, f16};
use collectives_train::{
    AllReduce, BucketLayout, Compress, DataParallel, Flat, Float, Hook, Options, Parameter, PowerSgd, PowerSgdOptions, Progress,
};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads};

/// Returns a number between -1 and 1.
fn number(random: &mut Random) -> f64 {
    random.next() as f64 / u64::MAX as f64 * 2.0 - 1.0
}

/// Returns the gradient of a rank, and the exact mean of all ranks.
fn gradients(seed: u64, comm: &Communicator, len: usize) -> (Vec<f32>, Vec<f64>) {
    let of = |rank: usize| -> Vec<f32> {
        let mut random = Random(seed ^ (rank as u64 + 1) << 32);
        (0..len).map(|_| number(&mut random) as f32).collect()
    };
    let mut mean = vec![0.0; len];
    for rank in 0..comm.world_size() {
        mean.iter_mut().zip(of(rank)).for_each(|(mean, x)| *mean += f64::from(x) / comm.world_size() as f64);
    }
    (of(comm.rank()), mean)
}

/// Returns the largest difference.
fn worst(got: &[f32], expected: &[f64]) -> f64 {
    got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).abs()).fold(0.0, f64::max)
}

/// Returns the largest difference of a compressed mean over a few steps.
fn compressed_by<C: Float>(wiring: Wiring, world_size: usize, seed: u64) -> f64 {
    let off = threads(wiring, world_size, |comm| {
        let parameters = vec![Parameter::new::<f32>("a", &[5000]), Parameter::new::<f32>("b", &[3])];
        let mut model = DataParallel::new(comm, parameters, Options { bucket_bytes: 100, ..Options::default() }).unwrap();
        model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, C>::new(comm, layout, ReduceOp::Avg)?))).unwrap();
        let mut off: f64 = 0.0;
        for step in 0..3 {
            for (index, len) in [(1, 3), (0, 5000)] {
                model.ready(index, &gradients(seed + step + index as u64, comm, len).0).unwrap();
            }
            let averaged = model.finish().unwrap();
            for (index, len) in [(1, 3), (0, 5000)] {
                off = off.max(worst(averaged.gradient(index).unwrap(), &gradients(seed + step + index as u64, comm, len).1));
            }
        }
        off
    });
    off.into_iter().fold(0.0, f64::max)
}

#[test]
fn compressed_means_are_off_by_no_more_than_their_roundings() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for (wiring, world_size) in [(Wiring::Shm, 1), (Wiring::Shm, 2), (Wiring::Tcp, 2), (Wiring::Shm, 3), (Wiring::Tcp, 4)] {
        let seed = random.next();
        // For numbers up to 1: half a unit in the last place for each rank's own value, and for each partial sum that
        // is sent.
        let bound = |unit: f64| unit * world_size as f64;
        let (half, brain) = (compressed_by::<f16>(wiring, world_size, seed), compressed_by::<bf16>(wiring, world_size, seed));
        assert!(half <= bound(2.0_f64.powi(-11)), "f16 is off by {half} with {world_size} ranks, {wiring:?}");
        assert!(brain <= bound(2.0_f64.powi(-8)), "bf16 is off by {brain} with {world_size} ranks, {wiring:?}");
    }
}

/// Returns a rank's matrix of rank `of`, row by row and the same in every call, and the exact mean of all ranks'
/// matrices. All rows are combinations of the same rows, so the mean has rank `of` too.
fn low_rank(seed: u64, comm: &Communicator, (rows, columns): (usize, usize), of: usize) -> (Vec<f32>, Vec<f64>) {
    let mut common = Random(seed);
    let right: Vec<f64> = (0..of * columns).map(|_| number(&mut common)).collect();
    let matrix = |rank: usize| -> Vec<f64> {
        let mut random = Random(seed ^ (rank as u64 + 1) << 32);
        let left: Vec<f64> = (0..rows * of).map(|_| number(&mut random)).collect();
        let element = |at: usize| (0..of).map(|k| left[at / columns * of + k] * right[k * columns + at % columns]).sum::<f64>();
        (0..rows * columns).map(element).collect()
    };
    let mut mean = vec![0.0; rows * columns];
    for rank in 0..comm.world_size() {
        mean.iter_mut().zip(matrix(rank)).for_each(|(mean, x)| *mean += x / comm.world_size() as f64);
    }
    (matrix(comm.rank()).into_iter().map(|x| x as f32).collect(), mean)
}

fn power_sgd(comm: &Communicator, parameters: Vec<Parameter>, options: &PowerSgdOptions) -> DataParallel {
    let mut model = DataParallel::new(comm, parameters, Options::default()).unwrap();
    let make =
        |layout: &BucketLayout| Ok(Box::new(PowerSgd::<f32>::new(comm, layout, ReduceOp::Avg, options.clone())?) as Box<dyn Hook<f32>>);
    model.set_hooks::<f32>(make).unwrap();
    model
}

#[test]
fn low_rank_gradients_come_through_power_sgd_whole() {
    for (wiring, world_size) in [(Wiring::Shm, 1), (Wiring::Shm, 2), (Wiring::Tcp, 3), (Wiring::Shm, 4)] {
        threads(wiring, world_size, |comm| {
            let parameters = vec![Parameter::new::<f32>("matrix", &[40, 5, 10]), Parameter::new::<f32>("bias", &[40])];
            let options = PowerSgdOptions { rank: 3, start_step: 1, error_feedback: false, ..PowerSgdOptions::default() };
            let mut model = power_sgd(comm, parameters, &options);
            for step in 0..4 {
                let (matrix, mean) = low_rank(7, comm, (40, 50), 3);
                let (bias, bias_mean) = gradients(step, comm, 40);
                model.ready(0, &matrix).unwrap();
                model.ready(1, &bias).unwrap();
                let averaged = model.finish().unwrap();
                let off = worst(averaged.gradient(0).unwrap(), &mean);
                assert!(off < 1e-5, "step {step}: the matrix is off by {off}");
                assert!(worst(averaged.gradient(1).unwrap(), &bias_mean) < 1e-6, "step {step}: vectors go uncompressed");
            }
        });
    }
}

#[test]
fn error_feedback_brings_in_later_steps_what_was_left_out() {
    const STEPS: usize = 300;
    threads(Wiring::Shm, 2, |comm| {
        let off_by = |error_feedback: bool| {
            let options = PowerSgdOptions { rank: 2, start_step: 0, error_feedback, ..PowerSgdOptions::default() };
            let mut model = power_sgd(comm, vec![Parameter::new::<f32>("matrix", &[20, 20])], &options);
            let (matrix, mean) = gradients(11, comm, 400);
            let mut sum = vec![0.0_f32; 400];
            for _ in 0..STEPS {
                model.ready(0, &matrix).unwrap();
                let averaged = model.finish().unwrap();
                sum.iter_mut().zip(averaged.gradient::<f32>(0).unwrap()).for_each(|(sum, x)| *sum += x);
            }
            let mean_of_steps: Vec<f32> = sum.iter().map(|sum| sum / STEPS as f32).collect();
            worst(&mean_of_steps, &mean)
        };
        let (with, without) = (off_by(true), off_by(false));
        assert!(with < 0.05, "with error feedback all of a gradient of full rank comes in the end, but for {with}");
        assert!(without > 0.2, "without, most of it is lost: {without}");
    });
}

#[test]
fn ranks_end_with_the_same_bits_after_power_sgd() {
    let results = threads(Wiring::Tcp, 3, |comm| {
        let options = PowerSgdOptions { rank: 2, start_step: 1, warm_start: false, ..PowerSgdOptions::default() };
        let mut model =
            power_sgd(comm, vec![Parameter::new::<f32>("matrix", &[30, 30]), Parameter::new::<f32>("dead", &[20, 20])], &options);
        (0..5)
            .flat_map(|step| {
                model.ready(0, &gradients(step, comm, 900).0).unwrap();
                model.ready(1, &[0.0_f32; 400]).unwrap();
                let averaged = model.finish().unwrap();
                assert_eq!(averaged.gradient::<f32>(1).unwrap(), [0.0; 400]);
                averaged.gradient::<f32>(0).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    });
    assert!(results.iter().all(|bits| *bits == results[0]));
}

#[test]
fn a_gradient_that_is_not_finite_spoils_one_step_of_power_sgd_and_no_other_matrix() {
    for (wiring, world_size) in [(Wiring::Shm, 1), (Wiring::Shm, 2), (Wiring::Tcp, 3)] {
        for (odd, warm_start) in [(f32::INFINITY, true), (f32::NAN, true), (f32::NEG_INFINITY, false)] {
            threads(wiring, world_size, |comm| {
                let parameters = ["spoilt", "sound"].map(|name| Parameter::new::<f32>(name, &[40, 50])).to_vec();
                let options = PowerSgdOptions { rank: 2, start_step: 0, warm_start, ..PowerSgdOptions::default() };
                let mut model = power_sgd(comm, parameters, &options);
                let (matrix, mean) = low_rank(7, comm, (40, 50), 2);
                for step in 0..6 {
                    let mut mine = matrix.clone();
                    if step == 2 && comm.rank() == world_size - 1 {
                        mine[77..120].fill(odd);
                    }
                    model.ready(0, &mine).unwrap();
                    model.ready(1, &matrix).unwrap();
                    let averaged = model.finish().unwrap();
                    assert!(worst(averaged.gradient(1).unwrap(), &mean) < 1e-4, "step {step}");
                    let got: &[f32] = averaged.gradient(0).unwrap();
                    match step {
                        2 => assert!(got.iter().all(|x| x.is_nan()), "{odd} on one rank is told to all"),
                        _ => assert!(worst(got, &mean) < 1e-4, "step {step}: off by {}", worst(got, &mean)),
                    }
                }
            });
        }
    }
}

#[test]
fn a_rank_of_zero_is_refused() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("matrix", &[9, 9])], Options::default()).unwrap();
    let options = PowerSgdOptions { rank: 0, ..PowerSgdOptions::default() };
    let refused = model.set_hooks::<f32>(|layout| Ok(Box::new(PowerSgd::<f32>::new(comm, layout, ReduceOp::Avg, options.clone())?)));
    assert!(refused.unwrap_err().to_string().contains("the matrix rank of the approximation is 0"));
}

#[test]
fn ranks_with_other_options_of_power_sgd_are_told_so() {
    let said = threads(Wiring::Shm, 3, |comm| {
        let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("matrix", &[9, 9])], Options::default()).unwrap();
        let options = PowerSgdOptions { seed: (comm.rank() / 2) as u64, ..PowerSgdOptions::default() };
        let refused = model.set_hooks::<f32>(|layout| Ok(Box::new(PowerSgd::<f32>::new(comm, layout, ReduceOp::Avg, options.clone())?)));
        refused.unwrap_err().to_string()
    });
    assert!(said.iter().all(|words| words.contains("seed: 0") && words.contains("seed: 1")), "{said:?}");
}

/// Reduces to the largest gradient of all ranks, then sums those: two calls.
struct Twice(Option<Work<Flat<f32>>>, bool);

impl Hook<f32> for Twice {
    fn start(&mut self, comm: &Communicator, gradients: Flat<f32>) -> Result<()> {
        self.0 = Some(comm.start_all_reduce(gradients, ReduceOp::Max)?);
        Ok(())
    }

    fn advance(&mut self, comm: &Communicator) -> Result<Progress<f32>> {
        let flat = self.0.take().expect("it was started").wait()?;
        self.1 = !self.1;
        if !self.1 {
            return Ok(Progress::Done(flat));
        }
        self.0 = Some(comm.start_all_reduce(flat, ReduceOp::Sum)?);
        Ok(Progress::Started)
    }
}

#[test]
fn hooks_of_ones_own_may_make_several_calls_and_leave_other_types_alone() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 3, |comm| {
            let mut parameters: Vec<_> = (0..7).map(|index| Parameter::new::<f32>(format!("{index}"), &[10])).collect();
            parameters.push(Parameter::new::<f64>("mean", &[2]));
            let mut model =
                DataParallel::new(comm, parameters, Options { first_bucket_bytes: 0, bucket_bytes: 80, ..Options::default() }).unwrap();
            model.set_hooks::<f32>(|_| Ok(Box::new(Twice(None, false)))).unwrap();
            for step in 0..3 {
                (0..7).for_each(|index| model.ready(index, &[comm.rank() as f32 + step as f32; 10]).unwrap());
                model.ready(7, &[comm.rank() as f64; 2]).unwrap();
                let averaged = model.finish().unwrap();
                (0..7).for_each(|index| assert_eq!(averaged.gradient::<f32>(index).unwrap(), [(2.0 + step as f32) * 3.0; 10]));
                assert_eq!(averaged.gradient::<f64>(7).unwrap(), [1.0; 2]);
            }
            model.set_hooks::<f32>(|_| Ok(Box::new(AllReduce::new(ReduceOp::Sum)))).unwrap();
            (0..7).for_each(|index| model.ready(index, &[1.0_f32; 10]).unwrap());
            model.ready(7, &[1.0_f64; 2]).unwrap();
            assert_eq!(model.finish().unwrap().gradient::<f32>(3).unwrap(), [3.0; 10]);
        });
    }
}

#[test]
fn hooks_are_set_between_steps_alone_and_all_or_none() {
    threads(Wiring::Shm, 2, |comm| {
        let parameters = vec![Parameter::new::<f32>("a", &[10]), Parameter::new::<f32>("b", &[5])];
        let options = Options { first_bucket_bytes: 0, bucket_bytes: 0, ..Options::default() };
        let mut model = DataParallel::new(comm, parameters, options).unwrap();
        let sums = |_: &BucketLayout| Ok(Box::new(AllReduce::new(ReduceOp::Sum)) as Box<dyn Hook<f32>>);
        let refused = |layout: &BucketLayout| {
            if layout.index == 1 { Err(Error::Protocol { with: "b".into(), reason: "no".into() }) } else { sums(layout) }
        };
        assert!(model.set_hooks::<f32>(refused).is_err());
        model.accumulate(1, &[1.0_f32; 5]).unwrap();
        let error = model.set_hooks::<f32>(sums).unwrap_err().to_string();
        assert!(error.contains("a gradient of parameter 1 \"b\" (f32[5]) was given in this step"), "{error}");
        model.ready(1, &[1.0_f32; 5]).unwrap();
        model.ready(0, &[1.0_f32; 10]).unwrap();
        assert_eq!(model.finish().unwrap().gradient::<f32>(1).unwrap(), [2.0; 5], "means, as before");
        model.set_hooks::<f32>(sums).unwrap();
        let mut gradients = [vec![1.0_f32; 10], vec![1.0; 5]];
        model.average(&mut gradients).unwrap();
        assert_eq!(gradients, [vec![2.0; 10], vec![2.0; 5]]);
    });
}

/// Gives each of two buckets the gradients of the other one.
struct Exchanged(Arc<Mutex<Vec<Flat<f32>>>>);

impl Hook<f32> for Exchanged {
    fn start(&mut self, _: &Communicator, gradients: Flat<f32>) -> Result<()> {
        self.0.lock().unwrap().push(gradients);
        Ok(())
    }

    fn advance(&mut self, _: &Communicator) -> Result<Progress<f32>> {
        Ok(Progress::Done(self.0.lock().unwrap().pop().unwrap()))
    }
}

/// Panics in `start` or in `advance`.
struct Panics {
    at_start: bool,
}

impl Hook<f32> for Panics {
    fn start(&mut self, _: &Communicator, _: Flat<f32>) -> Result<()> {
        assert!(!self.at_start, "a panic of the test's");
        Ok(())
    }

    fn advance(&mut self, _: &Communicator) -> Result<Progress<f32>> {
        panic!("a panic of the test's")
    }
}

/// Creates a model with two buckets of different lengths on one rank.
fn two_buckets(comm: &Communicator) -> DataParallel {
    let parameters = vec![Parameter::new::<f32>("a", &[10]), Parameter::new::<f32>("b", &[5])];
    DataParallel::new(comm, parameters, Options { first_bucket_bytes: 0, bucket_bytes: 0, ..Options::default() }).unwrap()
}

#[test]
fn a_hook_that_gives_a_buffer_of_another_length_back_ends_the_steps() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = two_buckets(comm);
    let flats = Arc::default();
    model.set_hooks::<f32>(|_| Ok(Box::new(Exchanged(Arc::clone(&flats))))).unwrap();
    let error = model.average(&mut [vec![1.0_f32; 10], vec![1.0; 5]]).unwrap_err().to_string();
    assert!(error.contains("bucket 0 has 5 elements, but its hook returned a buffer of 10 elements"), "{error}");
    assert!(model.finish().unwrap_err().is_poisoned());
}

#[test]
fn a_hook_that_panics_ends_the_steps() {
    let comm = &Communicator::local(1).unwrap()[0];
    for at_start in [true, false] {
        let mut model = two_buckets(comm);
        model.set_hooks::<f32>(|_| Ok(Box::new(Panics { at_start }))).unwrap();
        let step = AssertUnwindSafe(|| model.average(&mut [vec![1.0_f32; 10], vec![1.0; 5]]));
        assert!(catch_unwind(step).is_err());
        let error = model.ready(0, &[1.0_f32; 10]).unwrap_err();
        assert!(error.is_poisoned() && error.to_string().contains("panicked"), "{error}");
        assert!(model.finish().unwrap_err().is_poisoned());
    }
}
