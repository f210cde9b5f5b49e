//! Started calls on devices in which something fails after their effect. The work returns the error, and keeps what the
//! device may still use.

#![expect(unsafe_code, reason = "memory of another crate, and the simulation's gates")]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use collectives::{
    Communicator, Config, DeviceChoice, ReduceOp,
    interop::{AsDevicePtr, AsDevicePtrMut, AsStream, ForeignBuffer},
};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use simgpu::Gate;

use super::common::cases::Memory;
use super::common::meeting::wait_until;
use super::common::ranks::{Meeting, alone_in_a_process, threads_with};
use super::gpu::{DeviceMemory, alone, builder, ranks, steers_gpu, unchecked};

/// Another crate's tensor. Dropping it frees it, even if its streams still use it.
struct Tensor {
    slice: CudaSlice<u32>,
    stream: Arc<CudaStream>,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::AcqRel);
    }
}

// SAFETY: its elements are allocated and initialised on `stream`, which is used for nothing else.
unsafe impl AsDevicePtr for Tensor {
    type Element = u32;

    fn device_ptr(&self) -> u64 {
        self.slice.device_ptr(&self.stream).0
    }

    fn elements(&self) -> usize {
        self.slice.len()
    }

    fn device(&self) -> usize {
        self.stream.device()
    }

    fn raw_stream(&self) -> *mut c_void {
        self.stream.as_raw_stream()
    }
}

// SAFETY: nothing else uses it while it is borrowed, or owned by a call.
unsafe impl AsDevicePtrMut for Tensor {}

/// How the program leaves a started call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Leaving {
    /// It drops the work.
    Dropped,
    /// It waits, and another thread aborts the communicator.
    Aborted,
}

#[test]
fn what_a_started_call_owns_is_dropped_once_the_device_has_passed_the_call() {
    steers_gpu!();
    for leaving in [Leaving::Dropped, Leaving::Aborted] {
        let _alone = alone();
        let everyone = Meeting::new(2);
        threads_with(
            2,
            |_| builder(Config::default()),
            |comm| {
                let memory = DeviceMemory::of(comm);
                let dropped = Arc::new(AtomicUsize::new(0));
                let slice = memory.put(&[comm.rank() as u32; 64]);
                memory.stream.synchronize().unwrap();
                let tensor = Tensor { slice, stream: Arc::clone(&memory.stream), dropped: Arc::clone(&dropped) };
                let stream = memory.stream.context().new_stream().unwrap();
                let held = Gate::close(stream.cu_stream().cast());
                let work =
                    comm.with_stream(&stream).start_broadcast(ForeignBuffer::new(memory.stream.context(), tensor).unwrap(), 0).unwrap();
                everyone.meet();
                match leaving {
                    Leaving::Dropped => drop(work),
                    Leaving::Aborted => {
                        comm.abort();
                        assert!(work.wait().is_err());
                    }
                }
                assert_eq!(dropped.load(Ordering::Acquire), 0, "{leaving:?}: dropped while the device may use it");
                held.open();
                wait_until("the tensor is dropped", || dropped.load(Ordering::Acquire) == 1);
            },
        );
        let found = simgpu::reports();
        assert!(!found.iter().any(|report| report.contains("freed")), "{leaving:?}: {found:?}");
    }
}

/// The outcome of a call on one rank: the reason why nothing was queued, or the outcome of its work.
type Became = Result<Result<(), String>, String>;

/// Starts a sum, or a reduction by a kernel of this crate if `bits` is set, with a fault injected on rank 1 before it.
fn started(bits: bool, function: &str, nth: u64) -> Vec<Became> {
    simgpu::install();
    let settings = |config: &mut Config| {
        config.device_scratch_bytes = 64 << 10;
        config.timeout = Duration::from_secs(3);
    };
    let builder = |_| Communicator::builder().configure(settings).require_device(DeviceChoice::Local);
    threads_with(2, builder, |comm| {
        let memory = DeviceMemory::of(comm);
        let buffer = memory.put(&vec![1_u32 << comm.rank(); 5000]);
        if comm.rank() == 1 {
            simgpu::fail_call_of_this_thread(function, nth, 999);
        }
        let op = if bits { ReduceOp::BitOr } else { ReduceOp::Sum };
        let work = comm.start_all_reduce(buffer, op);
        let became = match work.map(collectives::Work::wait) {
            Err(error) => Err(error.to_string()),
            Ok(Err(error)) => Ok(Err(error.to_string())),
            Ok(Ok(buffer)) => {
                simgpu::clear_faults();
                assert_eq!(memory.get(&buffer), vec![3; 5000], "{function}, call {nth}");
                Ok(Ok(()))
            }
        };
        // No rank leaves before all have seen what happened.
        let _ = comm.monitored_barrier(Duration::from_secs(20));
        became
    })
}

