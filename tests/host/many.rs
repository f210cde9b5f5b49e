//! Several buffers in one call, and lists of buffers for each rank, in every wiring. Results are compared with plain
//! calls and with known values. Also checks the errors if ranks differ.

use std::sync::Arc;

use crate::common::oracle::hash;
use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads, threads_with};
use collectives::observe::{CallReport, Observer};
use collectives::{Buffer, BufferMut, Communicator, Config, Data, Error, ReduceOp};

/// Returns a rank's element at a place of a buffer.
fn number(seed: u64, rank: usize, buffer: usize, place: usize) -> u64 {
    hash(seed + buffer as u64, rank, place)
}

fn buffers(seed: u64, rank: usize, lengths: &[usize], blocks: usize) -> Vec<Vec<u64>> {
    let one = |(buffer, length): (usize, &usize)| (0..length * blocks).map(|place| number(seed, rank, buffer, place)).collect();
    lengths.iter().enumerate().map(one).collect()
}

/// Returns the sum of all ranks' contributions.
fn sums(seed: u64, ranks: usize, lengths: &[usize], blocks: usize) -> Vec<Vec<u64>> {
    let mut sums = buffers(seed, 0, lengths, blocks);
    for rank in 1..ranks {
        for (sum, other) in sums.iter_mut().flatten().zip(buffers(seed, rank, lengths, blocks).iter().flatten()) {
            *sum = sum.wrapping_add(*other);
        }
    }
    sums
}

/// Returns block `rank` of each buffer.
fn block(whole: &[Vec<u64>], rank: usize, lengths: &[usize]) -> Vec<Vec<u64>> {
    whole.iter().zip(lengths).map(|(whole, length)| whole[rank * length..(rank + 1) * length].to_vec()).collect()
}

fn zeros(lengths: &[usize], blocks: usize) -> Vec<Vec<u64>> {
    lengths.iter().map(|length| vec![0; length * blocks]).collect()
}

/// Checks every call on several buffers against sums computed here.
fn check_many(comm: &Communicator, seed: u64, lengths: &[usize]) {
    let (n, me) = (comm.world_size(), comm.rank());
    let said = format!("rank {me} of {n}, seed {seed}, lengths {lengths:?}");
    let mut reduced = buffers(seed, me, lengths, 1);
    comm.all_reduce_many(&mut reduced, ReduceOp::Sum).unwrap();
    assert_eq!(reduced, sums(seed, n, lengths, 1), "{said}");
    for root in [0, n - 1] {
        let mut copied = buffers(seed, me, lengths, 1);
        comm.broadcast_many(&mut copied, root).unwrap();
        assert_eq!(copied, buffers(seed, root, lengths, 1), "{said}");
    }
    let mut all = zeros(lengths, n);
    comm.all_gather_many_into(&buffers(seed, me, lengths, 1), &mut all).unwrap();
    for rank in 0..n {
        assert_eq!(block(&all, rank, lengths), buffers(seed, rank, lengths, 1), "{said}");
    }
    let mut own = zeros(lengths, 1);
    comm.reduce_scatter_many_into(&buffers(seed, me, lengths, n), &mut own, ReduceOp::Sum).unwrap();
    assert_eq!(own, block(&sums(seed, n, lengths, n), me, lengths), "{said}");
}

#[test]
fn several_buffers_get_what_each_would_get() {
    // Lengths around the limits below which buffers are joined, inside a host and between hosts, and more buffers than
    // fit into one call.
    let lists: [&[usize]; 7] = [&[], &[0], &[1], &[0, 0, 3], &[5, 3, 0, 2047, 2048, 2049, 1], &[8191, 8192, 8193, 20_000, 7], &[8192; 40]];
    for wiring in Wiring::ALL {
        for n in [1, 2, 3, 5] {
            threads(wiring, n, |comm| {
                let mut random = Random(n as u64);
                for (at, lengths) in lists.iter().enumerate() {
                    check_many(comm, at as u64, lengths);
                }
                for round in 0..10 {
                    let lengths: Vec<usize> = (0..random.below(30)).map(|_| [0, 1, 7, 100, 3000, 9000][random.below(6)]).collect();
                    check_many(comm, 100 + round, &lengths);
                }
            });
        }
    }
}

