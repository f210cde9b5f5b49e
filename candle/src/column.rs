//! Linear layers whose outputs are split over the ranks: one layer per matrix, or several side by side in one.

use candle_core::shape::Dim;
use candle_core::{D, Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::var_builder::{Shard, ShardedVarBuilder};
use collectives::Communicator;

use crate::function::all_gather;
use crate::heads::AttentionHeads;
use crate::regions::{copy_to_ranks, gather_from_ranks};
use crate::share::{expect, expect_same_part, part_of, shard, share};

/// A linear layer that computes this rank's share of the outputs. On every rank, an input of shape `[.., inputs]`
/// becomes an output of shape `[.., outputs / ranks]`.
///
/// Several layers with the same input can share one matrix ([`load_multi`](Self::load_multi),
/// [`load_qkv`](Self::load_qkv)), so one multiplication computes the outputs of all these layers.
///
/// The multiplication is done by an inner layer `M`, which is a [`Linear`] unless you pass another module to
/// [`over`](Self::over).
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear<M = Linear> {
    comm: Communicator,
    inner: M,
    /// The number of this rank's outputs, for each layer in the matrix. Empty if the matrix has a single layer.
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
        Ok(Self::over(comm, Linear::new(weight, bias)))
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
    /// use collectives_candle::{ColumnParallelLinear, run_local};
    ///
    /// # let path = std::env::temp_dir().join(format!("load-multi-{}.safetensors", std::process::id()));
    /// # let layer = |value: f32, outputs: usize| Tensor::full(value, (outputs, 2), &Device::Cpu);
    /// # let file = std::collections::HashMap::from([("gate.weight", layer(1.0, 6)?), ("up.weight", layer(3.0, 6)?)]);
    /// # candle_core::safetensors::save(&file, &path)?;
    /// let outputs = run_local(3, |comm| {
    ///     // SAFETY: no process writes to the file while it is mapped.
    ///     let files = unsafe { ShardedSafeTensors::var_builder(&[&path], DType::F32, &Device::Cpu)? };
    ///     let layer = ColumnParallelLinear::load_multi(comm, 2, &[("gate", 6), ("up", 6)], false, &files)?;
    ///     let parts = layer.forward_parts(&Tensor::ones((1, 2), DType::F32, &Device::Cpu)?)?;
    ///     parts.iter().map(Tensor::to_vec2::<f32>).collect::<candle_core::Result<Vec<_>>>()
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
    /// several ranks have a copy of the same head, and the queries of all these ranks use it.
    /// [`AttentionHeads::of_rank`] returns how many heads a rank has.
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
        let weights: Vec<&Tensor> = layers.iter().map(|layer| layer.inner.weight()).collect();
        let biases: Vec<&Tensor> = layers.iter().filter_map(|layer| layer.inner.bias()).collect();
        let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
        let parts = weights.iter().map(|weight| weight.dim(0)).collect::<Result<_>>()?;
        Ok(Self { parts, ..Self::new(&first.comm, Tensor::cat(&weights, 0)?, bias)? })
    }

    /// Returns this rank's weight.
    #[must_use]
    pub fn weight(&self) -> &Tensor {
        self.inner.weight()
    }
}

impl<M: Module> ColumnParallelLinear<M> {
    /// Creates the layer from any module that computes this rank's share of the outputs, such as a quantised matrix.
    /// The module may also add this rank's part of a bias.
    ///
    /// ```
    /// use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use collectives_candle::{ColumnParallelLinear, run_local};
    ///
    /// let shapes = run_local(2, |comm| {
    ///     let part = Tensor::ones((3, 32), DType::F32, &Device::Cpu)?; // of a weight of shape 6 × 32
    ///     let part = QMatMul::from_qtensor(QTensor::quantize(&part, GgmlDType::Q8_0)?)?;
    ///     let layer = ColumnParallelLinear::over(comm, part).gathering();
    ///     Ok(layer.forward(&Tensor::ones((1, 32), DType::F32, &Device::Cpu)?)?.dims().to_vec())
    /// })?;
    /// assert_eq!(shapes, [[1, 6]; 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn over(comm: &Communicator, inner: M) -> Self {
        Self { comm: comm.clone(), inner, parts: Vec::new(), gathers: false, sequence: None }
    }

    /// Returns the inner layer.
    #[must_use]
    pub fn inner(&self) -> &M {
        &self.inner
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
        self.forward_parts_on(&self.comm, input)
    }

    /// Computes what [`forward`](Module::forward) computes, but makes its calls on another communicator, in which this
    /// rank has the same number: see [`RowParallelLinear::forward_on`](crate::RowParallelLinear::forward_on).
    ///
    /// # Errors
    ///
    /// The errors of [`forward_parts_on`](Self::forward_parts_on).
    pub fn forward_on(&self, comm: &Communicator, input: &Tensor) -> Result<Tensor> {
        match &self.forward_parts_on(comm, input)?[..] {
            [one] => Ok(one.clone()),
            parts => Tensor::cat(parts, D::Minus1),
        }
    }

    /// Computes what [`forward_parts`](Self::forward_parts) computes, but makes its calls on another communicator, like
    /// [`forward_on`](Self::forward_on).
    ///
    /// # Errors
    ///
    /// Fails if this rank's number or the world size in `comm` differs from that in the layer's own communicator. Also
    /// fails if [`all_gather`], the inner layer or candle fails.
    pub fn forward_parts_on(&self, comm: &Communicator, input: &Tensor) -> Result<Vec<Tensor>> {
        expect_same_part(&self.comm, comm)?;
        let input = match self.sequence {
            Some(dimension) => all_gather(comm, input, dimension)?,
            None => copy_to_ranks(comm, input)?,
        };
        let parts = self.divide(self.inner.forward(&input.contiguous()?)?)?;
        if !self.gathers {
            return Ok(parts);
        }
        parts.iter().map(|part| gather_from_ranks(comm, part, D::Minus1.to_index(part.shape(), "gathering")?)).collect()
    }

    /// Divides the outputs of the matrix into those of its layers.
    fn divide(&self, output: Tensor) -> Result<Vec<Tensor>> {
        if self.parts.is_empty() {
            return Ok(vec![output]);
        }
        let mut from = 0;
        let part = |own: &usize| {
            let part = output.narrow(D::Minus1, from, *own)?;
            from += own;
            Ok(part)
        };
        self.parts.iter().map(part).collect()
    }
}

impl<M: Module> Module for ColumnParallelLinear<M> {
    /// Returns the parts, concatenated along the last dimension.
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_on(&self.comm, input)
    }
}
