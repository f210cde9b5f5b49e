//! Saves candle's variables in checkpoints, and loads them with any number of ranks.
//!
//! The functions add tensors to a [`Writer`] of `collectives-train`, and read tensors from a [`Checkpoint`]. So one
//! checkpoint can contain variables, the state of an optimiser, and metadata. A [`Saver`] saves the checkpoint in the
//! background. The files are safetensors files. If a tensor is not split over ranks, it has its own name in one of
//! these files, and candle's `MmapedSafetensors` and Python's `safetensors` can load it.
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path();
//! use candle_core::{DType, Device, Result};
//! use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
//! use collectives::Communicator;
//! use collectives_candle::checkpoint::{read_variables, write_variables};
//! use collectives_train::checkpoint::{Checkpoint, Writer};
//!
//! fn model() -> Result<(VarMap, Linear)> {
//!     let variables = VarMap::new();
//!     let layer = linear(4, 2, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("layer"))?;
//!     Ok((variables, layer))
//! }
//!
//! Communicator::run_local(3, |comm| {
//!     let (variables, _layer) = model().expect("candle");
//!     let mut writer = Writer::new(comm, directory);
//!     write_variables(&mut writer, &variables, |_name| None); // every rank has the whole variables
//!     writer.commit(100).map(drop)
//! })?;
//! Communicator::run_local(2, |comm| {
//!     let (variables, _layer) = model().expect("candle"); // with random values
//!     if let Some(checkpoint) = Checkpoint::resume(comm, directory)? {
//!         read_variables(&checkpoint, &variables, |_name| None).expect("candle"); // with the saved values
//!     }
//!     Ok(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # State of optimisers
//!
//! candle's `SGD` has no state. candle's `AdamW` does not give access to its state, so the state cannot be saved. For
//! your own optimiser, keep the state in a [`VarMap`], or pass each tensor to [`write_tensor`].
//!
//! [`Saver`]: collectives_train::checkpoint::Saver

use std::sync::PoisonError;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, Var};
use candle_nn::VarMap;
use collectives::Error;
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};

use crate::failed;
use crate::memory::extent;

/// Adds all variables of a map to a checkpoint, with their names.
///
/// For a variable that is split over the ranks, `split` returns the shape of the whole tensor and this rank's piece. If
/// `split` returns `None`, every rank must have the same whole variable. Then one rank writes the variable, and no rank
/// compares the values.
///
/// The values are read during the [`commit`](Writer::commit), or when the writer is passed to a `Saver`. A rank reads
/// only variables that it writes, in host or GPU memory.
///
/// This call returns no error. The commit fails on every rank in these cases:
///
/// - A variable does not have the shape of its piece.
/// - A variable has a type that candle cannot compute with.
/// - [`Writer::tensor`] does not accept the name or the piece.
pub fn write_variables(writer: &mut Writer<'_>, variables: &VarMap, split: impl Fn(&str) -> Option<(Vec<usize>, Piece)>) {
    for (name, variable) in sorted(variables) {
        let (shape, piece) = split(&name).unwrap_or_else(|| (variable.dims().to_vec(), Piece::Whole));
        write_tensor(writer, &name, &shape, piece, &variable);
    }
}

/// Adds this rank's piece of a tensor to a checkpoint. `shape` is the shape of the whole tensor. The tensor must have
/// the shape of the piece. If the piece is a range of a dimension, this dimension of the tensor is as long as the
/// range, and the other dimensions are as in `shape`. If the piece is a flat range, the tensor has one dimension.
///
/// The values are read later, and the call returns no error, as for [`write_variables`].
pub fn write_tensor(writer: &mut Writer<'_>, name: &str, shape: &[usize], piece: Piece, tensor: &Tensor) {
    if let Err(error) = piece.shape(shape).and_then(|expected| expect(name, tensor, &expected)) {
        return writer.refuse(error);
    }
    let tensor = tensor.clone();
    let named = name.to_owned();
    macro_rules! each {
        ($($kind:ident)*) => {
            match tensor.dtype() {
                $(DType::$kind => drop(writer.tensor_with(name, shape, piece, move || {
                    let elements = elements(&tensor, |storage| match storage {
                        CpuStorage::$kind(elements) => Some(elements),
                        _ => None,
                    });
                    elements.map_err(|error| unreadable(&named, &error))
                })),)*
                dtype => writer.refuse(unsupported(name, dtype.as_str())),
            }
        };
    }
    each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3);
}

