//! The backend's memory, large means, and buffers that begin anywhere.

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::*;
use crate::base::tuning::device_folds::{FIRST_SCRATCH_BYTES, STAGED_BYTES};

/// Returns offsets of source and destination from a multiple of 16: each remainder of either, together and apart.
fn shifts(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..16).step_by(size).flat_map(move |from| [(from, from), (from, (7 * from + 3 * size) % 16)])
}

#[test]
fn folds_give_the_bits_of_the_host_wherever_buffers_begin() {
    let sim = Sim::new();
    let reproducible = Options { reproducible: true, ..options() };
    ranks(2, &reproducible, |backend| {
        let seed = 160;
        let mut random = Random(seed);
        let cases = [
            (ReduceOp::BitXor, DType::U8),
            (ReduceOp::Avg, DType::F16),
            (ReduceOp::Sum, DType::F32),
            (ReduceOp::PreMulSum(SCALAR), DType::F32),
            (ReduceOp::Sum, DType::F64),
        ];
        for (op, dtype) in cases {
            let size = dtype.size_bytes();
            for (shifts, kind) in shifts(size).zip(REDUCING.into_iter().cycle()) {
                let mut case = Case::some(kind, shifts.0 == shifts.1 && random.below(2) == 0, size, 1, &mut random);
                // Enough for each rank to be copied to where the device reads fast.
                let share = STAGED_BYTES + 48 + size * random.below(100);
                let bytes = if matches!(kind, Collective::AllReduce | Collective::Reduce) { 2 * share } else { share };
                (case.n, case.root, case.blocks, case.shifts) = (2, case.root % 2, vec![bytes; 2], shifts);
                let element = |random: &mut Random, _| if dtype.is_float() { inexact(op, dtype, random) } else { exact(op, dtype, random) };
                let memories = memories(&case, &mut random, element);
                println!("{op} of {dtype}, seed {seed}: {case:?}");
                run(backend, &case, &memories, dtype, Some(Reduction::Builtin(op)), &|inputs| fold_of(dtype)(op, inputs));
            }
        }
    });
    sim.finish();
}

#[test]
fn a_large_mean_by_a_sum_gives_the_bits_of_the_host_and_overflows_where_a_sum_does() {
    let sim = Sim::new();
    let mut backends = several(8, &Options { common: CommonDevice { has_switch: true, ..options().common }, ..options() });
    backends.iter_mut().for_each(|backend| backend.capabilities.divides_from = Some(1024));
    on_threads(backends, |backend| {
        let seed = 170;
        let mut random = Random(seed);
        for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F64] {
            for (kind, blocks) in REDUCING.into_iter().flat_map(|kind| [(kind, 8), (kind, 1024)]) {
                let mut case = Case::some(kind, random.below(2) == 0, dtype.size_bytes(), 1, &mut random);
                (case.n, case.root, case.blocks) = (8, case.root % 8, vec![blocks; 8]);
                let memories = memories(&case, &mut random, |random, _| exact(ReduceOp::Avg, dtype, random));
                println!("{dtype}, seed {seed}: {case:?}");
                let fold = |inputs: &[Vec<u8>]| fold_of(dtype)(ReduceOp::Avg, inputs);
                run(&backend, &case, &memories, dtype, Some(Reduction::Builtin(ReduceOp::Avg)), &fold);
            }
        }
        // An overflow shows which of the two ways a call took: for a small one NCCL divides before it adds.
        for (bytes, mean) in [(1020, 1e38_f32), (1024, f32::INFINITY)] {
            let mut case = Case::some(Collective::AllReduce, true, 4, 1, &mut random);
            (case.n, case.blocks) = (8, vec![bytes; 8]);
            let memories = memories(&case, &mut random, |_, _| 1e38_f32.to_ne_bytes().to_vec());
            let fold = |inputs: &[Vec<u8>]| mean.to_ne_bytes().repeat(inputs[0].len() / 4);
            run(&backend, &case, &memories, DType::F32, Some(Reduction::Builtin(ReduceOp::Avg)), &fold);
        }
    });
    sim.finish();
}

/// Returns an in-place exchange of every block with every rank, in more memory than a backend has from the start.
fn large_swap() -> Case {
    let mut case = Case::some(Collective::AllToAll, true, 1, 1, &mut Random(1));
    (case.n, case.root, case.blocks) = (2, 0, vec![FIRST_SCRATCH_BYTES / 2 + 1000; 2]);
    case
}

