//! Shards parameters, gradients and the optimiser's state over the ranks (ZeRO, stages 2 and 3).
//!
//! # Design
//!
//! A unit's parameters are concatenated into one flat buffer, and each rank keeps an equal part of it, its *shard*
//! (`unit.rs`). To gather a unit, a rank takes a buffer from a small pool (`pool.rs`), and returns it on release. It
//! starts the gathers of the next units before it waits for the current one (`gather.rs`; the pure `prefetch_order.rs`
//! decides which units are next).
//!
//! A unit's gradients are copied into a buffer from another pool, then reduced and scattered in the background. When
//! that buffer is needed again, or the step ends, this rank's shard of the result is added to the rank's gradients
//! (`reduce.rs`). Elements are converted to another type only when they are copied anyway, so only the buffers of whole
//! units have another type.
//!
//! The communicator cannot tell apart calls for units of the same length. So at the end of a step, beside the last
//! reductions, ranks also compare the order of their calls (`call_order.rs`). This way, no optimiser gets results that
//! were computed from different units.

mod call_order;
mod gather;
mod options;
mod pool;
mod prefetch_order;
mod reduce;
mod unit;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use super::agreement::{Listed, agree, everywhere};
use super::any_flat::{AnyFlat, fill, typed};
use super::flat::Place;
use super::hook::weight;
use super::layout::BucketLayout;
use super::parameter::{Float, check_fit};
use super::step_health::StepHealth;
use collectives::Communicator;
use collectives::{Buffer, BufferMut};
use collectives::{Error, Result};

use call_order::CallOrder;
use pool::Pool;
use prefetch_order::PrefetchOrder;
use unit::{UnitState, layout_of};

pub use options::{FullyShardedOptions, ShardingStrategy, Unit};
pub use reduce::ReducedGradients;

