//! Shards the parameters of a candle model over the ranks (ZeRO, stages 2 and 3).

mod agreement;
mod operation;
mod state;
mod unit;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use collectives::Communicator;
use collectives_train::{FullyShardedOptions, ReducedGradients};

use crate::failed;
use agreement::{Outcome, agree, together};
use operation::UnitPass;
use state::State;
use unit::Described;

pub use unit::Unit;

/// Keeps a shard of a model's parameters on each rank, and gathers the parameters of a unit only while the unit
/// computes. On n ranks, each rank keeps one n-th of the parameters, of their gradients and of the optimiser's state.
/// This is ZeRO stage 3, like torch's `FullyShardedDataParallel`. This type is based on
/// [`collectives_train::FullySharded`].
///
/// List the [units](Unit) in the order of the forward pass. [`forward`](Self::forward) runs a unit as one operation of
/// candle's graph, so you write the rest of the training loop as usual. The optimiser updates this rank's shards:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{AdamW, Optimizer};
/// use collectives::Communicator;
/// use collectives_candle::{FullySharded, Unit};
/// use collectives_train::FullyShardedOptions;
///
/// let losses = Communicator::run_local(2, |comm| {
///     let run = || -> candle_core::Result<f32> {
///         let mut units = vec![Unit::new("input", |vb| candle_nn::linear(2, 16, vb))];
///         units.push(Unit::new("output", |vb| {
///             let linear = candle_nn::linear(16, 1, vb)?;
///             Ok(move |x: &Tensor| candle_core::Module::forward(&linear, &x.tanh()?))
///         }));
///         let model = FullySharded::new(comm, units, DType::F32, FullyShardedOptions::default())?;
///         let mut optimizer = AdamW::new_lr(model.variables()?, 0.05)?; // state for this rank's shards only
///         let input = Tensor::new(&[[1.0_f32, comm.rank() as f32], [0.0, 1.0]], &Device::Cpu)?; // this rank's samples
///         let target = input.sum_keepdim(1)?;
///         let mut last = f32::NAN;
///         for _step in 0..100 {
///             let hidden = model.forward(0, &input)?; // gathers the unit, computes, and releases the unit
///             let loss = candle_nn::loss::mse(&model.forward(1, &hidden)?, &target)?;
///             loss.backward()?; // gathers each unit again, and reduces its gradients to shards
///             model.step(&mut optimizer)?; // updates this rank's shards
///             last = loss.to_scalar()?;
///         }
///         Ok(last)
///     };
///     Ok(run().expect("candle"))
/// })?;
/// assert!(losses.iter().all(|loss| *loss < 0.01), "{losses:?}");
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// **Recomputation.** candle's graph would keep all parameters until the backward pass. So the graph contains only each
/// unit's input and output, and the backward pass runs the unit's forward pass again. A unit's module must compute the
/// same values both times: its result must not depend on random numbers or on a state that changes. A training step
/// computes about one third more than without recomputation, and also keeps fewer activations.
///
/// **Several backward passes** before a step add their gradients to the shards. Each pass reduces its gradients over
/// the ranks. For a mean over passes, divide each loss by the number of passes. If a forward pass uses a unit several
/// times, for example an embedding that is also the output layer, the gradients of all uses are added up too.
///
/// **Optimisers.** [`variables`](Self::variables) returns a flat variable with this rank's shard of each unit. So the
/// optimiser must update each element independently of the others, as SGD and AdamW do. An optimiser that uses the
/// shape of a parameter, or the norm of its gradient, gives other results than on one rank.
///
/// **Order.** Every rank must call [`forward`](Self::forward) for the same units in the same order, and run the same
/// backward passes. If a unit's module fails or panics on one rank only, the other ranks wait for the failing rank
/// until it closes its communicator, or until the timeout.
///
/// **Memory.** Parameters must be in host memory. For N parameters of m bytes on n ranks, each rank keeps 3·m·N/n bytes
/// between two steps: the shards, a copy of them in the optimiser's variables, and their gradients. Add the optimiser's
/// state, which is 2·m·N/n for AdamW. During [`step`](Self::step), add another copy of the gradients. While a unit of L
/// elements computes, a rank needs at most five times the unit's size in addition, with the default options: for
/// buffers of two units that are gathered, buffers of two units that are reduced, and the module's own parameters. The
/// gradients of the module's parameters need m·L bytes more. [`memory_bytes`](Self::memory_bytes) counts the buffers
/// and the variables.
///
/// **Types.** Parameters can be `f32`, `f64`, `f16` or `bf16`. With
/// [`FullyShardedOptions::gather_type`](collectives_train::FullyShardedOptions::gather_type), modules compute with
/// parameters of that type, while the shards and the optimiser keep the type of the parameters.
#[doc(alias("FullyShardedDataParallel", "fully_shard", "FSDP", "ZeRO"))]
pub struct FullySharded(Arc<Shared>);

