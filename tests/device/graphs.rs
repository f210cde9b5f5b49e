//! Calls inside captured graphs.

use collectives::{ReduceOp, bf16};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::gpu::ranks;
use crate::common::cases::Memory;
use crate::common::oracle::{folded, inputs};
use crate::common::ranks::alone_in_a_process;

/// Captures calls of every kind of route, launches the graph several times with new contents, and compares each time.
#[test]
fn captured_calls_give_the_same_bits_at_every_launch() {
    // Creating the first stream of a context ends the captures in it, and other tests do that.
    alone_in_a_process("graphs::captured_calls_give_the_same_bits_at_every_launch", capture_and_launch);
}

fn capture_and_launch() {
    for world_size in [1, 2, 3] {
        ranks(world_size, |comm, memory| {
            let (n, me) = (comm.world_size(), comm.rank());
            let stream = memory.stream.context().new_stream().unwrap();
            let count = 3001;
            let mut sums = memory.put(&vec![0_f32; count]);
            let mut bits = memory.put(&vec![0_u16; count]);
            let mut means = memory.put(&vec![bf16::ZERO; count]);
            let mut gathered = memory.put(&vec![0_u16; count * n]);
            // A first call, so that modules are loaded and connections made outside of graphs.
            comm.with_stream(&stream).all_reduce(&mut sums, ReduceOp::Sum).unwrap();
            stream.synchronize().unwrap();
            comm.barrier().unwrap();
            #[expect(unsafe_code, reason = "cudarc's tracking events may not become part of the graph")]
            // SAFETY: everything below is on one stream, which is synchronised before a buffer is used elsewhere or dropped.
            unsafe {
                stream.context().disable_event_tracking();
            }
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let on = comm.with_stream(&stream);
            on.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
            on.all_reduce(&mut bits, ReduceOp::BitXor).unwrap();
            // Waiting for other work asks the driver about events, which must not end the capture.
            comm.device().unwrap().synchronize().unwrap();
            on.all_reduce(&mut means, ReduceOp::Avg).unwrap();
            on.all_gather_into(&bits, &mut gathered).unwrap();
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().unwrap();
            for round in 0..3 {
                let ins = (
                    inputs(ReduceOp::Sum, round, n, count),
                    inputs(ReduceOp::BitXor, round, n, count),
                    inputs(ReduceOp::Avg, round, n, count),
                );
                let fill = |memory: &super::gpu::DeviceMemory| {
                    (memory.put::<f32>(&ins.0[me]), memory.put::<u16>(&ins.1[me]), memory.put::<bf16>(&ins.2[me]))
                };
                let new = fill(memory);
                memory.stream.synchronize().unwrap();
                copy(&stream, &new.0, &mut sums);
                copy(&stream, &new.1, &mut bits);
                copy(&stream, &new.2, &mut means);
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                assert_eq!(memory.get(&sums), folded(ReduceOp::Sum, &ins.0), "round {round}");
                let xor = folded(ReduceOp::BitXor, &ins.1);
                assert_eq!(memory.get(&bits), xor, "round {round}");
                assert_eq!(memory.get(&means), folded(ReduceOp::Avg, &ins.2), "round {round}");
                assert_eq!(memory.get(&gathered), xor.repeat(n), "round {round}");
            }
            drop(graph);
        });
    }
}

/// Copies between device buffers of any element type.
fn copy<T: crate::common::oracle::Predict>(
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    from: &cudarc::driver::CudaSlice<T>,
    to: &mut cudarc::driver::CudaSlice<T>,
) {
    stream.memcpy_dtod(from, to).unwrap();
}
