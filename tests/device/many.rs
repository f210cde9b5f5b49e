//! Several buffers in one call, and lists: their cost, and the errors if ranks differ. `common/forms.rs` checks their
//! results.

use collectives::{Communicator, Error, ReduceOp};
use cudarc::driver::CudaSlice;

use super::gpu::{DeviceMemory, ranks, steers_nccl};
use crate::common::cases::Memory;

/// Runs a call and returns how many groups, and calls of this name, it made in NCCL.
fn counted(name: &str, call: impl FnOnce()) -> [u64; 2] {
    let calls = || ["ncclGroupStart", name].map(simgpu::nccl::calls_of_this_thread);
    let before = calls();
    call();
    let after = calls();
    [after[0] - before[0], after[1] - before[1]]
}

fn buffers(memory: &DeviceMemory, lengths: &[usize], value: f32) -> Vec<CudaSlice<f32>> {
    lengths.iter().map(|length| memory.put(&vec![value; *length])).collect()
}

fn check(memory: &DeviceMemory, buffers: &[CudaSlice<f32>], value: f32) {
    assert!(buffers.iter().all(|buffer| memory.get(buffer).iter().all(|element| *element == value)));
}

#[test]
fn several_buffers_are_one_launch() {
    steers_nccl!();
    const LENGTHS: [usize; 40] = [100; 40];
    ranks(3, |comm, memory| {
        let (me, op) = (comm.rank() as f32, ReduceOp::Sum);
        let mut all = buffers(memory, &LENGTHS, me);
        assert_eq!(counted("ncclAllReduce", || comm.all_reduce_many(&mut all, op).unwrap()), [1, 40]);
        check(memory, &all, 3.0);
        assert_eq!(counted("ncclBroadcast", || comm.broadcast_many(&mut all, 2).unwrap()), [1, 40]);
        let (mine, mut long) = (buffers(memory, &LENGTHS, 2.0), buffers(memory, &[300; 40], me));
        assert_eq!(counted("ncclAllGather", || comm.all_gather_many_into(&mine, &mut long).unwrap()), [1, 40]);
        check(memory, &long, 2.0);
        assert_eq!(counted("ncclReduceScatter", || comm.reduce_scatter_many_into(&long, &mut all, op).unwrap()), [1, 40]);
        check(memory, &all, 6.0);
        let given = buffers(memory, &LENGTHS, 1.0);
        let mut work = None;
        assert_eq!(counted("ncclAllReduce", || work = Some(comm.start_all_reduce_many(given, op).unwrap())), [1, 40]);
        check(memory, &work.unwrap().wait().unwrap(), 3.0);
        // A list for each rank: sends and receives in one group.
        let mut theirs = buffers(memory, &[100; 3], me);
        assert_eq!(counted("ncclSend", || comm.all_gather_list(&mine[0], &mut theirs).unwrap()), [1, 2]);
        check(memory, &theirs, 2.0);
        comm.all_reduce_many::<CudaSlice<f32>>(&mut [], op).unwrap();
    });
}

#[test]
fn truth_values_in_lists_are_some() {
    ranks(2, |comm, memory| {
        let mine = memory.put(&[comm.rank() == 1; 33]);
        let mut list = [memory.put(&[true; 33]), memory.put(&[false; 33])];
        comm.all_gather_list(&mine, &mut list).unwrap();
        assert_eq!(list.map(|block| memory.get(&block)), [[false; 33], [true; 33]]);
    });
}

#[test]
fn buffers_of_two_sides_are_refused() {
    ranks(2, |comm, memory| {
        let (host, mut device) = ([vec![1.0_f32; 2], vec![1.0; 2]], buffers(memory, &[2, 2], 0.0));
        let refused = |result: collectives::Result<()>| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("on the host and"), "{error}");
        };
        refused(comm.reduce_scatter_many_into(&[vec![1.0; 4], vec![1.0; 4]], &mut device, ReduceOp::Sum));
        refused(comm.all_to_all_list(&host, &mut device));
        refused(comm.all_gather_list(&host[0], &mut device));
        comm.all_reduce_many(&mut device, ReduceOp::Sum).unwrap();
    });
}

/// Checks that a call that differs on rank 1 is a mismatch on all ranks and leaves the buffers unchanged.
fn differing(words: &str, call: impl Fn(&Communicator, &DeviceMemory, bool, &mut [CudaSlice<f32>]) -> collectives::Result<()> + Sync) {
    ranks(2, |comm, memory| {
        let mut list = buffers(memory, &[3, 5], 4.0);
        let error = call(comm, memory, comm.rank() == 1, &mut list).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(words), "{error}");
        check(memory, &list, 4.0);
    });
}

#[test]
fn ranks_with_other_lists_are_told_and_nothing_is_queued() {
    differing("count 5", |comm, _, other, list| {
        if other {
            list.swap(0, 1);
        }
        comm.all_reduce_many(list, ReduceOp::Sum)
    });
    differing("all_reduce", |comm, _, other, list| comm.all_reduce_many(&mut list[..if other { 1 } else { 2 }], ReduceOp::Sum));
    differing("all_reduce_many", |comm, _, other, list| comm.all_reduce_many(&mut list[..if other { 0 } else { 2 }], ReduceOp::Sum));
    differing("gather_v that expects 20 B from rank 1", |comm, memory, other, list| {
        let mine = memory.put(&vec![1.0_f32; if other { 6 } else { 3 }]);
        comm.gather_list(&mine, (!other).then_some(list), 0)
    });
    differing("root", |comm, memory, other, list| {
        let mine = memory.put(&vec![1.0_f32; if other { 5 } else { 3 }]);
        comm.gather_list(&mine, Some(list), usize::from(other))
    });
}