/// What the graph's operations share with the model.
struct Shared {
    comm: Communicator,
    units: Vec<Described>,
    /// The type in which each unit is gathered.
    types: Vec<DType>,
    /// A variable without a meaning. With it, every unit is a part of the graph, even if its input has no gradient.
    root: Var,
    state: Mutex<State>,
}

impl FullySharded {
    /// Makes the shards of a model, with rank 0's initial values. `dtype` is the type of the parameters. The initial
    /// values are made unit by unit, so no rank ever has the whole model in memory. Collective.
    ///
    /// # Errors
    ///
    /// Fails on every rank in these cases:
    ///
    /// - A unit's module cannot be made on a rank, or asks for other parameters when it is made again.
    /// - A parameter is not `f32`, `f64`, `f16` or `bf16`, or a unit has parameters of several types.
    /// - The ranks' units, shapes, types or options differ. The error names the first difference.
    /// - [`collectives_train::FullySharded::new`] fails.
    pub fn new(comm: &Communicator, units: Vec<Unit>, dtype: DType, options: FullyShardedOptions) -> Result<Self> {
        let described = units.into_iter().map(|unit| unit.described(dtype)).collect::<Result<Vec<_>>>();
        let listed = described.and_then(|units| Ok((units.iter().map(Described::listed).collect::<Result<Vec<_>>>()?, units)));
        let (listed, units) = together(comm, "FullySharded::new: a unit's module", listed)?;
        let gather_type = options.gather_type;
        let model = collectives_train::FullySharded::new(comm, listed, options).map_err(failed)?;
        let types = units.iter().map(|unit| gather_type.and_then(candle_type).unwrap_or(unit.dtype)).collect();
        let state = Mutex::new(State::new(comm, model, &units, dtype)?);
        let root = Var::zeros((), DType::F32, &Device::Cpu)?;
        Ok(Self(Arc::new(Shared { comm: comm.clone(), units, types, root, state })))
    }

    /// Runs a unit on an input. Gathers the unit's parameters, starts to gather the parameters of the next unit,
    /// computes, and releases the unit's parameters. The result is part of candle's graph: its backward pass gathers
    /// the parameters again, computes the gradients, and starts to reduce them to the ranks' shards. Collective, like
    /// the backward pass.
    ///
    /// `unit` is the unit's index in the list that was passed to [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// Fails if there is no such unit, if the unit's module fails, or if the gather fails. The backward pass also fails
    /// if the parameters were updated after the forward pass.
    pub fn forward(&self, unit: usize, input: &Tensor) -> Result<Tensor> {
        let model = &self.0;
        let (parameters, updates) = {
            let mut state = model.state()?;
            let described = model.unit(unit)?;
            state.enter(unit)?;
            (state.gather(unit, described, model.types[unit], false)?, state.updates())
        };
        let output = model.units[unit].run(&parameters, model.types[unit], &input.detach())?.detach().contiguous()?;
        drop(parameters);
        input.apply_op2(&model.root, UnitPass { model: Arc::clone(model), unit, updates, output: Mutex::new(Some(output)) })
    }