#[test]
fn memory_for_large_calls_comes_with_the_first_of_them_and_once() {
    let sim = Sim::new();
    let most = 3 * FIRST_SCRATCH_BYTES;
    ranks(2, &Options { scratch_bytes: most, ..options() }, |backend| {
        let (case, me, stream) = (large_swap(), backend.comm().rank(), backend.stream());
        let inputs = memories(&case, &mut Random(180), |random, _| vec![random.below(256) as u8]);
        let small = Case { blocks: vec![1000; 2], ..case.clone() };
        let little = memories(&small, &mut Random(181), |random, _| vec![random.below(256) as u8]);
        run(backend, &small, &little, DType::U8, None, &|_| unreachable!("nothing is folded"));
        assert_eq!(backend.scratch.allocated(), FIRST_SCRATCH_BYTES);
        let mut memory = upload(stream, &inputs[me]);
        let job = job_at(&case, me, address(stream, &mut memory), DType::U8, None);
        assert!(backend.first_use(&job).is_any() && !backend.first_use(&job_at(&small, me, 4096, DType::U8, None)).is_any());
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        // SAFETY: refused before anything is queued.
        let refused = unsafe { backend.enqueue(&job, stream, LONG) }.unwrap_err();
        stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap();
        assert!(refused.is_unsupported() && refused.to_string().contains("before the capture"), "{refused}");
        assert_eq!(backend.scratch.allocated(), FIRST_SCRATCH_BYTES);
        for _ in 0..2 {
            run(backend, &case, &inputs, DType::U8, None, &|_| unreachable!("nothing is folded"));
            assert_eq!(backend.scratch.allocated(), FIRST_SCRATCH_BYTES + most);
            assert!(!backend.first_use(&job).is_any());
        }
        // A resource that some rank lacks is agreed on again, and this rank has it already.
        backend.unload(&job, FirstUse { kernel: false, memory: true });
        assert!(backend.first_use(&job).is_any());
        backend.load(&job, stream).unwrap();
        assert!(!backend.first_use(&job).is_any() && backend.scratch.allocated() == FIRST_SCRATCH_BYTES + most);
    });
    sim.finish();
}

#[test]
fn what_a_call_may_need_is_no_less_than_what_it_needs() {
    let sim = Sim::new();
    let options = Options { scratch_bytes: 3 * FIRST_SCRATCH_BYTES, reproducible: true, ..options() };
    ranks(3, &options, |backend| {
        let seed = 190;
        let (mut random, mut large) = (Random(seed), 0);
        let kinds =
            [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter, Collective::ReduceScatterV, Collective::AllToAll];
        for kind in kinds.into_iter().cycle().take(2000) {
            let most = 1 << random.below(24);
            let blocks = [(); 3].map(|()| 4 * random.below(most));
            let blocks = if kind == Collective::ReduceScatterV { blocks } else { [blocks[0]; 3] };
            let case = Case { n: 3, root: 1, blocks: blocks.into(), ..Case::some(kind, true, 4, 1, &mut random) };
            let (op, dtype) = [(ReduceOp::BitXor, DType::I32), (ReduceOp::PreMulSum(SCALAR), DType::F32)][random.below(2)];
            let reduction = (kind != Collective::AllToAll).then_some(Reduction::Builtin(op));
            let job = job_at(&case, backend.comm().rank(), 4096, dtype, reduction);
            assert!(backend.room(&job) <= backend.most_room(&job), "{op} of {dtype}, seed {seed}: {case:?}");
            large += usize::from(backend.lacks_memory(&job));
        }
        assert!((100..1900).contains(&large), "{large} calls are large");
    });
    sim.finish();
}

#[test]
fn memory_that_one_rank_lacks_for_a_call_that_nobody_compared_ends_the_communicator() {
    let sim = Sim::new();
    ranks(2, &Options { scratch_bytes: 3 * FIRST_SCRATCH_BYTES, ..options() }, |backend| {
        let (case, me, stream) = (large_swap(), backend.comm().rank(), backend.stream());
        let mut memory = upload(stream, &vec![0; case.memory_len()]);
        let job = job_at(&case, me, address(stream, &mut memory), DType::U8, None);
        if me == 1 {
            simgpu::fail_call_of_this_thread("cuMemAlloc_v2", 1, 2);
        }
        // SAFETY: the memory is there until the stream has completed its work.
        let queued = unsafe { backend.enqueue(&job, stream, Duration::from_secs(2)) };
        if me == 1 {
            assert!(matches!(queued, Err(Error::Cuda { code: 2, .. })), "{queued:?}");
        }
        let deadline = Deadline::after(LONG);
        while backend.comm().failure().is_none() {
            assert!(!deadline.has_passed(), "rank {me} works on");
            std::thread::yield_now();
        }
        stream.synchronize().unwrap();
    });
    drop(sim);
}

#[test]
fn the_stream_of_calls_comes_before_the_one_of_folds() {
    let sim = Sim::new();
    ranks(1, &options(), |backend| {
        let priority = |stream: &CudaStream| {
            let mut priority = 0;
            // SAFETY: the stream is alive, and the answer is written to our variable.
            unsafe { sys::cuStreamGetPriority(stream.cu_stream(), &mut priority) }.result().unwrap();
            priority
        };
        // Lower numbers have priority.
        assert!(priority(&backend.stream) < priority(&backend.side) && priority(&backend.exchange) < priority(&backend.side));
    });
    sim.finish();
}