#[test]
fn buffers_of_any_kind_go_together() {
    threads(Wiring::Shm, 3, |comm| {
        let me = comm.rank() as f32;
        let (mut first, mut second) = (vec![me; 3], [me, 1.0]);
        comm.all_reduce_many(&mut [&mut first[..], &mut second], ReduceOp::Avg).unwrap();
        assert_eq!((first, second), (vec![1.0; 3], [1.0, 1.0]));
        // Contributions with a scalar, `bool` values, and windows.
        let mut scaled = [[me], [me + 1.0]];
        comm.all_reduce_many(&mut scaled, ReduceOp::PreMulSum(2.0)).unwrap();
        assert_eq!(scaled, [[6.0], [12.0]]);
        let mut truths = [vec![comm.rank() == 2; 2], vec![false]];
        comm.all_reduce_many(&mut truths, ReduceOp::Max).unwrap();
        assert_eq!(truths, [vec![true; 2], vec![false]]);
        let mut shared = [comm.alloc::<u32>(100_000).unwrap(), comm.alloc(10).unwrap()];
        shared.iter_mut().for_each(|buffer| buffer.fill(comm.rank() as u32));
        comm.all_reduce_many(&mut shared, ReduceOp::Sum).unwrap();
        assert!(shared.iter().all(|buffer| buffer.iter().all(|number| *number == 3)));
    });
}

/// The names and bytes of the collectives that a rank's observer receives.
#[derive(Debug, Default)]
struct Heard(std::sync::Mutex<Vec<(String, u64)>>);

impl Observer for Heard {
    fn call_ended(&self, call: &CallReport<'_>) {
        self.0.lock().unwrap().push((call.kind.name().to_owned(), call.bytes));
    }
}

#[test]
fn a_hundred_small_buffers_are_one_call() {
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        for wait in [false, true] {
            let heard = Arc::new(Heard::default());
            let config = |rank: usize| {
                let observer = Arc::clone(&heard) as Arc<dyn Observer>;
                let mut config = Config::default();
                config.observer = Some(observer).filter(|_| rank == 0);
                config
            };
            threads_with(
                3,
                |rank| wiring.builder_with(rank, config(rank)),
                |comm| {
                    let mut small = vec![vec![1_u32; 10]; 100];
                    if wait {
                        small = comm.start_all_reduce_many(small, ReduceOp::Sum).unwrap().wait().unwrap();
                    } else {
                        comm.all_reduce_many(&mut small, ReduceOp::Sum).unwrap();
                    }
                    assert!(small.iter().flatten().all(|number| *number == 3));
                    // The large buffer is not copied and becomes a separate call. The small ones form one call.
                    let mut mixed = [vec![1_u32; 3], vec![1; 1 << 20], vec![1; 5]];
                    comm.all_reduce_many(&mut mixed, ReduceOp::Sum).unwrap();
                    assert!(mixed.iter().flatten().all(|number| *number == 3));
                    let records: Vec<_> =
                        comm.flight_recorder().records().into_iter().filter(|record| record.kind.name() == "all_reduce_many").collect();
                    assert_eq!(records.iter().map(|record| record.count).collect::<Vec<_>>(), [1000, 1 << 20, 8], "{wiring:?}");
                    assert!(records.iter().all(|record| record.counts_hash.is_some()));
                },
            );
            let heard: Vec<_> =
                heard.0.lock().unwrap().iter().filter(|(kind, _)| kind == "all_reduce_many").map(|(_, bytes)| *bytes).collect();
            assert_eq!(heard, [4000, 4 << 20, 32], "{wiring:?}");
        }
    }
}

/// Lets rank 1 make a different call. All ranks must get a mismatch with these words, and their `T`s stay unchanged.
fn differing<T: Data + PartialEq + std::fmt::Debug>(
    words: &str,
    make: impl Fn(&Communicator, bool, &mut Vec<Vec<T>>) -> collectives::Result<()> + Sync,
    given: &[Vec<T>],
) {
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 3, |comm| {
            let mut list = given.to_vec();
            let error = make(comm, comm.rank() == 1, &mut list).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(words), "{wiring:?}: {error}");
            assert_eq!(list, given, "{wiring:?}");
            assert!(comm.barrier().unwrap_err().is_poisoned());
        });
    }
}

