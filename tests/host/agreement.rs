//! Ranks that make different calls: each rank gets an error within a second that names both calls and both ranks, and
//! no buffer is touched.

use std::time::{Duration, Instant};

use crate::common::ranks::{Meeting, Wiring, patience, threads};

use collectives::{Communicator, CustomOp, Envelope, Error, ReduceOp, Result};

/// The error of a rank in a mismatched call, and how long it took.
struct Seen {
    error: Error,
    elapsed: Duration,
}

/// Runs `call` on every rank with a buffer of `count(rank)` elements. Each rank must fail and its buffer keep its
/// content.
fn mismatched(
    wiring: Wiring,
    ranks: usize,
    count: impl Fn(usize) -> usize + Sync,
    call: impl Fn(&Communicator, &mut [f32]) -> Result<()> + Sync,
) {
    let everyone = Meeting::new(ranks);
    let seen = threads(wiring, ranks, |comm| {
        // A first call that matches opens the links and advances the numbers. The meeting keeps ranks in step: a rank
        // that is still in this call would learn of a mismatch in the next one.
        comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
        everyone.meet();
        let before: Vec<f32> = (0..count(comm.rank())).map(|index| (index * 10 + comm.rank()) as f32).collect();
        let mut buffer = before.clone();
        let begin = Instant::now();
        let error = call(comm, &mut buffer).expect_err("ranks that disagree must fail");
        let elapsed = begin.elapsed();
        assert_eq!(buffer, before, "rank {}: the buffer was touched", comm.rank());
        let again = comm.barrier().expect_err("the communicator is ended");
        assert!(again.is_poisoned() && again.is_mismatch(), "{again}");
        Seen { error, elapsed }
    });
    for (rank, Seen { error, elapsed }) in seen.iter().enumerate() {
        let Error::Mismatch { first, first_call, second, second_call } = error else {
            panic!("rank {rank} of {ranks}, {wiring:?}: {error}")
        };
        assert_ne!(first.rank, second.rank, "{error}");
        assert_ne!(first_call, second_call, "{error}");
        assert!(first.pid == std::process::id() && !second.host.is_empty(), "{error}");
        assert!(*elapsed < patience(1), "rank {rank} of {ranks}, {wiring:?}: {elapsed:?}");
    }
}

fn everywhere(count: impl Fn(usize) -> usize + Sync + Copy, call: impl Fn(&Communicator, &mut [f32]) -> Result<()> + Sync + Copy) {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5, 8] {
            mismatched(wiring, ranks, count, call);
        }
    }
}

#[test]
fn another_collective() {
    everywhere(|_| 8, |comm, x| if comm.rank() == 1 { comm.broadcast(x, 0) } else { comm.all_reduce(x, ReduceOp::Sum) });
    everywhere(|_| 40_000, |comm, x| if comm.rank() == 0 { comm.barrier() } else { comm.broadcast(x, 0) });
    // 840 is a multiple of every world size.
    everywhere(|_| 840, |comm, x| if comm.rank() == 1 { comm.all_to_all(x) } else { comm.all_gather(x) });
}

#[test]
fn another_op() {
    everywhere(|_| 8, |comm, x| comm.all_reduce(x, if comm.rank() == 1 { ReduceOp::Max } else { ReduceOp::Sum }));
    everywhere(|_| 300_000, |comm, x| comm.all_reduce(x, if comm.rank() == 0 { ReduceOp::Avg } else { ReduceOp::Sum }));
}

#[test]
fn another_count() {
    everywhere(|rank| if rank == 1 { 9 } else { 8 }, |comm, x| comm.all_reduce(x, ReduceOp::Sum));
    everywhere(|rank| if rank == 1 { 400_000 } else { 8 }, |comm, x| comm.all_reduce(x, ReduceOp::Sum));
    everywhere(|rank| if rank == 0 { 8 } else { 100_000 }, |comm, x| comm.broadcast(x, 0));
    everywhere(|rank| if rank == 0 { 840 } else { 1680 }, |comm, x| comm.reduce_scatter(x, ReduceOp::Sum));
}

#[test]
fn another_root() {
    everywhere(|_| 8, |comm, x| comm.broadcast(x, usize::from(comm.rank() == 1)));
    everywhere(|_| 100_000, |comm, x| comm.reduce(x, usize::from(comm.rank() == 0), ReduceOp::Sum));
}

