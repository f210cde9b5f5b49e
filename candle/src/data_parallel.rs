//! Averages candle's gradients over the ranks.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, Var, WithDType};
use collectives::{Communicator, bf16, f16};
use collectives_train::{Averaged, BucketLayout, DataParallel as Buckets, Flat, Float, Hook, Options, Parameter};

use crate::memory::extent;
use crate::{broadcast_in_place, failed};

/// Averages the gradients of a model's variables over the ranks, in buckets. This type is based on
/// [`collectives_train::DataParallel`].
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use collectives::Communicator;
/// use collectives_candle::DataParallel;
///
/// let weights = Communicator::run_local(2, |comm| {
///     let run = || -> candle_core::Result<Vec<f32>> {
///         let weight = Var::new(&[1.0_f32 + comm.rank() as f32], &Device::Cpu)?;
///         let mut model = DataParallel::new(comm, vec![weight.clone()])?; // all have rank 0's weight now
///         let input = Tensor::new(&[1.0_f32 + comm.rank() as f32], &Device::Cpu)?;
///         let mut gradients = (weight.as_tensor() * input)?.sum_all()?.backward()?;
///         model.average(&mut gradients)?;
///         weight.set(&(weight.as_tensor() - gradients.get(&weight).expect("averaged"))?)?;
///         weight.to_vec1()
///     };
///     Ok(run().expect("candle"))
/// })?;
/// assert_eq!(weights, [[-0.5], [-0.5]]);
/// # Ok::<(), collectives::Error>(())
/// ```
pub struct DataParallel {
    buckets: Buckets,
    variables: Vec<Var>,
}

impl DataParallel {
    /// Copies the values of rank 0's variables to all ranks, and creates the buckets, which take as much memory as the
    /// gradients. Collective.
    ///
    /// Variables must be contiguous and have the type `f32`, `f64`, `f16` or `bf16`. All variables must be in host
    /// memory, or all must be on the communicator's device.
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - The variables do not meet these requirements.
    /// - The ranks' variables differ in number, shape or type.
    /// - [`collectives_train::DataParallel::new`] or [`Communicator::broadcast`] fails.
    pub fn new(comm: &Communicator, variables: Vec<Var>) -> Result<Self> {
        Self::with_options(comm, variables, Options::default())
    }

    /// Copies the variables and creates the buckets like [`new`](Self::new), but with the given options: the bucket
    /// sizes, the op that combines gradients, and the treatment of missing gradients.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new). Also fails if the ranks' options differ, except in the weight of a `PreMulSum`,
    /// or if the op is not `Avg`, `Sum` or `PreMulSum`.
    pub fn with_options(comm: &Communicator, variables: Vec<Var>, options: Options) -> Result<Self> {
        let parameters: Result<Vec<Parameter>> =
            variables.iter().enumerate().map(|(number, variable)| parameter(number, variable)).collect();
        let buckets = match variables.first().map(|variable| variable.device()) {
            #[cfg(feature = "cuda")]
            Some(candle_core::Device::Cuda(device)) => {
                Buckets::on_device(comm, &device.cuda_stream(), parameters?, options).map_err(failed)?
            }
            _ => Buckets::new(comm, parameters?, options).map_err(failed)?,
        };
        variables.iter().try_for_each(|variable| broadcast_in_place(comm, variable, 0))?;
        Ok(Self { buckets, variables })
    }

    /// Replaces the hooks that average the buckets of type `T`, for example with
    /// [`Compress`](collectives_train::Compress) or [`PowerSgd`](collectives_train::PowerSgd). Calls `make` once for
    /// each of these buckets. Call `set_hooks` between two steps. The hooks of all ranks must make the same calls.
    ///
    /// ```
    /// # use candle_core::{Device, Var};
    /// # use collectives::{Communicator, ReduceOp, bf16};
    /// # use collectives_candle::DataParallel;
    /// # use collectives_train::Compress;
    /// let means = Communicator::run_local(2, |comm| {
    ///     let run = || -> candle_core::Result<Vec<f32>> {
    ///         let weight = Var::new(&[1.0_f32, 2.0], &Device::Cpu)?;
    ///         let mut model = DataParallel::new(comm, vec![weight.clone()])?;
    ///         model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg)?)))?; // half the bytes
    ///         let mut gradients = (weight.as_tensor() * (1.0 + comm.rank() as f64))?.backward()?;
    ///         model.average(&mut gradients)?;
    ///         gradients.get(&weight).expect("averaged").to_vec1()
    ///     };
    ///     Ok(run().expect("candle"))
    /// })?;
    /// assert_eq!(means, [[1.5, 1.5], [1.5, 1.5]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`collectives_train::DataParallel::set_hooks`]. An error of `make` may occur on this rank only.
    pub fn set_hooks<T: Float>(&mut self, make: impl FnMut(&BucketLayout) -> collectives::Result<Box<dyn Hook<T>>>) -> Result<()> {
        self.buckets.set_hooks(make).map_err(failed)
    }

