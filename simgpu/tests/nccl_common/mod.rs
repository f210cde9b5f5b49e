//! NCCL through its C interface, with ranks as threads.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(non_snake_case, reason = "the names are NCCL's")]
#![allow(missing_docs, unreachable_pub, clippy::too_many_arguments, reason = "C functions, shared by tests")]

pub mod oracle;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use libloading::os::unix::Library;
use simgpu::nccl::Config;

pub type Comm = *mut c_void;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id(pub [u8; 128]);

macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        pub fn $name($($argument: $kind),*) -> c_int {
            // SAFETY: the header declares this function with the same types; the tests keep what pointers point to.
            unsafe { symbol::<unsafe extern "C" fn($($kind),*) -> c_int>(stringify!($name))($($argument),*) }
        }
    )*};
}

/// Finds a function by name, as a program would look it up.
pub fn find<F: Copy>(name: &str) -> Option<F> {
    // SAFETY: the library is loaded already, and stays loaded.
    let library = unsafe { Library::new("libnccl.so.2") }.unwrap();
    let library = std::mem::ManuallyDrop::new(library);
    // SAFETY: callers name the type that the header declares.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|found| *found)
}

fn symbol<F: Copy>(name: &str) -> F {
    find(name).unwrap_or_else(|| panic!("no {name}"))
}

functions! {
    ncclGetVersion(version: *mut c_int);
    ncclGetUniqueId(id: *mut Id);
    ncclCommInitRank(comm: *mut Comm, size: c_int, id: Id, rank: c_int);
    ncclCommInitRankConfig(comm: *mut Comm, size: c_int, id: Id, rank: c_int, config: *mut Config);
    ncclCommInitRankScalable(comm: *mut Comm, size: c_int, rank: c_int, ids: c_int, id: *mut Id, config: *mut Config);
    ncclCommInitAll(comms: *mut Comm, count: c_int, devices: *const c_int);
    ncclCommFinalize(comm: Comm);
    ncclCommDestroy(comm: Comm);
    ncclCommAbort(comm: Comm);
    ncclCommRevoke(comm: Comm, flags: c_int);
    ncclCommSplit(comm: Comm, color: c_int, key: c_int, child: *mut Comm, config: *mut Config);
    ncclCommShrink(comm: Comm, excluded: *mut c_int, count: c_int, child: *mut Comm, config: *mut Config, flags: c_int);
    ncclCommGetUniqueId(comm: Comm, id: *mut Id);
    ncclCommGrow(comm: Comm, size: c_int, id: *const Id, rank: c_int, child: *mut Comm, config: *mut Config);
    ncclCommGetAsyncError(comm: Comm, error: *mut c_int);
    ncclCommCount(comm: Comm, count: *mut c_int);
    ncclCommUserRank(comm: Comm, rank: *mut c_int);
    ncclCommCuDevice(comm: Comm, device: *mut c_int);
    ncclCommSuspend(comm: Comm, flags: c_int);
    ncclCommResume(comm: Comm);
    ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize);
    ncclMemFree(pointer: *mut c_void);
    ncclCommRegister(comm: Comm, buffer: *mut c_void, bytes: usize, handle: *mut *mut c_void);
    ncclCommDeregister(comm: Comm, handle: *mut c_void);
    ncclCommWindowRegister(comm: Comm, buffer: *mut c_void, bytes: usize, window: *mut *mut c_void, flags: c_int);
    ncclCommWindowDeregister(comm: Comm, window: *mut c_void);
    ncclWinGetUserPtr(comm: Comm, window: *mut c_void, pointer: *mut *mut c_void);
    ncclRedOpCreatePreMulSum(op: *mut c_int, scalar: *mut c_void, kind: c_int, residence: c_int, comm: Comm);
    ncclRedOpDestroy(op: c_int, comm: Comm);
    ncclAllReduce(from: u64, into: u64, count: usize, kind: c_int, op: c_int, comm: Comm, stream: *mut c_void);
    ncclReduce(from: u64, into: u64, count: usize, kind: c_int, op: c_int, root: c_int, comm: Comm, stream: *mut c_void);
    ncclReduceScatter(from: u64, into: u64, count: usize, kind: c_int, op: c_int, comm: Comm, stream: *mut c_void);
    ncclAllGather(from: u64, into: u64, count: usize, kind: c_int, comm: Comm, stream: *mut c_void);
    ncclBroadcast(from: u64, into: u64, count: usize, kind: c_int, root: c_int, comm: Comm, stream: *mut c_void);
    ncclBcast(buffer: u64, count: usize, kind: c_int, root: c_int, comm: Comm, stream: *mut c_void);
    ncclAlltoAll(from: u64, into: u64, count: usize, kind: c_int, comm: Comm, stream: *mut c_void);
    ncclGather(from: u64, into: u64, count: usize, kind: c_int, root: c_int, comm: Comm, stream: *mut c_void);
    ncclScatter(from: u64, into: u64, count: usize, kind: c_int, root: c_int, comm: Comm, stream: *mut c_void);
    ncclSend(from: u64, count: usize, kind: c_int, peer: c_int, comm: Comm, stream: *mut c_void);
    ncclRecv(into: u64, count: usize, kind: c_int, peer: c_int, comm: Comm, stream: *mut c_void);
    ncclGroupStart();
    ncclGroupEnd();
}

