//! Several communicators in one call: disjoint lists, lists that share ranks, equal parts, and ranks that ask for
//! different ones.

use crate::common::ranks::{Wiring, processes, threads};

use collectives::{Communicator, Error, ReduceOp};

/// Checks that a communicator works and consists of these ranks of the job in this order.
fn assert_is_of(comm: &Communicator, members: &[usize]) {
    assert_eq!(comm.world_ranks(), members);
    let me = members[comm.rank()] as u64;
    let mut sum = [me];
    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum[0] as usize, members.iter().sum::<usize>());
    let mut all = vec![0_u64; members.len()];
    comm.all_gather_into(&[me], &mut all).unwrap();
    assert!(all.iter().zip(members).all(|(said, member)| *said as usize == *member));
}

/// Checks that lists become communicators on the ranks that they name.
fn assert_made(comm: &Communicator, lists: &[Vec<usize>]) {
    let groups = comm.subgroups(lists).unwrap();
    assert_eq!(groups.len(), lists.len());
    for (group, list) in groups.iter().zip(lists) {
        assert_eq!(group.is_some(), list.contains(&comm.rank()), "{list:?}");
        if let Some(group) = group {
            assert_is_of(group, list);
        }
    }
}

/// Returns lists for `n` ranks: one, none, halves, each rank twice, overlapping chains, and other orders.
fn constellations(n: usize) -> Vec<Vec<Vec<usize>>> {
    let all: Vec<usize> = (0..n).collect();
    let reversed: Vec<usize> = all.iter().rev().copied().collect();
    let (low, high) = all.split_at(n / 2);
    vec![
        vec![],
        vec![vec![]],
        vec![vec![n - 1]],
        vec![low.to_vec(), high.to_vec()],
        vec![all.clone(), reversed.clone(), all.clone()],
        all.iter().map(|rank| vec![*rank]).collect(),
        // Each rank in two lists.
        all.iter().filter(|_| n > 1).map(|rank| vec![(*rank + 1) % n, *rank]).collect(),
        vec![vec![0], reversed, vec![], low.to_vec(), vec![n - 1]],
    ]
}

#[test]
fn lists_become_communicators() {
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 3, 5] {
            threads(wiring, ranks, |comm| {
                for lists in constellations(ranks) {
                    assert_made(comm, &lists);
                }
                assert_is_of(comm, &(0..ranks).collect::<Vec<_>>());
            });
        }
    }
}

#[test]
fn lists_become_communicators_of_processes() {
    processes("subgroups::lists_become_communicators_of_processes", Wiring::Pairs, 3, |comm| {
        assert_made(comm, &[vec![2, 0], vec![1], vec![1, 2]]);
        assert_is_of(&comm.subgroup_of_size(1)?, &[comm.rank()]);
        Ok(())
    });
}

#[test]
fn disjoint_lists_are_one_split() {
    threads(Wiring::Shm, 4, |comm| {
        let exchanges = || comm.flight_recorder().records().iter().filter(|record| record.sequence.is_some()).count();
        let before = exchanges();
        comm.split(Some(comm.rank() as u32 / 2), 0).unwrap();
        let of_split = exchanges() - before;
        let cost = |lists: &[&[usize]]| {
            let before = exchanges();
            comm.subgroups(lists).unwrap();
            exchanges() - before
        };
        assert!(of_split > 1);
        assert_eq!(cost(&[&[0, 1], &[2, 3]]), of_split);
        // Two communicators of which only some ranks are members are created together.
        assert_eq!(cost(&[&[3], &[1, 0]]), of_split);
        assert_eq!(cost(&[&[0, 1], &[1, 2], &[2, 3]]), 2 * of_split - 1);
    });
}

#[test]
fn equal_parts() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for (ranks, size) in [(1, 1), (2, 1), (2, 2), (3, 3), (6, 2), (6, 3)] {
            threads(wiring, ranks, |comm| {
                let part = comm.subgroup_of_size(size).unwrap();
                let first = comm.rank() / size * size;
                assert_is_of(&part, &(first..first + size).collect::<Vec<_>>());
            });
        }
    }
}

#[test]
fn what_every_rank_asks_for_wrongly_is_refused_on_every_rank() {
    threads(Wiring::Shm, 3, |comm| {
        let refused = [
            (comm.subgroups(&[vec![0, 3]]).map(drop), "rank 3 does not exist"),
            (comm.subgroups(&[vec![0], vec![1, 1]]).map(drop), "rank 1 is listed twice"),
            (comm.subgroup(&[0, usize::MAX]).map(drop), "does not exist"),
            (comm.subgroup_of_size(0).map(drop), "the world size 3 is not a multiple of 0"),
            (comm.subgroup_of_size(2).map(drop), "the world size 3 is not a multiple of 2"),
            (comm.subgroup_of_size(6).map(drop), "the world size 3 is not a multiple of 6"),
        ];
        for (result, part) in refused {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(part), "{error}");
        }
        assert_is_of(comm, &[0, 1, 2]);
    });
}

#[test]
fn ranks_that_ask_for_different_ones_are_told_so() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 3, |comm| {
            let odd = comm.rank() == 2;
            let lists = |ours: &[&[usize]], theirs: &[&[usize]]| comm.subgroups(if odd { theirs } else { ours }).map(drop);
            let conflicts = [
                (lists(&[&[0, 1], &[2]], &[&[0], &[1, 2]]), "subgroups([[0], [1, 2]])"),
                // The same ranks in another order, or different lists.
                (lists(&[&[0, 1]], &[&[1, 0]]), "subgroups([[1, 0]])"),
                (lists(&[&[0], &[1]], &[&[1], &[0]]), "subgroups([[1], [0]])"),
                (lists(&[&[0]], &[&[0], &[]]), "subgroups([[0], []])"),
                // Only one rank passes an invalid list.
                (lists(&[&[0]], &[&[0, 9]]), "subgroups([[0, 9]])"),
                (comm.subgroup_of_size(if odd { 1 } else { 3 }).map(drop), "subgroup_of_size(1)"),
                (if odd { comm.subgroup(&[0]).map(drop) } else { comm.subgroups(&[[0]]).map(drop) }, "subgroup([0])"),
            ];
            for (number, (result, theirs)) in conflicts.into_iter().enumerate() {
                let error = result.unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, Error::Conflict { .. }), "{number}: {text}");
                assert!(text.contains(theirs) && text.contains("rank 0") && text.contains("rank 2"), "{number}: {text}");
                assert_is_of(comm, &[0, 1, 2]);
            }
        });
    }
}

#[test]
fn long_lists_are_quoted_in_part() {
    threads(Wiring::Shm, 2, |comm| {
        let lists = vec![vec![0, 1]; 1000 + comm.rank()];
        let error = comm.subgroups(&lists).unwrap_err().to_string();
        assert!(error.contains('…') && error.len() < 1200, "{error}");
        assert_is_of(comm, &[0, 1]);
    });
}

#[test]
fn what_is_no_list_at_all_is_a_mismatch() {
    threads(Wiring::Shm, 2, |comm| {
        let comm = comm.duplicate().unwrap();
        let error = if comm.rank() == 0 { comm.subgroups(&[[0, 1]]).map(drop) } else { comm.split(Some(0), 0).map(drop) };
        assert!(error.unwrap_err().is_mismatch());
    });
}
