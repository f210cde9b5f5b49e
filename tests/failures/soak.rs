//! Random collectives, kills, stops and shrinks, with every result checked: a few seeds here, 200 and more on request.
//!
//! `COLLECTIVES_SOAK_SECONDS=600 cargo test --test failures soak -- --nocapture` runs for ten minutes.
//! `COLLECTIVES_TEST_SEED` repeats a run, except for the exact moment of a kill.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use collectives::{Communicator, Error, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, is_rank_of, patience};
use crate::processes::Ranks;

const NAME: &str = "soak::every_survivor_of_anything_goes_on_with_right_results";

/// The duration without `COLLECTIVES_SOAK_SECONDS`.
const USUAL: Duration = Duration::from_secs(8);

/// Long enough for survivors to notice deaths and continue, on a loaded machine. Only what hangs takes longer.
const PATIENCE: Duration = patience(14);

/// How long a start waits for ranks that never come.
const START: Duration = patience(3);

/// Whether the ranks are to end. Set when the parent closes standard input.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Runs one rank: it works until the parent ends it, whatever happens to the others.
fn rank_of_a_soak() {
    let variable = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, wiring) = (variable("RANK"), Wiring::ALL[variable("WIRING")]);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        IS_OVER.store(true, Ordering::Relaxed);
    });
    let mut comm = match wiring.builder(rank).configure(|config| config.timeout = START).from_env() {
        Ok(comm) => comm,
        Err(error) => return println!("@unborn {error}"),
    };
    comm.set_timeout(Duration::from_secs(10));
    println!("@ready");
    for epoch in 0.. {
        let error = match work(&comm, rank as u64, epoch) {
            Ok(()) => match comm.close() {
                Ok(()) => return println!("@done"),
                Err(error) => {
                    assert!(is_expected(&error), "close: {error}");
                    return println!("@done without others");
                }
            },
            Err(error) => error,
        };
        assert!(is_expected(&error), "{error}");
        println!("@lost {error}");
        comm = match comm.shrink() {
            Ok(left) => left,
            Err(error) => {
                assert!(IS_OVER.load(Ordering::Relaxed), "shrink: {error}");
                return println!("@done without others");
            }
        };
        println!("@shrunk");
    }
}

/// Whether an error can result from a death, or from another rank that noticed it first.
fn is_expected(error: &Error) -> bool {
    error.is_peer_lost() || matches!(error, Error::Aborted { .. } | Error::Poisoned { .. })
}

/// Makes collectives of all kinds until all ranks agree to end, or one fails. All ranks draw the same random numbers.
fn work(comm: &Communicator, me: u64, epoch: u64) -> Result<()> {
    let n = comm.world_size();
    let mut members = vec![0_u64; n];
    comm.all_gather_into(&me, &mut members)?;
    let mut random = Random(members.iter().fold(epoch, |seed, rank| seed.wrapping_mul(31).wrapping_add(*rank)));
    loop {
        let mut over = [u8::from(IS_OVER.load(Ordering::Relaxed))];
        comm.all_reduce(&mut over, ReduceOp::Max)?;
        if over[0] != 0 {
            return Ok(());
        }
        let count = [0, 1, 3, 700, 20_000][random.below(5)];
        let (root, salt) = (random.below(n), random.next() >> 32);
        let value = |rank: u64, index: usize| rank.wrapping_mul(1_000_003).wrapping_add(index as u64 * 7 + salt);
        let mine = |block: usize| -> Vec<u64> { (0..count).map(|index| value(me, block * count + index)).collect() };
        let sum = |index: usize| members.iter().fold(0_u64, |sum, rank| sum.wrapping_add(value(*rank, index)));
        let place = comm.rank();
        match random.below(6) {
            0 => {
                let mut x = mine(0);
                comm.all_reduce(&mut x, ReduceOp::Sum)?;
                assert!(x.iter().enumerate().all(|(index, x)| *x == sum(index)), "all_reduce of {count} among {members:?}");
            }
            1 => {
                let mut x = mine(0);
                comm.broadcast(&mut x, root)?;
                assert!(x.iter().enumerate().all(|(index, x)| *x == value(members[root], index)), "broadcast of {count}");
            }
            2 => {
                let mut x = vec![0; n * count];
                comm.all_gather_into(&mine(0), &mut x)?;
                let right = |(index, x): (usize, &u64)| *x == value(members[index / count], index % count);
                assert!(x.iter().enumerate().all(right), "all_gather of {count} among {members:?}");
            }
            3 => {
                let whole: Vec<u64> = (0..n).flat_map(mine).collect();
                let mut x = vec![0; count];
                comm.reduce_scatter_into(&whole, &mut x, ReduceOp::Sum)?;
                assert!(x.iter().enumerate().all(|(index, x)| *x == sum(place * count + index)), "reduce_scatter of {count}");
            }
            4 => {
                let whole: Vec<u64> = (0..n).flat_map(mine).collect();
                let mut x = vec![0; n * count];
                comm.all_to_all_into(&whole, &mut x)?;
                let right = |(index, x): (usize, &u64)| *x == value(members[index / count], place * count + index % count);
                assert!(x.iter().enumerate().all(right), "all_to_all of {count} among {members:?}");
            }
            _ => {
                let (next, previous) = ((place + 1) % n, (place + n - 1) % n);
                let mut x = vec![0; count];
                comm.send_recv(&mine(0), next, &mut x, previous)?;
                assert!(x.iter().enumerate().all(|(index, x)| *x == value(members[previous], index)), "send_recv of {count}");
            }
        }
    }
}

