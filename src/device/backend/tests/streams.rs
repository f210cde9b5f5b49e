//! Streams, graphs, groups, custom ops, and errors.

use cudarc::driver::sys::CUstreamCaptureMode;

use super::*;
use crate::call::Collective;
use crate::call::op::DeviceCode;

/// Returns a bitwise all-reduce in place, which goes through the backend's memory in slabs.
fn large(n: usize) -> Case {
    let mut case = Case::some(Collective::AllReduce, true, 1, 1, &mut Random(1));
    (case.n, case.root, case.blocks) = (n, 0, vec![300_000; n]);
    case
}

fn xor(inputs: &[Vec<u8>]) -> Vec<u8> {
    let join = |a: Vec<u8>, b: &Vec<u8>| a.iter().zip(b).map(|(a, b)| a ^ b).collect();
    inputs[1..].iter().fold(inputs[0].clone(), join)
}

fn by_xor() -> Option<Reduction> {
    Some(Reduction::Builtin(ReduceOp::BitXor))
}

fn bytes(case: &Case, seed: u64) -> Vec<Vec<u8>> {
    memories(case, &mut Random(seed), |random, _| vec![random.below(256) as u8])
}

#[test]
fn calls_on_several_streams_take_turns_with_the_backends_memory() {
    let sim = Sim::new();
    ranks(2, &Options { scratch_bytes: 64 << 10, ..options() }, |backend| {
        let me = backend.comm().rank();
        let streams: Vec<_> = (0..4).map(|_| backend.gpu().context.new_stream().unwrap()).collect();
        // Some end with a fold, behind NCCL's last transfer.
        let case = |(round, _): (usize, _)| {
            let kind = if round == 1 { Collective::ReduceScatter } else { Collective::AllReduce };
            Case { kind, blocks: vec![if round == 0 { 300_000 } else { 10_000 }; 2], ..large(2) }
        };
        let cases: Vec<_> = streams.iter().enumerate().map(case).collect();
        let inputs: Vec<_> = cases.iter().zip(130..).map(|(case, seed)| bytes(case, seed)).collect();
        let mut memories: Vec<_> = streams.iter().zip(&inputs).map(|(stream, inputs)| upload(stream, &inputs[me])).collect();
        for ((case, stream), memory) in cases.iter().zip(&streams).zip(&mut memories) {
            let job = job_at(case, me, address(stream, memory), DType::U8, by_xor());
            // SAFETY: the memory is as the case states, and is read back on the same stream.
            unsafe { backend.enqueue(&job, stream, LONG) }.unwrap();
        }
        for (((case, stream), memory), inputs) in cases.iter().zip(&streams).zip(&memories).zip(&inputs) {
            case.compare(me, &download(stream, memory), &case.expected(inputs, &xor)[me]);
        }
    });
    sim.finish();
}

#[test]
fn a_graph_replays_a_fold_in_slabs() {
    let sim = Sim::new();
    ranks(2, &Options { scratch_bytes: 64 << 10, ..options() }, |backend| {
        let (case, me, stream) = (large(2), backend.comm().rank(), backend.stream());
        let inputs = bytes(&case, 140);
        // Connections are made before a capture.
        run(backend, &case, &inputs, DType::U8, by_xor(), &xor);
        let mut memory = upload(stream, &inputs[me]);
        let job = job_at(&case, me, address(stream, &mut memory), DType::U8, by_xor());
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        // SAFETY: the memory outlives the graph.
        let queued = unsafe { backend.enqueue(&job, stream, LONG) };
        let code = DeviceCode::Ptx { image: "".into(), entry: "never".into() };
        let user = job_at(&case, me, job.memory.destination, DType::U8, Some(Reduction::User(code)));
        // SAFETY: as above.
        let refused = unsafe { backend.enqueue(&user, stream, LONG) }.unwrap_err();
        let flags = cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        queued.unwrap();
        assert!(refused.is_unsupported() && refused.to_string().contains("before the capture"), "{refused}");
        graph.launch().unwrap();
        case.compare(me, &download(stream, &memory), &case.expected(&inputs, &xor)[me]);
        // The XOR of two equal halves is zero.
        graph.launch().unwrap();
        let got = download(stream, &memory);
        assert!(got[(job.memory.destination - address(stream, &mut memory)) as usize..][..300_000].iter().all(|byte| *byte == 0));
    });
    sim.finish();
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let sim = Sim::new();
    ranks(2, &options(), |backend| {
        let other = driver::open(5).unwrap().context.new_stream().unwrap();
        let case = large(2);
        let job = job_at(&case, backend.comm().rank(), 4096, DType::U8, by_xor());
        // SAFETY: nothing is queued.
        let error = unsafe { backend.enqueue(&job, &other, LONG) }.unwrap_err().to_string();
        assert!(error.contains("device 5"), "{error}");
    });
    sim.finish();
}

