//! Shards the parameters of a module over the ranks (ZeRO, stages 2 and 3).

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::{Module, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor};
use collectives::{Communicator, ReduceOp};
use collectives_train::{FullySharded as Shards, FullyShardedOptions, ReducedGradients, Unit};

use crate::data_parallel::broadcast_parameters;
use crate::error::{Error, Result};
use crate::parameters::{Trained, trained};
use crate::units::{Collect, Fill, Take, burn_type, own_gradient, shard, write_back};

/// Keeps a shard of a module's parameters on each rank, and gathers the parameters of a unit only while the unit
/// computes. On n ranks, each rank keeps one n-th of the parameters, of their gradients and of the optimiser's state.
/// This is ZeRO stage 3, like torch's `FullyShardedDataParallel`. This type is based on
/// [`collectives_train::FullySharded`].
///
/// A *unit* is a part of the module that is gathered and released together, for example one layer. Name the units in
/// the order of the forward pass. [`new`](Self::new) returns the module without the values of its parameters, as a
/// skeleton for the gathered units:
///
/// ```
/// use burn::module::Module;
/// use burn::nn::loss::{MseLoss, Reduction};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamConfig;
/// use burn::tensor::{Device, Tensor};
/// use collectives::Communicator;
/// use collectives_burn::{FullySharded, Result};
/// use collectives_train::FullyShardedOptions;
///
/// #[derive(Module, Debug)]
/// struct Network {
///     input: Linear,
///     output: Linear,
/// }
///
/// fn train(comm: &Communicator) -> Result<f32> {
///     let device = Device::default().autodiff();
///     let network = Network { input: LinearConfig::new(2, 16).init(&device), output: LinearConfig::new(16, 1).init(&device) };
///     let (mut sharded, network) = FullySharded::new(comm, network, &["input", "output"], FullyShardedOptions::default())?;
///     let mut optimizer = AdamConfig::new().init(); // state for this rank's shards only
///     let x = Tensor::<2>::from_data([[1.0, comm.rank() as f32], [0.0, 1.0]], &device); // this rank's samples
///     let (first, second) = (|layer: &Linear, x| layer.forward(x), |layer: &Linear, x: Tensor<2>| layer.forward(x.tanh()));
///     let mut last = f32::NAN;
///     for _step in 0..100 {
///         // Forward pass: gathers each unit, computes, and releases the unit.
///         let hidden = sharded.forward(0, &network.input, x.clone(), first)?;
///         let output = sharded.forward(1, &network.output, hidden.clone(), second)?;
///         let loss = MseLoss::new().forward(output.clone(), x.clone().sum_dim(1), Reduction::Mean);
///         let slope = output.grad(&loss.backward()).expect("the loss depends on the output");
///         // Backward pass: gathers each unit again, and reduces its gradients to shards.
///         let slope = sharded.backward(1, &network.output, hidden, slope, second)?;
///         sharded.backward(0, &network.input, x.clone(), slope, first)?;
///         sharded.step(0.05, &mut optimizer)?; // updates this rank's shards
///         last = loss.into_scalar();
///     }
///     Ok(last)
/// }
///
/// let losses = Communicator::run_local(2, |comm| Ok(train(comm).expect("burn")))?;
/// assert!(losses.iter().all(|loss| *loss < 0.01), "{losses:?}");
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// **Recomputation.** If [`forward`](Self::forward) built burn's graph, the graph would keep the gathered parameters of
/// all units in memory until the backward pass. So `forward` builds no graph, and [`backward`](Self::backward) runs the
/// unit's forward pass again. A unit must compute the same values both times. So its result must not depend on random
/// numbers or on a state that changes.
///
/// **Several backward passes.** If you run several backward passes before a [`step`](Self::step), their gradients are
/// added up in the shards. Each pass reduces its gradients over the ranks. For a mean over passes, divide each loss by
/// the number of passes. If a pass uses a unit several times, the gradients of these uses are added up too.
///
/// **Optimisers.** The optimiser updates flat vectors, one for this rank's shard of each unit. So it must update each
/// element independently of the others, as SGD, Adam and AdamW do. If an optimiser uses the shape or the norm of a
/// parameter, its results differ from those on one rank. The same is true of gradient clipping that the optimiser's
/// configuration sets, so clip with [`step_with`](Self::step_with) instead.
///
/// **Order.** Every rank must make the same calls for the same units in the same order. If a call fails on one rank
/// only, for example because `compute` panics, the other ranks wait for the failing rank until it closes its
/// communicator, or until the timeout.
///
/// **Memory.** While [`new`](Self::new) runs, each rank has the whole module. Later, for N parameters of m bytes on n
/// ranks, each rank keeps 3·m·N/n bytes between two steps: the shards, a copy of them for the optimiser, and their
/// gradients. Add the optimiser's state, which is 2·m·N/n for Adam. During [`step`](Self::step), add another copy of
/// the gradients. While a unit computes, a rank needs at most six times the unit's size in addition. Values are copied
/// from host memory to the module's device and back.
#[doc(alias("FullyShardedDataParallel", "fully_shard", "FSDP", "ZeRO"))]
pub struct FullySharded {
    model: Shards,
    /// The parameters of each unit.
    units: Vec<Vec<Trained>>,
    /// The type in which each unit is gathered.
    types: Vec<DType>,
    /// This rank's shard of each unit, which the optimiser updates.
    shards: Vec<Param<Tensor<1>>>,
    device: Device,
    /// The unit that was last used in a forward pass.
    last: Option<usize>,
    /// Whether each unit's gradients were passed in this backward pass.
    passed: Vec<bool>,
    /// Whether a step has failed on a rank, so that the ranks' shards may not fit together.
    has_failed: bool,
}

