//! Gradients of several backward passes, clipped gradients, scaled losses and compressed gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor, Var};
use collectives::{Communicator, ReduceOp, bf16};
use collectives_candle::DataParallel;
use collectives_train::{Compress, LossScaler, Missing, Options, PowerSgd, PowerSgdOptions};
use training_common::{largest_difference, uniform};

const RANKS: [usize; 4] = [1, 2, 3, 4];
/// Samples of a step, on all ranks together.
const BATCH: usize = 12;

fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| Ok(program(comm).unwrap())).unwrap()
}

fn variables() -> Vec<Var> {
    let variable = |seed, shape: &[usize]| Var::from_vec(uniform(seed, 1.0, shape.iter().product()), shape, &Device::Cpu).unwrap();
    vec![variable(1, &[5, 3]), variable(2, &[3]), variable(3, &[1])]
}

/// Returns the mean loss of some samples.
fn loss(variables: &[Var], samples: std::ops::Range<usize>) -> Result<Tensor> {
    let input = Tensor::from_vec(uniform(7, 1.0, BATCH * 5), (BATCH, 5), &Device::Cpu)?.narrow(0, samples.start, samples.len())?;
    let output = input.matmul(&variables[0])?.broadcast_add(&variables[1])?.tanh()?.broadcast_mul(&variables[2])?;
    output.sqr()?.mean_all()
}

fn share(comm: &Communicator) -> std::ops::Range<usize> {
    let each = BATCH / comm.world_size();
    comm.rank() * each..(comm.rank() + 1) * each
}

fn read(gradients: &candle_core::backprop::GradStore, variables: &[Var]) -> Result<Vec<f32>> {
    let each = variables.iter().map(|variable| gradients.get(variable).unwrap().flatten_all()?.to_vec1());
    Ok(each.collect::<Result<Vec<Vec<f32>>>>()?.concat())
}

/// Returns the gradients of one process.
fn alone() -> Vec<f32> {
    let variables = variables();
    read(&loss(&variables, 0..BATCH).unwrap().backward().unwrap(), &variables).unwrap()
}

#[test]
fn several_backward_passes_count_as_one_of_all_samples() {
    for (count, passes) in [(1, 1), (1, 4), (2, 3), (3, 2), (4, 3)] {
        let ends = ranks(count, |comm| {
            let variables = variables();
            let mut model = DataParallel::new(comm, variables.clone())?;
            let (own, each) = (share(comm), BATCH / count / passes);
            // Two steps: nothing is left over from the first.
            let mut found = Vec::new();
            for _ in 0..2 {
                for pass in 0..passes {
                    let begin = own.start + pass * each;
                    let mut gradients = (loss(&variables, begin..begin + each)? / passes as f64)?.backward()?;
                    if pass + 1 < passes {
                        model.accumulate(&gradients)?;
                    } else {
                        model.average(&mut gradients)?;
                        found = read(&gradients, &variables)?;
                    }
                }
            }
            Ok(found)
        });
        assert!(ends.iter().all(|end| end == &ends[0] && largest_difference(end, &alone()) <= 1e-6), "{count} ranks, {passes} passes");
    }
}