/// Keeps a shard of each unit's parameters on each rank, and gathers the parameters of a unit only while the unit is
/// used. A [`Unit`] is a list of parameters that are gathered together, for example one layer. A rank's *shard* of a
/// unit is the part that this rank keeps: one n-th of the elements, on n ranks.
///
/// This is ZeRO stage 3, like torch's `FullyShardedDataParallel` with `FULL_SHARD`. With
/// [`ShardingStrategy::ShardGradOp`], this type implements ZeRO stage 2.
///
/// List units in the order in which the forward pass uses them. [`gather`](Self::gather) also starts to gather the next
/// units, one by default ([`prefetch`](FullyShardedOptions::prefetch)): those after this unit in the list in the
/// forward pass, and those before it in the backward pass. [`reduce_gradients`](Self::reduce_gradients) averages a
/// unit's gradients in the background, and keeps this rank's shard of them.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::{FullySharded, FullyShardedOptions, Parameter, Unit};
///
/// let results = Communicator::run_local(2, |comm| {
///     // y = b (a x): a unit for a, and one for b.
///     let units = ["a", "b"].map(|name| Unit::new(name, vec![Parameter::new::<f32>(name, &[1])]));
///     let mut model = FullySharded::new(comm, units.to_vec(), FullyShardedOptions::default())?;
///     model.broadcast(0, 0, &mut [0.5_f32], 0)?; // every rank starts with rank 0's
///     model.broadcast(1, 0, &mut [0.5_f32], 0)?;
///     let x = 1.0 + comm.rank() as f32;
///     for _step in 0..100 {
///         model.gather(0)?; // b is on its way already
///         let hidden = model.parameter::<f32>(0, 0)?[0] * x;
///         model.release(0)?;
///         model.gather(1)?; // the last unit: kept for the backward pass
///         let b = model.parameter::<f32>(1, 0)?[0];
///         let slope = 2.0 * (b * hidden - 3.0 * x);
///         model.release(1)?;
///         model.reduce_gradients(1, &[[slope * hidden]])?; // goes on beside the rest of the backward pass
///         model.reduce_gradients(0, &[[slope * b * x]])?;
///         model.reduce()?.update(|shard| {
///             let (parameters, gradients) = shard.values::<f32>()?;
///             parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x -= 0.02 * slope);
///             Ok(())
///         })?;
///     }
///     model.gather(0)?;
///     model.gather(1)?;
///     Ok(model.parameter::<f32>(0, 0)?[0] * model.parameter::<f32>(1, 0)?[0])
/// })?;
/// assert!(results.iter().all(|product| (product - 3.0).abs() < 0.01), "{results:?}");
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// **Accumulation.** [`end_backward`](Self::end_backward) ends a backward pass, but not the step: the reduced gradients
/// stay in this rank's shard, and the next backward pass adds its gradients to them. So several passes need no more
/// memory than one pass (except for a possible conversion, see **Memory**), but each pass reduces its gradients over
/// the ranks. Gradients are summed over the passes. For a mean over the passes, divide by their number.
///
/// **Mixed precision.** If parameters are `f32` and [`gather_type`](FullyShardedOptions::gather_type) is `Bf16`, the
/// shards contain `f32`, but parameters are gathered and used as `bf16`. You also pass gradients as `bf16`, and they
/// are added to the shard as `f32`. With [`reduce_type`](FullyShardedOptions::reduce_type) `F32`, gradients are also
/// summed over ranks as `f32`. Without it, the mean over n ranks has the rounding error that the documentation of
/// [`Compress`](super::Compress) states.
///
/// If the reduce type differs from the gather type, gradients are weighted (by 1/n for a mean) before they are summed,
/// so a mean in `f16` does not overflow if every rank's gradients fit into `f16`. Conversions go via `f32`.
///
/// **Order.** Every rank must make the same calls for units, in the same order. If ranks make the same call for
/// different units, they get a `Mismatch`: immediately if the units differ in length, and otherwise from
/// [`reduce`](Self::reduce), before any parameter is updated. An evaluation never calls `reduce`. So if ranks mix up
/// units of the same length in an evaluation, no rank gets an error, and the parameters are wrong.
///
/// If you make other collectives on the same communicator, every rank must make them at the same point between the
/// calls for units. If that is not possible, make them on a separate communicator ([`Communicator::duplicate`]).
///
/// **Memory.** The parameters have N elements of m bytes. A unit has at most L elements, including padding to a multiple
/// of n, the number of ranks. An element has g bytes when it is gathered and r bytes when it is reduced, and p is
/// [`prefetch`](FullyShardedOptions::prefetch). If you release each unit before you gather the next unit, each rank
/// needs the sum of these numbers of bytes:
///
/// - 2·m·N/n for the shards of parameters and gradients,
/// - (1 + p)·L·g for gathered units in stage 3, or N·g in stage 2,
/// - (1 + p)·L·r for units that are being reduced,
/// - m·L/n to convert reduced gradients, if they are accumulated and the reduce type differs from the parameters' type,
/// - the optimiser's state for the shard, which the caller keeps: 2·m·N/n for Adam.
///
/// So with the defaults and 4-byte parameters, the backward pass needs up to 8·N/n + 16·L bytes, without the
/// optimiser's state. By comparison, [`ShardedOptimizer`](super::ShardedOptimizer) needs 4·N + 4·N/n bytes in addition
/// to the parameters themselves. [`memory_bytes`](Self::memory_bytes) counts the buffers, but not the communicator's
/// own memory, or the memory for the order of calls (up to 64 KiB).
///
/// **Traffic.** In each step, stage 3 gathers every unit twice and reduces its gradients once, so each rank sends (n −
/// 1)/n·N·(2·g + r) bytes. If all types are the same, that is 1.5 times as much as in an all-reduce of the gradients.
/// Stage 2 gathers every unit only once, so each rank sends as much as in an all-reduce of the gradients. If there is
/// only one rank, a step makes communicator calls only with `PreMulSum`.
///
/// **Errors.** A call with an invalid argument is refused and has no effect. If a collective fails, or the caller's
/// `update` fails or panics, every later call returns `Poisoned`.
#[doc(alias("FullyShardedDataParallel", "fully_shard", "FSDP", "ZeRO"))]
pub struct FullySharded {
    comm: Communicator,
    place: Place,
    options: FullyShardedOptions,
    units: Vec<UnitState>,
    /// Buffers of whole units for gathers and for reductions, and buffers of shards for gradients that are converted.
    gathers: Pool,
    reductions: Pool,
    conversions: Pool,
    /// Units whose gradients are being reduced, the oldest first.
    reducing: VecDeque<(usize, Box<dyn AnyFlat>)>,
    order: PrefetchOrder,
    calls: CallOrder,
    health: StepHealth,
}

/// Checks that a trainer can move it into a thread.
const _: () = {
    const fn sendable<T: Send + 'static>() {}
    sendable::<FullySharded>();
};

