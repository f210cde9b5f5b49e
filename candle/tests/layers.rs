//! Layers that are split over ranks compute what the whole layer computes, and the same gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Embedding, Linear};
use collectives::Communicator;
use collectives_candle::{
    ColumnParallelLinear, DataParallel, RowParallelLinear, VocabParallelEmbedding, all_gather, gather_from_ranks, scatter_to_ranks,
    vocab_parallel_cross_entropy,
};
use training_common::{largest_difference, uniform};

const RANKS: [usize; 4] = [1, 2, 3, 4];
const ROWS: usize = 12;
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
    // Sums of a few dozen products of numbers below 2, in different orders.
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
                    output = gather_from_ranks(comm, &output, 0)?;
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

/// The size of the vocabulary of ids and targets.
const VOCABULARY: usize = 24;

#[test]
fn an_embedding_and_a_loss_over_a_split_vocabulary() {
    let (table, ids) = (tensor(7, &[VOCABULARY, 6]), Tensor::new(&[[0_u32, 23, 5], [12, 11, 4]], &Device::Cpu).unwrap());
    let logits = tensor(8, &[5, VOCABULARY]).affine(40.0, 0.0).unwrap();
    let targets = Tensor::new(&[23_i64, 0, 4, 5, 13], &Device::Cpu).unwrap();
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
            let own = VOCABULARY / count;
            assert_close(output, &expected[0], &what("embedding"));
            assert_close(table_slope, &expected[1][rank * own * 6..][..own * 6], &what("its gradient"));
            assert_close(loss, &expected[2], &what("loss"));
            let whole = Tensor::from_vec(expected[3].clone(), (5, VOCABULARY), &Device::Cpu).unwrap();
            let own = elements(&whole.narrow(1, rank * own, own).unwrap().contiguous().unwrap()).unwrap();
            assert_close(logits_slope, &own, &what("its gradient"));
        }
    }
}

#[test]
fn a_sequence_parallel_embedding_leaves_each_rank_its_part_of_the_sequence() {
    let ids: Vec<u32> = (0..24).map(|index| index * 5 % VOCABULARY as u32).collect();
    let (table, ids) = (tensor(7, &[VOCABULARY, 6]), Tensor::from_vec(ids, (2, 12), &Device::Cpu).unwrap());
    for dimension in [0, 1] {
        let whole = Var::from_tensor(&table).unwrap();
        let output = Embedding::new(whole.as_tensor().clone(), 6).forward(&ids).unwrap();
        let slope = output.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&whole).unwrap().clone();
        for count in RANKS.into_iter().filter(|count| ids.dims()[dimension].is_multiple_of(*count)) {
            let found = ranks(count, |comm| {
                let rows = Var::from_tensor(&part(comm, &table, 0)?)?;
                let layer = VocabParallelEmbedding::new(comm, rows.as_tensor().clone())?.sequence_parallel(dimension);
                let own = layer.forward(&ids)?;
                let all = gather_from_ranks(comm, &own, dimension)?;
                let slope = all.sqr()?.sum_all()?.backward()?.get(&rows).unwrap().clone();
                Ok((elements(&own.contiguous()?)?, elements(&slope)?, elements(&part(comm, &output, dimension)?)?))
            });
            for (rank, (own, own_slope, expected)) in found.iter().enumerate() {
                let rows = VOCABULARY / count * 6;
                assert_close(own, expected, &format!("rank {rank} of {count}, dimension {dimension}"));
                assert_close(own_slope, &elements(&slope).unwrap()[rank * rows..][..rows], &format!("gradient, rank {rank} of {count}"));
            }
        }
    }
}

