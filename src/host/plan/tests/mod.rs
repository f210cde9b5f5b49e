//! Every plan of every collective, checked against an independent oracle, the guarantees of the module, and its
//! permitted cost.

mod proof;
mod simulator;

use super::all_gather::all_gather;
use super::all_to_all::{all_to_all, all_to_all_v};
use super::builder::{Builder, barrier};
use super::reduce::{all_reduce, reduce, reduce_scatter};
use super::rooted::{broadcast, gather, scatter};
use super::{Action, Blocks, Plan};
use crate::base::random::Random;
use crate::base::tuning::plan::{CARRIED_BYTES, EXCHANGES_IN_FLIGHT, FLAT_BYTES, RING_IN_FLIGHT, STAR_BYTES};
use crate::call::algorithm::Algorithm;
use proof::{Claims, prove, sent_bytes};
use simulator::{Op, Rank, simulate};

/// Numbers of ranks to test.
const WORLDS: &[usize] = if cfg!(miri) { &[1, 2, 3] } else { &[1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17] };

/// Every rank must hear from every other.
fn everyone(_: usize, _: usize) -> bool {
    true
}

/// Only the root must hear from every rank: the others receive nothing.
fn root_alone(me: usize, root: usize) -> bool {
    me == root
}

/// Proves the plans and runs them under a few schedules, which must agree. Returns the destinations.
fn run(what: &str, ranks: &[Rank], op: Op, claims: Claims, seed: u64) -> Vec<Vec<Option<u8>>> {
    // Prints the case if an assertion fails further down.
    let context = Context(what, seed);
    prove(ranks, claims);
    let moved: usize = ranks.iter().map(sent_bytes).sum();
    let tight = if moved < 3000 { 1 } else { 61 };
    let results = simulate(ranks, op, claims.element, tight, seed);
    assert_eq!(results, simulate(ranks, op, claims.element, 1 << 16, !seed), "{what}: schedules differ");
    std::mem::forget(context);
    results
}

/// A guard that prints the case when it is dropped during the unwinding of a failed assertion.
struct Context<'a>(&'a str, u64);

impl Drop for Context<'_> {
    fn drop(&mut self) {
        eprintln!("failed: {}, seed {}", self.0, self.1);
    }
}

/// Returns these bytes, all marked as written.
fn written(bytes: &[u8]) -> Vec<Option<u8>> {
    bytes.iter().copied().map(Some).collect()
}

/// Returns the ranks' contributions.
fn sources(n: usize, len: impl Fn(usize) -> usize, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(seed);
    (0..n).map(|rank| random.bytes(len(rank))).collect()
}

/// Returns the plans of a collective, one for each rank.
fn ranks(
    sources: &[Vec<u8>],
    plan: impl Fn(usize) -> Plan,
    destination_len: impl Fn(usize) -> usize,
    in_place: impl Fn(usize) -> Option<isize>,
) -> Vec<Rank> {
    let rank = |(me, source): (usize, &Vec<u8>)| Rank {
        plan: plan(me),
        source: source.clone(),
        destination_len: destination_len(me),
        in_place: in_place(me),
    };
    sources.iter().enumerate().map(rank).collect()
}

/// Returns the fold of all contributions at once, in rank order. A single rank folds nothing.
fn oracle(op: Op, sources: &[Vec<u8>], element: usize) -> Vec<u8> {
    let inputs: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
    if inputs.len() == 1 { inputs[0].to_vec() } else { op.fold(&inputs, element, true) }
}

/// Returns shapes of a reduction: element count, element size, segment, in place or not. All of them occur at every
/// number of ranks.
fn shapes(n: usize) -> Vec<(usize, usize, usize, bool)> {
    let counts = [0, 1, n - 1, n, 2 * n + 1, 67, 300];
    let sizes = [(4, 16), (12, 100), (1, 7), (4, 1 << 20), (12, 0), (5, 64)];
    let shape = |(index, count): (usize, usize)| {
        let (element, segment) = sizes[(index + n) % sizes.len()];
        (count, element, segment, index % 2 == 0)
    };
    counts.into_iter().chain(counts).enumerate().map(shape).collect()
}