impl FullySharded {
    /// Makes this rank's shards, filled with zeros. Collective: ranks compare units, names, shapes, types and options.
    ///
    /// # Errors
    ///
    /// - `Mismatch` if two ranks pass different parameters or settings. The error names the first difference.
    /// - `InvalidArgument` if a unit has parameters of several types, or of a type that gradients cannot have.
    /// - `Unsupported` if the op is not `Avg`, `Sum` or `PreMulSum`.
    /// - If one rank cannot allocate its shards, all ranks fail. The other ranks get an `Io` that names that rank.
    pub fn new(comm: &Communicator, units: Vec<Unit>, options: FullyShardedOptions) -> Result<Self> {
        Self::in_place(comm, "FullySharded::new", Place::Host, units, options)
    }

    /// Makes this rank's shards like [`new`](Self::new), but on the device of `stream`, which must be the
    /// communicator's device. Units are gathered on that device too, and parameters and gradients are device buffers.
    ///
    /// Copies and conversions are queued on `stream`, on which the caller computes. Gathers and reductions are queued
    /// on the communicator's stream. cudarc's events order the work on the two streams, so the calls of this type do
    /// not wait for the device, with two exceptions:
    ///
    /// - [`ReducedGradients::norm`], [`clip_norm`](ReducedGradients::clip_norm) and
    ///   [`unscale`](ReducedGradients::unscale) wait for this rank's sum of squares.
    /// - The allocation of a unit's buffers waits for `stream`. Units of the same length share the buffers that are
    ///   allocated in the first step. With `FullShard`, new buffers are allocated if a unit's length differs from the
    ///   previous unit's length.
    ///
    /// Collective.
    ///
    /// ```no_run
    /// # use collectives_train::{FullySharded, FullyShardedOptions, Parameter, Unit};
    /// # use collectives::{Communicator, DeviceChoice};
    /// # fn forward(_: &cudarc::driver::CudaView<'_, f32>) {}
    /// # fn step(_: &mut cudarc::driver::CudaViewMut<'_, f32>, _: &cudarc::driver::CudaView<'_, f32>) {}
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let comm = Communicator::builder().require_device(DeviceChoice::Local).from_env()?;
    /// let stream = comm.device().expect("it was required").context().new_stream()?;
    /// let unit = Unit::new("layer", vec![Parameter::new::<f32>("weight", &[1000])]);
    /// let mut model = FullySharded::on_device(&comm, &stream, vec![unit], FullyShardedOptions::default())?;
    /// model.broadcast(0, 0, &mut stream.alloc_zeros::<f32>(1000)?, 0)?;
    /// model.gather(0)?;
    /// forward(&model.device_parameter::<f32>(0, 0)?); // kernels of yours, on `stream`
    /// let gradient = stream.alloc_zeros::<f32>(1000)?; // what a backward pass leaves there
    /// model.release(0)?;
    /// model.reduce_gradients(0, &[&gradient])?;
    /// model.reduce()?.update(|shard| {
    ///     let (mut parameters, gradients) = shard.device_values::<f32>()?;
    ///     step(&mut parameters, &gradients);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new) and [`DataParallel::on_device`](super::DataParallel::on_device).
    #[cfg(feature = "cuda")]
    pub fn on_device(
        comm: &Communicator,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
        units: Vec<Unit>,
        options: FullyShardedOptions,
    ) -> Result<Self> {
        Self::in_place(comm, "FullySharded::on_device", Place::on_device(stream), units, options)
    }

    fn in_place(comm: &Communicator, what: &'static str, place: Place, units: Vec<Unit>, options: FullyShardedOptions) -> Result<Self> {
        let usable = weight(options.op, comm.world_size()).and(options.check());
        let layouts: Result<Vec<_>> = units.iter().enumerate().map(|(index, unit)| layout_of(comm, index, unit)).collect();
        let settings = format!("{} units, {}", units.len(), options.in_words());
        agree(comm, what, &listed(&units), &settings)?;
        // Errors of these checks are the same on every rank.
        usable?;
        let made = units.into_iter().zip(layouts?).map(|unit| UnitState::new(comm, &place, &options, unit)).collect();
        let units: Vec<_> = everywhere(comm, what, made)?;
        let (gathers, reductions) = options.most_buffers();
        let (gathers, reductions, conversions) = (Pool::new(&place, gathers), Pool::new(&place, reductions), Pool::new(&place, 1));
        let (order, calls, comm) = (PrefetchOrder::new(units.len(), options.prefetch), CallOrder::default(), comm.clone());
        let (reducing, health) = (VecDeque::new(), StepHealth::default());
        Ok(Self { comm, place, options, units, gathers, reductions, conversions, reducing, order, calls, health })
    }

