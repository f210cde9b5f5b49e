//! Kernels are loaded when a model is created: loading takes a lock of the driver, which may wait for work that hangs
//! on the device.

use collectives::{Communicator, DType, bf16};
use collectives_train::{DataParallel, FullySharded, FullyShardedOptions, LossScaler, Options, Parameter, ShardedOptimizer, Unit};
use cudarc::driver::CudaContext;
use simgpu::driver_calls_of_this_thread;

use crate::common::cases::Memory as _;
use crate::gpu::{DeviceMemory, assert_nothing_found, is_real, prepare};

/// A device that no other test of this program uses, so nothing is loaded there yet.
const DEVICE: usize = 7;

/// Returns the number of modules that this thread loads in `work`, and the result of `work`.
fn loads<R>(work: impl FnOnce() -> R) -> (u64, R) {
    let mut result = None;
    let calls = driver_calls_of_this_thread(|| result = Some(work()));
    let loads = ["cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"].map(|name| calls.of(name));
    (loads.iter().sum(), result.unwrap())
}

/// Creates a model, which loads kernels, and runs a step, which loads none.
fn step<M>(kind: &str, make: impl FnOnce() -> M, step: impl FnOnce(&mut M)) {
    let (at_first, mut model) = loads(make);
    assert!(at_first > 0, "{kind}: nothing was loaded before");
    assert_eq!(loads(|| step(&mut model)).0, 0, "{kind}: modules that a step has loaded");
}

#[test]
fn no_step_loads_a_kernel() {
    if is_real() {
        crate::common::hosts::skip!("it counts calls of the simulated driver");
    }
    prepare();
    let alone = Communicator::run_local(1, |comm| {
        let memory = DeviceMemory::on(CudaContext::new(DEVICE).unwrap().new_stream().unwrap());
        let parameters = || vec![Parameter::new::<bf16>("weight", &[5])];
        let gradient = memory.put(&[bf16::from_f32(1.5); 5]);
        let mut scaler = LossScaler::default();
        let data_parallel = || DataParallel::on_device(comm, &memory.stream, parameters(), Options::default()).unwrap();
        step("DataParallel", data_parallel, |model| {
            model.accumulate(0, &gradient).unwrap();
            model.ready(0, &gradient).unwrap();
            let mut averaged = model.finish().unwrap();
            averaged.unscale(&mut scaler).unwrap();
            averaged.norm().unwrap();
            averaged.clip_norm(1.0).unwrap();
        });
        let sharded = || ShardedOptimizer::on_device(comm, &memory.stream, parameters(), Options::default()).unwrap();
        step("ShardedOptimizer", sharded, |model| {
            model.load(0, &gradient).unwrap();
            model.ready(0, &gradient).unwrap();
            let mut shards = model.reduce().unwrap();
            shards.norm().unwrap();
            shards.clip_norm(1.0).unwrap();
        });
        let unit = || vec![Unit::new("layer", vec![Parameter::new::<f32>("weight", &[5])])];
        let options = || FullyShardedOptions { gather_type: Some(DType::Bf16), ..FullyShardedOptions::default() };
        let fully_sharded = || FullySharded::on_device(comm, &memory.stream, unit(), options()).unwrap();
        let values = memory.put(&[1.0_f32; 5]);
        step("FullySharded", fully_sharded, |model| {
            model.load(0, 0, &values).unwrap();
            model.gather(0).unwrap();
            model.release(0).unwrap();
            model.reduce_gradients(0, &[&gradient]).unwrap();
            let mut reduced = model.reduce().unwrap();
            reduced.norm().unwrap();
            reduced.clip_norm(1.0).unwrap();
        });
        Ok(())
    });
    alone.unwrap();
    assert_nothing_found();
}