#[test]
fn ranks_with_other_lists_are_told_and_nothing_is_written() {
    let given = vec![vec![7_u32; 3], vec![8; 5], vec![9; 30_000]];
    let sum = ReduceOp::Sum;
    // The same sum of lengths in another order, one buffer more, one less, and none.
    differing(
        "all_reduce_many(sum, u32, lengths #",
        |comm, other, list| {
            if other {
                list.swap(0, 1)
            }
            let result = comm.all_reduce_many(list, sum);
            if other {
                list.swap(0, 1)
            }
            result
        },
        &given,
    );
    differing(
        "all_reduce_many",
        |comm, other, list| {
            let most = if other { 2 } else { 3 };
            comm.all_reduce_many(&mut list[..most], sum)
        },
        &given,
    );
    differing(
        "all_reduce_many",
        |comm, other, list| {
            let most = if other { 0 } else { 3 };
            comm.all_reduce_many(&mut list[..most], sum)
        },
        &given,
    );
    // Lengths that rank 1 does not join and the other ranks do.
    differing(
        "all_reduce_many",
        |comm, other, list| if other { comm.all_reduce_many(&mut list[2..], sum) } else { comm.all_reduce_many(&mut list[..2], sum) },
        &given,
    );
    differing("root and lengths #", |comm, other, list| comm.broadcast_many(list, usize::from(other)), &given);
    // A call on one buffer differs from this one, and so does another op.
    differing(
        "all_reduce(sum, u32, count 3)",
        |comm, other, list| if other { comm.all_reduce(&mut list[0], sum) } else { comm.all_reduce_many(&mut list[..1], sum) },
        &given,
    );
    differing("all_reduce_many(max", |comm, other, list| comm.all_reduce_many(list, if other { ReduceOp::Max } else { sum }), &given);
    differing(
        "all_gather_many(",
        |comm, other, list| {
            let lengths = if other { [5, 3] } else { [3, 5] };
            let mine = lengths.map(|length| vec![1_u32; length]);
            let mut all = lengths.map(|length| vec![0_u32; 3 * length]);
            let result = comm.all_gather_many_into(&mine, &mut all);
            assert!(all.iter().flatten().all(|number| *number == 0) && !list.is_empty());
            result
        },
        &given,
    );
}

#[test]
fn what_cannot_be_is_refused_and_harms_nobody() {
    threads(Wiring::Shm, 2, |comm| {
        let mut other = [vec![0_u32; 2], vec![0; 3]];
        let refused = |result: collectives::Result<()>, words: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(words), "{error}");
        };
        refused(comm.broadcast_many(&mut other, 2), "root 2 does not exist");
        refused(comm.all_gather_many_into(&[[1_u32]], &mut other), "1 sources were given, and 2 destinations");
        refused(comm.all_gather_many_into(&[[1_u32], [1]], &mut other), "buffer 1 (from 0) of the list: the destination has 3 elements");
        refused(
            comm.reduce_scatter_many_into(&[vec![0; 4], vec![0; 7]], &mut other, ReduceOp::Sum),
            "buffer 1 (from 0) of the list: the source has 7",
        );
        refused(comm.gather_list(&[1_u32, 2], Some(&mut other[..1]).filter(|_| comm.rank() == 0), 2), "root 2 does not exist");
        refused(comm.all_gather_list(&[1_u32, 2], &mut other[..1]), "1 destinations were given, but 2 are needed");
        refused(comm.all_to_all_list(&[[1_u32; 2]; 3], &mut other), "3 sources were given, but 2 are needed");
        let given = if comm.rank() == 0 { None } else { Some(&mut other[..]) };
        refused(
            comm.gather_list(&[1_u32, 2], given, 0),
            if comm.rank() == 0 { "must pass a list of destinations" } else { "must pass None" },
        );
        refused(comm.scatter_list(Some(&[[1_u32; 2]; 2][..]).filter(|_| comm.rank() == 1), &mut [0_u32; 2], 0), "list of sources");
        refused(comm.all_gather_list(&[1_u32], &mut other), "the two lengths must be equal");
        refused(comm.start_all_gather_list(vec![1_u32], vec![vec![0_u32]]).map(drop), "1 destinations were given");
        comm.all_reduce_many(&mut other, ReduceOp::Sum).unwrap();
    });
}

/// Checks the calls with lists, with lengths for each pair, against the known contributions of the ranks. Odd ranks
/// pass one buffer if possible, which is the same call.
fn check_lists<T: Data + PartialEq + std::fmt::Debug>(comm: &Communicator, seed: u64, value: impl Fn(u64) -> T) {
    let (n, me) = (comm.world_size(), comm.rank());
    let said = format!("rank {me} of {n}, seed {seed}");
    let length = |from: usize, to: usize| [0, 1, 3, 1000, 70_000][(hash(seed, from, to) % 5) as usize];
    let of = |from: usize, to: usize| (0..length(from, to)).map(|place| value(number(seed, from, to, place))).collect::<Vec<T>>();
    let room = |from: usize, to: usize| vec![value(0); length(from, to)];
    let is_flat = me % 2 == 1;
    for root in [0, n / 2] {
        let expected: Vec<_> = (0..n).map(|rank| of(rank, root)).collect();
        if is_flat && me == root {
            let (counts, mut all): (Vec<_>, _) = (expected.iter().map(Vec::len).collect(), expected.concat());
            all.fill(value(0));
            comm.gather_v_into(&of(me, root), Some((&mut all, &counts)), root).unwrap();
            assert_eq!(all, expected.concat(), "{said}");
        } else {
            let mut list: Vec<_> = (0..n).map(|rank| room(rank, root)).collect();
            comm.gather_list(&of(me, root), (me == root).then_some(&mut list), root).unwrap();
            assert!(me != root || list == expected, "{said}");
        }
        let (sources, mut own): (Vec<_>, _) = ((0..n).map(|rank| of(root, rank)).collect(), room(root, me));
        comm.scatter_list((me == root).then_some(&sources), &mut own, root).unwrap();
        assert_eq!(own, of(root, me), "{said}");
        let mut list: Vec<_> = (0..n).map(|rank| room(rank, root)).collect();
        comm.all_gather_list(&of(me, root), &mut list).unwrap();
        assert_eq!(list, expected, "{said}");
    }
    let (sources, expected): (Vec<_>, Vec<_>) = (0..n).map(|rank| (of(me, rank), of(rank, me))).unzip();
    let mut list: Vec<_> = (0..n).map(|rank| room(rank, me)).collect();
    if is_flat {
        let (send, receive): (Vec<_>, Vec<_>) = sources.iter().zip(&expected).map(|(source, theirs)| (source.len(), theirs.len())).unzip();
        let mut all = list.concat();
        comm.all_to_all_v_into(&sources.concat(), &send, &mut all, &receive).unwrap();
        assert_eq!(all, expected.concat(), "{said}");
    } else {
        comm.all_to_all_list(&sources, &mut list).unwrap();
        assert_eq!(list, expected, "{said}");
    }
}