    /// Makes a model with the same units and options for the ranks of another communicator, for example after
    /// [`Communicator::admit`]. Newcomers call [`new`](Self::new) or [`on_device`](Self::on_device) instead, with the
    /// same arguments as the members. This model stays unchanged, even if a step has failed. Collective over `comm`.
    ///
    /// In the new model, each rank has other shards, filled with zeros. With the feature `checkpoint`,
    /// `StateTransfer::offer_shares` and `want_shares` move parameters and the optimiser's state from the old shards to
    /// the new shards. Let the transfer fill a vector for each unit, and pass the parameters' vectors to
    /// [`load_shard`](Self::load_shard).
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new) or [`on_device`](Self::on_device).
    pub fn resized(&self, comm: &Communicator) -> Result<Self> {
        let what = self.place.either("FullySharded::new", "FullySharded::on_device");
        let units = self.units.iter().map(|unit| unit.unit.clone()).collect();
        Self::in_place(comm, what, self.place.clone(), units, self.options.clone())
    }

    /// Returns the units' layouts. A layout contains the type of the unit's shards, and the position of each parameter
    /// in the unit's flat buffer.
    pub fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.units.iter().map(|unit| &unit.layout)
    }

    /// Returns the name of a unit's parameter, prefixed with the unit's name.
    #[cfg(feature = "checkpoint")]
    pub(super) fn name_of(&self, unit: usize, parameter: usize) -> Option<String> {
        let unit = &self.units.get(unit)?.unit;
        Some(format!("{}.{}", unit.name, unit.parameters.get(parameter)?.name))
    }

    /// Returns one number for each unit: the number of elements of this rank's shard. The caller keeps an optimiser's
    /// state for these elements.
    pub fn shard_lens(&self) -> impl ExactSizeIterator<Item = usize> {
        self.units.iter().map(|unit| unit.own.len())
    }

    /// Returns the communicator of the ranks over which the model is sharded.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the size in bytes of all buffers that this rank has now: shards, whole units that are gathered or being
    /// reduced, and free buffers for later units.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let units: usize = self.units.iter().map(UnitState::bytes).sum();
        let reducing: usize = self.reducing.iter().map(|(_, buffer)| buffer.bytes()).sum();
        let free: usize = [&self.gathers, &self.reductions, &self.conversions].map(Pool::free_bytes).iter().sum();
        units + reducing + free
    }

    /// Copies the root's values of a parameter to every rank. Each rank keeps its shard of the values. Call `broadcast`
    /// or [`load`](Self::load) for every parameter before you gather the first unit. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`load`](Self::load) and of [`Communicator::broadcast`].
    pub fn broadcast<B>(&mut self, unit: usize, parameter: usize, values: &mut B, root: usize) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        self.check_load("broadcast", unit, parameter, values)?;
        // A single rank needs no device backend.
        if self.comm.world_size() > 1 || root != 0 {
            self.comm.broadcast(values, root)?;
        }
        self.load(unit, parameter, values)
    }

    /// Copies this rank's shard of a parameter's values into the model, for example values from a checkpoint. The
    /// values must be the same on every rank.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` in these cases:
    ///
    /// - The unit or the parameter does not exist.
    /// - `values` does not have the parameter's length and type.
    /// - `values` and the model are not in the same memory: one is in host memory and the other on a device, or they
    ///   are on different devices or in different contexts.
    /// - The unit is gathered: release it first.
    ///
    /// Other errors:
    ///
    /// - `Poisoned` after a step that failed.
    /// - If a gather of this unit still runs, the errors of that gather.
    /// - On a device, also `Cuda` if the driver fails.
    pub fn load<B>(&mut self, unit: usize, parameter: usize, values: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.check_load("load", unit, parameter, values)?;
        self.go_on(|model| model.forget(unit))?;
        self.units[unit].load(parameter, values.memory())
    }

    fn check_load<B: Buffer<Element: Float> + ?Sized>(&self, call: &'static str, unit: usize, parameter: usize, values: &B) -> Result<()> {
        let unit = self.idle(call, unit)?;
        let memory = values.memory();
        unit.fitting::<B::Element>(call, parameter, unit.layout.dtype, memory.len())?;
        self.place.check_reach(&memory)
    }

    /// Returns the range of this rank's shard in the unit's flat buffer. The ranges of all ranks have the same length,
    /// and are in rank order. Elements after the last parameter are zeros.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the unit does not exist.
    pub fn shard_range(&self, unit: usize) -> Result<Range<usize>> {
        self.known("shard_range", unit).map(|unit| unit.own.clone())
    }

    /// Returns this rank's shard of a unit's parameters (the elements in [`shard_range`](Self::shard_range)), for
    /// example for a checkpoint.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the unit does not exist, or if `T` is not the type of its parameters. `Unsupported` if the
    /// shard is on a device.
    pub fn shard<T: Float>(&self, unit: usize) -> Result<&[T]> {
        typed::<T>(&*self.known("shard", unit)?.share)?.host()
    }

    /// Returns a device slice of this rank's shard of a unit's parameters. For a shard in host memory, use
    /// [`shard`](Self::shard).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the unit does not exist, if `T` is not the type of its parameters, or if the shard is in
    /// host memory.
    #[cfg(feature = "cuda")]
    pub fn device_shard<T: Float>(&self, unit: usize) -> Result<cudarc::driver::CudaView<'_, T>> {
        let share = typed::<T>(&*self.known("device_shard", unit)?.share)?;
        let len = share.memory().len();
        share.device_view(0..len).ok_or_else(|| Error::argument("device_shard", "the shard is in host memory: use `shard`"))
    }

    /// Restores this rank's shard of a unit's parameters from `values`. These must be the values of this same shard,
    /// for example values that [`shard`](Self::shard) returned on the same rank with the same world size.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` in these cases:
    ///
    /// - The unit does not exist.
    /// - The length of `values` is not the length of [`shard_range`](Self::shard_range).
    /// - The type of `values` is not the type of the unit's parameters.
    /// - `values` and the model are not in the same memory: one is in host memory and the other on a device, or they
    ///   are on different devices or in different contexts.
    /// - The unit is gathered: release it first.
    ///
    /// Other errors:
    ///
    /// - `Poisoned` after a step that failed.
    /// - If a gather of this unit still runs, the errors of that gather.
    /// - On a device, also `Cuda` if the driver fails.
    pub fn load_shard<B>(&mut self, unit: usize, values: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        let (state, memory) = (self.idle("load_shard", unit)?, values.memory());
        let wanted = (state.layout.dtype, Some(state.own.len()));
        check_fit::<B::Element>("load_shard", format_args!("the shard of {state}"), wanted, memory.len())?;
        self.place.check_reach(&memory)?;
        self.go_on(|model| model.forget(unit))?;
        let state = &mut self.units[unit];
        fill(&mut *state.share, 0..state.own.len(), memory, 0, 1.0)?;
        state.loaded.fill(true);
        Ok(())
    }

    /// Returns a unit if it exists.
    fn known(&self, call: &'static str, unit: usize) -> Result<&UnitState> {
        let count = self.units.len();
        let none = || Error::argument(call, format!("there is no unit {unit}: the model has {count} units, numbered from 0"));
        self.units.get(unit).ok_or_else(none)
    }

    /// Returns a unit that is not in use, if the step can continue.
    fn idle(&self, call: &'static str, unit: usize) -> Result<&UnitState> {
        self.health.check(call)?;
        match self.known(call, unit)? {
            state if state.in_use => Err(Error::argument(call, format!("{state} is gathered: release it first"))),
            state => Ok(state),
        }
    }

    /// Releases the gathered elements of a unit.
    fn forget(&mut self, unit: usize) -> Result<()> {
        let state = &mut self.units[unit];
        state.in_use = false;
        if let Some(mut gathered) = state.gathered.take() {
            gathered.wait()?;
            self.gathers.put(gathered);
        }
        Ok(())
    }

    /// Runs a part of a step. If it fails or panics, no step can follow.
    fn go_on<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.health.enter();
        let result = work(self);
        self.health.leave(result)
    }
}

/// Returns one line for each parameter of each unit.
fn listed(units: &[Unit]) -> Listed {
    let of_unit = |(index, unit): (usize, &Unit)| {
        let named = format!("unit {index} {:?}", unit.name);
        unit.parameters.iter().enumerate().map(move |(number, parameter)| format!("{named}, parameter {number} {parameter}")).collect()
    };
    let lines: Vec<Vec<String>> = units.iter().enumerate().map(of_unit).collect();
    Listed { noun: "parameters", lines: lines.concat() }
}

impl fmt::Debug for FullySharded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FullySharded({} units on {:?})", self.units.len(), self.comm)
    }
}
