//! The parts of weights that a rank has, for inference and for training.
//!
//! A column-parallel layer has a share of the outputs; a row-parallel layer has a share of the inputs. If a
//! row-parallel layer follows a column-parallel layer, the two layers need one all-reduce in the forward pass, after
//! the second layer. They need another all-reduce in the backward pass, for the gradient of the first layer's input.

use candle_core::{Result, Tensor};
use candle_nn::var_builder::Shard;
use collectives::Communicator;

/// Returns this rank's part along a dimension.
pub(crate) fn part_of(comm: &Communicator, what: &str, whole: &Tensor, dimension: usize) -> Result<Tensor> {
    let own = share(what, comm, whole.dim(dimension)?)?;
    whole.narrow(dimension, comm.rank() * own, own)?.contiguous()
}

/// Returns the description of this rank's part of a tensor in a file.
pub(crate) fn shard(comm: &Communicator, dim: usize) -> Shard {
    Shard { dim, rank: comm.rank(), world_size: comm.world_size() }
}

/// Refuses a part that does not have the expected shape.
pub(crate) fn expect(what: &str, part: &Tensor, shape: &[usize]) -> Result<()> {
    if part.dims() == shape {
        return Ok(());
    }
    candle_core::bail!("{what} of this rank has shape {:?}; expected {shape:?}", part.dims())
}

/// Returns how many entries of a dimension each rank has.
pub(crate) fn share(what: &str, comm: &Communicator, whole: usize) -> Result<usize> {
    let ranks = comm.world_size();
    if whole.is_multiple_of(ranks) {
        return Ok(whole / ranks);
    }
    let next = whole.next_multiple_of(ranks);
    candle_core::bail!("{whole} {what} cannot be split equally between {ranks} ranks; add {} as padding, to reach {next}", next - whole)
}

/// Refuses a communicator in which this rank does not have the part that a layer has.
pub(crate) fn expect_same_part(own: &Communicator, other: &Communicator) -> Result<()> {
    let place = |comm: &Communicator| (comm.rank(), comm.world_size());
    let ((rank, ranks), (other_rank, other_ranks)) = (place(own), place(other));
    if (rank, ranks) == (other_rank, other_ranks) {
        return Ok(());
    }
    candle_core::bail!(
        "the layer has the part of rank {rank} of {ranks}, but this rank is rank {other_rank} of {other_ranks} in the communicator that was \
         passed; pass a lane of the layer's own communicator"
    )
}