/// Runs one job with its failures.
fn round(random: &mut Random, seed: u64, number: usize) {
    let wiring = random.below(Wiring::ALL.len());
    let world_size = [2, 3, 3, 5][random.below(4)];
    let mut ranks = Ranks::spawn_with(NAME, world_size, &[("WIRING", wiring.to_string())]);
    let began = Instant::now();
    let mut living: Vec<usize> = (0..world_size).collect();
    let mut said = format!("seed {seed} round {number}: {world_size} ranks, {:?}", Wiring::ALL[wiring]);
    for _ in 0..random.below(world_size) {
        let victim = living.swap_remove(random.below(living.len()));
        let pause = Duration::from_micros(random.below(150_000) as u64);
        wait(pause);
        if random.below(4) == 0 {
            // A rank that is only late is not a failure.
            let late = living[random.below(living.len())];
            let pid = Pid::from_raw(ranks.children[late].id() as i32).unwrap();
            kill_process(pid, Signal::STOP).unwrap();
            wait(Duration::from_millis(30));
            kill_process(pid, Signal::CONT).unwrap();
            said += &format!(", rank {late} stopped for a while");
        }
        ranks.children[victim].kill().unwrap();
        said += &format!(", rank {victim} killed after {:?}", began.elapsed());
    }
    println!("{said}");
    let killed = Instant::now();
    if random.below(2) == 0 {
        wait(Duration::from_micros(random.below(200_000) as u64));
    }
    ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    let mut unborn = 0;
    for rank in living {
        let lines = ranks.last_words(rank, START + PATIENCE).unwrap_or_else(|error| panic!("{said}: {error}"));
        let end = lines.last().map_or("nothing", String::as_str);
        assert!(end.starts_with("done") || end.starts_with("unborn"), "{said}: rank {rank} ended with {end:?}");
        unborn += usize::from(end.starts_with("unborn"));
    }
    println!("  over after {:?}, {unborn} never began", killed.elapsed());
}

/// Lets a random time pass, at any point of which a rank may be in any call.
fn wait(pause: Duration) {
    std::thread::park_timeout(pause);
}

#[test]
fn every_survivor_of_anything_goes_on_with_right_results() {
    if is_rank_of(NAME) {
        return rank_of_a_soak();
    }
    let asked = std::env::var("COLLECTIVES_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let limit = asked.map_or(USUAL, Duration::from_secs);
    let (mut random, seed) = Random::new();
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < limit {
        round(&mut random, seed, rounds);
        rounds += 1;
    }
    println!("soak: {rounds} jobs in {:?}, seed {seed}", began.elapsed());
}
