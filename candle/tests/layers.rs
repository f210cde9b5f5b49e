//! Layers that are split over ranks give what the whole layer gives, and its gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Embedding, Linear};
use collectives::Communicator;
use collectives_candle::{
    ColumnParallelLinear, DataParallel, RowParallelLinear, VocabParallelEmbedding, scatter_to_ranks, vocab_parallel_cross_entropy,
};
use training_common::uniform;

const RANKS: [usize; 3] = [1, 2, 4];
const ROWS: usize = 8;
const INPUTS: usize = 16;
const HIDDEN: usize = 24;
const OUTPUTS: usize = 12;

fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::from_vec(uniform(seed, 1.0, shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn elements(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Some dozen products of numbers below 2, added up in another order.
    assert!(largest <= 2e-5, "{what}: {largest}");
}

fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| Ok(program(comm).unwrap())).unwrap()
}

/// A rank's part of a whole tensor.
fn part(comm: &Communicator, whole: &Tensor, dimension: usize) -> Result<Tensor> {
    let each = whole.dim(dimension)? / comm.world_size();
    whole.narrow(dimension, comm.rank() * each, each)?.contiguous()
}

struct Weights {
    input: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
}

fn weights() -> Weights {
    Weights {
        input: tensor(1, &[ROWS, INPUTS]),
        up: tensor(2, &[HIDDEN, INPUTS]),
        up_bias: tensor(3, &[HIDDEN]),
        down: tensor(4, &[OUTPUTS, HIDDEN]),
        down_bias: tensor(5, &[OUTPUTS]),
    }
}

/// The output of a block of two layers, and the gradients of its input, both weights and both biases, in one process.
fn whole_block() -> Result<[Vec<f32>; 6]> {
    let Weights { input, up, up_bias, down, down_bias } = weights();
    let leaves: Vec<Var> = [&input, &up, &up_bias, &down, &down_bias].into_iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let [x, up, up_bias, down, down_bias] = std::array::from_fn(|index| leaves[index].as_tensor().clone());
    let hidden = Linear::new(up, Some(up_bias)).forward(&x)?.tanh()?;
    let output = Linear::new(down, Some(down_bias)).forward(&hidden)?;
    let gradients = output.sqr()?.mean_all()?.backward()?;
    let of = |index: usize| elements(gradients.get(&leaves[index]).unwrap());
    Ok([elements(&output)?, of(0)?, of(1)?, of(2)?, of(3)?, of(4)?])
}

#[test]
fn a_column_and_a_row_parallel_layer_make_a_block() {
    let expected = whole_block().unwrap();
    for count in RANKS {
        for sequence_parallel in [false, true] {
            let found = ranks(count, |comm| {
                let Weights { input, up, up_bias, down, down_bias } = weights();
                let parts = [input, part(comm, &up, 0)?, part(comm, &up_bias, 0)?, part(comm, &down, 1)?, down_bias];
                let leaves: Vec<Var> = parts.iter().map(Var::from_tensor).collect::<Result<_>>()?;
                let [x, up, up_bias, down, down_bias] = std::array::from_fn(|index| leaves[index].as_tensor().clone());
                let (mut first, mut second) =
                    (ColumnParallelLinear::new(comm, up, Some(up_bias))?, RowParallelLinear::new(comm, down, Some(down_bias))?);
                let mut x = x;
                if sequence_parallel {
                    (first, second) = (first.sequence_parallel(0), second.sequence_parallel(0));
                    x = scatter_to_ranks(comm, &x, 0)?;
                }
                let mut output = second.forward(&first.forward(&x)?.tanh()?)?;
                if sequence_parallel {
                    output = collectives_candle::gather_from_ranks(comm, &output, 0)?;
                }
                let gradients = output.sqr()?.mean_all()?.backward()?;
                let of = |index: usize| elements(gradients.get(&leaves[index]).unwrap());
                Ok([elements(&output)?, of(0)?, of(1)?, of(2)?, of(3)?, of(4)?])
            });
            for (rank, found) in found.iter().enumerate() {
                let names = ["the output", "the input", "up", "the bias of up", "down", "the bias of down"];
                let wholes = [None, None, Some((HIDDEN, INPUTS, 0)), Some((HIDDEN, 1, 0)), Some((OUTPUTS, HIDDEN, 1)), None];
                for index in 0..6 {
                    let expected = match wholes[index] {
                        None => expected[index].clone(),
                        Some((rows, columns, dimension)) => {
                            let whole = Tensor::from_vec(expected[index].clone(), (rows, columns), &Device::Cpu).unwrap();
                            let each = whole.dim(dimension).unwrap() / count;
                            elements(&whole.narrow(dimension, rank * each, each).unwrap().contiguous().unwrap()).unwrap()
                        }
                    };
                    assert_close(
                        &found[index],
                        &expected,
                        &format!("{}, rank {rank} of {count}, sequence {sequence_parallel}", names[index]),
                    );
                }
            }
        }
    }
}

#[test]
fn a_gathering_layer_gives_all_outputs_of_a_batch() {
    let whole = Linear::new(tensor(2, &[HIDDEN, INPUTS]), Some(tensor(3, &[HIDDEN])));
    let input = tensor(1, &[2, 3, INPUTS]);
    let expected = whole.forward(&input).unwrap();
    for count in RANKS {
        for output in ranks(count, |comm| ColumnParallelLinear::split(comm, &whole)?.gathering().forward(&input)) {
            assert_eq!(output.dims(), expected.dims());
            assert_close(&elements(&output).unwrap(), &elements(&expected).unwrap(), &format!("{count} ranks"));
        }
    }
}

