//! Parameters sharded over ranks, with shards and units on devices: the results have the same bits as on the host.

use collectives::interop::RawDeviceSlice;
use collectives::{Collective, Communicator, DType, ReduceOp, Result, bf16, f16, flight::Backend};
use collectives_train::{Float, FullySharded, FullyShardedOptions, Parameter, Shard, ShardingStrategy, Unit};

use crate::common::cases::Memory as _;
use crate::common::oracle::Predict;
use crate::gpu::{self, DeviceMemory, process_ranks, ranks};
use crate::{Numbers, bits, length};

/// Returns units of odd lengths: two of one length, one of another, one without elements.
fn units<T: Float>() -> Vec<Unit> {
    let parameter = |name: &str, shape: &[usize]| Parameter::new::<T>(name, shape);
    let layer = || vec![parameter("weight", &[31, 17]), parameter("bias", &[17]), parameter("scale", &[])];
    vec![
        Unit::new("first", layer()),
        Unit::new("second", layer()),
        Unit::new("large", vec![parameter("weight", &[4099])]),
        Unit::new("empty", vec![parameter("none", &[0])]),
    ]
}

/// The same model on the host and on a device: parameters are `M`s, gathered as `G`s.
struct Twins {
    host: FullySharded,
    device: FullySharded,
}

/// The settings of a training.
#[derive(Debug, Clone)]
struct Case {
    options: FullyShardedOptions,
    passes: usize,
    limit: f64,
}

impl Twins {
    fn new<M: Float + Predict>(comm: &Communicator, memory: &DeviceMemory, options: &FullyShardedOptions) -> Self {
        let host = FullySharded::new(comm, units::<M>(), options.clone()).unwrap();
        let device = FullySharded::on_device(comm, &memory.stream, units::<M>(), options.clone()).unwrap();
        let mut twins = Self { host, device };
        for (unit, listed) in units::<M>().iter().enumerate() {
            for (index, parameter) in listed.parameters.iter().enumerate() {
                let mut values = Numbers::Any.many::<M>(unit * 10 + index + 1, length(parameter));
                let mut on_device = memory.put(&values);
                twins.host.broadcast(unit, index, &mut values, 0).unwrap();
                match unit {
                    0 => twins.device.broadcast(unit, index, &mut on_device, 0).unwrap(),
                    _ => twins.device.load(unit, index, &on_device).unwrap(),
                }
            }
        }
        twins
    }

    /// Gathers and compares a unit, and releases it.
    fn look<G: Float + Predict>(&mut self, memory: &DeviceMemory, unit: usize, listed: &Unit) {
        self.host.gather(unit).unwrap();
        self.device.gather(unit).unwrap();
        for index in 0..listed.parameters.len() {
            let host = self.host.parameter::<G>(unit, index).unwrap();
            let device = memory.get_view(&self.device.device_parameter::<G>(unit, index).unwrap());
            assert!(bits(&device) == bits(host), "unit {unit}, parameter {index}");
            let mut copied = memory.put(&vec![G::default(); host.len()]);
            self.device.copy_to(unit, index, &mut copied).unwrap();
            assert!(bits(&memory.get(&copied)) == bits(host));
        }
        self.host.release(unit).unwrap();
        self.device.release(unit).unwrap();
    }

    /// Runs a forward and a backward pass. Every unit is compared twice, and has gradients whose sums are exact.
    fn pass<M: Float + Predict, G: Float + Predict>(&mut self, memory: &DeviceMemory, seed: usize) {
        let units = units::<M>();
        units.iter().enumerate().for_each(|(unit, listed)| self.look::<G>(memory, unit, listed));
        for (unit, listed) in units.iter().enumerate().rev() {
            self.look::<G>(memory, unit, listed);
            let of = |(index, parameter)| Numbers::Eighths.many::<G>(seed + unit * 10 + index, length(parameter));
            let gradients: Vec<Vec<G>> = listed.parameters.iter().enumerate().map(of).collect();
            let on_device: Vec<_> = gradients.iter().map(|gradient| memory.put(gradient)).collect();
            self.host.reduce_gradients(unit, &gradients).unwrap();
            self.device.reduce_gradients(unit, &on_device).unwrap();
        }
    }