impl FullySharded {
    /// Makes the shards of a module with rank 0's parameters, and returns the module without the values of the sharded
    /// parameters. `units` are the beginnings of the parameters' names, for example `["input", "layers.0", "layers.1"]`,
    /// in the order of the forward pass. Parameters without a gradient stay whole on every rank. Collective.
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - A parameter belongs to no unit or to several units. Ranks with the same arguments all get this error.
    /// - The ranks' parameters, units or options differ. The error names the first difference.
    /// - A parameter is not `f32`, `f64`, `f16` or `bf16`, or a unit has parameters of several types.
    /// - [`collectives_train::FullySharded::new`] or [`Communicator::broadcast`] fails.
    pub fn new<M: Module>(comm: &Communicator, module: M, units: &[&str], options: FullyShardedOptions) -> Result<(Self, M)> {
        let device = module.devices().first().cloned().unwrap_or_else(|| Device::default().autodiff());
        let grouped = grouped(trained(&module), units);
        let gather_type = options.gather_type.map(burn_type);
        // All ranks compare their units, also if this rank has none.
        let listed = grouped.as_ref().map_or_else(|_| Ok(Vec::new()), |grouped| listed(grouped, units));
        let model = Shards::new(comm, listed.clone().unwrap_or_default(), options);
        let units = grouped?;
        listed?;
        let model = model?;
        let module = broadcast_parameters(comm, module, 0)?;
        let mut take = Take { model, units: &units, outcome: Ok(()) };
        let module = module.map(&mut take);
        let Take { model, outcome, .. } = take;
        outcome?;
        let own_types = model.layouts().map(|layout| burn_type(layout.dtype)).collect::<Vec<_>>();
        let shard = |(unit, dtype): (usize, &DType)| Ok(Param::initialized(ParamId::new(), shard(&model, unit, *dtype, &device)?));
        let shards = own_types.iter().enumerate().map(shard).collect::<Result<_>>()?;
        let (types, passed) = (own_types.iter().map(|own| gather_type.unwrap_or(*own)).collect(), vec![false; units.len()]);
        Ok((Self { model, units, types, shards, device, last: None, passed, has_failed: false }, module))
    }

    /// Returns a part of the module with the whole parameters of a unit, for example to save it. `part` is a part of
    /// the module that [`new`](Self::new) returned. If `part` also has parameters of other units, they stay empty in
    /// the result. Drop the result to release the parameters. With [`FullyShardedOptions::gather_type`], the parameters
    /// have that type. Collective.
    ///
    /// # Errors
    ///
    /// Fails if there is no such unit, or if [`collectives_train::FullySharded::gather`] fails.
    pub fn gather<M: Module>(&mut self, unit: usize, part: &M) -> Result<M> {
        self.check("FullySharded::gather")?;
        self.model.gather(unit)?;
        let mut fill = Fill { model: &self.model, unit, parameters: &self.units[unit], dtype: self.types[unit], outcome: Ok(()) };
        let whole = part.clone().map(&mut fill);
        let outcome = fill.outcome;
        self.model.release(unit)?;
        outcome.map(|()| whole)
    }