/// Reads all variables of a map from a checkpoint. `split` returns the shape and this rank's piece of a variable that
/// is split over the ranks, as for [`write_variables`]. The number of ranks may differ from the number of ranks that
/// saved the checkpoint. Other tensors of the checkpoint are ignored. Local.
///
/// # Errors
///
/// Fails, and changes no variable, if the checkpoint has no tensor with a variable's name, type and shape, or if the
/// tensor does not contain this rank's piece. The error names the variable. Also fails if a file cannot be read; some
/// variables may then have changed.
pub fn read_variables(checkpoint: &Checkpoint, variables: &VarMap, split: impl Fn(&str) -> Option<(Vec<usize>, Piece)>) -> Result<()> {
    let mut found = Vec::new();
    for (name, variable) in sorted(variables) {
        let (shape, piece) = split(&name).unwrap_or_else(|| (variable.dims().to_vec(), Piece::Whole));
        check(checkpoint, &name, &variable, &shape, &piece).map_err(failed)?;
        found.push((name, variable, shape, piece));
    }
    for (name, variable, shape, piece) in found {
        variable.set(&read_tensor(checkpoint, &name, &shape, piece, variable.device())?)?;
    }
    Ok(())
}

/// Reads a piece of a tensor from a checkpoint. `shape` is the shape of the whole tensor. The result has the shape of
/// the piece, and the type that was saved. Local.
///
/// # Errors
///
/// Fails in these cases:
///
/// - The checkpoint has no tensor of this name and shape, or the tensor has no such piece.
/// - The tensor has a type that candle does not have.
/// - A file cannot be read, or candle fails.
pub fn read_tensor(checkpoint: &Checkpoint, name: &str, shape: &[usize], piece: Piece, device: &Device) -> Result<Tensor> {
    let dtype = checkpoint.dtype(name).map_err(failed)?;
    let own = piece.shape(shape).map_err(failed)?;
    macro_rules! each {
        ($($kind:ident = $theirs:ident),*) => {
            match dtype {
                $(collectives::DType::$theirs => CpuStorage::$kind(checkpoint.read_vec(name, shape, piece).map_err(failed)?),)*
                dtype => return Err(failed(unsupported(name, &dtype.to_string()))),
            }
        };
    }
    let storage = each!(U8 = U8, U32 = U32, I16 = I16, I32 = I32, I64 = I64, BF16 = Bf16, F16 = F16, F32 = F32, F64 = F64, F8E4M3 = F8E4M3);
    Tensor::from_storage(Storage::Cpu(storage), own, BackpropOp::none(), false).to_device(device)
}

/// Returns the variables in the order of their names.
fn sorted(variables: &VarMap) -> Vec<(String, Var)> {
    let map = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
    let mut all: Vec<(String, Var)> = map.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect();
    all.sort_by(|(first, _), (second, _)| first.cmp(second));
    all
}

/// Refuses a tensor that does not have the shape of its piece.
fn expect(name: &str, tensor: &Tensor, expected: &[usize]) -> collectives::Result<()> {
    if tensor.dims() == expected {
        return Ok(());
    }
    let reason = format!("tensor {name:?} has shape {:?} on this rank, but its piece has shape {expected:?}", tensor.dims());
    Err(Error::argument("checkpoint", reason))
}

/// Refuses a variable that does not have the type and shape of its piece in the checkpoint.
fn check(checkpoint: &Checkpoint, name: &str, variable: &Tensor, shape: &[usize], piece: &Piece) -> collectives::Result<()> {
    let (dtype, saved) = (checkpoint.dtype(name)?, checkpoint.shape(name)?);
    // Both crates use the same names for the types that both have.
    if saved != shape || dtype.to_string() != variable.dtype().as_str() {
        let reason = format!("variable {name:?} is {}{shape:?}, but the checkpoint has {dtype}{saved:?}", variable.dtype().as_str());
        return Err(Error::argument("read_variables", reason));
    }
    expect(name, variable, &piece.shape(shape)?)
}

/// Returns the elements of a tensor in any memory. `of` returns them from a storage of the tensor's type.
fn elements<T: Clone>(tensor: &Tensor, of: impl Fn(&CpuStorage) -> Option<&Vec<T>>) -> Result<Vec<T>> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (from, to) = extent(layout)?;
    match &*storage {
        Storage::Cpu(storage) => of(storage).map(|elements| elements[from..to].to_vec()),
        _ => None,
    }
    .ok_or_else(|| candle_core::Error::msg("the tensor is not in host memory, or its type has changed"))
}

fn unreadable(name: &str, error: &candle_core::Error) -> Error {
    Error::io(format!("reading tensor {name:?}"), std::io::Error::other(error.to_string()))
}

fn unsupported(name: &str, dtype: &str) -> Error {
    Error::unsupported(format!("tensor {name:?} of type {dtype}"), "candle or collectives does not have this element type")
}
