//! Ranks that disagree, die, never arrive, time out, or send garbage.

use std::time::Instant;

use super::links::{Chaos, Socket, meshes};
use super::plans::{destination, plan, source, step};
use super::*;
use crate::host::engine::wire;
use crate::host::plan::Action;

const SOON: Duration = Duration::from_secs(1);

/// Runs the same ring on every rank, each with its own call. Returns the results, and checks that a failed rank's
/// destination is untouched.
fn calls_over<K: ByteLink + Send>(meshes: Vec<Mesh<K>>, calls: &(dyn Fn(usize) -> Call + Sync)) -> Vec<Result<(), Interrupted>> {
    let size = meshes.len();
    let began = Instant::now();
    let results = on_threads(Rank::all(meshes), |rank, this| {
        let (mine, mut got) = (numbers(rank, size * 2), vec![u64::MAX; size * 2]);
        // The agreement runs first, as in a plan that promises not to touch the destination before it.
        let mut agreed = plans::barrier(rank, size);
        let last = agreed.steps.len() - 1;
        for mut later in plans::ring(rank, size, 16).steps {
            later.after.iter_mut().for_each(|before| *before += last + 1);
            later.after.extend(0..=last);
            agreed.steps.push(later);
        }
        agreed.scratch_bytes = size * 16;
        let result = this.run(&agreed, &calls(rank), memory(&mine, size * 16, &mut got, size * 16));
        assert!(result.is_ok() || got.iter().all(|number| *number == u64::MAX), "rank {rank}: {result:?}");
        result
    });
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    results
}

#[test]
fn every_rank_learns_which_two_calls_differ() {
    let right = call(7);
    let wrong = [
        Call { kind: Collective::ReduceScatter, ..right },
        Call { op: 2, ..right },
        Call { element: TypeTag::Scalar(DType::F32), ..right },
        Call { count: 5, ..right },
        Call { root: Some(0), ..right },
        Call { op: 9 << 40 | 255, ..right },
        Call { kind: Collective::AllGatherV, count: 0, counts_hash: 99 << 80, ..right },
        Call { sequence: 8, ..right },
    ];
    for (index, odd) in wrong.into_iter().enumerate() {
        for size in [2, 3, 5] {
            let calls = |rank| if rank == 1 { odd } else { right };
            let results = match index % 2 {
                0 => calls_over(sockets(size), &calls),
                _ => calls_over(chaos(size, 0x5eed_0010 + index as u64), &calls),
            };
            for (rank, result) in results.into_iter().enumerate() {
                let Err(Interrupted { abort_reason: AbortReason::Mismatch { first, second }, .. }) = result else {
                    panic!("rank {rank} of {size}: {result:?} for {odd}");
                };
                let mut both = [first, second];
                both.sort_by_key(|(rank, _)| *rank != 1);
                assert_eq!((both[0], both[1].1), ((1, odd), right), "rank {rank} of {size}");
                assert_ne!(both[1].0, 1);
            }
        }
    }
}

/// The calls are equal, but one rank sends more than the other expects.
#[test]
fn counts_that_only_two_ranks_know_are_compared() {
    let results = on_threads(Rank::all(sockets(2)), |rank, this| {
        let call = Call { kind: Collective::AllToAllV, count: 0, ..call(3) };
        let (out, back) = if rank == 0 { (40, 16) } else { (16, 24) };
        let steps = vec![
            step(Action::Send { to: 1 - rank, from: source(0, out) }, &[]),
            step(Action::Receive { from: 1 - rank, into: destination(0, back) }, &[]),
        ];
        let mut got = [0; 8];
        let result = this.run(&plan(steps, 0), &call, memory(&[1; 8], 64, &mut got, 64));
        assert!(rank == 0 || got == [0; 8]);
        result
    });
    let Err(Interrupted { abort_reason: AbortReason::Mismatch { first, second }, .. }) = &results[1] else { panic!("{results:?}") };
    assert_eq!((first.0, first.1.count, second.0, second.1.count), (0, 5, 1, 3));
    // Rank 0 received all that it expected, so it may have finished before.
    assert!(results[0].is_ok() || results[0] == results[1], "{results:?}");
}

