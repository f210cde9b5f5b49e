//! The whole device plane over the simulated driver and NCCL: ranks are threads, each with a device of its own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod groups;
mod matrix;
mod moving;
mod streams;
mod users;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut};

use super::*;
use crate::device::comm::{Setup, unique_id};
use crate::device::nccl;
use crate::device::plan::cases::{Case, Random};
use crate::device::plan::model::BASE;
use crate::nccl_config::NcclConfig;

/// Long enough for a machine that is busy with other tests.
const LONG: Duration = Duration::from_secs(120);

/// The simulation for this test alone, with nothing planted.
struct Sim(#[expect(dead_code, reason = "held, never read")] simgpu::Alone);

impl Sim {
    fn new() -> Self {
        simgpu::install();
        let alone = simgpu::alone();
        simgpu::nccl::reset();
        Self(alone)
    }

    /// Nothing was found wrong, and nothing is left.
    fn finish(self) {
        let deadline = Deadline::after(LONG);
        while simgpu::nccl::counts().communicators > 0 {
            assert!(!deadline.has_passed(), "left: {:?}", simgpu::nccl::counts());
            std::thread::yield_now();
        }
        assert_eq!(simgpu::nccl::reports(), Vec::<String>::new());
        assert_eq!(simgpu::reports(), Vec::<String>::new());
    }
}

/// What most tests use.
fn options() -> Options {
    Options { reproducible: false, scratch_bytes: 1 << 20, least_capability: (9, 0) }
}

/// The planes of a new communicator.
fn several(size: usize, options: &Options) -> Vec<DevicePlane> {
    let library = nccl::library(None).unwrap();
    let ids = [unique_id(library).unwrap()];
    let plane = |rank: usize| {
        let gpu = driver::open(rank).unwrap();
        let (config, deadline) = (NcclConfig::default(), Deadline::after(LONG));
        let setup =
            Setup { library, gpu: &gpu, ids: &ids, rank, world_size: size, config: &config, deadline: &deadline, liveness_probe: None };
        let comm = NcclComm::create(setup).unwrap();
        DevicePlane::new(gpu, comm, options).unwrap()
    };
    on_threads(0..size, plane)
}

/// Runs one thread for each rank of a new plane.
fn ranks<T: Send>(size: usize, options: &Options, test: impl Fn(&DevicePlane) -> T + Sync) -> Vec<T> {
    on_threads(several(size, options), |plane| test(&plane))
}

/// Each item on a thread of its own.
fn on_threads<I: Send, T: Send>(items: impl IntoIterator<Item = I>, work: impl Fn(I) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Bytes on a device.
fn upload(stream: &Arc<CudaStream>, bytes: &[u8]) -> CudaSlice<u8> {
    stream.clone_htod(bytes).unwrap()
}

/// What is in device memory once the stream has done what it has.
fn download(stream: &Arc<CudaStream>, memory: &CudaSlice<u8>) -> Vec<u8> {
    let bytes = stream.clone_dtoh(memory).unwrap();
    stream.synchronize().unwrap();
    bytes
}

/// Where memory is. Its events are left alone: these tests order by streams.
fn address(stream: &Arc<CudaStream>, memory: &mut CudaSlice<u8>) -> u64 {
    memory.device_ptr_mut(stream).0
}

/// A case's job for a rank whose memory begins here.
fn job_at(case: &Case, me: usize, base: u64, dtype: DType, reduction: Option<Reduction>) -> Job {
    let mut job = case.job(me, dtype, reduction);
    for address in [&mut job.memory.source, &mut job.memory.destination] {
        *address = if *address == 0 { 0 } else { *address - BASE + base };
    }
    job
}

/// The memories of all ranks of a case, the same on every rank.
fn memories(case: &Case, random: &mut Random, element: impl Fn(&mut Random, usize) -> Vec<u8>) -> Vec<Vec<u8>> {
    let length = case.memory_len();
    let memory = |rank: usize| {
        let mut bytes = Vec::with_capacity(length + 16);
        while bytes.len() < length {
            bytes.extend(element(random, rank));
        }
        bytes.truncate(length);
        bytes
    };
    (0..case.n).map(memory).collect()
}

/// Runs a case on this rank, on the plane's stream, and compares this rank's memory.
fn run(
    plane: &DevicePlane,
    case: &Case,
    memories: &[Vec<u8>],
    dtype: DType,
    reduction: Option<Reduction>,
    fold: &impl Fn(&[Vec<u8>]) -> Vec<u8>,
) {
    let (me, stream) = (plane.comm().rank(), plane.stream());
    let mut memory = upload(stream, &memories[me]);
    let job = job_at(case, me, address(stream, &mut memory), dtype, reduction);
    // SAFETY: the memory is as the case says, and is read back on the same stream.
    unsafe { plane.enqueue(&job, stream, LONG) }.unwrap_or_else(|error| panic!("{error}: {case:?}"));
    case.compare(me, &download(stream, &memory), &case.expected(memories, fold)[me]);
}
