//! Gathers units before they are used, and releases them afterwards.

use super::FullySharded;
use super::call_order::UnitCall;
use super::options::ShardingStrategy;
use super::unit::UnitState;
use crate::any_flat::typed;
use crate::flat::Flat;
use crate::parameter::Float;
use collectives::BufferMut;
use collectives::{Error, Result};

/// Parameters in use.
impl FullySharded {
    /// Gathers a unit's parameters if necessary, starts to gather the next units, and waits for this unit. The next
    /// units are those after this unit in the forward pass, and those before it in the backward pass. The backward pass
    /// begins when you gather the last unit, or a unit that comes before the most recently gathered unit. Collective.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the unit does not exist, or if a parameter of the model has no values yet. Only this rank
    ///   gets this error.
    /// - The errors common to all collectives.
    pub fn gather(&mut self, unit: usize) -> Result<()> {
        self.check_gather("gather", unit)?;
        self.go_on(|model| {
            model.start_gather(unit)?;
            let next = model.order.after(unit);
            next.into_iter().try_for_each(|next| model.start_gather(next))?;
            model.units[unit].gathered.as_mut().map_or(Ok(()), |gathered| gathered.wait())
        })?;
        self.units[unit].in_use = true;
        Ok(())
    }

    /// Starts to gather a unit's parameters in the background, for a later [`gather`](Self::gather). Use this call for
    /// the first unit right after an update, or for a unit that is used out of order. This call needs one buffer more
    /// than the option [`FullyShardedOptions::prefetch`](super::FullyShardedOptions::prefetch) requires. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`gather`](Self::gather).
    pub fn prefetch(&mut self, unit: usize) -> Result<()> {
        self.check_gather("prefetch", unit)?;
        self.go_on(|model| model.start_gather(unit))
    }

    /// Returns a parameter of a unit that is gathered and not yet [released](Self::release).
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no such parameter, or the unit is not gathered.
    /// - `InvalidArgument` if `T` is not the type in which the unit is gathered.
    /// - `Unsupported` if the unit is on a device.
    pub fn parameter<T: Float>(&self, unit: usize, parameter: usize) -> Result<&[T]> {
        let (flat, state) = self.in_use::<T>("parameter", unit, parameter)?;
        Ok(&flat.host()?[state.slot(parameter)])
    }

    /// Returns a device slice of a parameter of a gathered unit. For a unit in host memory, use
    /// [`parameter`](Self::parameter).
    ///
    /// # Errors
    ///
    /// The errors of [`parameter`](Self::parameter), and `InvalidArgument` if the unit is in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_parameter<T: Float>(&self, unit: usize, parameter: usize) -> Result<cudarc::driver::CudaView<'_, T>> {
        let (flat, state) = self.in_use::<T>("device_parameter", unit, parameter)?;
        let on_host = || Error::argument("device_parameter", "the unit is in host memory: use `parameter`");
        flat.device_view(state.slot(parameter)).ok_or_else(on_host)
    }

    /// Copies a parameter of a gathered unit to a buffer. The buffer must have the parameter's length, and the type in
    /// which the unit is gathered.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the buffer has another type or length, and the `InvalidArgument` errors of
    /// [`parameter`](Self::parameter).
    pub fn copy_to<B>(&self, unit: usize, parameter: usize, destination: &mut B) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        let destination = destination.memory_mut();
        let state = self.known("copy_to", unit)?;
        state.fitting::<B::Element>("copy_to", parameter, state.gather_type, destination.len())?;
        let (flat, state) = self.in_use::<B::Element>("copy_to", unit, parameter)?;
        flat.copy_to(state.slot(parameter), destination)
    }

    /// Releases a unit's gathered parameters, so that their buffer can be reused. With
    /// [`ShardingStrategy::ShardGradOp`], the parameters stay in memory until the next update, and a later
    /// [`gather`](Self::gather) uses them again. This call is local, but all ranks must release the same units.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the unit is not gathered.
    pub fn release(&mut self, unit: usize) -> Result<()> {
        self.health.check("release")?;
        let state = self.known("release", unit)?;
        if !state.in_use {
            return Err(Error::argument("release", format!("{state} is not gathered")));
        }
        match self.options.strategy {
            ShardingStrategy::FullShard => self.forget(unit),
            ShardingStrategy::ShardGradOp => {
                self.units[unit].in_use = false;
                Ok(())
            }
        }
    }

    fn check_gather(&self, call: &'static str, unit: usize) -> Result<()> {
        self.health.check(call)?;
        self.known(call, unit)?;
        let missing = |state: &UnitState| state.loaded.iter().position(|loaded| !loaded);
        let Some((state, index)) = self.units.iter().find_map(|state| missing(state).map(|index| (state, index))) else { return Ok(()) };
        let parameter = state.parameter(call, index)?;
        Err(Error::argument(call, format!("{state}, parameter {index} {parameter} has no values yet: broadcast or load them first")))
    }

    /// Starts to gather a unit that is not gathered.
    fn start_gather(&mut self, unit: usize) -> Result<()> {
        let state = &mut self.units[unit];
        if state.gathered.is_some() {
            return Ok(());
        }
        let mut whole = self.gathers.take(state.gather_type, state.layout.len)?;
        state.share.copy_part(0..state.own.len(), &mut *whole, state.own.start)?;
        whole.start_all_gather(&self.comm)?;
        self.calls.note(UnitCall::Gather(unit));
        state.gathered = Some(whole);
        Ok(())
    }

    /// Returns a gathered unit's elements, if they are `T`s and the parameter exists.
    fn in_use<T: Float>(&self, call: &'static str, unit: usize, parameter: usize) -> Result<(&Flat<T>, &UnitState)> {
        let state = self.known(call, unit)?;
        let len = state.parameter(call, parameter)?.len().unwrap_or_default();
        state.fitting::<T>(call, parameter, state.gather_type, len)?;
        match &state.gathered {
            Some(gathered) if state.in_use => Ok((typed(&**gathered)?, state)),
            _ => Err(Error::argument(call, format!("{state} is not gathered"))),
        }
    }
}