    /// Clips and updates both, and compares their shards.
    fn update<M: Float + Predict>(&mut self, memory: &DeviceMemory, limit: f64) {
        fn descend<M: Float>(parameters: &mut [M], gradients: &[M]) {
            parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x = M::from_f64(x.to_f64() - 0.125 * slope.to_f64()));
        }
        let (mut host, mut device) = (self.host.reduce().unwrap(), self.device.reduce().unwrap());
        let (expected, got) = (host.clip_norm(limit).unwrap(), device.clip_norm(limit).unwrap());
        assert_eq!(got.to_bits(), expected.to_bits());
        let on_host = |shard: &mut Shard<'_>| shard.values::<M>().map(|(parameters, gradients)| descend(parameters, gradients));
        host.update(on_host).unwrap();
        let on_device = |shard: &mut Shard<'_>| -> Result<()> {
            let (mut parameters, gradients) = shard.device_values::<M>()?;
            let mut values = memory.get_view(&parameters.as_view());
            descend(&mut values, &memory.get_view(&gradients));
            memory.put_view(&values, &mut parameters);
            Ok(())
        };
        device.update(on_device).unwrap();
        for unit in 0..units::<M>().len() {
            let share = memory.get_view(&self.device.device_shard::<M>(unit).unwrap());
            assert!(bits(&share) == bits(self.host.shard::<M>(unit).unwrap()), "unit {unit}");
        }
    }
}

fn train<M: Float + Predict, G: Float + Predict>(comm: &Communicator, memory: &DeviceMemory, case: &Case) {
    let mut twins = Twins::new::<M>(comm, memory, &case.options);
    let mut most = [0; 2];
    for step in 0..2 {
        for pass in 0..case.passes {
            twins.pass::<M, G>(memory, ((comm.rank() * 10 + step) * 10 + pass) * 100);
            most = [most[0].max(twins.host.memory_bytes()), most[1].max(twins.device.memory_bytes())];
            if pass + 1 < case.passes {
                twins.host.end_backward().unwrap();
                twins.device.end_backward().unwrap();
            }
        }
        twins.update::<M>(memory, case.limit);
    }
    assert_eq!(most[0], most[1], "bytes of the host's and of the device's, {case:?}");
}

/// Trains with every strategy, with and without accumulation, clipping and conversion.
fn all(comm: &Communicator, memory: &DeviceMemory) {
    for (strategy, prefetch, passes, limit) in
        [(ShardingStrategy::FullShard, 1, 1, 1e9), (ShardingStrategy::FullShard, 0, 3, 3.0), (ShardingStrategy::ShardGradOp, 2, 2, 1e9)]
    {
        let case = |gather_type, reduce_type| {
            let options = FullyShardedOptions { strategy, prefetch, gather_type, reduce_type, op: ReduceOp::Sum };
            Case { options, passes, limit }
        };
        train::<f32, f32>(comm, memory, &case(None, None));
        train::<f64, f64>(comm, memory, &case(None, None));
        train::<f32, bf16>(comm, memory, &case(Some(DType::Bf16), None));
        train::<f32, bf16>(comm, memory, &case(Some(DType::Bf16), Some(DType::F32)));
        train::<f32, f16>(comm, memory, &case(Some(DType::F16), Some(DType::Bf16)));
    }
}

#[test]
fn units_on_devices_come_to_the_bits_of_the_host() {
    for world_size in [1, 2, 3] {
        ranks(world_size, all);
    }
}

#[test]
fn units_on_devices_come_to_the_bits_of_the_host_between_processes() {
    process_ranks("fully_sharded::units_on_devices_come_to_the_bits_of_the_host_between_processes", 2, all);
}