    /// Adds the gradients of a backward pass to the gradients of this step, without communication. If a step
    /// has several backward passes, call `accumulate` after all passes except the last, and [`average`](Self::average)
    /// after the last pass. The result is a mean over ranks, but a sum over passes. For a mean over passes, divide each
    /// loss by the number of passes.
    ///
    /// Gradients of tensors that are not variables of this model are ignored. If a variable has no gradient in the last
    /// pass, its gradient is missing, even if earlier passes had one. By default, the step then fails on every rank.
    /// With [`Missing::Zeros`](collectives_train::Missing::Zeros) as [`Options::missing`], the step uses the sum of the
    /// earlier passes.
    ///
    /// ```
    /// # use candle_core::{Device, Var};
    /// # use collectives::Communicator;
    /// # use collectives_candle::DataParallel;
    /// let means = Communicator::run_local(2, |comm| {
    ///     let run = || -> candle_core::Result<Vec<f32>> {
    ///         let weight = Var::new(&[1.0_f32], &Device::Cpu)?;
    ///         let mut model = DataParallel::new(comm, vec![weight.clone()])?;
    ///         let loss = |sample: f64| (weight.as_tensor() * (sample / 2.0))?.sum_all(); // a mean over two passes
    ///         model.accumulate(&loss(1.0)?.backward()?)?; // without communication
    ///         let mut gradients = loss(2.0 + comm.rank() as f64)?.backward()?;
    ///         model.average(&mut gradients)?;
    ///         gradients.get(&weight).expect("averaged").to_vec1()
    ///     };
    ///     Ok(run().expect("candle"))
    /// })?;
    /// assert_eq!(means, [[1.75], [1.75]]); // the mean of 1, 2, 1 and 3
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Fails if a gradient does not match its variable, or if [`collectives_train::DataParallel::accumulate`] or candle
    /// fails. Only this rank gets these errors.
    pub fn accumulate(&mut self, gradients: &GradStore) -> Result<()> {
        for (number, variable) in self.variables.iter().enumerate() {
            if let Some(gradient) = gradients.get(variable) {
                accumulate(&mut self.buckets, number, &gradient.contiguous()?)?;
            }
        }
        Ok(())
    }

    /// Adds the gradient of a variable. `variable` is the variable's index in the list that was passed to
    /// [`new`](Self::new). This method copies the gradient. As soon as the gradient's bucket is full, the bucket is
    /// reduced in the background. If a model is differentiated layer by layer, averaging runs while the gradients of
    /// earlier layers are computed.
    ///
    /// # Errors
    ///
    /// Fails if there is no such variable, or if the gradient does not match the variable. Also fails if
    /// [`collectives_train::DataParallel::ready`] or candle fails.
    pub fn ready(&mut self, variable: usize, gradient: &Tensor) -> Result<()> {
        ready(&mut self.buckets, variable, &gradient.contiguous()?)
    }

    /// Ends a step and returns the mean gradient of each variable, in the order of the list that was passed to
    /// [`new`](Self::new). [`Options::missing`] determines what happens if a variable has no gradient. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`collectives_train::DataParallel::finish`] and of candle.
    pub fn finish(&mut self) -> Result<Vec<Tensor>> {
        self.finish_with(|_| Ok(())).map(|(means, ())| means)
    }

