//! A language model of Llama's shape, its weights in a file, split over ranks: the same logits and the same training as in one process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "candle maps files")]

use std::collections::HashMap;

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::var_builder::{ShardedSafeTensors, ShardedVarBuilder};
use candle_nn::{Embedding, Linear};
use collectives::Communicator;
use collectives_candle::{ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy};
use training_common::uniform;

const VOCABULARY: usize = 32;
const WIDTH: usize = 16;
const HIDDEN: usize = 24;
const HEADS: usize = 4;
const BLOCKS: usize = 2;
const TOKENS: usize = 6;

/// Names, shapes, and along which dimension each is split.
fn weights() -> Vec<(String, [usize; 2], Option<usize>)> {
    let mut all = vec![("embed".to_owned(), [VOCABULARY, WIDTH], Some(0)), ("head".to_owned(), [VOCABULARY, WIDTH], Some(0))];
    for block in 0..BLOCKS {
        let mut add = |name: &str, shape, split| all.push((format!("blocks.{block}.{name}"), shape, split));
        for name in ["q", "k", "v"] {
            add(name, [WIDTH, WIDTH], Some(0));
        }
        add("o", [WIDTH, WIDTH], Some(1));
        add("gate", [HIDDEN, WIDTH], Some(0));
        add("up", [HIDDEN, WIDTH], Some(0));
        add("down", [WIDTH, HIDDEN], Some(1));
    }
    all
}

fn whole_weights() -> HashMap<String, Tensor> {
    let make = |(number, (name, [rows, columns], _)): (usize, (String, [usize; 2], Option<usize>))| {
        let values = uniform(number as u64, 0.5, rows * columns);
        (name, Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap())
    };
    weights().into_iter().enumerate().map(make).collect()
}

struct Block {
    q: Box<dyn Module>,
    k: Box<dyn Module>,
    v: Box<dyn Module>,
    o: Box<dyn Module>,
    gate: Box<dyn Module>,
    up: Box<dyn Module>,
    down: Box<dyn Module>,
    /// On this rank.
    heads: usize,
}

/// The model, whose layers may be split.
struct Llama {
    embed: Box<dyn Module>,
    blocks: Vec<Block>,
    head: Box<dyn Module>,
}

/// What makes a layer of a name.
trait Layers {
    fn column(&self, name: &str) -> Result<Box<dyn Module>>;
    fn row(&self, name: &str) -> Result<Box<dyn Module>>;
    fn embedding(&self, name: &str) -> Result<Box<dyn Module>>;
    fn ranks(&self) -> usize;
}

struct Whole<'a>(&'a HashMap<String, Var>);

impl Layers for Whole<'_> {
    fn column(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(Linear::new(self.0[name].as_tensor().clone(), None)))
    }

    fn row(&self, name: &str) -> Result<Box<dyn Module>> {
        self.column(name)
    }

    fn embedding(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(Embedding::new(self.0[name].as_tensor().clone(), WIDTH)))
    }

    fn ranks(&self) -> usize {
        1
    }
}

struct Split<'a>(&'a Communicator, &'a HashMap<String, Var>);

impl Layers for Split<'_> {
    fn column(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(ColumnParallelLinear::new(self.0, self.1[name].as_tensor().clone(), None)?))
    }

    fn row(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(RowParallelLinear::new(self.0, self.1[name].as_tensor().clone(), None)?))
    }

    fn embedding(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(VocabParallelEmbedding::new(self.0, self.1[name].as_tensor().clone())?))
    }

    fn ranks(&self) -> usize {
        self.0.world_size()
    }
}

struct Loaded<'a>(&'a Communicator, ShardedVarBuilder<'a>);

impl Layers for Loaded<'_> {
    fn column(&self, name: &str) -> Result<Box<dyn Module>> {
        let [outputs, inputs] = weights().into_iter().find(|(known, ..)| known == name).unwrap().1;
        Ok(Box::new(ColumnParallelLinear::load(self.0, inputs, outputs, false, &self.1.pp(name))?))
    }

    fn row(&self, name: &str) -> Result<Box<dyn Module>> {
        let [outputs, inputs] = weights().into_iter().find(|(known, ..)| known == name).unwrap().1;
        Ok(Box::new(RowParallelLinear::load(self.0, inputs, outputs, false, &self.1.pp(name))?))
    }

    fn embedding(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(VocabParallelEmbedding::load(self.0, VOCABULARY, WIDTH, &self.1.pp(name))?))
    }

    fn ranks(&self) -> usize {
        self.0.world_size()
    }
}

fn norm(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?)
}

impl Block {
    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let each = WIDTH / HEADS;
        let by_head = |projected: Tensor| projected.reshape((TOKENS, self.heads, each))?.transpose(0, 1)?.contiguous();
        let angles: Vec<f32> =
            (0..TOKENS * each / 2).map(|index| (index / (each / 2)) as f32 / 10_f32.powi((index % (each / 2)) as i32)).collect();
        let angles = Tensor::from_vec(angles, (TOKENS, each / 2), x.device())?;
        let turn = |x: Tensor| candle_nn::rotary_emb::rope_slow(&x.unsqueeze(0)?, &angles.cos()?, &angles.sin()?)?.squeeze(0);
        let (q, k) = (turn(by_head(self.q.forward(x)?)?)?, turn(by_head(self.k.forward(x)?)?)?);
        let mask: Vec<f32> =
            (0..TOKENS * TOKENS).map(|index| if index % TOKENS > index / TOKENS { f32::NEG_INFINITY } else { 0.0 }).collect();
        let scores = (q.matmul(&k.t()?)? / (each as f64).sqrt())?.broadcast_add(&Tensor::from_vec(mask, (TOKENS, TOKENS), x.device())?)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&by_head(self.v.forward(x)?)?)?;
        self.o.forward(&mixed.transpose(0, 1)?.contiguous()?.reshape((TOKENS, self.heads * each))?)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention(&norm(x)?)?)?;
        let inner = norm(&x)?;
        let gated = (self.gate.forward(&inner)?.silu()? * self.up.forward(&inner)?)?;
        &x + self.down.forward(&gated)?
    }
}

