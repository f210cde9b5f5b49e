//! Gradients averaged in buckets on devices: simulated ones, or, with `COLLECTIVES_TEST_GPU=real`, those that are there.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/mod.rs"]
mod common;
#[path = "device/gpu.rs"]
mod gpu;

use collectives::train::{Averaged, Compress, DataParallel, Float, Options, Parameter};
use collectives::{Communicator, ReduceOp, bf16, f16};

use common::cases::Memory as _;
use common::oracle::Predict;
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

/// Whole numbers, of which sums are exact in every type.
fn element(rank: usize, step: usize, index: usize) -> f64 {
    ((rank + 1) * (index + 3) * (step + 5) % 23) as f64 - 11.0
}

fn hand_in<T: Float + Predict>(model: &mut DataParallel<'_>, memory: &DeviceMemory, step: usize, index: usize, len: usize) {
    let rank = model.communicator().rank();
    let gradient: Vec<T> = (0..len).map(|at| T::from_f64(element(rank, step, at))).collect();
    // The buffer is freed behind its copy into the bucket.
    model.ready(index, &memory.put(&gradient)).unwrap();
}

fn compare<T: Float + Predict>(
    averaged: &Averaged<'_, '_>,
    memory: &DeviceMemory,
    world_size: usize,
    step: usize,
    index: usize,
    len: usize,
) {
    let sum = |at| (0..world_size).map(|rank| element(rank, step, at)).sum::<f64>();
    let expected: Vec<T> = (0..len).map(|at| T::from_f64(sum(at) / world_size as f64)).collect();
    let mut copied = memory.put(&vec![T::default(); len]);
    averaged.copy_to(index, &mut copied).unwrap();
    assert!(memory.get(&copied) == expected, "parameter {index} in step {step}");
    assert_eq!(averaged.device_gradient::<T>(index).unwrap().len(), len);
}

/// Some steps, with gradients in another order on every rank.
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
fn what_is_done_on_the_host_alone_says_so_on_devices() {
    ranks(2, |comm, memory| {
        let one = || vec![Parameter::new::<f32>("a", &[3])];
        let mut model = DataParallel::on_device(comm, &memory.stream, one(), Options::default()).unwrap();
        let gradient = memory.put(&[1.0_f32; 3]);
        let error = model.ready(0, &[1.0_f32; 3]).unwrap_err().to_string();
        assert!(error.contains("a buffer in host memory, where the buckets are on a device"), "{error}");
        model.accumulate(0, &gradient).unwrap();
        assert!(model.accumulate(0, &gradient).unwrap_err().is_unsupported());
        let mut model = DataParallel::on_device(comm, &memory.stream, one(), Options::default()).unwrap();
        model.ready(0, &gradient).unwrap();
        let mut averaged = model.finish().unwrap();
        assert!(averaged.clip_norm(1.0).unwrap_err().is_unsupported());
        assert!(averaged.gradient::<f32>(0).unwrap_err().is_unsupported());
        model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, f16>::new(comm, layout, ReduceOp::Avg)?))).unwrap();
        assert!(model.ready(0, &gradient).unwrap_err().is_unsupported());
        let mut host = DataParallel::new(comm, one(), Options::default()).unwrap();
        let error = host.ready(0, &gradient).unwrap_err().to_string();
        assert!(error.contains("a buffer on a device, where the buckets are in host memory"), "{error}");
        host.ready(0, &[2.0_f32; 3]).unwrap();
        assert!(host.finish().unwrap().device_gradient::<f32>(0).is_err());
    });
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
            // The bucket's copy takes the place of one reader in the slice's memory, and another reader that of the copy.
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
        // A context of the caller's: it counts its own streams only, and orders nothing by events.
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

/// Where a slice's elements lie.
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
                // Of the bucket's stream, of another one, or copied: another way on each rank.
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
            assert!(model.give(0, vec![0.0_f32; 5000]).unwrap_err().to_string().contains("where the buckets are on a device"));
        });
    }
}
