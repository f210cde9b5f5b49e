//! Jobs whose ranks come and go as processes: killed, stopped while they wait, and admitted.
//!
//! `COLLECTIVES_SOAK_CHANGES=200 cargo test --test failures membership::random -- --nocapture` makes more changes.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::process::Child;
use std::time::{Duration, Instant};

use collectives::{Builder, Communicator, Error, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, free_port, is_rank_of, spawn_rank};
use crate::processes::Ranks;

/// The variable with the addresses at which a process joins. Processes without it begin the job.
pub(crate) const ADDRESSES: &str = "COLLECTIVES_TEST_JOIN";

/// Runs one process, whose number is in `RANK`. It works, admits, and prints who the members are when that changes. It
/// ends when the others have left it behind.
fn rank_of_a_job_that_changes(wiring: Wiring) {
    let id: u64 = std::env::var("RANK").unwrap().parse().unwrap();
    let builder = || wiring.builder(id as usize);
    let mut known = Known::default();
    let comm = begin_or_join(builder());
    work_until_left_behind(comm, id, &mut known, None);
}

/// Begins the job or joins it, as the variables say.
pub(crate) fn begin_or_join(builder: Builder) -> Communicator {
    match std::env::var(ADDRESSES) {
        Ok(addresses) => {
            println!("@asks");
            let addresses: Vec<SocketAddr> = addresses.split(',').map(|address| address.parse().unwrap()).collect();
            builder.join(&addresses[..]).unwrap().communicator
        }
        Err(_) => builder.from_env().unwrap(),
    }
}

/// The members of the last communicator, and their addresses.
#[derive(Default)]
pub(crate) struct Known {
    members: Vec<u64>,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// Works and admits until the others have left this process behind. If `limit` is given, calls of the work may not take
/// longer, and a late rank counts as lost.
pub(crate) fn work_until_left_behind(mut comm: Communicator, id: u64, known: &mut Known, limit: Option<Duration>) {
    println!("@address {}", comm.join_address().unwrap());
    loop {
        let working = limit.map_or_else(|| comm.clone(), |limit| comm.with_timeout(limit));
        let worked = work(&working, id, known);
        let admitted = match worked {
            Ok(()) => comm.admit(),
            Err(error) if error.is_peer_lost() || matches!(error, Error::Aborted { .. }) => comm.admit(),
            Err(error) if error.is_timeout() && limit.is_some() => comm.admit(),
            Err(error) => Err(error),
        };
        match admitted {
            Ok(membership) => comm = membership.communicator,
            Err(error) if error.is_peer_lost() || matches!(error, Error::Aborted { .. }) => {}
            // A rank was stopped in the middle. The next call leaves it out.
            Err(error) if error.is_timeout() && limit.is_some() => {}
            Err(error @ Error::LeftBehind { .. }) => {
                println!("{error}\n@left behind");
                known.members.clear();
                return;
            }
            Err(error) => {
                println!("{error}");
                panic!("{error}");
            }
        }
    }
}

/// Makes some calls, and checks each result.
fn work(comm: &Communicator, id: u64, known: &mut Known) -> Result<()> {
    let mut members = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&id, &mut members)?;
    assert_eq!(members[comm.rank()], id);
    known.addresses = addresses(comm)?;
    if members != known.members {
        known.members.clone_from(&members);
        println!("@members {members:?}");
    }
    for round in 0_u64..4 {
        let mut x = vec![id + round; if round == 3 { 50_000 } else { 3 }];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        let sum: u64 = members.iter().map(|id| id + round).sum();
        assert!(x.iter().all(|x| *x == sum), "{id} of {members:?} in round {round}: {} is not {sum}", x[0]);
    }
    Ok(())
}

/// Exchanges the addresses at which processes can join.
fn addresses(comm: &Communicator) -> Result<Vec<SocketAddr>> {
    let mut mine = [b' '; 64];
    let text = comm.join_address()?.to_string();
    mine[..text.len()].copy_from_slice(text.as_bytes());
    let mut all = vec![0; 64 * comm.world_size()];
    comm.all_gather_into(&mine, &mut all)?;
    Ok(all.chunks(64).map(|bytes| std::str::from_utf8(bytes).unwrap().trim().parse().unwrap()).collect())
}

/// Starts the process with this number, which joins at the addresses that are given.
type Spawn<'a> = Box<dyn Fn(usize, Option<String>) -> Child + 'a>;

/// The processes of a job that changes, and what they have printed last.
pub(crate) struct Job<'a> {
    name: &'static str,
    pub(crate) ranks: Ranks,
    spawn: Spawn<'a>,
    /// The processes that live, with their last list of members. It is empty for those that are not admitted yet.
    pub(crate) living: BTreeMap<usize, String>,
    /// Whether processes that were left behind join again.
    pub(crate) come_back: bool,
    addresses: BTreeMap<usize, String>,
}