/// Returns lengths of blocks in elements: equal, or with zeros and a giant.
fn block_counts(n: usize, index: usize) -> Vec<usize> {
    let mut random = Random(index as u64 * 31 + n as u64);
    match index % 5 {
        0 => vec![0; n],
        1 => vec![13; n],
        2 => (0..n).map(|_| random.below(30)).collect(),
        3 => (0..n).map(|rank| if rank == n / 2 { 150 } else { 0 }).collect(),
        _ => (0..n).map(|_| [0, 1, 40][random.below(3)]).collect(),
    }
}

/// Returns the ops whose result this algorithm guarantees, and, for each op, whether this result equals that of a
/// single fold of all operands.
fn ops(algorithm: Algorithm) -> &'static [(Op, bool)] {
    match algorithm {
        Algorithm::Direct => &[(Op::Hash, true)],
        Algorithm::Doubling | Algorithm::Binomial => &[(Op::Matrix, true), (Op::Hash, false)],
        _ => &[(Op::Sum, true), (Op::Hash, false)],
    }
}

/// Returns the maximum scratch memory that a reduction in segments may use.
fn scratch_bound(algorithm: Algorithm, n: usize, bytes: usize, element: usize, segment: usize) -> usize {
    let aligned = |len: usize| len.next_multiple_of(64.max(element & element.wrapping_neg()));
    match algorithm {
        Algorithm::Doubling | Algorithm::Binomial => 2 * aligned(bytes),
        Algorithm::Direct => (2 * (n - 1) * aligned(segment.max(element).min(bytes))).max((n - 1) * aligned(bytes.min(FLAT_BYTES))),
        _ => 2 * (RING_IN_FLIGHT + 1) * aligned(segment.max(element)),
    }
}

#[test]
fn all_reduce_folds_everything_for_everyone() {
    for &n in WORLDS {
        for algorithm in [Algorithm::Doubling, Algorithm::Ring, Algorithm::Direct] {
            for (index, (count, element, segment, in_place)) in shapes(n).into_iter().enumerate() {
                let (op, exact) = ops(algorithm)[index % ops(algorithm).len()];
                let bytes = count * element;
                let what = format!("{algorithm} all_reduce n={n} {count}x{element} segment={segment} in_place={in_place} {op:?}");
                let sources = sources(n, |_| bytes, index as u64);
                let plan = |me| all_reduce(algorithm, n, me, bytes, element, segment);
                let ranks = ranks(&sources, plan, |_| bytes, |_| in_place.then_some(0));
                let results = run(&what, &ranks, op, Claims { element, hears: Some(everyone), root: 0 }, index as u64);
                let expected = if exact { written(&oracle(op, &sources, element)) } else { results[0].clone() };
                assert!(expected.iter().all(Option::is_some), "{what}");
                for (rank, result) in ranks.iter().zip(&results) {
                    assert_eq!(*result, expected, "{what}");
                    assert!(rank.plan.scratch_bytes <= scratch_bound(algorithm, n, bytes, element, segment), "{what}");
                    let share = (count / n + 2) * element;
                    assert!(algorithm != Algorithm::Ring || sent_bytes(rank) <= 2 * (n - 1) * share, "{what}: {}", sent_bytes(rank));
                }
            }
        }
    }
}

#[test]
fn direct_shares_of_a_vector_too_large_to_be_sent_whole() {
    for (n, element, segment) in [(2, 8, 9000), (3, 12, 4096), (5, 4, 1 << 20), (4, 65536, 1)] {
        let bytes = (FLAT_BYTES / element + n) * element * (1 + usize::from(n == 2));
        let what = format!("direct all_reduce n={n} {bytes} bytes segment={segment}");
        let sources = sources(n, |_| bytes, 3);
        let plan = |me| all_reduce(Algorithm::Direct, n, me, bytes, element, segment);
        let ranks = ranks(&sources, plan, |_| bytes, |me| (me % 2 == 0).then_some(0));
        let results = run(&what, &ranks, Op::Hash, Claims { element, hears: Some(everyone), root: 0 }, 5);
        let expected = written(&oracle(Op::Hash, &sources, element));
        assert!(results.iter().all(|result| *result == expected), "{what}");
        for rank in &ranks {
            assert!(sent_bytes(rank) <= 2 * (n - 1) * (bytes / n + element), "{what}");
        }
    }
}

