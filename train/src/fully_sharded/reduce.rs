//! Reduces and scatters gradients during the backward pass. At the end of a step, clips and updates the shards.

use std::fmt;

use super::FullySharded;
use super::call_order::UnitCall;
use super::unit::UnitState;
use crate::agreement::{Listed, agree};
use crate::any_flat::{AnyFlat, fill};
use crate::data_parallel::{check_norm, clipping};
use crate::hook::weight;
use crate::host::Squares;
use crate::loss_scaler::LossScaler;
use crate::parameter::Float;
use crate::shard::Shard;
use crate::step_order::Done;
use collectives::Buffer;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Gradients.
impl FullySharded {
    /// Starts to reduce a unit's gradients over the ranks, in the background. `gradients` are those of the current
    /// backward pass, and must have one gradient for each parameter of the unit, in the order of the parameters.
    /// Gradients must have the type in which the parameters are gathered. The gradients are copied. This rank keeps its
    /// shard of the reduced gradients. If more than [`prefetch`](super::FullyShardedOptions::prefetch) reductions are
    /// already running, this call first waits for the oldest of them. Collective.
    ///
    /// # Errors
    ///
    /// Only this rank gets these errors:
    ///
    /// - `InvalidArgument` if the unit does not exist, or if the unit's gradients were already passed in this backward
    ///   pass.
    /// - `InvalidArgument` if the number of gradients is wrong, or if a gradient has the wrong length or type.
    /// - `InvalidArgument` if a gradient and the model are not in the same memory: one is in host memory and the other
    ///   on a device, or they are on different devices or in different contexts.
    /// - On a device, `Cuda` if the gradients cannot be copied.
    ///
    /// The call also returns the errors common to all collectives.
    pub fn reduce_gradients<B>(&mut self, unit: usize, gradients: &[B]) -> Result<()>
    where
        B: Buffer<Element: Float>,
    {
        self.check_reduce("reduce_gradients", unit, gradients)?;
        self.go_on(|model| {
            while model.reducing.len() > model.options.prefetch {
                model.keep_oldest()?;
            }
            Ok(())
        })?;
        // A failed copy is only this rank's error: nothing has been started.
        let whole = self.filled(unit, gradients)?;
        self.go_on(|model| model.start_reduce(unit, whole))
    }

    /// Ends a backward pass, but not the step. The next [`gather`](Self::gather) begins a forward pass. In the next
    /// backward pass, you can pass gradients for each unit again. They are added to the gradients of the backward
    /// passes that have ended. Makes no collective call. To end the last backward pass of a step, call
    /// [`reduce`](Self::reduce) instead.
    ///
    /// # Errors
    ///
    /// `Poisoned` after a step that failed.
    #[doc(alias = "no_sync")]
    pub fn end_backward(&mut self) -> Result<()> {
        self.health.check("end_backward")?;
        self.units.iter_mut().for_each(|unit| unit.is_reduced = false);
        self.order.restart();
        Ok(())
    }