#[test]
fn a_kernel_that_cannot_be_launched_ends_the_communicator_on_all_ranks() {
    let sim = Sim::new();
    ranks(2, &options(), |backend| {
        let (case, me, stream) = (large(2), backend.comm().rank(), backend.stream());
        let mut memory = upload(stream, &bytes(&case, 150)[me]);
        let job = job_at(&case, me, address(stream, &mut memory), DType::U8, by_xor());
        if me == 0 {
            simgpu::fail_call_of_this_thread("cuLaunchKernel", 1, 2);
        }
        // SAFETY: the memory is as the case states, and outlives the backend's communicator.
        let outcome = unsafe { backend.enqueue(&job, stream, Duration::from_secs(2)) };
        if me == 0 {
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("launching"), "{error}");
            // SAFETY: nothing is queued.
            let again = unsafe { backend.enqueue(&job, stream, LONG) }.unwrap_err();
            assert!(again.is_poisoned(), "{again}");
        } else {
            let ended = outcome.and_then(|()| backend.comm().wait_for(stream, &Deadline::after(LONG)));
            ended.unwrap_err();
        }
        let deadline = Deadline::after(LONG);
        while !backend.free.try_is_complete().unwrap() {
            assert!(!deadline.has_passed(), "the streams go on");
            std::thread::yield_now();
        }
        drop(memory);
    });
    sim.finish();
}

#[test]
fn the_native_path_of_a_call_makes_one_call_of_nccls() {
    let sim = Sim::new();
    ranks(2, &options(), |backend| {
        let (case, me, stream) = (large(2), backend.comm().rank(), backend.stream());
        let mut memory = upload(stream, &bytes(&case, 160)[me]);
        let job = job_at(&case, me, address(stream, &mut memory), DType::F32, Some(Reduction::Builtin(ReduceOp::PreMulSum(0.5))));
        for round in 1..=3 {
            // SAFETY: the memory is as the case states, and is read back on the same stream.
            unsafe { backend.enqueue(&job, stream, LONG) }.unwrap();
            assert_eq!(simgpu::nccl::calls_of_this_thread("ncclAllReduce"), round);
            assert_eq!(simgpu::nccl::calls_of_this_thread("ncclRedOpCreatePreMulSum"), 1);
            assert_eq!(simgpu::nccl::calls_of_this_thread("ncclGroupStart"), 0);
        }
        download(stream, &memory);
        assert!(backend.explain().contains("NCCL's own"), "{}", backend.explain());
    });
    sim.finish();
}

/// A backend can be sent to another thread with its communicator.
const fn is_send<T: Send>() {}
const _: () = is_send::<DeviceBackend>();

/// Returns the cases of a group: native ones, composed ones and folds, of bytes.
fn cases(n: usize) -> Vec<(Case, Option<ReduceOp>)> {
    let mut random = Random(100 + n as u64);
    let kinds = [
        (Collective::AllReduce, Some(ReduceOp::Max)),
        (Collective::AllReduce, Some(ReduceOp::BitXor)),
        (Collective::ReduceScatterV, Some(ReduceOp::Max)),
        (Collective::Reduce, Some(ReduceOp::BitXor)),
        (Collective::AllToAllV, None),
        (Collective::AllToAll, None),
        (Collective::Gather, None),
    ];
    let case = |(kind, op)| {
        let mut case = Case::some(kind, kind == Collective::AllToAll, 1, 2000, &mut random);
        let blocks = (0..n).map(|rank| if kind == Collective::ReduceScatterV { 40 * rank } else { 333 }).collect();
        (case.n, case.root, case.blocks) = (n, n - 1, blocks);
        case.pairs = (0..n).map(|rank| (0..n).map(|peer| 50 * (rank + peer)).collect()).collect();
        (case, op)
    };
    kinds.map(case).into()
}