#[test]
fn reduce_folds_everything_for_the_root_alone() {
    for &n in WORLDS {
        for algorithm in [Algorithm::Binomial, Algorithm::ScatterGather, Algorithm::Direct] {
            for (index, (count, element, segment, in_place)) in shapes(n).into_iter().enumerate() {
                let (op, exact) = ops(algorithm)[index % ops(algorithm).len()];
                let (bytes, root) = (count * element, index * 5 % n);
                let what = format!("{algorithm} reduce n={n} root={root} {count}x{element} segment={segment} in_place={in_place} {op:?}");
                let sources = sources(n, |_| bytes, index as u64);
                let plan = |me| reduce(algorithm, n, me, root, bytes, element, segment);
                let ranks = ranks(&sources, plan, |me| if me == root { bytes } else { 0 }, |me| (in_place && me == root).then_some(0));
                let results = run(&what, &ranks, op, Claims { element, hears: Some(root_alone), root }, index as u64);
                let complete = results[root].iter().all(Option::is_some);
                assert!(if exact { results[root] == written(&oracle(op, &sources, element)) } else { complete }, "{what}");
                for rank in &ranks {
                    assert!(rank.plan.scratch_bytes <= scratch_bound(algorithm, n, bytes, element, segment), "{what}");
                }
            }
        }
    }
}

#[test]
fn reduce_by_direct_shares() {
    for (n, root, segment) in [(2, 1, 100), (3, 0, 3000), (5, 3, 512)] {
        let bytes = 2 * STAR_BYTES + 8 * n + 4;
        let what = format!("direct reduce n={n} root={root} segment={segment}");
        let sources = sources(n, |_| bytes, 3);
        let plan = |me| reduce(Algorithm::Direct, n, me, root, bytes, 4, segment);
        let ranks = ranks(&sources, plan, |me| if me == root { bytes } else { 0 }, |me| (me == root).then_some(0));
        let results = run(&what, &ranks, Op::Hash, Claims { element: 4, hears: Some(root_alone), root }, 5);
        assert_eq!(results[root], written(&oracle(Op::Hash, &sources, 4)), "{what}");
        assert!(ranks.iter().all(|rank| rank.plan.scratch_bytes <= 2 * (n - 1) * segment.next_multiple_of(64)), "{what}");
    }
}

#[test]
fn reduce_scatter_folds_each_block_for_its_rank() {
    for &n in WORLDS {
        for algorithm in [Algorithm::Ring, Algorithm::Direct] {
            for index in 0..10 {
                let (op, exact) = ops(algorithm)[index % ops(algorithm).len()];
                let (element, segment, in_place) = ([4, 12, 1][index % 3], [16, 1 << 20, 60][(index + n) % 3], index > 4);
                let lens: Vec<usize> = block_counts(n, index).iter().map(|count| count * element).collect();
                let blocks = if index % 5 == 1 { Blocks::Equal(lens[0]) } else { Blocks::Each(&lens) };
                let start = |me: usize| lens[..me].iter().sum::<usize>();
                let bytes = start(n);
                let what =
                    format!("{algorithm} reduce_scatter n={n} {lens:?} element={element} segment={segment} in_place={in_place} {op:?}");
                let sources = sources(n, |_| bytes, index as u64);
                let plan = |me| reduce_scatter(algorithm, n, me, blocks, element, segment);
                // A single rank copies its block, which is the whole vector.
                let ranks = ranks(&sources, plan, |me| lens[me], |me| in_place.then_some(start(me) as isize));
                let results = run(&what, &ranks, op, Claims { element, hears: Some(everyone), root: 0 }, index as u64);
                let expected = written(&oracle(op, &sources, element));
                for (me, result) in results.iter().enumerate() {
                    assert!(result.iter().all(Option::is_some), "{what}");
                    assert!(!exact || result[..] == expected[start(me)..start(me + 1)], "{what}");
                    let bound = scratch_bound(algorithm, n, lens[me], element, segment);
                    assert!(ranks[me].plan.scratch_bytes <= bound, "{what}");
                    assert!(sent_bytes(&ranks[me]) <= bytes - lens[me].min(bytes) || algorithm == Algorithm::Ring, "{what}");
                }
            }
        }
    }
}

