//! Ranks with a device each, and buffers on it.

#![allow(dead_code, unreachable_pub, unused_imports, unused_macros, reason = "each test program uses what it needs")]
#![expect(unsafe_code, reason = "elements of any type go to the device as bytes")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use collectives::{
    Builder, Communicator, Config, DeviceChoice, ReduceOp, Reduction, Result,
    nccl::{CheckDeviceCalls, NcclCommunicator, UniqueId},
};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut};

use crate::common::cases::Memory;
use crate::common::oracle::Predict;
use crate::common::ranks::{processes_with, threads_with};

/// Puts the simulation in place, once per process; does nothing where real GPUs are to be used.
pub fn prepare() {
    if !is_real() {
        simgpu::install();
    }
}

/// Whether the GPUs are those of this machine.
pub fn is_real() -> bool {
    std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real")
}

/// Whether NCCL is the simulated one, in which faults can be planted, and whose calls are counted.
pub fn can_steer_nccl() -> bool {
    !is_real() && simgpu::real::nccl().is_none()
}

/// Has the simulated NCCL do what a real one may, though it need not: the first collective waits inside its call until all ranks have come, and
/// whoever aborts may end others' calls with success. For the whole process, until a test has the simulation for itself ([`alone`]).
pub fn be_strict() {
    prepare();
    if can_steer_nccl() {
        simgpu::nccl::connect_lazily();
        simgpu::nccl::let_aborted_kernels_go_on();
    }
}

/// Keeps other tests from the simulation for as long as it lives; nothing where the GPUs are real, of which tests take turns anyway.
pub fn alone() -> Option<simgpu::Alone> {
    (!is_real()).then(simgpu::alone)
}

/// Skips a test that steers the simulated driver where there is another one.
macro_rules! steers_gpu {
    () => {
        if crate::gpu::is_real() {
            crate::common::hosts::skip!("it steers the simulated GPU");
        }
    };
}
pub(crate) use steers_gpu;

/// Skips a test that steers the simulated NCCL where there is another one.
macro_rules! steers_nccl {
    () => {
        if !crate::gpu::can_steer_nccl() {
            crate::common::hosts::skip!("it steers the simulated NCCL");
        }
    };
}
pub(crate) use steers_nccl;

/// How a rank of these tests joins.
pub fn builder(mut config: Config) -> Builder {
    prepare();
    // On real GPUs a script stops what hangs after 60 s: what the library has to say of it comes before.
    config.timeout = Duration::from_secs(if is_real() { 40 } else { 60 });
    Communicator::builder().config(config).require_device(DeviceChoice::Local)
}

/// Settings by which calls are not compared, so that they return before other ranks have come.
pub fn unchecked() -> Config {
    compared_before(0)
}

/// Settings by which so many calls are compared and no more.
pub fn compared_before(calls: u64) -> Config {
    let mut config = Config::default();
    // SAFETY: where ranks of these tests make calls that are not compared, they make the same ones with the same lengths, or none; where ops
    // differ, they leave memory alone.
    config.check_device_calls = unsafe { CheckDeviceCalls::unchecked_after(calls) };
    config
}

/// The devices of this process for one group of ranks. Some calls of a driver wait until a device is idle: two groups at once could wait for each
/// other for ever.
fn turn() -> MutexGuard<'static, ()> {
    static DEVICES: Mutex<()> = Mutex::new(());
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `program` on `world_size` threads, each a rank with a device of its own; what they return, in rank order.
pub fn ranks<R: Send>(world_size: usize, program: impl Fn(&Communicator, &DeviceMemory) -> R + Sync) -> Vec<R> {
    ranks_with(world_size, Config::default(), program)
}

/// As [`ranks`], with settings. Checks at the end that nothing was found by the simulation.
pub fn ranks_with<R: Send>(world_size: usize, config: Config, program: impl Fn(&Communicator, &DeviceMemory) -> R + Sync) -> Vec<R> {
    let _turn = turn();
    let results = threads_with(
        world_size,
        |_| builder(config.clone()),
        |comm| {
            let result = program(comm, &DeviceMemory::of(comm));
            comm.device().unwrap().synchronize().unwrap();
            result
        },
    );
    assert_nothing_found();
    results
}

/// As [`ranks`], in processes. `name` is the full name of the test.
pub fn process_ranks(name: &str, world_size: usize, program: impl Fn(&Communicator, &DeviceMemory)) {
    processes_with(
        name,
        world_size,
        |_| builder(Config::default()),
        |comm| {
            program(comm, &DeviceMemory::of(comm));
            comm.device().unwrap().synchronize()?;
            assert_nothing_found();
            Ok(())
        },
    );
}

/// Fails where the simulation has found a misuse.
#[track_caller]
pub fn assert_nothing_found() {
    if is_real() {
        return;
    }
    let mut reports = simgpu::reports();
    reports.extend(simgpu::nccl::reports());
    assert!(reports.is_empty(), "the simulated GPU found:\n{}", reports.join("\n"));
}

