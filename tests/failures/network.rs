//! Networks that are cut, whole or in one direction, and healed. Needs root and `ip`: without, one line says so and the test counts as
//! skipped.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use collectives::{Communicator, Error, ReduceOp};

use crate::common::hosts::{Hosts, run, skip};
use crate::common::meeting::wait_until;
use crate::common::ranks::{is_rank_of, patience};
use crate::processes::Ranks;

/// How long a call may wait here: keep-alive would take longer.
const DEADLINE: Duration = Duration::from_secs(2);

/// What all may take to notice, with the deadline.
const NOTICED: Duration = patience(8);

/// One rank: works until it fails, says with what, and goes on with whom it can reach.
fn rank_on_a_host() {
    let comm = Communicator::builder().configure(|config| config.timeout = patience(20)).from_env().unwrap();
    comm.set_timeout(DEADLINE);
    let rank = comm.rank() as u64;
    let mut rounds = 0_u64;
    let error = loop {
        let mut x = [rank + rounds, 1];
        match comm.all_reduce(&mut x, ReduceOp::Sum) {
            Ok(()) => assert_eq!(x, [3 + 3 * rounds, 3]),
            Err(error) => break error,
        }
        rounds += 1;
        if rounds == 1 {
            println!("@ready");
        }
    };
    assert!(error.is_peer_lost() || error.is_timeout(), "{error}");
    println!("@failed {rounds} {error}");
    // A later call is refused, and says why.
    assert!(comm.barrier().unwrap_err().is_poisoned());
    comm.set_timeout(Duration::from_secs(10));
    match comm.shrink() {
        Ok(left) => {
            let mut members = vec![0; left.world_size()];
            left.all_gather_into(&rank, &mut members).unwrap();
            println!("@shrunk {members:?}");
            // The parent ends the rest.
            left.recv(&mut [0_u8], (left.rank() + 1) % left.world_size()).unwrap_err();
        }
        Err(error @ Error::LeftBehind { .. }) => println!("@left behind: {error}"),
        Err(error) => panic!("{error}"),
    }
}

/// What makes the rank of this number, of as many as there are hosts, on the host of this number.
fn on_host(hosts: &Hosts, net: u8, name: &str, rank: usize) -> Command {
    let mut command: Command = hosts.command(rank, std::env::current_exe().unwrap().to_str().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("COLLECTIVES_TEST_CHILD", name).env("RANK", rank.to_string()).env("WORLD_SIZE", hosts.count.to_string());
    command.env("MASTER_ADDR", format!("10.99.{net}.1")).env("MASTER_PORT", "29512");
    // All hosts have one name and one boot id here.
    command.env("COLLECTIVES_HOST_IDENTITY", format!("host {rank}"));
    command
}

/// The rank of this number on the host of this number.
fn spawn(hosts: &Hosts, net: u8, name: &str, rank: usize) -> Child {
    on_host(hosts, net, name, rank).spawn().unwrap()
}

/// Cuts rank 2's host off in some way: it and the others fail in time, the others go on, and it is left behind once it is back.
fn cut_off(name: &str, net: u8, cut: impl Fn(&Hosts), heal: impl Fn(&Hosts)) {
    if is_rank_of(name) {
        return rank_on_a_host();
    }
    let hosts = match Hosts::up(net, 3) {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: network namespaces cannot be made: {why}"),
    };
    let mut ranks = Ranks::of((0..3).map(|rank| spawn(&hosts, net, name, rank)).collect());
    (0..3).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
    cut(&hosts);
    let began = Instant::now();
    let (mut done, mut shrunk, mut left_behind) = (Vec::new(), 0, false);
    while shrunk < 2 || !left_behind {
        let (rank, line) = ranks.next("something became of the cut");
        if let Some(said) = line.strip_prefix("failed ") {
            assert!(began.elapsed() < NOTICED, "{name}: rank {rank} after {:?}: {line}", began.elapsed());
            done.push(said.split(' ').next().unwrap().parse::<u64>().unwrap());
        } else if line == "shrunk [0, 1]" {
            shrunk += 1;
            if shrunk == 2 {
                heal(&hosts);
            }
        } else {
            assert!(rank == 2 && line.starts_with("left behind"), "{name}: rank {rank} says {line:?}");
            left_behind = true;
        }
    }
    // A result that one rank has and another has not is the last one, and both were told.
    let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
    assert!(done.len() == 3 && most - least <= 1, "{name}: calls that went well: {done:?}");
}

#[test]
fn a_host_that_is_cut_off_is_left_behind() {
    const NET: u8 = 11;
    cut_off(
        "network::a_host_that_is_cut_off_is_left_behind",
        NET,
        |hosts| run("ip", &["-n", &hosts.space(2), "link", "set", "eth0", "down"]).unwrap(),
        |hosts| run("ip", &["-n", &hosts.space(2), "link", "set", "eth0", "up"]).unwrap(),
    );
}

#[test]
fn a_host_that_hears_and_is_not_heard_is_left_behind() {
    const NET: u8 = 12;
    // What it sends goes to a card that nobody has, so it is lost without a word.
    let neighbour = |hosts: &Hosts, host: usize, verb: &[&str]| {
        let (space, address) = (hosts.space(2), format!("10.99.{NET}.{}", host + 1));
        let mut arguments = vec!["-n", &space, "neigh", verb[0], &address];
        arguments.extend(&verb[1..]);
        arguments.extend(["dev", "eth0"]);
        run("ip", &arguments).unwrap();
    };
    cut_off(
        "network::a_host_that_hears_and_is_not_heard_is_left_behind",
        NET,
        |hosts| [0, 1].into_iter().for_each(|host| neighbour(hosts, host, &["replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent"])),
        |hosts| [0, 1].into_iter().for_each(|host| neighbour(hosts, host, &["del"])),
    );
}

/// Where the parent says that the network is back.
const BACK: &str = "COLLECTIVES_TEST_BACK";

/// Two communicators of all ranks: one that is used while the network is away, and one that is idle.
fn busy_and_idle() -> [Communicator; 2] {
    let busy = Communicator::builder().configure(|config| config.timeout = patience(60)).from_env().unwrap();
    let idle = busy.split(Some(0), 0).unwrap().unwrap();
    [&busy, &idle].into_iter().for_each(|comm| comm.barrier().unwrap());
    println!("@ready");
    [busy, idle]
}

/// Calls on both until the network has been away and is back, and then once more.
fn rank_that_sits_it_out() {
    let [busy, idle] = busy_and_idle();
    let back = PathBuf::from(std::env::var_os(BACK).unwrap());
    loop {
        let mut is_back = [u8::from(back.exists())];
        busy.all_reduce(&mut is_back, ReduceOp::Min).unwrap();
        if is_back[0] == 1 {
            break;
        }
    }
    for comm in [&busy, &idle] {
        let mut sum = [1];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [2]);
    }
    println!("@well");
    [busy, idle].into_iter().for_each(|comm| comm.close().unwrap());
}

