//! Training steps on many ranks.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use collectives::{Communicator, ReduceOp};
use collectives_train::{LossScaler, Options};

use crate::calls::all_reduce;
use crate::data_parallel::DataParallel;
use crate::error::{Error, Result};

/// Trains a module; each rank processes a share of every batch. If all shares have the same number of samples, and the
/// loss is a mean over samples, training has the same result as in one process that trains on the whole batch, except
/// for rounding.
///
/// ```
/// use burn::nn::{LinearConfig, loss::{MseLoss, Reduction}};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use collectives::Communicator;
/// use collectives_burn::Trainer;
///
/// let losses = Communicator::run_local(2, |comm| {
///     let device = Device::default().autodiff();
///     let (mut trainer, mut model) = Trainer::new(comm, LinearConfig::new(1, 1).init(&device), SgdConfig::new().init()).expect("burn");
///     let mut losses = Vec::new();
///     for step in 0..50 {
///         let x = Tensor::<2>::from_data([[(step % 5) as f32 + comm.rank() as f32]], &device); // this rank's share
///         let loss = MseLoss::new().forward(model.forward(x.clone()), x * 2.0, Reduction::Mean);
///         let mean;
///         (model, mean) = trainer.step(0.02, model, loss).expect("burn");
///         losses.push(mean);
///     }
///     Ok((losses[0], losses[49]))
/// })?;
/// assert!(losses[0] == losses[1] && losses[0].1 < 0.5);
/// # Ok::<(), collectives::Error>(())
/// ```
pub struct Trainer {
    comm: Communicator,
    parallel: DataParallel,
    optimizer: ModuleOptimizer,
    clip_norm: Option<f64>,
    loss_scaler: Option<LossScaler>,
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Trainer").field("parallel", &self.parallel).finish_non_exhaustive()
    }
}

impl Trainer {
    /// Creates a trainer, and returns the module with rank 0's parameters. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::new`].
    pub fn new<M: Module>(comm: &Communicator, module: M, optimizer: ModuleOptimizer) -> Result<(Self, M)> {
        Self::with_options(comm, module, optimizer, Options::default())
    }