pub fn last_error() -> String {
    // SAFETY: the function takes any handle and returns a text that stays valid.
    let text = unsafe { CStr::from_ptr(symbol::<unsafe extern "C" fn(Comm) -> *const c_char>("ncclGetLastError")(std::ptr::null_mut())) };
    text.to_string_lossy().into_owned()
}

/// Locks the last error, which the whole process shares, for ranks whose calls fail and that read [`last_error`].
pub fn my_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap()
}

/// Fails the test if a call does not succeed.
#[track_caller]
pub fn ok(code: c_int) {
    assert_eq!(code, 0, "{}", last_error());
}

/// Reserves the simulation for this test, with nothing planted.
pub fn alone() -> simgpu::Alone {
    simgpu::install();
    let alone = simgpu::alone();
    simgpu::nccl::reset();
    alone
}

/// Does the same with an older release, which then serves the whole process.
pub fn alone_with(version: i32) -> simgpu::Alone {
    simgpu::nccl::install(version);
    let alone = simgpu::alone();
    simgpu::nccl::reset();
    alone
}

/// Checks that no rule was broken and nothing leaks.
#[track_caller]
pub fn expect_clean() {
    assert_eq!(simgpu::nccl::reports(), [""; 0]);
    assert_eq!(simgpu::reports(), [""; 0]);
    assert_eq!(simgpu::nccl::counts(), simgpu::nccl::Counts::default());
}

pub fn new_id() -> Id {
    let mut id = Id([0; 128]);
    ok(ncclGetUniqueId(&raw mut id));
    id
}

/// Returns a configuration that states whether calls wait.
pub fn blocking(blocking: bool) -> Config {
    Config { blocking: blocking.into(), ..unset() }
}

pub fn unset() -> Config {
    // SAFETY: all bits zero are a configuration: numbers and null pointers.
    let mut config: Config = unsafe { std::mem::zeroed() };
    (config.size, config.magic, config.version) = (120, 0xcafe_beef, 23203);
    let numbers = [
        &mut config.blocking,
        &mut config.cga_cluster_size,
        &mut config.min_ctas,
        &mut config.max_ctas,
        &mut config.split_share,
        &mut config.traffic_class,
        &mut config.collnet_enable,
        &mut config.cta_policy,
        &mut config.shrink_share,
        &mut config.nvls_ctas,
        &mut config.n_channels_per_net_peer,
        &mut config.nvlink_centric_sched,
        &mut config.graph_usage_mode,
        &mut config.num_rma_ctx,
        &mut config.max_p2p_peers,
        &mut config.graph_stream_ordering,
        &mut config.launch_order_implicit,
        &mut config.num_rma_sig,
        &mut config.rma_eager_init,
        &mut config.host_cft_mode,
        &mut config.nvls_host_mode,
    ];
    numbers.into_iter().for_each(|number| *number = c_int::MIN);
    config
}

/// One rank: a communicator, a device and a stream.
pub struct Rank {
    pub comm: Comm,
    pub rank: usize,
    pub size: usize,
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
}