#[test]
fn a_network_that_is_away_for_a_while_ends_nothing() {
    const NAME: &str = "network::a_network_that_is_away_for_a_while_ends_nothing";
    const NET: u8 = 13;
    /// TCP tries again after 6.2 s and 12.6 s.
    const AWAY: Duration = Duration::from_secs(10);
    if is_rank_of(NAME) {
        return rank_that_sits_it_out();
    }
    let hosts = match Hosts::up(NET, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let back = folder.path().join("back");
    let mut ranks = Ranks::of((0..2).map(|rank| on_host(&hosts, NET, NAME, rank).env(BACK, &back).spawn().unwrap()).collect());
    (0..2).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
    hosts.cut(1);
    // This is no wait for anything: it is how long the network is away.
    std::thread::sleep(AWAY);
    hosts.heal(1);
    std::fs::write(&back, b"").unwrap();
    (0..2).for_each(|_| assert_eq!(ranks.next("its calls succeed").1, "well"));
    (0..2).for_each(|rank| ranks.outcome(rank).unwrap());
}

/// Calls until the peer's host is silent for too long, and says with what both communicators end.
fn rank_that_loses_the_other() {
    let communicators = busy_and_idle();
    for comm in &communicators {
        let error = loop {
            match comm.all_reduce(&mut [1], ReduceOp::Sum) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert!(error.is_peer_lost(), "{error}");
        println!("@{error}");
    }
}

#[test]
fn a_host_that_stays_silent_has_stopped_answering() {
    const NAME: &str = "network::a_host_that_stays_silent_has_stopped_answering";
    const NET: u8 = 14;
    if is_rank_of(NAME) {
        return rank_that_loses_the_other();
    }
    let hosts = match Hosts::up(NET, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let spawn = |rank| on_host(&hosts, NET, NAME, rank).env("COLLECTIVES_SILENCE_TIMEOUT", "3").spawn().unwrap();
    let mut ranks = Ranks::of((0..2).map(spawn).collect());
    (0..2).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
    hosts.cut(1);
    let began = Instant::now();
    for _ in 0..4 {
        let (rank, said) = ranks.next("it has lost the other");
        assert!(said.contains(&format!("rank {}", 1 - rank)) && said.contains("stopped answering"), "rank {rank}: {said}");
        assert!(!said.contains("process ended") && said.contains("COLLECTIVES_SILENCE_TIMEOUT"), "rank {rank}: {said}");
    }
    assert!(began.elapsed() < patience(30), "{:?}", began.elapsed());
    (0..2).for_each(|rank| ranks.outcome(rank).unwrap());
}
