//! Any rank, thread or signal can raise the stop flag; all ranks see it at the same step. A rank that dies instead is
//! named.

use std::sync::atomic::Ordering;

use collectives::{Communicator, Error};
use collectives_train::StopFlag;
use rustix::process::{Signal, getpid, kill_process};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};
use crate::trouble::a_rank_dies;

/// Returns the number of steps that a rank takes if it raises its flag in the given step.
fn steps(comm: &Communicator, stop: &StopFlag, raise_in: Option<usize>) -> usize {
    let mut step = 0;
    while !stop.agreed(comm).unwrap() {
        step += 1;
        if raise_in == Some(step) {
            stop.raise();
        }
    }
    step
}

#[test]
fn all_ranks_stop_in_the_step_in_which_the_first_rank_asks_for_it() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            // Each rank may ask, and at least one does.
            let mut asks: Vec<Option<usize>> = (0..world_size).map(|_| Some(random.below(12)).filter(|step| *step > 0)).collect();
            let sure = random.below(world_size);
            asks[sure] = Some(1 + random.below(6));
            let took = threads(wiring, world_size, |comm| steps(comm, &StopFlag::new(), asks[comm.rank()]));
            let first = asks.iter().flatten().min().unwrap();
            assert!(took.iter().all(|step| step == first), "{took:?} of {asks:?}, {wiring:?}, seed {seed}");
        }
    }
}

#[test]
fn a_flag_that_is_raised_before_the_first_step_lets_no_rank_take_one() {
    let took = threads(Wiring::Shm, 3, |comm| {
        let stop = StopFlag::new();
        if comm.rank() == 1 {
            stop.clone().raise();
        }
        steps(comm, &stop, None)
    });
    assert_eq!(took, [0, 0, 0]);
}

#[test]
fn a_thread_that_raises_the_flag_at_any_time_stops_all_ranks_at_one_step() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let took = threads(wiring, 3, |comm| {
            let stop = StopFlag::new();
            std::thread::scope(|scope| {
                if comm.rank() == 2 {
                    let handle = stop.handle();
                    scope.spawn(move || handle.store(true, Ordering::Relaxed));
                }
                steps(comm, &stop, None)
            })
        });
        assert!(took.iter().all(|step| *step == took[0]), "{took:?}");
    }
}

#[test]
fn an_answer_stays_even_without_the_rank_that_asked() {
    threads(Wiring::Shm, 3, |comm| {
        let stop = StopFlag::new();
        if comm.rank() == 2 {
            stop.raise();
        }
        assert!(stop.agreed(comm).unwrap());
        assert!(stop.handle().load(Ordering::Relaxed));
        let rest = comm.split((comm.rank() < 2).then_some(0), 0).unwrap();
        assert!(rest.is_none_or(|rest| stop.agreed(&rest).unwrap()));
    });
}

#[test]
fn a_signal_to_one_process_stops_all() {
    processes("stop_flag::a_signal_to_one_process_stops_all", Wiring::Tcp, 3, |comm| {
        let stop = StopFlag::new();
        signal_hook::flag::register(signal_hook::consts::SIGTERM, stop.handle()).unwrap();
        let mut step = 0_u64;
        while !stop.agreed(comm)? {
            step += 1;
            if comm.rank() == 1 && step == 3 {
                kill_process(getpid(), Signal::TERM).unwrap();
            }
        }
        let mut all = [0; 3];
        comm.all_gather_into(&step, &mut all)?;
        assert!(step >= 3 && all == [step; 3], "{all:?}");
        Ok(())
    });
}

fn rank_that_may_die(wiring: Wiring) {
    let comm = wiring.builder(0).from_env().unwrap();
    let stop = StopFlag::new();
    for step in 0.. {
        if comm.rank() == 1 && step == 3 {
            std::process::abort();
        }
        match stop.agreed(&comm) {
            Ok(is_raised) => assert!(!is_raised && step < 3),
            Err(Error::PeerLost { peer, .. }) => {
                assert_eq!((peer.rank, step), (1, 3));
                break;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(stop.agreed(&comm).unwrap_err().is_poisoned());
    stop.raise();
    assert!(stop.agreed(&comm.shrink().unwrap()).unwrap());
}

#[test]
fn a_process_that_dies_instead_of_answering_is_named() {
    a_rank_dies("stop_flag::a_process_that_dies_instead_of_answering_is_named", || rank_that_may_die(Wiring::Shm));
}

#[test]
fn a_process_that_dies_instead_of_answering_is_named_over_tcp() {
    a_rank_dies("stop_flag::a_process_that_dies_instead_of_answering_is_named_over_tcp", || rank_that_may_die(Wiring::Tcp));
}
