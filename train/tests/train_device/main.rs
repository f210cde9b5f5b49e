//! Gradients averaged in buckets on devices: simulated ones, or real ones with `COLLECTIVES_TEST_GPU=real`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checks;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod forks;
mod fully_sharded;
#[path = "../../../tests/device/gpu.rs"]
mod gpu;
mod loading;
mod modes;
#[allow(dead_code, unused_imports, reason = "the tests of training use all of it")]
#[path = "../train/network/mod.rs"]
mod network;
mod replaced;
mod resized;

use collectives::{Communicator, DType, ReduceOp, Result, bf16, f16};
use collectives_train::{Averaged, Compress, DataParallel, Flat, Float, Hook, Missing, Options, Parameter, Progress, ShardedOptimizer};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use common::cases::Memory as _;
use common::oracle::Predict;
use common::random::Random;
use gpu::{DeviceMemory, process_ranks, ranks};

fn parameters() -> Vec<Parameter> {
    vec![
        Parameter::new::<f32>("weight", &[40, 30]),
        Parameter::new::<f16>("half", &[333]),
        Parameter::new::<f64>("double", &[]),
        Parameter::new::<f32>("empty", &[0]),
        Parameter::new::<bf16>("brain", &[129]),
        Parameter::new::<f32>("bias", &[41]),
    ]
}

/// Returns whole numbers, whose sums are exact in every type.
fn element(rank: usize, step: usize, index: usize) -> f64 {
    ((rank + 1) * (index + 3) * (step + 5) % 23) as f64 - 11.0
}

fn hand_in<T: Float + Predict>(model: &mut DataParallel, memory: &DeviceMemory, step: usize, index: usize, len: usize) {
    let rank = model.communicator().rank();
    let gradient: Vec<T> = (0..len).map(|at| T::from_f64(element(rank, step, at))).collect();
    // The buffer is freed after its copy into the bucket.
    model.ready(index, &memory.put(&gradient)).unwrap();
}

fn compare<T: Float + Predict>(averaged: &Averaged<'_>, memory: &DeviceMemory, world_size: usize, step: usize, index: usize, len: usize) {
    let sum = |at| (0..world_size).map(|rank| element(rank, step, at)).sum::<f64>();
    let expected: Vec<T> = (0..len).map(|at| T::from_f64(sum(at) / world_size as f64)).collect();
    let mut copied = memory.put(&vec![T::default(); len]);
    averaged.copy_to(index, &mut copied).unwrap();
    assert!(memory.get(&copied) == expected, "parameter {index} in step {step}");
    assert_eq!(averaged.device_gradient::<T>(index).unwrap().len(), len);
}

/// Runs some steps, with gradients in a different order on every rank.
fn steps(comm: &Communicator, memory: &DeviceMemory, options: Options) {
    let mut model = DataParallel::on_device(comm, &memory.stream, parameters(), options).unwrap();
    let lens: Vec<usize> = parameters().iter().map(|parameter| parameter.shape.iter().product()).collect();
    for step in 0..3 {
        for turn in 0..lens.len() {
            let index = (turn * 5 + comm.rank()) % lens.len();
            match index {
                1 => hand_in::<f16>(&mut model, memory, step, index, lens[index]),
                2 => hand_in::<f64>(&mut model, memory, step, index, lens[index]),
                4 => hand_in::<bf16>(&mut model, memory, step, index, lens[index]),
                _ => hand_in::<f32>(&mut model, memory, step, index, lens[index]),
            }
        }
        let averaged = model.finish().unwrap();
        for (index, len) in lens.iter().enumerate() {
            match index {
                1 => compare::<f16>(&averaged, memory, comm.world_size(), step, index, *len),
                2 => compare::<f64>(&averaged, memory, comm.world_size(), step, index, *len),
                4 => compare::<bf16>(&averaged, memory, comm.world_size(), step, index, *len),
                _ => compare::<f32>(&averaged, memory, comm.world_size(), step, index, *len),
            }
        }
    }
}

#[test]
fn means_on_devices_are_exact_whatever_the_buckets() {
    for world_size in [1, 2, 3] {
        for bucket_bytes in [0, 600, 25 << 20] {
            let options = Options { first_bucket_bytes: bucket_bytes / 2, bucket_bytes, ..Options::default() };
            ranks(world_size, |comm, memory| steps(comm, memory, options.clone()));
        }
    }
}

#[test]
fn means_on_devices_are_exact_between_processes() {
    process_ranks("means_on_devices_are_exact_between_processes", 2, |comm, memory| steps(comm, memory, Options::default()));
}