#[test]
fn another_type() {
    everywhere(
        |_| 8,
        |comm, x| if comm.rank() == 1 { comm.all_reduce(&mut [1_i32; 8], ReduceOp::Sum) } else { comm.all_reduce(x, ReduceOp::Sum) },
    );
    everywhere(|_| 8, |comm, x| if comm.rank() == 1 { comm.broadcast(&mut [[1_u8; 3]; 8], 0) } else { comm.broadcast(x, 0) });
}

#[test]
fn another_custom_op() {
    everywhere(
        |_| 8,
        |comm, x| {
            let name = if comm.rank() == 1 { "one" } else { "other" };
            comm.all_reduce(x, CustomOp::new(name, |into: &mut [f32], from: &[f32]| into.copy_from_slice(from)))
        },
    );
}

#[test]
fn other_counts_in_a_variable_collective() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5] {
            let everyone = std::sync::Barrier::new(ranks);
            let errors = threads(wiring, ranks, |comm| {
                everyone.wait();
                let mut counts = vec![2; comm.world_size()];
                if comm.rank() == 1 {
                    counts[0] += 1;
                    counts[1] -= 1;
                }
                let mine = vec![1_u8; counts[comm.rank()]];
                let mut all = vec![9_u8; 2 * comm.world_size()];
                let error = comm.all_gather_v_into(&mine, &mut all, &counts).expect_err("counts differ");
                assert!(all.iter().all(|byte| *byte == 9), "the buffer was touched");
                error
            });
            assert!(errors.iter().all(Error::is_mismatch), "{errors:?}");
        }
    }
}

/// The calls in which each rank knows only a part of the counts.
const PARTLY_KNOWN: [&str; 7] =
    ["all_to_all_v", "gather_v", "scatter_v", "all_to_all_list", "gather_list", "scatter_list", "all_gather_list"];

/// The form of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Blocking,
    Started,
    Grouped,
}

