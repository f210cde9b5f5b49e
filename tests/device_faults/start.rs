//! Communicators without a host backend: their creation, changes and end.

#![expect(unsafe_code, reason = "raw calls on addresses")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use collectives::{
    Communicator, Config, DType, DeviceChoice, Error, ReduceOp,
    nccl::{NcclCommunicator, RawBuffer, RawCall, ShrinkMode, UniqueId},
};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr};

use super::common::cases::Memory;
use super::common::ranks::{Meeting, alone_in_a_process, threads_with};
use super::gpu::{DeviceMemory, assert_nothing_found, steers_nccl};

fn config(limit: Duration) -> Config {
    let mut config = Config::default();
    config.timeout = limit;
    config
}

/// Returns a sum over all ranks, computed on a stream of the caller.
fn sum(comm: &NcclCommunicator, stream: &Arc<CudaStream>, value: u32) -> u32 {
    let memory = DeviceMemory::on(Arc::clone(stream));
    let buffer = memory.put(&[value; 300]);
    let (address, guard) = buffer.device_ptr(stream);
    let raw = RawBuffer { address, count: 300, dtype: DType::U32 };
    // SAFETY: this function's own buffer, used on one stream, which is synchronised before the buffer is dropped.
    unsafe { comm.call(RawCall::AllReduce(ReduceOp::Sum), raw, raw, stream) }.unwrap();
    drop(guard);
    stream.synchronize().unwrap();
    memory.get(&buffer)[0]
}

/// Runs `program` on `world_size` threads, each with a rank of a communicator without a host backend.
fn raw_ranks(world_size: usize, ids: usize, program: impl Fn(NcclCommunicator, Arc<CudaStream>) + Sync) {
    simgpu::install();
    let ids: Vec<UniqueId> = (0..ids).map(|_| UniqueId::new(None).unwrap()).collect();
    std::thread::scope(|scope| {
        for rank in 0..world_size {
            let (ids, program) = (&ids, &program);
            scope.spawn(move || {
                let context = CudaContext::new(rank).unwrap();
                let comm = NcclCommunicator::create(&context, ids, rank, world_size, &config(Duration::from_secs(30))).unwrap();
                program(comm, context.new_stream().unwrap());
            });
        }
    });
}

#[test]
fn ranks_start_from_one_id_or_several() {
    let _alone = simgpu::alone();
    for ids in [1, 2] {
        raw_ranks(4, ids, |comm, stream| {
            assert_eq!(sum(&comm, &stream, 1 + comm.rank() as u32), 10);
            comm.close().unwrap();
        });
    }
    assert_nothing_found();
}

