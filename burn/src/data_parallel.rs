//! Gives all ranks the same parameters, and averages their gradients.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, kind::Basic};
use collectives::{Communicator, bf16, f16};
use collectives_train::{Averaged, BucketLayout, DataParallel as Buckets, Flat, Float, Hook, Options};

use crate::calls::broadcast;
use crate::error::{Error, Result};
use crate::parameters::{Path, Trained, trained};

/// Averages the gradients of a module over the ranks, in buckets. This type is based on
/// [`collectives_train::DataParallel`].
///
/// ```
/// use burn::module::Module as _;
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Tensor};
/// use collectives::Communicator;
/// use collectives_burn::DataParallel;
///
/// let weights = Communicator::run_local(2, |comm| {
///     let device = Device::default().autodiff();
///     let mut optimizer = SgdConfig::new().init();
///     // Weights are random at first. Now all ranks have rank 0's.
///     let (mut parallel, model) = DataParallel::new(comm, LinearConfig::new(3, 1).init(&device)).expect("burn");
///     let input = Tensor::<2>::ones([1, 3], &device) * (1.0 + comm.rank() as f32);
///     let gradients = GradientsParams::from_grads(model.forward(input).sum().backward(), &model);
///     let gradients = parallel.average(&model, gradients).expect("burn");
///     let model = optimizer.step(0.1, model, gradients);
///     Ok(model.weight.val().into_data().try_into_vec::<f32>().expect("f32"))
/// })?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), collectives::Error>(())
/// ```
pub struct DataParallel {
    buckets: Buckets,
    numbers: HashMap<ParamId, usize>,
}

impl std::fmt::Debug for DataParallel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("DataParallel").field("parameters", &self.numbers.len()).finish_non_exhaustive()
    }
}

impl DataParallel {
    /// Copies rank 0's parameters to all ranks and creates the buckets, which take as much host memory as the
    /// gradients. Values without a gradient, such as a frozen parameter or a running mean, are also copied, but later
    /// steps do not average them. Collective.
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - The parameters in the ranks' modules differ in number, name, shape or type. The error names the first
    ///   difference.
    /// - A parameter is not `f32`, `f64`, `f16` or `bf16`.
    /// - [`collectives_train::DataParallel::new`] or [`Communicator::broadcast`] fails.
    pub fn new<M: Module>(comm: &Communicator, module: M) -> Result<(Self, M)> {
        Self::with_options(comm, module, Options::default())
    }

    /// Copies the parameters and creates the buckets like [`new`](Self::new), but with the given options: the bucket
    /// sizes, the op that combines gradients, and the treatment of missing gradients.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new). Also fails if the ranks' options differ, except in the weight of a `PreMulSum`,
    /// or if the op is not `Avg`, `Sum` or `PreMulSum`.
    pub fn with_options<M: Module>(comm: &Communicator, module: M, options: Options) -> Result<(Self, M)> {
        let all = trained(&module);
        let parameters = all.iter().map(Trained::described).collect::<Result<_>>()?;
        // Compares the parameters of all ranks.
        let buckets = Buckets::new(comm, parameters, options)?;
        let numbers = all.iter().enumerate().map(|(number, parameter)| (parameter.id, number)).collect();
        Ok((Self { buckets, numbers }, broadcast_parameters(comm, module, 0)?))
    }

