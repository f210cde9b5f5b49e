//! Memory and streams of the caller's own `CudaContext`. It differs from the communicator's, but stands for the same
//! driver context. It has no second stream, so cudarc orders nothing there by events.

use std::sync::{Arc, Mutex, PoisonError};

use collectives::{Communicator, ReduceOp, interop::ForeignBuffer};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream};

use super::Theirs;
use crate::common::cases::Memory;
use crate::gpu::{assert_nothing_found, ranks};

/// A lock for the default stream, of which a device has one. If two jobs queued calls behind it, in different orders on
/// each device, they would wait for each other forever.
static DEFAULT_STREAMS: Mutex<()> = Mutex::new(());

/// Returns the default stream of a `CudaContext` created here.
fn only_stream(comm: &Communicator) -> Arc<CudaStream> {
    let context = CudaContext::new(comm.device().unwrap().ordinal()).unwrap();
    assert!(context.is_event_tracking() && !context.is_in_multi_stream_mode());
    context.default_stream()
}

#[test]
fn memory_of_a_context_with_one_stream_is_used_in_its_order() {
    let _alone = DEFAULT_STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    ranks(2, |comm, _| {
        let stream = only_stream(comm);
        for round in 0..5_i32 {
            let mut buffer = stream.clone_htod(&vec![round + comm.rank() as i32; 5000]).unwrap();
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(stream.clone_dtoh(&buffer).unwrap(), vec![2 * round + 1; 5000]);

            let mut maxima = stream.alloc_zeros::<i32>(2500).unwrap();
            comm.all_reduce_into(&buffer.slice(2500..), &mut maxima.slice_mut(..), ReduceOp::Max).unwrap();
            stream.memset_zeros(&mut buffer).unwrap();
            comm.group(|group| group.all_reduce(&mut maxima, ReduceOp::Sum)).unwrap();
            assert_eq!(stream.clone_dtoh(&maxima).unwrap(), vec![4 * round + 2; 2500]);
            // Both are freed behind what was queued.
            comm.all_reduce_into(&buffer, &mut stream.alloc_zeros::<i32>(5000).unwrap(), ReduceOp::Sum).unwrap();
            let work = comm.start_all_reduce(maxima, ReduceOp::Sum).unwrap();
            assert_eq!(stream.clone_dtoh(&work.wait().unwrap()).unwrap(), vec![8 * round + 4; 2500]);
        }
    });
    assert_nothing_found();
}

#[test]
fn calls_on_a_stream_of_such_a_context_hold_memory_of_others() {
    let _alone = DEFAULT_STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    ranks(2, |comm, memory| {
        let stream = only_stream(comm);
        let third = memory.stream.context().new_stream().unwrap();
        for round in 0..5_u64 {
            let source = memory.put(&vec![round; 3000]);
            let mut sums = memory.put(&vec![0_u64; 3000]);
            comm.with_stream(&stream).all_reduce_into(&source, &mut sums, ReduceOp::Sum).unwrap();
            // The source's memory then remembers this reader in place of the call.
            assert_eq!(third.clone_dtoh(&source).unwrap(), vec![round; 3000]);
            drop(source);
            assert_eq!(third.clone_dtoh(&sums).unwrap(), vec![2 * round; 3000]);
            comm.with_stream(&stream).broadcast(&mut sums, 0).unwrap();
        }
    });
    assert_nothing_found();
}

#[test]
fn a_call_whose_memory_cannot_be_ordered_is_not_queued() {
    ranks(2, |comm, memory| {
        let mut theirs = Theirs::new(memory, 300);
        theirs.write(&[5; 300]);
        theirs.stream.synchronize().unwrap();
        let stream = Arc::clone(&theirs.stream);
        let device = comm.device().unwrap();
        let context = device.context();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let single = comm.all_reduce(&mut ForeignBuffer::new(context, &mut theirs).unwrap(), ReduceOp::Sum);
        let mut buffer = ForeignBuffer::new(context, &mut theirs).unwrap();
        let grouped = comm.group(|group| group.all_reduce(&mut buffer, ReduceOp::Sum));
        stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap();
        for error in [single.unwrap_err(), grouped.map(|_| ()).unwrap_err()] {
            assert!(error.to_string().contains("ordering its buffers"), "{error}");
        }
        comm.device().unwrap().synchronize().unwrap();
        assert_eq!(theirs.read(), [5; 300]);
        comm.all_reduce(&mut ForeignBuffer::new(context, &mut theirs).unwrap(), ReduceOp::Sum).unwrap();
        assert_eq!(theirs.read(), [10; 300]);
    });
    assert_nothing_found();
}
