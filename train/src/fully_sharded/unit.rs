//! One unit on one rank: its shard of the parameters and of the gradients, and the whole unit while it is gathered.

use std::fmt;
use std::ops::Range;

use super::options::{FullyShardedOptions, Unit};
use crate::any_flat::{AnyFlat, fill, zeros};
use crate::bucket::own_range;
use crate::flat::Place;
use crate::layout::{self, BucketLayout};
use crate::parameter::{Float, Parameter, check_fit};
use collectives::Communicator;
use collectives::interop::Memory;
use collectives::{DType, Data};
use collectives::{Error, Result};

/// A rank's state of a unit.
pub(super) struct UnitState {
    pub(super) unit: Unit,
    pub(super) layout: BucketLayout,
    /// The elements that belong to this rank.
    pub(super) own: Range<usize>,
    /// The types in which it is gathered and reduced.
    pub(super) gather_type: DType,
    pub(super) reduce_type: DType,
    /// This rank's shard of the parameters, and of their gradients.
    pub(super) share: Box<dyn AnyFlat>,
    pub(super) gradients: Box<dyn AnyFlat>,
    /// Whether the gradients belong to this step. If not, they belong to an earlier step.
    pub(super) has_gradients: bool,
    /// Whether gradients were passed in this backward pass.
    pub(super) is_reduced: bool,
    /// All ranks' shards, or the call that gathers them.
    pub(super) gathered: Option<Box<dyn AnyFlat>>,
    /// Whether the caller has gathered the unit and not released it.
    pub(super) in_use: bool,
    /// Whether each parameter has values.
    pub(super) loaded: Vec<bool>,
}

/// Returns the flat layout of a unit.
pub(super) fn layout_of(comm: &Communicator, index: usize, unit: &Unit) -> Result<BucketLayout> {
    layout::unit(index, &unit.parameters, comm.world_size())
}

impl UnitState {
    pub(super) fn new(
        comm: &Communicator,
        place: &Place,
        options: &FullyShardedOptions,
        (unit, layout): (Unit, BucketLayout),
    ) -> Result<Self> {
        place.check(comm)?;
        let own = own_range(comm, &layout);
        let share = || zeros(place, layout.dtype, own.len());
        let gather_type = options.gather_type.unwrap_or(layout.dtype);
        let reduce_type = options.reduce_type.unwrap_or(gather_type);
        let (share, gradients, loaded) = (share()?, share()?, vec![false; unit.parameters.len()]);
        let (has_gradients, is_reduced, gathered, in_use) = (false, false, None, false);
        Ok(Self { unit, layout, own, gather_type, reduce_type, share, gradients, has_gradients, is_reduced, gathered, in_use, loaded })
    }

    pub(super) fn parameter(&self, call: &'static str, index: usize) -> Result<&Parameter> {
        let count = self.unit.parameters.len();
        let none = || Error::argument(call, format!("{self} has no parameter {index}: the unit has {count} parameters, numbered from 0"));
        self.unit.parameters.get(index).ok_or_else(none)
    }

    /// Checks that a buffer of `T`s of this length can hold parameter `index`, in its kept or its gathered type.
    pub(super) fn fitting<T: Data>(&self, call: &'static str, index: usize, dtype: DType, len: usize) -> Result<()> {
        let parameter = self.parameter(call, index)?;
        let wanted = (dtype, parameter.len());
        match dtype == self.layout.dtype {
            true => check_fit::<T>(call, format_args!("{self}, parameter {index} {parameter}"), wanted, len),
            false => check_fit::<T>(call, format_args!("{self}, parameter {index} {parameter}, which is gathered as {dtype}"), wanted, len),
        }
    }

    /// Returns the elements of an existing parameter.
    pub(super) fn slot(&self, index: usize) -> Range<usize> {
        self.layout.slots[index].range.clone()
    }

    /// Copies this rank's shard of a parameter's values.
    pub(super) fn load<T: Float>(&mut self, index: usize, values: Memory<'_, T>) -> Result<()> {
        let (own, slot) = (self.own.clone(), self.slot(index));
        let (start, end) = (own.start.max(slot.start), own.end.min(slot.end));
        if start < end {
            fill(&mut *self.share, start - own.start..end - own.start, values, start - slot.start, 1.0)?;
        }
        self.loaded[index] = true;
        Ok(())
    }

    /// Adds this rank's shard of reduced gradients to this step's gradients. Returns the scratch buffer if it was used.
    pub(super) fn add(
        &mut self,
        reduced: &dyn AnyFlat,
        scratch: impl FnOnce() -> Result<Box<dyn AnyFlat>>,
    ) -> Result<Option<Box<dyn AnyFlat>>> {
        let own = self.own.clone();
        if !self.has_gradients {
            self.has_gradients = true;
            return reduced.copy_part(own, &mut *self.gradients, 0).map(|()| None);
        }
        if reduced.dtype() == self.gradients.dtype() {
            return reduced.add_part(own, &mut *self.gradients).map(|()| None);
        }
        let mut converted = scratch()?;
        let len = own.len();
        reduced.copy_part(own, &mut *converted, 0)?;
        converted.add_part(0..len, &mut *self.gradients)?;
        Ok(Some(converted))
    }

    /// Returns the bytes of all its buffers.
    pub(super) fn bytes(&self) -> usize {
        self.share.bytes() + self.gradients.bytes() + self.gathered.as_ref().map_or(0, |gathered| gathered.bytes())
    }
}

impl fmt::Display for UnitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unit {} {:?}", self.layout.index, self.unit.name)
    }
}