    /// Creates a trainer like [`new`](Self::new), but with the given options: the bucket sizes, the op that combines
    /// gradients, and the treatment of missing gradients.
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::with_options`].
    pub fn with_options<M: Module>(comm: &Communicator, module: M, optimizer: ModuleOptimizer, options: Options) -> Result<(Self, M)> {
        let (parallel, module) = DataParallel::with_options(comm, module, options)?;
        Ok((Self { comm: comm.clone(), parallel, optimizer, clip_norm: None, loss_scaler: None }, module))
    }

    /// Sets a limit for the norm of all gradients together. Later steps scale the averaged gradients down to this limit
    /// if their norm is larger. burn's own gradient clipping, in the configuration of an optimiser, clips each
    /// parameter separately. Every rank must set the same limit. Makes no collective call.
    ///
    /// # Errors
    ///
    /// Fails if the limit is not a positive number.
    pub fn set_clip_norm(&mut self, limit: f64) -> Result<()> {
        if !(limit > 0.0 && limit.is_finite()) {
            let reason = format!("the limit is {limit}; it must be a positive number");
            return Err(collectives::Error::argument("Trainer::set_clip_norm", reason).into());
        }
        self.clip_norm = Some(limit);
        Ok(())
    }

    /// Sets a loss scaler, for parameters of `f16`. Later steps multiply the loss by the scaler's scale before the
    /// backward pass, and divide the mean gradients by the scale. If a gradient of any rank is infinite or NaN, all
    /// ranks skip the optimiser, and the scale falls. Every rank must set a scaler with the same state. Makes no
    /// collective call.
    pub fn set_loss_scaler(&mut self, scaler: LossScaler) {
        self.loss_scaler = Some(scaler);
    }

    /// Returns the loss scaler, for example to read its scale, or to save its state in a checkpoint.
    pub fn loss_scaler(&self) -> Option<&LossScaler> {
        self.loss_scaler.as_ref()
    }

    /// Runs a backward pass, and adds its gradients to those of the next [`step`](Self::step). Makes no collective
    /// call. Gradients are summed over the passes. For a mean over passes, divide each loss by the number of passes.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use collectives::Communicator;
    /// use collectives_burn::Trainer;
    ///
    /// let losses = Communicator::run_local(2, |comm| {
    ///     let device = Device::default().autodiff();
    ///     let (mut trainer, mut model) = Trainer::new(comm, LinearConfig::new(1, 1).init(&device), SgdConfig::new().init()).expect("burn");
    ///     trainer.set_clip_norm(10.0).expect("positive");
    ///     let mut mean = f64::NAN;
    ///     for _step in 0..60 {
    ///         let half = |x: f32| (model.forward(Tensor::<2>::from_data([[x]], &device)) - x).powi_scalar(2).sum() / 2.0;
    ///         let (first, last) = (half(1.0), half(2.0 + comm.rank() as f32));
    ///         trainer.accumulate(&model, first).expect("burn");
    ///         (model, mean) = trainer.step(0.05, model, last).expect("burn");
    ///     }
    ///     Ok(mean)
    /// })?;
    /// assert!(losses[0] == losses[1] && losses[0] < 0.1, "{losses:?}");
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Fails if the loss has no backward pass, or if [`DataParallel::accumulate`] fails. Only this rank gets the error.
    pub fn accumulate<M: Module>(&mut self, module: &M, loss: Tensor<1>) -> Result<()> {
        let gradients = self.backward("Trainer::accumulate", module, loss)?;
        self.parallel.accumulate(module, gradients)
    }

    /// Runs the backward pass of a loss, multiplied by the scale if there is one.
    fn backward<M: Module>(&self, call: &str, module: &M, loss: Tensor<1>) -> Result<GradientsParams> {
        if !loss.is_tracked() {
            return Err(Error::shape(call, "the loss has no backward pass: create the module on `Device::autodiff`"));
        }
        let scaled = self.loss_scaler.as_ref().map_or_else(|| loss.clone(), |scaler| loss.clone().mul_scalar(scaler.scale()));
        Ok(GradientsParams::from_grads(scaled.backward(), module))
    }

    /// Runs a step: the backward pass of this rank's loss, the mean of all ranks' gradients, and the optimiser's
    /// update. Returns the updated module and the mean of all ranks' losses. If a loss scaler finds an overflow, the
    /// module stays unchanged. Collective.
    ///
    /// # Errors
    ///
    /// Fails if the loss is not `f32`, `f64`, `f16` or `bf16`, or if [`DataParallel::average`] or
    /// [`LossScaler::update`] fails. An error consumes the module, so keep a clone of the module if you want to continue
    /// after an error.
    pub fn step<M: Module>(&mut self, learning_rate: f64, module: M, loss: Tensor<1>) -> Result<(M, f64)> {
        let gradients = self.backward("Trainer::step", &module, loss.clone())?;
        let Self { comm, parallel, optimizer, clip_norm, loss_scaler } = self;
        let (gradients, ()) = parallel.average_with(&module, gradients, |means| {
            loss_scaler.as_mut().map_or(Ok(()), |scaler| means.unscale(scaler))?;
            clip_norm.map_or(Ok(()), |limit| means.clip_norm(limit).map(|_| ()))
        })?;
        let takes_step = loss_scaler.as_mut().map_or(Ok(true), |scaler| scaler.update(comm))?;
        let mean = all_reduce(comm, loss.inner().mean(), ReduceOp::Avg)?;
        let mean = mean.try_into_data().map_err(|error| Error::burn("the loss", format!("{error:?}")))?;
        let mean = mean.iter::<f64>().next().unwrap_or(f64::NAN);
        Ok((if takes_step { optimizer.step(learning_rate, module, gradients) } else { module }, mean))
    }

    /// Returns the [`DataParallel`] that averages the gradients, for example to set hooks that compress them
    /// ([`DataParallel::set_hooks`]).
    pub fn data_parallel_mut(&mut self) -> &mut DataParallel {
        &mut self.parallel
    }

    /// Returns the optimiser with its state, for a checkpoint. The state is the same on every rank.
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// Returns a mutable reference to the optimiser, so that its state can be loaded. Load the same state on every
    /// rank.
    pub fn optimizer_mut(&mut self) -> &mut ModuleOptimizer {
        &mut self.optimizer
    }
}