#[test]
fn parameters_on_devices_start_alike() {
    ranks(2, |comm, memory| {
        let model = DataParallel::on_device(comm, &memory.stream, parameters(), Options::default()).unwrap();
        let mut bias = memory.put(&[comm.rank() as f32; 41]);
        model.broadcast(5, &mut bias, 1).unwrap();
        assert_eq!(memory.get(&bias), [1.0; 41]);
        assert!(model.broadcast(4, &mut bias, 1).is_err());
    });
}

#[test]
fn what_lies_elsewhere_and_what_only_the_host_shows_is_refused() {
    ranks(2, |comm, memory| {
        let one = || vec![Parameter::new::<f32>("a", &[3])];
        let mut model = DataParallel::on_device(comm, &memory.stream, one(), Options::default()).unwrap();
        let gradient = memory.put(&[1.0_f32; 3]);
        let error = model.ready(0, &[1.0_f32; 3]).unwrap_err().to_string();
        assert!(error.contains("the buffer is in host memory, but the buckets are on a device"), "{error}");
        model.ready(0, &gradient).unwrap();
        let averaged = model.finish().unwrap();
        assert!(averaged.gradient::<f32>(0).unwrap_err().is_unsupported());
        // A hook for host memory.
        model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, f16>::new(comm, layout, ReduceOp::Avg)?))).unwrap();
        let error = model.ready(0, &gradient).unwrap_err().to_string();
        assert!(error.contains("the buffer is on a device, but the buckets are in host memory"), "{error}");
        let mut host = DataParallel::new(comm, one(), Options::default()).unwrap();
        let error = host.ready(0, &gradient).unwrap_err().to_string();
        assert!(error.contains("the buffer is on a device, but the buckets are in host memory"), "{error}");
        host.ready(0, &[2.0_f32; 3]).unwrap();
        assert!(host.finish().unwrap().device_gradient::<f32>(0).is_err());
        let mut sharded = ShardedOptimizer::on_device(comm, &memory.stream, one(), Options::default()).unwrap();
        let error = sharded.broadcast(0, &mut [1.0_f32; 3], 0).unwrap_err().to_string();
        assert!(error.contains("the buffer is in host memory, but the buckets are on a device"), "{error}");
        sharded.load(0, &gradient).unwrap();
        sharded.ready(0, &gradient).unwrap();
        let refused = sharded.reduce().unwrap().update(|shard| shard.values::<f32>().map(|_| ()));
        assert!(refused.unwrap_err().is_unsupported());
    });
}

#[test]
fn buckets_are_not_made_while_their_stream_is_captured() {
    // The test that creates the first stream of a context ends the captures in it, and other tests do that.
    common::ranks::alone_in_a_process("buckets_are_not_made_while_their_stream_is_captured", || {
        ranks(1, |comm, memory| {
            memory.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let error = Flat::<f32>::on_device(comm, &memory.stream, 3).map(drop).unwrap_err();
            assert!(error.is_unsupported() && error.to_string().contains("captured into a graph"), "{error}");
            drop(memory.stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap());
            drop(Flat::<f32>::on_device(comm, &memory.stream, 3).unwrap());
        });
    });
}

/// Returns parameters of odd lengths and every type, several in a bucket, so that most slots and shares do not begin at
/// a multiple of 16 bytes.
fn odd_parameters() -> Vec<Parameter> {
    vec![
        Parameter::new::<f32>("a", &[1201]),
        Parameter::new::<f16>("b", &[333]),
        Parameter::new::<f64>("c", &[]),
        Parameter::new::<f32>("d", &[0]),
        Parameter::new::<bf16>("e", &[129]),
        Parameter::new::<f32>("f", &[7]),
        Parameter::new::<f16>("g", &[5]),
        Parameter::new::<bf16>("h", &[3, 9]),
        Parameter::new::<f64>("i", &[77]),
        Parameter::new::<f32>("j", &[40961]),
    ]
}

fn length(parameter: &Parameter) -> usize {
    parameter.shape.iter().product()
}

