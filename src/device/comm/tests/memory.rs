//! Memory of NCCL's, registrations and windows.

use cudarc::driver::DeviceSlice;

use simgpu::nccl;

use super::sim::Sim;
use super::*;
use crate::device::memory::{NcclBuffer, Registration, Window};

#[test]
fn a_buffer_of_nccl_is_zero_is_used_like_a_slice_and_is_freed() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let mut buffer = NcclBuffer::<f32>::zeroed(&rank.comm, &rank.stream, 100).unwrap();
        assert_eq!(read(&rank.stream, &buffer), vec![0.0; 100]);
        let values: Vec<f32> = (0..100).map(|value| value as f32).collect();
        rank.stream.memcpy_htod(&values, &mut buffer).unwrap();
        {
            let (address, _guard) = buffer.device_ptr_mut(&rank.stream);
            let stream = rank.stream.cu_stream();
            // SAFETY: dropping the buffer waits for the stream.
            let done = unsafe {
                rank.comm.enqueue(&|| "all_reduce".to_owned(), &rank.stream, LONG, |raw| {
                    raw.all_reduce(address, address, 100, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, stream)
                })
            };
            done.unwrap();
        }
        let doubled: Vec<f32> = values.iter().map(|value| value * 2.0).collect();
        assert_eq!(read(&rank.stream, &buffer), doubled);
        let empty = NcclBuffer::<f32>::zeroed(&rank.comm, &rank.stream, 0).unwrap();
        assert!(empty.is_empty());
        let error = NcclBuffer::<f32>::zeroed(&rank.comm, &rank.stream, usize::MAX / 2).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { call: "alloc", .. }), "{error}");
    });
    assert_eq!(nccl::counts().allocations, 0);
    sim.finish();
}

#[test]
fn a_buffer_is_not_freed_under_a_stream_that_uses_it() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let other = rank.gpu.context.new_stream().unwrap();
        let mut buffer = NcclBuffer::<u8>::zeroed(&rank.comm, &rank.stream, 1 << 16).unwrap();
        let gate = simgpu::Gate::close(other.cu_stream().cast());
        other.memset_zeros(&mut buffer).unwrap();
        std::thread::scope(|scope| {
            let dropping = scope.spawn(move || drop(buffer));
            assert!(!dropping.is_finished());
            gate.open();
            dropping.join().unwrap();
        });
        other.synchronize().unwrap();
    });
    assert_eq!(nccl::counts().allocations, 0);
    sim.finish();
}

#[test]
fn registrations_and_windows_end_before_their_buffer_and_before_the_communicator() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let deadline = Deadline::after(LONG);
        let buffer = NcclBuffer::<f32>::zeroed(&rank.comm, &rank.stream, 1024).unwrap();
        let registration = Registration::new(&rank.comm, buffer, &deadline).unwrap();
        assert_eq!(registration.len(), 1024);
        let buffer = registration.into_buffer().unwrap();
        let window = Window::new(&rank.comm, buffer, &deadline).unwrap();
        assert!(window.is_open());
        drop(window);
        let slice = Registration::new(&rank.comm, rank.vector(10), &deadline).unwrap();
        assert_eq!(read(&rank.stream, &slice), total(10, &[rank.comm.rank()]));
        // Left for after the communicator's end, which takes its registrations with it.
        let Rank { comm, .. } = rank;
        comm.finalize(&deadline).unwrap();
        drop(comm);
        drop(slice);
    });
    assert_eq!((nccl::counts().registrations, nccl::counts().windows, nccl::counts().allocations), (0, 0, 0));
    sim.finish();
}
