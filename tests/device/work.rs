//! Started calls, which own their buffers and return them.

use std::future::IntoFuture;
use std::time::Duration;

use collectives::{ReduceOp, Work};

use super::gpu::{ranks, ranks_with, unchecked};
use crate::common::cases::Memory;
use crate::common::ranks::Meeting;
use crate::common::tasks::block_on;

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
            if let Some(buffer) = work.wait_timeout(Duration::from_millis(1)).unwrap() {
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
        // NCCL pairs messages in order, so one side sends first and the other receives first.
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

#[test]
fn started_calls_are_awaited_and_call_back() {
    ranks(2, |comm, memory| {
        let sum = comm.start_all_reduce(memory.put(&[comm.rank() as f64; 3000]), ReduceOp::Sum).unwrap();
        let (called, calls) = std::sync::mpsc::channel();
        let broadcast = comm.start_broadcast(memory.put(&[comm.rank() as u8; 5]), 1).unwrap();
        broadcast.on_end(move || called.send(()).unwrap());
        let (sum, _) = block_on(sum.into_future());
        assert_eq!(memory.get(&sum.unwrap()), vec![1.0; 3000]);
        calls.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(memory.get(&broadcast.wait().unwrap()), [1; 5]);
        let works = [
            comm.start_all_reduce(memory.put(&[1_u32]), ReduceOp::Sum).unwrap(),
            comm.start_all_reduce(memory.put(&[2_u32]), ReduceOp::Sum).unwrap(),
        ];
        assert!(Work::wait_any(&works, Duration::from_secs(60)).is_some());
        let sums = works.map(|work| memory.get(&work.wait().unwrap()));
        assert_eq!(sums, [vec![2], vec![4]]);
    });
}

#[test]
fn threads_that_share_a_communicator_queue_their_calls_in_turns() {
    ranks(2, |comm, memory| {
        let rounds = 20;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let comm = comm.clone();
                // All threads make the same call, so any order is the same on all ranks.
                scope.spawn(move || {
                    for _ in 0..rounds {
                        let mut buffer = memory.put(&[comm.rank() as i32 + 1; 100]);
                        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                        assert_eq!(memory.get(&buffer), [3; 100]);
                    }
                });
            }
        });
    });
}

#[test]
fn every_form_gives_what_the_blocking_one_gives() {
    for world_size in [1, 2, 3] {
        ranks(world_size, |comm, memory| {
            crate::common::forms::every_form(comm, 0xf1, |elements| memory.put(elements), |buffer| memory.get(buffer));
        });
    }
}

#[test]
fn a_callback_that_awaits_another_call_on_the_thread_that_notices_both_is_told_so() {
    let (listens, heard_of_it) = (Meeting::new(2), Meeting::new(2));
    ranks_with(2, unchecked(), |comm, memory| {
        // Connects now, so that the later calls need not.
        comm.all_reduce(&mut memory.put(&[1_u32; 8]), ReduceOp::Sum).unwrap();
        let start = || comm.start_all_reduce(memory.put(&[1_u32; 8]), ReduceOp::Sum).unwrap();
        if comm.rank() == 1 {
            listens.meet();
            let first = start();
            heard_of_it.meet();
            let second = start();
            return [first, second].into_iter().for_each(|work| drop(work.wait().unwrap()));
        }
        let (first, second) = (start(), start());
        let (said, heard) = std::sync::mpsc::channel();
        first.on_end(move || {
            let works = [second];
            let any = Work::wait_any(&works, Duration::MAX);
            let [second] = works;
            said.send((any, block_on(second.into_future()).0.map(drop))).unwrap();
        });
        listens.meet();
        let (any, awaited) = heard.recv_timeout(Duration::from_secs(60)).unwrap();
        let error = awaited.unwrap_err().to_string();
        assert!(any.is_none() && error.contains("on the thread that must complete the awaited call"), "{any:?}: {error}");
        heard_of_it.meet();
        assert_eq!(memory.get(&first.wait().unwrap()), [2; 8]);
    });
}