#[test]
fn one_rank_alone_needs_no_device_backend_for_its_units() {
    gpu::prepare();
    let alone = Communicator::run_local(1, |comm| {
        all(comm, &DeviceMemory::on(cudarc::driver::CudaContext::new(0).unwrap().new_stream().unwrap()));
        Ok(())
    });
    alone.unwrap();
    gpu::assert_nothing_found();
}

#[test]
fn the_next_unit_is_on_its_way_before_it_is_asked_for() {
    ranks(2, |comm, memory| {
        let options = FullyShardedOptions::default();
        let mut model = FullySharded::on_device(comm, &memory.stream, units::<f32>(), options).unwrap();
        for (unit, listed) in units::<f32>().iter().enumerate() {
            for (index, parameter) in listed.parameters.iter().enumerate() {
                model.load(unit, index, &memory.put(&vec![1.0_f32; length(parameter)])).unwrap();
            }
        }
        let queued = || {
            let records = comm.flight_recorder().records();
            records.iter().filter(|record| record.backend == Backend::Device && record.kind == Collective::AllGather).count()
        };
        // The last unit has no elements, and needs no call.
        for (unit, count) in [(0, 2), (1, 3), (2, 3), (3, 3), (2, 3)] {
            model.gather(unit).unwrap();
            assert_eq!(queued(), count, "unit {unit}");
        }
    });
}

#[test]
fn units_that_lie_elsewhere_are_refused() {
    ranks(2, |comm, memory| {
        let unit = || vec![Unit::new("layer", vec![Parameter::new::<f32>("weight", &[3])])];
        let mut device = FullySharded::on_device(comm, &memory.stream, unit(), FullyShardedOptions::default()).unwrap();
        let mut host = FullySharded::new(comm, unit(), FullyShardedOptions::default()).unwrap();
        let (on_host, on_device) = ([1.0_f32; 3], memory.put(&[1.0_f32; 3]));
        let (elsewhere, there) = (
            "the buffer is in host memory, but the buckets are on a device",
            "the buffer is on a device, but the buckets are in host memory",
        );
        for (refused, words) in [
            (device.load(0, 0, &on_host), elsewhere),
            (device.reduce_gradients(0, &[on_host]), elsewhere),
            (host.load(0, 0, &on_device), there),
            (host.reduce_gradients(0, &[&on_device]), there),
        ] {
            assert!(refused.unwrap_err().to_string().contains(words));
        }
        device.load(0, 0, &on_device).unwrap();
        host.load(0, 0, &on_host).unwrap();
        device.gather(0).unwrap();
        host.gather(0).unwrap();
        assert!(device.parameter::<f32>(0, 0).unwrap_err().is_unsupported());
        assert!(device.shard::<f32>(0).unwrap_err().is_unsupported());
        assert!(host.device_parameter::<f32>(0, 0).is_err() && host.device_shard::<f32>(0).is_err());
    });
}

#[test]
#[expect(unsafe_code, reason = "an address of the test's")]
fn gradients_that_kernels_cannot_read_are_refused_and_harm_nothing() {
    ranks(2, |comm, memory| {
        let unit = Unit::new("layer", vec![Parameter::new::<f32>("weight", &[3])]);
        let options = FullyShardedOptions { reduce_type: Some(DType::F64), ..FullyShardedOptions::default() };
        let mut model = FullySharded::on_device(comm, &memory.stream, vec![unit], options).unwrap();
        let gradient = memory.put(&[3.0_f32, 4.0, 0.0, 0.0]);
        // SAFETY: three elements inside the gradient, which outlives this; no code writes to them.
        let odd = unsafe { RawDeviceSlice::<f32>::new(memory.stream.context(), crate::address(&gradient) + 2, 3) };
        let error = model.reduce_gradients(0, &[&odd]).unwrap_err().to_string();
        assert!(error.contains("must be a multiple of the element size"), "{error}");
        // SAFETY: as above.
        let even = unsafe { RawDeviceSlice::<f32>::new(memory.stream.context(), crate::address(&gradient), 3) };
        model.reduce_gradients(0, &[&even]).unwrap();
        assert_eq!(model.reduce().unwrap().norm().unwrap(), 5.0);
    });
}