#[test]
fn broadcast_brings_the_roots_vector_to_everyone() {
    for &n in WORLDS {
        for algorithm in [Algorithm::Binomial, Algorithm::Chain] {
            for (index, bytes) in [0, 1, 17, 1000, CARRIED_BYTES + 3].into_iter().enumerate() {
                if bytes > 1000 && n > 9 {
                    continue;
                }
                for root in [0, n / 2, n - 1] {
                    let (segment, in_place) = ([64, 7, 1, 300][index % 4].max(bytes / 40), (index + root) % 2 == 0);
                    let what = format!("{algorithm} broadcast n={n} root={root} {bytes} bytes segment={segment} in_place={in_place}");
                    let sources = sources(n, |me| if in_place || me == root { bytes } else { 0 }, index as u64);
                    let plan = |me| broadcast(algorithm, n, me, root, bytes, segment);
                    let ranks = ranks(&sources, plan, |_| bytes, |_| in_place.then_some(0));
                    let results = run(&what, &ranks, Op::Sum, Claims { element: 1, hears: Some(everyone), root }, index as u64);
                    assert!(results.iter().all(|result| *result == written(&sources[root])), "{what}");
                    let bound = if algorithm == Algorithm::Chain { 0 } else { bytes.min(CARRIED_BYTES) };
                    assert!(ranks.iter().all(|rank| rank.plan.scratch_bytes <= bound), "{what}");
                    assert!(ranks.iter().map(sent_bytes).sum::<usize>() == (n - 1) * bytes, "{what}");
                }
            }
        }
    }
}

#[test]
fn all_gather_brings_every_block_to_everyone() {
    for &n in WORLDS {
        for algorithm in [Algorithm::Doubling, Algorithm::Ring, Algorithm::Direct] {
            for index in 0..10 {
                let (segment, in_place) = ([16, 0, 1 << 20][index % 3], index > 4);
                let lens = block_counts(n, index);
                let blocks = if index % 5 == 1 { Blocks::Equal(lens[0]) } else { Blocks::Each(&lens) };
                let start = |me: usize| lens[..me].iter().sum::<usize>();
                let what = format!("{algorithm} all_gather n={n} {lens:?} segment={segment} in_place={in_place}");
                let sources = sources(n, |me| lens[me], index as u64);
                let plan = |me| all_gather(algorithm, n, me, blocks, segment);
                let ranks = ranks(&sources, plan, |_| start(n), |me| in_place.then_some(-(start(me) as isize)));
                let results = run(&what, &ranks, Op::Sum, Claims { element: 1, hears: Some(everyone), root: 0 }, index as u64);
                assert!(results.iter().all(|result| *result == written(&sources.concat())), "{what}");
                let bound = if algorithm == Algorithm::Ring { 0 } else { start(n) };
                assert!(ranks.iter().all(|rank| rank.plan.scratch_bytes <= bound), "{what}");
                assert_eq!(ranks.iter().map(sent_bytes).sum::<usize>(), (n - 1) * start(n), "{what}");
            }
        }
    }
}

#[test]
fn gather_and_scatter_between_the_root_and_everyone() {
    for &n in WORLDS {
        for index in 0..10 {
            let (root, in_place) = (index * 3 % n, index > 4);
            let lens = block_counts(n, index);
            let start = |me: usize| lens[..me].iter().sum::<usize>();
            // Ranks other than the root know only their own block.
            let blocks = |me: usize| if me == root { Blocks::Each(&lens) } else { Blocks::Equal(lens[me]) };
            let aliased = |me, offset: isize| (in_place && me == root).then_some(offset);

            let what = format!("gather n={n} root={root} {lens:?} in_place={in_place}");
            let blocks_of_all = sources(n, |me| lens[me], index as u64);
            for (claims, begin) in ways(n, root) {
                let plan = |me| gather(begin(n, me), n, me, root, blocks(me));
                let gathering =
                    ranks(&blocks_of_all, plan, |me| if me == root { start(n) } else { 0 }, |me| aliased(me, -(start(root) as isize)));
                let results = run(&what, &gathering, Op::Sum, claims, index as u64);
                assert_eq!(results[root], written(&blocks_of_all.concat()), "{what}");
            }

            let what = format!("scatter n={n} root={root} {lens:?} in_place={in_place}");
            let vector = sources(n, |me| if me == root { start(n) } else { 0 }, index as u64);
            for (claims, begin) in ways(n, root) {
                let plan = |me| scatter(begin(n, me), n, me, root, blocks(me));
                let scattering = ranks(&vector, plan, |me| lens[me], |me| aliased(me, start(root) as isize));
                let results = run(&what, &scattering, Op::Sum, claims, index as u64);
                for (me, result) in results.iter().enumerate() {
                    assert_eq!(*result, written(&vector[root][start(me)..start(me + 1)]), "{what}");
                }
            }
        }
    }
}

