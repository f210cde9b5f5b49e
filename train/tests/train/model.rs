//! A list of parameters, and gradients for it that differ on every rank and in every step.

use collectives::{DType, Result, bf16, f16};
use collectives_train::{Averaged, DataParallel, Float, Parameter};

use crate::common::random::Random;

/// Returns parameters of odd sizes, an empty one, single numbers, one larger than any bucket of these tests, and all
/// four types.
pub(crate) fn parameters() -> Vec<Parameter> {
    vec![
        Parameter::new::<f32>("embedding", &[37, 50]),
        Parameter::new::<f32>("scale", &[]),
        Parameter::new::<f16>("half.weight", &[7, 9]),
        Parameter::new::<f32>("empty", &[0, 3]),
        Parameter::new::<f64>("double", &[11]),
        Parameter::new::<f32>("large", &[90_001]),
        Parameter::new::<bf16>("brain", &[1]),
        Parameter::new::<f16>("half.bias", &[130]),
        Parameter::new::<f32>("last", &[3, 5, 2]),
    ]
}

pub(crate) fn len(parameter: &Parameter) -> usize {
    parameter.shape.iter().product()
}

/// Returns an element of a gradient: a whole number so small that its sums are exact in every type.
pub(crate) fn element(seed: u64, rank: usize, parameter: usize, index: usize) -> f64 {
    let mut random = Random(seed ^ ((rank as u64) << 48 | (parameter as u64) << 32 | index as u64));
    random.below(17) as f64 - 8.0
}

pub(crate) fn gradient<T: Float>(seed: u64, rank: usize, parameter: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::from_f64(element(seed, rank, parameter, index))).collect()
}

/// Computes the mean over all ranks directly.
pub(crate) fn mean<T: Float>(seed: u64, ranks: usize, parameter: usize, len: usize) -> Vec<T> {
    let sum = |index| (0..ranks).map(|rank| element(seed, rank, parameter, index)).sum::<f64>();
    (0..len).map(|index| T::from_f64(sum(index) / ranks as f64)).collect()
}

/// Calls a generic function with the element type of a parameter.
macro_rules! with_type {
    ($parameter:expr, $function:ident::<_>($($argument:expr),*)) => {
        match $parameter.dtype {
            collectives::DType::F32 => $function::<f32>($($argument),*),
            collectives::DType::F64 => $function::<f64>($($argument),*),
            collectives::DType::F16 => $function::<collectives::f16>($($argument),*),
            collectives::DType::Bf16 => $function::<collectives::bf16>($($argument),*),
            other => panic!("no gradients are {other}"),
        }
    };
}
pub(crate) use with_type;

/// Passes this rank's gradient of a parameter to the model.
pub(crate) fn hand_in(model: &mut DataParallel, seed: u64, rank: usize, index: usize, parameter: &Parameter) -> Result<()> {
    fn typed<T: Float>(model: &mut DataParallel, seed: u64, rank: usize, index: usize, len: usize) -> Result<()> {
        model.ready(index, &gradient::<T>(seed, rank, index, len))
    }
    with_type!(parameter, typed::<_>(model, seed, rank, index, len(parameter)))
}

/// Compares a step's means with the expected ones, bit for bit.
#[track_caller]
pub(crate) fn assert_means(averaged: &Averaged<'_>, seed: u64, ranks: usize, parameters: &[Parameter]) {
    fn typed<T: Float>(averaged: &Averaged<'_>, seed: u64, ranks: usize, index: usize, len: usize) {
        let mut copied = vec![T::default(); len];
        averaged.copy_to(index, &mut copied).unwrap();
        let expected = mean::<T>(seed, ranks, index, len);
        assert!(averaged.gradient::<T>(index).unwrap() == expected, "parameter {index}, seed {seed}");
        assert!(copied == expected, "parameter {index}, copied, seed {seed}");
    }
    for (index, parameter) in parameters.iter().enumerate() {
        with_type!(parameter, typed::<_>(averaged, seed, ranks, index, len(parameter)));
    }
}

#[test]
fn the_list_has_every_type() {
    let has = |dtype| parameters().iter().any(|parameter| parameter.dtype == dtype);
    assert!([DType::F32, DType::F64, DType::F16, DType::Bf16].into_iter().all(has));
    assert_eq!(mean::<f16>(1, 1, 0, 3), gradient::<f16>(1, 0, 0, 3));
}
