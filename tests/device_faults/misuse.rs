//! Misuse that only `unsafe` code can commit, found by the simulation. These tests show that the detectors of the whole
//! suite work.

#![expect(unsafe_code, reason = "commits the misuse")]

use collectives::{Communicator, CustomOp, ReduceOp, interop::RawDeviceSlice};
use cudarc::driver::DevicePtr;
use simgpu::Gate;

use super::common::cases::Memory;
use super::common::ranks::{alone_in_a_process, threads_with};
use super::gpu::{DeviceMemory, builder};

/// Runs two ranks, without checks at the end.
fn two_ranks(program: impl Fn(&Communicator, &DeviceMemory) + Sync) {
    threads_with(2, |_| builder(Default::default()), |comm| program(comm, &DeviceMemory::of(comm)));
}

fn found() -> String {
    let mut reports = simgpu::reports();
    reports.extend(simgpu::nccl::reports());
    reports.join("\n")
}

#[test]
fn a_missing_wait_between_streams_is_found() {
    let _alone = simgpu::alone();
    two_ranks(|comm, memory| {
        let buffer = memory.put(&[1_u32; 64]);
        let (address, guard) = buffer.device_ptr(&memory.stream);
        drop(guard);
        let context = memory.stream.context();
        let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        // SAFETY: broken on purpose: two streams use the memory and nothing orders them.
        let mut raw = unsafe { RawDeviceSlice::<u32>::new(context, address, 64) };
        let held = Gate::close(first.cu_stream().cast());
        comm.with_stream(&first).broadcast(&mut raw, 0).unwrap();
        // SAFETY: as above; the memory itself is alive.
        unsafe { cudarc::driver::result::memset_d8_async(address, 0, 256, second.cu_stream()) }.unwrap();
        second.synchronize().unwrap();
        held.open();
        first.synchronize().unwrap();
    });
    let found = found();
    assert!(found.contains("without a wait"), "{found}");
}

#[test]
fn a_buffer_dropped_while_in_use_is_found() {
    let _alone = simgpu::alone();
    two_ranks(|comm, memory| {
        let buffer = memory.put(&[1_u32; 64]);
        let (address, guard) = buffer.device_ptr(&memory.stream);
        drop(guard);
        let stream = memory.stream.context().new_stream().unwrap();
        // SAFETY: broken on purpose: the memory is freed while the call waits.
        let mut raw = unsafe { RawDeviceSlice::<u32>::new(memory.stream.context(), address, 64) };
        let held = Gate::close(stream.cu_stream().cast());
        comm.with_stream(&stream).broadcast(&mut raw, 0).unwrap();
        drop(buffer);
        memory.stream.synchronize().unwrap();
        held.open();
        let _ = stream.synchronize();
    });
    let found = found();
    assert!(found.contains("freed while in use") || found.contains("freed"), "{found}");
}

/// A kernel that writes out of bounds.
const TOO_FAR: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry fold_user(
    .param .u64 inputs, .param .u64 stride, .param .u64 own, .param .u32 own_index,
    .param .u32 ranks, .param .u64 output, .param .u64 count, .param .u32 divisor)
{
    .reg .b64 %rd<5>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [output];
    ld.param.u64 %rd2, [count];
    cvta.to.global.u64 %rd3, %rd1;
    add.s64 %rd3, %rd3, 67108864;
    mov.u32 %r1, 7;
    st.global.u32 [%rd3], %r1;
    ret;
}
";

#[test]
fn a_kernel_that_writes_out_of_bounds_is_an_error_and_is_found() {
    // As on hardware, a context that a kernel has broken stays broken for the whole process.
    alone_in_a_process("misuse::a_kernel_that_writes_out_of_bounds_is_an_error_and_is_found", write_too_far);
}

fn write_too_far() {
    two_ranks(|comm, memory| {
        // SAFETY: broken on purpose: it writes outside of any allocation.
        let op = unsafe { CustomOp::<u32>::on_device("too far", "a").with_ptx(TOO_FAR, "fold_user") };
        let mut buffer = memory.put(&[1_u32; 64]);
        let queued = comm.all_reduce(&mut buffer, &op);
        let ended = comm.device().unwrap().synchronize();
        assert!(queued.is_err() || ended.is_err());
        // In a broken context, memory cannot be freed.
        std::mem::forget(buffer);
    });
    let found = found();
    assert!(found.contains("fold_user"), "{found}");
}

#[test]
fn a_healthy_run_finds_nothing() {
    let _alone = simgpu::alone();
    two_ranks(|comm, memory| {
        let mut buffer = memory.put(&[1_u32; 64]);
        comm.all_reduce(&mut buffer, ReduceOp::BitXor).unwrap();
        assert_eq!(memory.get(&buffer), [0; 64]);
    });
    let found = found();
    assert!(found.is_empty(), "{found}");
}

#[test]
fn an_image_that_the_driver_refuses_is_an_error() {
    let _alone = simgpu::alone();
    two_ranks(|comm, memory| {
        // SAFETY: it is refused.
        let op = unsafe { CustomOp::<u32>::on_device("broken", "a").with_ptx("this is no PTX", "fold") };
        let mut buffer = memory.put(&[1_u32]);
        let error = comm.all_reduce(&mut buffer, &op).unwrap_err();
        assert!(error.to_string().contains("PTX") || error.to_string().contains("image"), "{error}");
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&buffer), [2]);
    });
    simgpu::reports();
}
