//! This rank's shards, and the progress of the current step.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use candle_nn::Optimizer;
use collectives::{Communicator, bf16, f16};
use collectives_train::{Float, FullySharded, ReducedGradients, Shard};

use super::unit::Described;
use crate::failed;

/// Evaluates an expression with `$T` as the type that a candle type stands for.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {{
        macro_rules! as_type {
            ($type:ty) => {{
                type $T = $type;
                $body
            }};
        }
        match $dtype {
            DType::F32 => as_type!(f32),
            DType::F64 => as_type!(f64),
            DType::F16 => as_type!(f16),
            DType::BF16 => as_type!(bf16),
            other => candle_core::bail!("a parameter is of {other:?}; parameters must be f32, f64, f16 or bf16"),
        }
    }};
}

/// What changes while a model is trained.
pub(super) struct State {
    model: FullySharded,
    /// This rank's shard of each unit, which the optimiser updates.
    shards: Vec<Var>,
    /// The unit that was last used in a forward pass.
    last: Option<usize>,
    /// Whether each unit's gradients were passed in this backward pass.
    passed: Vec<bool>,
    /// The number of updates.
    updates: u64,
    /// Whether a step has failed on a rank, so that the ranks' shards may not fit together.
    pub(super) has_failed: bool,
}

impl State {
    /// Fills a new model with rank 0's initial values. Collective.
    pub(super) fn new(comm: &Communicator, mut model: FullySharded, units: &[Described], dtype: DType) -> Result<Self> {
        for (number, unit) in units.iter().enumerate() {
            let initial = if comm.rank() == 0 { unit.unit.initial(dtype).map(Some) } else { Ok(None) };
            let initial =
                super::agreement::together(comm, "FullySharded::new: initial values", initial.and_then(|initial| unit.checked(initial)))?;
            with_float!(unit.dtype, T => broadcast::<T>(&mut model, number, unit, initial)?);
        }
        let shards: Result<_> =
            units.iter().enumerate().map(|(number, unit)| with_float!(unit.dtype, T => variable::<T>(&model, number))).collect();
        Ok(Self { model, shards: shards?, last: None, passed: vec![false; units.len()], updates: 0, has_failed: false })
    }

    /// Returns the shards that are not empty: candle's optimisers refuse empty variables.
    pub(super) fn variables(&self) -> Vec<Var> {
        self.shards.iter().filter(|shard| shard.elem_count() > 0).cloned().collect()
    }

    pub(super) fn updates(&self) -> u64 {
        self.updates
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let bytes = |shard: &Var| shard.elem_count() * shard.dtype().size_in_bytes();
        self.model.memory_bytes() + self.shards.iter().map(bytes).sum::<usize>()
    }

    /// Begins a unit's forward pass. If the unit is not behind the last one, it begins a pass through the model.
    pub(super) fn enter(&mut self, unit: usize) -> Result<()> {
        if self.last.is_none_or(|last| unit <= last) || self.passed.contains(&true) {
            self.end_backward()?;
        }
        self.last = Some(unit);
        Ok(())
    }

    fn end_backward(&mut self) -> Result<()> {
        self.passed.fill(false);
        self.model.end_backward().map_err(failed)
    }

    /// Returns a unit's whole parameters, in the type in which they are gathered. Collective.
    pub(super) fn gather(&mut self, number: usize, unit: &Described, dtype: DType, is_variable: bool) -> Result<Vec<Tensor>> {
        self.model.gather(number).map_err(failed)?;
        let tensors = with_float!(dtype, T => gathered::<T>(&self.model, number, unit, is_variable));
        self.model.release(number).map_err(failed)?;
        tensors
    }

    /// Passes the gradients of a unit. A parameter without a gradient counts as zeros. Collective.
    pub(super) fn reduce(&mut self, unit: usize, parameters: &[Tensor], dtype: DType, gradients: &GradStore) -> Result<()> {
        // The unit is used several times in a pass, or this is another backward pass: the gradients are added up.
        if self.passed[unit] {
            self.end_backward()?;
        }
        let gradient = |parameter: &Tensor| match gradients.get(parameter) {
            Some(gradient) => gradient.flatten_all(),
            None => parameter.zeros_like()?.flatten_all(),
        };
        with_float!(dtype, T => {
            let gradients: Result<Vec<Vec<T>>> = parameters.iter().map(|parameter| gradient(parameter)?.to_vec1()).collect();
            self.model.reduce_gradients(unit, &gradients?).map_err(failed)?;
        });
        self.passed[unit] = true;
        Ok(())
    }