/// How a plan begins, and what is to be proved of it then.
type Way = (Claims, fn(usize, usize) -> Builder);

/// Returns the two ways in which a plan can begin: with an agreement, or after an earlier one. A single rank has no
/// other to hear from.
fn ways(n: usize, root: usize) -> Vec<Way> {
    let agreed: Way = (Claims { element: 1, hears: Some(everyone), root }, Builder::agreed);
    let after: Way = (Claims { element: 1, hears: None, root }, |n, _| Builder::new(n));
    [agreed, after].into_iter().take(n).collect()
}

#[test]
fn all_to_all_brings_each_block_where_it_belongs() {
    for &n in WORLDS {
        for index in 0..10 {
            // Unequal blocks are never exchanged in place.
            let (segment, in_place) = ([16, 1 << 20, 0][index % 3], index == 5);
            let mut random = Random(index as u64);
            let mut lens: Vec<Vec<usize>> =
                (0..n).map(|me| (0..n).map(|to| [0, 5, 16, 21][(random.below(4) + me + to) % 4]).collect()).collect();
            if index % 5 == 0 {
                lens = vec![vec![9; n]; n];
            }
            let what = format!("all_to_all n={n} {lens:?} in_place={in_place} segment={segment}");
            let incoming: Vec<Vec<usize>> = (0..n).map(|me| (0..n).map(|from| lens[from][me]).collect()).collect();
            let sources = sources(n, |me| lens[me].iter().sum(), index as u64);
            let hears = (index % 5 == 0).then_some(everyone as fn(usize, usize) -> bool);
            let plan = |me: usize| match hears {
                Some(_) => all_to_all(n, me, 9, in_place, segment),
                // The ranks have compared their counts.
                None => all_to_all_v(n, me, Blocks::Each(&lens[me]), Blocks::Each(&incoming[me])),
            };
            let ranks = ranks(&sources, plan, |me| incoming[me].iter().sum(), |_| in_place.then_some(0));
            let results = run(&what, &ranks, Op::Sum, Claims { element: 1, hears, root: 0 }, index as u64);
            for (me, result) in results.iter().enumerate() {
                let block = |from: usize| {
                    let start: usize = lens[from][..me].iter().sum();
                    sources[from][start..start + lens[from][me]].to_vec()
                };
                assert_eq!(*result, written(&(0..n).flat_map(block).collect::<Vec<u8>>()), "{what}");
                let bound = match (index % 5, in_place) {
                    (0, _) if n > 2 => (n - 1) * 64,
                    (_, true) => EXCHANGES_IN_FLIGHT * segment.clamp(1, 64).next_multiple_of(64),
                    (_, false) => 0,
                };
                assert!(ranks[me].plan.scratch_bytes <= bound, "{what}");
            }
        }
    }
}

