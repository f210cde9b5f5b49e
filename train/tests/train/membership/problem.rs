//! The problem of these tests: parameters, gradients of samples that are exact in any order of additions, and Adam.

use collectives_train::{LossScalerOptions, Options, Parameter, Sampler};

use crate::common::random::Random;

/// Samples of a batch: every number of ranks here divides it.
pub(super) const BATCH: usize = 12;
pub(super) const STEPS: u64 = 9;
pub(super) const SCALER: LossScalerOptions =
    LossScalerOptions { initial_scale: 1024.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2 };

/// One list of numbers for each parameter, bucket or unit.
pub(super) type Lists = Vec<Vec<f32>>;

pub(super) fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 5] = [&[31, 17], &[], &[2, 3], &[1099], &[1]];
    shapes.iter().enumerate().map(|(index, shape)| Parameter::new::<f32>(format!("p{index}"), shape)).collect()
}

pub(super) fn options() -> Options {
    Options { first_bucket_bytes: 64, bucket_bytes: 3000, ..Options::default() }
}

pub(super) fn lens() -> Vec<usize> {
    parameters().iter().map(|parameter| parameter.shape.iter().product()).collect()
}

pub(super) fn zeros(lens: impl IntoIterator<Item = usize>) -> Lists {
    lens.into_iter().map(|len| vec![0.0; len]).collect()
}

pub(super) fn slices(lists: &Lists) -> impl Iterator<Item = &[f32]> {
    lists.iter().map(Vec::as_slice)
}

pub(super) fn slices_mut(lists: &mut Lists) -> impl Iterator<Item = &mut [f32]> {
    lists.iter_mut().map(Vec::as_mut_slice)
}

/// Returns the parameters before the first step.
pub(super) fn initial() -> Lists {
    lens().iter().enumerate().map(|(index, len)| (0..*len).map(|at| (at % 7) as f32 * 0.1 - index as f32).collect()).collect()
}

/// Adam (Kingma, Ba 2015), in place, except for a parameter's position.
pub(super) fn adam(step: u64, x: &mut [f32], slopes: &[f32], (means, squares): (&mut [f32], &mut [f32])) {
    for (((x, slope), mean), square) in x.iter_mut().zip(slopes).zip(means).zip(squares) {
        *mean = 0.9 * *mean + 0.1 * slope;
        *square = 0.999 * *square + 0.001 * slope * slope;
        let (mean, square) = (*mean / (1.0 - 0.9_f32.powi(step as i32 + 1)), *square / (1.0 - 0.999_f32.powi(step as i32 + 1)));
        *x -= 0.01 * mean / (square.sqrt() + 1e-8);
    }
}

/// Returns one sample's gradient of a parameter: 12 times a small whole number, for which every mean here is exact.
pub(super) fn slopes(seed: u64, sample: usize, index: usize, len: usize) -> Vec<f32> {
    let mut random = Random(seed ^ (sample as u64) << 20 ^ index as u64);
    (0..len).map(|_| 12.0 * (random.below(17) as f32 - 8.0)).collect()
}

/// Returns the mean of the scaled gradients of some samples, for each parameter.
pub(super) fn gradients(seed: u64, samples: &[usize], scale: f32) -> Lists {
    let mean = |(index, len): (usize, usize)| {
        let mut sum = vec![0.0; len];
        for sample in samples {
            sum.iter_mut().zip(slopes(seed, *sample, index, len)).for_each(|(sum, slope)| *sum += slope);
        }
        sum.iter_mut().for_each(|sum| *sum = *sum / samples.len() as f32 * scale);
        sum
    };
    lens().into_iter().enumerate().map(mean).collect()
}

/// Trains in one process, without this crate's models. Returns the parameters.
pub(super) fn train_alone(seed: u64) -> Lists {
    let (mut values, mut means, mut squares) = (initial(), zeros(lens()), zeros(lens()));
    let order: Vec<usize> = Sampler::of_rank(0, 1, BATCH * STEPS as usize).unwrap().epoch(0).collect();
    for (step, batch) in (0..STEPS).zip(order.chunks(BATCH)) {
        let gradients = gradients(seed, batch, 1.0);
        for (index, x) in values.iter_mut().enumerate() {
            adam(step, x, &gradients[index], (&mut means[index], &mut squares[index]));
        }
    }
    values
}