#[test]
fn a_variable_that_the_last_pass_does_not_use_counts_with_the_other_passes_or_is_refused() {
    let ends = ranks(2, |comm| {
        let run = |missing| -> Result<Vec<f32>> {
            let (used, unused) = (Var::ones(1, DType::F32, &Device::Cpu)?, Var::ones(2, DType::F32, &Device::Cpu)?);
            let options = Options { missing, ..Options::default() };
            let mut model = DataParallel::with_options(comm, vec![used.clone(), unused.clone()], options)?;
            model.accumulate(&(used.broadcast_mul(&unused)? * 3.0)?.backward()?)?;
            let mut gradients = used.backward()?;
            model.average(&mut gradients)?;
            read(&gradients, &[used, unused])
        };
        Ok((run(Missing::Zeros)?, run(Missing::Refused).unwrap_err().to_string()))
    });
    for (found, words) in ends {
        assert_eq!(found, [7.0, 3.0, 3.0]);
        assert!(words.contains("gave no gradient for parameter 1"), "{words}");
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_of_all_of_them() {
    let expected = alone();
    let norm = expected.iter().map(|slope| f64::from(*slope).powi(2)).sum::<f64>().sqrt();
    for count in RANKS {
        for limit in [0.01, 1e6] {
            let ends = ranks(count, |comm| {
                let variables = variables();
                let mut model = DataParallel::new(comm, variables.clone())?;
                let mut gradients = loss(&variables, share(comm))?.backward()?;
                let found = model.average_with(&mut gradients, |means| means.clip_norm(limit))?;
                Ok((found, read(&gradients, &variables)?))
            });
            let clipped: Vec<f32> = expected.iter().map(|slope| (f64::from(*slope) * (limit / norm).min(1.0)) as f32).collect();
            for end in &ends {
                assert!(end == &ends[0] && (end.0 - norm).abs() <= 1e-6 * norm, "{count} ranks: {} instead of {norm}", end.0);
                assert!(largest_difference(&end.1, &clipped) <= 1e-6, "{count} ranks, limit {limit}");
            }
        }
    }
}

#[test]
fn a_limit_that_is_none_is_an_error_after_which_steps_go_on() {
    ranks(2, |comm| {
        let variables = variables();
        let mut model = DataParallel::new(comm, variables.clone())?;
        for limit in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut gradients = loss(&variables, share(comm))?.backward()?;
            let error = model.average_with(&mut gradients, |means| means.clip_norm(limit)).unwrap_err().to_string();
            assert!(error.contains("must be a positive number") && gradients.get(&variables[0]).is_none(), "{error}");
        }
        let mut gradients = loss(&variables, share(comm))?.backward()?;
        model.average(&mut gradients)?;
        assert!(largest_difference(&read(&gradients, &variables)?, &alone()) <= 1e-6);
        Ok(())
    });
}

#[test]
fn a_step_with_an_overflow_on_one_rank_is_skipped_on_all() {
    for count in RANKS {
        let ends = ranks(count, |comm| {
            let variables = variables();
            let (mut model, mut scaler) = (DataParallel::new(comm, variables.clone())?, LossScaler::default());
            let mut steps = Vec::new();
            for step in 0..2 {
                let overflows = step == 0 && comm.rank() == count - 1;
                let factor = if overflows { f64::NAN } else { f64::from(scaler.scale()) };
                let mut gradients = (loss(&variables, share(comm))? * factor)?.backward()?;
                model.average_with(&mut gradients, |means| means.unscale(&mut scaler))?;
                steps.push((scaler.update(comm).unwrap(), scaler.scale(), read(&gradients, &variables)?));
            }
            Ok(steps)
        });
        for steps in ends {
            assert_eq!([(steps[0].0, steps[0].1), (steps[1].0, steps[1].1)], [(false, 32_768.0), (true, 32_768.0)]);
            assert!(largest_difference(&steps[1].2, &alone()) <= 1e-6, "{count} ranks");
        }
    }
}

#[test]
fn hooks_compress_the_gradients() {
    for count in RANKS {
        let ends = ranks(count, |comm| {
            let variables = variables();
            let mut model = DataParallel::new(comm, variables.clone())?;
            let average = |model: &mut DataParallel| {
                let mut gradients = loss(&variables, share(comm))?.backward()?;
                model.average(&mut gradients)?;
                read(&gradients, &variables)
            };
            model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg)?)))?;
            let compressed = average(&mut model)?;
            let options = PowerSgdOptions { rank: 3, start_step: 0, min_compression_rate: 0.1, ..PowerSgdOptions::default() };
            model.set_hooks::<f32>(|layout| Ok(Box::new(PowerSgd::new(comm, layout, ReduceOp::Avg, options.clone())?)))?;
            let refused = model.set_hooks::<f32>(|_| Err(collectives::Error::argument("test", "no hook"))).unwrap_err().to_string();
            Ok((compressed, average(&mut model)?, refused))
        });
        let expected = alone();
        let size = expected.iter().map(|slope| slope.abs()).fold(0.0, f32::max);
        for end in &ends {
            assert!(end == &ends[0], "ranks differ");
            let apart = largest_difference(&end.0, &expected);
            // Roundings to 8 bits: one on each rank, and one for each sum that is sent.
            assert!(apart <= 4.0 * size / 256.0 && (count == 1 || apart > 0.0), "{count} ranks: {apart:e}");
            assert!(largest_difference(&end.1, &expected) <= 1e-5, "{count} ranks: all of a matrix's rank is kept");
            assert!(end.2.contains("no hook"), "{}", end.2);
        }
    }
}