#[test]
fn a_started_call_of_which_a_driver_call_fails_has_no_effect_or_says_so_through_its_work() {
    steers_gpu!();
    for function in ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"] {
        for (nth, bits) in (1..=4).flat_map(|nth| [(nth, false), (nth, true)]) {
            let _alone = alone();
            let became = started(bits, function, nth);
            simgpu::clear_faults();
            let found = simgpu::reports();
            assert!(!found.iter().any(|report| report.contains("freed")), "{function}, call {nth}: {found:?}");
            // If the other rank's call succeeded, this rank's call was queued.
            let is_hidden = matches!((&became[0], &became[1]), (Ok(Ok(())), Err(_)));
            assert!(!is_hidden, "{function}, call {nth}, bits {bits}: {became:?}");
        }
    }
}

/// Makes a call three times. The second run counts its calls of the driver function. In the third, the call that is
/// `before_last` before the last one fails.
fn failing_behind<B>(comm: &Communicator, function: &str, before_last: u64, mut call: impl FnMut() -> B) -> B {
    drop(call());
    let mut counted = None;
    let calls = simgpu::driver_calls_of_this_thread(|| counted = Some(call()));
    drop(counted);
    comm.device().unwrap().synchronize().unwrap();
    simgpu::fail_call_of_this_thread(function, calls.with_nccl(function) - before_last, 999);
    let result = call();
    comm.barrier().unwrap();
    simgpu::clear_faults();
    comm.barrier().unwrap();
    result
}

#[test]
fn what_the_driver_refuses_behind_a_call_is_no_error_of_the_call() {
    steers_gpu!();
    let _alone = alone();
    ranks(2, |comm, memory| {
        // The event that marks the call's end, and the events by which later users of the buffer wait.
        for (function, before_last) in [("cuEventCreate", 0), ("cuEventRecord", 0), ("cuEventRecord", 1)] {
            let work =
                failing_behind(comm, function, before_last, || comm.start_all_reduce(memory.put(&[1_u32; 64]), ReduceOp::Sum).unwrap());
            assert_eq!(memory.get(&work.wait().unwrap()), [2; 64], "{function}, {before_last} before the last");
        }
        let buffer = failing_behind(comm, "cuEventRecord", 0, || {
            let mut buffer = memory.put(&[1_u32; 64]);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            buffer
        });
        assert_eq!(memory.get(&buffer), [2; 64]);
    });
}

/// Runs `work` while no thread can be started, since there is no memory for its stack.
fn without_threads<R>(work: impl FnOnce() -> R) -> R {
    let unlimited = getrlimit(Resource::As);
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    let enough = pages * rustix::param::page_size() as u64 + (1 << 20);
    setrlimit(Resource::As, Rlimit { current: Some(enough), ..unlimited }).unwrap();
    // Stacks of threads that have ended are reused. These threads take them.
    let release = Arc::new(AtomicUsize::new(0));
    let park = |release: Arc<AtomicUsize>| {
        move || {
            while release.load(Ordering::Acquire) == 0 {
                std::thread::park();
            }
        }
    };
    let mut parked = Vec::new();
    while let Ok(thread) = std::thread::Builder::new().spawn(park(Arc::clone(&release))) {
        parked.push(thread);
        assert!(parked.len() < 1000, "there is no end of threads");
    }
    let result = work();
    setrlimit(Resource::As, unlimited).unwrap();
    release.store(1, Ordering::Release);
    for thread in parked {
        thread.thread().unpark();
        thread.join().unwrap();
    }
    result
}

#[test]
fn an_awaited_call_that_no_thread_can_look_at_ends_with_that_error() {
    steers_gpu!();
    alone_in_a_process("started::an_awaited_call_that_no_thread_can_look_at_ends_with_that_error", || {
        threads_with(
            1,
            |_| builder(Config::default()),
            |comm| {
                let memory = DeviceMemory::of(comm);
                let buffer = memory.put(&[1_u32; 64]);
                let held = Gate::close(memory.stream.cu_stream().cast());
                let work = comm.with_stream(&memory.stream).start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                let error = without_threads(|| {
                    work.on_end(|| {});
                    work.wait().unwrap_err().to_string()
                });
                assert!(error.contains("awaiting all_reduce") && error.contains("thread"), "{error}");
                held.open();
            },
        );
    });
}

#[test]
fn a_wait_for_a_device_ends_where_no_thread_can_hear_of_the_others_end() {
    steers_gpu!();
    alone_in_a_process("started::a_wait_for_a_device_ends_where_no_thread_can_hear_of_the_others_end", || {
        let everyone = Meeting::new(2);
        threads_with(
            2,
            |_| builder(unchecked()),
            |comm| {
                let memory = DeviceMemory::of(comm);
                let mut buffer = memory.put(&[1_u32; 64]);
                everyone.meet();
                if comm.rank() == 0 {
                    // The other rank never makes this call.
                    comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                    let error = without_threads(|| comm.device().unwrap().synchronize().unwrap_err().to_string());
                    assert!(error.contains("message thread"), "{error}");
                }
                everyone.meet();
            },
        );
    });
}