impl Job<'static> {
    /// Starts a job on this host, and waits until it works.
    fn start(name: &'static str, world_size: usize) -> Self {
        let port = free_port();
        let spawn = move |id, addresses: Option<String>| {
            let variables: Vec<_> = addresses.map(|addresses| (ADDRESSES, addresses)).into_iter().collect();
            spawn_rank(name, id, world_size, port, &variables)
        };
        Self::start_with(name, world_size, Box::new(spawn))
    }
}

impl<'a> Job<'a> {
    /// Starts a job with a function that starts its processes, and waits until it works.
    pub(crate) fn start_with(name: &'static str, world_size: usize, spawn: Spawn<'a>) -> Self {
        let living = (0..world_size).map(|rank| (rank, String::new())).collect();
        let ranks = Ranks::of((0..world_size).map(|rank| spawn(rank, None)).collect());
        let mut job = Self { name, ranks, spawn, living, come_back: false, addresses: BTreeMap::new() };
        job.settle("it has begun");
        job
    }

    /// Starts a process that joins at the address of a member, or of the others if that member is gone. Returns when the
    /// process is about to ask.
    pub(crate) fn add_at(&mut self, member: usize) -> usize {
        let id = self.ranks.children.len();
        let others = self.addresses.iter().filter(|(rank, _)| **rank != member).map(|(_, address)| address);
        let addresses: Vec<&str> = std::iter::once(&self.addresses[&member]).chain(others).map(String::as_str).collect();
        self.ranks.add((self.spawn)(id, Some(addresses.join(","))));
        self.living.insert(id, String::new());
        while self.next("the newcomer asks") != (id, "asks".to_owned()) {}
        id
    }

    pub(crate) fn kill(&mut self, rank: usize) {
        self.ranks.children[rank].kill().unwrap();
        self.living.remove(&rank);
        self.addresses.remove(&rank);
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_raw(self.ranks.children[rank].id() as i32).unwrap(), signal).unwrap();
    }

    /// Takes the next line of any process.
    pub(crate) fn next(&mut self, what: &str) -> (usize, String) {
        let (rank, line) = self.ranks.next(what);
        if !self.living.contains_key(&rank) {
            return (rank, line);
        }
        if let Some(members) = line.strip_prefix("members ") {
            self.living.insert(rank, members.to_owned());
        } else if let Some(address) = line.strip_prefix("address ") {
            self.addresses.insert(rank, address.to_owned());
        } else if line == "left behind" {
            if self.come_back {
                self.living.insert(rank, String::new());
            } else {
                self.living.remove(&rank);
            }
            self.addresses.remove(&rank);
        }
        (rank, line)
    }

    /// Waits until all processes that live, except `outside`, are one communicator. Returns its members in order.
    pub(crate) fn settle_without(&mut self, outside: &[usize], what: &str) -> Vec<usize> {
        loop {
            let inside: Vec<usize> = self.living.keys().copied().filter(|rank| !outside.contains(rank)).collect();
            let lists: Vec<&String> = inside.iter().map(|rank| &self.living[rank]).collect();
            let members: Vec<usize> =
                lists[0].trim_matches(['[', ']']).split(", ").filter(|id| !id.is_empty()).map(|id| id.parse().unwrap()).collect();
            let mut sorted = members.clone();
            sorted.sort_unstable();
            if sorted == inside && lists.iter().all(|list| *list == lists[0]) && inside.iter().all(|rank| self.addresses.contains_key(rank))
            {
                return members;
            }
            self.next(what);
        }
    }

    pub(crate) fn settle(&mut self, what: &str) -> Vec<usize> {
        self.settle_without(&[], what)
    }

    /// Returns how many descriptors, threads and mappings a process has.
    fn resources(&self, rank: usize) -> [usize; 3] {
        let count = |folder: &str| fs::read_dir(format!("/proc/{}/{folder}", self.ranks.children[rank].id())).unwrap().count();
        let mappings = fs::read_to_string(format!("/proc/{}/maps", self.ranks.children[rank].id())).unwrap().lines().count();
        [count("fd"), count("task"), mappings]
    }
}

