//! A language model shaped like Llama, with its weights in a file, split over ranks. It computes the same logits, the
//! same tokens one by one from a cache, and the same training as one process. There are as many heads of keys and
//! values as ranks, more, or fewer.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "candle maps files")]

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::kv_cache::ConcatKvCache;
use candle_nn::var_builder::{ShardedSafeTensors, ShardedVarBuilder};
use candle_nn::{Embedding, Linear, RmsNorm};
use collectives::Communicator;
use collectives_candle::{
    AttentionHeads, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, copy_to_ranks, vocab_parallel_cross_entropy,
};
use training_common::{largest_difference, uniform};

const VOCABULARY: usize = 36;
const WIDTH: usize = 16;
const HIDDEN: usize = 24;
const BLOCKS: usize = 2;
const TOKENS: usize = 12;

/// The allowed difference of logits, losses and weights: sums of a few dozen products in different orders, through two
/// blocks.
const BOUND: f32 = 1e-4;

/// Numbers of heads, each with the numbers of ranks to try. A rank has several heads of keys and values, or two ranks
/// share one, or all do.
const MODELS: [(AttentionHeads, &[usize]); 3] = [
    (AttentionHeads { query: 24, key_value: 12, width: 2 }, &[1, 2, 3, 4]),
    (AttentionHeads { query: 12, key_value: 2, width: 4 }, &[1, 2, 4]),
    (AttentionHeads { query: 12, key_value: 1, width: 4 }, &[3, 4]),
];

/// The way a weight is split over ranks.
#[derive(Clone, Copy)]
enum Split {
    Whole,
    Along(usize),
    /// By heads of keys and values.
    Heads,
}

/// The name, shape and split of each weight.
fn weights(heads: AttentionHeads) -> Vec<(String, Vec<usize>, Split)> {
    let mut all = vec![
        ("embed".to_owned(), vec![VOCABULARY, WIDTH], Split::Along(0)),
        ("norm".to_owned(), vec![WIDTH], Split::Whole),
        ("head".to_owned(), vec![VOCABULARY, WIDTH], Split::Along(0)),
    ];
    for block in 0..BLOCKS {
        let mut add = |name: &str, shape: &[usize], split| all.push((format!("blocks.{block}.{name}"), shape.to_vec(), split));
        let (queries, keys) = (heads.query * heads.width, heads.key_value * heads.width);
        add("attention_norm", &[WIDTH], Split::Whole);
        add("q", &[queries, WIDTH], Split::Along(0));
        add("k", &[keys, WIDTH], Split::Heads);
        add("v", &[keys, WIDTH], Split::Heads);
        add("o", &[WIDTH, queries], Split::Along(1));
        add("norm", &[WIDTH], Split::Whole);
        add("gate", &[HIDDEN, WIDTH], Split::Along(0));
        add("up", &[HIDDEN, WIDTH], Split::Along(0));
        add("down", &[WIDTH, HIDDEN], Split::Along(1));
    }
    all
}

fn whole_weights(heads: AttentionHeads) -> HashMap<String, Tensor> {
    let make = |(number, (name, shape, _)): (usize, (String, Vec<usize>, Split))| {
        let values = uniform(number as u64, 0.5, shape.iter().product());
        let norm = if shape.len() == 1 { 1.0 } else { 0.0 };
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap().affine(1.0, norm).unwrap())
    };
    weights(heads).into_iter().enumerate().map(make).collect()
}

/// Returns a rank's part of a weight.
fn own_part(whole: &Tensor, split: Split, heads: AttentionHeads, rank: usize, ranks: usize) -> Tensor {
    let (dimension, parts) = match split {
        Split::Whole => return whole.clone(),
        Split::Along(dimension) => (dimension, ranks),
        Split::Heads => (0, ranks.min(heads.key_value)),
    };
    let each = whole.dim(dimension).unwrap() / parts;
    whole.narrow(dimension, rank / (ranks / parts) * each, each).unwrap().contiguous().unwrap()
}

/// Layers with the same input.
type Several = Box<dyn Fn(&Tensor) -> Result<Vec<Tensor>>>;

