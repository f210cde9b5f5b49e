//! Edge cases of models: no parameters, fewer elements than ranks, sizes larger than any memory, and the wrong ranks to
//! reduce over.

use collectives::{Communicator, Error, ReduceOp, Result, bf16};
use collectives_train::{
    Compress, DataParallel, FullySharded, FullyShardedOptions, Mesh, Options, Parameter, PowerSgd, PowerSgdOptions, Sampler,
    ShardedOptimizer, ShardingStrategy, UnevenEnd, Unit,
};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads, threads_with};
use crate::network::{self, LAYERS};

const STRATEGIES: [ShardingStrategy; 2] = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp];

fn one(shape: &[usize]) -> Vec<Parameter> {
    vec![Parameter::new::<f32>("only", shape)]
}

#[test]
fn models_without_parameters_take_steps() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for world_size in [1, 2, 3] {
            threads(wiring, world_size, |comm| {
                let mut plain = DataParallel::new(comm, Vec::new(), Options::default()).unwrap();
                let mut shared = ShardedOptimizer::new(comm, Vec::new(), Options::default()).unwrap();
                for _ in 0..3 {
                    assert_eq!(plain.finish().unwrap().clip_norm(1.0).unwrap(), 0.0);
                    plain.average::<Vec<f32>>(&mut []).unwrap();
                    let mut shards = shared.reduce().unwrap();
                    assert_eq!(shards.clip_norm(1.0).unwrap(), 0.0);
                    shards.update(|_| panic!("there is no bucket")).map(|_| ()).unwrap();
                }
                for units in [vec![], vec![Unit::new("bare", vec![])], vec![Unit::new("empty", one(&[3, 0])); 2]] {
                    let mut model = FullySharded::new(comm, units.clone(), FullyShardedOptions::default()).unwrap();
                    assert!(model.gather(units.len()).unwrap_err().to_string().contains("numbered from 0"));
                    if units.len() == 2 {
                        (0..2).for_each(|unit| model.load(unit, 0, &[0.0_f32; 0]).unwrap());
                    }
                    for _ in 0..3 {
                        for (unit, listed) in units.iter().enumerate() {
                            model.gather(unit).unwrap();
                            model.release(unit).unwrap();
                            model.reduce_gradients(unit, &vec![[0.0_f32; 0]; listed.parameters.len()]).unwrap();
                        }
                        let mut reduced = model.reduce().unwrap();
                        reduced.reduce_over(comm).unwrap();
                        assert_eq!(reduced.clip_norm(1.0).unwrap(), 0.0);
                        reduced.update(|shard| shard.values::<f32>().map(|(values, _)| assert!(values.is_empty()))).unwrap();
                    }
                }
            });
        }
    }
}

#[test]
fn fewer_elements_than_ranks_are_averaged_and_updated() {
    for world_size in [2, 3, 4] {
        threads(Wiring::Shm, world_size, |comm| {
            let (mine, mean) = ([comm.rank() as f32], (world_size - 1) as f32 / 2.0);
            let mut shared = ShardedOptimizer::new(comm, one(&[]), Options::default()).unwrap();
            shared.load(0, &[1.0_f32]).unwrap();
            shared.ready(0, &mine).unwrap();
            let step = |shard: &mut collectives_train::Shard<'_>| {
                let (parameters, gradients) = shard.values::<f32>()?;
                parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x -= slope);
                Ok(())
            };
            let mut value = [0.0_f32];
            shared.reduce().unwrap().update(step).unwrap().copy_to(0, &mut value).unwrap();
            assert_eq!(value, [1.0 - mean]);
            for (strategy, prefetch) in STRATEGIES.into_iter().zip([0, usize::MAX]) {
                let options = FullyShardedOptions { strategy, prefetch, ..FullyShardedOptions::default() };
                let mut model = FullySharded::new(comm, vec![Unit::new("a", one(&[])), Unit::new("b", one(&[1, 1]))], options).unwrap();
                [0, 1].into_iter().for_each(|unit| model.load(unit, 0, &[1.0_f32]).unwrap());
                [1, 0].into_iter().for_each(|unit| model.reduce_gradients(unit, &[mine]).unwrap());
                model.reduce().unwrap().update(step).unwrap();
                for unit in [0, 1] {
                    model.gather(unit).unwrap();
                    assert_eq!(model.parameter::<f32>(unit, 0).unwrap(), [1.0 - mean]);
                    model.release(unit).unwrap();
                }
            }
        });
    }
}

