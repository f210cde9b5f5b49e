//! Gradients that are given away: the means equal those of copied gradients, and are in the memory that was given.

use collectives::{Communicator, ReduceOp, Result, SharedBuffer, bf16};
use collectives_train::{
    BucketLayout, Compress, DataParallel, Flat, Float, Hook, Missing, Options, Parameter, PowerSgd, PowerSgdOptions, Progress,
    ShardedOptimizer,
};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};
use crate::model::{assert_means, gradient, len, parameters, with_type};

/// Returns options with every parameter alone in its bucket.
fn alone() -> Options {
    Options { own_bucket_bytes: Some(0), ..Options::default() }
}

fn one(len: usize) -> Vec<Parameter> {
    vec![Parameter::new::<f32>("a", &[len])]
}

/// The way a rank passes a gradient.
#[derive(Clone, Copy)]
enum Way {
    Copied,
    Given,
    /// Minus the part that was accumulated before.
    GivenAfterAPart,
}

const WAYS: [Way; 3] = [Way::Copied, Way::Given, Way::GivenAfterAPart];

/// Passes this rank's gradient to the model in one of these ways.
fn hand_in<T: Float>(model: &mut DataParallel, seed: u64, index: usize, len: usize, way: Way) -> Result<()> {
    let whole = gradient::<T>(seed, model.communicator().rank(), index, len);
    match way {
        Way::Copied => model.ready(index, &whole),
        Way::Given => model.give(index, whole),
        Way::GivenAfterAPart => {
            model.accumulate(index, &vec![T::from_f64(3.0); len])?;
            model.give(index, whole.iter().map(|x| T::from_f64(x.to_f64() - 3.0)).collect::<Vec<T>>())
        }
    }
}

/// Runs steps in which every rank gives some gradients and copies others, in its own order.
fn random_steps(comm: &Communicator, options: Options, seed: u64) -> Result<()> {
    let parameters = parameters();
    let mut model = DataParallel::new(comm, parameters.clone(), options)?;
    let mut random = Random(seed ^ (comm.rank() as u64 + 1) << 56);
    for step in 0..5 {
        let mut order: Vec<usize> = (0..parameters.len()).collect();
        (1..order.len()).for_each(|end| order.swap(end, random.below(end + 1)));
        for index in order {
            let (parameter, way) = (&parameters[index], WAYS[random.below(WAYS.len())]);
            with_type!(parameter, hand_in::<_>(&mut model, seed + step, index, len(parameter), way))?;
        }
        let averaged = model.finish()?;
        assert_means(&averaged, seed + step, comm.world_size(), &parameters);
    }
    Ok(())
}

#[test]
fn means_are_exact_whichever_ranks_give_and_whichever_copy() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            for own_bucket_bytes in [Some(0), Some(200), None, Some(usize::MAX)] {
                let (seed, options) = (random.next(), Options { own_bucket_bytes, bucket_bytes: 7000, ..Options::default() });
                threads(wiring, world_size, |comm| random_steps(comm, options.clone(), seed).unwrap());
            }
        }
    }
}

#[test]
fn means_are_exact_between_processes_that_give_and_copy() {
    let name = "given::means_are_exact_between_processes_that_give_and_copy";
    processes(name, Wiring::Shm, 3, |comm| random_steps(comm, alone(), 20_261_122));
}

/// Returns numbers between -1 and 1, whose sums are rounded.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..len).map(|_| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn given_gradients_have_the_bits_of_copied_ones() {
    const LEN: usize = 50_001;
    for (wiring, world_size) in [(Wiring::Shm, 2), (Wiring::Shm, 4), (Wiring::Tcp, 3)] {
        threads(wiring, world_size, |comm| {
            let mut model = DataParallel::new(comm, one(LEN), alone()).unwrap();
            let mut step = |hand_in: &dyn Fn(&mut DataParallel, &[f32])| {
                hand_in(&mut model, &numbers(comm.rank() as u64, LEN));
                bits(model.finish().unwrap().gradient(0).unwrap())
            };
            let copied = step(&|model, mine| model.ready(0, mine).unwrap());
            assert!(copied == step(&|model, mine| model.give(0, mine.to_vec()).unwrap()), "a vector");
            let shared = |model: &mut DataParallel, mine: &[f32]| {
                let mut buffer: SharedBuffer<f32> = comm.alloc(LEN).unwrap();
                buffer.copy_from_slice(mine);
                model.give(0, buffer).unwrap();
            };
            assert!(copied == step(&shared), "memory of the host's ranks");
            let by_rank = |model: &mut DataParallel, mine: &[f32]| match comm.rank() {
                0 => model.give(0, mine.to_vec()).unwrap(),
                _ => model.ready(0, mine).unwrap(),
            };
            assert!(copied == step(&by_rank), "rank 0 gives where the others copy");
        });
    }
}

