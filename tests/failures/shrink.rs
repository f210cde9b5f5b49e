//! Communicators of the ranks that are left, after any rank has died, and when another one dies while they are created.

use std::time::{Duration, Instant};

use collectives::{Communicator, Error, ReduceOp, Result, Secret};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::random::Random;
use crate::common::ranks::{Meeting, Wiring, is_rank_of, patience, threads, threads_with};
use crate::processes::Ranks;

/// The time from a death until the survivors work again, on a loaded machine. None of their waits ends by a deadline.
const RECOVERED: Duration = patience(10);

/// Runs one rank that continues with the remaining ranks until it is alone, and prints which ones they are.
fn rank_until_alone(wiring: Wiring) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let mut comm = wiring.builder(rank).from_env().unwrap();
    println!("@ready");
    loop {
        let error = work_until_it_fails(&comm, rank);
        assert!(error.is_peer_lost() || matches!(error, Error::Aborted { .. }), "{error}");
        comm = comm.shrink().unwrap();
        let mut members = vec![0_u64; comm.world_size()];
        match comm.all_gather_into(&(rank as u64), &mut members) {
            Ok(()) => println!("@shrunk {members:?}"),
            // Another rank has died, so the loop shrinks again.
            Err(error) => assert!(error.is_peer_lost() || matches!(error, Error::Aborted { .. }), "{error}"),
        }
        if comm.world_size() == 1 {
            return;
        }
    }
}

/// Makes several kinds of calls, checks each result, and returns the first error.
fn work_until_it_fails(comm: &Communicator, rank: usize) -> Error {
    let run = || -> Result<()> {
        let mut members = vec![0_u64; comm.world_size()];
        comm.all_gather_into(&(rank as u64), &mut members)?;
        for round in 0_u64.. {
            let mut x = vec![rank as u64 + round; if round.is_multiple_of(8) { 50_000 } else { 3 }];
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            let sum: u64 = members.iter().map(|rank| rank + round).sum();
            assert!(x.iter().all(|x| *x == sum), "rank {rank} of {members:?} in round {round}: {} is not {sum}", x[0]);
            let mut y = [round];
            comm.broadcast(&mut y, round as usize % comm.world_size())?;
            assert_eq!(y, [round]);
        }
        unreachable!()
    };
    run().unwrap_err()
}

/// Waits until every rank of `left` works with exactly these ranks.
fn wait_until_shrunk(ranks: &mut Ranks, left: &[usize], name: &str) {
    let mut working: Vec<usize> = Vec::new();
    while working.len() < left.len() {
        let (rank, line) = ranks.next("the others are left");
        if line == format!("shrunk {left:?}") {
            working.push(rank);
        }
    }
    working.sort_unstable();
    assert_eq!(working, left, "{name}");
}

/// Kills ranks one after another. The others continue each time, down to the last.
fn one_after_another(name: &str, wiring: Wiring, world_size: usize, victims: &[usize]) {
    if is_rank_of(name) {
        return rank_until_alone(wiring);
    }
    let mut ranks = Ranks::spawn(name, world_size);
    (0..world_size).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
    let mut left: Vec<usize> = (0..world_size).collect();
    for victim in victims {
        left.retain(|rank| rank != victim);
        let killed = Instant::now();
        ranks.children[*victim].kill().unwrap();
        wait_until_shrunk(&mut ranks, &left, name);
        println!("{name}: {left:?} work again after {:?}", killed.elapsed());
        assert!(killed.elapsed() < RECOVERED, "{name}: {:?}", killed.elapsed());
    }
    left.into_iter().for_each(|rank| ranks.outcome(rank).unwrap());
}

macro_rules! shrinks {
    ($($test:ident $wiring:ident $world_size:literal $victims:expr;)*) => {$(
        #[test]
        fn $test() {
            one_after_another(concat!("shrink::", stringify!($test)), Wiring::$wiring, $world_size, &$victims);
        }
    )*};
}

shrinks! {
    survivors_in_shm_go_on_down_to_the_last Shm 4 [1, 0, 3];
    survivors_over_tcp_go_on_down_to_the_last Tcp 4 [3, 0, 1];
    survivors_in_pairs_go_on_down_to_the_last Pairs 5 [2, 0, 4, 3];
    of_two_in_shm_one_goes_on_alone Shm 2 [0];
    of_two_over_tcp_one_goes_on_alone Tcp 2 [1];
    survivors_as_dealt_go_on_down_to_the_last Dealt 5 [2, 4, 0, 1];
}

/// Kills a rank and, at a random moment of the recovery, another one.
fn another_dies_meanwhile(name: &str, wiring: Wiring) {
    const RANKS: usize = 4;
    if is_rank_of(name) {
        return rank_until_alone(wiring);
    }
    let (mut random, seed) = Random::new();
    for round in 0..6 {
        let mut ranks = Ranks::spawn(name, RANKS);
        (0..RANKS).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
        let first = random.below(RANKS);
        let second = (first + 1 + random.below(RANKS - 1)) % RANKS;
        let pause = Duration::from_micros(random.below(60_000) as u64);
        println!("{name}: seed {seed} round {round}: {first}, and {second} after {pause:?}");
        let killed = Instant::now();
        ranks.children[first].kill().unwrap();
        while killed.elapsed() < pause {
            std::thread::yield_now();
        }
        ranks.children[second].kill().unwrap();
        let left: Vec<usize> = (0..RANKS).filter(|rank| *rank != first && *rank != second).collect();
        wait_until_shrunk(&mut ranks, &left, name);
        println!("{name}: {left:?} work again after {:?}", killed.elapsed());
    }
}