#[test]
fn a_padded_vocabulary_gives_what_the_vocabulary_alone_gives() {
    // The last rank of four has padding only.
    for (count, vocabulary) in [(2, 5), (3, 20), (4, 5)] {
        let (table, head) = (tensor(7, &[vocabulary, 6]), tensor(9, &[vocabulary, INPUTS]));
        let (input, last) = (tensor(1, &[3, INPUTS]), vocabulary as u32 - 1);
        let ids = Tensor::new(&[last, 0, 2], &Device::Cpu).unwrap();
        let found = Embedding::new(table.clone(), 6).forward(&ids).unwrap();
        let whole = Var::from_tensor(&head).unwrap();
        let loss = candle_nn::loss::cross_entropy(&Linear::new(whole.as_tensor().clone(), None).forward(&input).unwrap(), &ids).unwrap();
        let slope = loss.backward().unwrap().get(&whole).unwrap().clone();
        let outputs = ranks(count, |comm| {
            let missing = VocabParallelEmbedding::split(comm, &table).unwrap_err().to_string();
            let padding = vocabulary.next_multiple_of(count) - vocabulary;
            let padded = |table: &Tensor| table.pad_with_zeros(0, 0, padding);
            let own = VocabParallelEmbedding::split(comm, &padded(&table)?)?.forward(&ids)?;
            let none = Tensor::cat(
                &[Tensor::zeros(vocabulary, DType::F32, &Device::Cpu)?, Tensor::full(f32::NEG_INFINITY, padding, &Device::Cpu)?],
                0,
            )?;
            let rows = Var::from_tensor(&part(comm, &padded(&head)?, 0)?)?;
            let logits = ColumnParallelLinear::new(comm, rows.as_tensor().clone(), Some(part(comm, &none, 0)?))?.forward(&input)?;
            let loss = vocab_parallel_cross_entropy(comm, &logits, &ids)?;
            let slope = all_gather(comm, loss.backward()?.get(&rows).unwrap(), 0)?.narrow(0, 0, vocabulary)?;
            Ok((missing, elements(&own)?, elements(&loss)?, elements(&slope)?))
        });
        for (missing, own, own_loss, own_slope) in outputs {
            let next = vocabulary.next_multiple_of(count);
            let more = next - vocabulary;
            let padding =
                format!("{vocabulary} rows cannot be split equally between {count} ranks; add {more} as padding, to reach {next}");
            assert!(missing.contains(&padding), "{missing}");
            assert_close(&own, &elements(&found).unwrap(), &format!("embedding, {count} ranks"));
            assert_close(&own_loss, &elements(&loss).unwrap(), &format!("loss, {count} ranks"));
            assert_close(&own_slope, &elements(&slope).unwrap(), &format!("gradient, {count} ranks"));
        }
    }
}

#[test]
fn half_precision_stays_near_the_whole_layer() {
    let Weights { input, up, up_bias, down, down_bias } = weights();
    // candle multiplies f16 matrices on the CPU, and bf16 matrices only on GPUs.
    let half = |tensor: &Tensor| tensor.to_dtype(DType::F16).unwrap();
    let block = |up: &dyn Module, down: &dyn Module| -> Result<Vec<f32>> {
        elements(&down.forward(&up.forward(&half(&input))?.tanh()?)?.to_dtype(DType::F32)?)
    };
    let (up, down) = (Linear::new(half(&up), Some(half(&up_bias))), Linear::new(half(&down), Some(half(&down_bias))));
    let expected = block(&up, &down).unwrap();
    // An output is below 16, where f16 is precise to 2⁻⁷. Each rank's sum is rounded once, and so is each step of
    // adding up at most 4 of them.
    let bound = 8.0 / 128.0;
    for count in RANKS {
        for found in ranks(count, |comm| block(&ColumnParallelLinear::split(comm, &up)?, &RowParallelLinear::split(comm, &down)?)) {
            let apart = largest_difference(&found, &expected);
            assert!(apart <= bound, "{count} ranks: {apart}");
        }
    }
}

#[test]
fn an_embedding_of_bf16_is_exact_and_its_loss_is_summed_in_f32() {
    // In bf16 a sum of ones stops at 256.
    let vocabulary = 1200;
    let table = tensor(7, &[vocabulary, 4]).to_dtype(DType::BF16).unwrap();
    let ids = Tensor::new(&[0_u32, 1199, 600, 17], &Device::Cpu).unwrap();
    let found = elements(&table.index_select(&ids, 0).unwrap().to_dtype(DType::F32).unwrap()).unwrap();
    let logits = tensor(8, &[4, vocabulary]).to_dtype(DType::BF16).unwrap();
    let whole = Var::from_tensor(&logits.to_dtype(DType::F32).unwrap()).unwrap();
    let loss = candle_nn::loss::cross_entropy(whole.as_tensor(), &ids).unwrap();
    let slope = elements(loss.backward().unwrap().get(&whole).unwrap()).unwrap();
    for count in RANKS {
        let outputs = ranks(count, |comm| {
            let own = VocabParallelEmbedding::split(comm, &table)?.forward(&ids)?;
            let columns = Var::from_tensor(&part(comm, &logits, 1)?)?;
            let loss = vocab_parallel_cross_entropy(comm, columns.as_tensor(), &ids)?;
            let slope = loss.backward()?.get(&columns).unwrap().clone();
            assert_eq!((own.dtype(), loss.dtype(), slope.dtype()), (DType::BF16, DType::F32, DType::BF16));
            let slope = all_gather(comm, &slope, 1)?.contiguous()?.to_dtype(DType::F32)?;
            Ok((elements(&own.to_dtype(DType::F32)?)?, elements(&loss)?, elements(&slope)?))
        });
        for (own, own_loss, own_slope) in outputs {
            assert_eq!(own, found, "one rank has the row, and the others add zeros");
            assert_close(&own_loss, &elements(&loss).unwrap(), &format!("loss, {count} ranks"));
            // Gradients are below ½, and rounded once, to 8 bits.
            assert!(largest_difference(&own_slope, &slope) <= 1.0 / 512.0, "{count} ranks");
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
    let expected = [
        "cannot be split",
        "cannot be split",
        "the bias",
        "the vocabulary has 8 entries",
        "the ids range from -1",
        "2 rows",
        "gradients must be f32",
    ];
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