/// Ranks 0 and 2 have no link to each other, and learn of each other's end through rank 1.
#[test]
fn an_abort_reason_reaches_ranks_that_have_no_link_to_the_culprit() {
    let line = meshes(4, |a, b| (b == a + 1).then(Socket::pair));
    let began = Instant::now();
    let results = on_threads(Rank::all(line), |rank, this| {
        let neighbours = [rank.checked_sub(1), Some(rank + 1).filter(|next| *next < 4)];
        let receive = |peer| step(Action::Receive { from: peer, into: destination(0, 8) }, &[]);
        let steps = neighbours.into_iter().flatten().filter(|peer| *peer != 0).map(receive).collect();
        if rank == 0 {
            this.health.end(AbortReason::Aborted { by: 0 });
        }
        this.run(&plan(steps, 0), &call(1), memory(&[0], 8, &mut [0], 8))
    });
    assert_eq!(results, vec![Err(AbortReason::Aborted { by: 0 }.into()); 4]);
    assert!(began.elapsed() < SOON);
}

fn survivors_name_the_dead<K: ByteLink + Send>(meshes: Vec<Mesh<K>>) {
    let began = Instant::now();
    let count = 60_000;
    let results = on_threads(Rank::all(meshes), |rank, this| {
        if rank == 2 {
            this.links.0.clear();
            return Err(AbortReason::Lost { rank: 2, by: 2 }.into());
        }
        let (mine, mut got) = (numbers(rank, count), vec![0; count]);
        this.run(&plans::ring(rank, 4, count / 4 * 8), &call(1), memory(&mine, count * 8, &mut got, count * 8))
    });
    let lost = |result: &Result<(), Interrupted>| match result {
        Err(Interrupted { abort_reason: AbortReason::Lost { rank, .. }, .. }) => Some(*rank),
        _ => None,
    };
    assert!(results[1..].iter().all(|result| lost(result) == Some(2)), "{results:?}");
    // Rank 0 learns of it from its neighbours. If rank 0 gets no core for long, a neighbour cuts its link to rank 0
    // instead.
    assert!(lost(&results[0]).is_some_and(|rank| rank != 0), "{:?}", results[0]);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn survivors_name_the_rank_that_died() {
    survivors_name_the_dead(sockets(4));
    survivors_name_the_dead(chaos(4, 0x5eed_0020));
}

#[test]
fn a_deadline_names_who_did_not_come() {
    let results = on_threads(Rank::all(sockets(4)), |rank, this| {
        if rank == 3 {
            return None;
        }
        // Every rank sends to every rank: all wait for rank 3, and the others have sent their part.
        let plan = plans::all_to_all(rank, &vec![vec![8; 4]; 4]);
        // The first rank to time out notifies the others. It must be rank 0.
        let limit = Duration::from_millis(if rank == 0 { 100 } else { 20_000 });
        Some(this.run_within(limit, &plan, &call(1), memory(&[1; 4], 32, &mut [0; 4], 32)))
    });
    let abort_reason = AbortReason::TimedOut { waiting: 0, missing: 3 };
    assert_eq!(results[0], Some(Err(Interrupted { abort_reason, missing: vec![3], arrived: vec![0, 1, 2] })));
    for (rank, result) in results.iter().enumerate().take(3).skip(1) {
        assert_eq!(*result, Some(Err(Interrupted { abort_reason, missing: vec![3], arrived: vec![0, rank as u32] })));
    }
}

/// A peer that has sent all it should but accepts nothing also counts as missing. A peer whose bytes cannot be read yet
/// does not.
#[test]
fn a_deadline_tells_who_is_waited_for_from_who_waits() {
    let mut ranks = Rank::all(sockets(3));
    let mut early = ranks.remove(2);
    let send = plan(vec![step(Action::Send { to: 0, from: source(0, 8) }, &[])], 0);
    assert_eq!(early.run(&send, &call(1), memory(&[1], 8, &mut [], 0)), Ok(()));
    let receive = |from| Action::Receive { from, into: destination(0, 8) };
    let both = plan(vec![step(receive(1), &[]), step(receive(2), &[0])], 0);
    let stop = ranks[0].run_within(Duration::from_millis(50), &both, &call(1), memory(&[], 0, &mut [0], 8)).expect_err("late");
    assert_eq!((stop.missing, stop.arrived), (vec![1], vec![0, 2]));

    let mut ranks = Rank::all(sockets(2));
    let long = vec![0; 1 << 18];
    let send = plan(vec![step(Action::Send { to: 1, from: source(0, 1 << 21) }, &[])], 0);
    let stop = ranks[0].run_within(Duration::from_millis(50), &send, &call(1), memory(&long, 1 << 21, &mut [], 0)).expect_err("late");
    assert_eq!((stop.missing, stop.arrived), (vec![1], vec![0]));
    // The message was cut off, so the link is closed: a reason to abort must not be sent in the middle of it.
    assert!(ranks[0].links.0[1].is_none());
}

#[test]
fn an_abort_from_another_thread_ends_every_rank() {
    let ranks = Rank::all(sockets(3));
    let health = Arc::clone(&ranks[1].health);
    let began = Instant::now();
    let results = on_threads(ranks, |rank, this| {
        if rank == 2 {
            health.end(AbortReason::Aborted { by: 1 });
        }
        let plan = plan(vec![step(Action::Receive { from: (rank + 1) % 3, into: destination(0, 8) }, &[])], 0);
        this.run(&plan, &call(1), memory(&[], 0, &mut [0], 8))
    });
    assert_eq!(results, vec![Err(AbortReason::Aborted { by: 1 }.into()); 3]);
    assert!(began.elapsed() < SOON);
}

#[test]
fn an_interruption_ends_the_run_and_is_passed_on() {
    let mut ranks = Rank::all(sockets(2));
    let abort_reason = AbortReason::Lost { rank: 9, by: 0 };
    let (deadline, health) = (Deadline::after(SOON), Health::default());
    let request = Execution {
        plan: &CheckedPlan::new(plan(vec![step(Action::Receive { from: 1, into: destination(0, 8) }, &[])], 0)),
        participants: &[0, 1],
        memory: memory(&[], 0, &mut [0], 8),
        call: &call(1),
        fold: None,
        deadline: &deadline,
        health: &health,
        recorder: &crate::flight::Flight::default(),
        interrupted: &mut || Some(abort_reason),
    };
    let Rank { engine, links, .. } = &mut ranks[0];
    assert_eq!(engine.run(request, links), Err(abort_reason.into()));
    assert_eq!(health.abort_reason(), Some(&abort_reason));
    assert_eq!(ranks[1].run(&plans::barrier(1, 2), &call(1), memory(&[], 0, &mut [], 0)), Err(abort_reason.into()));
}

/// Rank 0 is interrupted in the middle of a message, when the socket is full.
#[test]
fn an_abort_reason_never_lands_in_the_middle_of_a_payload() {
    const COUNT: usize = 1 << 20;
    let abort_reason = AbortReason::Aborted { by: 0 };
    let results = on_threads(Rank::all(sockets(2)), |rank, this| {
        let (mine, mut got) = (numbers(0, COUNT), vec![0; COUNT]);
        let memory = memory(&mine, COUNT * 8, &mut got, COUNT * 8);
        let result = if rank == 0 {
            let request = Execution {
                plan: &CheckedPlan::new(plan(vec![step(Action::Send { to: 1, from: source(0, COUNT * 8) }, &[])], 0)),
                participants: &[0, 1],
                memory,
                call: &call(1),
                fold: None,
                deadline: &Deadline::after(SOON),
                health: &this.health,
                recorder: &crate::flight::Flight::default(),
                interrupted: &mut || Some(abort_reason),
            };
            this.engine.run(request, &mut this.links)
        } else {
            this.run(&plan(vec![step(Action::Receive { from: 0, into: destination(0, COUNT * 8) }, &[])], 0), &call(1), memory)
        };
        // Received bytes are payload, and the others were not written.
        assert!(rank == 0 || got.iter().zip(&mine).all(|(got, sent)| *got == *sent || *got == 0));
        result
    });
    assert_eq!(results[0], Err(abort_reason.into()));
    // If a rank gets no core for long, its link is cut instead.
    assert!(
        [abort_reason, AbortReason::Lost { rank: 0, by: 1 }].map(|abort_reason| Err(abort_reason.into())).contains(&results[1]),
        "{:?}",
        results[1]
    );
}

#[test]
fn who_leaves_in_good_order_is_missed_only_when_needed() {
    let mut ranks = Rank::all(sockets(3));
    let Rank { engine, links, .. } = &mut ranks[2];
    engine.leave(links);
    links.0.clear();
    let (first, second) = ranks.split_at_mut(1);
    let (first, second) = (&mut first[0], &mut second[0]);
    for sequence in 1..=2 {
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(first.run(&plans::exchange(0, 8), &call(sequence), memory(&[5], 8, &mut [0], 8)), Ok(())));
            assert_eq!(second.run(&plans::exchange(1, 8), &call(sequence), memory(&[6], 8, &mut [0], 8)), Ok(()));
        });
    }
    for needs in [Action::Receive { from: 2, into: destination(0, 8) }, Action::Send { to: 2, from: source(0, 8) }] {
        let rank = if matches!(needs, Action::Send { .. }) { &mut *second } else { &mut *first };
        // Drops the link between ranks 0 and 1, over which the abort reason of the rank that ran first would arrive
        // first.
        rank.links.0.iter_mut().take(2).for_each(|link| *link = None);
        let result = rank.run(&plan(vec![step(needs, &[])], 0), &call(3), memory(&[5], 8, &mut [0], 8));
        assert_eq!(result, Err(AbortReason::Left { rank: 2 }.into()));
    }
}

