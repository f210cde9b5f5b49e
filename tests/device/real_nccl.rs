//! What only a real NCCL shows: on the simulated driver where `COLLECTIVES_TEST_NCCL` names one (`simgpu::real` says more).

use std::fs;

use collectives::ReduceOp;

use super::gpu::{can_steer_nccl, ranks};
use crate::common::cases::Memory;
use crate::common::hosts::skip;
use crate::common::ranks::alone_in_a_process;

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn calls_leave_no_thread_behind() {
    if can_steer_nccl() {
        skip!("COLLECTIVES_TEST_NCCL names no real NCCL");
    }
    // Threads of other tests come and go.
    alone_in_a_process("real_nccl::calls_leave_no_thread_behind", || {
        ranks(2, |comm, memory| {
            let mut buffer = memory.put(&[1_f32; 64]);
            comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
            comm.device().unwrap().synchronize().unwrap();
            comm.barrier().unwrap();
            let before = threads();
            comm.barrier().unwrap();
            for _ in 0..50 {
                comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
            }
            comm.device().unwrap().synchronize().unwrap();
            comm.barrier().unwrap();
            assert!(threads() <= before, "{} threads, and {before} before", threads());
            assert_eq!(memory.get(&buffer), [1.0; 64]);
            comm.barrier().unwrap();
        });
    });
}
