//! Every call into NCCL and the driver fails once: a typed error, no hang, nothing left behind.

use std::time::Duration;

use collectives::{Communicator, Config, DeviceChoice, ReduceOp, Result, bf16};

use super::common::cases::Memory;
use super::common::ranks::communicators_with;
use super::gpu::DeviceMemory;

/// Calls of every route.
fn work(comm: &Communicator) -> Result<()> {
    let memory = DeviceMemory::of(comm);
    let mut sum = memory.put(&[1_f32; 50]);
    let mut bits = memory.put(&vec![1_u16; 5000]);
    let mut mean = memory.put(&[bf16::ONE; 50]);
    let mut gathered = memory.put(&[0_u8; 3]);
    let work = (|| {
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        comm.all_reduce(&mut bits, ReduceOp::BitXor)?;
        comm.all_reduce(&mut mean, ReduceOp::Avg)?;
        comm.all_reduce(&mut sum, ReduceOp::PreMulSum(0.5))?;
        comm.all_gather_into(&memory.put(&[1_u8]), &mut gathered)?;
        comm.device().map_or(Ok(()), |device| device.synchronize())
    })();
    // Where the device is broken, buffers cannot be freed; the tests look at what is said only.
    std::mem::forget((sum, bits, mean, gathered));
    work
}

/// Rank 1's `nth` call of `function` fails while a communicator is made and used; what each rank got.
fn with_failure(plant: impl Fn() + Sync) -> Vec<Result<()>> {
    let builder = |_: usize| {
        let mut config = Config::default();
        config.device_scratch_bytes = 64 << 10;
        simgpu::install();
        Communicator::builder().config(config).timeout(Duration::from_secs(3)).require_device(DeviceChoice::Local)
    };
    let store = collectives::MemoryStore::new();
    let plant = &plant;
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let store = std::sync::Arc::new(store.clone());
            scope.spawn(move || {
                if rank == 1 {
                    plant();
                }
                let comm = builder(rank).with_store(store, rank, 3)?;
                let result = work(&comm);
                // Nobody leaves before everybody has seen what happened.
                let _ = comm.monitored_barrier(Duration::from_secs(20));
                result
            })
        };
        let ranks: Vec<_> = (0..3).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn judge(function: &str, nth: u64, results: &[Result<()>]) -> bool {
    let failed = results.iter().any(Result::is_err);
    for (rank, result) in results.iter().enumerate() {
        if let Err(error) = result {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains("panicked"), "{function}, call {nth}, rank {rank}: {text}");
        }
    }
    failed
}

#[test]
fn every_failing_nccl_call_is_an_error_in_words() {
    let functions = [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommGetAsyncError",
        "ncclAllReduce",
        "ncclAllGather",
        "ncclGroupStart",
        "ncclGroupEnd",
        "ncclSend",
        "ncclRecv",
        "ncclRedOpCreatePreMulSum",
    ];
    for function in functions {
        for nth in 1..=2 {
            let alone = simgpu::alone();
            simgpu::install();
            // 3 is ncclInternalError.
            let results = with_failure(|| simgpu::nccl::fail_call_of_this_thread(function, nth, 3));
            judge(function, nth, &results);
            simgpu::nccl::reset();
            simgpu::clear_faults();
            simgpu::reports();
            drop(alone);
        }
    }
}

#[test]
fn every_failing_driver_call_is_an_error_in_words() {
    let functions = [
        "cuDevicePrimaryCtxRetain",
        "cuDeviceGetAttribute",
        "cuStreamCreate",
        "cuMemAllocAsync",
        "cuMemAlloc_v2",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoDAsync_v2",
    ];
    for function in functions {
        let alone = simgpu::alone();
        simgpu::install();
        // 999 is CUDA_ERROR_UNKNOWN.
        let results = std::panic::catch_unwind(|| with_failure(|| simgpu::fail_call_of_this_thread(function, 1, 999)));
        match results {
            Ok(results) => drop(judge(function, 1, &results)),
            // The test's own calls of cudarc are made on the same thread; ours may not panic.
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                assert!(text.contains("DriverError"), "{function}: {text}");
            }
        }
        simgpu::nccl::reset();
        simgpu::clear_faults();
        simgpu::reports();
        drop(alone);
    }
}

#[test]
fn calls_that_are_in_progress_for_a_while_are_waited_for() {
    let _alone = simgpu::alone();
    simgpu::install();
    for function in ["ncclCommInitRankConfig", "ncclAllReduce", "ncclGroupEnd", "ncclCommSplit", "ncclCommFinalize", "ncclAllGather"] {
        simgpu::nccl::in_progress(function, 50);
    }
    let comms = communicators_with(3, |_| Communicator::builder().timeout(Duration::from_secs(30)).require_device(DeviceChoice::Local));
    super::common::ranks::each(comms, |comm| {
        work(&comm).unwrap();
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
        assert!(why.contains("rank 1") && why.to_lowercase().contains("memory"), "{why}");
    }
}
