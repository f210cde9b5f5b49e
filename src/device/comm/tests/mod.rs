//! Communicators over the simulated driver and NCCL: ranks are threads, each with its own device.

mod calls;
mod control;
mod failures;
mod graphs;
mod limits;
mod locks;
mod messages;
mod stuck;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice};
use nccl_sys::{Library, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use simgpu::nccl;

use super::*;
use crate::config::nccl::NcclConfig;
use crate::device::driver::{self, Gpu};
use crate::device::memory::{NcclBuffer, Registration, Window};
use crate::meeting::{Meeting, wait_until};

/// Long enough for a machine that is busy with other tests.
const LONG: Duration = Duration::from_secs(60);

/// One rank of a test: its device, a stream, and its communicator.
struct Rank {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    comm: NcclComm,
}

fn library() -> &'static Library {
    crate::device::nccl::library(None).unwrap()
}

fn setup<'a>(gpu: &'a Gpu, ids: &'a [ncclUniqueId], rank: usize, size: usize, config: &'a NcclConfig, deadline: &'a Deadline) -> Setup<'a> {
    Setup { library: library(), gpu, ids, rank, world_size: size, config, deadline, liveness_probe: None, end_notice: None }
}

impl Rank {
    fn new(ids: &[ncclUniqueId], rank: usize, size: usize) -> Self {
        let gpu = driver::open(rank).unwrap();
        let stream = gpu.context.new_stream().unwrap();
        let comm = NcclComm::create(setup(&gpu, ids, rank, size, &NcclConfig::default(), &Deadline::after(LONG))).unwrap();
        Self { gpu, stream, comm }
    }

    /// Returns a vector on the device in which each rank's elements differ.
    fn vector(&self, len: usize) -> CudaSlice<f32> {
        let values: Vec<f32> = (0..len).map(|index| (index % 97) as f32 + self.comm.rank() as f32).collect();
        self.stream.clone_htod(&values).unwrap()
    }

    /// Sums a vector over all ranks, in place.
    fn all_reduce(&self, vector: &mut CudaSlice<f32>, timeout: Duration) -> Result<()> {
        sum(&self.comm, &self.stream, vector, timeout)
    }
}

/// Sums a vector over a communicator, in place.
fn sum(comm: &NcclComm, stream: &Arc<CudaStream>, vector: &mut CudaSlice<f32>, timeout: Duration) -> Result<()> {
    let len = vector.len();
    let (address, _guard) = vector.device_ptr_mut(stream);
    // SAFETY: the vector is alive until the test has waited for the stream.
    unsafe {
        comm.enqueue(&|| "all_reduce".to_owned(), stream, timeout, |raw| {
            raw.all_reduce(address, address, len, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, stream.cu_stream())
        })
    }
}

/// Returns the sum of [`Rank::vector`] over `ranks`.
fn total(len: usize, ranks: &[usize]) -> Vec<f32> {
    (0..len).map(|index| ranks.iter().map(|rank| (index % 97) as f32 + *rank as f32).sum()).collect()
}

/// Runs one thread for each rank of a new communicator.
fn ranks<T: Send>(size: usize, test: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let ids = [unique_id(library()).unwrap()];
    let test = &test;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || test(Rank::new(&ids, rank, size)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn read(stream: &Arc<CudaStream>, vector: &impl DevicePtr<f32>) -> Vec<f32> {
    let values = stream.clone_dtoh(vector).unwrap();
    stream.synchronize().unwrap();
    values
}

/// The simulation for this test alone, with nothing planted.
struct Sim(#[expect(dead_code, reason = "held, never read")] simgpu::Alone);

impl Sim {
    fn new() -> Self {
        simgpu::install();
        let alone = simgpu::alone();
        simgpu::nccl::reset();
        Self(alone)
    }

    /// Checks that no error was found, and that nothing is left.
    fn finish(self) {
        self.wait_until_none_is_left();
        assert_eq!(simgpu::nccl::reports(), Vec::<String>::new());
        assert_eq!(simgpu::reports(), Vec::<String>::new());
    }

    /// Waits for aborts, which go on in the background and hold the context. A broken context works again when all have
    /// released it.
    fn wait_until_none_is_left(&self) {
        let deadline = Deadline::after(Duration::from_secs(30));
        while simgpu::nccl::counts() != simgpu::nccl::Counts::default() || simgpu::counts() != simgpu::Counts::default() {
            assert!(!deadline.has_passed(), "left: {:?}, {:?}", simgpu::nccl::counts(), simgpu::counts());
            std::thread::yield_now();
        }
    }
}

/// Waits until a function has been called this many times.
fn until_called(function: &str, times: u64) {
    wait_until(function, || simgpu::nccl::calls(function) >= times);
}

/// Makes no call, and returns once some rank's communicator is aborted.
fn leave_late(comm: &NcclComm) {
    until_called("ncclCommAbort", 1);
    comm.abort();
}

/// Waits for the error that ends a communicator.
fn failure_of(comm: &NcclComm) -> Error {
    wait_until("what ends the communicator", || comm.failure().is_some());
    comm.failure().unwrap()
}

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
        // Dropped after the communicator's end, which ends its registrations.
        let Rank { comm, .. } = rank;
        comm.finalize(&deadline).unwrap();
        drop(comm);
        drop(slice);
    });
    assert_eq!((nccl::counts().registrations, nccl::counts().windows, nccl::counts().allocations), (0, 0, 0));
    sim.finish();
}