#[test]
fn a_given_vector_comes_back_and_can_be_given_again() {
    threads(Wiring::Shm, 2, |comm| {
        let parameters = vec![Parameter::new::<f32>("shared", &[3]), Parameter::new::<f32>("alone", &[5000])];
        let mut model = DataParallel::new(comm, parameters, Options { own_bucket_bytes: Some(20_000), ..Options::default() }).unwrap();
        let (mut shared, mut alone) = (vec![0.0; 3], vec![0.0; 5000]);
        for step in 0..4 {
            shared.fill(comm.rank() as f32);
            alone.fill((comm.rank() + step) as f32);
            let address = alone.as_ptr();
            model.give(1, alone).unwrap();
            model.give(0, shared).unwrap();
            let mut averaged = model.finish().unwrap();
            let flat = averaged.take::<f32>(1).unwrap();
            assert_eq!(flat.host().unwrap(), [step as f32 + 0.5; 5000]);
            alone = flat.into_vec().unwrap();
            assert_eq!(alone.as_ptr(), address, "the memory that was given");
            shared = averaged.take::<f32>(0).unwrap().into_vec().unwrap();
            assert_eq!(shared, [0.5; 3]);
        }
    });
}

#[test]
fn what_was_taken_is_gone_until_the_next_step() {
    threads(Wiring::Shm, 2, |comm| {
        let parameters = vec![Parameter::new::<f32>("a", &[2]), Parameter::new::<f64>("b", &[3])];
        let mut model = DataParallel::new(comm, parameters, alone()).unwrap();
        for step in 0..3 {
            // Alternately given and copied; the mean is always taken.
            match step % 2 {
                0 => model.give(0, vec![step as f32; 2]).unwrap(),
                _ => model.ready(0, &[step as f32; 2]).unwrap(),
            }
            model.give(1, vec![1.0_f64; 3]).unwrap();
            let mut averaged = model.finish().unwrap();
            assert!(averaged.take::<f64>(0).unwrap_err().to_string().contains("elements of f64 were passed"));
            assert!(averaged.take::<f32>(2).unwrap_err().to_string().contains("there is no parameter 2: the model has 2"));
            assert_eq!(averaged.take::<f32>(0).unwrap().into_vec().unwrap(), [step as f32; 2]);
            let errors = [
                averaged.take::<f32>(0).map(drop).unwrap_err(),
                averaged.gradient::<f32>(0).map(drop).unwrap_err(),
                averaged.copy_to(0, &mut [0.0_f32; 2]).unwrap_err(),
                averaged.norm().map(drop).unwrap_err(),
                averaged.clip_norm(1.0).map(drop).unwrap_err(),
            ];
            for error in errors {
                assert!(error.to_string().contains("parameter 0 \"a\" (f32[2]): its gradient was taken"), "{error}");
            }
            assert_eq!(averaged.gradient::<f64>(1).unwrap(), [1.0; 3]);
        }
    });
}

#[test]
fn gifts_that_do_not_fit_are_refused_and_harm_nothing() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = DataParallel::new(comm, one(100), alone()).unwrap();
        for _step in 0..2 {
            for (error, words) in [
                (model.give(0, vec![1.0_f32; 99]).unwrap_err(), "parameter 0 \"a\" (f32[100]): 99 elements were passed"),
                (model.give(0, vec![1.0_f64; 100]).unwrap_err(), "elements of f64 were passed"),
                (model.give(1, vec![1.0_f32; 100]).unwrap_err(), "there is no parameter 1: the model has 1"),
            ] {
                assert!(error.to_string().contains(words), "{error}");
            }
            model.give(0, vec![comm.rank() as f32; 100]).unwrap();
            let error = model.give(0, vec![9.0_f32; 100]).unwrap_err().to_string();
            assert!(error.contains("its gradient was already given in this step"), "{error}");
            assert_eq!(model.finish().unwrap().gradient::<f32>(0).unwrap(), [0.5; 100]);
        }
    });
}

#[test]
fn a_gradient_that_is_missing_after_one_that_was_given_counts_as_zeros() {
    for missing in [Missing::Zeros, Missing::Refused] {
        threads(Wiring::Shm, 2, |comm| {
            let mut model = DataParallel::new(comm, one(10), Options { missing, ..alone() }).unwrap();
            for step in 0..4 {
                if step % 2 == 0 || comm.rank() == 0 {
                    model.give(0, vec![4.0_f32; 10]).unwrap();
                }
                match model.finish() {
                    Ok(mut averaged) => {
                        let expected = if step % 2 == 0 { 4.0 } else { 2.0 };
                        assert_eq!(averaged.take::<f32>(0).unwrap().into_vec().unwrap(), [expected; 10], "step {step}");
                    }
                    Err(error) => {
                        assert!(step % 2 == 1 && missing == Missing::Refused, "step {step}: {error}");
                        assert!(error.to_string().contains("rank 1") && error.to_string().contains("parameter 0 \"a\""), "{error}");
                    }
                }
            }
        });
    }
}

#[test]
fn ranks_agree_from_which_size_a_parameter_is_alone() {
    let errors = threads(Wiring::Shm, 2, |comm| {
        let options = Options { own_bucket_bytes: [Some(4096), Some(8192)][comm.rank()], ..Options::default() };
        DataParallel::new(comm, one(10), options).unwrap_err().to_string()
    });
    assert!(errors[0].contains("own_bucket_bytes 4096") && errors[0].contains("own_bucket_bytes 8192"), "{}", errors[0]);
}