    /// Ends the last backward pass of a step: waits until this rank has its shard of all gradients. If no rank passed
    /// gradients for a unit, the unit's gradients are zeros. Collective: in addition to the reductions, one all-reduce
    /// of 16 bytes compares the order of the ranks' calls.
    ///
    /// # Errors
    ///
    /// - `Mismatch` if ranks gathered or reduced different units, or the same units in different orders. The error
    ///   names the first difference. If the ranks differ only after the first 4096 calls of the step, the error is
    ///   `InvalidArgument` instead.
    /// - The errors common to all collectives.
    ///
    /// After an error, no step can follow.
    pub fn reduce(&mut self) -> Result<ReducedGradients<'_>> {
        self.end_backward()?;
        self.go_on(Self::finish_all)?;
        Ok(ReducedGradients { model: self, done: Done::default(), replicas: None })
    }

    fn finish_all(&mut self) -> Result<()> {
        let mut compared = self.calls.start(&self.comm)?;
        while !self.reducing.is_empty() {
            self.keep_oldest()?;
        }
        #[cfg(feature = "cuda")]
        if let Some(failure) = self.comm.device().and_then(|device| device.failure()) {
            return Err(failure);
        }
        self.calls.finish(&self.comm, "FullySharded::reduce", compared.wait()?)?;
        for unit in &mut self.units {
            if !std::mem::take(&mut unit.has_gradients) {
                unit.gradients.clear(0..unit.own.len())?;
            }
        }
        Ok(())
    }

    fn check_reduce<B: Buffer<Element: Float>>(&self, call: &'static str, unit: usize, gradients: &[B]) -> Result<()> {
        self.health.check(call)?;
        let state = self.known(call, unit)?;
        let (given, count) = (gradients.len(), state.unit.parameters.len());
        if given != count {
            return Err(Error::argument(call, format!("{state}: {given} gradients were passed for {count} parameters")));
        }
        if state.is_reduced {
            let reason = "its gradients were already given in this backward pass; end the pass first, with end_backward or reduce";
            return Err(Error::argument(call, format!("{state}: {reason}")));
        }
        gradients.iter().enumerate().try_for_each(|(index, gradient)| {
            let memory = gradient.memory();
            state.fitting::<B::Element>(call, index, state.gather_type, memory.len())?;
            self.place.check_reach(&memory)
        })
    }

    /// Returns a buffer with a unit's gradients, in the type in which they are reduced.
    fn filled<B: Buffer<Element: Float>>(&mut self, unit: usize, gradients: &[B]) -> Result<Box<dyn AnyFlat>> {
        let state = &self.units[unit];
        // If they are converted, they are weighted at the same time.
        let weight = weight(self.options.op, self.comm.world_size())?;
        let mut whole = self.reductions.take(state.reduce_type, state.layout.len)?;
        let end = state.layout.slots.last().map_or(0, |slot| slot.range.end);
        let mut each = gradients.iter().enumerate();
        let filled = each.try_for_each(|(index, gradient)| fill(&mut *whole, state.slot(index), gradient.memory(), 0, weight));
        match filled.and_then(|()| whole.clear(end..state.layout.len)) {
            Ok(()) => Ok(whole),
            Err(error) => {
                self.reductions.put(whole);
                Err(error)
            }
        }
    }

    fn start_reduce(&mut self, unit: usize, mut whole: Box<dyn AnyFlat>) -> Result<()> {
        let state = &mut self.units[unit];
        let is_weighted = state.reduce_type != state.gather_type;
        whole.start_reduce_scatter(&self.comm, if is_weighted { ReduceOp::Sum } else { self.options.op })?;
        self.calls.note(UnitCall::Reduce(unit));
        state.is_reduced = true;
        self.reducing.push_back((unit, whole));
        Ok(())
    }

    /// Waits for the oldest reduction, and keeps this rank's shard of it.
    fn keep_oldest(&mut self) -> Result<()> {
        let Some((unit, mut whole)) = self.reducing.pop_front() else { return Ok(()) };
        whole.wait()?;
        let (state, conversions) = (&mut self.units[unit], &mut self.conversions);
        let (dtype, len) = (state.layout.dtype, state.own.len());
        let converted = state.add(&*whole, || conversions.take(dtype, len))?;
        converted.into_iter().for_each(|converted| self.conversions.put(converted));
        self.reductions.put(whole);
        Ok(())
    }
}

/// This rank's shards of a step's gradients; see [`FullySharded::reduce`]. If this value is dropped without a call of
/// [`update`](Self::update), the step is skipped.
#[must_use = "the parameters are updated by `update`"]
pub struct ReducedGradients<'a> {
    model: &'a mut FullySharded,
    done: Done,
    /// The ranks with other replicas over which the gradients were reduced, if they were.
    replicas: Option<Communicator>,
}

