//! Jobs on two hosts whose ranks come and go: processes and hosts that are killed, cut off, and come back. Needs root and
//! `ip`. Without them, the tests print a line and count as skipped.

use std::process::Child;
use std::time::{Duration, Instant};

use collectives::{Builder, Communicator, Config, Secret, Transport};
use rustix::process::Signal;

use crate::common::hosts::{Hosts, skip};
use crate::common::random::Random;
use crate::common::ranks::{is_rank_of, patience};
use crate::membership::{ADDRESSES, Job, Known, begin_or_join, changes, nothing_is_left_behind, work_until_left_behind};

/// How long a call of the work may take.
const CALL: Duration = Duration::from_secs(2);

/// Returns the host of a process. The first five processes begin the job.
fn place(id: usize) -> usize {
    if id < 5 { usize::from(id > 2) } else { id % 2 }
}

/// The transports between the ranks.
#[derive(Debug, Clone, Copy)]
enum Links {
    /// Shared memory in a host, TCP between hosts.
    Auto,
    Tcp,
    #[cfg(feature = "encryption")]
    Encrypted,
}

impl Links {
    fn builder(self) -> Builder {
        let mut config = Config::default();
        config.timeout = patience(20);
        match self {
            Self::Auto => {}
            Self::Tcp => config.transport = Transport::Tcp,
            #[cfg(feature = "encryption")]
            Self::Encrypted => {
                config.secret = Some(Secret::new("the secret of a job on two hosts").unwrap());
                config.encrypt = true;
            }
        }
        Communicator::builder().config(config)
    }
}

/// Runs one process. If the others leave it behind, it joins them again.
fn rank_that_comes_back(links: Links) {
    let id: u64 = std::env::var("RANK").unwrap().parse().unwrap();
    let mut comm = begin_or_join(links.builder());
    let mut known = Known::default();
    loop {
        work_until_left_behind(comm, id, &mut known, Some(CALL));
        comm = links.builder().configure(|config| config.timeout = patience(60)).join(&known.addresses[..]).unwrap().communicator;
        comm.set_timeout(patience(20));
    }
}