/// Runs steps with copied gradients and the same with given ones, with this hook, and compares the bits of the means.
fn with_hook<H: Hook<f32> + 'static>(make: impl Fn(&Communicator, &BucketLayout) -> Result<H> + Sync) {
    threads(Wiring::Shm, 2, |comm| {
        let steps = |gives: bool| {
            let parameters = vec![Parameter::new::<f32>("matrix", &[60, 50]), Parameter::new::<f32>("bias", &[7])];
            let mut model = DataParallel::new(comm, parameters, alone()).unwrap();
            model.set_hooks::<f32>(|layout| Ok(Box::new(make(comm, layout)?))).unwrap();
            let mut seen = Vec::new();
            for step in 0..5 {
                for (index, len) in [(1, 7), (0, 3000)] {
                    let mine = numbers(step << 8 | (comm.rank() << 4 | index) as u64, len);
                    if gives && (step + index as u64) % 3 != 2 {
                        model.give(index, mine).unwrap()
                    } else {
                        model.ready(index, &mine).unwrap()
                    }
                }
                let mut averaged = model.finish().unwrap();
                seen.push(bits(averaged.gradient(0).unwrap()));
                seen.push(bits(&averaged.take::<f32>(1).unwrap().into_vec().unwrap()));
            }
            seen
        };
        assert!(steps(false) == steps(true));
    });
}

/// A hook with two buffers: it returns what it received one step before.
struct Swapping {
    op: ReduceOp,
    other: Option<Flat<f32>>,
    work: Option<collectives::Work<Flat<f32>>>,
}

impl Hook<f32> for Swapping {
    fn start(&mut self, comm: &Communicator, gradients: Flat<f32>) -> Result<()> {
        self.work = Some(comm.start_all_reduce(gradients, self.op)?);
        Ok(())
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<f32>> {
        let taken = self.work.take().unwrap().wait()?;
        let mut back = self.other.take().unwrap();
        back.host_mut()?.copy_from_slice(taken.host()?);
        self.other = Some(taken);
        Ok(Progress::Done(back))
    }
}

#[test]
fn hooks_do_with_given_gradients_what_they_do_with_copied_ones() {
    with_hook(|comm, layout| Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg));
    let options = PowerSgdOptions { rank: 2, start_step: 2, ..PowerSgdOptions::default() };
    with_hook(|comm, layout| PowerSgd::<f32>::new(comm, layout, ReduceOp::Avg, options.clone()));
    with_hook(|_, layout| Ok(Swapping { op: ReduceOp::Avg, other: Some(vec![0.0; layout.len].into()), work: None }));
}

#[test]
fn a_sharded_optimiser_takes_gifts_of_any_length() {
    for (wiring, world_size) in [(Wiring::Shm, 1), (Wiring::Shm, 2), (Wiring::Shm, 3), (Wiring::Tcp, 2)] {
        threads(wiring, world_size, |comm| {
            let lens = [600, 601, 1];
            let parameters = lens.map(|len| Parameter::new::<f32>("p", &[len])).to_vec();
            let mut model = ShardedOptimizer::new(comm, parameters, alone()).unwrap();
            lens.iter().enumerate().for_each(|(index, len)| model.load(index, &vec![0.0_f32; *len]).unwrap());
            for step in 0..4 {
                for (index, len) in lens.into_iter().enumerate() {
                    let mine = vec![(comm.rank() + index) as f32; len];
                    if (step + index + comm.rank()) % 2 == 0 {
                        model.give(index, mine).unwrap()
                    } else {
                        model.ready(index, &mine).unwrap()
                    }
                }
                let descend = |shard: &mut collectives_train::Shard<'_>| {
                    let (parameters, slopes) = shard.values::<f32>()?;
                    parameters.iter_mut().zip(slopes).for_each(|(x, slope)| *x -= slope);
                    Ok(())
                };
                let updated = model.reduce().unwrap().update(descend).unwrap();
                for (index, len) in lens.into_iter().enumerate() {
                    let mean = (world_size - 1) as f32 / 2.0 + index as f32;
                    assert_eq!(updated.parameter::<f32>(index).unwrap(), vec![-mean * (step + 1) as f32; len], "parameter {index}");
                }
            }
        });
    }
}

#[test]
fn nothing_is_taken_after_a_step_that_failed() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = DataParallel::new(comm, one(10), alone()).unwrap();
        let op = [ReduceOp::Sum, ReduceOp::Avg][comm.rank()];
        model.set_hooks::<f32>(|_| Ok(Box::new(collectives_train::AllReduce::new(op)))).unwrap();
        model.give(0, vec![1.0_f32; 10]).unwrap();
        assert!(model.finish().unwrap_err().is_mismatch());
        assert!(model.give(0, vec![1.0_f32; 10]).unwrap_err().is_poisoned());
    });
}
