//! Linear layers whose outputs are split over the ranks: one layer per matrix, or several side by side in one.

use candle_core::{D, Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::var_builder::{Shard, ShardedVarBuilder};
use collectives::Communicator;

use crate::function::all_gather;
use crate::heads::AttentionHeads;
use crate::regions::{copy_to_ranks, gather_from_ranks};
use crate::share::{expect, part_of, shard, share};

/// A linear layer that computes this rank's share of the outputs. On every rank, an input of shape `[.., inputs]`
/// becomes an output of shape `[.., outputs / ranks]`.
///
/// Several layers with the same input can share one matrix ([`load_multi`](Self::load_multi),
/// [`load_qkv`](Self::load_qkv)), so one multiplication computes the outputs of all these layers.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear {
    comm: Communicator,
    linear: Linear,
    /// The number of this rank's outputs, for each layer in the matrix.
    parts: Vec<usize>,
    gathers: bool,
    sequence: Option<usize>,
}

impl ColumnParallelLinear {
    /// Creates the layer from this rank's weight and bias. The weight has the shape `[outputs / ranks, inputs]`, and
    /// the bias has the shape `[outputs / ranks]`. Weight and bias may be variables.
    ///
    /// # Errors
    ///
    /// Fails if the weight is not a matrix, or if the bias has the wrong length.
    pub fn new(comm: &Communicator, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (outputs, _) = weight.dims2()?;
        bias.iter().try_for_each(|bias| expect("the bias", bias, &[outputs]))?;
        Ok(Self { comm: comm.clone(), linear: Linear::new(weight, bias), parts: vec![outputs], gathers: false, sequence: None })
    }

    /// Creates the layer from this rank's part of a whole layer.
    ///
    /// # Errors
    ///
    /// Fails if the outputs cannot be split equally.
    pub fn split(comm: &Communicator, whole: &Linear) -> Result<Self> {
        let bias = whole.bias().map(|bias| part_of(comm, "outputs", bias, 0)).transpose()?;
        Self::new(comm, part_of(comm, "outputs", whole.weight(), 0)?, bias)
    }

    /// Reads only this rank's part of the tensor `weight` from files that contain the whole tensor. If the argument
    /// `bias` is true, also reads this rank's part of the tensor `bias`.
    ///
    /// # Errors
    ///
    /// Fails if the outputs cannot be split equally, or if candle fails.
    pub fn load(comm: &Communicator, inputs: usize, outputs: usize, bias: bool, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        Self::load_part(comm, inputs, share("outputs", comm, outputs)?, bias, shard(comm, 0), files)
    }

    /// Reads this rank's part of several layers into one matrix, for example the gate and up projections of an MLP, or
    /// queries, keys and values. `layers` gives each layer's name in the files and its number of outputs.
    ///
    /// In the matrix, a rank's share of the first layer comes first, then its share of the second, and so on.
    /// [`forward_parts`](Self::forward_parts) returns the outputs of each layer separately. During loading, the parts
    /// and the matrix are in memory at the same time.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::var_builder::ShardedSafeTensors;
    /// # use collectives::Communicator;
    /// use collectives_candle::ColumnParallelLinear;
    ///
    /// # let path = std::env::temp_dir().join(format!("load-multi-{}.safetensors", std::process::id()));
    /// # let layer = |value: f32, outputs: usize| Tensor::full(value, (outputs, 2), &Device::Cpu);
    /// # let file = std::collections::HashMap::from([("gate.weight", layer(1.0, 6)?), ("up.weight", layer(3.0, 6)?)]);
    /// # candle_core::safetensors::save(&file, &path)?;
    /// let outputs = Communicator::run_local(3, |comm| {
    ///     let run = || -> candle_core::Result<Vec<Vec<Vec<f32>>>> {
    ///         // SAFETY: no process writes to the file while it is mapped.
    ///         let files = unsafe { ShardedSafeTensors::var_builder(&[&path], DType::F32, &Device::Cpu)? };
    ///         let layer = ColumnParallelLinear::load_multi(comm, 2, &[("gate", 6), ("up", 6)], false, &files)?;
    ///         let parts = layer.forward_parts(&Tensor::ones((1, 2), DType::F32, &Device::Cpu)?)?;
    ///         parts.iter().map(Tensor::to_vec2).collect()
    ///     };
    ///     Ok(run().expect("candle"))
    /// })?;
    /// # std::fs::remove_file(&path)?;
    /// assert_eq!(outputs[0], [[[2.0, 2.0]], [[6.0, 6.0]]]); // two of the six outputs of each
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Fails if `layers` is empty, if the outputs of a layer cannot be split equally, or if candle fails.
    pub fn load_multi(
        comm: &Communicator,
        inputs: usize,
        layers: &[(&str, usize)],
        bias: bool,
        files: &ShardedVarBuilder<'_>,
    ) -> Result<Self> {
        let load = |&(name, outputs): &(&str, usize)| Self::load(comm, inputs, outputs, bias, &files.pp(name));
        Self::merge(layers.iter().map(load).collect::<Result<_>>()?)
    }

