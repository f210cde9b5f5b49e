//! The cost of a call in addition to the work itself, counted: driver calls by name (without NCCL's own), NCCL calls,
//! threads started, and allocations.
//!
//! | a call, after the first | driver calls beside NCCL's own | NCCL calls | threads | allocations |
//! | --- | --- | --- | --- | --- |
//! | all_reduce in place, an address with a stream | 1: is the stream captured | 1 | 0 | 0 |
//! | all_reduce in place on a `CudaSlice` | 4: that, two waits, one record | 1 | 0 | 0 |
//! | all_reduce from one `CudaSlice` into another | 7: that, three waits, two records, one question for the context | 1 | 0 | 0 |
//! | either, if cudarc's event tracking is disabled | 1: is the stream captured | 1 | 0 | 0 |
//! | a call that takes several NCCL calls | | several | 0 | 0 |
//!
//! If the ranks compare the call, there is one more: they tell each other whether it is captured. A cudarc slice has
//! two events, for its last read and its last write on any stream. A write waits for both, and a read for the second.
//! The events do not show on which stream they were recorded last, so no wait can be left out. cudarc does not expose
//! the event that a read waits for: it waits itself, and asks for the context first.
//!
//! The threads are those that NCCL starts. A thread of this crate would be an allocation of the thread that starts it.
//! `threads.rs` counts all.

#![expect(unsafe_code, reason = "a buffer is given by its address, and contexts are made current")]

use std::sync::Arc;

use collectives::{Communicator, Config, ReduceOp, interop::RawDeviceSlice};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use simgpu::{DriverCalls, driver_calls_of_this_thread};

use super::gpu::{DeviceMemory, compared_before, is_real, ranks, ranks_with, steers_nccl};
use crate::allocations::allocations;
use crate::common::cases::Memory;

/// The cost of one call.
struct Cost {
    driver: DriverCalls,
    nccl: u64,
    threads: u64,
    allocations: usize,
}

/// Returns how many NCCL calls this thread has made.
fn nccl_calls() -> u64 {
    simgpu::nccl::SYMBOLS.iter().map(|(name, _)| simgpu::nccl::calls_of_this_thread(name)).sum()
}

/// Returns the cost of a call after the first ones, which may cost more.
fn cost(mut call: impl FnMut()) -> Cost {
    (0..3).for_each(|_| call());
    let threads = simgpu::nccl::threads_started_by_this_thread;
    let (calls_before, threads_before, mut allocated) = (nccl_calls(), threads(), 0);
    let driver = driver_calls_of_this_thread(|| allocated = allocations(&mut call));
    Cost { driver, nccl: nccl_calls() - calls_before, threads: threads() - threads_before, allocations: allocated }
}

