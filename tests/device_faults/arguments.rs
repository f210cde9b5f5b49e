//! Invalid arguments on device buffers: an error at once, after which the communicator stays usable.

use collectives::{Communicator, DeviceChoice, Error, ReduceOp};
use cudarc::driver::CudaContext;

use super::common::cases::Memory;
use super::common::ranks::threads_with;
use super::gpu::{DeviceMemory, ranks};

#[test]
fn wrong_lengths_and_roots_are_refused() {
    let _alone = simgpu::alone();
    ranks(2, |comm, memory| {
        let (three, mut two) = (memory.put(&[1_u8; 3]), memory.put(&[1_u8; 2]));
        let errors = [
            comm.all_reduce_into(&three, &mut two, ReduceOp::Sum),
            comm.all_gather_into(&three, &mut two),
            comm.broadcast(&mut two, 2),
            comm.reduce_scatter_into(&three, &mut two, ReduceOp::Sum),
            comm.all_gather(&mut memory.put(&[1_u8; 3])),
        ];
        for error in errors {
            assert!(matches!(error, Err(Error::InvalidArgument { .. })), "{error:?}");
        }
        let error = comm.all_reduce(&mut memory.put(&[1_f32]), ReduceOp::BitOr).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        comm.all_reduce(&mut two, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&two), [2; 2]);
    });
}

#[test]
fn buffers_and_streams_of_another_device_are_refused() {
    let _alone = simgpu::alone();
    ranks(2, |comm, memory| {
        let other = CudaContext::new(5).unwrap().new_stream().unwrap();
        let elsewhere = DeviceMemory::on(other);
        let mut buffer = elsewhere.put(&[1_u32]);
        let error = comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("is on device 5"), "{error}");
        let mut buffer = memory.put(&[1_u32]);
        let error = comm.with_stream(&elsewhere.stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("the stream is on device 5"), "{error}");
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&buffer), [2]);
    });
}

#[test]
fn a_host_communicator_refuses_device_buffers() {
    let _alone = simgpu::alone();
    simgpu::install();
    let memory = DeviceMemory::on(CudaContext::new(0).unwrap().new_stream().unwrap());
    let comm = Communicator::local(1).unwrap().remove(0);
    let error = comm.all_reduce(&mut memory.put(&[1_u32]), ReduceOp::Sum).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { reason, .. } if reason.contains("builder().device")), "{error}");
}

#[test]
fn two_ranks_on_one_device_are_told() {
    let _alone = simgpu::alone();
    simgpu::install();
    let whys =
        threads_with(3, |rank| Communicator::builder().device(DeviceChoice::Ordinal(rank / 2)), |comm| comm.why_no_device().unwrap());
    for why in whys {
        assert!(why.contains("rank 0") && why.contains("rank 1") && why.contains("NCCL_MULTI_RANK_GPU_ENABLE"), "{why}");
    }
}

#[test]
fn a_device_that_does_not_exist_is_named_on_every_rank() {
    let _alone = simgpu::alone();
    simgpu::install();
    let whys = threads_with(
        2,
        |rank| Communicator::builder().device(DeviceChoice::Ordinal(99 * rank)),
        |comm| {
            let mut x = [1_u32];
            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            (comm.why_no_device().unwrap(), x)
        },
    );
    for (why, x) in whys {
        assert!(why.contains("rank 1") && why.contains("99") && why.contains('8'), "{why}");
        assert_eq!(x, [2]);
    }
}
