//! The whole device backend over the simulated driver and NCCL: ranks are threads, each with its own device.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "calls take addresses of device memory")]

mod memory;
mod streams;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut};

use super::*;
use crate::base::random::Random;
use crate::call::Collective;
use crate::call::element::{Element, F8E4M3, F8E5M2};
use crate::config::nccl::NcclConfig;
use crate::device::comm::{Setup, unique_id};
use crate::device::nccl;
use crate::device::plan::cases::Case;
use crate::device::plan::model::BASE;
use crate::host::fold::Fold;
use crate::host::reduce::{Kernel, premultiply};
use half::{bf16, f16};

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

    /// Checks that no error was found, and that nothing is left.
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

/// Returns the options that most tests use.
fn options() -> Options {
    Options { reproducible: false, scratch_bytes: 1 << 20, common: common((9, 0)) }
}

/// Returns the properties of devices with this compute capability and all kernels.
fn common(least_capability: (i32, i32)) -> CommonDevice {
    CommonDevice { least_capability, has_switch: false, families: FamilySet::ALL, refusal: None }
}

/// Creates the backends of a new communicator.
fn several(size: usize, options: &Options) -> Vec<DeviceBackend> {
    let library = nccl::library(None).unwrap();
    let ids = [unique_id(library).unwrap()];
    let backend = |rank: usize| {
        let gpu = driver::open(rank).unwrap();
        let (config, deadline) = (NcclConfig::default(), Deadline::after(LONG));
        let setup = Setup {
            library,
            gpu: &gpu,
            ids: &ids,
            rank,
            world_size: size,
            config: &config,
            deadline: &deadline,
            liveness_probe: None,
            end_notice: None,
        };
        let comm = NcclComm::create(setup).unwrap();
        DeviceBackend::new(gpu, comm, options).unwrap()
    };
    on_threads(0..size, backend)
}

/// Runs one thread for each rank of a new backend.
fn ranks<T: Send>(size: usize, options: &Options, test: impl Fn(&DeviceBackend) -> T + Sync) -> Vec<T> {
    on_threads(several(size, options), |backend| test(&backend))
}

/// Handles each item on its own thread.
fn on_threads<I: Send, T: Send>(items: impl IntoIterator<Item = I>, work: impl Fn(I) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Copies bytes to a device.
fn upload(stream: &Arc<CudaStream>, bytes: &[u8]) -> CudaSlice<u8> {
    stream.clone_htod(bytes).unwrap()
}

/// Returns the contents of device memory once the stream has completed its work.
fn download(stream: &Arc<CudaStream>, memory: &CudaSlice<u8>) -> Vec<u8> {
    let bytes = stream.clone_dtoh(memory).unwrap();
    stream.synchronize().unwrap();
    bytes
}

/// Returns the address of memory. Its events are not used: these tests order by streams.
fn address(stream: &Arc<CudaStream>, memory: &mut CudaSlice<u8>) -> u64 {
    memory.device_ptr_mut(stream).0
}

/// Returns a case's job for a rank whose memory begins at `base`.
fn job_at(case: &Case, me: usize, base: u64, dtype: DType, reduction: Option<Reduction>) -> Job {
    let mut job = case.job(me, dtype, reduction);
    for address in [&mut job.memory.source, &mut job.memory.destination] {
        *address = if *address == 0 { 0 } else { *address - BASE + base };
    }
    job
}

/// Creates the memories of all ranks of a case, the same on every rank.
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

/// Runs a case on this rank, on the backend's stream, and compares this rank's memory.
fn run(
    backend: &DeviceBackend,
    case: &Case,
    memories: &[Vec<u8>],
    dtype: DType,
    reduction: Option<Reduction>,
    fold: &impl Fn(&[Vec<u8>]) -> Vec<u8>,
) {
    let (me, stream) = (backend.comm().rank(), backend.stream());
    let mut memory = upload(stream, &memories[me]);
    let job = job_at(case, me, address(stream, &mut memory), dtype, reduction);
    // SAFETY: the memory is as the case states, and is read back on the same stream.
    unsafe { backend.enqueue(&job, stream, LONG) }.unwrap_or_else(|error| panic!("{error}: {case:?}"));
    case.compare(me, &download(stream, &memory), &case.expected(memories, fold)[me]);
}

const KINDS: [Collective; 9] = [
    Collective::Broadcast,
    Collective::AllGather,
    Collective::AllGatherV,
    Collective::Gather,
    Collective::GatherV,
    Collective::Scatter,
    Collective::ScatterV,
    Collective::AllToAll,
    Collective::AllToAllV,
];

#[test]
fn every_collective_that_moves_leaves_the_right_bytes() {
    let sim = Sim::new();
    for (n, old) in [(1, false), (2, false), (3, false), (3, true), (4, false), (4, true), (8, false)] {
        let mut backends = several(n, &Options { scratch_bytes: 4096, ..options() });
        if old {
            let none = Library { all_to_all: false, gather: false, scatter: false };
            backends.iter_mut().for_each(|backend| backend.library = none);
        }
        on_threads(backends, |backend| {
            let seed = 90 + n as u64;
            let mut random = Random(seed);
            for round in 0..6 {
                for kind in KINDS {
                    let in_place = round % 2 == 0 && !matches!(kind, Collective::GatherV | Collective::ScatterV | Collective::AllToAllV);
                    let mut case = Case::some(kind, in_place, 1 + random.below(8), 2000, &mut random);
                    case.root %= n;
                    let length = |random: &mut Random| random.below(3) * random.below(700);
                    (case.n, case.blocks) = (n, case.blocks.iter().copied().cycle().take(n).collect());
                    case.pairs = (0..n).map(|_| (0..n).map(|_| length(&mut random)).collect()).collect();
                    let memories = memories(&case, &mut random, |random, _| vec![random.below(256) as u8]);
                    println!("round {round} of seed {seed}: {case:?}");
                    run(&backend, &case, &memories, DType::U8, None, &|_| unreachable!("nothing is folded"));
                }
            }
        });
    }
    sim.finish();
}

const REDUCING: [Collective; 4] = [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter, Collective::ReduceScatterV];
const SCALAR: f64 = 0.5;

fn ops() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().map(|op| if matches!(op, ReduceOp::PreMulSum(_)) { ReduceOp::PreMulSum(SCALAR) } else { op })
}

