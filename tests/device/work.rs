//! Started calls: they own their buffers and give them back.

use std::time::Duration;

use collectives::ReduceOp;

use super::gpu::ranks;
use crate::common::cases::Memory;

#[test]
fn started_calls_give_their_buffers_back() {
    ranks(3, |comm, memory| {
        let me = comm.rank();
        let first = comm.start_all_reduce(memory.put(&vec![me as u16 + 1; 4000]), ReduceOp::BitXor).unwrap();
        let second = comm.start_broadcast(memory.put(&[me as i64; 10]), 2).unwrap();
        let third = comm.start_all_gather_into(memory.put(&[me as u8]), memory.put(&[9_u8; 3])).unwrap();
        assert_eq!(memory.get(&first.wait().unwrap()), vec![1 ^ 2 ^ 3; 4000]);
        assert_eq!(memory.get(&second.wait().unwrap()), [2; 10]);
        let (_, gathered) = third.wait().unwrap();
        assert_eq!(memory.get(&gathered), [0, 1, 2]);

        let mut work = comm.start_all_reduce(memory.put(&[1_f32]), ReduceOp::Sum).unwrap();
        let buffer = loop {
            if let Some(buffer) = work.wait_deadline(Duration::from_millis(1)).unwrap() {
                break buffer;
            }
        };
        assert!(work.is_done());
        assert_eq!(memory.get(&buffer), [3.0]);
    });
}

#[test]
fn messages_can_be_started() {
    ranks(2, |comm, memory| {
        let peer = 1 - comm.rank();
        // NCCL pairs messages in order: one side sends first, the other receives first.
        if comm.rank() == 0 {
            let sent = comm.start_send(memory.put(&[5_u32; 20]), peer).unwrap();
            assert_eq!(memory.get(&sent.wait().unwrap()), [5; 20]);
        } else {
            let (buffer, received) = comm.start_recv(memory.put(&[0_u32; 20]), peer).unwrap().wait().unwrap();
            assert_eq!((memory.get(&buffer), received.count), (vec![5; 20], 20));
        }
    });
}

#[test]
fn a_work_that_is_dropped_lets_the_call_go_on() {
    ranks(2, |comm, memory| {
        for _ in 0..10 {
            drop(comm.start_all_reduce(memory.put(&vec![1_u64; 3000]), ReduceOp::BitAnd).unwrap());
            std::mem::forget(comm.start_all_reduce(memory.put(&[1_u64]), ReduceOp::Sum).unwrap());
        }
        let mut buffer = memory.put(&[1_u64]);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&buffer), [2]);
    });
}