fn fold(op: Option<ReduceOp>) -> impl Fn(&[Vec<u8>]) -> Vec<u8> {
    move |inputs| {
        let combine = |a: u8, b: u8| if op == Some(ReduceOp::Max) { a.max(b) } else { a ^ b };
        let join = |a: Vec<u8>, b: &Vec<u8>| a.iter().zip(b).map(|(a, b)| combine(*a, *b)).collect();
        inputs[1..].iter().fold(inputs[0].clone(), join)
    }
}

/// One rank's memory for each case, and one for the messages around the ring.
struct Share {
    memories: Vec<CudaSlice<u8>>,
    ring: CudaSlice<u8>,
    jobs: Vec<Job>,
    messages: Vec<Message>,
}

fn share(backend: &DeviceBackend, cases: &[(Case, Option<ReduceOp>)], all: &[Vec<Vec<u8>>]) -> Share {
    let Ranks { me, n } = backend.ranks;
    let stream = backend.stream();
    let mut memories: Vec<_> = all.iter().map(|memories| upload(stream, &memories[me])).collect();
    let job = |((case, op), memory): (&(Case, Option<ReduceOp>), &mut CudaSlice<u8>)| {
        job_at(case, me, address(stream, memory), DType::U8, op.map(Reduction::Builtin))
    };
    let jobs = cases.iter().zip(&mut memories).map(job).collect();
    let mut ring = upload(stream, &[vec![me as u8; 64], vec![0xee; 64]].concat());
    let base = address(stream, &mut ring);
    let message = |peer, sends, address, bytes| Message { peer, sends, address, bytes, element: TypeTag::Scalar(DType::U8) };
    // Around the ring, to itself if it is alone, and an empty one.
    let messages =
        vec![message((me + 1) % n, true, base, 64), message((me + n - 1) % n, false, base + 64, 64), message((me + 1) % n, true, base, 0)];
    Share { memories, ring, jobs, messages }
}

fn check(backend: &DeviceBackend, share: &Share, cases: &[(Case, Option<ReduceOp>)], all: &[Vec<Vec<u8>>]) {
    let Ranks { me, n } = backend.ranks;
    for (((case, op), memories), memory) in cases.iter().zip(all).zip(&share.memories) {
        case.compare(me, &download(backend.stream(), memory), &case.expected(memories, &fold(*op))[me]);
    }
    assert_eq!(download(backend.stream(), &share.ring), [vec![me as u8; 64], vec![((me + n - 1) % n) as u8; 64]].concat());
}

fn all_memories(cases: &[(Case, Option<ReduceOp>)]) -> Vec<Vec<Vec<u8>>> {
    let mut random = Random(110);
    cases.iter().map(|(case, _)| memories(case, &mut random, |random, _| vec![random.below(256) as u8])).collect()
}

#[test]
fn a_group_does_collectives_and_messages_together() {
    let sim = Sim::new();
    for n in [1, 2, 3] {
        let (cases, all) = (cases(n), all_memories(&cases(n)));
        ranks(n, &options(), |backend| {
            let share = share(backend, &cases, &all);
            // SAFETY: the memory is as the case states, and is read back on the same stream.
            unsafe { DeviceBackend::enqueue_group(&[(backend, &share.jobs, &share.messages, backend.stream())], LONG) }.unwrap();
            check(backend, &share, &cases, &all);
        });
    }
    sim.finish();
}

#[test]
fn one_thread_may_drive_all_ranks() {
    let sim = Sim::new();
    for n in [2, 4] {
        let (cases, all) = (cases(n), all_memories(&cases(n)));
        let backends = several(n, &options());
        let shares: Vec<_> = backends.iter().map(|backend| share(backend, &cases, &all)).collect();
        let with_stream = backends.iter().zip(&shares);
        let parts: Vec<GroupPart<'_>> =
            with_stream.map(|(backend, share)| (backend, &share.jobs[..], &share.messages[..], backend.stream())).collect();
        // SAFETY: as above.
        unsafe { DeviceBackend::enqueue_group(&parts, LONG) }.unwrap();
        backends.iter().zip(&shares).for_each(|(backend, share)| check(backend, share, &cases, &all));
        // A thread that ends a communicator waits for the others.
        on_threads(backends, drop);
    }
    sim.finish();
}