/// Starts a process on its host.
fn spawn(hosts: &Hosts, net: u8, name: &str, id: usize, addresses: Option<String>) -> Child {
    let mut command = hosts.command(place(id), std::env::current_exe().unwrap().to_str().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("COLLECTIVES_TEST_CHILD", name).env("RANK", id.to_string()).env("WORLD_SIZE", "5");
    command.env("MASTER_ADDR", format!("10.99.{net}.1")).env("MASTER_PORT", "29513");
    // All hosts have the same name and boot id here.
    command.env("COLLECTIVES_HOST_IDENTITY", format!("host {}", place(id)));
    if let Some(addresses) = addresses {
        command.env(ADDRESSES, addresses);
    }
    command.spawn().unwrap()
}

/// Lets processes and a whole host come, go, and come back.
fn ranks_on_hosts_come_and_go(name: &'static str, net: u8, links: Links) {
    if is_rank_of(name) {
        return rank_that_comes_back(links);
    }
    let hosts = match Hosts::up(net, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let mut job = Job::start_with(name, 5, Box::new(|id, addresses| spawn(&hosts, net, name, id, addresses)));
    job.add_at(1);
    assert_eq!(job.settle("one has joined from the other host"), [0, 1, 2, 3, 4, 5]);
    job.kill(0);
    assert_eq!(job.settle("the others continue without the first"), [1, 2, 3, 4, 5]);
    // Some are gone, and some are new.
    job.kill(2);
    job.add_at(4);
    assert_eq!(job.settle("one is replaced on another host"), [1, 3, 4, 5, 6]);
    two_halves_meet_again(&mut job, &hosts);
    for process in [3, 4, 5] {
        job.kill(process);
    }
    // They had joined in any order.
    let others = job.settle("the others continue without a host");
    assert!(others == [1, 6] || others == [6, 1], "{others:?}");
    job.add_at(6);
    assert_eq!(job.settle("the host is back"), [others[0], others[1], 7]);
}

/// Cuts the two hosts apart. Host 1 has three of the five processes, so these continue. The others come back as newcomers
/// after the network is restored.
fn two_halves_meet_again(job: &mut Job<'_>, hosts: &Hosts) {
    job.come_back = true;
    hosts.cut(1);
    let mut left_behind = Vec::new();
    while left_behind.len() < 2 || [3, 4, 5].iter().any(|process| job.living[process] != "[3, 4, 5]") {
        let (process, line) = job.next("the larger part continues and the smaller one is left behind");
        if line == "left behind" {
            left_behind.push(process);
        }
    }
    left_behind.sort_unstable();
    assert_eq!(left_behind, [1, 6]);
    hosts.heal(1);
    let members = job.settle("both parts are one job again");
    assert!(members.starts_with(&[3, 4, 5]), "{members:?}");
}

/// Makes random changes on two hosts: processes come, die and are stopped, and the network is cut.
fn random_changes_on_hosts(name: &'static str, net: u8, links: Links) {
    if is_rank_of(name) {
        return rank_that_comes_back(links);
    }
    let hosts = match Hosts::up(net, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let (changes, (mut random, seed)) = (changes(5), Random::new());
    println!("{name}: seed {seed}, {changes} changes");
    let mut job = Job::start_with(name, 5, Box::new(|id, addresses| spawn(&hosts, net, name, id, addresses)));
    job.come_back = true;
    for change in 0..changes {
        let members = job.settle("the job works");
        let began = Instant::now();
        let member = members[random.below(members.len())];
        let what = match random.below(5) {
            0 | 1 if members.len() < 6 => {
                job.add_at(member);
                "a newcomer comes"
            }
            0 | 1 if members.len() > 2 => {
                job.kill(member);
                "a member dies"
            }
            2 if members.len() > 2 => {
                // The others go on without it, unless it is awake again before.
                job.signal(member, Signal::STOP);
                let others: Vec<usize> = members.iter().copied().filter(|other| *other != member).collect();
                let list = format!("{others:?}");
                while others.iter().any(|other| job.living[other] != list) {
                    job.next("the others continue without a stopped member");
                }
                job.signal(member, Signal::CONT);
                "a member is stopped and wakes up"
            }
            3 => {
                cut_and_heal(&mut job, &hosts, &members);
                "the network is cut and restored"
            }
            _ => {
                job.add_at(member);
                job.kill(member);
                "a member dies and a newcomer comes"
            }
        };
        job.settle("the job works after a change");
        println!("{name}: change {change}: {members:?}: {what}; all work after {:.1} s", began.elapsed().as_secs_f64());
    }
    nothing_is_left_behind(&mut job, seed);
}

/// Cuts the hosts apart until the larger part continues, or of two equal parts the one with the first member.
fn cut_and_heal(job: &mut Job<'_>, hosts: &Hosts, members: &[usize]) {
    let (first, second): (Vec<usize>, Vec<usize>) = members.iter().partition(|process| place(**process) == place(members[0]));
    let larger = if first.len() >= second.len() { first } else { second };
    if larger.len() == members.len() {
        return;
    }
    hosts.cut(1);
    let list = format!("{larger:?}");
    while larger.iter().any(|process| job.living[process] != list) {
        job.next("the larger part continues");
    }
    hosts.heal(1);
}

#[test]
fn random_changes_on_two_hosts_leave_right_sums_and_nothing_behind() {
    random_changes_on_hosts("membership_on_hosts::random_changes_on_two_hosts_leave_right_sums_and_nothing_behind", 74, Links::Auto);
}

#[test]
fn ranks_on_two_hosts_come_and_go() {
    ranks_on_hosts_come_and_go("membership_on_hosts::ranks_on_two_hosts_come_and_go", 71, Links::Auto);
}

#[test]
fn ranks_on_two_hosts_come_and_go_over_tcp() {
    ranks_on_hosts_come_and_go("membership_on_hosts::ranks_on_two_hosts_come_and_go_over_tcp", 72, Links::Tcp);
}

#[test]
#[cfg(feature = "encryption")]
fn ranks_on_two_hosts_come_and_go_over_encrypted_tcp() {
    ranks_on_hosts_come_and_go("membership_on_hosts::ranks_on_two_hosts_come_and_go_over_encrypted_tcp", 73, Links::Encrypted);
}