#[test]
fn sizes_that_no_memory_has_are_refused_on_every_rank() {
    threads(Wiring::Shm, 2, |comm| {
        for shape in [&[usize::MAX][..], &[usize::MAX, 2], &[1 << 40, 1 << 40]] {
            let unit = || vec![Unit::new("large", one(shape))];
            let refused = [
                DataParallel::new(comm, one(shape), Options::default()).map(drop),
                ShardedOptimizer::new(comm, one(shape), Options::default()).map(drop),
                FullySharded::new(comm, unit(), FullyShardedOptions::default()).map(drop),
            ];
            refused.into_iter().for_each(|made| drop(made.unwrap_err()));
        }
        // A shape with a zero has no elements, even if the product of its other sizes overflows.
        for shape in [&[0, usize::MAX, usize::MAX][..], &[usize::MAX, usize::MAX, 0]] {
            let mut model = DataParallel::new(comm, one(shape), Options::default()).unwrap();
            model.ready(0, &[0.0_f32; 0]).unwrap();
            model.finish().unwrap();
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn hooks_compress_buckets_of_any_shape() {
    for world_size in [1, 3] {
        threads(Wiring::Shm, world_size, |comm| {
            for shape in [&[][..], &[0], &[1, 1], &[1, 700], &[700, 1], &[2, 0, 3]] {
                for rank in [1, usize::MAX] {
                    let mut model = DataParallel::new(comm, one(shape), Options::default()).unwrap();
                    let options = PowerSgdOptions { rank, start_step: 0, ..PowerSgdOptions::default() };
                    let hook = |layout: &_| Ok(Box::new(PowerSgd::<f32>::new(comm, layout, ReduceOp::Avg, options.clone())?) as Box<_>);
                    model.set_hooks::<f32>(hook).unwrap();
                    let gradient = vec![2.0 + comm.rank() as f32; shape.iter().product()];
                    for _ in 0..2 {
                        model.ready(0, &gradient).unwrap();
                        let mean = 2.0 + (world_size - 1) as f32 / 2.0;
                        let averaged = model.finish().unwrap();
                        let got = averaged.gradient::<f32>(0).unwrap();
                        assert!(got.iter().all(|x| (x - mean).abs() < 1e-5), "{shape:?}, rank {rank}: {got:?}");
                    }
                }
                let mut model = DataParallel::new(comm, one(shape), Options::default()).unwrap();
                model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg)?))).unwrap();
                model.ready(0, &vec![2.0_f32; shape.iter().product()]).unwrap();
                model.finish().unwrap();
            }
        });
    }
}

/// Creates a mesh of copies and shards, and a model on the latter.
fn hybrid(comm: &Communicator, op: ReduceOp) -> (Mesh, FullySharded) {
    let mesh = Mesh::new(comm, &[("replicate", 2), ("shard", 2)]).unwrap();
    let options = FullyShardedOptions { op, ..FullyShardedOptions::default() };
    let unit = || Unit::new("layer", one(&[4]));
    let mut model = FullySharded::new(mesh.dimension("shard").unwrap(), vec![unit(), unit()], options).unwrap();
    for unit in [1, 0] {
        model.reduce_gradients(unit, &[[1.0 + comm.rank() as f32; 4]]).unwrap();
    }
    (mesh, model)
}

#[test]
fn shares_are_reduced_over_copies_as_they_were_over_shards() {
    for (op, sum) in [(ReduceOp::Avg, 2.5), (ReduceOp::Sum, 10.0), (ReduceOp::PreMulSum(0.5), 5.0)] {
        threads(Wiring::Tcp, 4, |comm| {
            let (mesh, mut model) = hybrid(comm, op);
            let mut reduced = model.reduce().unwrap();
            reduced.reduce_over(mesh.dimension("replicate").unwrap()).unwrap();
            assert_eq!(reduced.norm().unwrap(), sum * 8_f64.sqrt(), "{op}");
        });
    }
}

/// Returns numbers whose sums are exact, but the sums of whose squares are not: they depend on the order.
fn far_apart(random: &mut Random) -> Vec<f32> {
    (0..64).map(|index: i32| (random.below(1 << 20) as f32 - 524_288.0) * 2_f32.powi(-(index * 7 % 31))).collect()
}

#[test]
fn copies_on_hosts_of_other_shapes_clip_by_the_same_factor() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let steps: Vec<Vec<f32>> = (0..30).map(|_| far_apart(&mut random)).collect();
    let hosts = ["a", "a", "a", "a", "b", "c", "b", "c"];
    let builder = |rank: usize| Communicator::builder().configure(|config| config.host_identity = Some(hosts[rank].to_owned()));
    let norms = threads_with(hosts.len(), builder, |comm| {
        let mesh = Mesh::new(comm, &[("replicate", 2), ("shard", 4)]).unwrap();
        let unit = Unit::new("layer", one(&[64]));
        let mut model = FullySharded::new(mesh.dimension("shard").unwrap(), vec![unit], FullyShardedOptions::default()).unwrap();
        let mut norms = Vec::new();
        for gradients in &steps {
            model.reduce_gradients(0, std::slice::from_ref(gradients)).unwrap();
            let apart = model.reduce().unwrap().norm().unwrap();
            model.reduce_gradients(0, std::slice::from_ref(gradients)).unwrap();
            let mut reduced = model.reduce().unwrap();
            reduced.reduce_over(mesh.dimension("replicate").unwrap()).unwrap();
            let together = reduced.clip_norm(1.0).unwrap();
            let mut clipped = Vec::new();
            reduced.update(|shard| shard.values::<f32>().map(|(_, slopes)| clipped.extend(slopes.iter().map(|x| x.to_bits())))).unwrap();
            norms.push((apart.to_bits(), together.to_bits(), clipped));
        }
        norms
    });
    let differ = (0..steps.len()).filter(|step| norms[0][*step].0 != norms[4][*step].0).count();
    assert!(differ > 0, "the copies add up in the same order, and nothing was tried; seed {seed}");
    let (of_first, of_second) = norms.split_at(4);
    for (rank, (first, second)) in of_first.iter().zip(of_second).enumerate() {
        for (step, (first, second)) in first.iter().zip(second).enumerate() {
            let is_one = first.1 == second.1 && first.2 == second.2 && first.1 == norms[0][step].1;
            assert!(is_one, "step {step}, rank {rank}, seed {seed}");
        }
    }
}

