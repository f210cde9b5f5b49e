//! Ranks that are killed or stopped while devices work together, each a process: the survivors' errors, how soon they
//! get them, and that they continue.
//!
//! In half of the jobs the simulated NCCL reports deaths, as over a network. In the other half nothing does, as between
//! devices of one host. In half of them the first collective waits for all ranks inside its call, and an abort may end
//! other ranks' calls with success. `COLLECTIVES_SOAK_SECONDS=600` runs for ten minutes. `COLLECTIVES_TEST_SEED`
//! repeats a run, except for the exact moments.

use std::io::Write;
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, Error, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};

use super::common::cases::Memory;
use super::common::random::Random;
use super::common::ranks::is_rank_of;
use super::gpu::{DeviceMemory, be_strict, builder, can_steer_nccl, unchecked};
use super::processes::Ranks;

/// The timeout of a call. Survivors that hear of a death sooner have not noticed it by a deadline, however busy the
/// machine is.
const LIMIT: Duration = Duration::from_secs(60);
/// The timeout of a start, for ranks that never come.
const START: Duration = Duration::from_secs(10);

/// When a rank is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Init,
    Between,
    Inside,
    Close,
}

const MOMENTS: [Moment; 4] = [Moment::Init, Moment::Between, Moment::Inside, Moment::Close];

fn variable(name: &str) -> Option<usize> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

/// Whether an error can result from a death, or from another survivor that noticed it first.
fn is_expected(error: &Error) -> bool {
    let is_abort = |error: &Error| matches!(error, Error::Aborted { .. });
    error.is_peer_lost() || is_abort(error) || matches!(error, Error::Poisoned { cause, .. } if is_abort(cause))
}

/// Waits for a line from the parent.
fn wait_for_parent() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Returns the settings of a job's ranks: device calls are compared, or return before the others have come.
fn config() -> Config {
    if variable("UNCHECKED") == Some(1) { unchecked() } else { Config::default() }
}

/// Runs a rank of [`job`].
fn rank_of_a_job(moment: Moment) {
    let config = config();
    super::gpu::prepare();
    // A real NCCL cannot be silenced.
    if variable("SILENT") == Some(1) && can_steer_nccl() {
        simgpu::nccl::silence_deaths();
    }
    if variable("STRICT") == Some(1) {
        be_strict();
    }
    if moment == Moment::Init && can_steer_nccl() {
        simgpu::nccl::in_progress("ncclCommInitRankConfig", 150);
    }
    println!("@started");
    let comm = match builder(config).configure(|config| config.timeout = START).from_env() {
        Ok(comm) => comm,
        Err(error) => return println!("@unborn {error}"),
    };
    comm.set_timeout(LIMIT);
    println!("@ready");
    let me = variable("RANK").unwrap() as u64;
    let worked = match moment {
        Moment::Close => work(&comm, me, 4),
        Moment::Between => work(&comm, me, 4).and_then(|()| {
            println!("@idle");
            wait_for_parent();
            work(&comm, me, u64::MAX)
        }),
        Moment::Init | Moment::Inside => work(&comm, me, u64::MAX),
    };
    match worked {
        Ok(()) => {
            println!("@idle");
            wait_for_parent();
            match comm.close() {
                Ok(()) => println!("@closed"),
                Err(error) => {
                    assert!(is_expected(&error), "close: {error}");
                    println!("@closed without others: {error}");
                }
            }
        }
        Err(error) => go_on(&comm, &error, me),
    }
}

/// Checks after a death that the stream is freed, and that the remaining ranks work again, on devices.
fn go_on(comm: &Communicator, error: &Error, me: u64) {
    assert!(is_expected(error), "{error}");
    println!("@lost {error}");
    comm.device().unwrap().stream().synchronize().unwrap();
    let again = comm.all_reduce(&mut DeviceMemory::of(comm).put(&[1_u32]), ReduceOp::Sum).unwrap_err();
    assert!(is_expected(&again), "{again}");
    let left = comm.shrink().unwrap();
    assert!(left.device().is_some(), "{:?}", left.why_no_device());
    work(&left, me, 3).unwrap();
    let mut members = vec![0_u64; left.world_size()];
    left.all_gather_into(&me, &mut members).unwrap();
    println!("@shrunk {members:?}");
    left.close().unwrap();
}

