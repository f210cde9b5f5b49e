//! Every call into NCCL and the driver fails once: a typed error, no hang, and nothing left behind.

use std::time::Duration;

use collectives::{Communicator, Config, DeviceChoice, ReduceOp, Result, bf16};

use super::common::cases::Memory;
use super::common::ranks::communicators_with;
use super::gpu::{DeviceMemory, can_steer_nccl, steers_nccl};

/// When a fault is injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before the communicator is created.
    Making,
    /// After the communicator and its buffers are created.
    Using,
}

/// Makes calls of every route, after `plant`.
fn work(comm: &Communicator, plant: impl FnOnce()) -> Result<()> {
    let memory = DeviceMemory::of(comm);
    let mut sum = memory.put(&[1_f32; 50]);
    let mut bits = memory.put(&vec![1_u16; 5000]);
    let mut mean = memory.put(&[bf16::ONE; 50]);
    let (mine, mut theirs, mut gathered) = (memory.put(&[1_u8]), memory.put(&[0_u8]), memory.put(&[0_u8; 3]));
    let n = comm.world_size();
    let (next, previous) = ((comm.rank() + 1) % n, (comm.rank() + n - 1) % n);
    plant();
    let work = (|| {
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        comm.all_reduce(&mut bits, ReduceOp::BitXor)?;
        comm.all_reduce(&mut mean, ReduceOp::Avg)?;
        comm.all_reduce(&mut sum, ReduceOp::PreMulSum(0.5))?;
        comm.all_gather_into(&mine, &mut gathered)?;
        comm.send_recv(&mine, next, &mut theirs, previous)?;
        comm.device().map_or(Ok(()), |device| device.synchronize())
    })();
    // On a failed device, buffers cannot be freed. The tests check only the errors.
    std::mem::forget((sum, bits, mean, mine, theirs, gathered));
    work
}

/// Injects a fault on rank 1 and returns the outcome of each rank. No thread of this crate may panic.
fn with_failure(when: When, plant: impl Fn() + Sync) -> Vec<Result<()>> {
    simgpu::install();
    let builder = || {
        let settings = |config: &mut Config| {
            config.device_scratch_bytes = 64 << 10;
            config.timeout = Duration::from_secs(3);
        };
        Communicator::builder().configure(settings).require_device(DeviceChoice::Local)
    };
    let store = collectives::store::MemoryStore::new();
    let (plant, builder) = (&plant, &builder);
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let store = std::sync::Arc::new(store.clone());
            scope.spawn(move || {
                let planting = |now: When| {
                    if rank == 1 && now == when {
                        plant();
                    }
                };
                planting(When::Making);
                let comm = builder().with_store(store, rank, 3)?;
                let result = work(&comm, || planting(When::Using));
                // No rank leaves before all have seen what happened.
                let _ = comm.monitored_barrier(Duration::from_secs(20));
                result
            })
        };
        let ranks: Vec<_> = (0..3).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Checks that at least one rank got an error, and that each error has a text.
fn judge(function: &str, results: &[Result<()>]) {
    let mut told = 0;
    for (rank, result) in results.iter().enumerate() {
        if let Err(error) = result {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains("panicked"), "{function}, rank {rank}: {text}");
            told += 1;
        }
    }
    assert!(told > 0, "{function} failed, and nobody was told");
}

/// Lets each function fail once.
fn each_fails(when: When, functions: &[&str], plant: impl Fn(&str) + Sync) {
    for function in functions {
        let alone = simgpu::alone();
        judge(function, &with_failure(when, || plant(function)));
        if can_steer_nccl() {
            simgpu::nccl::reset();
        }
        simgpu::clear_faults();
        simgpu::reports();
        drop(alone);
    }
}

#[test]
fn every_failing_nccl_call_is_an_error_in_words() {
    steers_nccl!();
    // 3 is ncclInternalError. Separate threads create communicators.
    let plant = |function: &str| simgpu::nccl::fail_call(function, 1, 3);
    each_fails(When::Making, &["ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclCommSplit", "ncclCommUserRank"], plant);
    let plant = |function: &str| simgpu::nccl::fail_call_of_this_thread(function, 1, 3);
    let used = ["ncclAllReduce", "ncclAllGather", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv", "ncclRedOpCreatePreMulSum"];
    each_fails(When::Using, &used, plant);
}

#[test]
fn every_failing_driver_call_is_an_error_in_words() {
    // 999 is CUDA_ERROR_UNKNOWN.
    let plant = |function: &str| simgpu::fail_call_of_this_thread(function, 1, 999);
    let made = ["cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute", "cuStreamCreate", "cuMemAlloc_v2", "cuEventCreate"];
    each_fails(When::Making, &made, plant);
    each_fails(When::Using, &["cuLaunchKernel", "cuStreamWaitEvent"], plant);
}

#[test]
fn calls_that_are_in_progress_for_a_while_are_waited_for() {
    steers_nccl!();
    let _alone = simgpu::alone();
    simgpu::install();
    for function in ["ncclCommInitRankConfig", "ncclCommSplit", "ncclCommFinalize"] {
        simgpu::nccl::in_progress(function, 50);
    }
    let comms = communicators_with(3, |_| {
        Communicator::builder().configure(|config| config.timeout = Duration::from_secs(30)).require_device(DeviceChoice::Local)
    });
    super::common::ranks::each(comms, |comm| {
        work(&comm, || {}).unwrap();
        let half = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
        assert!(half.device().is_some(), "{:?}", half.why_no_device());
        half.close().unwrap();
        comm.close().unwrap();
    });
    simgpu::nccl::reset();
}

#[test]
fn memory_that_runs_out_is_an_error_on_every_rank() {
    let _alone = simgpu::alone();
    simgpu::install();
    let _context = cudarc::driver::CudaContext::new(1).unwrap();
    simgpu::limit_memory(1, 1 << 20);
    let whys = super::common::ranks::threads_with(
        2,
        |_| Communicator::builder().device(DeviceChoice::Local),
        |comm| comm.why_no_device().unwrap(),
    );
    simgpu::clear_faults();
    for why in whys {
        // NCCL's own text names the allocation that failed.
        let words = ["memory", "Memory", "alloc"];
        assert!(why.contains("rank 1") && words.iter().any(|word| why.contains(word)), "{why}");
    }
}