#[test]
fn an_embedding_and_a_loss_over_a_split_vocabulary() {
    let (table, ids) = (tensor(7, &[20, 6]), Tensor::new(&[[0_u32, 19, 5], [10, 9, 4]], &Device::Cpu).unwrap());
    let (logits, targets) = (tensor(8, &[5, 20]).affine(40.0, 0.0).unwrap(), Tensor::new(&[19_i64, 0, 4, 5, 11], &Device::Cpu).unwrap());
    let whole = || -> Result<[Vec<f32>; 4]> {
        let (table, logits) = (Var::from_tensor(&table)?, Var::from_tensor(&logits)?);
        let found = Embedding::new(table.as_tensor().clone(), 6).forward(&ids)?;
        let loss = candle_nn::loss::cross_entropy(logits.as_tensor(), &targets)?;
        let table_slope = elements(found.sqr()?.sum_all()?.backward()?.get(&table).unwrap())?;
        let logits_slope = elements(loss.backward()?.get(&logits).unwrap())?;
        Ok([elements(&found)?, table_slope, elements(&loss)?, logits_slope])
    };
    let expected = whole().unwrap();
    for count in RANKS {
        let found = ranks(count, |comm| {
            let (rows, columns) = (Var::from_tensor(&part(comm, &table, 0)?)?, Var::from_tensor(&part(comm, &logits, 1)?)?);
            let found = VocabParallelEmbedding::new(comm, rows.as_tensor().clone())?.forward(&ids)?;
            let loss = vocab_parallel_cross_entropy(comm, columns.as_tensor(), &targets)?;
            let table_slope = elements(found.sqr()?.sum_all()?.backward()?.get(&rows).unwrap())?;
            let logits_slope = elements(loss.backward()?.get(&columns).unwrap())?;
            Ok([elements(&found)?, table_slope, elements(&loss)?, logits_slope])
        });
        for (rank, [output, table_slope, loss, logits_slope]) in found.iter().enumerate() {
            let what = |name: &str| format!("{name}, rank {rank} of {count}");
            assert_close(output, &expected[0], &what("embedding"));
            assert_close(table_slope, &expected[1][rank * 120 / count..][..120 / count], &what("its gradient"));
            assert_close(loss, &expected[2], &what("loss"));
            let whole = Tensor::from_vec(expected[3].clone(), (5, 20), &Device::Cpu).unwrap();
            let each = 20 / count;
            let own = elements(&whole.narrow(1, rank * each, each).unwrap().contiguous().unwrap()).unwrap();
            assert_close(logits_slope, &own, &what("its gradient"));
        }
    }
}

#[test]
fn what_cannot_be_split_or_found_is_said() {
    let messages = ranks(2, |comm| {
        let table = VocabParallelEmbedding::new(comm, tensor(1, &[4, 3]))?;
        let logits = tensor(2, &[2, 4]);
        let odd = Linear::new(tensor(1, &[3, 5]), None);
        Ok([
            ColumnParallelLinear::split(comm, &odd).unwrap_err().to_string(),
            RowParallelLinear::split(comm, &odd).unwrap_err().to_string(),
            ColumnParallelLinear::new(comm, tensor(1, &[3, 5]), Some(tensor(1, &[4]))).unwrap_err().to_string(),
            table.forward(&Tensor::new(&[8_u32], &Device::Cpu)?).unwrap_err().to_string(),
            vocab_parallel_cross_entropy(comm, &logits, &Tensor::new(&[-1_i64, 0], &Device::Cpu)?).unwrap_err().to_string(),
            vocab_parallel_cross_entropy(comm, &logits, &Tensor::new(&[0_i64], &Device::Cpu)?).unwrap_err().to_string(),
            DataParallel::new(comm, vec![Var::zeros(2, DType::U8, &Device::Cpu)?]).map(drop).unwrap_err().to_string(),
        ])
    });
    let expected = ["cannot be split", "cannot be split", "the bias", "of 8 that there are", "ids from -1", "2 rows", "gradients are f32"];
    for (message, expected) in messages[1].iter().zip(expected) {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn averaged_gradients_train_as_one_process_does() {
    let (input, targets) = (tensor(1, &[ROWS, INPUTS]), tensor(2, &[ROWS, OUTPUTS]));
    let train = |comm: Option<&Communicator>| -> Result<Vec<f32>> {
        let seed = comm.map_or(10, |comm| if comm.rank() == 0 { 10 } else { 99 });
        let (weight, bias) = (Var::from_tensor(&tensor(seed, &[OUTPUTS, INPUTS]))?, Var::from_tensor(&tensor(seed + 1, &[OUTPUTS]))?);
        let mut model = comm.map(|comm| DataParallel::new(comm, vec![weight.clone(), bias.clone()])).transpose()?;
        let (input, targets) = match comm {
            Some(comm) => (part(comm, &input, 0)?, part(comm, &targets, 0)?),
            None => (input.clone(), targets.clone()),
        };
        for _ in 0..5 {
            let output = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone())).forward(&input)?;
            let mut gradients = candle_nn::loss::mse(&output, &targets)?.backward()?;
            if let Some(model) = &mut model {
                model.average(&mut gradients)?;
            }
            for variable in [&weight, &bias] {
                variable.set(&(variable.as_tensor() - (gradients.get(variable).unwrap() * 0.5)?)?)?;
            }
        }
        Ok([elements(&weight)?, elements(&bias)?].concat())
    };
    let expected = train(None).unwrap();
    for count in RANKS {
        let found = ranks(count, |comm| train(Some(comm)));
        for own in &found {
            assert_eq!(own, &found[0], "ranks differ");
            assert_close(own, &expected, &format!("{count} ranks"));
        }
    }
}
