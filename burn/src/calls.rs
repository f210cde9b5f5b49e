//! Collectives on tensors.

use burn::tensor::{Tensor, TensorData, kind::Basic};
use collectives::{Communicator, ReduceOp};

use crate::data::{Both, InPlace, ToOther, change, compute};
use crate::error::{Error, Result};

/// A call that writes its result to the tensor itself.
enum Change<'a> {
    AllReduce(&'a Communicator, ReduceOp),
    Broadcast(&'a Communicator, usize),
}

impl InPlace for Change<'_> {
    fn run<T: Both>(&self, elements: &mut [T]) -> collectives::Result<()> {
        match *self {
            Self::AllReduce(comm, op) => comm.all_reduce(elements, op),
            Self::Broadcast(comm, root) => comm.broadcast(elements, root),
        }
    }
}

/// A call from one buffer to another, along the first dimension.
enum Move<'a> {
    AllGather(&'a Communicator),
    ReduceScatter(&'a Communicator, ReduceOp),
    AllToAll(&'a Communicator),
}

impl ToOther for Move<'_> {
    fn run<T: Both>(&self, source: &[T], destination: &mut [T]) -> collectives::Result<()> {
        match *self {
            Self::AllGather(comm) => comm.all_gather_into(source, destination),
            Self::ReduceScatter(comm, op) => comm.reduce_scatter_into(source, destination, op),
            Self::AllToAll(comm) => comm.all_to_all_into(source, destination),
        }
    }
}

/// Reduces a tensor over all ranks. Every rank gets the same result.
///
/// # Errors
///
/// Fails if the tensor has a type that `collectives` does not support, or if [`Communicator::all_reduce`] fails.
pub fn all_reduce<const D: usize, K: Basic>(comm: &Communicator, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>> {
    changed("all_reduce", tensor, &Change::AllReduce(comm, op))
}

/// Returns the root's tensor on all ranks. Every rank must pass a tensor of the same type and shape.
///
/// # Errors
///
/// Fails if the tensor has a type that `collectives` does not support, or if [`Communicator::broadcast`] fails.
pub fn broadcast<const D: usize, K: Basic>(comm: &Communicator, tensor: Tensor<D, K>, root: usize) -> Result<Tensor<D, K>> {
    changed("broadcast", tensor, &Change::Broadcast(comm, root))
}

/// Concatenates all ranks' tensors along a dimension, in rank order: `[.., d, ..]` becomes `[.., d × ranks, ..]`. If
/// the dimension is not the first, tensors are copied before and after the call.
///
/// # Errors
///
/// Fails if the dimension does not exist, if the tensor has a type that `collectives` does not support, or if
/// [`Communicator::all_gather`] fails.
pub fn all_gather<const D: usize, K: Basic>(comm: &Communicator, tensor: Tensor<D, K>, dimension: usize) -> Result<Tensor<D, K>> {
    moved("all_gather", tensor, dimension, &Move::AllGather(comm), |side| Ok(side * comm.world_size()))
}

/// Reduces all ranks' tensors and returns this rank's part along a dimension: `[.., d, ..]` becomes `[.., d / ranks,
/// ..]`.
///
/// # Errors
///
/// Fails in these cases:
///
/// - The dimension does not exist or cannot be split equally.
/// - The tensor has a type that `collectives` does not support.
/// - [`Communicator::reduce_scatter`] fails.
pub fn reduce_scatter<const D: usize, K: Basic>(
    comm: &Communicator,
    tensor: Tensor<D, K>,
    dimension: usize,
    op: ReduceOp,
) -> Result<Tensor<D, K>> {
    let part = |side| split("reduce_scatter", side, comm).map(|()| side / comm.world_size());
    moved("reduce_scatter", tensor, dimension, &Move::ReduceScatter(comm, op), part)
}

/// Divides the tensor along a dimension into one equal part for each rank, in rank order. Sends each part to its rank,
/// and returns the parts that this rank receives, concatenated in rank order.
///
/// # Errors
///
/// The errors of [`reduce_scatter`].
pub fn all_to_all<const D: usize, K: Basic>(comm: &Communicator, tensor: Tensor<D, K>, dimension: usize) -> Result<Tensor<D, K>> {
    moved("all_to_all", tensor, dimension, &Move::AllToAll(comm), |side| split("all_to_all", side, comm).map(|()| side))
}

fn split(what: &str, side: usize, comm: &Communicator) -> Result<()> {
    let ranks = comm.world_size();
    let reason = || format!("a dimension of length {side} cannot be split equally between {ranks} ranks");
    if side.is_multiple_of(ranks) { Ok(()) } else { Err(Error::shape(what, reason())) }
}

fn read<const D: usize, K: Basic>(what: &str, tensor: Tensor<D, K>) -> Result<TensorData> {
    tensor.try_into_data().map_err(|error| Error::burn(what, format!("{error:?}")))
}

fn changed<const D: usize, K: Basic>(what: &str, tensor: Tensor<D, K>, call: &impl InPlace) -> Result<Tensor<D, K>> {
    let device = tensor.device();
    let mut data = read(what, tensor)?;
    change(what, &mut data, call)?;
    let dtype = data.dtype();
    Ok(Tensor::from_data(data, (&device, dtype)))
}

/// Makes a call along a dimension; `side` maps the length of this dimension to that of the result.
fn moved<const D: usize, K: Basic>(
    what: &str,
    tensor: Tensor<D, K>,
    dimension: usize,
    call: &impl ToOther,
    side: impl Fn(usize) -> Result<usize>,
) -> Result<Tensor<D, K>> {
    if dimension >= D {
        let shape = tensor.dims();
        let reason = format!("a tensor of shape {shape:?} has no dimension {dimension}: dimensions are numbered from 0");
        return Err(Error::shape(what, reason));
    }
    let device = tensor.device();
    let first = if dimension == 0 { tensor } else { tensor.swap_dims(0, dimension) };
    let mut shape = first.dims().to_vec();
    shape[0] = side(shape[0])?;
    let data = compute(what, &read(what, first)?, shape, call)?;
    let dtype = data.dtype();
    let first = Tensor::from_data(data, (&device, dtype));
    Ok(if dimension == 0 { first } else { first.swap_dims(0, dimension) })
}
