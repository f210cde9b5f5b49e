//! Models on devices go on with more ranks: two ranks resize theirs, and a third rank makes a new one.

use collectives_train::{DataParallel, FullySharded, FullyShardedOptions, Options, Parameter, ShardedOptimizer, Unit};

use crate::common::cases::Memory as _;
use crate::gpu::ranks;

#[test]
fn models_on_devices_go_on_with_more_ranks() {
    ranks(3, |comm, memory| {
        let parameters = || vec![Parameter::new::<f32>("weight", &[5])];
        let units = || vec![Unit::new("unit", parameters())];
        let stream = &memory.stream;
        let pair = comm.split((comm.rank() < 2).then_some(0), 0).unwrap();
        let gradient = memory.put(&[comm.rank() as f32; 5]);
        let (mut plain, mut sharded, mut fully) = match &pair {
            Some(pair) => {
                let mut plain = DataParallel::on_device(pair, stream, parameters(), Options::default()).unwrap();
                plain.ready(0, &gradient).unwrap();
                let mean = plain.finish().unwrap();
                assert_eq!(memory.get_view(&mean.device_gradient::<f32>(0).unwrap()), [0.5; 5]);
                let sharded = ShardedOptimizer::on_device(pair, stream, parameters(), Options::default()).unwrap();
                let fully = FullySharded::on_device(pair, stream, units(), FullyShardedOptions::default()).unwrap();
                (plain.resized(comm).unwrap(), sharded.resized(comm).unwrap(), fully.resized(comm).unwrap())
            }
            None => (
                DataParallel::on_device(comm, stream, parameters(), Options::default()).unwrap(),
                ShardedOptimizer::on_device(comm, stream, parameters(), Options::default()).unwrap(),
                FullySharded::on_device(comm, stream, units(), FullyShardedOptions::default()).unwrap(),
            ),
        };
        plain.ready(0, &gradient).unwrap();
        assert_eq!(memory.get_view(&plain.finish().unwrap().device_gradient::<f32>(0).unwrap()), [1.0; 5]);
        assert_eq!(sharded.shard_lens().chain(fully.shard_lens()).collect::<Vec<_>>(), [2, 2]);
        sharded.load(0, &gradient).unwrap();
        sharded.ready(0, &gradient).unwrap();
        assert_eq!(sharded.reduce().unwrap().norm().unwrap(), 5.0_f64.sqrt());
        fully.load(0, 0, &gradient).unwrap();
        fully.gather(0).unwrap();
        assert_eq!(memory.get_view(&fully.device_parameter::<f32>(0, 0).unwrap()), [0.0, 0.0, 1.0, 1.0, 2.0]);
        fully.release(0).unwrap();
    });
}