struct Block {
    attention_norm: RmsNorm,
    qkv: Several,
    o: Box<dyn Module>,
    norm: RmsNorm,
    gate_up: Several,
    down: Box<dyn Module>,
    /// The heads of this rank.
    heads: AttentionHeads,
}

/// The model; its layers may be split.
struct Llama {
    embed: Box<dyn Module>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Box<dyn Module>,
}

/// A source of layers by name.
trait Layers {
    fn several(&self, names: &[String]) -> Result<Several>;
    fn row(&self, name: &str) -> Result<Box<dyn Module>>;
    fn embedding(&self) -> Result<Box<dyn Module>>;
    fn head(&self) -> Result<Box<dyn Module>>;
    fn norm(&self, name: &str) -> Result<Tensor>;
    fn heads(&self) -> Result<AttentionHeads>;
}

fn each(layers: Vec<impl Module + 'static>) -> Several {
    Box::new(move |x| layers.iter().map(|layer| layer.forward(x)).collect())
}

/// The layers of a single process, without this crate.
struct Whole<'a>(&'a HashMap<String, Var>, AttentionHeads);

impl Whole<'_> {
    fn linear(&self, name: &str) -> Linear {
        Linear::new(self.0[name].as_tensor().clone(), None)
    }
}

impl Layers for Whole<'_> {
    fn several(&self, names: &[String]) -> Result<Several> {
        Ok(each(names.iter().map(|name| self.linear(name)).collect()))
    }

    fn row(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(self.linear(name)))
    }

    fn embedding(&self) -> Result<Box<dyn Module>> {
        Ok(Box::new(Embedding::new(self.0["embed"].as_tensor().clone(), WIDTH)))
    }

    fn head(&self) -> Result<Box<dyn Module>> {
        self.row("head")
    }

    fn norm(&self, name: &str) -> Result<Tensor> {
        Ok(self.0[name].as_tensor().clone())
    }

    fn heads(&self) -> Result<AttentionHeads> {
        Ok(self.1)
    }
}

/// Layers for training: this rank's variables, each in its own layer.
struct Variables<'a> {
    comm: &'a Communicator,
    variables: &'a HashMap<String, Var>,
    heads: AttentionHeads,
    /// The ranks with the same heads of keys and values.
    sharers: &'a Communicator,
    sequence_parallel: bool,
}

impl Variables<'_> {
    fn column(&self, name: &str) -> Result<ColumnParallelLinear> {
        let variable = self.variables[name].as_tensor();
        let is_shared = name.ends_with(".k") || name.ends_with(".v");
        let weight = if is_shared { copy_to_ranks(self.sharers, variable)? } else { variable.clone() };
        let layer = ColumnParallelLinear::new(self.comm, weight, None)?;
        Ok(if self.sequence_parallel { layer.sequence_parallel(0) } else { layer })
    }
}

impl Layers for Variables<'_> {
    fn several(&self, names: &[String]) -> Result<Several> {
        Ok(each(names.iter().map(|name| self.column(name)).collect::<Result<_>>()?))
    }

    fn row(&self, name: &str) -> Result<Box<dyn Module>> {
        let layer = RowParallelLinear::new(self.comm, self.variables[name].as_tensor().clone(), None)?;
        Ok(Box::new(if self.sequence_parallel { layer.sequence_parallel(0) } else { layer }))
    }

    fn embedding(&self) -> Result<Box<dyn Module>> {
        let layer = VocabParallelEmbedding::new(self.comm, self.variables["embed"].as_tensor().clone())?;
        Ok(Box::new(if self.sequence_parallel { layer.sequence_parallel(0) } else { layer }))
    }

    fn head(&self) -> Result<Box<dyn Module>> {
        Ok(Box::new(self.column("head")?))
    }

    fn norm(&self, name: &str) -> Result<Tensor> {
        let weight = self.variables[name].as_tensor();
        if self.sequence_parallel { copy_to_ranks(self.comm, weight) } else { Ok(weight.clone()) }
    }

    fn heads(&self) -> Result<AttentionHeads> {
        self.heads.of_rank(self.comm)
    }
}