#[test]
fn lists_get_what_each_rank_has_and_meet_ranks_without() {
    for wiring in Wiring::ALL {
        for n in [1, 2, 3, 5] {
            threads(wiring, n, |comm| {
                for seed in 0..6 {
                    check_lists(comm, seed, |number| number);
                    check_lists(comm, seed, |number| number as u8);
                    check_lists(comm, seed, |number| number % 3 == 1);
                }
            });
        }
    }
}

#[test]
fn blocks_of_another_length_are_an_error_on_both_ends() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for (sent, expected) in [(4, 3), (3, 4), (0, 3)] {
            let errors = threads(wiring, 2, |comm| {
                let mut list = [vec![0_u32; 2], vec![0; expected]];
                let source = vec![7_u32; if comm.rank() == 1 { sent } else { 2 }];
                comm.gather_list(&source, (comm.rank() == 0).then_some(&mut list), 0).map_err(|error| error.to_string())
            });
            let root = errors[0].as_ref().unwrap_err();
            assert!(root.contains("rank 1") && root.contains("gather_v"), "{wiring:?} {sent} {expected}: {root}");
            // A rank that had already sent gets the error in its next call.
            println!("{wiring:?} {sent} {expected}: {errors:?}");
        }
    }
}

#[test]
fn a_list_is_compared_with_other_calls() {
    for (words, rank1) in [("root", 0), ("all_gather_list", 1), ("f32", 2)] {
        threads(Wiring::Shm, 2, |comm| {
            let mut list = [vec![0_u32; 2], vec![0; 2]];
            let mut floats = [vec![0_f32; 2], vec![0.0; 2]];
            let mine = [1_u32; 2];
            let result = match (comm.rank(), rank1) {
                (0, 0) => comm.gather_list(&mine, Some(&mut list), 0),
                (_, 0) => comm.gather_list(&mine, Some(&mut list), 1),
                (0, 1) => comm.all_gather_list(&mine, &mut list),
                (_, 1) => comm.all_to_all_list(&[mine; 2], &mut list),
                (0, _) => comm.all_to_all_list(&[mine; 2], &mut list),
                _ => comm.all_to_all_list(&[[1_f32; 2]; 2], &mut floats),
            };
            let error = result.unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(words), "{error}");
            assert_eq!(list, [[0; 2]; 2]);
        });
    }
}

#[test]
fn one_call_on_several_buffers_is_one_turn() {
    threads(Wiring::Shm, 2, |comm| {
        for round in 0..50 {
            // The large buffers are several collectives. The blocking call is behind all of them.
            let work = comm.start_all_reduce_many(vec![vec![1_u32; 20_000]; 4], ReduceOp::Sum).unwrap();
            let mut after = [round];
            comm.all_reduce(&mut after, ReduceOp::Sum).unwrap();
            assert!(work.is_done() && work.wait().unwrap().iter().flatten().all(|number| *number == 2));
            let kinds: Vec<_> = comm.flight_recorder().records().into_iter().rev().take(5).map(|record| record.kind.name()).collect();
            assert_eq!(kinds, ["all_reduce", "all_reduce_many", "all_reduce_many", "all_reduce_many", "all_reduce_many"]);
        }
    });
}

/// Takes buffers of either trait.
#[allow(dead_code, reason = "it is compiled")]
fn takes_any<S: Buffer, D: BufferMut<Element = S::Element>>(
    comm: &Communicator,
    sources: &[S],
    destinations: &mut [D],
) -> collectives::Result<()> {
    comm.all_gather_many_into(sources, destinations)?;
    comm.all_to_all_list(sources, destinations)
}
