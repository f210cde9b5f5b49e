//! Ranks with a device each, and buffers on those devices.

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

/// Installs the simulated GPU, once per process. Does nothing if real GPUs are used.
pub fn prepare() {
    if !is_real() {
        simgpu::install();
    }
}

/// Whether the tests use the GPUs of this machine.
pub fn is_real() -> bool {
    std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real")
}

/// Whether NCCL is the simulated one, which can inject faults and counts its calls.
pub fn can_steer_nccl() -> bool {
    !is_real() && simgpu::real::nccl().is_none()
}

/// Makes the simulated NCCL do what a real one may do. The first collective waits inside its call until all ranks have
/// come, and a rank that aborts may end other ranks' calls with success. This holds for the whole process, until a test
/// has the simulation for itself ([`alone`]).
pub fn be_strict() {
    prepare();
    if can_steer_nccl() {
        simgpu::nccl::connect_lazily();
        simgpu::nccl::let_aborted_kernels_go_on();
    }
}

/// Keeps other tests from the simulation while the value lives. Returns `None` if the GPUs are real, since tests take
/// turns there.
pub fn alone() -> Option<simgpu::Alone> {
    (!is_real()).then(simgpu::alone)
}

/// Skips a test that controls the simulated driver if the driver is another one.
macro_rules! steers_gpu {
    () => {
        if crate::gpu::is_real() {
            crate::common::hosts::skip!("it steers the simulated GPU");
        }
    };
}
pub(crate) use steers_gpu;

/// Skips a test that controls the simulated NCCL if the library is another one.
macro_rules! steers_nccl {
    () => {
        if !crate::gpu::can_steer_nccl() {
            crate::common::hosts::skip!("it steers the simulated NCCL");
        }
    };
}
pub(crate) use steers_nccl;

/// Returns the builder of a rank in these tests.
pub fn builder(mut config: Config) -> Builder {
    prepare();
    // On real GPUs a script stops what hangs after 60 s. The library's own error has to come earlier.
    config.timeout = Duration::from_secs(if is_real() { 40 } else { 60 });
    Communicator::builder().config(config).require_device(DeviceChoice::Local)
}

/// Returns settings under which calls are not compared, so that they return before other ranks have come.
pub fn unchecked() -> Config {
    compared_before(0)
}

/// Returns settings under which only the first `calls` calls are compared.
pub fn compared_before(calls: u64) -> Config {
    let mut config = Config::default();
    // SAFETY: in calls that are not compared, the ranks of these tests make the same calls with the same lengths, or
    // none. If their ops differ, those do not touch memory.
    config.check_device_calls = unsafe { CheckDeviceCalls::unchecked_after(calls) };
    config
}

/// Locks the devices of this process for one set of ranks. Some driver calls wait until a device is idle, so two sets
/// at once could wait for each other forever.
pub fn turn() -> MutexGuard<'static, ()> {
    static DEVICES: Mutex<()> = Mutex::new(());
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `program` on `world_size` threads, each a rank with its own device. Returns their results in rank order.
pub fn ranks<R: Send>(world_size: usize, program: impl Fn(&Communicator, &DeviceMemory) -> R + Sync) -> Vec<R> {
    ranks_with(world_size, Config::default(), program)
}

/// Does the same as [`ranks`], with settings. Checks at the end that the simulation has found nothing.
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

/// Does the same as [`ranks`], in processes. `name` is the full name of the test.
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

/// Fails if the simulation has found a misuse.
#[track_caller]
pub fn assert_nothing_found() {
    if is_real() {
        return;
    }
    let mut reports = simgpu::reports();
    reports.extend(simgpu::nccl::reports());
    assert!(reports.is_empty(), "the simulated GPU found:\n{}", reports.join("\n"));
}

/// Buffers on a rank's device, on a stream other than the communicator's, so that every call has something to wait for.
pub struct DeviceMemory {
    pub stream: Arc<CudaStream>,
    /// The stream on which each call is captured into a graph, which is then launched. `None` makes calls directly.
    captured: Option<Arc<CudaStream>>,
}

impl DeviceMemory {
    pub fn of(comm: &Communicator) -> Self {
        Self::on(comm.device().unwrap().context().new_stream().unwrap())
    }

    /// Creates buffers on a stream of the test.
    pub fn on(stream: Arc<CudaStream>) -> Self {
        Self { stream, captured: None }
    }

    /// Does the same as [`DeviceMemory::of`], for calls on `stream` that are captured into graphs.
    pub fn capturing(comm: &Communicator, stream: &Arc<CudaStream>) -> Self {
        // SAFETY: cudarc's events must not become part of graphs, so this type waits explicitly: for every copy to and
        // from the device, and for every launch of a graph.
        unsafe { stream.context().disable_event_tracking() };
        Self { captured: Some(Arc::clone(stream)), ..Self::of(comm) }
    }
}

impl DeviceMemory {
    /// Copies `bool` values as bytes, which may have any value.
    pub fn as_bytes(&self, truths: &CudaSlice<bool>) -> CudaSlice<u8> {
        // SAFETY: the same memory as bytes.
        let view = unsafe { truths.transmute::<u8>(truths.len()) }.unwrap();
        self.stream.clone_dtod(&view).unwrap()
    }

    /// Returns the elements of a part of a buffer.
    pub fn get_view<T: Predict>(&self, view: &CudaView<'_, T>) -> Vec<T> {
        let mut whole = self.put(&vec![T::default(); view.len()]);
        if !view.is_empty() {
            self.stream.memcpy_dtod(view, &mut whole).unwrap();
        }
        self.get(&whole)
    }

    /// Writes elements to a part of a buffer.
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
        // A driver may refuse to allocate zero bytes.
        let on_device = self.stream.clone_htod(if bytes.is_empty() { &[0_u8][..] } else { bytes }).unwrap();
        // Leaking the slice loses its events, so its copy must end first.
        self.stream.synchronize().unwrap();
        // SAFETY: an allocation of that many bytes, filled with elements. It has no other owner, since it was leaked.
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
        // SAFETY: as many bytes as the elements have. They were elements on the device, which are plain data.
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

/// Runs `program` on `world_size` threads, each a rank with its own device, on communicators without a host backend.
/// Returns their results in rank order.
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

/// Returns settings with a timeout that is long enough on a busy machine.
pub fn patient(_: usize) -> Config {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(60);
    config
}