/// Makes a call in which rank 1 sends `mine` and its peer expects `theirs`, or the other way round. All other counts
/// are `len`. Returns the destination unless the call is started, which keeps it.
fn partly_known(comm: &Communicator, name: &str, form: Form, len: usize, [mine, theirs]: [usize; 2]) -> (Result<()>, Vec<Vec<u8>>) {
    let (me, n) = (comm.rank(), comm.world_size());
    // The rank that disagrees with rank 1: the last rank in an exchange, else the root.
    let other = if name.starts_with("all") && n > 2 { n - 1 } else { 0 };
    let with = |at: usize, count: usize| (0..n).map(|rank| if rank == at { count } else { len }).collect::<Vec<_>>();
    let sends = if me == 1 { with(other, mine) } else { vec![len; n] };
    let expects = if me == other { with(1, theirs) } else { vec![len; n] };
    let own = if me == 1 { mine } else { len };
    let zeros = |counts: &[usize]| counts.iter().map(|count| vec![1_u8; *count]).collect::<Vec<_>>();
    let untouched = |counts: &[usize]| counts.iter().map(|count| vec![0xa5_u8; *count]).collect::<Vec<_>>();
    let (all_sent, mut all_expected) = (zeros(&sends), untouched(&expects));
    let (source, mut destination) = (all_sent.concat(), all_expected.concat());
    let (one, mut into_one) = (vec![1_u8; own], vec![0xa5_u8; own]);
    let is_root = me == 0;
    // In a scatter, the root sends what rank 1 does not expect.
    let parts = zeros(&if is_root { with(1, theirs) } else { Vec::new() });
    let (joined, counts) = (parts.concat(), parts.iter().map(Vec::len).collect::<Vec<_>>());
    let result = match (name, form) {
        ("all_to_all_v", Form::Blocking) => comm.all_to_all_v_into(&source, &sends, &mut destination, &expects),
        ("all_to_all_v", Form::Grouped) => {
            comm.group(|group| group.all_to_all_v_into(&source, &sends, &mut destination, &expects)).map(drop)
        }
        ("all_to_all_v", Form::Started) => {
            comm.start_all_to_all_v_into(source, &sends, destination.clone(), &expects).unwrap().wait().map(drop)
        }
        ("gather_v", Form::Blocking) => comm.gather_v_into(&one, is_root.then_some((&mut destination, &expects[..])), 0),
        ("gather_v", Form::Grouped) => {
            comm.group(|group| group.gather_v_into(&one, is_root.then_some((&mut destination, &expects[..])), 0)).map(drop)
        }
        ("gather_v", Form::Started) => {
            comm.start_gather_v_into(one, is_root.then_some((destination.clone(), &expects[..])), 0).unwrap().wait().map(drop)
        }
        ("scatter_v", Form::Blocking) => comm.scatter_v_into(is_root.then_some((&joined, &counts[..])), &mut into_one, 0),
        ("scatter_v", Form::Grouped) => {
            comm.group(|group| group.scatter_v_into(is_root.then_some((&joined, &counts[..])), &mut into_one, 0)).map(drop)
        }
        ("scatter_v", Form::Started) => {
            comm.start_scatter_v_into(is_root.then_some((joined, &counts[..])), into_one.clone(), 0).unwrap().wait().map(drop)
        }
        ("all_to_all_list", Form::Blocking) => comm.all_to_all_list(&all_sent, &mut all_expected),
        ("all_to_all_list", Form::Grouped) => comm.group(|group| group.all_to_all_list(&all_sent, &mut all_expected)).map(drop),
        ("all_to_all_list", Form::Started) => comm.start_all_to_all_list(all_sent, all_expected.clone()).unwrap().wait().map(drop),
        ("gather_list", Form::Blocking) => comm.gather_list(&one, is_root.then_some(&mut all_expected), 0),
        ("gather_list", Form::Grouped) => comm.group(|group| group.gather_list(&one, is_root.then_some(&mut all_expected), 0)).map(drop),
        ("gather_list", Form::Started) => comm.start_gather_list(one, is_root.then_some(all_expected.clone()), 0).unwrap().wait().map(drop),
        ("scatter_list", Form::Blocking) => comm.scatter_list(is_root.then_some(&parts[..]), &mut into_one, 0),
        ("scatter_list", Form::Grouped) => {
            comm.group(|group| group.scatter_list(is_root.then_some(&parts[..]), &mut into_one, 0)).map(drop)
        }
        ("scatter_list", Form::Started) => comm.start_scatter_list(is_root.then_some(parts), into_one.clone(), 0).unwrap().wait().map(drop),
        // All ranks receive rank 1's block, and one of them has room for a different length.
        (_, form) => {
            let counts = if me == other { with(1, theirs) } else { with(1, mine) };
            let mut all = untouched(&counts);
            let result = match form {
                Form::Blocking => comm.all_gather_list(&one, &mut all),
                Form::Grouped => comm.group(|group| group.all_gather_list(&one, &mut all)).map(drop),
                Form::Started => comm.start_all_gather_list(one, all.clone()).unwrap().wait().map(drop),
            };
            return (result, all);
        }
    };
    (result, [all_expected, vec![destination, into_one]].concat())
}

#[test]
fn counts_that_each_rank_knows_in_part_fail_on_every_rank_alike_and_nothing_is_written() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5] {
            for (turn, name) in PARTLY_KNOWN.into_iter().enumerate() {
                for (at, form) in [Form::Blocking, Form::Started, Form::Grouped].into_iter().enumerate() {
                    let len = [9, 70_000][(turn + at) % 2];
                    // One more, one less, nothing expected, and nothing sent.
                    let counts = [[len + 1, len], [len, len + 1], [len, 0], [0, len]][(turn + at + ranks) % 4];
                    let what = format!("{form:?} {name} of {len} on {ranks} ranks, {wiring:?}, {counts:?}");
                    let errors = threads(wiring, ranks, |comm| {
                        let (result, destination) = partly_known(comm, name, form, len, counts);
                        let error = result.expect_err(&what);
                        assert!(destination.iter().flatten().all(|byte| *byte == 0xa5), "{what}: rank {}'s is written", comm.rank());
                        let again = comm.barrier().expect_err("the communicator is ended");
                        assert!(again.is_poisoned() && again.is_mismatch(), "{what}: {again}");
                        error
                    });
                    for (rank, error) in errors.iter().enumerate() {
                        assert!(error.is_mismatch(), "{what}: rank {rank}: {error}");
                        assert_eq!(error.to_string(), errors[0].to_string(), "{what}: rank {rank}");
                    }
                }
            }
        }
    }
}

