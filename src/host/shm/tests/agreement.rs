//! Ranks that disagree, are late, leave, or are notified of an end.

#![expect(unsafe_code, reason = "collectives take raw memory")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{PATIENCE, Rank, call, on_threads};
use crate::base::deadline::Deadline;
use crate::call::{Call, Collective};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::exchange::Exchange;
use crate::host::exchange::local::exchanges;
use crate::host::fold::Fold;
use crate::host::health::Health;
use crate::host::shm::layout::MAX_RANKS;
use crate::host::shm::{Blocks, Channel, Group, Memory};
use crate::meeting::{Meeting, wait_until};

/// A fold that must never run.
struct Untouchable;

impl Fold for Untouchable {
    fn element_bytes(&self) -> usize {
        1
    }

    fn is_commutative(&self) -> bool {
        true
    }

    unsafe fn fold(&self, _into: *mut u8, _inputs: &[*const u8], _bytes: usize, _last: bool) {
        panic!("folded though the ranks disagree");
    }
}

/// Makes a call of this kind, in place, on `bytes` that must stay unchanged.
fn attempt(rank: &mut Rank, kind: Collective, bytes: &mut [u8]) -> Result<(), Interrupted> {
    let (len, block) = (bytes.len(), bytes.len() / rank.size);
    let start = bytes.as_mut_ptr();
    let memory = Memory { source: start, destination: start };
    let own = rank.index * block;
    // SAFETY: blocks of the buffer, one per rank, or the whole.
    rank.make(kind, |group, context| unsafe {
        match kind {
            Collective::Broadcast => group.broadcast(memory, len, 0, context),
            Collective::AllReduce => group.all_reduce(memory, len, &Untouchable, true, context),
            Collective::Reduce => group.reduce(memory, len, 0, &Untouchable, true, context),
            Collective::AllGather => {
                let memory = Memory { source: memory.source.add(own), ..memory };
                group.all_gather(memory, Blocks::Equal(block), context)
            }
            Collective::ReduceScatter => {
                let memory = Memory { destination: memory.destination.add(own), ..memory };
                group.reduce_scatter(memory, Blocks::Equal(block), &Untouchable, true, context)
            }
            Collective::Gather => group.gather(Memory { source: memory.source.add(own), ..memory }, block, 0, context),
            Collective::Scatter => group.scatter(Memory { destination: memory.destination.add(own), ..memory }, block, 0, context),
            Collective::AllToAll => group.all_to_all(memory, block, context),
            _ => group.barrier(context),
        }
    })
}

const KINDS: [Collective; 9] = [
    Collective::Barrier,
    Collective::Broadcast,
    Collective::AllReduce,
    Collective::Reduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
];

#[test]
fn a_different_call_is_named_everywhere_and_touches_nothing() {
    for ranks in [2, 3, 5] {
        for (index, kind) in KINDS.into_iter().enumerate() {
            for &len in if cfg!(miri) { &[16, 5000][..] } else { &[16, 2000, 300_000] } {
                let other = KINDS[(index + 1 + len) % KINDS.len()];
                if other == kind {
                    continue;
                }
                let stops = on_threads(ranks, |mut rank| {
                    rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
                    let mut bytes = vec![rank.index as u8; len];
                    let kind = if rank.index == ranks - 1 { other } else { kind };
                    let stop = attempt(&mut rank, kind, &mut bytes).unwrap_err();
                    assert!(bytes.iter().all(|byte| *byte == rank.index as u8));
                    assert_eq!(attempt(&mut rank, Collective::Barrier, &mut bytes), Err(stop.abort_reason.into()), "it stays ended");
                    // The first rank may still be recording it.
                    while rank.group.abort_reason().is_none() {
                        std::thread::yield_now();
                    }
                    assert!(matches!(rank.group.abort_reason(), Some(AbortReason::Mismatch { .. })));
                    stop
                });
                for (rank, stop) in stops.into_iter().enumerate() {
                    let AbortReason::Mismatch { first, second } = stop.abort_reason else { panic!("{ranks} ranks, {kind:?}: {stop:?}") };
                    assert_eq!(first.0 as usize, rank);
                    let (mine, theirs) = if rank == ranks - 1 { (other, kind) } else { (kind, other) };
                    assert_eq!((first.1.kind, second.1.kind, first.1.sequence), (mine, theirs, 2));
                }
            }
        }
    }
}

#[test]
fn calls_that_differ_in_one_field_differ() {
    let base = call(Collective::Broadcast, 1);
    let others = [
        Call { op: 1, ..base },
        Call { count: 1, ..base },
        Call { root: Some(1), ..base },
        Call { op: 9 << 40, ..base },
        Call { kind: Collective::AllGatherV, counts_hash: 1 << 119, ..base },
        Call { sequence: 2, ..base },
        Call { element: crate::call::element::TypeTag::Plain(1), ..base },
    ];
    for other in others {
        on_threads(2, |mut rank| {
            let call = if rank.index == 0 { base } else { other };
            let context = super::CallContext {
                call: &call,
                deadline: &rank.deadline,
                health: &rank.health,
                recorder: &crate::flight::Flight::default(),
            };
            assert!(matches!(rank.group.barrier(&context).unwrap_err().abort_reason, AbortReason::Mismatch { .. }), "{other}");
        });
    }
}