impl Rank {
    /// Makes a rank on a device, without a communicator.
    pub fn on(device: usize, rank: usize, size: usize) -> Rank {
        let context = CudaContext::new(device).unwrap();
        context.bind_to_thread().unwrap();
        // SAFETY: each test orders its streams itself.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        Rank { comm: std::ptr::null_mut(), rank, size, context, stream }
    }

    pub fn join(mut self, id: Id) -> Rank {
        ok(ncclCommInitRank(&raw mut self.comm, self.size as c_int, id, self.rank as c_int));
        self
    }

    /// Joins with a non-blocking communicator, and waits until that is ready.
    pub fn join_later(mut self, id: Id, mut config: Config) -> Rank {
        let code = ncclCommInitRankConfig(&raw mut self.comm, self.size as c_int, id, self.rank as c_int, &raw mut config);
        assert_eq!(code, 7);
        assert_eq!(self.settle().0, 0);
        self
    }

    pub fn stream(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }

    pub fn upload(&self, bytes: &[u8]) -> CudaSlice<u8> {
        let slice = self.stream.clone_htod(bytes).unwrap();
        self.stream.synchronize().unwrap();
        slice
    }

    pub fn room(&self, bytes: usize) -> CudaSlice<u8> {
        self.upload(&vec![0xee; bytes])
    }

    pub fn download(&self, slice: &CudaSlice<u8>) -> Vec<u8> {
        let bytes = self.stream.clone_dtoh(slice).unwrap();
        self.stream.synchronize().unwrap();
        bytes
    }

    pub fn at(&self, slice: &CudaSlice<u8>) -> u64 {
        slice.device_ptr(&self.stream).0
    }

    pub fn wait(&self) {
        self.stream.synchronize().unwrap();
    }

    pub fn async_error(&self) -> c_int {
        let mut error = -1;
        ok(ncclCommGetAsyncError(self.comm, &raw mut error));
        error
    }

    /// Polls until the communicator is no longer in progress. Returns its result and the number of polls.
    pub fn settle(&self) -> (c_int, usize) {
        for polls in 1.. {
            let error = self.async_error();
            if error != 7 {
                return (error, polls);
            }
            std::thread::yield_now();
        }
        unreachable!()
    }

    /// Checks the result of a call, and waits for its end if it runs in the background.
    #[track_caller]
    pub fn complete(&self, code: c_int) {
        if code == 7 { assert_eq!(self.settle().0, 0, "{}", last_error()) } else { ok(code) }
    }

    /// Polls until there is an error.
    pub fn await_error(&self) -> c_int {
        loop {
            match self.async_error() {
                0 | 7 => std::thread::yield_now(),
                error => return error,
            }
        }
    }
}

/// Returns the place of a rank in another communicator.
pub fn seen_from(rank: &Rank, comm: Comm) -> Rank {
    let (mut size, mut place) = (0, 0);
    ok(ncclCommCount(comm, &raw mut size));
    ok(ncclCommUserRank(comm, &raw mut place));
    Rank { comm, rank: place as usize, size: size as usize, context: rank.context.clone(), stream: rank.stream.clone() }
}

/// Runs each rank on its own thread and its own device, without communicators. A test that hangs fails.
pub fn on_threads<T: Send + 'static>(size: usize, run: impl Fn(Rank) -> T + Send + Sync + 'static) -> Vec<T> {
    let (run, (done, results)) = (Arc::new(run), mpsc::channel());
    for rank in 0..size {
        let (run, done) = (run.clone(), done.clone());
        std::thread::spawn(move || drop(done.send((rank, run(Rank::on(rank, rank, size))))));
    }
    drop(done);
    let mut found: Vec<Option<T>> = (0..size).map(|_| None).collect();
    for _ in 0..size {
        let (rank, result) = results.recv_timeout(Duration::from_secs(60)).expect("a rank failed or hangs");
        found[rank] = Some(result);
    }
    found.into_iter().flatten().collect()
}

/// Does the same with a blocking communicator, which is destroyed at the end.
pub fn in_ranks<T: Send + 'static>(size: usize, run: impl Fn(&Rank) -> T + Send + Sync + 'static) -> Vec<T> {
    let id = new_id();
    on_threads(size, move |rank| {
        let rank = rank.join(id);
        let result = run(&rank);
        rank.wait();
        ok(ncclCommDestroy(rank.comm));
        result
    })
}