#[test]
fn counts_that_do_not_fit_together_are_named_by_their_two_ends() {
    for wiring in Wiring::ALL {
        let errors = threads(wiring, 4, |comm| partly_known(comm, "all_to_all_v", Form::Blocking, 7, [8, 6]).0.unwrap_err().to_string());
        for error in errors {
            assert!(error.contains("rank 1") && error.contains("all_to_all_v(u8, count 8 to rank 3) number"), "{wiring:?}: {error}");
            assert!(error.contains("rank 3") && error.contains("all_to_all_v(u8, count 6 from rank 1) number"), "{wiring:?}: {error}");
        }
    }
}

#[test]
fn counts_and_ops_of_one_short_hash_are_told_apart() {
    // These are the same to a comparison of 24 bits of FNV-1a.
    let (counts, ops) = ([[690, 3410], [1225, 2875]], ["op 2921", "op 4283"]);
    for wiring in Wiring::ALL {
        let errors = threads(wiring, 2, |comm| {
            let counts = &counts[comm.rank()];
            let mut all = vec![true; 4100];
            let error = comm.all_gather_v_into(&vec![false; counts[comm.rank()]], &mut all, counts).expect_err("counts differ");
            assert!(all.iter().all(|truth| *truth), "the buffer was touched");
            error
        });
        assert!(errors.iter().all(Error::is_mismatch), "{wiring:?}: {errors:?}");
        let errors = threads(wiring, 2, |comm| {
            let mut mine = vec![7_u16; counts[comm.rank()][comm.rank()]];
            let error = comm.reduce_scatter_v_into(&[1_u16; 4100], &mut mine, &counts[comm.rank()], ReduceOp::Sum);
            assert!(mine.iter().all(|value| *value == 7), "the buffer was touched");
            error.expect_err("counts differ")
        });
        assert!(errors.iter().all(Error::is_mismatch), "{wiring:?}: {errors:?}");
        for varied in [false, true] {
            let errors = threads(wiring, 2, |comm| {
                let op = CustomOp::new(ops[comm.rank()], |into: &mut [u16], from: &[u16]| into.copy_from_slice(from));
                let mut x = [comm.rank() as u16; 2];
                let result = if varied { comm.reduce_scatter_v(&mut x, &[1, 1], op) } else { comm.all_reduce(&mut x, op) };
                result.expect_err("the ops differ")
            });
            assert!(errors.iter().all(Error::is_mismatch), "{wiring:?}: {errors:?}");
        }
    }
}

#[test]
fn bad_arguments_are_refused_here_and_leave_the_communicator_alone() {
    threads(Wiring::Shm, 2, |comm| {
        let mut three = [1.0_f32; 3];
        let refused = [
            comm.all_reduce_into(&[1.0_f32; 2], &mut three, ReduceOp::Sum),
            comm.all_gather(&mut three),
            comm.all_gather_into(&[1.0_f32; 2], &mut three),
            comm.reduce_scatter_into(&three.clone(), &mut [0.0_f32], ReduceOp::Sum),
            comm.broadcast(&mut three, 2),
            comm.reduce(&mut three, 99, ReduceOp::Sum),
            comm.scatter_into(None::<&[f32; 4]>, &mut three, comm.rank()),
            comm.gather_into(&three.clone(), Some(&mut [0.0_f32; 6]), 1 - comm.rank()),
            comm.all_to_all_v_into(&three.clone(), &[1, 1], &mut [0.0_f32; 2], &[1, 1]),
            comm.all_gather_v(&mut three, &[3]),
            comm.all_gather_v(&mut three, &[usize::MAX, 4]),
            comm.send(&three.clone(), 2),
            comm.send(&three.clone(), Envelope::rank(1).tag(1 << 63)),
            comm.recv(&mut three, 5).map(drop),
        ];
        for (number, result) in refused.into_iter().enumerate() {
            let error = result.expect_err(&format!("call {number} must be refused"));
            assert!(matches!(error, Error::InvalidArgument { .. }), "call {number}: {error}");
        }
        assert!(comm.all_reduce(&mut [true], ReduceOp::Avg).unwrap_err().is_unsupported());
        assert!(comm.all_reduce(&mut three, ReduceOp::BitOr).unwrap_err().is_unsupported());
        assert!(comm.all_reduce(&mut [1_u8], ReduceOp::PreMulSum(2.0)).unwrap_err().is_unsupported());
        let mut x = comm.rank() as i32;
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!((x, three), (1, [1.0; 3]));
    });
}