/// Runs a barrier with a deadline of its own.
fn barrier_within(rank: &mut Rank, limit: Duration, sequence: u64) -> Result<(), Interrupted> {
    let (call, deadline) = (call(Collective::Barrier, sequence), Deadline::after(limit));
    rank.group.barrier(&super::CallContext {
        call: &call,
        deadline: &deadline,
        health: &rank.health,
        recorder: &crate::flight::Flight::default(),
    })
}

#[test]
fn a_deadline_names_who_is_missing_and_the_barrier_can_be_tried_again() {
    let (early, late) = (Meeting::new(2), Meeting::new(4));
    on_threads(4, |mut rank| {
        if rank.index == 1 || rank.index == 3 {
            late.meet();
            barrier_within(&mut rank, PATIENCE, 1).unwrap();
        } else {
            let stop = barrier_within(&mut rank, Duration::ZERO, 1).unwrap_err();
            assert!(stop.missing.contains(&1) && stop.missing.contains(&3) && stop.arrived.contains(&(rank.index as u32)));
            // From here on, the two have seen each other.
            early.meet();
            let stop = barrier_within(&mut rank, Duration::from_millis(20), 1).unwrap_err();
            assert_eq!(stop.abort_reason, AbortReason::TimedOut { waiting: rank.index as u32, missing: 1 });
            assert_eq!((stop.missing, stop.arrived), (vec![1, 3], vec![0, 2]));
            assert_eq!(rank.group.abort_reason(), None);
            late.meet();
            // Rank 0 retries the barrier, and rank 2 goes on without it: both have already entered the barrier that
            // ranks 1 and 3 make.
            if rank.index == 0 {
                barrier_within(&mut rank, PATIENCE, 1).unwrap();
            }
        }
        rank.sequence = 1;
        let mut bytes = [rank.index as u8; 100];
        attempt(&mut rank, Collective::Broadcast, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 100]);
        barrier_within(&mut rank, PATIENCE, 3).unwrap();
    });
}