/// Makes device calls of all kinds and checks their results, until one fails. All ranks draw the same random numbers.
fn work(comm: &Communicator, me: u64, rounds: u64) -> Result<()> {
    let (memory, n, place) = (DeviceMemory::of(comm), comm.world_size(), comm.rank());
    let mut gathered = memory.put(&vec![0_u64; n]);
    comm.all_gather_into(&memory.put(&[me]), &mut gathered)?;
    comm.device().unwrap().synchronize()?;
    let members = memory.get(&gathered);
    let mut random = Random(members.iter().fold(7, |seed, rank| seed.wrapping_mul(31).wrapping_add(*rank)));
    for _ in 0..rounds {
        let count = [1, 3, 200, 5000][random.below(4)];
        let (root, salt) = (random.below(n), random.next() >> 40);
        let value = |rank: u64, index: usize| rank.wrapping_mul(1_000_003).wrapping_add(index as u64 * 7 + salt);
        let block = |rank: u64, block: usize| -> Vec<u64> { (0..count).map(|index| value(rank, block * count + index)).collect() };
        let folded = |from: usize, fold: fn(u64, u64) -> u64| -> Vec<u64> {
            (0..count).map(|index| members.iter().map(|rank| value(*rank, from * count + index)).reduce(fold).unwrap()).collect()
        };
        let whole: Vec<u64> = (0..n).flat_map(|part| block(me, part)).collect();
        let (mine, all) = (memory.put(&block(me, 0)), memory.put(&whole));
        let (mut one, mut many) = (memory.put(&block(me, 0)), memory.put(&vec![0_u64; n * count]));
        let kind = random.below(6);
        match kind {
            0 => comm.all_reduce(&mut one, ReduceOp::Sum)?,
            1 => comm.all_reduce(&mut one, ReduceOp::BitXor)?,
            2 => comm.broadcast(&mut one, root)?,
            3 => comm.all_gather_into(&mine, &mut many)?,
            4 => comm.reduce_scatter_into(&all, &mut one, ReduceOp::Sum)?,
            _ => comm.all_to_all_into(&all, &mut many)?,
        }
        comm.device().unwrap().synchronize()?;
        let right: Vec<u64> = match kind {
            0 => folded(0, u64::wrapping_add),
            1 => folded(0, |a, b| a ^ b),
            2 => block(members[root], 0),
            3 => members.iter().flat_map(|rank| block(*rank, 0)).collect(),
            4 => folded(place, u64::wrapping_add),
            _ => members.iter().flat_map(|rank| block(*rank, place)).collect(),
        };
        let got = memory.get(if [3, 5].contains(&kind) { &many } else { &one });
        assert!(got == right, "call of kind {kind}, {count} elements among {members:?}");
    }
    Ok(())
}

/// Lets a random time pass.
fn wait(pause: Duration) {
    std::thread::park_timeout(pause);
}

fn await_all(ranks: &mut Ranks, world_size: usize, word: &str) {
    let mut come = 0;
    while come < world_size {
        let (rank, line) = ranks.next(word);
        assert!(["started", "ready", "idle"].contains(&line.as_str()), "rank {rank} says {line}, not {word}");
        come += usize::from(line == word);
    }
}

/// Asserts that memory mapped by a process has no name in any folder, so that it vanishes with the process. NCCL
/// removes the names of its segments once all ranks have them.
fn assert_leaves_nothing(pid: u32) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let named = maps.lines().filter(|line| line.contains("/dev/shm") || line.contains("/SYSV"));
    let named: Vec<&str> = named.filter(|line| !line.ends_with(" (deleted)")).collect();
    assert!(named.is_empty(), "{named:?}");
}

/// Runs one job in which a rank is killed.
fn job(name: &str, moment: Moment, world_size: usize, random: &mut Random, seed: u64) {
    let (victim, silent) = (random.below(world_size), random.below(2));
    let index = MOMENTS.iter().position(|known| *known == moment).unwrap();
    let (unchecked, strict) = (random.below(2), random.below(2));
    let variables = [("MOMENT", index), ("SILENT", silent), ("UNCHECKED", unchecked), ("STRICT", strict)];
    let variables = variables.map(|(name, value)| (name, value.to_string()));
    let mut ranks = Ranks::spawn_with(name, world_size, &variables);
    let pause = Duration::from_micros(random.below(if moment == Moment::Close { 20_000 } else { 250_000 }) as u64);
    let switches = format!("silent: {silent}, unchecked: {unchecked}, strict: {strict}");
    let said = format!("seed {seed}: {world_size} ranks, {victim} killed {moment:?} after {pause:?}, {switches}");
    println!("{said}");
    await_all(&mut ranks, world_size, ["started", "idle", "ready", "idle"][index]);
    if moment != Moment::Init {
        ranks.children.iter().for_each(|child| assert_leaves_nothing(child.id()));
    }
    if moment == Moment::Close {
        ranks.children.iter_mut().for_each(|child| child.stdin.as_mut().unwrap().write_all(b"close\n").unwrap());
    }
    if moment != Moment::Between {
        wait(pause);
    }
    let killed = Instant::now();
    ranks.children[victim].kill().unwrap();
    ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    let left: Vec<usize> = (0..world_size).filter(|rank| *rank != victim).collect();
    for rank in &left {
        let lines = ranks.last_words(*rank, LIMIT + START).unwrap_or_else(|error| panic!("{said}: {error}"));
        let last = lines.last().map_or("nothing", String::as_str);
        let is_good = match moment {
            Moment::Init => last.starts_with("unborn") || last == format!("shrunk {left:?}"),
            Moment::Close => last.starts_with("closed"),
            Moment::Between | Moment::Inside => last == format!("shrunk {left:?}"),
        };
        assert!(is_good, "{said}: rank {rank} ended with {last:?}");
    }
    println!("  over after {:?}", killed.elapsed());
}

