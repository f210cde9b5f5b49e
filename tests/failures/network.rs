//! Networks that are cut, in both directions or in one, and restored. Needs root and `ip`. Without them, the test
//! prints a line and counts as skipped.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use collectives::{Communicator, Error, ReduceOp};

use crate::common::hosts::{Hosts, run, skip};
use crate::common::meeting::wait_until;
use crate::common::ranks::{is_rank_of, patience};
use crate::processes::Ranks;

/// How long a call may wait here. Keep-alive would take longer.
const DEADLINE: Duration = Duration::from_secs(2);

/// The time for all ranks to notice, including the deadline.
const NOTICED: Duration = patience(8);

/// Runs one rank: it works until a call fails, prints the error, and continues with the ranks that it can reach.
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
    // A later call is refused with the reason.
    assert!(comm.barrier().unwrap_err().is_poisoned());
    comm.set_timeout(Duration::from_secs(10));
    match comm.shrink() {
        Ok(left) => {
            let mut members = vec![0; left.world_size()];
            left.all_gather_into(&rank, &mut members).unwrap();
            println!("@shrunk {members:?}");
            // The parent kills the processes.
            left.recv(&mut [0_u8], (left.rank() + 1) % left.world_size()).unwrap_err();
        }
        Err(error @ Error::LeftBehind { .. }) => println!("@left behind: {error}"),
        Err(error) => panic!("{error}"),
    }
}

/// Returns the command that starts this rank on the host of the same number. There are as many ranks as hosts.
fn on_host(hosts: &Hosts, net: u8, name: &str, rank: usize) -> Command {
    let mut command: Command = hosts.command(rank, std::env::current_exe().unwrap().to_str().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("COLLECTIVES_TEST_CHILD", name).env("RANK", rank.to_string()).env("WORLD_SIZE", hosts.count.to_string());
    command.env("MASTER_ADDR", format!("10.99.{net}.1")).env("MASTER_PORT", "29512");
    // All hosts have the same name and boot id here.
    command.env("COLLECTIVES_HOST_IDENTITY", format!("host {rank}"));
    command
}

/// Starts this rank on the host of the same number.
fn spawn(hosts: &Hosts, net: u8, name: &str, rank: usize) -> Child {
    on_host(hosts, net, name, rank).spawn().unwrap()
}

/// Cuts off rank 2's host with `cut`. All ranks must fail in time, the others continue, and rank 2 is left behind after
/// `heal`.
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
    // Only the last result may be on one rank and not on another, and both ranks got an error afterwards.
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
    // Its packets go to an Ethernet address that does not exist, so they are lost silently.
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

/// The variable with the file that exists once the network is back.
const BACK: &str = "COLLECTIVES_TEST_BACK";

/// Returns two communicators of all ranks: one that is used while the network is away, and one that is idle.
fn busy_and_idle() -> [Communicator; 2] {
    let busy = Communicator::builder().configure(|config| config.timeout = patience(60)).from_env().unwrap();
    let idle = busy.split(Some(0), 0).unwrap().unwrap();
    [&busy, &idle].into_iter().for_each(|comm| comm.barrier().unwrap());
    println!("@ready");
    [busy, idle]
}

/// Makes calls until the network has been away and is back, and then one more on each communicator.
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
    /// TCP retransmits after 6.2 s and 12.6 s.
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
    // This sleep waits for nothing: it is how long the network is away.
    std::thread::sleep(AWAY);
    hosts.heal(1);
    std::fs::write(&back, b"").unwrap();
    (0..2).for_each(|_| assert_eq!(ranks.next("its calls succeed").1, "well"));
    (0..2).for_each(|rank| ranks.outcome(rank).unwrap());
}

/// Makes calls until the peer's host is silent for too long, and prints the errors of both communicators.
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

/// Runs one of three ranks. The last one dies, and the others continue without it.
fn rank_that_may_die() {
    let comm = Communicator::builder().configure(|config| config.timeout = patience(20)).from_env().unwrap();
    let mut sum = [comm.rank() as u32];
    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [3]);
    comm.barrier().unwrap();
    if comm.rank() == 2 {
        std::process::exit(0);
    }
    while comm.barrier().is_ok() {}
    let left = comm.shrink().unwrap();
    let mut sum = [1];
    left.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("@{} left", sum[0]);
    left.close().unwrap();
}

