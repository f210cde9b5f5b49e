//! Layers over other modules, and layers that threads share, compute what one process computes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Result, Tensor};
use candle_nn::Linear;
use collectives::Communicator;
use collectives_candle::{ColumnParallelLinear, ExpertParallel, RowParallelLinear, VocabParallelEmbedding, run_local};
use training_common::uniform;

const ROWS: usize = 3;
/// A part of a quarter, a third or a half is a whole number of quantised blocks, which have 32 numbers.
const INPUTS: usize = 384;
const OUTPUTS: usize = 24;
const VOCABULARY: usize = 36;

fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::from_vec(uniform(seed, 1.0, shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn part(comm: &Communicator, whole: &Tensor, dimension: usize) -> Result<Tensor> {
    let each = whole.dim(dimension)? / comm.world_size();
    whole.narrow(dimension, comm.rank() * each, each)?.contiguous()
}

fn quantised(weight: &Tensor) -> Result<QMatMul> {
    // A copy, because candle quantises the whole storage that a part of a tensor shares.
    QMatMul::from_qtensor(QTensor::quantize(&weight.force_contiguous()?, GgmlDType::Q8_0)?)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

#[test]
fn quantised_columns_give_the_bits_of_the_whole_matrix() {
    let (weight, input) = (tensor(1, &[OUTPUTS, INPUTS]), tensor(2, &[ROWS, INPUTS]));
    let expected = bits(&quantised(&weight).unwrap().forward(&input).unwrap());
    for ranks in 1..=4 {
        let found = run_local(ranks, |comm| {
            let layer = ColumnParallelLinear::over(comm, quantised(&part(comm, &weight, 0)?)?).gathering();
            layer.forward(&input)
        });
        for output in found.unwrap() {
            assert_eq!(output.dims(), [ROWS, OUTPUTS]);
            assert_eq!(bits(&output), expected, "{ranks} ranks");
        }
    }
}

#[test]
fn quantised_rows_are_summed_and_the_bias_is_added_once() {
    let (weight, input, bias) = (tensor(1, &[OUTPUTS, INPUTS]), tensor(2, &[ROWS, INPUTS]), tensor(3, &[OUTPUTS]));
    let expected = quantised(&weight).unwrap().forward(&input).unwrap().broadcast_add(&bias).unwrap();
    for ranks in 1..=4 {
        let found = run_local(ranks, |comm| {
            let layer = RowParallelLinear::over(comm, quantised(&part(comm, &weight, 1)?)?, Some(bias.clone()))?;
            assert_eq!(bits(layer.bias().unwrap()), bits(&bias));
            // An input that is not contiguous, as `narrow` returns it.
            let each = INPUTS / ranks;
            layer.forward(&input.narrow(1, comm.rank() * each, each)?)
        });
        for output in found.unwrap() {
            assert!(largest_difference(&output, &expected) < 1e-4, "{ranks} ranks");
        }
    }
}

/// A module of the program, which multiplies by a number.
struct Scale(f64);

impl Module for Scale {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        input.affine(self.0, 0.0)
    }
}

#[test]
fn a_module_of_the_program_can_be_split() {
    let found = run_local(3, |comm| {
        let own = Scale(comm.rank() as f64 + 1.0);
        let column = ColumnParallelLinear::over(comm, Scale(2.0)).gathering().forward(&Tensor::new(&[1.0_f32], &Device::Cpu)?)?;
        let row = RowParallelLinear::over(comm, own, None)?.forward(&Tensor::new(&[10.0_f32, 20.0], &Device::Cpu)?)?;
        Ok((column.to_vec1::<f32>()?, row.to_vec1::<f32>()?))
    });
    assert_eq!(found.unwrap(), vec![(vec![2.0; 3], vec![60.0, 120.0]); 3]);
}

#[test]
fn an_embedding_and_the_layer_of_the_logits_can_share_a_weight() {
    let (table, ids) = (tensor(1, &[VOCABULARY, 8]), Tensor::new(&[[0_u32, 35], [17, 4]], &Device::Cpu).unwrap());
    let whole = candle_nn::Embedding::new(table.clone(), 8).forward(&ids).unwrap();
    let expected = Linear::new(table.clone(), None).forward(&whole).unwrap();
    for ranks in 1..=4 {
        let found = run_local(ranks, |comm| {
            let embedding = VocabParallelEmbedding::split(comm, &table)?;
            let logits = ColumnParallelLinear::new(comm, embedding.weight().clone(), None)?.gathering();
            assert_eq!(bits(logits.weight()), bits(&part(comm, &table, 0)?));
            assert_eq!(bits(logits.inner().weight()), bits(embedding.weight()));
            let row = RowParallelLinear::split(comm, &Linear::new(tensor(12, &[8, OUTPUTS]), None))?;
            assert_eq!(row.weight().dims(), [8, OUTPUTS / ranks]);
            assert!(row.bias().is_none() && row.inner().bias().is_none());
            logits.forward(&embedding.forward(&ids)?)
        });
        for output in found.unwrap() {
            assert!(largest_difference(&output, &expected) < 1e-5, "{ranks} ranks");
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let errors = run_local(2, |comm| {
        let scalar = Tensor::new(1.0_f32, &Device::Cpu)?;
        let single = comm.split(Some(comm.rank() as u32), 0).map_err(std::io::Error::other)?.unwrap();
        let row = RowParallelLinear::over(comm, Scale(1.0), None)?;
        let column = ColumnParallelLinear::over(comm, Scale(1.0));
        let embedding = VocabParallelEmbedding::new(comm, tensor(1, &[2, 2]))?;
        let experts = ExpertParallel::new(comm, vec![Scale(1.0)])?;
        let text = |error: candle_core::Error| error.to_string();
        Ok([
            RowParallelLinear::over(comm, Scale(1.0), Some(tensor(1, &[2, 2]))).err().map(text).unwrap(),
            ColumnParallelLinear::over(comm, Scale(1.0)).gathering().forward(&scalar).map_err(text).unwrap_err(),
            row.forward_on(&single, &scalar).map_err(text).unwrap_err(),
            column.forward_on(&single, &scalar).map_err(text).unwrap_err(),
            column.forward_parts_on(&single, &scalar).map_err(text).unwrap_err(),
            embedding.forward_on(&single, &Tensor::new(&[0_u32], &Device::Cpu)?).map_err(text).unwrap_err(),
            experts.forward_on(&single, &scalar, &scalar, &scalar).map_err(text).unwrap_err(),
        ])
    });
    let errors = errors.unwrap();
    assert!(errors[1][0].contains("expected: 1"), "{}", errors[1][0]);
    assert!(errors[1][1].contains("gathering"), "{}", errors[1][1]);
    for error in &errors[1][2..] {
        assert!(error.contains("the part of rank 1 of 2") && error.contains("rank 0 of 1"), "{error}");
    }
}

/// An embedding, a block of two layers, and a mixture of experts.
struct Model {
    embedding: VocabParallelEmbedding,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    experts: ExpertParallel<Linear>,
}

impl Model {
    fn new(comm: &Communicator) -> Result<Self> {
        let experts = (0..4 / comm.world_size())
            .map(|own| Linear::new(tensor(20 + (own + comm.rank() * (4 / comm.world_size())) as u64, &[8, 8]), None));
        Ok(Self {
            embedding: VocabParallelEmbedding::split(comm, &tensor(10, &[VOCABULARY, 8]))?,
            up: ColumnParallelLinear::split(comm, &Linear::new(tensor(11, &[OUTPUTS, 8]), None))?,
            down: RowParallelLinear::split(comm, &Linear::new(tensor(12, &[8, OUTPUTS]), Some(tensor(13, &[8]))))?,
            experts: ExpertParallel::new(comm, experts.collect())?,
        })
    }

    fn forward(&self, comm: &Communicator, request: u32) -> Result<Tensor> {
        let ids = Tensor::new(&[request % VOCABULARY as u32, request * 7 % VOCABULARY as u32], &Device::Cpu)?;
        let x = self.embedding.forward_on(comm, &ids)?;
        let x = self.down.forward_on(comm, &self.up.forward_on(comm, &x)?.relu()?)?;
        let chosen = Tensor::new(&[[request % 4], [(request + 1) % 4]], &Device::Cpu)?;
        self.experts.forward_on(comm, &x, &chosen, &Tensor::new(&[[1.0_f32], [0.5]], &Device::Cpu)?)
    }
}

#[test]
fn layers_can_be_shared_by_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<ColumnParallelLinear>();
    shared::<ColumnParallelLinear<QMatMul>>();
    shared::<RowParallelLinear<QMatMul>>();
    shared::<VocabParallelEmbedding>();
    shared::<ExpertParallel<Linear>>();
}

#[test]
fn two_threads_share_a_model_on_their_own_lanes() {
    const REQUESTS: u32 = 24;
    let alone = run_local(1, |comm| {
        let model = Model::new(comm)?;
        (0..REQUESTS).map(|request| model.forward(comm, request)).collect::<Result<Vec<_>>>()
    });
    let alone = alone.unwrap().remove(0);
    for ranks in [1, 2, 4] {
        let found = run_local(ranks, |comm| {
            let model = Arc::new(Model::new(comm)?);
            let one_thread: Vec<Tensor> = (0..REQUESTS).map(|request| model.forward(comm, request)).collect::<Result<_>>()?;
            // The threads have no common order: each serves its requests as fast as it can.
            let serve = |number: u32| {
                let (model, comm) = (Arc::clone(&model), comm.clone());
                move || -> Result<Vec<(u32, Tensor)>> {
                    let lane = comm.lane(number).map_err(std::io::Error::other)?;
                    (number..REQUESTS).step_by(2).map(|request| Ok((request, model.forward(&lane, request)?))).collect()
                }
            };
            let threads = [0, 1].map(|number| std::thread::spawn(serve(number)));
            let answers = threads.map(|thread| thread.join().unwrap());
            for (request, answer) in answers.into_iter().collect::<Result<Vec<_>>>()?.concat() {
                assert_eq!(bits(&answer), bits(&one_thread[request as usize]), "request {request}");
            }
            Ok(one_thread)
        });
        for answers in found.unwrap() {
            for (answer, expected) in answers.iter().zip(&alone) {
                assert!(largest_difference(answer, expected) < 1e-4, "{ranks} ranks");
            }
        }
    }
}