/// Runs jobs of several sizes with a death at one moment.
fn killed_at(name: &str, moment: Moment, worlds: &[usize]) {
    if is_rank_of(name) {
        return rank_of_a_job(MOMENTS[variable("MOMENT").unwrap()]);
    }
    let (mut random, seed) = Random::new();
    worlds.iter().for_each(|world_size| job(name, moment, *world_size, &mut random, seed));
}

#[test]
fn killed_in_init() {
    killed_at("kills::killed_in_init", Moment::Init, &[2, 3, 3]);
}

#[test]
fn killed_between_calls() {
    killed_at("kills::killed_between_calls", Moment::Between, &[2, 3]);
}

#[test]
fn killed_inside_calls() {
    killed_at("kills::killed_inside_calls", Moment::Inside, &[2, 3, 8]);
}

#[test]
fn killed_in_close() {
    killed_at("kills::killed_in_close", Moment::Close, &[2, 3]);
}

#[test]
fn jobs_go_on_whenever_a_rank_is_killed() {
    let name = "kills::jobs_go_on_whenever_a_rank_is_killed";
    if is_rank_of(name) {
        return rank_of_a_job(MOMENTS[variable("MOMENT").unwrap()]);
    }
    let limit = Duration::from_secs(variable("COLLECTIVES_SOAK_SECONDS").unwrap_or(5) as u64);
    let (mut random, seed) = Random::new();
    let began = Instant::now();
    while began.elapsed() < limit {
        let (moment, world_size) = (MOMENTS[random.below(4)], [2, 3, 4][random.below(3)]);
        job(name, moment, world_size, &mut random, seed);
    }
}

/// A call that waits for the victim, which never makes it.
type HeldUp = fn(&Communicator, &DeviceMemory, usize) -> Result<()>;

const CALLS: [(&str, HeldUp); 11] = [
    ("all_reduce", |comm, memory, _| comm.all_reduce(&mut memory.put(&[1_f32; 10]), ReduceOp::Sum)),
    ("folded all_reduce", |comm, memory, _| comm.all_reduce(&mut memory.put(&[1_u16; 5000]), ReduceOp::BitOr)),
    ("broadcast", |comm, memory, victim| comm.broadcast(&mut memory.put(&[1_u8; 100]), victim)),
    ("reduce", |comm, memory, victim| comm.reduce(&mut memory.put(&[1_i64; 10]), (victim + 1) % comm.world_size(), ReduceOp::Max)),
    ("all_gather", |comm, memory, _| comm.all_gather_into(&memory.put(&[1_u8; 10]), &mut memory.put(&vec![0; 10 * comm.world_size()]))),
    ("reduce_scatter", |comm, memory, _| {
        comm.reduce_scatter_into(&memory.put(&vec![1_f64; 10 * comm.world_size()]), &mut memory.put(&[0.0; 10]), ReduceOp::Min)
    }),
    ("all_to_all", |comm, memory, _| {
        let blocks = vec![1_u32; 10 * comm.world_size()];
        comm.all_to_all_into(&memory.put(&blocks), &mut memory.put(&blocks))
    }),
    ("started all_reduce", |comm, memory, _| comm.start_all_reduce(memory.put(&[1_u32; 10]), ReduceOp::Sum)?.wait().map(drop)),
    ("send", |comm, memory, victim| comm.send(&memory.put(&[0_u8; 10]), victim)),
    ("recv", |comm, memory, victim| comm.recv(&mut memory.put(&[0_u8; 10]), victim).map(drop)),
    ("group", |comm, memory, victim| {
        let (mut one, mut other) = (memory.put(&[1_u32; 10]), memory.put(&[0_u8; 10]));
        comm.group(|group| {
            group.all_reduce(&mut one, ReduceOp::Sum)?;
            group.recv(&mut other, victim)
        })
        .map(drop)
    }),
];

