//! The parameters of a module, by name.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};
use collectives::{bf16, f16};
use collectives_train::Parameter;

use crate::error::{Error, Result};

/// A parameter that training changes.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) id: ParamId,
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    dtype: DType,
}

impl Trained {
    /// Returns the description that the buckets need.
    pub(crate) fn described(&self) -> Result<Parameter> {
        Ok(match self.dtype {
            DType::F32 => Parameter::new::<f32>(&self.name, &self.shape),
            DType::F64 => Parameter::new::<f64>(&self.name, &self.shape),
            DType::F16 => Parameter::new::<f16>(&self.name, &self.shape),
            DType::BF16 => Parameter::new::<bf16>(&self.name, &self.shape),
            dtype => return Err(Error::Type { what: self.name.clone(), dtype }),
        })
    }
}

/// The current position in a traversal of a module.
#[derive(Debug, Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn leave(&mut self) {
        self.0.pop();
    }

    pub(crate) fn name(&self) -> String {
        self.0.join(".")
    }
}

#[derive(Default)]
struct Listing {
    path: Path,
    found: Vec<Trained>,
}

impl ModuleVisitor for Listing {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let (shape, dtype) = (param.dims().to_vec(), param.dtype());
            self.found.push(Trained { id: param.id, name: self.path.name(), shape, dtype });
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.leave();
    }
}

/// Returns the parameters that have gradients, in the module's order.
pub(crate) fn trained<M: Module>(module: &M) -> Vec<Trained> {
    let mut listing = Listing::default();
    module.visit(&mut listing);
    listing.found
}