    /// Reads this rank's heads of the queries, keys and values of an attention layer into one matrix. `names` gives the
    /// names of the query layer, the key layer and the value layer in the files. [`forward_parts`](Self::forward_parts)
    /// returns queries, keys and values separately.
    ///
    /// Keys and values may have fewer heads than queries. If there are more ranks than heads of keys and values,
    /// several ranks have the same head. The queries of all these ranks use this head. [`AttentionHeads::of_rank`]
    /// returns how many heads a rank has.
    ///
    /// # Errors
    ///
    /// Fails if [`AttentionHeads::of_rank`] or candle fails.
    pub fn load_qkv(
        comm: &Communicator,
        inputs: usize,
        heads: AttentionHeads,
        names: [&str; 3],
        bias: bool,
        files: &ShardedVarBuilder<'_>,
    ) -> Result<Self> {
        let own = heads.of_rank(comm)?;
        let load = |name: &str, heads: usize, shard: Shard| Self::load_part(comm, inputs, heads * own.width, bias, shard, &files.pp(name));
        let [queries, keys, values] = names;
        let shared = heads.key_value_shard(comm);
        Self::merge(vec![
            load(queries, own.query, shard(comm, 0))?,
            load(keys, own.key_value, shared)?,
            load(values, own.key_value, shared)?,
        ])
    }

    /// Reads a part with `own` outputs.
    fn load_part(comm: &Communicator, inputs: usize, own: usize, bias: bool, shard: Shard, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let weight = files.get_with_hints((own, inputs), "weight", shard)?;
        expect("weight", &weight, &[own, inputs])?;
        let bias = bias.then(|| files.get_with_hints(own, "bias", shard)).transpose()?;
        Self::new(comm, weight, bias)
    }

    /// Joins several layers with the same input into one.
    fn merge(layers: Vec<Self>) -> Result<Self> {
        let Some(first) = layers.first() else { candle_core::bail!("no layers were passed; at least one is needed") };
        let weights: Vec<&Tensor> = layers.iter().map(|layer| layer.linear.weight()).collect();
        let biases: Vec<&Tensor> = layers.iter().filter_map(|layer| layer.linear.bias()).collect();
        let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
        let parts = weights.iter().map(|weight| weight.dim(0)).collect::<Result<_>>()?;
        Ok(Self { parts, ..Self::new(&first.comm, Tensor::cat(&weights, 0)?, bias)? })
    }

    /// Makes the layer return all outputs on every rank. The forward pass then makes one [`all_gather`] for each layer
    /// in the matrix.
    #[must_use]
    pub fn gathering(mut self) -> Self {
        self.gathers = true;
        self
    }

    /// Makes the layer take this rank's part of the input along a dimension, as a
    /// [sequence-parallel](crate::RowParallelLinear::sequence_parallel) layer returns it. An [`all_gather`] in the
    /// forward pass and a [`reduce_scatter`](crate::reduce_scatter) in the backward pass replace the all-reduce of the
    /// backward pass.
    #[must_use]
    pub fn sequence_parallel(mut self, dimension: usize) -> Self {
        self.sequence = Some(dimension);
        self
    }

    /// Returns the outputs of the layers in the matrix, in the order of the layers. Each output has the shape
    /// `[.., outputs / ranks]`, or `[.., outputs]` if the layer was made with [`gathering`](Self::gathering). If the
    /// matrix has a single layer, its output is the same as the output of [`forward`](Module::forward).
    ///
    /// # Errors
    ///
    /// The errors of [`all_gather`] and of candle.
    pub fn forward_parts(&self, input: &Tensor) -> Result<Vec<Tensor>> {
        let input = match self.sequence {
            Some(dimension) => all_gather(&self.comm, input, dimension)?,
            None => copy_to_ranks(&self.comm, input)?,
        };
        let output = self.linear.forward(&input.contiguous()?)?;
        let mut from = 0;
        let part = |own: &usize| {
            let part = output.narrow(D::Minus1, from, *own)?;
            from += own;
            if self.gathers { gather_from_ranks(&self.comm, &part, part.rank() - 1) } else { Ok(part) }
        };
        self.parts.iter().map(part).collect()
    }
}

impl Module for ColumnParallelLinear {
    /// Returns the parts, concatenated along the last dimension.
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match &self.forward_parts(input)?[..] {
            [one] => Ok(one.clone()),
            parts => Tensor::cat(parts, D::Minus1),
        }
    }
}
