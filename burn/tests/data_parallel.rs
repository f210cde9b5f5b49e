//! Gradients of several backward passes, clipped gradients, scaled losses and compressed gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use collectives::{Communicator, ReduceOp, bf16};
use collectives_burn::{DataParallel, Result, Trainer};
use collectives_train::{Compress, LossScaler};
use training_common::{largest_difference, uniform};

const RANKS: [usize; 4] = [1, 2, 3, 4];
/// Samples of a step, on all ranks together.
const BATCH: usize = 12;

fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| Ok(program(comm).unwrap())).unwrap()
}

fn model() -> Linear {
    let device = Device::default().autodiff();
    let values = Tensor::<2>::from_data(TensorData::new(uniform(1, 1.0, 15), [5, 3]), &device);
    let mut model = LinearConfig::new(5, 3).with_bias(false).init(&device);
    model.weight = model.weight.map(|_| values.require_grad());
    model
}

/// Returns the mean loss of some samples.
fn loss(model: &Linear, samples: std::ops::Range<usize>) -> Tensor<1> {
    let values = uniform(7, 1.0, BATCH * 5)[samples.start * 5..samples.end * 5].to_vec();
    let input = Tensor::<2>::from_data(TensorData::new(values, [samples.len(), 5]), &model.weight.val().device());
    model.forward(input).tanh().powi_scalar(2).mean()
}

fn share(comm: &Communicator) -> std::ops::Range<usize> {
    let each = BATCH / comm.world_size();
    comm.rank() * each..(comm.rank() + 1) * each
}

fn weight(model: &Linear) -> Vec<f32> {
    model.weight.val().into_data().try_into_vec().unwrap()
}

fn backward<M: Module>(model: &M, loss: Tensor<1>) -> GradientsParams {
    GradientsParams::from_grads(loss.backward(), model)
}

fn read(model: &Linear, gradients: &GradientsParams) -> Vec<f32> {
    gradients.get::<2>(model.weight.id).unwrap().into_data().try_into_vec().unwrap()
}

/// Returns the gradient of one process, and its norm.
fn alone() -> (Vec<f32>, f64) {
    let model = model();
    let gradient = read(&model, &backward(&model, loss(&model, 0..BATCH)));
    let norm = gradient.iter().map(|slope| f64::from(*slope).powi(2)).sum::<f64>().sqrt();
    (gradient, norm)
}

#[test]
fn several_backward_passes_are_averaged_as_one_and_clipped() {
    let (gradient, norm) = alone();
    for (count, passes) in [(1, 1), (1, 4), (2, 3), (3, 2), (4, 3)] {
        for limit in [norm / 3.0, 2.0 * norm] {
            let ends = ranks(count, |comm| {
                let (mut parallel, model) = DataParallel::new(comm, model())?;
                let (own, each) = (share(comm), BATCH / count / passes);
                let of =
                    |pass: usize| backward(&model, loss(&model, own.start + pass * each..own.start + (pass + 1) * each) / passes as f32);
                (1..passes).try_for_each(|pass| parallel.accumulate(&model, of(pass)))?;
                let (gradients, found) = parallel.average_with(&model, of(0), |means| means.clip_norm(limit))?;
                Ok((found, read(&model, &gradients)))
            });
            let expected: Vec<f32> = gradient.iter().map(|slope| (f64::from(*slope) * (limit / norm).min(1.0)) as f32).collect();
            for end in &ends {
                assert!(end == &ends[0] && (end.0 - norm).abs() <= 1e-6 * norm, "{count} ranks: {} instead of {norm}", end.0);
                assert!(largest_difference(&end.1, &expected) <= 1e-6, "{count} ranks, {passes} passes, limit {limit}");
            }
        }
    }
}

#[test]
fn a_trainer_accumulates_scales_clips_and_skips() {
    let (gradient, norm) = alone();
    let limit = norm / 3.0;
    let expected: Vec<f32> =
        weight(&model()).iter().zip(gradient).map(|(x, slope)| (f64::from(*x) - f64::from(slope) * limit / norm) as f32).collect();
    for count in RANKS {
        let ends = ranks(count, |comm| {
            let (mut trainer, mut model) = Trainer::new(comm, model(), SgdConfig::new().init())?;
            assert!(trainer.loss_scaler().is_none());
            trainer.set_loss_scaler(LossScaler::default());
            for limit in [0.0, -1.0, f64::NAN] {
                assert!(trainer.set_clip_norm(limit).unwrap_err().to_string().contains("must be a positive number"));
            }
            trainer.set_clip_norm(limit)?;
            let own = share(comm);
            let middle = own.start + 1;
            let mut scales = Vec::new();
            for step in 0..2 {
                // In the first step, a gradient of the last rank overflows.
                let overflow = if step == 0 && comm.rank() == count - 1 { f32::INFINITY } else { 1.0 };
                let part = |samples: std::ops::Range<usize>| {
                    let weight = samples.len() as f32 / own.len() as f32;
                    loss(&model, samples) * weight * overflow
                };
                let (first, last) = (part(own.start..middle), part(middle..own.end));
                trainer.accumulate(&model, first)?;
                model = trainer.step(1.0, model, last)?.0;
                scales.push(trainer.loss_scaler().unwrap().scale());
            }
            let untracked = trainer.accumulate(&model, Tensor::<1>::ones([1], &Device::default())).unwrap_err().to_string();
            Ok((scales, weight(&model), untracked))
        });
        for (scales, end, untracked) in &ends {
            assert_eq!(scales, &[32_768.0; 2]);
            assert!(largest_difference(end, &expected) <= 1e-6, "{count} ranks");
            assert!(untracked.contains("no backward pass"));
        }
    }
}

#[test]
fn hooks_compress_the_gradients_of_a_trainer() {
    let (gradient, _) = alone();
    let begin = weight(&model());
    for count in RANKS {
        let ends = ranks(count, |comm| {
            let (mut trainer, model) = Trainer::new(comm, model(), SgdConfig::new().init())?;
            let compress = trainer.data_parallel_mut();
            compress.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg)?)))?;
            let own = loss(&model, share(comm));
            Ok(weight(&trainer.step(1.0, model, own)?.0))
        });
        let size = gradient.iter().map(|slope| slope.abs()).fold(0.0, f32::max);
        let exact: Vec<f32> = begin.iter().zip(&gradient).map(|(x, slope)| x - slope).collect();
        for end in &ends {
            let apart = largest_difference(end, &exact);
            // Roundings to 8 bits: one on each rank, and one for each sum that is sent.
            assert!(end == &ends[0] && apart <= 4.0 * size / 256.0, "{count} ranks: {apart:e}");
            assert!(count == 1 || apart > 1e-6, "{count} ranks: nothing was compressed");
        }
    }
}