/// Layers for inference: this rank's parts of a file, those with the same input in one matrix.
struct Loaded<'a>(&'a Communicator, ShardedVarBuilder<'a>, AttentionHeads);

impl Loaded<'_> {
    fn shape(&self, name: &str) -> Vec<usize> {
        weights(self.2).into_iter().find(|(known, ..)| known == name).unwrap().1
    }
}

impl Layers for Loaded<'_> {
    fn several(&self, names: &[String]) -> Result<Several> {
        let layer = if let [q, k, v] = names {
            ColumnParallelLinear::load_qkv(self.0, WIDTH, self.2, [q, k, v], false, &self.1)?
        } else {
            let layers: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), self.shape(name)[0])).collect();
            ColumnParallelLinear::load_multi(self.0, WIDTH, &layers, false, &self.1)?
        };
        Ok(Box::new(move |x| layer.forward_parts(x)))
    }

    fn row(&self, name: &str) -> Result<Box<dyn Module>> {
        Ok(Box::new(RowParallelLinear::load(self.0, self.shape(name)[1], WIDTH, false, &self.1.pp(name))?))
    }

    fn embedding(&self) -> Result<Box<dyn Module>> {
        Ok(Box::new(VocabParallelEmbedding::load(self.0, VOCABULARY, WIDTH, &self.1.pp("embed"))?))
    }

    fn head(&self) -> Result<Box<dyn Module>> {
        Ok(Box::new(ColumnParallelLinear::load(self.0, WIDTH, VOCABULARY, false, &self.1.pp("head"))?.gathering()))
    }

    fn norm(&self, name: &str) -> Result<Tensor> {
        self.1.get(WIDTH, &format!("{name}.weight"))
    }

    fn heads(&self) -> Result<AttentionHeads> {
        self.2.of_rank(self.0)
    }
}

impl Block {
    fn new(layers: &dyn Layers, number: usize) -> Result<Self> {
        let name = |part: &str| format!("blocks.{number}.{part}");
        Ok(Self {
            attention_norm: RmsNorm::new(layers.norm(&name("attention_norm"))?, 1e-5),
            qkv: layers.several(&["q", "k", "v"].map(name))?,
            o: layers.row(&name("o"))?,
            norm: RmsNorm::new(layers.norm(&name("norm"))?, 1e-5),
            gate_up: layers.several(&["gate", "up"].map(name))?,
            down: layers.row(&name("down"))?,
            heads: layers.heads()?,
        })
    }

    /// Computes the attention of tokens that follow those in the cache. No gradient flows through the cache.
    fn attention(&self, x: &Tensor, cache: Option<&mut ConcatKvCache>) -> Result<Tensor> {
        let AttentionHeads { query, key_value, width } = self.heads;
        let Ok([q, k, v]) = <[Tensor; 3]>::try_from((self.qkv)(x)?) else { candle_core::bail!("queries, keys and values") };
        let (tokens, first) = (q.dim(0)?, cache.as_ref().map_or(0, |cache| cache.current_seq_len()));
        let by_head = |x: Tensor, heads: usize| x.contiguous()?.reshape((tokens, heads, width))?.transpose(0, 1)?.contiguous();
        let half = width / 2;
        let angle = |index: usize| (first + index / half) as f32 / 10_f32.powi((index % half) as i32);
        let angles = Tensor::from_vec((0..tokens * half).map(angle).collect::<Vec<_>>(), (tokens, half), x.device())?;
        let turn = |x: Tensor| candle_nn::rotary_emb::rope_slow(&x.unsqueeze(0)?, &angles.cos()?, &angles.sin()?)?.squeeze(0);
        let (q, k, v) = (turn(by_head(q, query)?)?, turn(by_head(k, key_value)?)?, by_head(v, key_value)?);
        let (k, v) = match cache {
            Some(cache) => cache.append(&k, &v)?,
            None => (k, v),
        };
        let all = first + tokens;
        let for_queries = |x: Tensor| {
            let wide = x.unsqueeze(1)?.expand((key_value, query / key_value, all, width))?;
            wide.contiguous()?.reshape((query, all, width))
        };
        let mask = |index: usize| if index % all > first + index / all { f32::NEG_INFINITY } else { 0.0 };
        let mask = Tensor::from_vec((0..tokens * all).map(mask).collect::<Vec<_>>(), (tokens, all), x.device())?;
        let scores = (q.matmul(&for_queries(k)?.t()?)? / (width as f64).sqrt())?.broadcast_add(&mask)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&for_queries(v)?)?;
        self.o.forward(&mixed.transpose(0, 1)?.contiguous()?.reshape((tokens, query * width))?)
    }

    fn forward(&self, x: &Tensor, cache: Option<&mut ConcatKvCache>) -> Result<Tensor> {
        let x = (x + self.attention(&self.attention_norm.forward_diff(x)?, cache)?)?;
        let parts = (self.gate_up)(&self.norm.forward_diff(&x)?)?;
        &x + self.down.forward(&(parts[0].silu()? * &parts[1])?)?
    }
}