    /// Runs a unit on an input: gathers its parameters, calls `compute`, and releases the parameters. Starts to gather
    /// the next unit meanwhile. Returns the output as the beginning of a new graph, in which the output has a gradient.
    /// Collective.
    ///
    /// `part` is a part of the module that [`new`](Self::new) returned, and contains the parameters of the unit.
    ///
    /// # Errors
    ///
    /// The errors of [`gather`](Self::gather).
    pub fn forward<M: Module, const D: usize, const E: usize>(
        &mut self,
        unit: usize,
        part: &M,
        input: Tensor<D>,
        compute: impl FnOnce(&M, Tensor<D>) -> Tensor<E>,
    ) -> Result<Tensor<E>> {
        if self.last.is_none_or(|last| unit <= last) || self.passed.contains(&true) {
            self.end_backward()?;
        }
        let whole = self.gather(unit, part)?;
        self.last = Some(unit);
        Ok(compute(&whole.no_grad(), input.inner().autodiff()).inner().autodiff().require_grad())
    }

    /// Runs the backward pass of a unit: gathers its parameters, runs `compute` again, and starts to reduce the
    /// gradients of the parameters to the ranks' shards. `input` and `compute` must be those of the forward pass.
    /// `slope` is the gradient of the output. Returns the gradient of the input. A parameter without a gradient counts
    /// as zeros. Collective.
    ///
    /// If the unit has no input of floats, for example an embedding, let `compute` capture the ids, and pass any tensor
    /// as `input`. The returned gradient is then zeros.
    ///
    /// # Errors
    ///
    /// The errors of [`gather`](Self::gather) and of [`collectives_train::FullySharded::reduce_gradients`]. Also fails
    /// if `slope` does not have the shape of the output, or if the output does not depend on the parameters or the
    /// input.
    pub fn backward<M: Module, const D: usize, const E: usize>(
        &mut self,
        unit: usize,
        part: &M,
        input: Tensor<D>,
        slope: Tensor<E>,
        compute: impl FnOnce(&M, Tensor<D>) -> Tensor<E>,
    ) -> Result<Tensor<D>> {
        const CALL: &str = "FullySharded::backward";
        let whole = self.gather(unit, part)?;
        let input = input.inner().autodiff().require_grad();
        let output = compute(&whole, input.clone());
        if output.dims() != slope.dims() {
            return Err(Error::shape(
                CALL,
                format!("the slope has shape {:?}, but the output has shape {:?}", slope.dims(), output.dims()),
            ));
        }
        if !output.is_tracked() {
            return Err(Error::shape(CALL, "the output depends neither on a parameter nor on the input"));
        }
        let mut gradients = (output * slope.inner().autodiff()).sum().backward();
        let own = input.grad_remove(&mut gradients).unwrap_or_else(|| input.inner().zeros_like());
        self.reduce(unit, &whole, GradientsParams::from_grads(gradients, &whole))?;
        Ok(own)
    }

    fn reduce<M: Module>(&mut self, unit: usize, whole: &M, gradients: GradientsParams) -> Result<()> {
        // The unit is used several times in a pass, or this is another backward pass: the gradients are added up.
        if self.passed[unit] {
            self.end_backward()?;
        }
        let mut collect = Collect::new(&self.units[unit], gradients);
        whole.visit(&mut collect);
        collect.reduce(&mut self.model, unit, self.types[unit])?;
        self.passed[unit] = true;
        Ok(())
    }

    fn end_backward(&mut self) -> Result<()> {
        self.passed.fill(false);
        Ok(self.model.end_backward()?)
    }

    /// Ends a step: waits for this rank's shards of all gradients, and runs the optimiser on this rank's shards of the
    /// parameters. Collective.
    ///
    /// # Errors
    ///
    /// The call returns the errors of [`collectives_train::FullySharded::reduce`]. If the optimiser panics on a rank,
    /// the other ranks get an error. No step can follow: continue from a checkpoint.
    pub fn step(&mut self, learning_rate: f64, optimizer: &mut ModuleOptimizer) -> Result<()> {
        self.step_with(learning_rate, optimizer, |_| Ok(true)).map(|_| ())
    }

