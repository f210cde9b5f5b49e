//! Jobs with devices whose ranks come and go: processes that are killed while the members work, while a newcomer waits,
//! and while the devices connect. The parent tells each rank when to work and admit.

use std::io::Write;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, DeviceChoice, Error, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};

use super::common::cases::Memory;
use super::common::meeting::wait_until;
use super::common::ranks::{communicators_with, each, free_port, is_rank_of, spawn_rank};
use super::gpu::{DeviceMemory, alone, builder, steers_nccl};
use super::kills::root;
use super::processes::Ranks;

/// The variable with the addresses at which a process joins. Processes without it begin the job.
const ADDRESSES: &str = "COLLECTIVES_TEST_JOIN";
/// The variable of a newcomer whose devices take long to connect: for so many polls.
const POLLS: &str = "COLLECTIVES_TEST_POLLS";
/// The variable with a shorter timeout of the job's calls, in seconds.
const TIMEOUT: &str = "COLLECTIVES_TEST_SECONDS";
/// The timeout of a call.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the survivors may take until they work again. It is less than the timeout of a call, so no wait has ended by
/// a deadline.
const SOON: Duration = Duration::from_secs(25);

/// Runs one process, whose number is in `RANK`. For each line from the parent, it works and admits.
fn rank_of_a_job_that_changes() {
    let id: u64 = std::env::var("RANK").unwrap().parse().unwrap();
    let mut comm = begin_or_join();
    println!("@address {}", comm.join_address().unwrap());
    loop {
        if let Ok(members) = work(&comm, id) {
            println!("@members {members:?}");
        }
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line).unwrap() == 0 {
            return comm.close().unwrap();
        }
        if line.trim() == "await" {
            wait_until("a newcomer has asked", || comm.waiting_newcomers().unwrap() == 1);
            println!("@awaited");
            continue_when_told();
        }
        match work(&comm, id) {
            Ok(_) => {}
            Err(error) => assert!(error.is_peer_lost() || matches!(root(&error), Error::Aborted { .. }), "{error}"),
        }
        comm = comm.admit().unwrap().communicator;
    }
}

fn continue_when_told() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Begins the job or joins it, as the variables say.
fn begin_or_join() -> Communicator {
    let limit = std::env::var(TIMEOUT).map_or(LIMIT, |seconds| Duration::from_secs(seconds.parse().unwrap()));
    let builder = builder(Config::default()).configure(|config| config.timeout = limit);
    let Ok(addresses) = std::env::var(ADDRESSES) else { return builder.from_env().unwrap() };
    let addresses: Vec<SocketAddr> = addresses.split(',').map(|address| address.parse().unwrap()).collect();
    if let Ok(polls) = std::env::var(POLLS) {
        simgpu::nccl::in_progress("ncclCommInitRankConfig", polls.parse().unwrap());
        std::thread::spawn(|| {
            wait_until("the devices connect", || simgpu::nccl::calls("ncclCommInitRankConfig") > 0);
            println!("@connecting");
        });
    }
    println!("@asks");
    builder.join(&addresses[..]).unwrap().communicator
}

/// Makes device calls, and checks their results. Returns the members and their devices.
fn work(comm: &Communicator, id: u64) -> Result<Vec<(u64, u64)>> {
    let device = comm.device().unwrap();
    let memory = DeviceMemory::of(comm);
    let mut gathered = memory.put(&vec![0_u64; 2 * comm.world_size()]);
    comm.all_gather_into(&memory.put(&[id, device.context().ordinal() as u64]), &mut gathered)?;
    device.synchronize()?;
    let members: Vec<(u64, u64)> = memory.get(&gathered).chunks(2).map(|pair| (pair[0], pair[1])).collect();
    assert_eq!(members[comm.rank()].0, id);
    for op in [ReduceOp::Sum, ReduceOp::BitXor] {
        let mut folded = memory.put(&[7 * id + 1; 500]);
        comm.all_reduce(&mut folded, op)?;
        device.synchronize()?;
        let fold = |a: u64, b: u64| if op == ReduceOp::Sum { a + b } else { a ^ b };
        let right = members.iter().map(|(id, _)| 7 * id + 1).reduce(fold).unwrap();
        assert_eq!(memory.get(&folded), [right; 500]);
    }
    Ok(members)
}

/// The processes of a job, and the addresses of its members.
struct Job {
    name: &'static str,
    world_size: usize,
    ranks: Ranks,
    addresses: Vec<String>,
}

impl Job {
    fn start(name: &'static str, world_size: usize) -> Self {
        Self::start_with(name, world_size, &[])
    }