#[test]
fn a_rank_that_never_joins_is_a_timeout_for_the_others() {
    let _alone = simgpu::alone();
    simgpu::install();
    let id = UniqueId::new(None).unwrap();
    let began = Instant::now();
    let context = CudaContext::new(0).unwrap();
    let error = NcclCommunicator::create(&context, &[id], 0, 2, &config(Duration::from_millis(500))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("rank 0 of 2"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn an_environment_that_overrides_how_communicators_are_made_is_named() {
    alone_in_a_process("start::an_environment_that_overrides_how_communicators_are_made_is_named", || {
        simgpu::install();
        let (id, context) = (UniqueId::new(None).unwrap(), CudaContext::new(0).unwrap());
        for (name, value) in [("NCCL_COMM_BLOCKING", "1"), ("NCCL_COMM_BLOCKING", "0"), ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0")] {
            // SAFETY: no other thread of this process reads the environment, since it runs only this test.
            unsafe { std::env::set_var(name, value) };
            let made = NcclCommunicator::create(&context, &[id], 0, 1, &config(Duration::from_secs(30)));
            // SAFETY: as for setting it: this test is alone in its process.
            unsafe { std::env::remove_var(name) };
            let error = made.unwrap_err().to_string();
            assert!(error.contains(&format!("{name}={value}")) && error.contains("unset it"), "{error}");
        }
    });
}

#[test]
fn a_split_lives_on_when_its_parent_is_aborted() {
    let _alone = simgpu::alone();
    let split = Meeting::new(2);
    raw_ranks(2, 1, |comm, stream| {
        let part = comm.split(Some(7), 0).unwrap().unwrap();
        split.meet();
        comm.abort_handle().abort();
        assert_eq!(sum(&part, &stream, 1), 2);
        part.close().unwrap();
    });
}

#[test]
fn communicators_are_split_shrunk_and_grown() {
    let _alone = simgpu::alone();
    let (id, meeting) = (Mutex::new(None), Meeting::new(4));
    raw_ranks(4, 1, |comm, stream| {
        let me = comm.rank();
        let half = comm.split((me != 3).then_some(me as u32 % 2), -(me as i32)).unwrap();
        assert_eq!(half.as_ref().map(|half| (half.rank(), half.world_size())), [Some((1, 2)), Some((0, 1)), Some((0, 2)), None][me]);
        if let Some(half) = half {
            assert_eq!(sum(&half, &stream, 1), half.world_size() as u32);
            half.close().unwrap();
        }
        // Rank 1 is left out and joins again as the last rank.
        if me == 1 {
            meeting.meet();
            let id = id.lock().unwrap().unwrap();
            let grown = NcclCommunicator::join(stream.context(), id, 3, 4, &config(Duration::from_secs(30))).unwrap();
            assert_eq!(sum(&grown, &stream, 1), 4);
        } else {
            let shrunk = comm.shrink(&[1], ShrinkMode::Keep).unwrap();
            assert_eq!((shrunk.world_size(), sum(&shrunk, &stream, 1)), (3, 3));
            if me == 0 {
                *id.lock().unwrap() = Some(shrunk.grow_id().unwrap());
            }
            meeting.meet();
            let made = *id.lock().unwrap();
            // Invalid: no rank passes the id, all pass it, or the world size stays the same.
            for (size, id) in [(4, None), (4, made), (3, made)] {
                assert!(matches!(shrunk.grow(size, id).unwrap_err(), Error::InvalidArgument { call: "grow", .. }));
            }
            let grown = shrunk.grow(4, made.filter(|_| me == 0)).unwrap();
            assert_eq!((grown.rank(), sum(&grown, &stream, 1)), (shrunk.rank(), 4));
        }
    });
    assert_nothing_found();
}

#[test]
fn a_revoked_communicator_refuses_calls_and_can_be_shrunk() {
    let _alone = simgpu::alone();
    let meeting = Meeting::new(3);
    raw_ranks(3, 1, |comm, stream| {
        assert_eq!(sum(&comm, &stream, 1), 3);
        // If another rank were still in its call, revoking this rank's communicator would revoke that call too.
        meeting.meet();
        comm.revoke().unwrap();
        let memory = DeviceMemory::on(Arc::clone(&stream));
        let buffer = memory.put(&[1_u32]);
        let (address, _guard) = buffer.device_ptr(&stream);
        let raw = RawBuffer { address, count: 1, dtype: DType::U32 };
        // SAFETY: refused before anything is queued.
        let error = unsafe { comm.call(RawCall::AllReduce(ReduceOp::Sum), raw, raw, &stream) }.unwrap_err();
        assert!(error.to_string().contains("revoke"), "{error}");
        if comm.rank() != 2 {
            let shrunk = comm.shrink(&[2], ShrinkMode::Abort).unwrap();
            assert_eq!(sum(&shrunk, &stream, 1), 2);
        }
    });
}

#[test]
fn raw_calls_are_checked_as_far_as_they_can_be() {
    let _alone = simgpu::alone();
    raw_ranks(2, 1, |comm, stream| {
        let raw = |count: usize, dtype| RawBuffer { address: 4096, count, dtype };
        let wrong = [
            (RawCall::AllReduce(ReduceOp::Sum), raw(3, DType::F32), raw(2, DType::F32)),
            (RawCall::AllReduce(ReduceOp::Sum), raw(3, DType::F32), raw(3, DType::I32)),
            (RawCall::AllReduce(ReduceOp::BitOr), raw(3, DType::F32), raw(3, DType::F32)),
            (RawCall::AllGather, raw(3, DType::F32), raw(3, DType::F32)),
            (RawCall::Broadcast(2), raw(3, DType::F32), raw(3, DType::F32)),
            (RawCall::AllToAll, raw(3, DType::F32), raw(3, DType::F32)),
        ];
        for (call, source, destination) in wrong {
            // SAFETY: refused before anything is queued.
            let error = unsafe { comm.call(call, source, destination, &stream) }.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. } | Error::Unsupported { .. }), "{call:?}: {error}");
        }
        assert_eq!(sum(&comm, &stream, 2), 4);
    });
}

#[test]
fn a_rank_that_cannot_start_is_told_to_those_that_wait_for_it() {
    steers_nccl!();
    let _alone = simgpu::alone();
    simgpu::install();
    // 3 is ncclInternalError, for the first rank that calls. NCCL makes the others wait forever, and their timeout is
    // an hour.
    simgpu::nccl::fail_call("ncclCommInitRankConfig", 1, 3);
    let builder = |_| {
        let builder = Communicator::builder().device(DeviceChoice::Local);
        builder.configure(|config| config.timeout = Duration::from_secs(3600))
    };
    let whys = threads_with(3, builder, |comm| {
        // The host backend is not affected.
        let mut sum = [1_u32];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3]);
        comm.why_no_device().unwrap()
    });
    assert!(whys.iter().all(|why| *why == whys[0]), "{whys:?}");
    assert!(whys[0].starts_with("rank ") && whys[0].contains("ncclInternalError"), "{whys:?}");
    simgpu::nccl::reset();
}