    /// Returns this rank's shard of each unit that has parameters, as a flat variable, for an optimiser. Elements after
    /// the last parameter are zeros. Change the variables only in [`step`](Self::step).
    ///
    /// # Errors
    ///
    /// Fails if an earlier step has failed.
    pub fn variables(&self) -> Result<Vec<Var>> {
        Ok(self.0.state()?.variables())
    }

    /// Ends a step: waits for this rank's shards of all gradients, and runs the optimiser on
    /// [`variables`](Self::variables). Collective.
    ///
    /// # Errors
    ///
    /// Fails on every rank if the optimiser fails or panics on a rank. No step can follow: continue from a checkpoint.
    /// The call also returns the errors of [`collectives_train::FullySharded::reduce`].
    pub fn step<O: Optimizer>(&self, optimizer: &mut O) -> Result<()> {
        self.step_with(optimizer, |_| Ok(true)).map(|_| ())
    }

    /// Ends a step like [`step`](Self::step), but first calls `change` with this rank's shards of the gradients. Use
    /// `change` to clip the gradients ([`ReducedGradients::clip_norm`]), to divide them by the scale of the loss
    /// ([`ReducedGradients::unscale`]), or to reduce them over replicas ([`ReducedGradients::reduce_over`]). Replicas
    /// must begin with the same parameters: see [`set_tensors`](Self::set_tensors). If `change` returns `false`, the
    /// step is skipped: the optimiser does not run. Returns whether the optimiser has run. Collective: all ranks must
    /// make the same changes and the same decision.
    ///
    /// ```
    /// # use candle_core::{Device, DType, Tensor};
    /// # use candle_nn::{Optimizer, SGD};
    /// # use collectives::Communicator;
    /// # use collectives_candle::{FullySharded, Unit};
    /// # use collectives_train::{FullyShardedOptions, LossScaler};
    /// # Communicator::run_local(2, |comm| {
    /// # let run = || -> candle_core::Result<()> {
    /// # let unit = Unit::new("linear", |vb| candle_nn::linear(3, 1, vb));
    /// # let model = FullySharded::new(comm, vec![unit], DType::F32, FullyShardedOptions::default())?;
    /// # let mut optimizer = SGD::new(model.variables()?, 0.5)?;
    /// # let (mut scaler, input) = (LossScaler::default(), Tensor::ones((2, 3), DType::F32, &Device::Cpu)?);
    /// let loss = model.forward(0, &input)?.sqr()?.mean_all()?;
    /// (loss * f64::from(scaler.scale()))?.backward()?;
    /// let taken = model.step_with(&mut optimizer, |gradients| {
    ///     gradients.unscale(&mut scaler)?;
    ///     gradients.clip_norm(1.0)?;
    ///     scaler.update(comm) // false on all ranks if a gradient of any rank overflowed
    /// })?;
    /// assert!(taken);
    /// # Ok(()) };
    /// # Ok(run().expect("candle")) })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`step`](Self::step) and of `change`. Also fails on every rank if `change` fails on a rank, or
    /// returns `false` on some ranks only. No step can follow.
    pub fn step_with<O: Optimizer>(
        &self,
        optimizer: &mut O,
        change: impl FnOnce(&mut ReducedGradients<'_>) -> collectives::Result<bool>,
    ) -> Result<bool> {
        let mut state = self.0.state()?;
        // The other ranks must also learn of a panic, or they would wait.
        let own = catch_unwind(AssertUnwindSafe(|| state.update(&self.0.root, optimizer, change)));
        let outcome = match own {
            Ok(Ok(true)) => Outcome::Done,
            Ok(Ok(false)) => Outcome::Skipped,
            _ => Outcome::Failed,
        };
        let agreed = agree(&self.0.comm, "FullySharded::step", outcome);
        state.has_failed = outcome == Outcome::Failed || agreed.is_err();
        let taken = own.unwrap_or_else(|panic| resume_unwind(panic))?;
        agreed.map(|()| taken)
    }

    /// Returns a unit's whole parameters by their full names: the unit's name, a dot and the parameter's name. Use this
    /// call to save a model, unit by unit. The values have the type of the parameters. Collective: makes one all-gather.
    ///
    /// # Errors
    ///
    /// Fails if there is no such unit, or if [`Communicator::all_gather`] fails.
    pub fn tensors(&self, unit: usize) -> Result<HashMap<String, Tensor>> {
        self.0.state()?.tensors(unit, self.0.unit(unit)?)
    }

    /// Replaces a unit's parameters, for example with values from a file. `values` must have a value for each name that
    /// [`tensors`](Self::tensors) returns; other values are ignored. Every rank must pass the same values. Makes no
    /// collective call. The optimiser keeps its state.
    ///
    /// # Errors
    ///
    /// Fails if there is no such unit, or if a value is missing or has another shape or type. The parameters then stay
    /// unchanged.
    pub fn set_tensors(&self, unit: usize, values: &HashMap<String, Tensor>) -> Result<()> {
        self.0.state()?.set_tensors(unit, self.0.unit(unit)?, values)
    }

    /// Returns the size in bytes of the buffers and variables that this rank has now. See **Memory** in the description
    /// of this type.
    ///
    /// # Errors
    ///
    /// Fails if an earlier step has failed.
    pub fn memory_bytes(&self) -> Result<usize> {
        Ok(self.0.state()?.memory_bytes())
    }
}

impl Shared {
    /// Locks the state. Never waits: the closures of the caller run while `step_with` has the state.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) if state.has_failed => {
                candle_core::bail!("a step of this sharded model failed, so the ranks' shards may be from different steps")
            }
            Ok(state) => Ok(state),
            Err(TryLockError::WouldBlock) => {
                candle_core::bail!("the sharded model is in use by another thread, or by the step that called this closure")
            }
            Err(TryLockError::Poisoned(_)) => candle_core::bail!("a call on this sharded model panicked"),
        }
    }

    fn unit(&self, unit: usize) -> Result<&Described> {
        match self.units.get(unit) {
            Some(described) => Ok(described),
            None => candle_core::bail!("there is no unit {unit}: the model has {} units, numbered from 0", self.units.len()),
        }
    }

    /// Runs a unit's backward pass, and returns the gradient of the input, unless the input has integers.
    fn backward(&self, unit: usize, updates: u64, input: &Tensor, slope: &Tensor) -> Result<Option<Tensor>> {
        let (described, dtype) = (self.unit(unit)?, self.types[unit]);
        let parameters = {
            let mut state = self.state()?;
            if state.updates() != updates {
                candle_core::bail!("unit {unit} {:?}: its parameters were updated after this forward pass", described.unit.name());
            }
            state.gather(unit, described, dtype, true)?
        };
        let input = if input.dtype().is_int() { input.clone() } else { Var::from_tensor(&input.detach())?.into_inner() };
        let output = described.run(&parameters, dtype, &input)?;
        let mut gradients = (output * slope)?.backward()?;
        self.state()?.reduce(unit, &parameters, dtype, &gradients)?;
        if input.dtype().is_int() {
            return Ok(None);
        }
        gradients.remove(&input).map_or_else(|| input.zeros_like(), Ok).map(Some)
    }
}

impl std::fmt::Debug for FullySharded {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units: Vec<_> = self.0.units.iter().map(|unit| unit.unit.name()).collect();
        formatter.debug_struct("FullySharded").field("units", &units).finish_non_exhaustive()
    }
}

/// Returns candle's name of a type of parameters.
fn candle_type(dtype: collectives::DType) -> Option<DType> {
    match dtype {
        collectives::DType::F32 => Some(DType::F32),
        collectives::DType::F64 => Some(DType::F64),
        collectives::DType::F16 => Some(DType::F16),
        collectives::DType::Bf16 => Some(DType::BF16),
        _ => None,
    }
}
