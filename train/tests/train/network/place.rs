//! The memory in which a model's buffers lie.

use collectives::{BufferMut, Communicator, Result};
use collectives_train::{DataParallel, Float, FullySharded, FullyShardedOptions, Options, Parameter, Shard, ShardedOptimizer, Unit};

use crate::common::oracle::Predict;

/// Creates models and buffers in one kind of memory.
pub(crate) trait Place {
    type Buffer<T: Float + Predict>: BufferMut<Element = T>;

    fn put<T: Float + Predict>(&self, values: &[T]) -> Self::Buffer<T>;

    fn get<T: Float + Predict>(&self, buffer: &Self::Buffer<T>) -> Vec<T>;

    fn data_parallel(&self, comm: &Communicator, parameters: Vec<Parameter>) -> Result<DataParallel>;

    fn sharded_optimizer(&self, comm: &Communicator, parameters: Vec<Parameter>) -> Result<ShardedOptimizer>;

    fn fully_sharded(&self, comm: &Communicator, units: Vec<Unit>, options: FullyShardedOptions) -> Result<FullySharded>;

    /// Lets an optimiser change a shard, given its gradients.
    fn change<T: Float + Predict>(&self, shard: &mut Shard<'_>, optimiser: fn(&mut [T], &[T])) -> Result<()>;
}

/// Returns options with buckets so small that there are several.
pub(crate) fn options() -> Options {
    Options { first_bucket_bytes: 100, bucket_bytes: 300, own_bucket_bytes: Some(200), ..Options::default() }
}

/// Ordinary memory.
pub(crate) struct Host;

impl Place for Host {
    type Buffer<T: Float + Predict> = Vec<T>;

    fn put<T: Float + Predict>(&self, values: &[T]) -> Vec<T> {
        values.to_vec()
    }

    fn get<T: Float + Predict>(&self, buffer: &Vec<T>) -> Vec<T> {
        buffer.clone()
    }

    fn data_parallel(&self, comm: &Communicator, parameters: Vec<Parameter>) -> Result<DataParallel> {
        DataParallel::new(comm, parameters, options())
    }

    fn sharded_optimizer(&self, comm: &Communicator, parameters: Vec<Parameter>) -> Result<ShardedOptimizer> {
        ShardedOptimizer::new(comm, parameters, options())
    }

    fn fully_sharded(&self, comm: &Communicator, units: Vec<Unit>, options: FullyShardedOptions) -> Result<FullySharded> {
        FullySharded::new(comm, units, options)
    }

    fn change<T: Float + Predict>(&self, shard: &mut Shard<'_>, optimiser: fn(&mut [T], &[T])) -> Result<()> {
        shard.values::<T>().map(|(parameters, gradients)| optimiser(parameters, gradients))
    }
}