#[test]
fn a_deadline_in_another_call_ends_the_group() {
    let late = Meeting::new(2);
    on_threads(2, |mut rank| {
        if rank.index == 0 {
            rank.deadline = Deadline::after(Duration::from_millis(10));
            let stop = attempt(&mut rank, Collective::Broadcast, &mut [0; 9]).unwrap_err();
            assert_eq!((stop.missing, stop.arrived), (vec![1], vec![0]));
            late.meet();
        } else {
            late.meet();
            assert_eq!(rank.group.abort_reason(), Some(AbortReason::TimedOut { waiting: 0, missing: 1 }));
            // The first step is complete from here; the next call sees the end.
            let _ = attempt(&mut rank, Collective::Broadcast, &mut [0; 9]);
            let stop = attempt(&mut rank, Collective::Broadcast, &mut [0; 9]).unwrap_err();
            assert_eq!(stop.abort_reason, AbortReason::TimedOut { waiting: 0, missing: 1 });
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named() {
    let stops = on_threads(3, |mut rank| {
        rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
        (rank.index != 1).then(|| attempt(&mut rank, Collective::AllToAll, &mut [0; 30]).unwrap_err().abort_reason)
    });
    assert_eq!(stops, [Some(AbortReason::Left { rank: 1 }), None, Some(AbortReason::Left { rank: 1 })]);
}

#[test]
fn what_a_rank_published_before_it_left_counts() {
    on_threads(2, |mut rank| {
        if rank.index == 0 {
            wait_until("rank 1 has left", || rank.group.region.member(1).has_departed());
            rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
        } else {
            let step = rank.group.next_step();
            rank.group.publish(step, call(Collective::Barrier, 1).fingerprint());
        }
    });
}

#[test]
fn an_abort_ends_a_wait_here_and_elsewhere() {
    let began = Instant::now();
    let stops = on_threads(3, |mut rank| {
        if rank.index == 2 {
            // This rank neither makes a call nor leaves before the others have been notified of the end.
            wait_until("the group has ended", || rank.group.abort_reason().is_some());
            return rank.group.abort_reason().unwrap();
        }
        let index = rank.index;
        let region = Arc::clone(&rank.group.region);
        let health = Health::default();
        let call = call(Collective::Barrier, 1);
        let context =
            super::CallContext { call: &call, deadline: &rank.deadline, health: &health, recorder: &crate::flight::Flight::default() };
        std::thread::scope(|scope| {
            if index == 0 {
                scope.spawn(|| {
                    wait_until("two ranks sleep", || region.control().sleepers() >= 2);
                    health.end(AbortReason::Aborted { by: 0 });
                });
            }
            rank.group.barrier(&context).unwrap_err().abort_reason
        })
    });
    assert_eq!(stops, [AbortReason::Aborted { by: 0 }; 3]);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_abort_reason_wakes_sleepers() {
    let stops = on_threads(3, |mut rank| {
        if rank.index != 2 {
            return attempt(&mut rank, Collective::Barrier, &mut []).unwrap_err().abort_reason;
        }
        wait_until("two ranks sleep", || rank.group.region.control().sleepers() >= 2);
        rank.group.propagate(&AbortReason::Failed { rank: 2 });
        rank.group.propagate(&AbortReason::Aborted { by: 2 });
        rank.group.abort_reason().unwrap()
    });
    assert_eq!(stops, [AbortReason::Failed { rank: 2 }; 3]);
}

#[test]
fn each_link_is_given_away_once() {
    on_threads(3, |mut rank| {
        for peer in 0..4 {
            for channel in [Channel::Collective, Channel::PointToPoint] {
                assert_eq!(rank.group.link(peer, channel).is_some(), peer != rank.index && peer < 3);
                assert!(rank.group.link(peer, channel).is_none());
            }
        }
        assert_eq!((rank.group.local_index(), rank.group.size()), (rank.index, 3));
    });
}

#[test]
fn two_hosts_make_two_groups() {
    let members = [vec![0, 2], vec![1, 3, 4]];
    std::thread::scope(|scope| {
        for (me, mut exchange) in exchanges(5).into_iter().enumerate() {
            let mine = members.iter().find(|members| members.contains(&me)).unwrap();
            scope.spawn(move || {
                let deadline = Deadline::after(PATIENCE);
                let mut group = Group::connect(&mut exchange, mine, me, 5, None, &deadline).unwrap();
                assert_eq!(group.size(), mine.len());
                let health = Health::default();
                let call = call(Collective::AllGather, 1);
                let context =
                    super::CallContext { call: &call, deadline: &deadline, health: &health, recorder: &crate::flight::Flight::default() };
                let mut all = vec![0; mine.len()];
                let memory = Memory { source: (&raw const me).cast(), destination: all.as_mut_ptr() };
                // SAFETY: one byte of this rank's number (little-endian), and room for one of each rank.
                unsafe { group.all_gather(memory, Blocks::Equal(1), &context) }.unwrap();
                assert_eq!(all, mine.iter().map(|rank| *rank as u8).collect::<Vec<_>>());
            });
        }
    });
}

/// An exchange in which the leader sends what the test chooses.
struct Scripted(Vec<Vec<Vec<u8>>>);

impl Exchange for Scripted {
    fn all_gather(&mut self, _mine: &[u8], _deadline: &Deadline) -> crate::error::Result<Vec<Vec<u8>>> {
        Ok(self.0.remove(0))
    }
}

#[test]
fn a_leader_that_fails_or_talks_nonsense_is_an_error() {
    let deadline = Deadline::after(Duration::from_millis(100));
    let follow = |name: &[u8], second: &[u8]| {
        let mut exchange = Scripted(vec![vec![name.to_vec(), Vec::new()], vec![second.to_vec(), Vec::new()]]);
        Group::connect(&mut exchange, &[0, 1], 1, 2, None, &deadline).err().unwrap().to_string()
    };
    let told = follow(b"\0no memory", b"\0no memory");
    assert!(told.contains("lost rank 0") && told.contains("no memory"), "{told}");
    assert!(follow(b"", b"").contains("empty message"));
    let with_key = |name: &[u8]| [&[2][..], &[7; 32], name].concat();
    assert!(follow(&with_key(&[0xff, 0xfe]), b"").contains("not a socket's name"));
    assert!(follow(&with_key(b"")[..32], b"").contains("a key of 31 B"));
    assert!(follow(b"\x01collectives-nobody-listens", b"").contains("although the job has a secret"));
    assert!(follow(&with_key(b"collectives-nobody-listens"), b"").contains("@collectives-nobody-listens"));
    let mut short = Scripted(vec![vec![], vec![]]);
    assert!(Group::connect(&mut short, &[0, 1], 1, 2, None, &deadline).is_err());
}

#[test]
fn a_member_that_fails_fails_everyone() {
    let mut exchange = Scripted(vec![vec![Vec::new(); 2], vec![Vec::new(), b"\0out of address space".to_vec()]]);
    let error = Group::connect(&mut exchange, &[0, 1], 0, 2, None, &Deadline::after(Duration::from_secs(1))).err().unwrap();
    assert!(error.is_peer_lost() && error.to_string().contains("rank 1") && error.to_string().contains("out of address space"), "{error}");
}

#[test]
fn impossible_members_are_refused() {
    let deadline = Deadline::after(Duration::from_secs(1));
    for members in [&[1, 0][..], &[1, 2], &[0, 0], &[0, 5], &[]] {
        let mut exchange = Scripted(Vec::new());
        assert!(Group::connect(&mut exchange, members, 0, 4, None, &deadline).is_err(), "{members:?}");
    }
    let world = MAX_RANKS + 1;
    let members: Vec<usize> = (0..world).collect();
    let mut exchange = Scripted(vec![vec![Vec::new(); world]; 2]);
    assert!(Group::connect(&mut exchange, &members, 0, world, None, &deadline).err().unwrap().is_unsupported());
}