    /// Ends a step like [`step`](Self::step), but first calls `change` with this rank's shards of the gradients. Use
    /// `change` to clip the gradients ([`ReducedGradients::clip_norm`]), or to divide them by the scale of the loss
    /// ([`ReducedGradients::unscale`]). If `change` returns `false`, the step is skipped: the optimiser does not run. So
    /// `change` can end with [`LossScaler::update`](collectives_train::LossScaler::update). Returns whether the
    /// optimiser has run. Collective: all ranks must make the same changes and the same decision.
    ///
    /// # Errors
    ///
    /// The errors of [`step`](Self::step) and of `change`. Also fails on every rank if `change` fails on a rank, or
    /// returns `false` on some ranks only. No step can follow.
    pub fn step_with(
        &mut self,
        learning_rate: f64,
        optimizer: &mut ModuleOptimizer,
        change: impl FnOnce(&mut ReducedGradients<'_>) -> collectives::Result<bool>,
    ) -> Result<bool> {
        self.check("FullySharded::step")?;
        // The other ranks must also learn of a panic, or they would wait.
        let own = catch_unwind(AssertUnwindSafe(|| self.update(learning_rate, optimizer, change)));
        let outcome = own.as_ref().ok().and_then(|own| own.as_ref().ok()).copied();
        let agreed = agree(self.model.communicator(), outcome);
        self.has_failed = outcome.is_none() || agreed.is_err();
        let taken = own.unwrap_or_else(|panic| resume_unwind(panic))?;
        agreed.map(|()| taken)
    }

    fn update(
        &mut self,
        learning_rate: f64,
        optimizer: &mut ModuleOptimizer,
        change: impl FnOnce(&mut ReducedGradients<'_>) -> collectives::Result<bool>,
    ) -> Result<bool> {
        self.last = None;
        self.passed.fill(false);
        let mut reduced = self.model.reduce()?;
        if !change(&mut reduced)? {
            return Ok(false);
        }
        let (mut gradients, device) = (GradientsParams::new(), self.device.clone().inner());
        let shards = &self.shards;
        reduced.update(|shard| {
            // An empty unit has nothing to update.
            if !shard.range.is_empty() {
                gradients.register(shards[shard.bucket].id, own_gradient(shard, &device)?);
            }
            Ok(())
        })?;
        self.shards = optimizer.step(learning_rate, std::mem::take(&mut self.shards), gradients);
        self.shards.iter().enumerate().try_for_each(|(unit, shard)| write_back(&mut self.model, unit, shard.val()))?;
        Ok(true)
    }

    /// Returns the size in bytes of the buffers and shards that this rank has now, without the optimiser's state.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let bytes = |shard: &Param<Tensor<1>>| shard.val().dims()[0] * shard.val().dtype().size();
        self.model.memory_bytes() + self.shards.iter().map(bytes).sum::<usize>()
    }

    fn check(&self, call: &'static str) -> Result<()> {
        let reason = "a step of this sharded model failed, so the ranks' shards may be from different steps";
        if self.has_failed { Err(collectives::Error::argument(call, reason).into()) } else { Ok(()) }
    }
}

impl std::fmt::Debug for FullySharded {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FullySharded").field("units", &self.units.len()).finish_non_exhaustive()
    }
}

/// Puts parameters into the units whose names they begin with.
fn grouped(parameters: Vec<Trained>, units: &[&str]) -> Result<Vec<Vec<Trained>>> {
    let mut grouped: Vec<Vec<Trained>> = units.iter().map(|_| Vec::new()).collect();
    let begins = |name: &str, unit: &str| name.strip_prefix(unit).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    for parameter in parameters {
        let mut of = (0..units.len()).filter(|unit| begins(&parameter.name, units[*unit]));
        match (of.next(), of.next()) {
            (Some(unit), None) => grouped[unit].push(parameter),
            (first, _) => {
                let found = if first.is_none() { "no unit" } else { "several units" };
                let reason = format!("parameter {} belongs to {found} of {units:?}", parameter.name);
                return Err(collectives::Error::argument("FullySharded::new", reason).into());
            }
        }
    }
    Ok(grouped)
}

/// Describes the units to `collectives-train`.
fn listed(grouped: &[Vec<Trained>], units: &[&str]) -> Result<Vec<Unit>> {
    let unit = |(parameters, name): (&Vec<Trained>, &&str)| {
        Ok(Unit::new(*name, parameters.iter().map(Trained::described).collect::<Result<_>>()?))
    };
    grouped.iter().zip(units).map(unit).collect()
}

/// Fails if a rank has failed (`None`), or if some ranks have skipped what other ranks have done. Collective.
fn agree(comm: &Communicator, own: Option<bool>) -> Result<()> {
    let rank = comm.rank() as u64 + 1;
    let mut last_with = [Some(true), Some(false), None].map(|outcome| if own == outcome { rank } else { 0 });
    comm.all_reduce(&mut last_with, ReduceOp::Max)?;
    let reason = match last_with {
        [_, 0, 0] | [0, _, 0] => return Ok(()),
        [done, skipped, 0] => format!(
            "rank {} skipped the step and rank {} did not; make the same decision on every rank, for example with LossScaler::update",
            skipped - 1,
            done - 1
        ),
        [.., rank] => format!("the step failed on rank {}; the error of that rank says why", rank - 1),
    };
    Err(collectives::Error::argument("FullySharded::step", reason).into())
}