/// Returns the bytes of a number as an element of a float type.
fn float(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
        DType::F8E4M3 => vec![F8E4M3::from_f64(value).to_bits()],
        DType::F8E5M2 => vec![F8E5M2::from_f64(value).to_bits()],
        other => panic!("{other} is no float"),
    }
}

/// Returns an element for which every order of folding gives the same bits.
fn exact(op: ReduceOp, dtype: DType, random: &mut Random) -> Vec<u8> {
    if !dtype.is_float() {
        let bound = if dtype == DType::Bool { 2 } else { 256 };
        return (0..dtype.size_bytes()).map(|_| random.below(bound) as u8).collect();
    }
    let value = match op {
        ReduceOp::Prod => [1.0, 2.0, -1.0][random.below(3)],
        ReduceOp::Min | ReduceOp::Max => random.below(15) as f64 - 7.0,
        _ => random.below(3) as f64 - 1.0,
    };
    float(dtype, value)
}

/// Returns an element for which the order changes the result.
fn inexact(op: ReduceOp, dtype: DType, random: &mut Random) -> Vec<u8> {
    let value = (random.below(2001) as f64 - 1000.0) / 997.0;
    float(dtype, if op == ReduceOp::Prod { 1.0 + value / 8.0 } else { value })
}

/// Folds on the host, in rank order.
fn folded<T: Element>(op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let reduction = crate::call::op::Reduction::<T>::from(op);
    let kernel = Kernel::of(&reduction, TypeTag::of::<T>(), inputs.len()).unwrap();
    let elements = |bytes: &Vec<u8>| -> Vec<T> {
        let mut elements = vec![T::default(); bytes.len() / size_of::<T>()];
        // SAFETY: plain data of this many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast(), bytes.len()) };
        elements
    };
    let inputs: Vec<Vec<T>> = inputs.iter().map(elements).collect();
    let contribution = |input: &Vec<T>| {
        let mut multiplied = Vec::new();
        premultiply(&reduction, input, &mut multiplied);
        multiplied
    };
    let contributions: Vec<Vec<T>> = inputs.iter().map(contribution).collect();
    let pointers: Vec<*const u8> = contributions.iter().map(|input| input.as_ptr().cast()).collect();
    let mut result = contributions[0].clone();
    let bytes = size_of_val(&result[..]);
    let mut out = vec![0; bytes];
    // SAFETY: all are vectors of this many elements; the bytes go to a vector of the same length.
    unsafe {
        kernel.fold(result.as_mut_ptr().cast(), &pointers, bytes, true);
        std::ptr::copy_nonoverlapping(result.as_ptr().cast(), out.as_mut_ptr(), bytes);
    }
    out
}