#[test]
fn messages_go_both_ways_at_once() {
    let sim = Sim::new();
    ranks(2, &options(), |backend| {
        let (me, stream) = (backend.comm().rank(), backend.stream());
        let mut memory = upload(stream, &[vec![me as u8; 100], vec![9; 100]].concat());
        let base = address(stream, &mut memory);
        let messages = [
            Message { peer: 1 - me, sends: true, address: base, bytes: 100, element: TypeTag::Scalar(DType::U8) },
            Message { peer: 1 - me, sends: false, address: base + 100, bytes: 100, element: TypeTag::Scalar(DType::U8) },
        ];
        // SAFETY: both are inside the memory, which is read back on the same stream.
        unsafe { DeviceBackend::enqueue_group(&[(backend, &[], &messages, stream)], LONG) }.unwrap();
        assert_eq!(download(stream, &memory)[100..], [1 - me as u8; 100]);
    });
    sim.finish();
}

/// A custom kernel: three quarters of the fold so far, rounded down, plus the next rank's byte. The order changes the
/// result.
const IMAGE: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry mix(.param .u64 mix_0, .param .u64 mix_1, .param .u64 mix_2, .param .u32 mix_3,
                    .param .u32 mix_4, .param .u64 mix_5, .param .u64 mix_6, .param .u32 mix_7)
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [mix_0];
    ld.param.u64 %rd2, [mix_1];
    ld.param.u64 %rd3, [mix_2];
    ld.param.u32 %r1, [mix_3];
    ld.param.u32 %r2, [mix_4];
    ld.param.u64 %rd4, [mix_5];
    ld.param.u64 %rd5, [mix_6];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    mov.u32 %r7, %nctaid.x;
    mul.lo.u32 %r8, %r7, %r4;
    cvt.u64.u32 %rd6, %r6;
    cvt.u64.u32 %rd7, %r8;
ELEMENT:
    setp.ge.u64 %p1, %rd6, %rd5;
    @%p1 bra DONE;
    mov.u32 %r9, 0;
    mov.u32 %r10, 0;
    mov.u64 %rd8, %rd1;
RANK:
    setp.eq.u32 %p2, %r10, %r1;
    selp.b64 %rd9, %rd3, %rd8, %p2;
    add.u64 %rd9, %rd9, %rd6;
    ld.global.u8 %r11, [%rd9];
    mul.lo.u32 %r9, %r9, 3;
    shr.u32 %r9, %r9, 2;
    add.u32 %r9, %r9, %r11;
    and.b32 %r9, %r9, 255;
    add.u64 %rd8, %rd8, %rd2;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, %r2;
    @%p3 bra RANK;
    add.u64 %rd10, %rd4, %rd6;
    st.global.u8 [%rd10], %r9;
    add.u64 %rd6, %rd6, %rd7;
    bra ELEMENT;
DONE:
    ret;
}
";

fn mix() -> DeviceCode {
    DeviceCode::Ptx { image: IMAGE.into(), entry: "mix".into() }
}

fn mixed(inputs: &[Vec<u8>]) -> Vec<u8> {
    let element = |index: usize| inputs.iter().fold(0_u32, |sum, input| (sum * 3 / 4 + u32::from(input[index])) & 255) as u8;
    (0..inputs[0].len()).map(element).collect()
}

/// Returns a case of a kind on blocks of `bytes`.
fn case(kind: Collective, n: usize, bytes: usize) -> Case {
    let mut case = Case::some(kind, true, 1, 1, &mut Random(1));
    (case.n, case.root, case.blocks) = (n, 0, vec![bytes; n]);
    case
}