#[test]
fn another_death_in_shm_while_they_shrink_is_survived() {
    another_dies_meanwhile("shrink::another_death_in_shm_while_they_shrink_is_survived", Wiring::Shm);
}

#[test]
fn another_death_over_tcp_while_they_shrink_is_survived() {
    another_dies_meanwhile("shrink::another_death_over_tcp_while_they_shrink_is_survived", Wiring::Tcp);
}

/// Runs one rank of [`a_stopped_rank_is_left_behind`].
fn rank_of_a_job_with_a_sleeper(wiring: Wiring, sleeper: usize) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let comm = wiring.builder(rank).from_env().unwrap();
    comm.set_timeout(Duration::from_secs(1));
    println!("@ready");
    let error = work_until_it_fails(&comm, rank);
    comm.set_timeout(Duration::from_secs(10));
    if rank == sleeper {
        let error = comm.shrink().expect_err("the others have gone on");
        assert!(matches!(error, Error::LeftBehind { rank, .. } if rank == sleeper), "{error}");
        println!("@left behind");
        return;
    }
    assert!(error.is_timeout(), "{error}");
    let comm = comm.shrink().unwrap();
    let mut members = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&(rank as u64), &mut members).unwrap();
    println!("@shrunk {members:?}");
    // Waits until the parent has seen that the stopped rank was left behind.
    comm.set_timeout(Duration::from_secs(60));
    let _ = std::io::stdin().read_line(&mut String::new());
    let mut x = [rank as u64];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    println!("@works {}", x[0]);
}

/// Stops a rank for longer than the deadline, and lets it continue after the others have shrunk without it.
fn a_stopped_rank_is_left_behind(name: &str, wiring: Wiring, world_size: usize, sleeper: usize) {
    if is_rank_of(name) {
        return rank_of_a_job_with_a_sleeper(wiring, sleeper);
    }
    let mut ranks = Ranks::spawn(name, world_size);
    (0..world_size).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
    let pid = Pid::from_raw(ranks.children[sleeper].id() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let left: Vec<usize> = (0..world_size).filter(|rank| *rank != sleeper).collect();
    wait_until_shrunk(&mut ranks, &left, name);
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(ranks.next("it was left behind"), (sleeper, "left behind".to_owned()));
    ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    for _ in &left {
        assert_eq!(ranks.next("the others work").1, format!("works {}", left.iter().sum::<usize>()));
    }
    (0..world_size).for_each(|rank| ranks.outcome(rank).unwrap());
}

macro_rules! sleepers {
    ($($test:ident $wiring:ident $world_size:literal $sleeper:literal;)*) => {$(
        #[test]
        fn $test() {
            a_stopped_rank_is_left_behind(concat!("shrink::", stringify!($test)), Wiring::$wiring, $world_size, $sleeper);
        }
    )*};
}

sleepers! {
    stopped_in_shm_0_of_3_is_left_behind Shm 3 0;
    stopped_in_shm_1_of_2_is_left_behind Shm 2 1;
    stopped_over_tcp_1_of_3_is_left_behind Tcp 3 1;
}

#[test]
fn a_whole_communicator_can_be_shrunk_to_itself() {
    for wiring in Wiring::ALL {
        let split = Meeting::new(3);
        let sums = threads(wiring, 3, |comm| {
            let again = comm.shrink().unwrap();
            assert!(comm.barrier().unwrap_err().is_poisoned());
            let half = again.split(Some(u32::from(again.rank() == 1)), 0).unwrap().unwrap();
            // A shrink ends the calls that other ranks have not finished.
            split.meet();
            let part = half.shrink().unwrap();
            let mut x = [again.rank() as u64];
            part.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            (part.world_size(), x[0])
        });
        assert_eq!(sums, [(2, 2), (1, 1), (2, 2)], "{wiring:?}");
    }
}

#[test]
fn a_job_with_a_secret_shrinks_with_it() {
    let secret = Secret::random().unwrap();
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let lefts = threads_with(
            3,
            |rank| wiring.builder(rank).configure(|config| config.secret = Some(secret.clone())),
            |comm| {
                if comm.rank() == 1 {
                    return 0;
                }
                // Rank 1 has closed its communicator. Its process still exists.
                assert!(comm.barrier().unwrap_err().is_peer_lost());
                let left = comm.shrink().unwrap();
                left.barrier().unwrap();
                left.world_size()
            },
        );
        assert_eq!(lefts, [2, 0, 2], "{wiring:?}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_half_the_deadline() {
    let over = Meeting::new(3);
    let lefts = threads(Wiring::Tcp, 3, |comm| {
        if comm.rank() == 0 {
            // This rank is alive, but calls shrink only after the others are done, which is too late.
            over.meet();
            let error = comm.shrink().expect_err("the others have gone on");
            over.meet();
            return error.to_string().matches("continued without rank 0").count();
        }
        comm.set_timeout(Duration::from_secs(6));
        let left = comm.shrink().unwrap();
        left.barrier().unwrap();
        over.meet();
        over.meet();
        left.world_size()
    });
    assert_eq!(lefts, [1, 2, 2]);
}
