//! The cost of a call on a device buffer in addition to NCCL's: no memory is allocated.

use super::gpu::ranks;
use crate::allocations::allocations;
use collectives::ReduceOp;

#[test]
fn a_native_call_allocates_nothing() {
    ranks(2, |comm, _| {
        let device = comm.device().unwrap();
        let stream = device.stream();
        let source = stream.clone_htod(&[1_f32; 1000]).unwrap();
        let mut destination = stream.alloc_zeros::<f32>(1000).unwrap();
        let mut calls = || {
            comm.all_reduce(&mut destination, ReduceOp::Sum).unwrap();
            comm.all_reduce_into(&source, &mut destination, ReduceOp::Avg).unwrap();
            comm.broadcast(&mut destination, 1).unwrap();
        };
        // The first calls may allocate. The ranks compare all calls.
        (0..22).for_each(|_| calls());
        let allocated = allocations(|| (0..10).for_each(|_| calls()));
        device.synchronize().unwrap();
        assert_eq!(allocated, 0, "allocations in 30 calls");
    });
}
