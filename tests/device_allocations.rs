//! What a call on a device buffer costs besides NCCL: no memory is allocated.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "counts allocations")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use collectives::{Communicator, DeviceChoice, ReduceOp};

/// Counts what each thread allocates. The simulated libraries have an allocator of their own, which is not seen here.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's doing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_native_call_allocates_nothing() {
    simgpu::install();
    let builder = |_: usize| Communicator::builder().timeout(Duration::from_secs(60)).require_device(DeviceChoice::Local);
    common::ranks::threads_with(2, builder, |comm| {
        let device = comm.device().unwrap();
        let stream = device.stream();
        let source = stream.clone_htod(&[1_f32; 1000]).unwrap();
        let mut destination = stream.alloc_zeros::<f32>(1000).unwrap();
        let mut calls = || {
            comm.all_reduce(&mut destination, ReduceOp::Sum).unwrap();
            comm.all_reduce_into(&source, &mut destination, ReduceOp::Avg).unwrap();
            comm.broadcast(&mut destination, 1).unwrap();
        };
        // What is used for the first time may allocate. The calls are compared, before and after.
        (0..22).for_each(|_| calls());
        let before = ALLOCATIONS.get();
        (0..10).for_each(|_| calls());
        let allocated = ALLOCATIONS.get() - before;
        device.synchronize().unwrap();
        assert_eq!(allocated, 0, "allocations in 30 calls");
    });
}
