//! Linear layers whose inputs are split over the ranks.

use candle_core::{Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::var_builder::ShardedVarBuilder;
use collectives::{Communicator, ReduceOp};

use crate::function::reduce_scatter;
use crate::regions::{copy_to_ranks, reduce_from_ranks};
use crate::share::{expect, expect_same_part, part_of, shard, share};

/// A linear layer that takes this rank's share of the inputs. On every rank, an input of shape `[.., inputs / ranks]`
/// becomes an output of shape `[.., outputs]`.
///
/// The matrix multiplication is done by an inner layer `M`, which is a [`Linear`] unless you pass another module to
/// [`over`](Self::over).
#[derive(Debug, Clone)]
pub struct RowParallelLinear<M = Linear> {
    comm: Communicator,
    inner: M,
    bias: Option<Tensor>,
    sequence: Option<usize>,
}

impl RowParallelLinear {
    /// Creates the layer from this rank's weight and the whole bias. The weight has the shape `[outputs, inputs /
    /// ranks]`, and the bias has the shape `[outputs]`. The bias must be the same on every rank. Weight and bias may be
    /// variables.
    ///
    /// # Errors
    ///
    /// Fails if the weight is not a matrix, or if the bias has the wrong length.
    pub fn new(comm: &Communicator, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (outputs, _) = weight.dims2()?;
        bias.iter().try_for_each(|bias| expect("the bias", bias, &[outputs]))?;
        Self::over(comm, Linear::new(weight, None), bias)
    }

    /// Creates the layer from this rank's part of a whole layer.
    ///
    /// # Errors
    ///
    /// Fails if the inputs cannot be split equally.
    pub fn split(comm: &Communicator, whole: &Linear) -> Result<Self> {
        Self::new(comm, part_of(comm, "inputs", whole.weight(), 1)?, whole.bias().cloned())
    }

    /// Reads this rank's part of the tensor `weight` from files that contain the whole tensor. If the argument `bias`
    /// is true, also reads the whole tensor `bias`.
    ///
    /// # Errors
    ///
    /// Fails if the inputs cannot be split equally, or if candle fails.
    pub fn load(comm: &Communicator, inputs: usize, outputs: usize, bias: bool, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let own = share("inputs", comm, inputs)?;
        let weight = files.get_with_hints((outputs, own), "weight", shard(comm, 1))?;
        expect("weight", &weight, &[outputs, own])?;
        let bias = bias.then(|| files.get(outputs, "bias")).transpose()?;
        Self::new(comm, weight, bias)
    }

    /// Returns this rank's weight.
    #[must_use]
    pub fn weight(&self) -> &Tensor {
        self.inner.weight()
    }
}

impl<M: Module> RowParallelLinear<M> {
    /// Creates the layer from any module that multiplies by this rank's part of the weight, such as a quantised matrix.
    /// The module must not add a bias, because the outputs of all ranks are added up. The layer adds `bias`, of shape
    /// `[outputs]`, once, after the sum. The bias must be the same on every rank.
    ///
    /// ```
    /// use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use collectives_candle::{RowParallelLinear, run_local};
    ///
    /// let outputs = run_local(2, |comm| {
    ///     let part = Tensor::ones((2, 32), DType::F32, &Device::Cpu)?; // of a weight of shape 2 × 64
    ///     let part = QMatMul::from_qtensor(QTensor::quantize(&part, GgmlDType::Q8_0)?)?;
    ///     let layer = RowParallelLinear::over(comm, part, Some(Tensor::new(&[0.5_f32, 1.0], &Device::Cpu)?))?;
    ///     layer.forward(&Tensor::ones((1, 32), DType::F32, &Device::Cpu)?)?.to_vec2::<f32>()
    /// })?;
    /// // Numbers of 8 bits are only near to those that they stand for.
    /// assert!((outputs[1][0][0] - 64.5).abs() < 0.1 && (outputs[1][0][1] - 65.0).abs() < 0.1);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Fails if the bias is not a vector.
    pub fn over(comm: &Communicator, inner: M, bias: Option<Tensor>) -> Result<Self> {
        bias.iter().try_for_each(|bias| bias.dims1().map(drop))?;
        Ok(Self { comm: comm.clone(), inner, bias, sequence: None })
    }

    /// Returns the inner layer.
    #[must_use]
    pub fn inner(&self) -> &M {
        &self.inner
    }

    /// Returns the bias, if the layer has one.
    #[must_use]
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Makes the layer return only this rank's part of the output along a dimension. A [`reduce_scatter`] in the
    /// forward pass and an [`all_gather`](crate::all_gather) in the backward pass replace the all-reduce of the forward
    /// pass.
    ///
    /// The layers up to the next [column-parallel](crate::ColumnParallelLinear::sequence_parallel) layer then work on
    /// this rank's part. If these layers have weights that are the same on all ranks, such as the weights of a
    /// normalisation layer, pass these weights through [`copy_to_ranks`].
    #[must_use]
    pub fn sequence_parallel(mut self, dimension: usize) -> Self {
        self.sequence = Some(dimension);
        self
    }
    /// Computes what [`forward`](Module::forward) computes, but makes its calls on another communicator, in which this
    /// rank has the same number. Several threads can thus share the layer by reference or in an `Arc`: each thread
    /// passes its own [lane](Communicator::lane).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::Linear;
    /// use collectives_candle::{RowParallelLinear, run_local};
    ///
    /// let sums = run_local(2, |comm| {
    ///     let whole = Linear::new(Tensor::ones((1, 8), DType::F32, &Device::Cpu)?, None);
    ///     let (layer, input) = (RowParallelLinear::split(comm, &whole)?, Tensor::ones((1, 4), DType::F32, &Device::Cpu)?);
    ///     std::thread::scope(|scope| {
    ///         let on_lane = |number| {
    ///             let lane = comm.lane(number).map_err(std::io::Error::other)?;
    ///             layer.forward_on(&lane, &input)?.flatten_all()?.to_vec1::<f32>()
    ///         };
    ///         let threads = [0, 1].map(|number| scope.spawn(move || on_lane(number)));
    ///         threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<candle_core::Result<Vec<_>>>()
    ///     })
    /// })?;
    /// assert_eq!(sums, vec![vec![vec![8.0]; 2]; 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Fails if this rank's number or the world size in `comm` differs from that in the layer's own communicator. Also
    /// fails if [`Communicator::all_reduce`], the inner layer or candle fails.
    pub fn forward_on(&self, comm: &Communicator, input: &Tensor) -> Result<Tensor> {
        expect_same_part(&self.comm, comm)?;
        let sum = self.inner.forward(&input.contiguous()?)?;
        let (output, bias) = match self.sequence {
            // Each rank adds the bias to different rows, so its gradient is the sum over the ranks.
            Some(dimension) => {
                let bias = self.bias.as_ref().map(|bias| copy_to_ranks(comm, bias)).transpose()?;
                (reduce_scatter(comm, &sum, dimension, ReduceOp::Sum)?, bias)
            }
            None => (reduce_from_ranks(comm, &sum)?, self.bias.clone()),
        };
        match bias {
            Some(bias) => output.broadcast_add(&bias),
            None => Ok(output),
        }
    }
}

impl<M: Module> Module for RowParallelLinear<M> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_on(&self.comm, input)
    }
}