#[test]
fn what_is_too_large_to_be_carried_goes_straight() {
    // Some ranks may make the call in place while others do not.
    let ways: [fn(usize) -> bool; 3] = [|_| false, |_| true, |me| me % 2 == 0];
    for (n, way) in [(2, 0), (2, 1), (2, 2), (3, 0), (3, 2), (4, 1), (4, 2)] {
        let in_place = ways[way];
        let block = CARRIED_BYTES / n + 5;
        let sources = sources(n, |_| n * block, 11);
        let what = format!("all_to_all n={n} blocks of {block} way={way}");
        let plan = |me| all_to_all(n, me, block, in_place(me), 1 << 14);
        let ranks = self::ranks(&sources, plan, |_| n * block, |me| in_place(me).then_some(0));
        let results = run(&what, &ranks, Op::Sum, Claims { element: 1, hears: Some(everyone), root: 0 }, 3);
        for (me, result) in results.iter().enumerate() {
            let expected: Vec<u8> = sources.iter().flat_map(|source| source[me * block..(me + 1) * block].to_vec()).collect();
            assert_eq!(*result, written(&expected), "{what}");
        }

        let what = format!("direct all_gather n={n} blocks of {block}");
        let plan = |me| all_gather(Algorithm::Direct, n, me, Blocks::Equal(block), 1 << 14);
        let blocks: Vec<Vec<u8>> = sources.iter().map(|source| source[..block].to_vec()).collect();
        let ranks = self::ranks(&blocks, plan, |_| n * block, |_| None);
        let results = run(&what, &ranks, Op::Sum, Claims { element: 1, hears: Some(everyone), root: 0 }, 3);
        assert!(results.iter().all(|result| *result == written(&blocks.concat())), "{what}");
        assert!(ranks.iter().all(|rank| rank.plan.scratch_bytes == 0), "{what}");
    }
}

#[test]
fn a_barrier_takes_a_logarithm_of_rounds() {
    for n in WORLDS.iter().copied().chain([31, 32]) {
        let nothing = vec![Vec::new(); n];
        let ranks = ranks(&nothing, |me| barrier(n, me), |_| 0, |_| None);
        run(&format!("barrier n={n}"), &ranks, Op::Sum, Claims { element: 1, hears: Some(everyone), root: 0 }, 1);
        let rounds = n.next_power_of_two().ilog2() as usize;
        assert!(ranks.iter().all(|rank| rank.plan.steps.len() == 2 * rounds), "n={n}");
    }
}

#[test]
fn comparing_counts_takes_no_more_messages_than_an_agreement() {
    let sends = |plan: &Plan| plan.steps.iter().filter(|step| matches!(step.action, Action::Send { .. })).count();
    let of_all = |n: usize, plan: &dyn Fn(usize) -> Plan| (0..n).map(|me| sends(&plan(me))).sum::<usize>();
    for n in WORLDS.iter().copied().chain([31, 32, 100]) {
        let compared = of_all(n, &|me| all_reduce(Algorithm::Doubling, n, me, 16, 8, 1 << 16));
        let agreed = of_all(n, &|me| barrier(n, me));
        assert!(compared <= agreed, "n={n}: {compared} messages, and {agreed} of an agreement");
    }
}

#[test]
fn plans_of_large_worlds_stay_short() {
    let n = 1000;
    let steps = |plan: Plan| plan.steps.len();
    assert!(steps(all_reduce(Algorithm::Doubling, n, 999, 4, 4, 1 << 16)) < 50);
    assert!(steps(all_reduce(Algorithm::Ring, n, 1, 4 * n, 4, 1 << 16)) <= 5 * n);
    assert!(steps(all_reduce(Algorithm::Direct, n, 1, 1 << 20, 4, 1 << 16)) <= 5 * n);
    assert!(steps(all_gather(Algorithm::Doubling, n, 0, Blocks::Equal(4), 1 << 16)) < 50);
    assert!(steps(all_to_all(n, 7, 4, true, 1 << 16)) <= 4 * n);
    assert!(steps(reduce(Algorithm::Binomial, n, 512, 512, 4, 4, 1 << 16)) < 50);
    assert!(steps(broadcast(Algorithm::Binomial, n, 3, 3, 4, 1 << 16)) < 50);
}

#[test]
fn elements_without_bytes_are_no_panic() {
    for algorithm in Algorithm::ALL {
        all_reduce(algorithm, 3, 0, 0, 0, 0);
        reduce(algorithm, 3, 0, 1, 0, 0, 0);
        reduce_scatter(algorithm, 3, 0, Blocks::Equal(0), 0, 0);
        all_gather(algorithm, 3, 0, Blocks::Each(&[]), 0);
        broadcast(algorithm, 3, 0, 1, 0, 0);
    }
}