    /// Replaces the hooks that average the buckets of type `T`, for example with
    /// [`Compress`](collectives_train::Compress) or [`PowerSgd`](collectives_train::PowerSgd). Calls `make` once for
    /// each of these buckets. Call `set_hooks` between two steps. The hooks of all ranks must make the same calls.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use collectives::{Communicator, ReduceOp, bf16};
    /// use collectives_burn::DataParallel;
    /// use collectives_train::Compress;
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let model = LinearConfig::new(3, 1).init(&Device::default().autodiff());
    ///     let (mut parallel, _model) = DataParallel::new(comm, model).expect("burn");
    ///     let hooks = parallel.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg)?)));
    ///     hooks.expect("between two steps"); // now half as many bytes are sent
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`collectives_train::DataParallel::set_hooks`]. An error of `make` may occur on this rank only.
    pub fn set_hooks<T: Float>(&mut self, make: impl FnMut(&BucketLayout) -> collectives::Result<Box<dyn Hook<T>>>) -> Result<()> {
        Ok(self.buckets.set_hooks(make)?)
    }

    /// Adds the gradients of a backward pass to the gradients of this step, without communication. If a step
    /// has several backward passes, call `accumulate` after all passes except the last, and [`average`](Self::average)
    /// after the last pass. The result is a mean over ranks, but a sum over passes. For a mean over passes, divide each
    /// loss by the number of passes.
    ///
    /// If a parameter has no gradient in the last pass, its gradient is missing, even if earlier passes had one. By
    /// default, the step then fails on every rank. With [`Missing::Zeros`](collectives_train::Missing::Zeros) as
    /// [`Options::missing`], the step uses the sum of the earlier passes.
    ///
    /// # Errors
    ///
    /// Fails if a gradient does not fit its parameter, or if [`collectives_train::DataParallel::accumulate`] fails. Only
    /// this rank gets these errors.
    pub fn accumulate<M: Module>(&mut self, module: &M, gradients: GradientsParams) -> Result<()> {
        self.pass(module, gradients, false).map(|_| ())
    }

    /// Replaces this rank's gradients with the mean of all ranks' gradients. Call this method between the backward pass
    /// and the optimiser's step. To add up the gradients of several backward passes, call
    /// [`accumulate`](Self::accumulate) first. [`Options::missing`] determines what happens if a parameter has no
    /// gradient. Collective.
    ///
    /// If a gradient is not in host memory, it is copied to the host, and its mean is copied back.
    ///
    /// # Errors
    ///
    /// Fails if a gradient does not fit its parameter, or if [`collectives_train::DataParallel::finish`] fails.
    pub fn average<M: Module>(&mut self, module: &M, gradients: GradientsParams) -> Result<GradientsParams> {
        self.average_with(module, gradients, |_| Ok(())).map(|(gradients, ())| gradients)
    }

    /// Averages gradients like [`average`](Self::average), but first calls `change` with the means. Use `change` to
    /// clip the gradients by their norm ([`Averaged::clip_norm`]), or to divide them by the scale of the loss
    /// ([`Averaged::unscale`]). Returns the gradients and the result of `change`. Collective: all ranks must make the
    /// same changes, so that they keep the same gradients.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Device, Tensor};
    /// use collectives::Communicator;
    /// use collectives_burn::DataParallel;
    ///
    /// let slopes = Communicator::run_local(2, |comm| {
    ///     let device = Device::default().autodiff();
    ///     let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
    ///     let (mut parallel, model) = DataParallel::new(comm, model).expect("burn");
    ///     let input = Tensor::<2>::from_data([[6.0 * comm.rank() as f32, 4.0]], &device);
    ///     let gradients = GradientsParams::from_grads(model.forward(input).sum().backward(), &model);
    ///     let averaged = parallel.average_with(&model, gradients, |means| means.clip_norm(1.0));
    ///     let (gradients, norm) = averaged.expect("burn");
    ///     let slope = gradients.get::<2>(model.weight.id).expect("it has one");
    ///     Ok((norm, slope.into_data().try_into_vec::<f32>().expect("f32")))
    /// })?;
    /// assert!(slopes.iter().all(|slope| *slope == (5.0, vec![0.6, 0.8]))); // the mean was [3, 4]
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`average`](Self::average) and of `change`.
    pub fn average_with<M: Module, R>(
        &mut self,
        module: &M,
        gradients: GradientsParams,
        change: impl FnOnce(&mut Averaged<'_>) -> collectives::Result<R>,
    ) -> Result<(GradientsParams, R)> {
        let gradients = self.pass(module, gradients, true)?;
        let mut means = self.buckets.finish()?;
        let result = change(&mut means)?;
        let mut take = Take { means, numbers: &self.numbers, gradients, outcome: Ok(()) };
        module.visit(&mut take);
        let Take { gradients, outcome, .. } = take;
        outcome.map(|()| (gradients, result))
    }

    /// Passes gradients to the buckets, and returns the gradients of other parameters.
    fn pass<M: Module>(&mut self, module: &M, gradients: GradientsParams, last: bool) -> Result<GradientsParams> {
        let mut give = Give { buckets: &mut self.buckets, numbers: &self.numbers, gradients, last, outcome: Ok(()) };
        module.visit(&mut give);
        let Give { gradients, outcome, .. } = give;
        outcome.map(|()| gradients)
    }
}

/// A visitor that passes the gradients to the buckets.
struct Give<'a> {
    buckets: &'a mut Buckets,
    numbers: &'a HashMap<ParamId, usize>,
    gradients: GradientsParams,
    /// Whether this is the last backward pass of the step.
    last: bool,
    outcome: Result<()>,
}

