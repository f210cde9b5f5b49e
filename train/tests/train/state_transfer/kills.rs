//! A rank is killed in the middle of a transfer: the others get an error, keep what they offered, and repeat the
//! transfer without it.

use collectives::{Communicator, Error, Result};
use collectives_train::StateTransfer;
use collectives_train::checkpoint::Piece;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::common::ranks::{Wiring, free_port, is_rank_of, patience, spawn_rank};
use crate::processes::Ranks;

const VICTIM: &str = "COLLECTIVES_TEST_VICTIM";
const WORLD_SIZE: usize = 4;
const LEN: usize = 12_000_011;

fn element(at: usize) -> u32 {
    (at as u32).wrapping_mul(2_654_435_761)
}

/// Transfers from the first ranks to the last two ranks.
fn transfer(comm: &Communicator, has_state: bool, state: &mut [u32], dies: bool) -> Result<()> {
    let mut transfer = StateTransfer::new(comm)?;
    match has_state {
        true => transfer.offer("state", &[LEN], Piece::Whole, state),
        false => transfer.want("state", &[LEN], Piece::Whole, state),
    };
    let progress = transfer.progress();
    if dies {
        setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        std::thread::spawn(move || {
            while progress.moved_bytes() < 2 << 20 {
                std::thread::yield_now();
            }
            std::process::abort()
        });
    }
    transfer.run()
}

fn rank_of_a_transfer(wiring: Wiring) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let victim: usize = std::env::var(VICTIM).unwrap().parse().unwrap();
    let comm = wiring.builder(rank).from_env().unwrap();
    let has_state = rank < WORLD_SIZE - 2;
    let mut state: Vec<u32> = if has_state { (0..LEN).map(element).collect() } else { vec![0; LEN] };
    let error = transfer(&comm, has_state, &mut state, rank == victim).unwrap_err();
    assert!(error.is_peer_lost() || matches!(error, Error::Aborted { .. }), "{error}");
    assert!(!has_state || state.iter().enumerate().all(|(at, x)| *x == element(at)));
    let rest = comm.admit().unwrap().communicator;
    assert_eq!(rest.world_size(), WORLD_SIZE - 1);
    transfer(&rest, has_state, &mut state, false).unwrap();
    assert!(state.iter().enumerate().all(|(at, x)| *x == element(at)));
    rest.close().unwrap();
}

fn a_rank_is_killed(name: &str, wiring: Wiring) {
    if is_rank_of(name) {
        return rank_of_a_transfer(wiring);
    }
    // One rank that sends, and one that receives.
    for victim in [0, WORLD_SIZE - 1] {
        let port = free_port();
        let variables = [(VICTIM, victim.to_string())];
        let mut ranks = Ranks::of((0..WORLD_SIZE).map(|rank| spawn_rank(name, rank, WORLD_SIZE, port, &variables)).collect());
        let others = (0..WORLD_SIZE).filter(|rank| *rank != victim);
        let failed: Vec<String> = others.filter_map(|rank| ranks.last_words(rank, patience(60)).err()).collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
        assert!(ranks.outcome(victim).is_err());
    }
}

#[test]
fn a_rank_is_killed_in_a_transfer_in_shm() {
    a_rank_is_killed("state_transfer::kills::a_rank_is_killed_in_a_transfer_in_shm", Wiring::Shm);
}

#[test]
fn a_rank_is_killed_in_a_transfer_over_tcp() {
    a_rank_is_killed("state_transfer::kills::a_rank_is_killed_in_a_transfer_over_tcp", Wiring::Tcp);
}
