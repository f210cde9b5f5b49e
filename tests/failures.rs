//! Ranks that die, leave, come too late or abort: what the others see of it, and how soon; and that nothing is left behind.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::ranks::{Meeting, Wiring, communicators, each, free_port, is_rank_of, spawn_rank, threads};

use collectives::{Communicator, Error, ReduceOp, Result};

/// What a survivor may take to notice: promised is 1 s, and as much again for a loaded machine.
const NOTICED: Duration = Duration::from_secs(2);

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// The first error behind one that only says that a communicator is ended.
fn cause(error: &Error) -> &Error {
    match error {
        Error::Poisoned { cause: first, .. } => cause(first),
        other => other,
    }
}

/// The rank that an error says is gone, and how that was noticed.
#[track_caller]
fn lost(error: &Error) -> (usize, &str) {
    match cause(error) {
        Error::PeerLost { peer, reason, .. } => (peer.rank, reason),
        other => panic!("not a lost peer: {other}"),
    }
}

/// The calls that a rank is in when another one dies, each on a communicator of its own. `ready` tells that the ones that go on for
/// ever are going.
const CALLS: [(&str, fn(&Communicator, usize, &dyn Fn()) -> Error); 8] = [
    ("small all_reduce", |comm, _, ready| forever(ready, || comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum))),
    ("large all_reduce", |comm, _, ready| {
        let mut x = vec![1_u64; 200_000];
        forever(ready, || comm.all_reduce(&mut x, ReduceOp::Max))
    }),
    ("barrier", |comm, victim, ready| held_up(comm, victim, ready, || comm.barrier())),
    ("broadcast", |comm, victim, ready| held_up(comm, victim, ready, || comm.broadcast(&mut vec![1_u8; 100_000], victim))),
    ("started reduce", |comm, victim, ready| {
        held_up(comm, victim, ready, || {
            comm.start_reduce([1.0_f64; 100], (victim + 1) % comm.world_size(), ReduceOp::Sum)?.wait().map(drop)
        })
    }),
    ("recv", |comm, victim, ready| held_up(comm, victim, ready, || comm.recv(&mut [0_u8; 10], victim).map(drop))),
    ("irecv", |comm, victim, ready| held_up(comm, victim, ready, || comm.irecv([0_u8; 10], victim)?.wait().map(drop))),
    ("large send", |comm, victim, ready| held_up(comm, victim, ready, || comm.send(&vec![1_u8; 1 << 20], victim))),
];

/// Calls again and again until it fails.
fn forever(ready: &dyn Fn(), mut call: impl FnMut() -> Result<()>) -> Error {
    for round in 0_u64.. {
        if let Err(error) = call() {
            return error;
        }
        if round == 20 {
            ready();
        }
    }
    unreachable!()
}

/// A call that waits for the victim, which never makes it.
fn held_up(comm: &Communicator, victim: usize, ready: &dyn Fn(), call: impl FnOnce() -> Result<()>) -> Error {
    ready();
    while comm.rank() == victim {
        std::thread::park();
    }
    call().expect_err("the victim never makes this call")
}

/// One rank of [`a_rank_is_killed`]: makes all calls at once and tells on standard output how they end.
fn rank_until_killed(wiring: Wiring, victim: usize) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let comm = wiring.builder(rank).from_env().unwrap();
    let copies: Vec<_> = CALLS.iter().map(|(name, call)| (name, call, comm.duplicate().unwrap())).collect();
    comm.barrier().unwrap();
    std::thread::scope(|scope| {
        for (name, call, copy) in copies {
            scope.spawn(move || {
                let error = call(&copy, victim, &|| println!("@ready {name}"));
                let (who, _) = lost(&error);
                println!("@lost {who} {name}");
                assert_eq!(who, victim, "{name}: {error}");
                let Error::PeerLost { peer, .. } = cause(&error) else { unreachable!() };
                assert_eq!(*peer, copy.peers()[victim], "{name}: {error}");
            });
        }
    });
    // One that was in no call when it happened.
    let error = comm.all_reduce(&mut [1], ReduceOp::Sum).expect_err("a rank is dead");
    assert_eq!(lost(&error).0, victim, "{error}");
    assert!(!error.is_poisoned(), "{error}");
    let again = comm.barrier().expect_err("the communicator is ended");
    assert!(again.is_poisoned() && lost(&again).0 == victim, "{again}");
    println!("@lost {victim} later");
}

/// The processes of a test, none of which outlives it, and what they print behind an @, with who printed it.
struct Ranks {
    children: Vec<Child>,
    lines: Receiver<(usize, String)>,
}

