//! What a call costs beside the work itself, counted: calls of the driver, by name and apart from NCCL's own; calls of NCCL; allocations.

#![expect(unsafe_code, reason = "a buffer is given by its address")]

use std::sync::Arc;

use collectives::{Communicator, Config, ReduceOp, interop::RawDeviceSlice};
use cudarc::driver::{CudaStream, DevicePtr};
use simgpu::{DriverCalls, driver_calls_of_this_thread};

use super::gpu::{DeviceMemory, compared_before, is_real, ranks_with};
use crate::allocations::allocations;
use crate::common::cases::Memory;

/// What one call costs.
struct Cost {
    driver: DriverCalls,
    nccl: u64,
    allocations: usize,
}

/// The calls of NCCL that this thread has made.
fn nccl_calls() -> u64 {
    simgpu::nccl::SYMBOLS.iter().map(|(name, _)| simgpu::nccl::calls_of_this_thread(name)).sum()
}

/// What a call costs after the first ones: what is used for the first time may cost more.
fn cost(mut call: impl FnMut()) -> Cost {
    (0..3).for_each(|_| call());
    let (before, mut allocated) = (nccl_calls(), 0);
    let driver = driver_calls_of_this_thread(|| allocated = allocations(&mut call));
    Cost { driver, nccl: nccl_calls() - before, allocations: allocated }
}

#[test]
fn print() {
    for (name, config) in [("unchecked", compared_before(0)), ("compared", Config::default())] {
        ranks_with(2, config, |comm, _| {
            let device = comm.device().unwrap();
            let stream = device.stream();
            let memory = DeviceMemory::on(Arc::clone(stream));
            let source = memory.put(&[1_i32; 100]);
            let mut destination = memory.put(&[0_i32; 100]);
            let address = destination.device_ptr(stream).0;
            // SAFETY
            let mut raw = unsafe { RawDeviceSlice::<i32>::new(device.context(), address, 100) };
            let costs = [
                ("address", cost(|| comm.all_reduce(&mut raw, ReduceOp::Max).unwrap())),
                ("in place", cost(|| comm.all_reduce(&mut destination, ReduceOp::Max).unwrap())),
                ("into", cost(|| comm.all_reduce_into(&source, &mut destination, ReduceOp::Max).unwrap())),
            ];
            if comm.rank() == 0 {
                for (what, Cost { driver, nccl, allocations }) in costs {
                    println!("{name} {what}: driver {driver}; inside {}; nccl {nccl}; allocations {allocations}", driver.inside_nccl());
                }
            }
        });
    }
}