/// Returns the host's fold of a type.
fn fold_of(dtype: DType) -> fn(ReduceOp, &[Vec<u8>]) -> Vec<u8> {
    match dtype {
        DType::F32 => folded::<f32>,
        DType::F64 => folded::<f64>,
        DType::F16 => folded::<f16>,
        DType::Bf16 => folded::<bf16>,
        DType::F8E4M3 => folded::<F8E4M3>,
        DType::F8E5M2 => folded::<F8E5M2>,
        DType::I8 => folded::<i8>,
        DType::I16 => folded::<i16>,
        DType::I32 => folded::<i32>,
        DType::I64 => folded::<i64>,
        DType::U8 => folded::<u8>,
        DType::U16 => folded::<u16>,
        DType::U32 => folded::<u32>,
        DType::U64 => folded::<u64>,
        DType::Bool => folded::<bool>,
    }
}

/// Runs every kind, op and type on one backend.
fn everything(backend: &DeviceBackend, seed: u64, dtypes: &[DType], element: impl Fn(ReduceOp, DType, &mut Random) -> Vec<u8>) {
    let n = backend.comm().world_size();
    let mut random = Random(seed);
    for &dtype in dtypes {
        for op in ops().filter(|op| op.check(dtype).is_ok()) {
            for kind in REDUCING {
                for in_place in [true, false] {
                    let mut case = Case::some(kind, in_place, dtype.size_bytes(), 200, &mut random);
                    case.root %= n;
                    (case.n, case.blocks) = (n, case.blocks.iter().copied().cycle().take(n).collect());
                    let memories = memories(&case, &mut random, |random, _| element(op, dtype, random));
                    println!("{op} of {dtype}, seed {seed}: {case:?}");
                    run(backend, &case, &memories, dtype, Some(Reduction::Builtin(op)), &|inputs| fold_of(dtype)(op, inputs));
                }
            }
        }
    }
}

#[test]
fn every_reduction_gives_the_bits_of_the_host() {
    let sim = Sim::new();
    for n in [1, 2, 3, 4, 8] {
        ranks(n, &options(), |backend| everything(backend, 50 + n as u64, &DType::ALL, exact));
    }
    sim.finish();
}

#[test]
fn folds_of_old_devices_give_the_bits_of_the_host() {
    let sim = Sim::new();
    let old = Options { common: common((8, 0)), ..options() };
    for n in [2, 3] {
        ranks(n, &old, |backend| everything(backend, 60 + n as u64, &[DType::F8E4M3, DType::F8E5M2], exact));
    }
    sim.finish();
}

#[test]
fn reproducible_reductions_give_the_bits_of_a_fold_in_rank_order() {
    let sim = Sim::new();
    let reproducible = Options { reproducible: true, ..options() };
    for n in [2, 3, 8] {
        ranks(n, &reproducible, |backend| {
            let floats = DType::ALL.into_iter().filter(|dtype| dtype.is_float());
            let unordered = |op| matches!(op, ReduceOp::Min | ReduceOp::Max);
            let element =
                |op, dtype, random: &mut Random| if unordered(op) { exact(op, dtype, random) } else { inexact(op, dtype, random) };
            everything(backend, 70 + n as u64, &floats.collect::<Vec<_>>(), element);
        });
    }
    sim.finish();
}

#[test]
fn large_folds_in_slabs_give_the_bits_of_the_host() {
    let sim = Sim::new();
    let little = Options { scratch_bytes: 64 << 10, ..options() };
    for n in [2, 3, 4] {
        ranks(n, &little, |backend| {
            let mut random = Random(80 + n as u64);
            for (op, dtype) in [(ReduceOp::BitXor, DType::U64), (ReduceOp::Avg, DType::U16), (ReduceOp::Sum, DType::I16)] {
                for kind in REDUCING {
                    let mut case = Case::some(kind, random.below(2) == 0, dtype.size_bytes(), 1, &mut random);
                    case.root %= n;
                    let share = if matches!(kind, Collective::AllReduce | Collective::Reduce) { 300_008 } else { 300_008 / n };
                    let block = |rank: usize| (share / 8 + if kind == Collective::ReduceScatterV { rank } else { 0 }) * 8;
                    (case.n, case.blocks) = (n, (0..n).map(block).collect());
                    let memories = memories(&case, &mut random, |random, _| exact(op, dtype, random));
                    run(backend, &case, &memories, dtype, Some(Reduction::Builtin(op)), &|inputs| fold_of(dtype)(op, inputs));
                }
            }
        });
    }
    sim.finish();
}