impl Llama {
    fn new(layers: &dyn Layers) -> Result<Self> {
        Ok(Self {
            embed: layers.embedding()?,
            blocks: (0..BLOCKS).map(|number| Block::new(layers, number)).collect::<Result<_>>()?,
            norm: RmsNorm::new(layers.norm("norm")?, 1e-5),
            head: layers.head()?,
        })
    }

    /// Returns one row for each token; the tokens follow those in the caches, if there are caches.
    fn logits_behind(&self, ids: &Tensor, caches: &mut [ConcatKvCache]) -> Result<Tensor> {
        let mut x = self.embed.forward(ids)?;
        for (number, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, caches.get_mut(number))?;
        }
        self.head.forward(&self.norm.forward_diff(&x)?)
    }

    fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        self.logits_behind(ids, &mut [])
    }
}

fn tokens() -> (Tensor, Tensor) {
    let ids = |shift: u32| {
        let ids: Vec<u32> = (0..TOKENS as u32).map(|token| (token * 7 + shift) % VOCABULARY as u32).collect();
        Tensor::from_vec(ids, TOKENS, &Device::Cpu).unwrap()
    };
    (ids(3), ids(10))
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor.contiguous().unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let largest = largest_difference(found, expected);
    assert!(largest <= BOUND, "{what}: {largest}");
}

fn whole_variables(heads: AttentionHeads) -> HashMap<String, Var> {
    whole_weights(heads).iter().map(|(name, tensor)| (name.clone(), Var::from_tensor(tensor).unwrap())).collect()
}

/// A file of all weights, which is removed when this value is dropped.
struct File(PathBuf);

impl File {
    fn new(heads: AttentionHeads, test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("collectives-candle-{test}-{}.safetensors", std::process::id()));
        let named: HashMap<String, Tensor> =
            whole_weights(heads).into_iter().map(|(name, tensor)| (format!("{name}.weight"), tensor)).collect();
        candle_core::safetensors::save(&named, &path).unwrap();
        Self(path)
    }

    fn open(&self) -> ShardedVarBuilder<'static> {
        // SAFETY: nothing writes to the file while it is mapped: its name contains this process's number, and only the
        // test that created it has its path. The file may be removed meanwhile; a mapping survives that.
        unsafe { ShardedSafeTensors::var_builder(&[&self.0], DType::F32, &Device::Cpu) }.unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_model_loaded_from_a_file_by_parts_gives_the_logits_of_the_whole() {
    let (ids, _) = tokens();
    for (heads, counts) in MODELS {
        let variables = whole_variables(heads);
        let expected = elements(&Llama::new(&Whole(&variables, heads)).unwrap().logits(&ids).unwrap());
        let file = File::new(heads, "logits");
        for count in counts {
            let outputs = Communicator::run_local(*count, |comm| {
                let model = Llama::new(&Loaded(comm, file.open(), heads)).unwrap();
                Ok(elements(&model.logits(&ids).unwrap()))
            });
            outputs.unwrap().iter().for_each(|output| assert_close(output, &expected, &format!("{heads:?}, {count} ranks")));
        }
    }
}