impl Ranks {
    fn spawn(name: &str, world_size: usize) -> Self {
        let port = free_port();
        let mut children: Vec<Child> = (0..world_size).map(|rank| spawn_rank(name, rank, world_size, port, &[])).collect();
        let (sender, lines) = channel();
        for (rank, child) in children.iter_mut().enumerate() {
            let (out, sender) = (BufReader::new(child.stdout.take().unwrap()), sender.clone());
            std::thread::spawn(move || {
                for line in out.lines().map_while(std::io::Result::ok) {
                    match line.split_once('@') {
                        Some((_, line)) => drop(sender.send((rank, line.to_owned()))),
                        None => println!("rank {rank}: {line}"),
                    }
                }
            });
        }
        Self { children, lines }
    }

    /// The next line of any rank.
    fn next(&mut self, what: &str) -> (usize, String) {
        let line = self.lines.recv_timeout(PATIENCE).inspect(|(rank, line)| println!("rank {rank}: {line}"));
        line.unwrap_or_else(|_| {
            self.children.iter_mut().for_each(|child| child.kill().unwrap());
            (0..self.children.len()).for_each(|rank| drop(self.outcome(rank).map_err(|said| println!("{said}"))));
            panic!("no rank says any more that {what}")
        })
    }

    /// Waits for the end of a rank; what it said where it failed.
    fn outcome(&mut self, rank: usize) -> std::result::Result<(), String> {
        let child = &mut self.children[rank];
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let status = child.wait().unwrap();
        if status.success() { Ok(()) } else { Err(format!("rank {rank}: {status}\n{errors}")) }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Asserts that what a process has mapped and open is gone with it: memory without a name, nothing in /dev/shm or another folder.
fn assert_leaves_nothing(pid: u32, wiring: Wiring) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let named: Vec<&str> = maps.lines().filter(|line| line.contains("/dev/shm") || line.contains("/SYSV")).collect();
    assert!(named.is_empty(), "{named:?}");
    // Where memory is shared, it is seen here, and has no name in any folder.
    assert!(maps.contains("/memfd:") || wiring != Wiring::Shm, "no shared memory is mapped");
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let Ok(target) = std::fs::read_link(entry.unwrap().path()) else { continue };
        assert!(!target.starts_with("/dev/shm") && !target.starts_with(std::env::temp_dir()), "{target:?}");
    }
}

/// Kills a rank while the others are in calls of every kind; each call must end in time and name it.
fn a_rank_is_killed(name: &str, wiring: Wiring, world_size: usize, victim: usize) {
    if is_rank_of(name) {
        return rank_until_killed(wiring, victim);
    }
    let mut ranks = Ranks::spawn(name, world_size);
    for _ in 0..world_size * CALLS.len() {
        let (_, line) = ranks.next("a call has begun");
        assert!(line.starts_with("ready"), "{line}");
    }
    for child in &ranks.children {
        assert_leaves_nothing(child.id(), wiring);
    }
    let killed = Instant::now();
    ranks.children[victim].kill().unwrap();
    for _ in 0..(world_size - 1) * (CALLS.len() + 1) {
        let (rank, line) = ranks.next("a call has ended");
        let took = killed.elapsed();
        let call = line.strip_prefix(&format!("lost {victim} ")).unwrap_or_else(|| panic!("{name}: rank {rank} says {line:?}"));
        assert!(took < NOTICED, "{name}: rank {rank} noticed after {took:?} in {call}");
    }
    println!("{name}: all noticed after {:?}", killed.elapsed());
    (0..world_size).filter(|rank| *rank != victim).for_each(|rank| ranks.outcome(rank).unwrap());
}

macro_rules! kills {
    ($($test:ident $wiring:ident $world_size:literal $victim:literal;)*) => {$(
        #[test]
        fn $test() {
            a_rank_is_killed(stringify!($test), Wiring::$wiring, $world_size, $victim);
        }
    )*};
}

kills! {
    killed_in_shm_1_of_2 Shm 2 1;
    killed_in_shm_0_of_3 Shm 3 0;
    killed_in_shm_3_of_5 Shm 5 3;
    killed_over_tcp_0_of_2 Tcp 2 0;
    killed_over_tcp_2_of_3 Tcp 3 2;
    killed_over_tcp_1_of_5 Tcp 5 1;
    killed_in_pairs_0_of_3 Pairs 3 0;
    killed_in_pairs_3_of_5 Pairs 5 3;
    killed_in_pairs_4_of_5 Pairs 5 4;
    killed_as_dealt_2_of_5 Dealt 5 2;
    killed_as_dealt_4_of_5 Dealt 5 4;
}