/// Calls a generic function with a parameter's type.
macro_rules! by_type {
    ($parameter:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $parameter.dtype {
            DType::F64 => $function::<f64>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::Bf16 => $function::<bf16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}

/// The kind of numbers in the gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Numbers {
    /// Numbers whose sums are rounded.
    Any,
    /// Eighths, whose sums and sums of squares are exact.
    Eighths,
}

impl Numbers {
    /// Returns numbers whose sums over this many ranks do not depend on the order.
    fn of(world_size: usize) -> Self {
        if world_size > 2 { Self::Eighths } else { Self::Any }
    }

    fn many<T: Float>(self, seed: usize, len: usize) -> Vec<T> {
        let mut random = Random(seed as u64);
        let mut number = || match self {
            Self::Any => (random.below(1 << 40) as f64 / f64::from(1 << 30)).powi(2) * 1e-3 - 1.0,
            Self::Eighths => random.below(65) as f64 / 8.0 - 4.0,
        };
        (0..len).map(|_| T::from_f64(number())).collect()
    }
}

fn bits<T: Predict>(elements: &[T]) -> Vec<u64> {
    elements.iter().map(|x| x.bits()).collect()
}

/// The same model on the host and on a device.
struct Twins {
    host: DataParallel,
    device: DataParallel,
}

impl Twins {
    fn new(comm: &Communicator, memory: &DeviceMemory, options: &Options) -> Self {
        let host = DataParallel::new(comm, odd_parameters(), options.clone()).unwrap();
        let device = DataParallel::on_device(comm, &memory.stream, odd_parameters(), options.clone()).unwrap();
        Self { host, device }
    }

    fn give<T: Float + Predict>(&mut self, memory: &DeviceMemory, index: usize, gradient: &[T], last: bool) {
        let on_device = memory.put(gradient);
        if last {
            self.host.ready(index, gradient).unwrap();
            self.device.ready(index, &on_device).unwrap();
        } else {
            self.host.accumulate(index, gradient).unwrap();
            self.device.accumulate(index, &on_device).unwrap();
        }
    }

    /// Passes every gradient in this many parts.
    fn give_all(&mut self, memory: &DeviceMemory, numbers: Numbers, step: usize, parts: usize) {
        fn one<T: Float + Predict>(twins: &mut Twins, memory: &DeviceMemory, numbers: Numbers, index: usize, seed: usize, last: bool) {
            let gradient = numbers.many::<T>(seed, length(&odd_parameters()[index]));
            twins.give(memory, index, &gradient, last);
        }
        let rank = self.host.communicator().rank();
        for (index, parameter) in odd_parameters().iter().enumerate().rev() {
            for part in 0..parts {
                let seed = ((rank * 100 + step) * 100 + part) * 100 + index;
                by_type!(parameter, one(self, memory, numbers, index, seed, part + 1 == parts));
            }
        }
    }
}

/// Fails if the means differ in any bit.
fn assert_same(host: &Averaged<'_>, device: &Averaged<'_>, memory: &DeviceMemory) {
    fn one<T: Float + Predict>(host: &Averaged<'_>, device: &Averaged<'_>, memory: &DeviceMemory, index: usize) {
        let (expected, got) = (host.gradient::<T>(index).unwrap(), memory.get_view(&device.device_gradient::<T>(index).unwrap()));
        assert!(bits(&got) == bits(expected), "parameter {index}, of {}", std::any::type_name::<T>());
    }
    for (index, parameter) in odd_parameters().iter().enumerate() {
        by_type!(parameter, one(host, device, memory, index));
    }
}

#[test]
fn gradients_in_parts_add_up_to_the_bits_of_the_host() {
    for world_size in [1, 2, 3] {
        ranks(world_size, |comm, memory| {
            let options = Options { first_bucket_bytes: 700, bucket_bytes: 6000, op: ReduceOp::Sum, ..Options::default() };
            let mut twins = Twins::new(comm, memory, &options);
            for step in 0..2 {
                twins.give_all(memory, Numbers::of(world_size), step, 1 + 2 * step);
                let (host, device) = (twins.host.finish().unwrap(), twins.device.finish().unwrap());
                assert_same(&host, &device, memory);
            }
        });
    }
}

#[test]
fn norms_are_those_of_the_host_but_for_the_last_places_and_the_same_on_every_rank() {
    for world_size in [1, 2, 3] {
        let norms = ranks(world_size, |comm, memory| {
            let mut twins = Twins::new(comm, memory, &Options::default());
            twins.give_all(memory, Numbers::Any, 0, 1);
            let (host, device) = (twins.host.finish().unwrap(), twins.device.finish().unwrap());
            let (expected, got) = (host.norm().unwrap(), device.norm().unwrap());
            if world_size < 3 {
                let count: usize = odd_parameters().iter().map(length).sum();
                let bound = (count + 2) as f64 * 2_f64.powi(-53) * expected;
                assert!((expected - got).abs() <= bound, "{got:e} where the host has {expected:e}");
            }
            assert_eq!(device.norm().unwrap().to_bits(), got.to_bits());
            got.to_bits()
        });
        assert!(norms.iter().all(|norm| *norm == norms[0]), "{norms:x?}");
    }
}

/// Runs steps with exact numbers, clipped on the host and on the device.
fn clip(comm: &Communicator, memory: &DeviceMemory) {
    for bucket_bytes in [600, 25 << 20] {
        let options = Options { first_bucket_bytes: bucket_bytes / 2, bucket_bytes, op: ReduceOp::Sum, ..Options::default() };
        let mut twins = Twins::new(comm, memory, &options);
        // The second limit is larger than any norm here.
        for (step, limit) in [1.7, 1e9].into_iter().enumerate() {
            twins.give_all(memory, Numbers::Eighths, step, 1);
            let (mut host, mut device) = (twins.host.finish().unwrap(), twins.device.finish().unwrap());
            let (expected, got) = (host.clip_norm(limit).unwrap(), device.clip_norm(limit).unwrap());
            assert_eq!(got.to_bits(), expected.to_bits());
            assert_same(&host, &device, memory);
            assert!(device.norm().unwrap() <= limit * 1.01);
        }
    }
}

#[test]
fn clipped_gradients_have_the_bits_of_the_host() {
    for world_size in [1, 2, 3] {
        ranks(world_size, clip);
    }
}

#[test]
fn clipped_gradients_have_the_bits_of_the_host_between_processes() {
    process_ranks("clipped_gradients_have_the_bits_of_the_host_between_processes", 2, clip);
}

#[test]
fn gradients_without_a_finite_norm_stay_as_they_are() {
    ranks(2, |comm, memory| {
        let one = vec![Parameter::new::<f32>("a", &[35])];
        let mut model = DataParallel::on_device(comm, &memory.stream, one, Options::default()).unwrap();
        for odd in [f32::INFINITY, f32::NAN] {
            let mut gradient = [3.0; 35];
            gradient[34] = odd;
            model.ready(0, &memory.put(&gradient)).unwrap();
            let mut averaged = model.finish().unwrap();
            let norm = averaged.clip_norm(1.0).unwrap();
            assert!(norm.is_nan() == odd.is_nan() && !norm.is_finite(), "{norm}");
            let kept = memory.get_view(&averaged.device_gradient::<f32>(0).unwrap());
            assert_eq!(kept[..34], [3.0; 34]);
            assert!(averaged.clip_norm(0.0).unwrap_err().to_string().contains("a positive number"));
        }
    });
}

#[test]
fn a_norm_of_what_never_comes_is_an_error_in_time() {
    // If the call were compared, it would not even be queued.
    let config = gpu::unchecked();
    let patient = |rank: usize| {
        gpu::builder(config.clone()).configure(|config| config.timeout = std::time::Duration::from_secs(if rank == 0 { 5 } else { 60 }))
    };
    let absent = common::ranks::Meeting::new(2);
    let outcomes = common::ranks::threads_with(2, patient, |comm| {
        let memory = DeviceMemory::of(comm);
        let one = vec![Parameter::new::<f32>("a", &[35])];
        let options = Options { missing: Missing::Zeros, ..Options::default() };
        let mut model = DataParallel::on_device(comm, &memory.stream, one, options).unwrap();
        let outcome = (comm.rank() == 0).then(|| {
            model.ready(0, &memory.put(&[1.0_f32; 35]))?;
            model.finish()?.norm()
        });
        absent.meet();
        outcome
    });
    let error = outcomes[0].clone().unwrap().unwrap_err();
    // The deadline of the call may pass before that of the norm.
    assert!(error.is_timeout(), "{error}");
}

/// Compresses gradients of `T`s to `C`s on the host and on the device.
fn compress<T: Float + Predict, C: Float>(comm: &Communicator, memory: &DeviceMemory, op: ReduceOp) {
    let others = if comm.world_size() == 3 { ReduceOp::Sum } else { ReduceOp::Avg };
    let options = Options { first_bucket_bytes: 3000, bucket_bytes: 6000, op: others, ..Options::default() };
    let mut twins = Twins::new(comm, memory, &options);
    twins.host.set_hooks::<T>(|layout| Ok(Box::new(Compress::<T, C>::new(comm, layout, op)?))).unwrap();
    let on_device = |layout: &_| Compress::<T, C>::on_device(comm, &memory.stream, layout, op);
    twins.device.set_hooks::<T>(|layout| Ok(Box::new(on_device(layout)?))).unwrap();
    for step in 0..2 {
        twins.give_all(memory, Numbers::of(comm.world_size()), step, 1);
        let (host, device) = (twins.host.finish().unwrap(), twins.device.finish().unwrap());
        assert_same(&host, &device, memory);
    }
}

#[test]
fn compressed_gradients_have_the_bits_of_the_host() {
    for world_size in [1, 2, 3] {
        ranks(world_size, |comm, memory| {
            // Of three ranks' sums, only exact ones are the same in any order.
            let weighted = if world_size == 3 { ReduceOp::PreMulSum(0.25) } else { ReduceOp::PreMulSum(0.3 + comm.rank() as f64 * 0.4) };
            let mean = if world_size == 3 { ReduceOp::Sum } else { ReduceOp::Avg };
            compress::<f32, f16>(comm, memory, mean);
            compress::<f32, bf16>(comm, memory, weighted);
            compress::<f64, bf16>(comm, memory, mean);
            compress::<f64, f16>(comm, memory, weighted);
            compress::<f16, bf16>(comm, memory, mean);
            compress::<bf16, f16>(comm, memory, weighted);
            compress::<f64, f32>(comm, memory, mean);
            compress::<f64, f64>(comm, memory, weighted);
        });
    }
}

/// A hook as a user would write it: it sends from its own buffer, and it omits the first gradient.
struct Own {
    wide: Option<Flat<f32>>,
    narrow: Flat<bf16>,
}

impl Hook<f32> for Own {
    fn start(&mut self, comm: &Communicator, mut gradients: Flat<f32>) -> Result<()> {
        let slice = gradients.device_mut().unwrap();
        let stream = std::sync::Arc::clone(cudarc::driver::DeviceSlice::stream(slice));
        stream.memset_zeros(&mut slice.slice_mut(..1)).unwrap();
        self.narrow.convert_from(&gradients, 0.5)?;
        self.wide = Some(gradients);
        comm.all_reduce(&mut self.narrow, ReduceOp::Sum)
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<f32>> {
        let mut wide = self.wide.take().unwrap();
        wide.convert_from(&self.narrow, 1.0)?;
        Ok(Progress::Done(wide))
    }
}

#[test]
fn hooks_of_the_callers_work_on_devices() {
    ranks(2, |comm, memory| {
        let one = vec![Parameter::new::<f32>("a", &[35])];
        let mut model = DataParallel::on_device(comm, &memory.stream, one, Options::default()).unwrap();
        let hook = |len| Flat::on_device(comm, &memory.stream, len).map(|narrow| Own { wide: None, narrow });
        model.set_hooks::<f32>(|layout| Ok(Box::new(hook(layout.len)?))).unwrap();
        for _ in 0..3 {
            model.ready(0, &memory.put(&[1.0 + 2.0 * comm.rank() as f32; 35])).unwrap();
            let averaged = model.finish().unwrap();
            let mut expected = [2.0; 35];
            expected[0] = 0.0;
            assert_eq!(memory.get_view(&averaged.device_gradient::<f32>(0).unwrap()), expected);
        }
        let mut wide = Flat::<f64>::on_device(comm, &memory.stream, 34).unwrap();
        let error = wide.convert_from(&hook(35).unwrap().narrow, 1.0).unwrap_err().to_string();
        assert!(error.contains("35 elements were passed for a buffer of 34"), "{error}");
        assert!(wide.convert_from(&Flat::<f32>::new(comm, 34).unwrap(), 1.0).is_err());
    });
}

/// Runs one step of an optimiser with momentum.
fn descend<T: Float>(parameters: &mut [T], gradients: &[T], momentum: &mut [f64]) {
    for ((x, slope), momentum) in parameters.iter_mut().zip(gradients).zip(momentum) {
        *momentum = 0.9 * *momentum + slope.to_f64();
        *x = T::from_f64(x.to_f64() - 0.1 * *momentum);
    }
}

/// The same sharded optimiser on the host and on a device, and the state of its update.
struct Sharded {
    host: ShardedOptimizer,
    device: ShardedOptimizer,
    momentum: [Vec<Vec<f64>>; 2],
}

impl Sharded {
    fn new(comm: &Communicator, memory: &DeviceMemory, options: &Options) -> Self {
        let host = ShardedOptimizer::new(comm, odd_parameters(), options.clone()).unwrap();
        let device = ShardedOptimizer::on_device(comm, &memory.stream, odd_parameters(), options.clone()).unwrap();
        let momentum = [&host, &device].map(|model| model.shard_lens().map(|len| vec![0.0; len]).collect());
        Self { host, device, momentum }
    }

    /// Starts with one rank's values, loading those of every other parameter.
    fn begin<T: Float + Predict>(&mut self, comm: &Communicator, memory: &DeviceMemory, index: usize, len: usize) {
        let root = index % comm.world_size();
        let seed = if index.is_multiple_of(2) { index + 1000 * comm.rank() } else { index };
        let mut values = Numbers::Any.many::<T>(seed, len);
        let mut on_device = memory.put(&values);
        if index.is_multiple_of(2) {
            self.host.broadcast(index, &mut values, root).unwrap();
            self.device.broadcast(index, &mut on_device, root).unwrap();
        } else {
            self.host.load(index, &values).unwrap();
            self.device.load(index, &on_device).unwrap();
        }
        assert!(bits(&memory.get(&on_device)) == bits(&values), "parameter {index}");
    }

    /// Passes a gradient in two parts.
    fn give<T: Float + Predict>(&mut self, memory: &DeviceMemory, index: usize, seed: usize, len: usize) {
        // Exact, so that the norms are the same, and thus the clipping factors.
        let numbers = Numbers::Eighths;
        let parts = [numbers.many::<T>(seed, len), numbers.many::<T>(seed + 1, len)];
        self.host.accumulate(index, &parts[0]).unwrap();
        self.host.ready(index, &parts[1]).unwrap();
        self.device.accumulate(index, &memory.put(&parts[0])).unwrap();
        self.device.ready(index, &memory.put(&parts[1])).unwrap();
    }

    /// Clips and updates both, and compares the results.
    fn step(&mut self, memory: &DeviceMemory, limit: f64) {
        fn one<T: Float + Predict>(memory: &DeviceMemory, shard: &mut collectives_train::Shard<'_>, momentum: &mut [f64]) -> Result<()> {
            let (mut parameters, gradients) = shard.device_values::<T>()?;
            let mut values = memory.get_view(&parameters.as_view());
            descend(&mut values, &memory.get_view(&gradients), momentum);
            memory.put_view(&values, &mut parameters);
            Ok(())
        }
        fn on_host<T: Float>(shard: &mut collectives_train::Shard<'_>, momentum: &mut [f64]) -> Result<()> {
            assert!(shard.device_values::<T>().is_err());
            shard.values::<T>().map(|(parameters, gradients)| descend(parameters, gradients, momentum))
        }
        fn compare<T: Float + Predict>(host: &[T], device: &[T], index: usize) {
            assert!(bits(host) == bits(device), "parameter {index}, of {}", std::any::type_name::<T>());
        }
        let [of_host, of_device] = &mut self.momentum;
        let (mut host, mut device) = (self.host.reduce().unwrap(), self.device.reduce().unwrap());
        let (expected, got) = (host.clip_norm(limit).unwrap(), device.clip_norm(limit).unwrap());
        assert_eq!(got.to_bits(), expected.to_bits());
        let host = host.update(|shard| {
            let momentum = &mut of_host[shard.bucket];
            by_type!(shard.layout, on_host(shard, momentum))
        });
        let host = host.unwrap();
        let device = device.update(|shard| {
            let momentum = &mut of_device[shard.bucket];
            by_type!(shard.layout, one(memory, shard, momentum))
        });
        let device = device.unwrap();
        for (index, parameter) in odd_parameters().iter().enumerate() {
            macro_rules! compare_as {
                ($t:ty) => {{
                    let got = memory.get_view(&device.device_parameter::<$t>(index).unwrap());
                    compare::<$t>(host.parameter(index).unwrap(), &got, index);
                    let mut copied = memory.put(&vec![<$t>::default(); got.len()]);
                    device.copy_to(index, &mut copied).unwrap();
                    compare(&memory.get(&copied), &got, index);
                }};
            }
            match parameter.dtype {
                DType::F64 => compare_as!(f64),
                DType::F16 => compare_as!(f16),
                DType::Bf16 => compare_as!(bf16),
                _ => compare_as!(f32),
            }
        }
    }
}

fn shard(comm: &Communicator, memory: &DeviceMemory) {
    fn begin<T: Float + Predict>(model: &mut Sharded, comm: &Communicator, memory: &DeviceMemory, index: usize, len: usize) {
        model.begin::<T>(comm, memory, index, len);
    }
    fn give<T: Float + Predict>(model: &mut Sharded, memory: &DeviceMemory, index: usize, seed: usize, len: usize) {
        model.give::<T>(memory, index, seed, len);
    }
    for bucket_bytes in [900, 25 << 20] {
        let options = Options { first_bucket_bytes: bucket_bytes / 2, bucket_bytes, op: ReduceOp::Sum, ..Options::default() };
        let mut model = Sharded::new(comm, memory, &options);
        for (index, parameter) in odd_parameters().iter().enumerate() {
            by_type!(parameter, begin(&mut model, comm, memory, index, length(parameter)));
        }
        for (step, limit) in [3.0, 1e9].into_iter().enumerate() {
            for (index, parameter) in odd_parameters().iter().enumerate().rev() {
                let seed = (comm.rank() * 10 + step) * 1000 + index * 10;
                by_type!(parameter, give(&mut model, memory, index, seed, length(parameter)));
            }
            model.step(memory, limit);
        }
    }
}

#[test]
fn a_sharded_optimiser_on_devices_comes_to_the_bits_of_the_host() {
    for world_size in [1, 2, 3] {
        ranks(world_size, shard);
    }
}

#[test]
fn a_sharded_optimiser_on_devices_comes_to_the_bits_of_the_host_between_processes() {
    process_ranks("a_sharded_optimiser_on_devices_comes_to_the_bits_of_the_host_between_processes", 2, shard);
}

#[test]
fn one_rank_alone_needs_no_device_backend() {
    gpu::prepare();
    let alone = Communicator::run_local(1, |comm| {
        let memory = DeviceMemory::on(cudarc::driver::CudaContext::new(0).unwrap().new_stream().unwrap());
        clip(comm, &memory);
        shard(comm, &memory);
        Ok(())
    });
    alone.unwrap();
    gpu::assert_nothing_found();
}

#[test]
fn a_gradient_read_elsewhere_is_freed_behind_its_copy_into_the_bucket() {
    ranks(2, |comm, memory| {
        let context = memory.stream.context();
        let (backward, reader) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let one = vec![Parameter::new::<f32>("a", &[5000])];
        let mut model = DataParallel::on_device(comm, &backward, one, Options::default()).unwrap();
        for _ in 0..5 {
            let gradient = memory.put(&[comm.rank() as f32; 5000]);
            // The bucket's copy reuses one reader's place in the slice's memory, and another reader reuses the place of
            // the copy.
            let before = reader.clone_dtod(&gradient).unwrap();
            model.ready(0, &gradient).unwrap();
            let after = reader.clone_dtod(&gradient).unwrap();
            drop(gradient);
            let averaged = model.finish().unwrap();
            let mut copied = memory.put(&[0.0_f32; 5000]);
            averaged.copy_to(0, &mut copied).unwrap();
            assert_eq!(memory.get(&copied), [0.5; 5000]);
            drop((before, after));
        }
    });
}

#[test]
fn buckets_lie_on_a_stream_that_cudarc_takes_for_the_only_one() {
    ranks(2, |comm, memory| {
        // A context of the caller: it counts only its own streams, and orders nothing by events.
        let stream = cudarc::driver::CudaContext::new(comm.device().unwrap().ordinal()).unwrap().default_stream();
        let two = vec![Parameter::new::<f32>("a", &[5000]), Parameter::new::<f32>("b", &[300])];
        let mut model = DataParallel::on_device(comm, &stream, two, Options::default()).unwrap();
        for step in 0..5 {
            let mine = (comm.rank() + step) as f32;
            model.ready(1, &memory.put(&[mine; 300])).unwrap();
            model.ready(0, &stream.clone_htod(&[mine; 5000]).unwrap()).unwrap();
            let averaged = model.finish().unwrap();
            let expected = step as f32 + 0.5;
            assert_eq!(stream.clone_dtoh(&averaged.device_gradient::<f32>(0).unwrap()).unwrap(), [expected; 5000]);
            let mut copied = memory.put(&[0.0_f32; 300]);
            averaged.copy_to(1, &mut copied).unwrap();
            assert_eq!(memory.get(&copied), [expected; 300]);
        }
    });
}

/// Returns the address of a slice's elements.
fn address<T>(slice: &cudarc::driver::CudaSlice<T>) -> u64 {
    cudarc::driver::DevicePtr::device_ptr(slice, slice.stream()).0
}

#[test]
fn a_given_slice_becomes_its_bucket_and_comes_back() {
    for world_size in [1, 2, 3] {
        ranks(world_size, |comm, memory| {
            let parameters =
                vec![Parameter::new::<f32>("alone", &[5000]), Parameter::new::<f16>("b", &[3]), Parameter::new::<f16>("c", &[2])];
            let options = Options { own_bucket_bytes: Some(20_000), ..Options::default() };
            let mut model = DataParallel::on_device(comm, &memory.stream, parameters, options).unwrap();
            let side = DeviceMemory::on(memory.stream.context().new_stream().unwrap());
            for step in 0..6 {
                let mine = (comm.rank() + step) as f32;
                model.give(2, memory.put(&[f16::from_f32(mine); 2])).unwrap();
                model.give(1, memory.put(&[f16::from_f32(mine); 3])).unwrap();
                // On the bucket's stream, on another one, or copied: differently on each rank.
                let gradient = if step % 2 == 0 { &side } else { memory }.put(&[mine; 5000]);
                let address_of_mine = address(&gradient);
                let is_copied = (step + comm.rank()) % 3 == 2;
                if is_copied {
                    model.ready(0, &gradient).unwrap()
                } else {
                    model.give(0, gradient).unwrap()
                }
                let mut averaged = model.finish().unwrap();
                let expected = step as f32 + (world_size - 1) as f32 / 2.0;
                let mut copied = memory.put(&[0.0_f32; 5000]);
                averaged.copy_to(0, &mut copied).unwrap();
                assert_eq!(memory.get(&copied), [expected; 5000]);
                let taken = averaged.take::<f32>(0).unwrap().into_device().unwrap();
                assert_eq!(memory.get(&taken), [expected; 5000]);
                assert!(is_copied || address(&taken) == address_of_mine, "the memory that was given");
                let error = averaged.device_gradient::<f32>(0).unwrap_err().to_string();
                assert!(error.contains("parameter 0 \"alone\" (f32[5000]): its gradient was taken"), "{error}");
                let shared = averaged.take::<f16>(1).unwrap();
                assert_eq!(memory.get(shared.device().unwrap()), [f16::from_f32(expected); 3]);
            }
            assert!(model.give(0, vec![0.0_f32; 5000]).unwrap_err().to_string().contains("but the buckets are on a device"));
        });
    }
}

#[test]
fn a_slice_of_another_context_object_is_copied_since_cudarc_would_not_order_it() {
    ranks(2, |comm, memory| {
        let ordinal = comm.device().unwrap().ordinal();
        let lone = cudarc::driver::CudaContext::new(ordinal).unwrap().default_stream();
        // Buckets in a context with several streams and a gradient in one with a single stream, and the reverse.
        for (home, theirs) in [(&memory.stream, &lone), (&lone, &memory.stream)] {
            let options = Options { own_bucket_bytes: Some(0), ..Options::default() };
            let mut model = DataParallel::on_device(comm, home, vec![Parameter::new::<f32>("alone", &[5000])], options).unwrap();
            for step in 0..4 {
                let gradient = theirs.clone_htod(&[(comm.rank() + step) as f32; 5000]).unwrap();
                let given = address(&gradient);
                model.give(0, gradient).unwrap();
                let mut averaged = model.finish().unwrap();
                let expected = step as f32 + 0.5;
                assert_eq!(home.clone_dtoh(&averaged.device_gradient::<f32>(0).unwrap()).unwrap(), [expected; 5000]);
                let norm = f64::from(expected) * 5000_f64.sqrt();
                let clipped = averaged.clip_norm(norm / 2.0).unwrap();
                assert!((clipped - norm).abs() < 1e-9 * norm, "{clipped} instead of {norm}");
                let taken = averaged.take::<f32>(0).unwrap().into_device().unwrap();
                let halves = home.clone_dtoh(&taken).unwrap();
                assert!(halves.iter().all(|x| (x - expected / 2.0).abs() < 1e-6) && address(&taken) != given);
            }
        }
    });
}

#[test]
fn ranks_whose_buckets_lie_elsewhere_are_told_so_and_can_go_on() {
    ranks(2, |comm, memory| {
        let options = Options { own_bucket_bytes: Some(1 << 20), ..Options::default() };
        let error = match comm.rank() {
            0 => DataParallel::new(comm, parameters(), options.clone()).err(),
            _ => DataParallel::on_device(comm, &memory.stream, parameters(), options.clone()).err(),
        };
        let error = error.unwrap().to_string();
        assert!(error.contains("DataParallel::new with") && error.contains("DataParallel::on_device with"), "{error}");
        steps(comm, memory, options);
    });
}