/// Kills, adds and replaces processes while the job works.
fn ranks_come_and_go(name: &'static str, wiring: Wiring) {
    if is_rank_of(name) {
        return rank_of_a_job_that_changes(wiring);
    }
    let mut job = Job::start(name, 3);
    job.add_at(1);
    assert_eq!(job.settle("one has joined"), [0, 1, 2, 3]);
    job.kill(0);
    assert_eq!(job.settle("the others continue without the first"), [1, 2, 3]);
    job.add_at(3);
    assert_eq!(job.settle("one has joined at a former newcomer"), [1, 2, 3, 4]);
    // One call leaves out who is gone, and lets in who waits.
    job.signal(1, Signal::STOP);
    job.add_at(2);
    job.kill(4);
    job.signal(1, Signal::CONT);
    assert_eq!(job.settle("one is replaced"), [1, 2, 3, 5]);
    for rank in [1, 2, 3] {
        job.kill(rank);
    }
    assert_eq!(job.settle("a former newcomer continues alone"), [5]);
    job.add_at(5);
    assert_eq!(job.settle("it is joined by another"), [5, 6]);
}

#[test]
fn ranks_come_and_go_in_shm() {
    ranks_come_and_go("membership::ranks_come_and_go_in_shm", Wiring::Shm);
}

#[test]
fn ranks_come_and_go_over_tcp() {
    ranks_come_and_go("membership::ranks_come_and_go_over_tcp", Wiring::Tcp);
}

#[test]
#[cfg(feature = "encryption")]
fn ranks_come_and_go_over_encrypted_tcp() {
    ranks_come_and_go("membership::ranks_come_and_go_over_encrypted_tcp", Wiring::Encrypted);
}

#[test]
fn newcomers_that_are_stopped_or_die_hold_up_nobody() {
    const NAME: &str = "membership::newcomers_that_are_stopped_or_die_hold_up_nobody";
    if is_rank_of(NAME) {
        return rank_of_a_job_that_changes(Wiring::Tcp);
    }
    let mut job = Job::start(NAME, 2);
    let stopped = job.add_at(0);
    job.signal(stopped, Signal::STOP);
    let dead = job.add_at(1);
    job.kill(dead);
    let joined = job.add_at(1);
    // The stopped one may have been admitted before it was stopped. If so, it ends the communicator when it is killed.
    if job.living[&stopped].is_empty() {
        assert_eq!(job.settle_without(&[stopped], "another one has joined"), [0, 1, joined]);
        job.signal(stopped, Signal::CONT);
        assert_eq!(job.settle("the stopped one has joined"), [0, 1, joined, stopped]);
    }
}

/// Returns how many random changes a test makes.
pub(crate) fn changes(usually: usize) -> usize {
    std::env::var("COLLECTIVES_SOAK_CHANGES").map_or(usually, |text| text.parse().unwrap())
}

/// Makes random changes, of which several may come at once.
fn random_changes(name: &'static str, wiring: Wiring) {
    if is_rank_of(name) {
        return rank_of_a_job_that_changes(wiring);
    }
    let changes = changes(12);
    let (mut random, seed) = Random::new();
    println!("{name}: seed {seed}, {changes} changes");
    let mut job = Job::start(name, 3);
    for change in 0..changes {
        let members = job.settle("the job works");
        let adds = members.len() < 2 || members.len() < 6 && random.below(2) == 0;
        let began = Instant::now();
        let what = if adds {
            let added = job.add_at(members[random.below(members.len())]);
            match random.below(4) {
                0 => {
                    job.kill(added);
                    "a newcomer comes and dies"
                }
                1 if members.len() > 1 => {
                    job.kill(members[random.below(members.len())]);
                    "a newcomer comes and a member dies"
                }
                _ => "a newcomer comes",
            }
        } else {
            job.kill(members[random.below(members.len())]);
            "a member dies"
        };
        job.settle("the job works after a change");
        println!("{name}: change {change}: {members:?}: {what}; all work after {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
    }
    nothing_is_left_behind(&mut job, seed);
}

/// Lets ranks come and go at one process, and compares what it holds before and after.
pub(crate) fn nothing_is_left_behind(job: &mut Job<'_>, seed: u64) {
    let members = job.settle("the job works after all changes");
    members[1..].iter().for_each(|member| job.kill(*member));
    let mut counts = Vec::new();
    for _ in 0..5 {
        job.settle("one is alone");
        let added = job.add_at(members[0]);
        assert_eq!(job.settle("another has joined"), [members[0], added]);
        counts.push(job.resources(members[0]));
        job.kill(added);
    }
    println!("{}: descriptors, threads and mappings: {counts:?}", job.name);
    let limit = counts[0].map(|count| count + 4);
    assert!(counts[4].iter().zip(limit).all(|(count, limit)| *count <= limit), "{counts:?}; seed {seed}");
}

#[test]
fn random_changes_in_shm_leave_right_sums_and_nothing_behind() {
    random_changes("membership::random_changes_in_shm_leave_right_sums_and_nothing_behind", Wiring::Shm);
}

#[test]
fn random_changes_over_tcp_leave_right_sums_and_nothing_behind() {
    random_changes("membership::random_changes_over_tcp_leave_right_sums_and_nothing_behind", Wiring::Tcp);
}