    /// Ends a step like [`finish`](Self::finish), but first calls `change` with the means, like
    /// [`average_with`](Self::average_with). Returns the mean gradients, and the result of `change`. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`finish`](Self::finish) and of `change`.
    pub fn finish_with<R>(&mut self, change: impl FnOnce(&mut Averaged<'_>) -> collectives::Result<R>) -> Result<(Vec<Tensor>, R)> {
        let mut means = self.buckets.finish().map_err(failed)?;
        let result = change(&mut means).map_err(failed)?;
        let tensors: Result<_> = self.variables.iter().enumerate().map(|(number, variable)| mean(&mut means, number, variable)).collect();
        Ok((tensors?, result))
    }

    /// Replaces each variable's gradient with its mean over all ranks. Calls [`ready`](Self::ready) for each variable,
    /// from the last variable to the first, and then [`finish`](Self::finish). Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`ready`](Self::ready) and [`finish`](Self::finish).
    pub fn average(&mut self, gradients: &mut GradStore) -> Result<()> {
        self.average_with(gradients, |_| Ok(()))
    }

    /// Averages gradients like [`average`](Self::average), but first calls `change` with the means. Use `change` to
    /// clip the gradients by their norm ([`Averaged::clip_norm`]), or to divide them by the scale of the loss
    /// ([`Averaged::unscale`]). Returns the result of `change`. Collective: all ranks must make the same changes, so
    /// that they keep the same gradients.
    ///
    /// ```
    /// # use candle_core::{Device, Var};
    /// # use collectives::Communicator;
    /// # use collectives_candle::DataParallel;
    /// let means = Communicator::run_local(2, |comm| {
    ///     let run = || -> candle_core::Result<_> {
    ///         let weight = Var::new(&[0.0_f32, 0.0], &Device::Cpu)?;
    ///         let mut model = DataParallel::new(comm, vec![weight.clone()])?;
    ///         let slope = candle_core::Tensor::new(&[6.0_f32 * comm.rank() as f32, 4.0], &Device::Cpu)?;
    ///         let mut gradients = (weight.as_tensor() * slope)?.backward()?;
    ///         let norm = model.average_with(&mut gradients, |means| means.clip_norm(1.0))?;
    ///         Ok((norm, gradients.get(&weight).expect("averaged").to_vec1::<f32>()?))
    ///     };
    ///     Ok(run().expect("candle"))
    /// })?;
    /// assert!(means.iter().all(|mean| *mean == (5.0, vec![0.6, 0.8]))); // the mean was [3, 4]
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// A step in `f16` scales the loss, and skips the optimiser if a gradient of any rank overflowed:
    ///
    /// ```
    /// # use candle_core::{Device, DType, Tensor, Var};
    /// # use candle_nn::{Optimizer, SGD};
    /// # use collectives::Communicator;
    /// # use collectives_candle::DataParallel;
    /// use collectives_train::LossScaler;
    ///
    /// # let weights = Communicator::run_local(2, |comm| {
    /// # let run = || -> Result<f32, Box<dyn std::error::Error>> {
    /// # let weight = Var::ones(1, DType::F16, &Device::Cpu)?;
    /// # let mut model = DataParallel::new(comm, vec![weight.clone()])?;
    /// # let mut optimizer = SGD::new(vec![weight.clone()], 0.5)?;
    /// let mut scaler = LossScaler::default();
    /// for _step in 0..3 {
    ///     let loss = (weight.as_tensor() * 0.25)?.sum_all()?;
    ///     let mut gradients = (loss * f64::from(scaler.scale()))?.backward()?;
    ///     model.average_with(&mut gradients, |means| {
    ///         means.unscale(&mut scaler)?;
    ///         means.clip_norm(1.0)
    ///     })?;
    ///     if scaler.update(comm)? {
    ///         optimizer.step(&gradients)?; // all ranks take the step, or none
    ///     }
    /// }
    /// assert_eq!(scaler.scale(), 32_768.0); // f16 cannot hold the first scale, so all ranks skipped the first step
    /// # Ok(weight.to_dtype(DType::F32)?.sum_all()?.to_scalar()?)
    /// # };
    /// # Ok(run().expect("candle")) })?;
    /// # assert_eq!(weights, [0.75; 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`average`](Self::average) and of `change`. After an error, `gradients` contains no gradients of
    /// the model's variables.
    pub fn average_with<R>(
        &mut self,
        gradients: &mut GradStore,
        change: impl FnOnce(&mut Averaged<'_>) -> collectives::Result<R>,
    ) -> Result<R> {
        for (number, variable) in self.variables.iter().enumerate().rev() {
            if let Some(gradient) = gradients.remove(variable) {
                ready(&mut self.buckets, number, &gradient.contiguous()?)?;
            }
        }
        let (means, result) = self.finish_with(change)?;
        for (variable, mean) in self.variables.iter().zip(means) {
            gradients.insert(variable, mean);
        }
        Ok(result)
    }
}

fn parameter(number: usize, variable: &Var) -> Result<Parameter> {
    let (name, shape) = (format!("variable {number}"), variable.dims());
    Ok(match variable.dtype() {
        DType::F32 => Parameter::new::<f32>(name, shape),
        DType::F64 => Parameter::new::<f64>(name, shape),
        DType::F16 => Parameter::new::<f16>(name, shape),
        DType::BF16 => Parameter::new::<bf16>(name, shape),
        other => candle_core::bail!("{name} is of {other:?}; gradients must be f32, f64, f16 or bf16"),
    })
}

/// Passes a gradient to the buckets. In host memory it is copied; for a large gradient, the copy itself becomes the
/// bucket and later the tensor of the mean.
fn ready(buckets: &mut Buckets, number: usize, gradient: &Tensor) -> Result<()> {
    let (storage, layout) = gradient.storage_and_layout();
    let (from, to) = extent(layout)?;
    let done = match &*storage {
        Storage::Cpu(CpuStorage::F32(elements)) => buckets.give(number, elements[from..to].to_vec()),
        Storage::Cpu(CpuStorage::F64(elements)) => buckets.give(number, elements[from..to].to_vec()),
        Storage::Cpu(CpuStorage::F16(elements)) => buckets.give(number, elements[from..to].to_vec()),
        Storage::Cpu(CpuStorage::BF16(elements)) => buckets.give(number, elements[from..to].to_vec()),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => return crate::cuda::ready(buckets, number, storage, (from, to), true),
        _ => candle_core::bail!("a gradient of {:?} on {:?} is not supported", gradient.dtype(), gradient.device()),
    };
    done.map_err(failed)
}

/// Adds a part of a gradient to the buckets.
fn accumulate(buckets: &mut Buckets, number: usize, gradient: &Tensor) -> Result<()> {
    let (storage, layout) = gradient.storage_and_layout();
    let (from, to) = extent(layout)?;
    let done = match &*storage {
        Storage::Cpu(CpuStorage::F32(elements)) => buckets.accumulate(number, &elements[from..to]),
        Storage::Cpu(CpuStorage::F64(elements)) => buckets.accumulate(number, &elements[from..to]),
        Storage::Cpu(CpuStorage::F16(elements)) => buckets.accumulate(number, &elements[from..to]),
        Storage::Cpu(CpuStorage::BF16(elements)) => buckets.accumulate(number, &elements[from..to]),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => return crate::cuda::ready(buckets, number, storage, (from, to), false),
        _ => candle_core::bail!("a gradient of {:?} on {:?} is not supported", gradient.dtype(), gradient.device()),
    };
    done.map_err(failed)
}

/// Returns a variable's mean gradient.
fn mean(means: &mut Averaged<'_>, number: usize, variable: &Var) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if variable.device().is_cuda() {
        let mean = variable.as_tensor().zeros_like()?;
        mean.inplace_op1(&crate::cuda::Mean(means, number))?;
        return Ok(mean);
    }
    match variable.dtype() {
        DType::F32 => taken::<f32>(means, number, variable),
        DType::F64 => taken::<f64>(means, number, variable),
        DType::F16 => taken::<f16>(means, number, variable),
        DType::BF16 => taken::<bf16>(means, number, variable),
        other => candle_core::bail!("the variable is of {other:?}; gradients must be f32, f64, f16 or bf16"),
    }
}

fn taken<T: Float + WithDType>(means: &mut Averaged<'_>, number: usize, variable: &Var) -> Result<Tensor> {
    let elements = means.take::<T>(number).and_then(Flat::into_vec).map_err(failed)?;
    Tensor::from_vec(elements, variable.shape(), variable.device())
}