    /// Ends a step. Returns whether the optimiser has run. Collective.
    pub(super) fn update<O: Optimizer>(
        &mut self,
        root: &Var,
        optimizer: &mut O,
        change: impl FnOnce(&mut ReducedGradients<'_>) -> collectives::Result<bool>,
    ) -> Result<bool> {
        (self.last, self.updates) = (None, self.updates + 1);
        self.passed.fill(false);
        let mut reduced = self.model.reduce().map_err(failed)?;
        if !change(&mut reduced).map_err(failed)? {
            return Ok(false);
        }
        let mut own = Vec::new();
        let kept = reduced.update(|shard| {
            own.push(gradient(shard));
            Ok(())
        });
        kept.map_err(failed)?;
        let mut gradients = root.backward()?;
        for (shard, gradient) in self.shards.iter().zip(own) {
            gradients.insert(shard, gradient?);
        }
        optimizer.step(&gradients)?;
        self.shards.iter().enumerate().try_for_each(
            |(unit, shard)| with_float!(shard.dtype(), T => self.model.load_shard(unit, &shard.to_vec1::<T>()?).map_err(failed)),
        )?;
        Ok(true)
    }

    /// Returns a unit's whole parameters in their own type, by their full names. Collective.
    pub(super) fn tensors(&self, number: usize, unit: &Described) -> Result<HashMap<String, Tensor>> {
        let tensors = with_float!(unit.dtype, T => whole::<T>(&self.model, number, unit)?);
        Ok(unit.names().zip(tensors).collect())
    }

    /// Replaces the parameters of a unit. If a value is missing or does not fit, nothing is replaced.
    pub(super) fn set_tensors(&mut self, number: usize, unit: &Described, values: &HashMap<String, Tensor>) -> Result<()> {
        let found: Result<Vec<&Tensor>> = unit
            .names()
            .zip(&unit.parameters)
            .map(|(name, (_, shape, dtype))| {
                let Some(value) = values.get(&name) else { candle_core::bail!("there is no value for parameter {name}") };
                if (value.shape(), value.dtype()) != (shape, *dtype) {
                    candle_core::bail!(
                        "parameter {name} has shape {shape:?} and type {dtype:?}, but the value has shape {:?} and type {:?}",
                        value.shape(),
                        value.dtype()
                    );
                }
                Ok(value)
            })
            .collect();
        let found = found?;
        with_float!(unit.dtype, T => {
            for (parameter, value) in found.into_iter().enumerate() {
                self.model.load(number, parameter, &value.flatten_all()?.to_vec1::<T>()?).map_err(failed)?;
            }
            self.shards[number].set(variable::<T>(&self.model, number)?.as_tensor())?;
        });
        self.updates += 1;
        Ok(())
    }
}

impl Described {
    /// Refuses initial values of other parameters than at first. Ranks other than 0 have none.
    fn checked(&self, initial: Option<Vec<(String, Tensor)>>) -> Result<Option<Vec<Tensor>>> {
        let Some(initial) = initial else { return Ok(None) };
        let is_same = |((name, shape, dtype), (other, value)): (&(String, _, DType), &(String, Tensor))| {
            name == other && shape == value.shape() && *dtype == value.dtype()
        };
        if initial.len() != self.parameters.len() || !self.parameters.iter().zip(&initial).all(is_same) {
            candle_core::bail!(
                "unit {:?} asked for other parameters when its module was made again; it must always ask for the same ones",
                self.unit.name()
            );
        }
        Ok(Some(initial.into_iter().map(|(_, value)| value).collect()))
    }
}

/// Copies rank 0's initial values of a unit to every rank.
fn broadcast<T: Float + WithDType>(model: &mut FullySharded, number: usize, unit: &Described, initial: Option<Vec<Tensor>>) -> Result<()> {
    for (parameter, (_, shape, _)) in unit.parameters.iter().enumerate() {
        let mut values: Vec<T> = match &initial {
            Some(initial) => initial[parameter].flatten_all()?.to_vec1()?,
            None => Tensor::zeros(shape.elem_count(), <T as WithDType>::DTYPE, &Device::Cpu)?.to_vec1()?,
        };
        model.broadcast(number, parameter, &mut values, 0).map_err(failed)?;
    }
    Ok(())
}

/// Returns a variable with this rank's shard of a unit.
fn variable<T: Float + WithDType>(model: &FullySharded, unit: usize) -> Result<Var> {
    let shard = model.shard::<T>(unit).map_err(failed)?;
    Var::from_slice(shard, shard.len(), &Device::Cpu)
}

/// Returns copies of a gathered unit's parameters.
fn gathered<T: Float + WithDType>(model: &FullySharded, number: usize, unit: &Described, is_variable: bool) -> Result<Vec<Tensor>> {
    let parameters = unit.parameters.iter().enumerate();
    parameters
        .map(|(parameter, (_, shape, _))| {
            let values = model.parameter::<T>(number, parameter).map_err(failed)?;
            match is_variable {
                true => Var::from_slice(values, shape.clone(), &Device::Cpu).map(Var::into_inner),
                false => Tensor::from_slice(values, shape.clone(), &Device::Cpu),
            }
        })
        .collect()
}

/// Returns a unit's parameters from all ranks' shards.
fn whole<T: Float + WithDType>(model: &FullySharded, number: usize, unit: &Described) -> Result<Vec<Tensor>> {
    let (shard, comm) = (model.shard::<T>(number).map_err(failed)?, model.communicator());
    let mut values: Vec<T> = Tensor::zeros(shard.len() * comm.world_size(), <T as WithDType>::DTYPE, &Device::Cpu)?.to_vec1()?;
    comm.all_gather_into(shard, &mut values).map_err(failed)?;
    let slots = model.layouts().nth(number).map(|layout| &layout.slots).into_iter().flatten();
    let each = slots.zip(&unit.parameters);
    each.map(|(slot, (_, shape, _))| Tensor::from_slice(&values[slot.range.clone()], shape.clone(), &Device::Cpu)).collect()
}

/// Returns a shard's gradients.
fn gradient(shard: &mut Shard<'_>) -> Result<Tensor> {
    fn of<T: Float + WithDType>(shard: &mut Shard<'_>) -> Result<Tensor> {
        let (_, gradients) = shard.values::<T>().map_err(failed)?;
        Tensor::from_slice(gradients, gradients.len(), &Device::Cpu)
    }
    match shard.layout.dtype {
        collectives::DType::F32 => of::<f32>(shard),
        collectives::DType::F64 => of::<f64>(shard),
        collectives::DType::F16 => of::<f16>(shard),
        _ => of::<bf16>(shard),
    }
}