    /// Does the same as [`Job::start`], with more variables.
    fn start_with(name: &'static str, world_size: usize, variables: &[(&str, String)]) -> Self {
        let ranks = Ranks::spawn_with(name, world_size, variables);
        let mut job = Self { name, world_size, ranks, addresses: vec![String::new(); world_size] };
        let all: Vec<usize> = (0..world_size).collect();
        job.await_members(&all, &all);
        job
    }

    /// Starts a process that joins at a member, or at another one if there is no answer.
    fn add(&mut self, at: &[usize], polls: Option<u32>) -> usize {
        let id = self.ranks.children.len();
        let addresses: Vec<&str> = at.iter().map(|rank| self.addresses[*rank].as_str()).collect();
        let mut variables = vec![(ADDRESSES, addresses.join(","))];
        variables.extend(polls.map(|polls| (POLLS, polls.to_string())));
        self.ranks.add(spawn_rank(self.name, id, self.world_size, free_port(), &variables));
        self.addresses.push(String::new());
        assert_eq!(self.ranks.next("the newcomer asks"), (id, "asks".to_owned()));
        self.tell(&[at[0]], "await");
        assert_eq!(self.ranks.next("the newcomer has asked"), (at[0], "awaited".to_owned()));
        id
    }

    fn tell(&mut self, ranks: &[usize], line: &str) {
        for rank in ranks {
            writeln!(self.ranks.children[*rank].stdin.as_mut().unwrap(), "{line}").unwrap();
        }
    }

    /// Waits until each of `ranks` has worked, with these members. Returns the members' devices.
    fn await_members(&mut self, ranks: &[usize], members: &[usize]) -> Vec<usize> {
        let (found, devices) = self.await_work(ranks);
        assert_eq!(found, members);
        devices
    }

    /// Waits until each of `ranks` has worked, all with the same members. Returns the members and their devices.
    fn await_work(&mut self, ranks: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let (mut waiting, mut all) = (ranks.to_vec(), Vec::new());
        while !waiting.is_empty() {
            let (rank, line) = self.ranks.next("all work");
            if let Some(address) = line.strip_prefix("address ") {
                address.clone_into(&mut self.addresses[rank]);
            } else if let Some(said) = line.strip_prefix("members ") {
                let numbers: Vec<usize> =
                    said.split(|c: char| !c.is_ascii_digit()).filter(|text| !text.is_empty()).map(|text| text.parse().unwrap()).collect();
                waiting.retain(|other| *other != rank);
                all.push(numbers);
            }
        }
        assert!(all.windows(2).all(|two| two[0] == two[1]), "{all:?}");
        all[0].chunks(2).map(|pair| (pair[0], pair[1])).unzip()
    }

    /// Lets all end, and checks that they do well.
    fn end(mut self, members: &[usize]) {
        self.ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
        members.iter().for_each(|rank| self.ranks.outcome(*rank).unwrap());
    }
}

#[test]
fn a_killed_member_is_replaced_and_devices_work() {
    const NAME: &str = "membership::a_killed_member_is_replaced_and_devices_work";
    if is_rank_of(NAME) {
        return rank_of_a_job_that_changes();
    }
    let mut job = Job::start(NAME, 3);
    // The newcomer waits while the member is killed. One call of `admit` serves both.
    let joined = job.add(&[1, 2], None);
    let killed = Instant::now();
    job.ranks.children[0].kill().unwrap();
    job.tell(&[1, 2], "go");
    // The newcomer takes the device of the killed member, although it is the last rank.
    assert_eq!(job.await_members(&[1, 2, joined], &[1, 2, joined]), [1, 2, 0]);
    assert!(killed.elapsed() < SOON, "after {:?}", killed.elapsed());
    println!("a member was replaced after {:?}", killed.elapsed());
    job.end(&[1, 2, joined]);
}

/// Starts three ranks, and a newcomer whose devices take long to connect. Kills `victim` while the devices connect.
/// Returns the newcomer, and the moment of the kill.
fn killed_while_devices_connect(job: &mut Job, victim: Option<usize>) -> (usize, Instant) {
    let newcomer = job.add(&[1, 2, 0], Some(if victim.is_some() { 1000 } else { u32::MAX / 2 }));
    job.tell(&[0, 1, 2], "go");
    assert_eq!(job.ranks.next("the devices connect"), (newcomer, "connecting".to_owned()));
    job.ranks.children[victim.unwrap_or(newcomer)].kill().unwrap();
    (newcomer, Instant::now())
}