impl ReducedGradients<'_> {
    /// Reduces this rank's shards over `replicas`, the communicator of the ranks that have the same shards of their
    /// replicas of the model. Use this call for hybrid sharding. For example, the parameters are sharded over the ranks
    /// of each host, and every host has a replica of the model ([`Mesh::by_host`](crate::Mesh::by_host)). With `Avg`,
    /// the shards are averaged over the replicas. With any other [`op`](super::FullyShardedOptions::op), the shards are
    /// summed. Call this method at most once per step, before [`unscale`](Self::unscale) and
    /// [`clip_norm`](Self::clip_norm). If all replicas begin a step with the same parameters, they also end the step
    /// with the same parameters, bit for bit.
    ///
    /// ```
    /// use collectives::Communicator;
    /// use collectives_train::{FullySharded, FullyShardedOptions, Mesh, Parameter, Unit};
    ///
    /// let norms = Communicator::run_local(4, |comm| {
    ///     let mesh = Mesh::new(comm, &[("replicate", 2), ("shard", 2)])?;
    ///     let unit = Unit::new("layer", vec![Parameter::new::<f32>("weight", &[4])]);
    ///     let mut model = FullySharded::new(mesh.dimension("shard")?, vec![unit], FullyShardedOptions::default())?;
    ///     model.load(0, 0, &[0.0_f32; 4])?;
    ///     model.reduce_gradients(0, &[[comm.rank() as f32; 4]])?;
    ///     let mut reduced = model.reduce()?;
    ///     reduced.reduce_over(mesh.dimension("replicate")?)?;
    ///     reduced.norm()
    /// })?;
    /// assert_eq!(norms, [3.0; 4], "four times the mean of 0, 1, 2 and 3");
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// Collective over `replicas`: makes one all-gather of 40 bytes per rank, and then one all-reduce for the shard of
    /// each unit. The all-reduces are started together. A clone of `replicas` is kept until the update, because the
    /// ranks of `replicas` must clip by the same norm.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if this step's gradients were already reduced over replicas, unscaled or clipped. The call
    ///   then has no effect.
    /// - `Mismatch` if the ranks of `replicas` do not have the same shards as this rank. For example, you get this
    ///   error if `replicas` is the communicator of the ranks over which the model is sharded.
    /// - The errors common to all collectives.
    ///
    /// After a `Mismatch` or an error of a collective, no step can follow.
    #[doc(alias = "HYBRID_SHARD")]
    pub fn reduce_over(&mut self, replicas: &Communicator) -> Result<()> {
        self.done.check("reduce_over", Done::ReducedOver)?;
        self.done = Done::ReducedOver;
        self.model.go_on(|model| {
            model.place.check(replicas)?;
            let shares = model.units.iter().map(|unit| format!("elements {:?} of {unit}, {}", unit.own, unit.layout.dtype)).collect();
            agree(replicas, "ReducedGradients::reduce_over", &Listed { noun: "shares", lines: shares }, &model.options.in_words())?;
            let op = if model.options.op == ReduceOp::Avg { ReduceOp::Avg } else { ReduceOp::Sum };
            model.units.iter_mut().try_for_each(|unit| unit.gradients.start_all_reduce(replicas, op))?;
            model.units.iter_mut().try_for_each(|unit| unit.gradients.wait())
        })?;
        self.replicas = Some(replicas.clone());
        Ok(())
    }

    /// Returns the norm of all ranks' gradients together: the square root of the sum of all elements' squares, computed
    /// in `f64`. Every rank gets the same bits. Collective: makes one all-reduce of one number, on the host. After
    /// [`reduce_over`](Self::reduce_over), makes one more all-reduce over the replicas. On a device, this call first
    /// waits for this rank's sum of squares.
    ///
    /// # Errors
    ///
    /// The errors common to all collectives. On a device, also the errors of [`Averaged::norm`](crate::Averaged::norm).
    pub fn norm(&self) -> Result<f64> {
        let mut squares = self.squares()?;
        self.model.comm.all_reduce(&mut squares, ReduceOp::Sum)?;
        if let Some(replicas) = &self.replicas {
            // Replicas may have summed in different orders, so all take the largest sum. Numbers that are not negative
            // are ordered like their bits.
            let mut bits = squares.to_bits();
            replicas.all_reduce(&mut bits, ReduceOp::Max)?;
            squares = f64::from_bits(bits);
        }
        Ok(squares.sqrt())
    }

    /// Scales all ranks' shards of the gradients down to a common [`norm`](Self::norm) of `limit`, if their common norm
    /// is larger than `limit`. Returns the norm before scaling, like
    /// [`Averaged::clip_norm`](crate::Averaged::clip_norm). Collective, like `norm`.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the limit is not a positive number.
    /// - The errors of [`norm`](Self::norm).
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_norm(&mut self, limit: f64) -> Result<f64> {
        let factor = clipping("clip_norm", limit)?;
        let norm = self.norm()?;
        self.scale(factor(norm))?;
        Ok(norm)
    }

    /// Clips this rank's shards of the gradients by a norm that the caller has computed, like
    /// [`Averaged::clip_to`](crate::Averaged::clip_to). Makes no collective call.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the limit is not a positive number or the norm is negative. On a device, also `Cuda` if the
    /// driver fails.
    pub fn clip_to(&mut self, norm: f64, limit: f64) -> Result<()> {
        let factor = clipping("clip_to", limit)?;
        check_norm(norm)?;
        self.scale(factor(norm))
    }

    /// Multiplies this rank's shards by the factor, if there is one: the last part of clipping.
    fn scale(&mut self, factor: Option<f64>) -> Result<()> {
        self.done = Done::Clipped;
        let mut units = self.model.units.iter_mut();
        factor.map_or(Ok(()), |factor| units.try_for_each(|unit| unit.gradients.scale(factor)))
    }

    /// Divides this rank's shards of the gradients by the scale of the loss, like
    /// [`Averaged::unscale`](crate::Averaged::unscale). Later, [`LossScaler::update`] reports to the other ranks
    /// whether a gradient overflowed. Makes no collective call.
    ///
    /// # Errors
    ///
    /// The errors of [`Averaged::unscale`](crate::Averaged::unscale).
    pub fn unscale(&mut self, scaler: &mut LossScaler) -> Result<()> {
        self.done.check("unscale", Done::Unscaled)?;
        self.done = Done::Unscaled;
        self.model.units.iter_mut().try_for_each(|unit| unit.gradients.scale(scaler.inverse()))?;
        scaler.note(self.squares()?.is_finite());
        Ok(())
    }

    /// Returns the sum of the squares of this rank's shards.
    fn squares(&self) -> Result<f64> {
        let mut sums = Squares::default();
        self.model.units.iter().try_for_each(|unit| unit.gradients.add_squares(&mut sums))?;
        sums.total(&self.model.comm)
    }

    /// Calls `update` for this rank's shard of each unit's parameters, unit by unit. [`Shard::bucket`] is the unit's
    /// number. The elements of a [`Shard`] have the type of the parameters. Gathered parameters are released. Makes no
    /// collective call: the next [`gather`](FullySharded::gather) gets the other ranks' shards.
    ///
    /// # Errors
    ///
    /// The errors of `update`. If `update` returns an error or panics, no step can follow, and other ranks are not
    /// notified. So if `update` fails, it should fail on every rank, or abort the communicator.
    pub fn update(self, mut update: impl FnMut(&mut Shard<'_>) -> Result<()>) -> Result<()> {
        self.model.go_on(|model| {
            for (index, unit) in model.units.iter_mut().enumerate() {
                let UnitState { layout, own, share, gradients, .. } = unit;
                let (parameters, gradients) = (share.flat_mut()?, gradients.flat()?);
                let (range, own_gradients) = (own.clone(), 0..own.len());
                update(&mut Shard { bucket: index, layout, range, parameters, gradients, own_gradients })?;
            }
            (0..model.units.len()).try_for_each(|unit| model.forget(unit))
        })
    }
}

impl fmt::Debug for ReducedGradients<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReducedGradients({} units)", self.model.units.len())
    }
}