#[test]
fn tokens_one_by_one_from_a_cache_have_the_logits_of_the_whole_sequence() {
    let (ids, _) = tokens();
    for (heads, counts) in MODELS {
        let variables = whole_variables(heads);
        let expected = elements(&Llama::new(&Whole(&variables, heads)).unwrap().logits(&ids).unwrap());
        let file = File::new(heads, "cache");
        for count in counts {
            let outputs = Communicator::run_local(*count, |comm| {
                let model = Llama::new(&Loaded(comm, file.open(), heads)).unwrap();
                let mut caches = vec![ConcatKvCache::new(1); BLOCKS];
                let prompt = TOKENS / 2;
                let mut logits = elements(&model.logits_behind(&ids.narrow(0, 0, prompt).unwrap(), &mut caches).unwrap());
                for token in prompt..TOKENS {
                    logits.extend(elements(&model.logits_behind(&ids.narrow(0, token, 1).unwrap(), &mut caches).unwrap()));
                }
                let keys = caches[0].k().unwrap();
                assert_eq!(keys.dims(), [heads.of_rank(comm).unwrap().key_value, TOKENS, heads.width], "a rank caches its own heads");
                Ok(logits)
            });
            outputs.unwrap().iter().for_each(|output| assert_close(output, &expected, &format!("{heads:?}, {count} ranks")));
        }
    }
}

/// Runs five steps of gradient descent and returns the losses.
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

/// The losses, and the weights at the end.
type Trained = (Vec<f32>, HashMap<String, Vec<f32>>);

/// Trains, and returns this rank's losses and weights.
fn trained(comm: &Communicator, heads: AttentionHeads, sequence_parallel: bool) -> Result<Trained> {
    let ((ids, targets), ranks) = (tokens(), comm.world_size());
    let whole = whole_weights(heads);
    let part = |(name, _, split): (String, Vec<usize>, Split)| {
        let own = Var::from_tensor(&own_part(&whole[&name], split, heads, comm.rank(), ranks)).unwrap();
        (name, own)
    };
    let variables: HashMap<String, Var> = weights(heads).into_iter().map(part).collect();
    let sharers = comm.subgroup_of_size(ranks / ranks.min(heads.key_value)).unwrap();
    let layers = Variables { comm, variables: &variables, heads, sharers: &sharers, sequence_parallel };
    // Created for each step, because the layers contain copies of the variables.
    let losses = train(&variables, || vocab_parallel_cross_entropy(comm, &Llama::new(&layers)?.logits(&ids)?, &targets))?;
    Ok((losses, variables.into_iter().map(|(name, variable)| (name, elements(&variable))).collect()))
}

#[test]
fn a_split_model_trains_as_the_whole_one() {
    let (ids, targets) = tokens();
    for (heads, counts) in MODELS {
        let whole = whole_variables(heads);
        let model = Llama::new(&Whole(&whole, heads)).unwrap();
        let losses = train(&whole, || candle_nn::loss::cross_entropy(&model.logits(&ids)?, &targets)).unwrap();
        assert!(losses[4] < 0.9 * losses[0], "it learns: {losses:?}");
        for (count, sequence_parallel) in counts.iter().flat_map(|count| [(*count, false), (*count, true)]) {
            let outcomes = Communicator::run_local(count, |comm| Ok(trained(comm, heads, sequence_parallel).unwrap()));
            for (rank, (own_losses, own)) in outcomes.unwrap().into_iter().enumerate() {
                let what = |name: &str| format!("{name} of rank {rank} of {count}, {heads:?}, sequence parallel: {sequence_parallel}");
                assert_close(&own_losses, &losses, &what("losses"));
                for (name, _, split) in weights(heads) {
                    let expected = elements(&own_part(whole[&name].as_tensor(), split, heads, rank, count));
                    assert_close(&own[&name], &expected, &what(&name));
                }
            }
        }
    }
}

