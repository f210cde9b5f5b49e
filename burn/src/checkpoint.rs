//! Saves burn's modules and optimisers in checkpoints, and loads them with any number of ranks.
//!
//! The functions add tensors to a [`Writer`] of `collectives-train`, and read tensors from a [`Checkpoint`]. So one
//! checkpoint can contain a module, an optimiser, and metadata. A [`Saver`] saves the checkpoint in the background. The
//! files are safetensors files. Each parameter has its own name in one of these files, and other programs can load it.
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path();
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamConfig;
//! use burn::tensor::Device;
//! use collectives::Communicator;
//! use collectives_burn::checkpoint::{read_module, read_optimizer, write_module, write_optimizer};
//! use collectives_burn::{Result, Trainer};
//! use collectives_train::checkpoint::{Checkpoint, Writer};
//!
//! fn train(comm: &Communicator, directory: &std::path::Path) -> Result<()> {
//!     let mut module: Linear = LinearConfig::new(4, 2).init(&Device::default().autodiff());
//!     let mut optimizer = AdamConfig::new().init();
//!     if let Some(checkpoint) = Checkpoint::resume(comm, directory)? {
//!         module = read_module(&checkpoint, "model", module)?;
//!         optimizer = read_optimizer(&checkpoint, "optimizer", optimizer)?;
//!     }
//!     let (trainer, module) = Trainer::new(comm, module, optimizer)?;
//!     // … train …
//!     let mut writer = Writer::new(comm, directory);
//!     write_module(&mut writer, "model", &module); // the tensors `model.weight` and `model.bias`
//!     write_optimizer(&mut writer, "optimizer", trainer.optimizer());
//!     writer.commit(100)?;
//!     Ok(())
//! }
//!
//! Communicator::run_local(3, |comm| Ok(train(comm, directory).expect("burn")))?;
//! Communicator::run_local(2, |comm| Ok(train(comm, directory).expect("burn")))?; // continues with two ranks
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Saver`]: collectives_train::checkpoint::Saver

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, Bytes, DType, Float, Int, Tensor, TensorData, kind::Basic};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};

use crate::data::with_type;
use crate::error::{Error, Result};
use crate::parameters::Path;

/// Adds all parameters of a module to a checkpoint: floats, integers and truth values, with a gradient or without.
///
/// The name of a tensor consists of `prefix`, a dot, and the path of the parameter in the module. With an empty prefix,
/// the name is the path. A parameter has the same form as in burn's own records. The metadata of the checkpoint
/// contains the ids of the parameters. A saved optimiser refers to parameters by these ids.
///
/// Every rank must have the same module with the same values. One rank writes a parameter, and no rank compares the
/// values. During the [`commit`](Writer::commit), or when the writer is passed to a `Saver`, a rank copies to the host
/// only the parameters that it writes.
///
/// This call returns no error. The commit fails on every rank in these cases:
///
/// - A parameter has a type that `collectives` does not support, such as a quantised type.
/// - [`Writer::tensor`] does not accept the name.
pub fn write_module<M: Module>(writer: &mut Writer<'_>, prefix: &str, module: &M) {
    let mut adding = Adding { writer, prefix, path: Path::default(), ids: String::new() };
    module.visit(&mut adding);
    let ids = adding.ids;
    // The ids differ between the ranks. Those of the rank that writes the optimiser are needed.
    if writer.communicator().rank() == 0 {
        writer.metadata(ids_key(prefix), ids);
    }
}

/// Reads all parameters of a module from a checkpoint to which [`write_module`] added them with the same prefix, and
/// returns the module. The number of ranks may differ from the number of ranks that saved the checkpoint. A parameter
/// gets the id that it had on rank 0 when it was saved. Other tensors of the checkpoint are ignored. Local.
///
/// # Errors
///
/// Fails if the checkpoint has no tensor with a parameter's name, type and shape, or if a file cannot be read. The
/// error names the parameter. An error consumes the module, so pass a clone if you still need it.
pub fn read_module<M: Module>(checkpoint: &Checkpoint, prefix: &str, module: M) -> Result<M> {
    let ids = checkpoint.metadata().get(&ids_key(prefix)).map(|ids| parse(ids)).unwrap_or_default();
    let mut reading = Reading { checkpoint, prefix, ids, path: Path::default(), outcome: Ok(()) };
    let module = module.map(&mut reading);
    reading.outcome.map(|()| module)
}

/// Adds rank 0's state of an optimiser to a checkpoint, as the bytes of burn's record, in a tensor with this name.
/// After data-parallel training, all ranks have the same state.
///
/// The state refers to parameters by their ids. So save the module in the same checkpoint with [`write_module`].
///
/// This call returns no error. The [`commit`](Writer::commit) fails on every rank if burn cannot make the record.
pub fn write_optimizer(writer: &mut Writer<'_>, name: &str, optimizer: &ModuleOptimizer) {
    if writer.communicator().rank() != 0 {
        return;
    }
    match optimizer.into_bytes() {
        Ok(bytes) => {
            let bytes = bytes.to_vec();
            writer.tensor_with(name, &[bytes.len()], Piece::Whole, move || Ok(bytes));
        }
        Err(error) => writer.refuse(unreadable(name, &error)),
    }
}

/// Reads the state of an optimiser that [`write_optimizer`] saved. `optimizer` must have the same configuration as the
/// saved optimiser. The state belongs to the parameters of the module that [`read_module`] reads from the same
/// checkpoint. Local.
///
/// # Errors
///
/// Fails if there is no such tensor, if a file cannot be read, or if burn does not accept the record.
pub fn read_optimizer(checkpoint: &Checkpoint, name: &str, optimizer: ModuleOptimizer) -> Result<ModuleOptimizer> {
    let bytes = checkpoint.read_vec::<u8>(name, checkpoint.shape(name)?, Piece::Whole)?;
    optimizer.from_bytes(Bytes::from_bytes_vec(bytes)).map_err(|error| Error::burn(name, error))
}

/// Returns the key of the metadata with a module's ids.
fn ids_key(prefix: &str) -> String {
    named(prefix, "burn parameter ids")
}

/// Returns the ids of parameters by their paths. Each line has an id and a path.
fn parse(ids: &str) -> HashMap<&str, u64> {
    ids.lines().filter_map(|line| line.split_once(' ')).filter_map(|(id, path)| Some((path, id.parse().ok()?))).collect()
}

fn named(prefix: &str, path: &str) -> String {
    if prefix.is_empty() { path.to_owned() } else { format!("{prefix}.{path}") }
}

fn unreadable(name: &str, error: &impl std::fmt::Display) -> collectives::Error {
    collectives::Error::io(format!("reading tensor {name:?}"), std::io::Error::other(error.to_string()))
}

/// A visitor that adds parameters to a checkpoint.
struct Adding<'w, 'a> {
    writer: &'w mut Writer<'a>,
    prefix: &'w str,
    path: Path,
    ids: String,
}

impl Adding<'_, '_> {
    fn add<const D: usize, K: Basic + 'static>(&mut self, id: ParamId, tensor: Tensor<D, K>) {
        let path = self.path.name();
        self.ids.push_str(&format!("{} {path}\n", id.val()));
        let (name, shape, dtype) = (named(self.prefix, &path), tensor.dims(), tensor.dtype());
        let named = name.clone();
        let data = move || tensor.try_into_data().map_err(|error| unreadable(&named, &format!("{error:?}")));
        if let DType::Bool(_) = dtype {
            self.writer.tensor_with(&name, &shape, Piece::Whole, || Ok(data()?.iter::<bool>().collect()));
            return;
        }
        let added: Result<()> = with_type!(name, dtype, T => {
            let named = name.clone();
            let elements = move || data()?.try_into_vec::<T>().map_err(|error| unreadable(&named, &format!("{error:?}")));
            self.writer.tensor_with(&name, &shape, Piece::Whole, elements);
            Ok(())
        });
        if let Err(error) = added {
            self.writer.refuse(collectives::Error::unsupported(format!("tensor {name:?} of type {dtype:?}"), error.to_string()));
        }
    }
}

impl ModuleVisitor for Adding<'_, '_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param.id, param.transform_for_save().val());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.id, param.transform_for_save().val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.id, param.transform_for_save().val());
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.leave();
    }
}

/// A mapper that gives parameters the values of a checkpoint.
struct Reading<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'a str,
    ids: HashMap<&'a str, u64>,
    path: Path,
    outcome: Result<()>,
}

impl Reading<'_> {
    /// Returns the values of the current parameter, and its id if the checkpoint has the id. Returns `None` after an
    /// error.
    fn read(&mut self, shape: &[usize], dtype: DType) -> Option<(TensorData, Option<ParamId>)> {
        self.outcome.as_ref().ok()?;
        let path = self.path.name();
        match self.values(&named(self.prefix, &path), shape, dtype) {
            Ok(data) => Some((data, self.ids.get(&*path).map(|id| ParamId::from(*id)))),
            Err(error) => {
                self.outcome = Err(error);
                None
            }
        }
    }

    fn values(&self, name: &str, shape: &[usize], dtype: DType) -> Result<TensorData> {
        if let DType::Bool(_) = dtype {
            return Ok(TensorData::new(self.checkpoint.read_vec::<bool>(name, shape, Piece::Whole)?, shape));
        }
        with_type!(name, dtype, T => Ok(TensorData::new(self.checkpoint.read_vec::<T>(name, shape, Piece::Whole)?, shape)))
    }
}

/// Defines a method of a mapper for one kind of tensor. The shape and the type are those of the form that is saved.
macro_rules! map_kind {
    ($method:ident, $kind:ty) => {
        fn $method<const D: usize>(&mut self, param: Param<Tensor<D, $kind>>) -> Param<Tensor<D, $kind>> {
            let saved = param.transform_for_save().val();
            let Some((data, id)) = self.read(&saved.dims(), saved.dtype()) else { return param };
            let (device, id) = (param.lazy_device(), id.unwrap_or(param.id));
            param.transform_for_load(Tensor::from_data(data, (&device, saved.dtype())), id)
        }
    };
}

impl ModuleMapper for Reading<'_> {
    map_kind!(map_float, Float);
    map_kind!(map_int, Int);
    map_kind!(map_bool, Bool);

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.leave();
    }
}
