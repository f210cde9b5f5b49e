//! A unit of a sharded model: its name, and the function that makes its module.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Shape, Tensor};
use candle_nn::{VarBuilder, VarMap};
use collectives::{bf16, f16};
use collectives_train::Parameter;

/// A function that makes the unit's module from its parameters.
type Make = dyn Fn(VarBuilder<'static>) -> Result<Box<dyn Module>> + Send + Sync;

/// A part of a model whose parameters are gathered and released together, for example one layer. See
/// [`FullySharded`](super::FullySharded).
pub struct Unit {
    name: String,
    make: Arc<Make>,
}

impl Unit {
    /// Creates a unit. `make` makes the unit's module from a [`VarBuilder`], as the functions of candle's layers do.
    ///
    /// `make` runs twice when the model is made, and then once in each forward pass and each backward pass of the unit.
    /// So `make` must always ask for the same parameters, and should do nothing slow. A module can be any [`Module`],
    /// for example a layer of candle or a closure:
    ///
    /// ```
    /// use candle_core::{Module, Tensor};
    /// use collectives_candle::Unit;
    ///
    /// let unit = Unit::new("layers.0", |vb| {
    ///     let (up, down) = (candle_nn::linear(8, 32, vb.pp("up"))?, candle_nn::linear(32, 8, vb.pp("down"))?);
    ///     Ok(move |x: &Tensor| x + down.forward(&up.forward(x)?.gelu()?)?)
    /// });
    /// assert_eq!(unit.name(), "layers.0");
    /// ```
    pub fn new<M: Module + 'static>(
        name: impl Into<String>,
        make: impl Fn(VarBuilder<'static>) -> Result<M> + Send + Sync + 'static,
    ) -> Self {
        let make = move |parameters: VarBuilder<'static>| Ok(Box::new(make(parameters)?) as Box<dyn Module>);
        Self { name: name.into(), make: Arc::new(make) }
    }

    /// Returns the unit's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes new parameters with random values, and returns them in the order of their names.
    pub(super) fn initial(&self, dtype: DType) -> Result<Vec<(String, Tensor)>> {
        let variables = VarMap::new();
        (self.make)(VarBuilder::from_varmap(&variables, dtype, &Device::Cpu))?;
        let Ok(variables) = variables.data().lock() else { candle_core::bail!("unit {:?}: its map of variables is poisoned", self.name) };
        let mut named: Vec<_> = variables.iter().map(|(name, variable)| (name.clone(), variable.as_detached_tensor())).collect();
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(named)
    }

    /// Finds out the parameters.
    pub(super) fn described(self, dtype: DType) -> Result<Described> {
        let initial = self.initial(dtype)?;
        let dtype = initial.first().map_or(dtype, |(_, first)| first.dtype());
        let parameters: Vec<_> = initial.into_iter().map(|(name, value)| (name, value.shape().clone(), value.dtype())).collect();
        Ok(Described { unit: self, parameters, dtype })
    }
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Unit").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A unit whose parameters are known.
pub(super) struct Described {
    pub(super) unit: Unit,
    /// Names within the unit, shapes and types, in the order of the names.
    pub(super) parameters: Vec<(String, Shape, DType)>,
    /// The type of the shards.
    pub(super) dtype: DType,
}

impl Described {
    /// Describes the unit to `collectives-train`.
    pub(super) fn listed(&self) -> Result<collectives_train::Unit> {
        let parameters: Result<_> = self.parameters.iter().map(|(name, shape, dtype)| listed(name, shape, *dtype)).collect();
        Ok(collectives_train::Unit::new(self.unit.name.clone(), parameters?))
    }

    /// Returns the full names of the parameters.
    pub(super) fn names(&self) -> impl Iterator<Item = String> + '_ {
        self.parameters.iter().map(|(name, ..)| format!("{}.{name}", self.unit.name))
    }

    /// Makes the module from gathered parameters, and runs it.
    pub(super) fn run(&self, parameters: &[Tensor], dtype: DType, input: &Tensor) -> Result<Tensor> {
        let names = self.parameters.iter().map(|(name, ..)| name.clone());
        let parameters: HashMap<_, _> = names.zip(parameters.iter().cloned()).collect();
        (self.unit.make)(VarBuilder::from_tensors(parameters, dtype, &Device::Cpu))?.forward(input)
    }
}

fn listed(name: &str, shape: &Shape, dtype: DType) -> Result<Parameter> {
    Ok(match dtype {
        DType::F32 => Parameter::new::<f32>(name, shape.dims()),
        DType::F64 => Parameter::new::<f64>(name, shape.dims()),
        DType::F16 => Parameter::new::<f16>(name, shape.dims()),
        DType::BF16 => Parameter::new::<bf16>(name, shape.dims()),
        other => candle_core::bail!("parameter {name} is of {other:?}; parameters must be f32, f64, f16 or bf16"),
    })
}