/// A rank that makes a different call and needs nothing from the others still learns of the mismatch when it waits.
#[test]
fn a_rank_that_expects_nothing_hears_of_a_mismatch_all_the_same() {
    let results = on_threads(Rank::all(sockets(3)), |rank, this| {
        let odd = Call { kind: Collective::Broadcast, root: Some(2), ..call(4) };
        let (call, plan) = match rank {
            0 => (call(4), plan(vec![step(Action::Send { to: 1, from: source(0, 8) }, &[])], 0)),
            1 => (odd, plan(vec![step(Action::Receive { from: 2, into: destination(0, 8) }, &[])], 0)),
            _ => return Ok(()),
        };
        this.run(&plan, &call, memory(&[1], 8, &mut [0], 8))
    });
    let Err(Interrupted { abort_reason: AbortReason::Mismatch { first, second }, .. }) = &results[1] else { panic!("{results:?}") };
    assert_eq!((first.0, first.1.kind, second.0, second.1.kind), (1, Collective::Broadcast, 0, Collective::AllReduce));
}

/// Returns the abort reason of rank 0 when it expects 16 bytes and receives `bytes` from rank 1.
fn hears(bytes: &[u8]) -> AbortReason {
    let mut ranks = Rank::all(meshes(2, |_, _| Some(Chaos::pair(0x5eed_0030, 1 << 16))));
    let mut at = 0;
    while at < bytes.len() {
        let link = ranks[1].links.0[0].as_mut().expect("a link");
        at += link.try_write(&[std::io::IoSlice::new(&bytes[at..])]).unwrap_or(0);
    }
    let receive = |offset| step(Action::Receive { from: 1, into: destination(offset, 8) }, &[]);
    let both = plan(vec![receive(0), receive(8)], 0);
    ranks[0].run(&both, &call(1), memory(&[], 0, &mut [0; 2], 16)).expect_err("nonsense").abort_reason
}