impl Give<'_> {
    fn give<const D: usize>(&mut self, number: usize, gradient: Tensor<D>) -> Result<()> {
        let what = || format!("the gradient of parameter {number}");
        let data = gradient.try_into_data().map_err(|error| Error::burn(&what(), format!("{error:?}")))?;
        match data.dtype() {
            DType::F32 => given::<f32>(self.buckets, number, data, self.last),
            DType::F64 => given::<f64>(self.buckets, number, data, self.last),
            DType::F16 => given::<f16>(self.buckets, number, data, self.last),
            DType::BF16 => given::<bf16>(self.buckets, number, data, self.last),
            dtype => Err(Error::Type { what: what(), dtype }),
        }
    }
}

impl ModuleVisitor for Give<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&number) = self.numbers.get(&param.id).filter(|_| self.outcome.is_ok()) else { return };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.outcome = self.give(number, gradient);
        }
    }
}

fn given<T: Float + burn::tensor::Element>(buckets: &mut Buckets, number: usize, data: TensorData, last: bool) -> Result<()> {
    let elements =
        data.try_into_vec::<T>().map_err(|error| Error::burn(&format!("the gradient of parameter {number}"), format!("{error:?}")))?;
    Ok(if last { buckets.give(number, elements) } else { buckets.accumulate(number, &elements) }?)
}

/// A visitor that takes the means out of the buckets.
struct Take<'a, 'b> {
    means: Averaged<'b>,
    numbers: &'a HashMap<ParamId, usize>,
    gradients: GradientsParams,
    outcome: Result<()>,
}

impl ModuleVisitor for Take<'_, '_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&number) = self.numbers.get(&param.id).filter(|_| self.outcome.is_ok()) else { return };
        let parameter = param.val().inner();
        let mean = match parameter.dtype() {
            DType::F32 => taken::<f32, D>(&mut self.means, number, &parameter),
            DType::F64 => taken::<f64, D>(&mut self.means, number, &parameter),
            DType::F16 => taken::<f16, D>(&mut self.means, number, &parameter),
            DType::BF16 => taken::<bf16, D>(&mut self.means, number, &parameter),
            dtype => Err(Error::Type { what: format!("parameter {number}"), dtype }),
        };
        self.outcome = mean.map(|mean| self.gradients.register(param.id, mean));
    }
}

fn taken<T, const D: usize>(means: &mut Averaged<'_>, number: usize, parameter: &Tensor<D>) -> Result<Tensor<D>>
where
    T: Float + burn::tensor::Element,
{
    let elements = means.take::<T>(number).and_then(Flat::into_vec)?;
    let (device, dtype) = (parameter.device(), parameter.dtype());
    Ok(Tensor::from_data(TensorData::new(elements, parameter.dims()), (&device, dtype)))
}

/// Copies the root's parameters to every rank, and returns the module with these parameters. Parameters without a
/// gradient are copied too. Collective: makes one call for each parameter. The modules must have the same structure on
/// all ranks. [`DataParallel::new`] compares the parameters that have a gradient before it calls this function.
///
/// # Errors
///
/// Fails if a parameter has a type that `collectives` does not support, or if [`Communicator::broadcast`] fails.
pub fn broadcast_parameters<M: Module>(comm: &Communicator, module: M, root: usize) -> Result<M> {
    let mut mapper = Broadcast { comm, root, path: Path::default(), outcome: Ok(()) };
    let module = module.map(&mut mapper);
    mapper.outcome.map(|()| module)
}

/// A mapper that gives every parameter the root's values.
struct Broadcast<'a> {
    comm: &'a Communicator,
    root: usize,
    path: Path,
    outcome: Result<()>,
}

impl Broadcast<'_> {
    fn received<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        if self.outcome.is_err() {
            return tensor;
        }
        match broadcast(self.comm, tensor.clone(), self.root) {
            Ok(received) => received,
            Err(error) => {
                let error = match error {
                    Error::Type { dtype, .. } => Error::Type { what: self.path.name(), dtype },
                    error => error,
                };
                self.outcome = Err(error);
                tensor
            }
        }
    }
}

impl ModuleMapper for Broadcast<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let has_gradient = tensor.is_require_grad();
            self.received(tensor).set_require_grad(has_gradient)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| self.received(tensor))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|tensor| self.received(tensor.int()).bool())
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.leave();
    }
}
