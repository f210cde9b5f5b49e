//! Communicators made from others keep their devices.

use collectives::ReduceOp;

use super::gpu::{DeviceMemory, process_ranks, ranks};
use crate::common::cases::{Memory, movements_in, reductions_in};

fn halves(comm: &collectives::Communicator, memory: &DeviceMemory) {
    let me = comm.rank();
    let half = comm.split(Some(me as u32 % 2), -(me as i64)).unwrap().unwrap();
    assert!(half.device().is_some(), "{:?}", half.why_no_device());
    reductions_in::<u32, _>(memory, &half, ReduceOp::BitOr, 100, 1);
    reductions_in::<f32, _>(memory, &half, ReduceOp::Sum, 100, 2);
    movements_in::<u8, _>(memory, &half, 100, 3);
    let pair = comm.subgroup(&[2, 0]).unwrap();
    assert_eq!(pair.is_some(), [0, 2].contains(&me));
    if let Some(pair) = &pair {
        let mut buffer = memory.put(&[pair.rank() as i32]);
        pair.broadcast(&mut buffer, 0).unwrap();
        assert_eq!((memory.get(&buffer), pair.rank()), (vec![0], if me == 2 { 0 } else { 1 }));
        pair.device().unwrap().synchronize().unwrap();
    }
    // The first two are created together. The third comes after them, since it shares a rank with each.
    let groups = comm.subgroups(&[vec![0, 1], vec![3, 2], vec![2, 1]]).unwrap();
    assert_eq!(groups.iter().flatten().count(), [1, 2, 2, 1, 0][me]);
    for group in groups.iter().flatten() {
        assert!(group.device().is_some(), "{:?}", group.why_no_device());
        reductions_in::<u64, _>(memory, group, ReduceOp::Sum, 20, 8);
    }
    reductions_in::<i32, _>(memory, &comm.subgroup_of_size(comm.world_size()).unwrap(), ReduceOp::Min, 20, 9);
    let same = comm.duplicate().unwrap();
    reductions_in::<i16, _>(memory, &same, ReduceOp::Max, 50, 4);
    same.close().unwrap();
    half.close().unwrap();
    reductions_in::<i64, _>(memory, comm, ReduceOp::Sum, 10, 5);
}

#[test]
fn split_and_subgroups_of_threads() {
    ranks(5, halves);
}

#[test]
fn split_and_subgroups_of_processes() {
    process_ranks("split::split_and_subgroups_of_processes", 4, halves);
}

fn whoever_is_left(comm: &collectives::Communicator, memory: &DeviceMemory) {
    let job = comm.duplicate().unwrap();
    // A shrink ends the calls that other ranks have not finished.
    comm.barrier().unwrap();
    let left = job.shrink().unwrap();
    assert!(left.device().is_some(), "{:?}", left.why_no_device());
    assert!(job.all_reduce(&mut memory.put(&[1_i32]), ReduceOp::Sum).is_err(), "the old one is ended");
    reductions_in::<f32, _>(memory, &left, ReduceOp::Sum, 100, 6);
    movements_in::<u8, _>(memory, &left, 100, 7);
    left.close().unwrap();
}

#[test]
fn a_shrunk_communicator_of_threads_has_its_devices() {
    ranks(3, whoever_is_left);
}

#[test]
fn a_shrunk_communicator_of_processes_has_its_devices() {
    process_ranks("split::a_shrunk_communicator_of_processes_has_its_devices", 3, whoever_is_left);
}