#[test]
fn a_kernel_of_the_callers_folds_in_rank_order() {
    let sim = Sim::new();
    for n in [1, 2, 3] {
        ranks(n, &Options { scratch_bytes: 32 << 10, ..options() }, |backend| {
            let mut random = Random(120);
            for bytes in [5, 1000, 150_000] {
                for kind in [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter] {
                    let case = case(kind, n, bytes);
                    let memories = memories(&case, &mut random, |random, _| vec![random.below(256) as u8]);
                    run(backend, &case, &memories, DType::U8, Some(Reduction::User(mix())), &|inputs: &[Vec<u8>]| match inputs {
                        [one] => one.clone(),
                        inputs => mixed(inputs),
                    });
                }
            }
        });
    }
    sim.finish();
}

#[test]
fn what_cannot_be_loaded_says_why_and_leaves_the_communicator_usable() {
    let sim = Sim::new();
    ranks(2, &options(), |backend| {
        let case = case(Collective::AllReduce, 2, 64);
        let mut random = Random(121);
        let memories = memories(&case, &mut random, |random, _| vec![random.below(256) as u8]);
        let stream = backend.stream();
        let mut memory = upload(stream, &memories[backend.comm().rank()]);
        let base = address(stream, &mut memory);
        let attempt = |code| {
            let job = job_at(&case, backend.comm().rank(), base, DType::U8, Some(Reduction::User(code)));
            // As ranks do at the first use, before they agree that all can.
            backend.load(&job, stream).unwrap_err().to_string()
        };
        let absent = attempt(DeviceCode::Ptx { image: IMAGE.into(), entry: "other".into() });
        assert!(absent.contains("\"other\""), "{absent}");
        let broken = attempt(DeviceCode::Ptx { image: IMAGE.replace("selp", "nonsense").into(), entry: "mix".into() });
        assert!(broken.contains("\"mix\"") && broken.contains("loading"), "{broken}");
        let zero = attempt(DeviceCode::Ptx { image: "\0".into(), entry: "mix".into() });
        assert!(zero.contains("zero byte"), "{zero}");
        let expression = attempt(DeviceCode::Expression("a[0]".into()));
        assert!(expression.contains("\"[\""), "{expression}");
        run(backend, &case, &memories, DType::U8, Some(Reduction::User(mix())), &|inputs: &[Vec<u8>]| mixed(inputs));
    });
    let reports = simgpu::reports();
    assert!(!reports.is_empty() && reports.iter().all(|report| report.contains("nonsense")), "{reports:?}");
    sim.finish();
}

#[test]
fn an_expression_folds_in_rank_order_or_says_that_there_is_no_compiler() {
    let sim = Sim::new();
    // SAFETY: opening the library runs its initialisers, which have no preconditions.
    let is_there = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    ranks(3, &options(), |backend| {
        let case = case(Collective::AllReduce, 3, 4000);
        let values = |random: &mut Random, _| (random.below(2000) as f32 - 1000.0).to_ne_bytes().to_vec();
        let memories = memories(&case, &mut Random(122), values);
        let reduction = Reduction::User(DeviceCode::Expression("fabsf(b) > fabsf(a) ? b : a * 0.5f".into()));
        if is_there {
            let number = |input: &[u8], at: usize| f32::from_ne_bytes(input[4 * at..4 * at + 4].try_into().unwrap());
            let combine = |a: f32, b: f32| if b.abs() > a.abs() { b } else { a * 0.5 };
            let fold = |inputs: &[Vec<u8>]| {
                let element = |at| inputs[1..].iter().fold(number(&inputs[0], at), |a, b| combine(a, number(b, at)));
                (0..inputs[0].len() / 4).flat_map(|at| element(at).to_ne_bytes()).collect::<Vec<_>>()
            };
            let case = Case { element_bytes: 4, ..case };
            run(backend, &case, &memories, DType::F32, Some(reduction), &fold);
        } else {
            let (stream, me) = (backend.stream(), backend.comm().rank());
            let mut memory = upload(stream, &memories[me]);
            let job = job_at(&case, me, address(stream, &mut memory), DType::F32, Some(reduction));
            // SAFETY: nothing is queued.
            let error = unsafe { backend.enqueue(&job, stream, LONG) }.unwrap_err();
            assert!(error.is_unsupported() && error.to_string().contains("with_ptx"), "{error}");
        }
    });
    sim.finish();
}
