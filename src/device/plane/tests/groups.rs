//! Several calls at once.

use super::*;
use crate::call::Kind;

/// A plane goes where its communicator goes.
const fn is_send<T: Send>() {}
const _: () = is_send::<DevicePlane>();

/// The cases of a group: native ones, composed ones and folds, of bytes.
fn cases(n: usize) -> Vec<(Case, Option<ReduceOp>)> {
    let mut random = Random(100 + n as u64);
    let kinds = [
        (Kind::AllReduce, Some(ReduceOp::Max)),
        (Kind::AllReduce, Some(ReduceOp::BitXor)),
        (Kind::ReduceScatterV, Some(ReduceOp::Max)),
        (Kind::Reduce, Some(ReduceOp::BitXor)),
        (Kind::AllToAllV, None),
        (Kind::AllToAll, None),
        (Kind::Gather, None),
    ];
    let case = |(kind, op)| {
        let mut case = Case::some(kind, kind == Kind::AllToAll, 1, 2000, &mut random);
        let blocks = (0..n).map(|rank| if kind == Kind::ReduceScatterV { 40 * rank } else { 333 }).collect();
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

/// One rank's memory for each case, and one for what goes around.
struct Share {
    memories: Vec<CudaSlice<u8>>,
    ring: CudaSlice<u8>,
    jobs: Vec<Job>,
    messages: Vec<Message>,
}

fn share(plane: &DevicePlane, cases: &[(Case, Option<ReduceOp>)], all: &[Vec<Vec<u8>>]) -> Share {
    let Ranks { me, n } = plane.ranks;
    let stream = plane.stream();
    let mut memories: Vec<_> = all.iter().map(|memories| upload(stream, &memories[me])).collect();
    let job = |((case, op), memory): (&(Case, Option<ReduceOp>), &mut CudaSlice<u8>)| {
        job_at(case, me, address(stream, memory), DType::U8, op.map(Reduction::Builtin))
    };
    let jobs = cases.iter().zip(&mut memories).map(job).collect();
    let mut ring = upload(stream, &[vec![me as u8; 64], vec![0xee; 64]].concat());
    let base = address(stream, &mut ring);
    let message = |peer, sends, address, bytes| Message { peer, sends, address, bytes, element: TypeTag::Scalar(DType::U8) };
    // Around the ring, to itself where it is alone, and nothing at all.
    let messages =
        vec![message((me + 1) % n, true, base, 64), message((me + n - 1) % n, false, base + 64, 64), message((me + 1) % n, true, base, 0)];
    Share { memories, ring, jobs, messages }
}

fn check(plane: &DevicePlane, share: &Share, cases: &[(Case, Option<ReduceOp>)], all: &[Vec<Vec<u8>>]) {
    let Ranks { me, n } = plane.ranks;
    for (((case, op), memories), memory) in cases.iter().zip(all).zip(&share.memories) {
        case.compare(me, &download(plane.stream(), memory), &case.expected(memories, &fold(*op))[me]);
    }
    assert_eq!(download(plane.stream(), &share.ring), [vec![me as u8; 64], vec![((me + n - 1) % n) as u8; 64]].concat());
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
        ranks(n, &options(), |plane| {
            let share = share(plane, &cases, &all);
            // SAFETY: the memory is as the cases say, and is read back on the same stream.
            unsafe { DevicePlane::enqueue_group(&[(plane, &share.jobs, &share.messages, plane.stream())], LONG) }.unwrap();
            check(plane, &share, &cases, &all);
        });
    }
    sim.finish();
}

#[test]
fn one_thread_may_drive_all_ranks() {
    let sim = Sim::new();
    for n in [2, 4] {
        let (cases, all) = (cases(n), all_memories(&cases(n)));
        let planes = several(n, &options());
        let shares: Vec<_> = planes.iter().map(|plane| share(plane, &cases, &all)).collect();
        let with_stream = planes.iter().zip(&shares);
        let parts: Vec<GroupPart<'_>> =
            with_stream.map(|(plane, share)| (plane, &share.jobs[..], &share.messages[..], plane.stream())).collect();
        // SAFETY: as above.
        unsafe { DevicePlane::enqueue_group(&parts, LONG) }.unwrap();
        planes.iter().zip(&shares).for_each(|(plane, share)| check(plane, share, &cases, &all));
        // Whoever ends a communicator waits for the others.
        on_threads(planes, drop);
    }
    sim.finish();
}

#[test]
fn messages_go_both_ways_at_once() {
    let sim = Sim::new();
    ranks(2, &options(), |plane| {
        let (me, stream) = (plane.comm().rank(), plane.stream());
        let mut memory = upload(stream, &[vec![me as u8; 100], vec![9; 100]].concat());
        let base = address(stream, &mut memory);
        let messages = [
            Message { peer: 1 - me, sends: true, address: base, bytes: 100, element: TypeTag::Scalar(DType::U8) },
            Message { peer: 1 - me, sends: false, address: base + 100, bytes: 100, element: TypeTag::Scalar(DType::U8) },
        ];
        // SAFETY: both lie in the memory, which is read back on the same stream.
        unsafe { DevicePlane::enqueue_group(&[(plane, &[], &messages, stream)], LONG) }.unwrap();
        assert_eq!(download(stream, &memory)[100..], [1 - me as u8; 100]);
    });
    sim.finish();
}