#[test]
fn ranks_meet_at_an_address_of_their_link() {
    const NAME: &str = "network::ranks_meet_at_an_address_of_their_link";
    const NET: u8 = 15;
    if is_rank_of(NAME) {
        return rank_that_may_die();
    }
    let hosts = match Hosts::up(NET, 3) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    for host in 0..3 {
        let address = format!("fe80::99:{host}/64");
        if let Err(why) = run("ip", &["-n", &hosts.space(host), "addr", "add", &address, "dev", "eth0", "nodad"]) {
            skip!("no address of a link can be had: {why}");
        }
    }
    let spawn = |rank| on_host(&hosts, NET, NAME, rank).env("MASTER_ADDR", "fe80::99:0%eth0").spawn().unwrap();
    let mut ranks = Ranks::of((0..3).map(spawn).collect());
    (0..2).for_each(|_| assert_eq!(ranks.next("it goes on without the dead").1, "2 left"));
    (0..3).for_each(|rank| ranks.outcome(rank).unwrap());
}

/// Runs one of three ranks, which keep their links until the parent has listed the connections.
fn rank_that_is_looked_at() {
    let comm = Communicator::builder().configure(|config| config.timeout = patience(60)).from_env().unwrap();
    comm.barrier().unwrap();
    println!("@ready");
    let looked = PathBuf::from(std::env::var_os(BACK).unwrap());
    wait_until("the parent has looked", || looked.exists());
    comm.close().unwrap();
}

#[test]
fn connections_within_a_host_are_not_paced_by_bbr() {
    const NAME: &str = "network::connections_within_a_host_are_not_paced_by_bbr";
    const NET: u8 = 16;
    if is_rank_of(NAME) {
        return rank_that_is_looked_at();
    }
    let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap_or_default();
    if !known.split_whitespace().any(|name| name == "bbr") {
        skip!("this kernel has no bbr: {known}");
    }
    let hosts = match Hosts::up(NET, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    for host in 0..2 {
        let bbr = "echo bbr > /proc/sys/net/ipv4/tcp_congestion_control";
        run("ip", &["netns", "exec", &hosts.space(host), "sh", "-c", bbr]).unwrap();
    }
    run("ip", &["-n", &hosts.space(0), "addr", "add", &format!("10.99.{NET}.101/24"), "dev", "eth0"]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let looked = folder.path().join("looked");
    // Two ranks on host 0, each with its own address, and one on host 1.
    let spawn = |(rank, address): (usize, &str)| {
        let mut command = on_host(&hosts, NET, NAME, usize::from(rank == 2));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3").env(BACK, &looked).env("COLLECTIVES_TRANSPORT", "tcp");
        command.env("COLLECTIVES_LISTEN_ADDRESS", format!("10.99.{NET}.{address}")).spawn().unwrap()
    };
    let mut ranks = Ranks::of([(0, "1"), (1, "101"), (2, "2")].map(spawn).into_iter().collect());
    (0..3).for_each(|_| assert_eq!(ranks.next("it has begun").1, "ready"));
    let listed = Command::new("ip").args(["netns", "exec", &hosts.space(0), "ss", "-tniHO", "state", "established"]).output();
    let listed = match listed {
        Ok(listed) if listed.status.success() => String::from_utf8(listed.stdout).unwrap(),
        other => skip!("connections cannot be listed: {other:?}"),
    };
    std::fs::write(&looked, b"").unwrap();
    let is_remote = |line: &str| line.contains(&format!("10.99.{NET}.2:"));
    // Connections to the store carry little and may have the system's default.
    let links: Vec<&str> = listed.lines().filter(|line| !line.contains(":29512")).collect();
    let (remote, local): (Vec<&str>, Vec<&str>) = links.into_iter().partition(|line| is_remote(line));
    assert!(local.len() >= 2 && local.iter().all(|line| !line.contains(" bbr ")), "within the host: {local:#?}");
    assert!(remote.len() >= 2 && remote.iter().all(|line| line.contains(" bbr ")), "between hosts: {remote:#?}");
    (0..3).for_each(|rank| ranks.outcome(rank).unwrap());
}