/// Runs `program` with a source, a destination and the address of the latter, on the communicator's own stream.
fn with_buffers(
    config: Config,
    program: impl Fn(&Communicator, &CudaSlice<i32>, &mut CudaSlice<i32>, &mut RawDeviceSlice<'_, i32>) + Sync,
) {
    ranks_with(2, config, |comm, _| {
        let device = comm.device().unwrap();
        let memory = DeviceMemory::on(Arc::clone(device.stream()));
        let source = memory.put(&[comm.rank() as i32 + 5; 100]);
        let mut destination = memory.put(&[comm.rank() as i32; 100]);
        let address = destination.device_ptr(device.stream()).0;
        // SAFETY: a hundred elements of a slice that outlives this one. All uses are on one stream.
        let mut raw = unsafe { RawDeviceSlice::new(device.context(), address, 100) };
        program(comm, &source, &mut destination, &mut raw);
        assert_eq!(memory.get(&destination), [6; 100]);
    });
}

/// Fails if a call costs more than this: driver calls by name, one NCCL call, no thread and no allocation.
#[track_caller]
fn assert_cost(what: &str, is_compared: bool, cost: Cost, expected: &[(&str, u64)]) {
    let Cost { driver, nccl, threads, allocations } = cost;
    // Comparing a call, and queueing it on its stream, each ask whether it becomes part of a graph.
    let asks = [("cuStreamIsCapturing", 1 + u64::from(is_compared))];
    let expected = || expected.iter().chain(&asks);
    let words = format!("{what}, {}: beside NCCL's own calls {driver}", if is_compared { "compared" } else { "not compared" });
    assert!(expected().all(|(name, most)| driver.of(name) <= *most), "{words}");
    assert!(driver.beside_nccl() <= expected().map(|(_, most)| most).sum(), "{words}");
    assert!(driver.inside_nccl() > 0, "{what}: no driver call is counted as NCCL's own");
    assert_eq!((nccl, threads, allocations), (1, 0, 0), "{what}: calls of NCCL, threads, and allocations");
}

#[test]
fn a_call_makes_few_driver_calls_one_of_nccl_and_starts_no_thread() {
    steers_nccl!();
    for (is_compared, config) in [(false, compared_before(0)), (true, Config::default())] {
        with_buffers(config, |comm, source, destination, raw| {
            let address = cost(|| comm.all_reduce(raw, ReduceOp::Max).unwrap());
            assert_cost("in place, an address", is_compared, address, &[]);
            let in_place = cost(|| comm.all_reduce(destination, ReduceOp::Max).unwrap());
            assert_cost("in place, a slice", is_compared, in_place, &[("cuStreamWaitEvent", 2), ("cuEventRecord", 1)]);
            let into = cost(|| comm.all_reduce_into(source, destination, ReduceOp::Max).unwrap());
            let expected = [("cuStreamWaitEvent", 3), ("cuEventRecord", 2), ("cuCtxGetCurrent", 1)];
            assert_cost("from one slice into another", is_compared, into, &expected);
        });
    }
}

#[test]
fn views_cost_what_slices_do_and_a_default_stream_needs_its_context() {
    steers_nccl!();
    with_buffers(compared_before(0), |comm, _, destination, _| {
        let view = cost(|| comm.all_reduce(&mut destination.slice_mut(..), ReduceOp::Max).unwrap());
        assert_cost("in place, a view", false, view, &[("cuStreamWaitEvent", 2), ("cuEventRecord", 1)]);
        let comm = comm.with_stream(&comm.device().unwrap().context().default_stream());
        let named = cost(|| comm.all_reduce(destination, ReduceOp::Max).unwrap());
        // Before each of the three, and before NCCL's calls.
        let expected = [("cuStreamWaitEvent", 2), ("cuEventRecord", 1), ("cuCtxGetCurrent", 4)];
        assert_cost("on the default stream", false, named, &expected);
        let source = comm.device().unwrap().stream().clone_htod(&[comm.rank() as i32 + 5; 100]).unwrap();
        comm.all_reduce_into(&source, destination, ReduceOp::Max).unwrap();
    });
}

#[test]
fn slices_without_events_cost_what_addresses_do() {
    steers_nccl!();
    ranks_with(2, compared_before(0), |comm, _| {
        let device = comm.device().unwrap();
        let context = CudaContext::new(device.context().ordinal()).unwrap();
        // SAFETY: all memory that is allocated through this value of the context is used on one stream.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        let (comm, memory) = (comm.with_stream(&stream), DeviceMemory::on(Arc::clone(&stream)));
        let source = memory.put(&[comm.rank() as i32 + 5; 100]);
        let mut destination = memory.put(&[comm.rank() as i32; 100]);
        assert_cost("in place", false, cost(|| comm.all_reduce(&mut destination, ReduceOp::Max).unwrap()), &[]);
        let into = cost(|| comm.all_reduce_into(&source, &mut destination, ReduceOp::Max).unwrap());
        assert_cost("from one slice into another", false, into, &[]);
        assert_eq!(memory.get(&destination), [6; 100]);
    });
}

/// The plan (`device/plan`) determines how many NCCL groups a reduction takes. A repeated call reuses its plan.
#[test]
fn a_fold_that_is_made_again_starts_no_thread_and_allocates_nothing() {
    steers_nccl!();
    let mut config = compared_before(0);
    config.device_scratch_bytes = 64 << 10;
    ranks_with(3, config, |comm, memory| {
        let mut bits = memory.put(&vec![1_u32 << comm.rank(); 100_000]);
        let mut scaled = memory.put(&[1.5_f32; 50]);
        let folds = cost(|| comm.all_reduce(&mut bits, ReduceOp::BitOr).unwrap());
        assert!(folds.nccl > 2 * 3, "{} calls of NCCL are no fold in slabs", folds.nccl);
        assert_eq!((folds.threads, folds.allocations), (0, 0), "threads and allocations of a fold");
        // First with the other buffer, then with the first one again.
        comm.all_reduce(&mut scaled, ReduceOp::PreMulSum(2.0)).unwrap();
        comm.all_reduce(&mut scaled, ReduceOp::PreMulSum(-2.0)).unwrap();
        comm.all_reduce(&mut bits, ReduceOp::BitXor).unwrap();
        comm.all_reduce(&mut bits, ReduceOp::BitOr).unwrap();
        assert_eq!(memory.get(&bits), vec![7; 100_000]);
        assert_eq!(memory.get(&scaled), [-54.0; 50]);
    });
}

/// Any context may be current, or none.
#[test]
fn a_call_works_in_any_context() {
    ranks(2, |comm, memory| {
        let device = comm.device().unwrap();
        let (mine, other) = (device.context(), CudaContext::new(if is_real() { 0 } else { 7 - comm.rank() }).unwrap());
        let mut buffer = memory.put(&[1_i64 << comm.rank(); 1000]);
        let source = memory.put(&[1_i64 << comm.rank(); 1000]);
        let mut result = memory.put(&[0_i64; 1000]);
        for round in 0..6_u64 {
            let leave = || match round % 3 {
                0 => mine.bind_to_thread().unwrap(),
                1 => other.bind_to_thread().unwrap(),
                // SAFETY: null means no context, which is allowed.
                _ => unsafe { result::ctx::set_current(std::ptr::null_mut()) }.unwrap(),
            };
            // A different timeout creates an event.
            let comm = comm.with_timeout(comm.timeout() + std::time::Duration::from_secs(round));
            let handles: [&Communicator; 2] = [&comm, &comm.with_stream(&mine.default_stream())];
            for comm in handles {
                leave();
                comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
                leave();
                comm.all_reduce(&mut buffer, ReduceOp::BitOr).unwrap();
                leave();
                comm.all_reduce_into(&source, &mut result, ReduceOp::Sum).unwrap();
            }
        }
        mine.bind_to_thread().unwrap();
        assert_eq!((memory.get(&buffer), memory.get(&result)), (vec![2; 1000], vec![3; 1000]));
    });
}

/// Calls wait for what other code does with a slice between two calls, on any stream, and that code waits for the
/// calls.
#[test]
fn uses_by_others_between_calls_are_ordered() {
    ranks_with(2, compared_before(0), |comm, memory| {
        let streams: Vec<Arc<CudaStream>> = (0..3).map(|_| memory.stream.context().new_stream().unwrap()).collect();
        let mut buffer = memory.put(&[0_i32; 5000]);
        let mut copy = memory.put(&[0_i32; 5000]);
        let mut gathered = memory.put(&[0_i32; 5000]);
        for round in 1..=12 {
            let (writer, reader) = (&streams[round % 3], &streams[(round + 1) % 3]);
            let mine = [round as i32 + comm.rank() as i32; 5000];
            writer.memcpy_htod(&mine, &mut buffer).unwrap();
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            reader.memcpy_dtod(&buffer, &mut copy).unwrap();
            comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
            comm.with_stream(reader).all_reduce_into(&copy, &mut gathered, ReduceOp::Min).unwrap();
            writer.memcpy_dtod(&gathered, &mut buffer).unwrap();
            comm.with_stream(&streams[(round + 2) % 3]).all_reduce_into(&buffer, &mut copy, ReduceOp::Sum).unwrap();
            assert_eq!(memory.get(&copy), [2 * (2 * round as i32 + 1); 5000]);
        }
    });
}
