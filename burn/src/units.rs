//! Moves the values of parameters between a module and the shards of its units.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Element, ElementConversion as _, Tensor, TensorData};
use collectives::{bf16, f16};
use collectives_train::{Float, FullySharded, Shard};

use crate::error::{Error, Result};
use crate::parameters::Trained;

/// Evaluates an expression with `$T` as the type of a parameter's elements.
macro_rules! with_float {
    ($what:expr, $dtype:expr, $T:ident => $body:expr) => {{
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
            dtype => Err(Error::Type { what: $what.to_owned(), dtype }),
        }
    }};
}

/// Returns burn's name of a type of parameters.
pub(crate) fn burn_type(dtype: collectives::DType) -> DType {
    match dtype {
        collectives::DType::F64 => DType::F64,
        collectives::DType::F16 => DType::F16,
        collectives::DType::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

/// A mapper that moves the values of parameters into the shards, and leaves empty parameters.
pub(crate) struct Take<'a> {
    pub(crate) model: FullySharded,
    pub(crate) units: &'a [Vec<Trained>],
    pub(crate) outcome: Result<()>,
}

impl ModuleMapper for Take<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = |(unit, parameters): (usize, &Vec<Trained>)| Some((unit, parameters.iter().position(|one| one.id == param.id)?));
        let Some((unit, number)) = self.units.iter().enumerate().find_map(place).filter(|_| self.outcome.is_ok()) else { return param };
        self.outcome = load(&mut self.model, unit, number, &self.units[unit][number].name, param.val());
        param.map(|whole| Tensor::zeros([0; D], (&whole.device(), whole.dtype())).require_grad())
    }
}

fn load<const D: usize>(model: &mut FullySharded, unit: usize, number: usize, name: &str, values: Tensor<D>) -> Result<()> {
    let data = read(name, values)?;
    with_float!(name, data.dtype(), T => {
        let values = data.as_slice::<T>().map_err(|error| Error::burn(name, format!("{error:?}")))?;
        Ok(model.load(unit, number, values)?)
    })
}

fn read<const D: usize>(what: &str, tensor: Tensor<D>) -> Result<TensorData> {
    tensor.inner().try_into_data().map_err(|error| Error::burn(what, format!("{error:?}")))
}

/// A mapper that fills the parameters of a gathered unit.
pub(crate) struct Fill<'a> {
    pub(crate) model: &'a FullySharded,
    pub(crate) unit: usize,
    pub(crate) parameters: &'a [Trained],
    /// The type in which the unit is gathered.
    pub(crate) dtype: DType,
    pub(crate) outcome: Result<()>,
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let number = self.parameters.iter().position(|one| one.id == param.id);
        let Some(number) = number.filter(|_| self.outcome.is_ok()) else { return param };
        let parameter = &self.parameters[number];
        match with_float!(&parameter.name, self.dtype, T => gathered::<T>(self.model, self.unit, number, parameter)) {
            Ok(values) => param.map(|empty| Tensor::from_data(values, (&empty.device(), self.dtype)).require_grad()),
            Err(error) => {
                self.outcome = Err(error);
                param
            }
        }
    }
}

fn gathered<T: Float + Element>(model: &FullySharded, unit: usize, number: usize, parameter: &Trained) -> Result<TensorData> {
    Ok(TensorData::new(model.parameter::<T>(unit, number)?.to_vec(), parameter.shape.clone()))
}

/// A visitor that collects the gradients of a unit's parameters.
pub(crate) struct Collect<'a> {
    parameters: &'a [Trained],
    gradients: GradientsParams,
    found: Vec<Option<TensorData>>,
    outcome: Result<()>,
}

impl<'a> Collect<'a> {
    pub(crate) fn new(parameters: &'a [Trained], gradients: GradientsParams) -> Self {
        Self { parameters, gradients, found: vec![None; parameters.len()], outcome: Ok(()) }
    }

    /// Passes the gradients to the shards. A parameter without a gradient counts as zeros.
    pub(crate) fn reduce(self, model: &mut FullySharded, unit: usize, dtype: DType) -> Result<()> {
        self.outcome?;
        with_float!("a gradient", dtype, T => {
            let each = self.found.into_iter().zip(self.parameters);
            let gradients = each.map(|(found, parameter)| elements::<T>(found, parameter)).collect::<Result<Vec<Vec<T>>>>()?;
            Ok(model.reduce_gradients(unit, &gradients)?)
        })
    }
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(number) = self.parameters.iter().position(|one| one.id == param.id) else { return };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            match read(&self.parameters[number].name, gradient) {
                Ok(data) => self.found[number] = Some(data),
                Err(error) => self.outcome = Err(error),
            }
        }
    }
}

fn elements<T: Float + Element>(found: Option<TensorData>, parameter: &Trained) -> Result<Vec<T>> {
    match found {
        Some(data) => data.try_into_vec().map_err(|error| Error::burn(&parameter.name, format!("{error:?}"))),
        None => Ok(vec![0.0_f32.elem(); parameter.shape.iter().product()]),
    }
}

/// Returns this rank's shard of a unit as a parameter's values.
pub(crate) fn shard(model: &FullySharded, unit: usize, dtype: DType, device: &Device) -> Result<Tensor<1>> {
    with_float!("a shard", dtype, T => {
        let values = model.shard::<T>(unit)?.to_vec();
        let len = values.len();
        Ok(Tensor::from_data(TensorData::new(values, [len]), (device, dtype)).require_grad())
    })
}

/// Returns the gradients of a shard.
pub(crate) fn own_gradient(shard: &mut Shard<'_>, device: &Device) -> collectives::Result<Tensor<1>> {
    fn of<T: Float + Element>(shard: &mut Shard<'_>, device: &Device) -> collectives::Result<Tensor<1>> {
        let values = shard.values::<T>()?.1.to_vec();
        let len = values.len();
        Ok(Tensor::from_data(TensorData::new(values, [len]), (device, T::dtype())))
    }
    match shard.layout.dtype {
        collectives::DType::F64 => of::<f64>(shard, device),
        collectives::DType::F16 => of::<f16>(shard, device),
        collectives::DType::Bf16 => of::<bf16>(shard, device),
        _ => of::<f32>(shard, device),
    }
}

/// Copies an updated shard back.
pub(crate) fn write_back(model: &mut FullySharded, unit: usize, values: Tensor<1>) -> Result<()> {
    let data = read("a shard", values)?;
    with_float!("a shard", data.dtype(), T => {
        let values = data.as_slice::<T>().map_err(|error| Error::burn("a shard", format!("{error:?}")))?;
        Ok(model.load_shard(unit, values)?)
    })
}