#[test]
fn layers_in_one_matrix_keep_their_biases_and_are_gathered_each() {
    let path = std::env::temp_dir().join(format!("collectives-candle-biases-{}.safetensors", std::process::id()));
    let layer = |seed: u64, outputs: usize| {
        let values = |seed, count| Tensor::from_vec(uniform(seed, 0.5, count), count, &Device::Cpu).unwrap();
        Linear::new(values(seed, outputs * WIDTH).reshape((outputs, WIDTH)).unwrap(), Some(values(seed + 1, outputs)))
    };
    let whole = [layer(1, 12), layer(3, 24)];
    let named: HashMap<String, Tensor> = ["gate", "up"]
        .into_iter()
        .zip(&whole)
        .flat_map(|(name, layer)| {
            [(format!("{name}.weight"), layer.weight().clone()), (format!("{name}.bias"), layer.bias().unwrap().clone())]
        })
        .collect();
    candle_core::safetensors::save(&named, &path).unwrap();
    let file = File(path);
    let input = Tensor::from_vec(uniform(9, 1.0, 6 * WIDTH), (2, 3, WIDTH), &Device::Cpu).unwrap();
    let expected = whole.each_ref().map(|layer| elements(&layer.forward(&input).unwrap()));
    for count in [1, 2, 3, 4] {
        let outputs = Communicator::run_local(count, |comm| {
            let layers = [("gate", 12), ("up", 24)];
            let layer = ColumnParallelLinear::load_multi(comm, WIDTH, &layers, true, &file.open()).unwrap().gathering();
            let [gate, up] = <[Tensor; 2]>::try_from(layer.forward_parts(&input).unwrap()).unwrap();
            let both = layer.forward(&input).unwrap();
            assert_eq!((gate.dims(), both.dims()), (&[2, 3, 12][..], &[2, 3, 36][..]));
            assert_eq!(elements(&both.narrow(2, 12, 24).unwrap()), elements(&up));
            Ok([elements(&gate), elements(&up)])
        });
        for output in outputs.unwrap() {
            output.iter().zip(&expected).for_each(|(output, expected)| assert_close(output, expected, &format!("{count} ranks")));
        }
    }
}

#[test]
fn heads_that_cannot_be_split_and_files_that_do_not_fit_are_said() {
    let heads = AttentionHeads { query: 12, key_value: 2, width: 4 };
    let file = File::new(heads, "errors");
    let load = |comm: &Communicator, heads: AttentionHeads| {
        let names = ["blocks.0.q", "blocks.0.k", "blocks.0.v"];
        ColumnParallelLinear::load_qkv(comm, WIDTH, heads, names, false, &file.open()).unwrap_err().to_string()
    };
    let messages = Communicator::run_local(3, |comm| {
        let with = |query, key_value| load(comm, AttentionHeads { query, key_value, width: 4 });
        let multi =
            |layers: &[(&str, usize)]| ColumnParallelLinear::load_multi(comm, WIDTH, layers, false, &file.open()).unwrap_err().to_string();
        Ok([
            (with(12, 2), "2 heads of keys and values do not fit 3 ranks: one of the two numbers must be a multiple of the other"),
            (with(10, 1), "10 query heads cannot be split equally between 3 ranks"),
            (with(12, 5), "12 query heads cannot be split equally between 5"),
            (with(0, 1), "0 query heads"),
            (with(3, 0), "between 0 heads"),
            (with(24, 1), "weight of this rank has shape"),
            (multi(&[]), "no layers"),
            (
                multi(&[("blocks.0.gate", HIDDEN), ("blocks.0.up", HIDDEN + 1)]),
                "25 outputs cannot be split equally between 3 ranks; add 2 as padding, to reach 27",
            ),
            (multi(&[("blocks.0.gate", HIDDEN), ("blocks.0.nothing", HIDDEN)]), "blocks.0.nothing"),
        ])
    });
    for (message, expected) in messages.unwrap().iter().flatten() {
        assert!(message.contains(expected), "{message}");
    }
}