impl Llama {
    fn new(layers: &dyn Layers) -> Result<Self> {
        let block = |number: usize| -> Result<Block> {
            let name = |part: &str| format!("blocks.{number}.{part}");
            Ok(Block {
                q: layers.column(&name("q"))?,
                k: layers.column(&name("k"))?,
                v: layers.column(&name("v"))?,
                o: layers.row(&name("o"))?,
                gate: layers.column(&name("gate"))?,
                up: layers.column(&name("up"))?,
                down: layers.row(&name("down"))?,
                heads: HEADS / layers.ranks(),
            })
        };
        Ok(Self { embed: layers.embedding("embed")?, blocks: (0..BLOCKS).map(block).collect::<Result<_>>()?, head: layers.column("head")? })
    }

    /// One row for each token, of this rank's part of the vocabulary.
    fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embed.forward(ids)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&norm(&x)?)
    }
}

fn tokens() -> (Tensor, Tensor) {
    let ids = |shift: u32| {
        Tensor::from_vec((0..TOKENS as u32).map(|token| (token * 7 + shift) % 32).collect::<Vec<_>>(), TOKENS, &Device::Cpu).unwrap()
    };
    (ids(3), ids(10))
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor.contiguous().unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest <= bound, "{what}: {largest}");
}

#[test]
fn a_model_loaded_from_a_file_by_parts_gives_the_logits_of_the_whole() {
    let (ids, _) = tokens();
    let whole = whole_weights();
    let variables: HashMap<String, Var> = whole.iter().map(|(name, tensor)| (name.clone(), Var::from_tensor(tensor).unwrap())).collect();
    let expected = elements(&Llama::new(&Whole(&variables)).unwrap().logits(&ids).unwrap());
    let path = std::env::temp_dir().join(format!("collectives-candle-{}.safetensors", std::process::id()));
    let named: HashMap<String, Tensor> = whole.into_iter().map(|(name, tensor)| (format!("{name}.weight"), tensor)).collect();
    candle_core::safetensors::save(&named, &path).unwrap();
    for count in [1, 2, 4] {
        let outputs = Communicator::run_local(count, |comm| {
            // SAFETY: nobody writes to the file while it is mapped: this test made it, and removes it at its end.
            let files = unsafe { ShardedSafeTensors::var_builder(&[&path], DType::F32, &Device::Cpu) }.unwrap();
            let model = Llama::new(&Loaded(comm, files)).unwrap();
            let own = model.logits(&ids).unwrap();
            Ok(elements(&collectives_candle::all_gather(comm, &own, 1).unwrap()))
        });
        for output in outputs.unwrap() {
            assert_close(&output, &expected, 1e-4, &format!("{count} ranks"));
        }
    }
    std::fs::remove_file(&path).unwrap();
}

/// Five steps of gradient descent; what the variables are then.
fn train(variables: &HashMap<String, Var>, loss: impl Fn() -> Result<Tensor>) -> Result<Vec<f32>> {
    let mut losses = Vec::new();
    for _ in 0..5 {
        let loss = loss()?;
        let gradients = loss.backward()?;
        for variable in variables.values() {
            variable.set(&(variable.as_tensor() - (gradients.get(variable).unwrap() * 0.1)?)?)?;
        }
        losses.push(loss.to_scalar()?);
    }
    Ok(losses)
}

#[test]
fn a_split_model_trains_as_the_whole_one() {
    let (ids, targets) = tokens();
    let whole: HashMap<String, Var> =
        whole_weights().iter().map(|(name, tensor)| (name.clone(), Var::from_tensor(tensor).unwrap())).collect();
    let model = Llama::new(&Whole(&whole)).unwrap();
    let losses = train(&whole, || candle_nn::loss::cross_entropy(&model.logits(&ids)?, &targets)).unwrap();
    assert!(losses[4] < 0.8 * losses[0], "it learns: {losses:?}");
    for count in [1, 2, 4] {
        let outcomes = Communicator::run_local(count, |comm| {
            let part = |(name, [..], split): (String, [usize; 2], Option<usize>)| {
                let whole = &whole_weights()[&name];
                let dimension = split.unwrap();
                let each = whole.dim(dimension).unwrap() / count;
                (name, Var::from_tensor(&whole.narrow(dimension, comm.rank() * each, each).unwrap().contiguous().unwrap()).unwrap())
            };
            let own: HashMap<String, Var> = weights().into_iter().map(part).collect();
            let model = Llama::new(&Split(comm, &own)).unwrap();
            let losses = train(&own, || vocab_parallel_cross_entropy(comm, &model.logits(&ids)?, &targets)).unwrap();
            Ok((losses, own.into_iter().map(|(name, variable)| (name, elements(&variable))).collect::<HashMap<_, _>>()))
        });
        for (rank, (own_losses, own)) in outcomes.unwrap().into_iter().enumerate() {
            assert_close(&own_losses, &losses, 1e-4, &format!("losses of rank {rank} of {count}"));
            for (name, _, split) in weights() {
                let (whole, dimension) = (whole[&name].as_tensor(), split.unwrap());
                let each = whole.dim(dimension).unwrap() / count;
                let expected = elements(&whole.narrow(dimension, rank * each, each).unwrap());
                assert_close(&own[&name], &expected, 1e-4, &format!("{name} of rank {rank} of {count}"));
            }
        }
    }
}
