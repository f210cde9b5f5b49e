//! Every way of training, with buffers on devices, reaches the parameters of one process, on 1, 2, 3 and 4 ranks.

use collectives::{Communicator, Result};
use collectives_train::{
    DataParallel, Float, FullySharded, FullyShardedOptions, LossScaler, Options, Parameter, Shard, ShardedOptimizer, Unit,
};
use cudarc::driver::CudaSlice;

use crate::common::cases::Memory;
use crate::common::oracle::Predict;
use crate::common::random::Random;
use crate::gpu::{DeviceMemory, process_ranks, ranks};
use crate::network::{Mode, Place, Training, bound, distance, start, train_alone};

/// Returns options with buckets so small that there are several.
fn options() -> Options {
    Options { first_bucket_bytes: 100, bucket_bytes: 300, ..Options::default() }
}

impl Place for DeviceMemory {
    type Buffer<T: Float + Predict> = CudaSlice<T>;

    fn put<T: Float + Predict>(&self, values: &[T]) -> CudaSlice<T> {
        Memory::put(self, values)
    }

    fn get<T: Float + Predict>(&self, buffer: &CudaSlice<T>) -> Vec<T> {
        Memory::get(self, buffer)
    }

    fn data_parallel(&self, comm: &Communicator, parameters: Vec<Parameter>) -> Result<DataParallel> {
        DataParallel::on_device(comm, &self.stream, parameters, options())
    }

    fn sharded_optimizer(&self, comm: &Communicator, parameters: Vec<Parameter>) -> Result<ShardedOptimizer> {
        ShardedOptimizer::on_device(comm, &self.stream, parameters, options())
    }

    fn fully_sharded(&self, comm: &Communicator, units: Vec<Unit>, options: FullyShardedOptions) -> Result<FullySharded> {
        FullySharded::on_device(comm, &self.stream, units, options)
    }

    fn change<T: Float + Predict>(&self, shard: &mut Shard<'_>, optimiser: fn(&mut [T], &[T])) -> Result<()> {
        let (mut parameters, gradients) = shard.device_values::<T>()?;
        let mut values = self.get_view(&parameters.as_view());
        optimiser(&mut values, &self.get_view(&gradients));
        self.put_view(&values, &mut parameters);
        Ok(())
    }
}

/// Trains in every mode with `T`s. Returns the largest difference from one process, in units of the mode's bound.
fn all<T: Float + Predict>(comm: &Communicator, memory: &DeviceMemory, training: Training) -> f64 {
    let alone = train_alone(training);
    let moved = distance(&alone, &start(training.seed));
    assert!(moved > 0.01, "the network has learnt nothing: {moved}, {training:?}");
    let mut furthest = 0.0_f64;
    for mode in Mode::of_world(comm.world_size()) {
        let apart = mode.apart::<T, _>(memory, comm, training, &alone).unwrap();
        let (ranks, limit) = (comm.world_size(), bound::<T>());
        assert!(apart <= limit, "{mode:?}, {} on {ranks} ranks: {apart:e} apart, at most {limit:e}; {training:?}", T::ELEMENT_TYPE);
        furthest = furthest.max(apart / limit);
    }
    furthest
}

#[test]
fn every_mode_on_devices_comes_to_the_parameters_of_one_process() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for world_size in [1, 2, 3, 4] {
        let training = Training { seed: random.next(), steps: 2, passes: 2, limit: Some(0.5) };
        let furthest = ranks(world_size, |comm, memory| all::<f32>(comm, memory, training));
        println!("{world_size} ranks, of the bound: {}", furthest[0]);
    }
}

#[test]
fn every_mode_on_devices_comes_there_between_processes() {
    process_ranks("modes::every_mode_on_devices_comes_there_between_processes", 2, |comm, memory| {
        all::<f64>(comm, memory, Training { seed: 20_270_114, steps: 2, passes: 1, limit: None });
    });
}

#[test]
fn gradients_on_devices_are_divided_by_the_scale_and_looked_at() {
    ranks(2, |comm, memory| {
        let parameter = || vec![Parameter::new::<f32>("weight", &[5])];
        let mut whole = DataParallel::on_device(comm, &memory.stream, parameter(), Options::default()).unwrap();
        let mut shared = ShardedOptimizer::on_device(comm, &memory.stream, parameter(), Options::default()).unwrap();
        let unit = Unit::new("layer", parameter());
        let mut units = FullySharded::on_device(comm, &memory.stream, vec![unit], FullyShardedOptions::default()).unwrap();
        shared.load(0, &Memory::put(memory, &[0.0_f32; 5])).unwrap();
        for overflows in [false, true] {
            let mut scalers = [0; 3].map(|_| LossScaler::default());
            let last = if overflows && comm.rank() == 1 { f32::INFINITY } else { -2.0 };
            let mine = Memory::put(memory, &[1.0, 2.0, 3.0, 4.0, last].map(|x: f32| x * 65_536.0));
            whole.ready(0, &mine).unwrap();
            shared.ready(0, &mine).unwrap();
            units.reduce_gradients(0, &[&mine]).unwrap();
            let mut averaged = whole.finish().unwrap();
            averaged.unscale(&mut scalers[0]).unwrap();
            let means = memory.get_view(&averaged.device_gradient::<f32>(0).unwrap());
            assert_eq!(means, [1.0, 2.0, 3.0, 4.0, if overflows { f32::INFINITY } else { -2.0 }]);
            let (mut shards, mut reduced) = (shared.reduce().unwrap(), units.reduce().unwrap());
            shards.unscale(&mut scalers[1]).unwrap();
            reduced.unscale(&mut scalers[2]).unwrap();
            let check = |shard: &mut Shard<'_>| {
                let (range, gradients) = (shard.range.clone(), memory.get_view(&shard.device_values::<f32>()?.1));
                let inside = range.end.min(5) - range.start;
                assert_eq!(gradients[..inside], means[range.start..range.start + inside]);
                Ok(())
            };
            shards.update(check).map(|_| ()).unwrap();
            reduced.update(check).unwrap();
            assert_eq!(scalers.map(|mut scaler| scaler.update(comm).unwrap()), [!overflows; 3]);
        }
    });
}