#[test]
fn nonsense_from_a_peer_is_an_error_that_quotes_it() {
    let first = |total, payload| wire::encode_first(&call(1).to_bytes(), total, payload).to_vec();
    let good = [first(16, 8), vec![1; 8]].concat();
    let garbled = |header: [u8; 8]| AbortReason::Garbled { rank: 1, header: u64::from_be_bytes(header) };
    assert_eq!(hears(b"GET / HTTP/1.1\r\n"), garbled(*b"GET / HT"));
    assert_eq!(hears(&[good.clone(), vec![0; 8]].concat()), garbled([0; 8]));
    // The first message has the header of a later message, and a later message has the header of a first one.
    assert_eq!(hears(&wire::encode_next(8)), garbled([2, 0, 0, 0, 8, 0, 0, 0]));
    assert_eq!(hears(&[good.clone(), first(16, 8)].concat()), garbled([1, 0, 0, 0, 8, 0, 0, 0]));
    // The payload is longer than its span, or empty when it must not be.
    assert_eq!(hears(&first(16, 9)), garbled([1, 0, 0, 0, 9, 0, 0, 0]));
    assert_eq!(hears(&[good.clone(), wire::encode_next(9).to_vec()].concat()), garbled([2, 0, 0, 0, 9, 0, 0, 0]));
    assert_eq!(hears(&[good.clone(), wire::encode_next(0).to_vec()].concat()), garbled([2, 0, 0, 0, 0, 0, 0, 0]));
    // The fingerprint is not that of any call.
    let no_call = wire::encode_first(&[0xff; 32], 16, 8);
    assert_eq!(hears(&no_call), garbled([0xff; 8]));
    assert_eq!(hears(&[good, wire::encode_leave().to_vec()].concat()), AbortReason::Left { rank: 1 });
}

#[test]
fn random_bytes_end_the_run_and_nothing_else() {
    let seed = 0x5eed_0031;
    let mut random = Random(seed);
    for round in 0..300 {
        let mut bytes = [wire::encode_first(&call(1).to_bytes(), 16, 8).to_vec(), vec![1; 8], wire::encode_next(8).to_vec()].concat();
        // One byte of a correct stream is wrong. The payload is not checked, so it is not chosen.
        let at = [random.below(48), 56 + random.below(8)][random.below(2)];
        bytes[at] ^= 1 + random.below(255) as u8;
        bytes.extend((0..300).map(|_| 0xee));
        let abort_reason = hears(&bytes);
        assert!(
            !matches!(abort_reason, AbortReason::Lost { .. } | AbortReason::Failed { .. } | AbortReason::TimedOut { .. }),
            "seed {seed:#x} round {round} byte {at}: {abort_reason:?}"
        );
    }
}
