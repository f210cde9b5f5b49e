//! Whole runs, with ranks as threads.

#![expect(unsafe_code, reason = "the engine works on raw memory")]

mod links;
mod plans;
mod trouble;

use std::sync::Arc;
use std::time::Duration;

use self::links::{Counting, Mesh, chaos, meshes, sockets};
use super::{CheckedPlan, Engine, Execution, Memory};
use crate::base::deadline::Deadline;
use crate::base::random::Random;
use crate::call::element::{DType, TypeTag};
use crate::call::{Call, Collective};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::fold::Fold;
use crate::host::health::Health;
use crate::host::link::ByteLink;
use crate::host::plan::{Action, Plan};

/// Returns an ordinary call.
pub(crate) fn call(sequence: u64) -> Call {
    Call { kind: Collective::AllReduce, op: 1, element: TypeTag::Scalar(DType::U64), count: 4, root: None, counts_hash: 0, sequence }
}

/// Wrapping sums of `u64`.
struct Sum;

impl Fold for Sum {
    fn element_bytes(&self) -> usize {
        8
    }

    fn is_commutative(&self) -> bool {
        true
    }

    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize, _last: bool) {
        assert!(bytes.is_multiple_of(8) && into.addr().is_multiple_of(8));
        for index in 0..bytes / 8 {
            // SAFETY: the caller promises aligned elements.
            let sum = inputs.iter().fold(0_u64, |sum, input| sum.wrapping_add(unsafe { input.cast::<u64>().add(index).read() }));
            // SAFETY: the caller promises as many aligned elements at the destination, to be written.
            unsafe { into.cast::<u64>().add(index).write(sum) };
        }
    }
}

/// Passes plain data as bytes to `Memory`.
fn memory(source: &[u64], source_len: usize, destination: &mut [u64], destination_len: usize) -> Memory<'static> {
    assert!(source_len <= source.len() * 8 && destination_len <= destination.len() * 8);
    // SAFETY: checked above; every test keeps its vectors until the run is over.
    unsafe { Memory::new(source.as_ptr().cast(), source_len, destination.as_mut_ptr().cast(), destination_len, None) }
}

/// One rank of a test.
struct Rank<K> {
    engine: Engine,
    links: Mesh<K>,
    health: Arc<Health>,
    participants: Vec<usize>,
}

impl<K: ByteLink> Rank<K> {
    fn all(meshes: Vec<Mesh<K>>) -> Vec<Self> {
        let size = meshes.len();
        let make = |(rank, links)| Self {
            engine: Engine::new(rank, size, true),
            links,
            health: Arc::default(),
            participants: (0..size).collect(),
        };
        meshes.into_iter().enumerate().map(make).collect()
    }

    fn run_within(&mut self, limit: Duration, plan: &Plan, call: &Call, memory: Memory) -> Result<(), Interrupted> {
        self.run_with(limit, plan, call, memory, &Sum)
    }

    fn run_with(&mut self, limit: Duration, plan: &Plan, call: &Call, memory: Memory, fold: &dyn Fold) -> Result<(), Interrupted> {
        let deadline = Deadline::after(limit);
        let request = Execution {
            plan: &CheckedPlan::new(plan.clone()),
            participants: &self.participants,
            memory,
            call,
            fold: Some(fold),
            deadline: &deadline,
            health: &self.health,
            recorder: &crate::flight::Flight::default(),
            interrupted: &mut || None,
        };
        self.engine.run(request, &mut self.links)
    }

    fn run(&mut self, plan: &Plan, call: &Call, memory: Memory) -> Result<(), Interrupted> {
        self.run_within(Duration::from_secs(20), plan, call, memory)
    }
}

