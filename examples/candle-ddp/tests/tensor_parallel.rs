//! Layers that are split over ranks give what the whole layer gives.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{Device, Module, Result, Tensor};
use candle_ddp::{ColumnParallel, RowParallel};
use collectives::Communicator;
use training_common::{largest_difference, uniform};

const ROWS: usize = 5;
const INPUTS: usize = 16;
const HIDDEN: usize = 24;
const OUTPUTS: usize = 8;

fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::from_vec(uniform(seed, 1.0, shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// A layer of one process.
fn whole(input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    input.matmul(weight)?.broadcast_add(bias)
}

/// Runs `forward` on so many ranks, and compares each rank's output with `expected`.
fn on_ranks(expected: &Tensor, forward: impl Fn(&Communicator) -> Result<Tensor> + Sync) {
    let expected = elements(expected);
    for ranks in [1, 2, 4] {
        let outputs = Communicator::run_local(ranks, |comm| Ok(elements(&forward(comm).unwrap()))).unwrap();
        for output in &outputs {
            assert_eq!(output, &outputs[0], "ranks differ");
            // 24 products of numbers below 1, added up in another order.
            assert!(largest_difference(output, &expected) <= 1e-5, "{ranks} ranks");
        }
    }
}

#[test]
fn a_column_parallel_layer_gathers_the_whole_output() {
    let (input, weight, bias) = (tensor(1, &[ROWS, INPUTS]), tensor(2, &[INPUTS, HIDDEN]), tensor(3, &[HIDDEN]));
    on_ranks(&whole(&input, &weight, &bias).unwrap(), |comm| ColumnParallel::new(comm, &weight, &bias, true)?.forward(&input));
}

#[test]
fn a_column_and_a_row_parallel_layer_make_a_block_with_one_all_reduce() {
    let (input, up, up_bias) = (tensor(1, &[ROWS, INPUTS]), tensor(2, &[INPUTS, HIDDEN]), tensor(3, &[HIDDEN]));
    let (down, down_bias) = (tensor(4, &[HIDDEN, OUTPUTS]), tensor(5, &[OUTPUTS]));
    let expected = whole(&whole(&input, &up, &up_bias).unwrap().gelu().unwrap(), &down, &down_bias).unwrap();
    on_ranks(&expected, |comm| {
        let hidden = ColumnParallel::new(comm, &up, &up_bias, false)?.forward(&input)?.gelu()?;
        RowParallel::new(comm, &down, &down_bias)?.forward(&hidden)
    });
}

#[test]
fn a_layer_that_cannot_be_split_says_so() {
    let messages = Communicator::run_local(2, |comm| {
        let refused = ColumnParallel::new(comm, &tensor(1, &[4, 3]), &tensor(2, &[3]), true);
        Ok(refused.map(|_| ()).unwrap_err().to_string())
    })
    .unwrap();
    assert!(messages[1].contains("cannot be split between 2 ranks"), "{}", messages[1]);
}
