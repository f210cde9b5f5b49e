//! The ways in which ranks share the training of the network.

use collectives::{Communicator, Result};
use collectives_train::{Float, FullyShardedOptions, Mesh, ShardingStrategy};

use super::{Layer, Part, Place, Training, distance, replicated, sharded, tensor_parallel};
use crate::common::oracle::Predict;

/// The things that are sharded, and the ranks that share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Only samples: DDP.
    DataParallel,
    /// The optimiser's state too: ZeRO-1.
    ShardedOptimizer,
    /// Gradients too, ZeRO-2, or parameters as well, ZeRO-3.
    FullySharded(ShardingStrategy),
    /// Layers, over all ranks.
    TensorParallel,
    /// Layers over `split` ranks, samples over the others: a mesh of two dimensions.
    DataAndTensor { split: usize },
    /// Like `FullySharded` over `shard` ranks, with copies: a mesh of two dimensions.
    Hybrid { shard: usize, strategy: ShardingStrategy },
}

const STRATEGIES: [ShardingStrategy; 2] = [ShardingStrategy::ShardGradOp, ShardingStrategy::FullShard];

/// Returns the allowed difference between the parameters of ranks and those of one process after a dozen steps.
///
/// One process computes in `f64`, and so do ranks between collectives. The values that ranks store and send
/// (parameters, gradients and sums of neurons) are rounded to `T`s. They are up to 2, so each rounding error is at most
/// half a unit of the last place. A step multiplies the errors of gradients by 0.2, so a dozen steps have an error of
/// about 16 units. It is larger if a neuron passes on an error of its input.
pub(crate) fn bound<T: Float>() -> f64 {
    let unit = if size_of::<T>() == 8 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    16.0 * unit
}

impl Mode {
    /// Returns the modes for this many ranks, with meshes of every two sizes whose product is that number.
    pub(crate) fn of_world(world_size: usize) -> Vec<Self> {
        let mut modes = vec![Self::DataParallel, Self::ShardedOptimizer, Self::TensorParallel];
        modes.extend(STRATEGIES.map(Self::FullySharded));
        for inner in (1..=world_size).filter(|inner| world_size.is_multiple_of(*inner)) {
            modes.push(Self::DataAndTensor { split: inner });
            modes.extend(STRATEGIES.map(|strategy| Self::Hybrid { shard: inner, strategy }));
        }
        modes
    }

    /// Trains with `T`s, and returns the difference of this rank's parameters from those of one process.
    pub(crate) fn apart<T: Float + Predict, P: Place>(
        self,
        place: &P,
        comm: &Communicator,
        training: Training,
        alone: &[Layer],
    ) -> Result<f64> {
        match self {
            Self::DataParallel => Ok(distance(&replicated::data_parallel::<T, P>(place, comm, training)?, alone)),
            Self::ShardedOptimizer => Ok(distance(&replicated::sharded_optimizer::<T, P>(place, comm, training)?, alone)),
            Self::FullySharded(strategy) => shared::<T, P>(place, comm, strategy, (training, Part::of(comm)), None, alone),
            Self::TensorParallel => {
                split::<T, P>(place, &Mesh::new(comm, &[(tensor_parallel::SPLIT, comm.world_size())])?, training, alone)
            }
            Self::DataAndTensor { split: inner } => {
                let sizes = [(tensor_parallel::AVERAGED, comm.world_size() / inner), (tensor_parallel::SPLIT, inner)];
                split::<T, P>(place, &Mesh::new(comm, &sizes)?, training, alone)
            }
            Self::Hybrid { shard, strategy } => {
                let mesh = Mesh::new(comm, &[("replicate", comm.world_size() / shard), ("shard", shard)])?;
                let (shards, copies) = (mesh.dimension("shard")?, mesh.dimension("replicate")?);
                shared::<T, P>(place, shards, strategy, (training, Part::of(comm)), Some(copies), alone)
            }
        }
    }
}

fn split<T: Float + Predict, P: Place>(place: &P, mesh: &Mesh, training: Training, alone: &[Layer]) -> Result<f64> {
    let slice = mesh.dimension(tensor_parallel::SPLIT)?;
    let expected = tensor_parallel::part(alone, slice.rank(), slice.world_size());
    tensor_parallel::train::<T, P>(place, mesh, training).map(|layers| distance(&layers, &expected))
}

fn shared<T: Float + Predict, P: Place>(
    place: &P,
    comm: &Communicator,
    strategy: ShardingStrategy,
    (training, part): (Training, Part),
    copies: Option<&Communicator>,
    alone: &[Layer],
) -> Result<f64> {
    let options = FullyShardedOptions { strategy, ..FullyShardedOptions::default() };
    let mut model = place.fully_sharded(comm, sharded::units::<T>(), options)?;
    sharded::load_in::<T, P>(place, &mut model, comm, training.seed)?;
    let layers = sharded::train_in::<T, T, P>(place, &mut model, (training, part), copies, |_| ())?;
    Ok(distance(&layers, alone))
}