#[test]
fn no_schedule_changes_the_result() {
    for (n, algorithm, in_place) in
        [(3, Algorithm::Ring, true), (5, Algorithm::Ring, false), (6, Algorithm::Doubling, true), (4, Algorithm::Direct, true)]
    {
        let sources = sources(n, |_| 400, 9);
        let plan = |me| all_reduce(algorithm, n, me, 400, 4, 16);
        let ranks = ranks(&sources, plan, |_| 400, |_| in_place.then_some(0));
        let first = simulate(&ranks, Op::Hash, 4, 1, 0);
        for seed in 1..40 {
            let capacity = [1, 3, 17, 400][seed as usize % 4];
            assert_eq!(simulate(&ranks, Op::Hash, 4, capacity, seed), first, "{algorithm} n={n} seed={seed}");
        }
    }
}

/// Whether the proof or the simulation finds a fault in these ranks.
fn is_refuted(ranks: &[Rank]) -> bool {
    let claims = Claims { element: 4, hears: Some(everyone), root: 0 };
    std::panic::catch_unwind(|| run("broken on purpose", ranks, Op::Hash, claims, 1)).is_err()
}

/// The proof is only worth something if it rejects broken plans.
#[test]
fn broken_plans_are_refuted() {
    let make = |n: usize, algorithm| {
        let sources = sources(n, |_| 400, 9);
        ranks(&sources, |me| all_reduce(algorithm, n, me, 400, 4, 16), |_| 400, |_| Some(0))
    };
    let last_step =
        |rank: &Rank, wanted: fn(&Action) -> bool| rank.plan.steps.iter().rposition(|step| wanted(&step.action)).expect("a step");
    assert!(!is_refuted(&make(3, Algorithm::Doubling)));

    let mut ranks = make(4, Algorithm::Doubling);
    let fold = last_step(&ranks[0], |action| matches!(action, Action::Fold { .. }));
    ranks[0].plan.steps[fold].after.pop();
    assert!(is_refuted(&ranks), "the last fold overwrites what is being sent");

    let mut ranks = make(4, Algorithm::Ring);
    let receive = last_step(&ranks[1], |action| matches!(action, Action::Receive { .. }));
    ranks[1].plan.steps[receive].after.clear();
    assert!(is_refuted(&ranks), "a complete share overwrites what is being sent");

    let mut ranks = make(3, Algorithm::Doubling);
    ranks[2].plan.steps.truncate(1);
    assert!(is_refuted(&ranks), "a message is missing");

    let mut ranks = make(3, Algorithm::Ring);
    ranks[1].plan.steps.iter_mut().for_each(|step| step.after.clear());
    assert!(is_refuted(&ranks), "nothing waits for anything");

    let mut ranks = make(2, Algorithm::Ring);
    for step in ranks.iter_mut().flat_map(|rank| &mut rank.plan.steps) {
        if let Action::Receive { .. } = step.action {
            step.after = vec![0];
        }
    }
    ranks.iter_mut().for_each(|rank| rank.plan.steps.swap(0, 1));
    assert!(is_refuted(&ranks), "a step comes after itself or a later one");

    let sources = sources(4, |_| 8, 9);
    let gather = |me| all_gather(Algorithm::Ring, 4, me, Blocks::Equal(8), 4);
    let mut ranks = self::ranks(&sources, gather, |_| 32, |_| None);
    for rank in &mut ranks {
        // The plan lacks the agreement, which takes two rounds.
        rank.plan.steps.drain(..4);
        rank.plan.steps.iter_mut().for_each(|step| step.after = step.after.iter().filter_map(|earlier| earlier.checked_sub(4)).collect());
    }
    assert!(is_refuted(&ranks), "nobody has heard everyone");
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_simulation_that_stops_says_so() {
    let span = super::Span { space: super::Space::Source, offset: 0, len: 2 };
    let step = |action, after| super::Step { action, after };
    let into = super::Span { space: super::Space::Destination, ..span };
    // Both send before they receive, over links that hold less than one message.
    let plan = |me: usize| Plan {
        steps: vec![step(Action::Send { to: 1 - me, from: span }, vec![]), step(Action::Receive { from: 1 - me, into }, vec![0])],
        scratch_bytes: 0,
    };
    let ranks = ranks(&[vec![1, 2], vec![3, 4]], plan, |_| 2, |_| None);
    simulate(&ranks, Op::Sum, 1, 1, 1);
}
