//! Communicators over the simulated driver and NCCL: ranks are threads, each with a device of its own.

mod calls;
mod failures;
mod families;
mod memory;
mod sim;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use nccl_sys::{Library, ncclDataType_t, ncclRedOp_t, ncclUniqueId};

use super::*;
use crate::device::driver::{self, Gpu};
use crate::nccl_config::NcclConfig;

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
    Setup { library: library(), gpu, ids, rank, world_size: size, config, deadline, liveness_probe: None }
}

impl Rank {
    fn new(ids: &[ncclUniqueId], rank: usize, size: usize) -> Self {
        let gpu = driver::open(rank).unwrap();
        let stream = gpu.context.new_stream().unwrap();
        let comm = NcclComm::create(setup(&gpu, ids, rank, size, &NcclConfig::default(), &Deadline::after(LONG))).unwrap();
        Self { gpu, stream, comm }
    }

    /// A vector on the device in which each rank's elements differ.
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

/// What [`Rank::vector`] sums to over `ranks`.
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