/// Buffers of one rank's device, on a stream that is not the communicator's: so that every call has something to wait for.
pub struct DeviceMemory {
    pub stream: Arc<CudaStream>,
    /// Where calls are captured into a graph of their own, which is then launched; `None` makes them at once.
    captured: Option<Arc<CudaStream>>,
}

impl DeviceMemory {
    pub fn of(comm: &Communicator) -> Self {
        Self::on(comm.device().unwrap().context().new_stream().unwrap())
    }

    /// Buffers on a stream of the test's.
    pub fn on(stream: Arc<CudaStream>) -> Self {
        Self { stream, captured: None }
    }

    /// As [`DeviceMemory::of`], for calls on `stream` that are to be captured into graphs.
    pub fn capturing(comm: &Communicator, stream: &Arc<CudaStream>) -> Self {
        // SAFETY: cudarc's events may not become part of graphs, so what they do is done by hand: every copy to and from the device
        // here and every launch of a graph is waited for.
        unsafe { stream.context().disable_event_tracking() };
        Self { captured: Some(Arc::clone(stream)), ..Self::of(comm) }
    }
}

impl DeviceMemory {
    /// A copy of the bytes of truth values, which may be any.
    pub fn as_bytes(&self, truths: &CudaSlice<bool>) -> CudaSlice<u8> {
        // SAFETY: the same memory as bytes.
        let view = unsafe { truths.transmute::<u8>(truths.len()) }.unwrap();
        self.stream.clone_dtod(&view).unwrap()
    }

    /// The elements of a part of a buffer.
    pub fn get_view<T: Predict>(&self, view: &CudaView<'_, T>) -> Vec<T> {
        let mut whole = self.put(&vec![T::default(); view.len()]);
        if !view.is_empty() {
            self.stream.memcpy_dtod(view, &mut whole).unwrap();
        }
        self.get(&whole)
    }

    /// Puts elements in a part of a buffer.
    pub fn put_view<T: Predict>(&self, elements: &[T], view: &mut CudaViewMut<'_, T>) {
        if !elements.is_empty() {
            self.stream.memcpy_dtod(&self.put(elements), view).unwrap();
        }
    }
}

impl Memory for DeviceMemory {
    type Element<T: Predict> = T;
    type Buffer<T: Predict> = CudaSlice<T>;

    fn reduction<T: Predict>(&self, op: ReduceOp) -> Reduction<T> {
        op.into()
    }

    fn put<T: Predict>(&self, elements: &[T]) -> CudaSlice<T> {
        // SAFETY: elements are plain data.
        let bytes = unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) };
        // A driver need not give memory of no bytes.
        let on_device = self.stream.clone_htod(if bytes.is_empty() { &[0_u8][..] } else { bytes }).unwrap();
        // The leaked slice's events are gone: what it was told to do ends first.
        self.stream.synchronize().unwrap();
        // SAFETY: an allocation of that many bytes, filled with elements, which nobody else owns any more.
        unsafe { self.stream.upgrade_device_ptr(on_device.leak(), elements.len()) }
    }

    fn get<T: Predict>(&self, buffer: &CudaSlice<T>) -> Vec<T> {
        let count = buffer.len();
        if count == 0 {
            return Vec::new();
        }
        // SAFETY: the same memory as bytes.
        let view = unsafe { buffer.transmute::<u8>(buffer.num_bytes()) }.unwrap();
        let bytes = self.stream.clone_dtoh(&view).unwrap();
        self.stream.synchronize().unwrap();
        let mut elements: Vec<T> = Vec::with_capacity(count);
        // SAFETY: as many bytes as the elements have, which were elements on the device: plain data.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast(), bytes.len());
            elements.set_len(count);
        }
        elements
    }

    fn make(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(stream) = &self.captured else { return call() };
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let called = call();
        let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap();
        if let Some(graph) = graph {
            graph.launch().unwrap();
            stream.synchronize().unwrap();
        }
        called
    }
}

/// Runs `program` on `world_size` threads, each a rank of a communicator without a host backend, with a device of its own; what they return, in
/// rank order.
pub fn nccl_ranks<R: Send>(
    world_size: usize,
    config: impl Fn(usize) -> Config + Sync,
    program: impl Fn(&NcclCommunicator, &DeviceMemory) -> R + Sync,
) -> Vec<R> {
    prepare();
    let _turn = turn();
    let ids = [UniqueId::new(None).unwrap()];
    let (ids, config, program) = (&ids, &config, &program);
    let rank = |rank: usize| {
        let context = CudaContext::new(rank).unwrap();
        let comm = NcclCommunicator::create(&context, ids, rank, world_size, &config(rank)).unwrap();
        program(&comm, &DeviceMemory::on(context.new_stream().unwrap()))
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Settings with a limit that a busy machine keeps to.
pub fn patient(_: usize) -> Config {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(60);
    config
}