#[test]
fn a_norm_that_is_no_number_is_none_on_every_copy() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        threads(Wiring::Tcp, 4, |comm| {
            let (mesh, mut model) = hybrid(comm, ReduceOp::Avg);
            model.reduce().map(drop).unwrap();
            for unit in [1, 0] {
                model.reduce_gradients(unit, &[[if comm.rank() == 3 { bad } else { 1.0 }; 4]]).unwrap();
            }
            let mut reduced = model.reduce().unwrap();
            reduced.reduce_over(mesh.dimension("replicate").unwrap()).unwrap();
            let norm = reduced.clip_norm(1.0).unwrap();
            assert!(norm.is_nan() == bad.is_nan() && !norm.is_finite(), "{norm} of {bad}");
        });
    }
}

#[test]
fn ranks_with_other_shares_are_no_copies() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 4, |comm| {
            for wrong in ["shard", "whole"] {
                let (mesh, mut model) = hybrid(comm, ReduceOp::Avg);
                let copies = if wrong == "shard" { mesh.dimension("shard").unwrap() } else { mesh.whole() };
                let error = model.reduce().unwrap().reduce_over(copies).unwrap_err();
                let words = ["elements 0..2 of unit 0 \"layer\"", "elements 2..4 of unit 0 \"layer\""];
                assert!(error.is_mismatch() && words.iter().all(|words| error.to_string().contains(words)), "{error}");
                assert!(model.reduce().unwrap_err().is_poisoned());
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn ranks_with_different_numbers_of_samples_weigh_them() {
    threads(Wiring::Shm, 3, |comm| {
        // Ten samples over three ranks: four, three and three.
        let own: Vec<usize> = Sampler::new(comm, 10).with_seed(3).with_end(UnevenEnd::Keep).epoch(0).collect();
        let options = Options { op: ReduceOp::PreMulSum(own.len() as f64 / 10.0), ..Options::default() };
        let mut model = DataParallel::new(comm, one(&[]), options).unwrap();
        model.ready(0, &[own.iter().sum::<usize>() as f32 / own.len() as f32]).unwrap();
        let mean = model.finish().unwrap().gradient::<f32>(0).unwrap()[0];
        assert!((mean - 4.5).abs() < 1e-5, "the mean of 0 to 9, not {mean}");
    });
}

#[test]
fn two_models_on_one_communicator_take_turns() {
    threads(Wiring::Tcp, 2, |comm| -> Result<()> {
        let mut models = [0, 1].map(|_| FullySharded::new(comm, network::units::<f32>(), FullyShardedOptions::default()).unwrap());
        models.iter_mut().try_for_each(|model| network::load::<f32>(model, comm, 5))?;
        for unit in 0..LAYERS {
            for model in &mut models {
                model.gather(unit)?;
            }
            let [first, second] = &models;
            assert_eq!(first.parameter::<f32>(unit, 0)?, second.parameter::<f32>(unit, 0)?);
            models.iter_mut().try_for_each(|model| model.release(unit))?;
        }
        models.iter_mut().try_for_each(|model| model.reduce().map(drop))
    })
    .into_iter()
    .for_each(Result::unwrap);
}

#[test]
fn positions_that_no_epoch_has_are_refused() {
    let sampler = Sampler::of_rank(2, 3, usize::MAX).unwrap();
    assert!(matches!(sampler.epoch_from(0, 0).map(|rest| rest.len()), Ok(len) if len == usize::MAX.div_ceil(3)));
    assert_eq!(sampler.epoch(1).take(1000).filter(|sample| *sample < usize::MAX).count(), 1000);
    let empty = Sampler::of_rank(2, 3, 0).unwrap();
    assert_eq!(empty.epoch(u64::MAX).count() + empty.epoch_from(0, 0).unwrap().count(), 0);
    assert!(matches!(empty.epoch_from(0, 1), Err(Error::InvalidArgument { .. })));
}