#[test]
fn a_newcomer_that_is_killed_while_devices_connect_is_left_out() {
    const NAME: &str = "membership::a_newcomer_that_is_killed_while_devices_connect_is_left_out";
    steers_nccl!();
    if is_rank_of(NAME) {
        return rank_of_a_job_that_changes();
    }
    let mut job = Job::start(NAME, 3);
    let (_, killed) = killed_while_devices_connect(&mut job, None);
    assert_eq!(job.await_members(&[0, 1, 2], &[0, 1, 2]), [0, 1, 2]);
    assert!(killed.elapsed() < SOON, "after {:?}", killed.elapsed());
    println!("the members work again after {:?}", killed.elapsed());
    let joined = job.add(&[2, 0], None);
    job.tell(&[0, 1, 2], "go");
    assert_eq!(job.await_members(&[0, 1, 2, joined], &[0, 1, 2, joined]), [0, 1, 2, 3]);
    job.end(&[0, 1, 2, joined]);
}

#[test]
fn a_member_that_is_killed_while_devices_connect_is_left_out_and_the_newcomer_joins() {
    const NAME: &str = "membership::a_member_that_is_killed_while_devices_connect_is_left_out_and_the_newcomer_joins";
    steers_nccl!();
    if is_rank_of(NAME) {
        return rank_of_a_job_that_changes();
    }
    for victim in [0, 2] {
        let mut job = Job::start(NAME, 3);
        let (newcomer, killed) = killed_while_devices_connect(&mut job, Some(victim));
        let left: Vec<usize> = (0..3).filter(|rank| *rank != victim).collect();
        // The members' second attempt, in the same call, lets the newcomer in.
        let all = [&left[..], &[newcomer]].concat();
        assert_eq!(job.await_members(&all, &all), [&left[..], &[victim]].concat());
        assert!(killed.elapsed() < SOON, "after {:?}", killed.elapsed());
        println!("without rank {victim}, all work after {:?}", killed.elapsed());
        job.end(&all);
    }
}

/// Members wait for a connection for at most their timeout, and 5 s longer to agree.
#[test]
fn a_newcomer_that_is_stopped_while_devices_connect_joins_later() {
    const NAME: &str = "membership::a_newcomer_that_is_stopped_while_devices_connect_joins_later";
    steers_nccl!();
    if is_rank_of(NAME) {
        return rank_of_a_job_that_changes();
    }
    let mut job = Job::start_with(NAME, 2, &[(TIMEOUT, "10".to_owned())]);
    let newcomer = job.add(&[1, 0], Some(1000));
    job.tell(&[0, 1], "go");
    assert_eq!(job.ranks.next("the devices connect"), (newcomer, "connecting".to_owned()));
    let pid = Pid::from_raw(job.ranks.children[newcomer].id() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let stopped = Instant::now();
    job.await_members(&[0, 1], &[0, 1]);
    assert!(stopped.elapsed() < Duration::from_secs(19), "after {:?}", stopped.elapsed());
    println!("the members work again after {:?}", stopped.elapsed());
    kill_process(pid, Signal::CONT).unwrap();
    // It first gives up the attempt before, up to 30 s after its begin. Meanwhile the members work.
    let resumed = Instant::now();
    loop {
        job.tell(&[0, 1], "go");
        if job.await_work(&[0, 1]).0 == [0, 1, newcomer] {
            break;
        }
        assert!(resumed.elapsed() < LIMIT, "the newcomer is not let in");
    }
    job.end(&[0, 1, newcomer]);
}

#[test]
fn a_newcomer_or_member_whose_nccl_fails_once_is_let_in_by_the_next_call() {
    steers_nccl!();
    let _alone = alone();
    // An internal error of NCCL, on the first rank that calls.
    std::thread::scope(|scope| {
        let with_device = || builder(Config::default()).require_device(DeviceChoice::Local);
        let comms = communicators_with(2, |_| with_device());
        let address = comms[0].join_address().unwrap();
        let joined = scope.spawn(move || with_device().join(address));
        wait_until("the newcomer has asked", || comms[0].waiting_newcomers().unwrap() == 1);
        simgpu::nccl::fail_call("ncclCommInitRankConfig", 1, 3);
        let mut all = each(comms, |comm| {
            assert!(comm.admit().unwrap().newcomers.is_empty());
            work(&comm, comm.rank() as u64).unwrap();
            comm.admit().unwrap().communicator
        });
        all.push(joined.join().unwrap().unwrap().communicator);
        each(all, |comm| assert_eq!(work(&comm, comm.rank() as u64).unwrap().len(), 3));
    });
    simgpu::nccl::reset();
}