/// Runs `body` for every rank on its own thread. The links stay open until all are done.
fn on_threads<K: ByteLink + Send, T: Send>(ranks: Vec<Rank<K>>, body: impl Fn(usize, &mut Rank<K>) -> T + Sync) -> Vec<T> {
    let (body, mut ranks) = (&body, ranks);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().enumerate().map(|(index, rank)| scope.spawn(move || body(index, rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// Returns numbers that no other rank has.
fn numbers(rank: usize, count: usize) -> Vec<u64> {
    (0..count as u64).map(|index| ((rank as u64 + 1) << 40) + index * 7).collect()
}

fn is_exact_over<K: ByteLink + Send>(meshes: impl Fn(usize) -> Vec<Mesh<K>>) {
    // Lengths around the size of the input buffer, a longer one, and zero.
    for &len in if cfg!(miri) { &[0, 1, 4097][..] } else { &[0, 1, 4095, 4096, 4097, 70_001] } {
        on_threads(Rank::all(meshes(2)), |rank, this| {
            let (mine, theirs, mut got) = (numbers(rank, 9000), numbers(1 - rank, 9000), vec![0; 9000]);
            assert_eq!(this.run(&plans::exchange(rank, len), &call(1), memory(&mine, len, &mut got, len)), Ok(()));
            let bytes = |numbers: &[u64]| numbers.iter().flat_map(|number| number.to_ne_bytes()).take(len).collect::<Vec<_>>();
            assert_eq!(bytes(&got), bytes(&theirs));
        });
    }
    on_threads(Rank::all(meshes(3)), |rank, this| {
        for (sequence, count) in [(1, 3), (2, 99), (3, if cfg!(miri) { 600 } else { 3000 })] {
            let (mine, mut got) = (numbers(rank, count), vec![0; count]);
            let plan = plans::ring(rank, 3, count / 3 * 8);
            assert_eq!(this.run(&plan, &call(sequence), memory(&mine, count * 8, &mut got, count * 8)), Ok(()));
            let all = [numbers(0, count), numbers(1, count), numbers(2, count)];
            assert!((0..count).all(|index| got[index] == all[0][index] + all[1][index] + all[2][index]));
        }
    });
}

#[test]
fn results_are_exact_over_rings_that_misbehave() {
    for seed in [0x5eed_0002, 0x5eed_0003, 0x5eed_0004].into_iter().take(if cfg!(miri) { 1 } else { 3 }) {
        println!("seed {seed:#x}");
        is_exact_over(|size| chaos(size, seed));
    }
}

#[test]
fn results_are_exact_over_sockets() {
    is_exact_over(sockets);
}

/// Thirteen ranks exchange parts of many lengths, some of them empty.
#[test]
fn thirteen_ranks_trade_parts_of_any_length() {
    const SIZE: usize = 13;
    let len = |from: usize, to: usize| (from * 5 + to * 3) % 7 * 601;
    let lens: Vec<Vec<usize>> = (0..SIZE).map(|from| (0..SIZE).map(|to| len(from, to)).collect()).collect();
    let content = |from: usize, to: usize| (0..len(from, to)).map(move |index| (from * 31 + to * 17 + index) as u8);
    on_threads(Rank::all(chaos(SIZE, 0x5eed_0005)), |rank, this| {
        let mine: Vec<u8> = (0..SIZE).flat_map(|to| content(rank, to)).collect();
        let theirs: Vec<u8> = (0..SIZE).flat_map(|from| content(from, rank)).collect();
        let mut got = vec![0_u8; theirs.len()];
        // SAFETY: both vectors live until the run is over.
        let memory = unsafe { Memory::new(mine.as_ptr(), mine.len(), got.as_mut_ptr(), got.len(), None) };
        assert_eq!(this.run(&plans::all_to_all(rank, &lens), &call(1), memory), Ok(()));
        assert_eq!(got, theirs);
    });
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_entered() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    const SIZE: usize = 5;
    let entered = AtomicUsize::new(0);
    on_threads(Rank::all(sockets(SIZE)), |rank, this| {
        for round in 1..=if cfg!(miri) { 3 } else { 50 } {
            entered.fetch_add(1, Ordering::SeqCst);
            assert_eq!(this.run(&plans::barrier(rank, SIZE), &call(round), memory(&[], 0, &mut [], 0)), Ok(()));
            assert!(entered.load(Ordering::SeqCst) >= SIZE * round as usize);
        }
    });
}

/// Three megabytes are longer than one message and than a socket buffer, and take a dozen pieces of a fold.
#[test]
fn what_is_longer_than_a_message_and_a_piece_goes_in_parts() {
    const COUNT: usize = 3 * 131_072 + 3;
    on_threads(Rank::all(sockets(3)), |rank, this| {
        let (mine, mut got) = (numbers(rank, COUNT), vec![0; COUNT]);
        let plan = plans::ring(rank, 3, COUNT / 3 * 8);
        assert_eq!(this.run(&plan, &call(1), memory(&mine, COUNT * 8, &mut got, COUNT * 8)), Ok(()));
        let all = [numbers(0, COUNT), numbers(1, COUNT), numbers(2, COUNT)];
        assert!((0..COUNT).all(|index| got[index] == all[0][index] + all[1][index] + all[2][index]));
    });
    on_threads(Rank::all(sockets(2)), |rank, this| {
        let (mine, mut got) = (numbers(rank, COUNT), vec![0; COUNT]);
        assert_eq!(this.run(&plans::exchange(rank, COUNT * 8), &call(1), memory(&mine, COUNT * 8, &mut got, COUNT * 8)), Ok(()));
        assert_eq!(got, numbers(1 - rank, COUNT));
    });
}

/// Rank 0 only sends, so it completes many calls before the others have done the first.
#[test]
fn a_rank_may_run_ahead() {
    use self::plans::{destination, plan, source, step};
    use crate::host::plan::Action;
    on_threads(Rank::all(sockets(3)), |rank, this| {
        for sequence in 1..=if cfg!(miri) { 20 } else { 200 } {
            let action = |peer| match rank {
                0 => Action::Send { to: peer, from: source(0, 24) },
                _ => Action::Receive { from: 0, into: destination(0, 24) },
            };
            // The last rank first receives from its neighbour, and only then may read what rank 0 sent long before.
            let plan = match rank {
                0 => plan(vec![step(action(1), &[]), step(action(2), &[])], 0),
                1 => plan(vec![step(action(0), &[]), step(Action::Send { to: 2, from: destination(0, 24) }, &[0])], 0),
                _ => plan(vec![step(Action::Receive { from: 1, into: destination(0, 24) }, &[]), step(action(0), &[0])], 0),
            };
            let (mine, mut got) = ([sequence; 3], [0; 3]);
            assert_eq!(this.run(&plan, &call(sequence), memory(&mine, 24, &mut got, 24)), Ok(()), "rank {rank} call {sequence}");
            assert!(rank == 0 || got == mine);
        }
    });
}

#[test]
fn a_small_message_is_one_write_and_at_most_one_read() {
    const CALLS: usize = if cfg!(miri) { 30 } else { 100 };
    on_threads(Rank::all(meshes(2, |_, _| Some(Counting::pair()))), |rank, this| {
        for sequence in 1..=CALLS as u64 {
            let (mine, mut got) = ([sequence; 8], [0; 8]);
            assert_eq!(this.run(&plans::exchange(rank, 64), &call(sequence), memory(&mine, 64, &mut got, 64)), Ok(()));
            assert_eq!(got, mine);
        }
        let link = this.links.0[1 - rank].as_ref().expect("a link");
        assert_eq!(link.writes, CALLS);
        assert!(link.reads <= CALLS, "{}", link.reads);
    });
}

#[test]
fn messages_that_can_go_on_are_one_write_together() {
    const PARTS: usize = 5;
    on_threads(Rank::all(meshes(2, |_, _| Some(Counting::pair()))), |rank, this| {
        let (mine, mut got) = (numbers(rank, 5 * PARTS), [0; 5 * PARTS]);
        let part = |index: usize| (index * 40, if index == 2 { 0 } else { 40 });
        let send = |index| Action::Send { to: 1 - rank, from: plans::source(part(index).0, part(index).1) };
        let receive = |index| Action::Receive { from: 1 - rank, into: plans::destination(part(index).0, part(index).1) };
        let steps = (0..PARTS).map(send).chain((0..PARTS).map(receive)).map(|action| plans::step(action, &[]));
        let bytes = 40 * PARTS;
        assert_eq!(this.run(&plans::plan(steps.collect(), 0), &call(1), memory(&mine, bytes, &mut got, bytes)), Ok(()));
        let expected: Vec<u64> = numbers(1 - rank, 5 * PARTS).iter().enumerate().map(|(at, x)| if at / 5 == 2 { 0 } else { *x }).collect();
        assert_eq!(got[..], expected);
        assert_eq!(this.links.0[1 - rank].as_ref().expect("a link").writes, 1);
    });
}
