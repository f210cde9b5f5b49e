//! Training steps on many ranks.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use collectives::{Communicator, ReduceOp};
use collectives_train::Options;

use crate::calls::all_reduce;
use crate::data_parallel::DataParallel;
use crate::error::{Error, Result};

/// Trains a module; each rank processes a share of every batch. Assume that all shares have the same number of samples
/// and that the loss is a mean over samples. Then training has the same result as one process that trains on the whole
/// batch, except for rounding.
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
        Ok((Self { comm: comm.clone(), parallel, optimizer }, module))
    }

    /// Runs a step: the backward pass of this rank's loss, the mean of all ranks' gradients, and the optimiser's
    /// update. Returns the updated module and the mean of all ranks' losses. Collective.
    ///
    /// # Errors
    ///
    /// Fails if the loss is not `f32`, `f64`, `f16` or `bf16`, or if [`DataParallel::average`] fails. An error consumes
    /// the module, so keep a clone of the module if you want to continue after an error.
    pub fn step<M: Module>(&mut self, learning_rate: f64, module: M, loss: Tensor<1>) -> Result<(M, f64)> {
        if !loss.is_tracked() {
            return Err(Error::shape("Trainer::step", "the loss has no backward pass: create the module on `Device::autodiff`"));
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        let gradients = self.parallel.average(&module, gradients)?;
        let mean = all_reduce(&self.comm, loss.inner().mean(), ReduceOp::Avg)?;
        let mean = mean.try_into_data().map_err(|error| Error::burn("the loss", format!("{error:?}")))?;
        let mean = mean.iter::<f64>().next().unwrap_or(f64::NAN);
        Ok((self.optimizer.step(learning_rate, module, gradients), mean))
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