/// Runs a rank of [`killed_inside_each_call`]. Each survivor makes each call on a separate communicator and prints how
/// it ends.
fn rank_in_each_call(victim: usize) {
    let comm = builder(config()).configure(|config| config.timeout = LIMIT).from_env().unwrap();
    if can_steer_nccl() {
        simgpu::nccl::silence_deaths();
    }
    if variable("STRICT") == Some(1) {
        be_strict();
    }
    let copies: Vec<_> = CALLS.iter().map(|(name, call)| (name, call, comm.duplicate().unwrap())).collect();
    comm.barrier().unwrap();
    println!("@ready");
    while comm.rank() == victim {
        std::thread::park();
    }
    std::thread::scope(|scope| {
        for (name, call, copy) in copies {
            scope.spawn(move || {
                let called = call(&copy, &DeviceMemory::of(&copy), victim);
                let ended = called.and_then(|()| copy.device().unwrap().synchronize());
                let Err(error) = ended else {
                    // In NCCL's chain to the root, a rank waits only for the ranks before it.
                    assert!(*name == "reduce" && !can_steer_nccl(), "{name} does without rank {victim}");
                    return println!("@lost {name}: not needed");
                };
                let Error::PeerLost { peer, doing, .. } = root(&error) else { panic!("{name}: {error}") };
                assert_eq!(*peer, copy.peers()[victim], "{name}: {error}");
                copy.device().unwrap().stream().synchronize().unwrap();
                println!("@lost {name}: {doing}");
            });
        }
    });
    let left = comm.shrink().unwrap();
    work(&left, variable("RANK").unwrap() as u64, 2).unwrap();
    println!("@shrunk");
}

/// Returns the first error behind those that only report that a communicator is ended.
pub(crate) fn root(error: &Error) -> &Error {
    match error {
        Error::Poisoned { cause, .. } => root(cause),
        other => other,
    }
}

#[test]
fn killed_inside_each_call() {
    let (name, victim, world_size) = ("kills::killed_inside_each_call", 1, 3);
    if is_rank_of(name) {
        return rank_in_each_call(victim);
    }
    for strict in [0, 1] {
        let mut ranks = Ranks::spawn_with(name, world_size, &[("UNCHECKED", "1".to_owned()), ("STRICT", strict.to_string())]);
        await_all(&mut ranks, world_size, "ready");
        wait(Duration::from_millis(300));
        let killed = Instant::now();
        ranks.children[victim].kill().unwrap();
        for _ in 0..(world_size - 1) * CALLS.len() {
            let (rank, line) = ranks.next("a call has ended");
            assert!(line.starts_with("lost ") || line == "shrunk", "rank {rank}: {line}");
            assert!(killed.elapsed() < LIMIT, "strict: {strict}, rank {rank}: {line} after {:?}", killed.elapsed());
        }
        for rank in [0, 2] {
            ranks.last_words(rank, LIMIT).unwrap();
        }
    }
}

/// Runs one rank of [`a_stopped_rank_is_named_and_left_behind`].
fn rank_with_a_sleeper(sleeper: usize) {
    let rank = variable("RANK").unwrap();
    if variable("STRICT") == Some(1) {
        be_strict();
    }
    let comm = builder(config()).from_env().unwrap();
    // Longer than a busy machine may delay the ranks that are to continue.
    comm.set_timeout(Duration::from_secs(6));
    println!("@ready");
    let error = work(&comm, rank as u64, u64::MAX).unwrap_err();
    comm.set_timeout(Duration::from_secs(20));
    comm.device().unwrap().stream().synchronize().unwrap();
    if rank == sleeper {
        let error = comm.shrink().expect_err("the others have gone on");
        assert!(matches!(error, Error::LeftBehind { rank, .. } if rank == sleeper), "{error}");
        return println!("@left behind");
    }
    let Error::Timeout { missing, doing, .. } = root(&error) else { panic!("{error}") };
    assert!(missing.iter().any(|peer| peer.rank == sleeper), "{error}");
    assert!(doing.contains(") number "), "the call is named: {error}");
    let left = comm.shrink().unwrap();
    work(&left, rank as u64, 2).unwrap();
    println!("@shrunk");
    wait_for_parent();
    left.close().unwrap();
}

#[test]
fn a_stopped_rank_is_named_and_left_behind() {
    let (name, sleeper, world_size) = ("kills::a_stopped_rank_is_named_and_left_behind", 1, 3);
    if is_rank_of(name) {
        return rank_with_a_sleeper(sleeper);
    }
    for strict in [0, 1] {
        let mut ranks = Ranks::spawn_with(name, world_size, &[("UNCHECKED", "1".to_owned()), ("STRICT", strict.to_string())]);
        await_all(&mut ranks, world_size, "ready");
        let pid = Pid::from_raw(ranks.children[sleeper].id() as i32).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        for _ in 0..world_size - 1 {
            assert_eq!(ranks.next("the others go on").1, "shrunk");
        }
        kill_process(pid, Signal::CONT).unwrap();
        assert_eq!(ranks.next("it was left behind"), (sleeper, "left behind".to_owned()));
        ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
        (0..world_size).for_each(|rank| ranks.outcome(rank).unwrap());
    }
}
