//! The addresses and ports on which ranks listen, as their settings choose them, and errors if there are none. Also the
//! congestion control of connections between them.

use std::collections::HashSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::{Child, Command};
use std::time::Instant;

use collectives::{Communicator, ReduceOp};
use socket2::Socket;

use crate::common::hosts::{Hosts, run, skip};
use crate::common::ranks::{free_port, is_rank_of, patience};
use crate::starts::{SOON, said, start};

/// The port of the job's store in a network namespace.
const STORE: u16 = 29_521;

/// Returns the local and remote addresses, and the states, of this process's TCP sockets over IPv4.
fn sockets() -> Vec<(SocketAddrV4, SocketAddrV4, String)> {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let own: HashSet<String> =
        links.filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    let address = |text: &str| {
        let (ip, port) = text.split_once(':').unwrap();
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).unwrap().to_ne_bytes());
        SocketAddrV4::new(ip, u16::from_str_radix(port, 16).unwrap())
    };
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.filter(|fields| own.contains(fields[9])).map(|fields| (address(fields[1]), address(fields[2]), fields[3].to_owned())).collect()
}

/// Returns the congestion controls of this process's connections to other ranks.
fn congestion_controls() -> HashSet<String> {
    let to_peers = |socket: &Socket| {
        let ends = [socket.local_addr(), socket.peer_addr()].map(|end| end.ok().and_then(|end| end.as_socket_ipv4()));
        ends.iter().all(|end| end.is_some_and(|end| end.port() != STORE))
    };
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let copies = descriptors.collect::<Vec<i32>>().into_iter().filter_map(|number| duplicate(number).map(Socket::from).filter(to_peers));
    let name = |socket: Socket| socket.tcp_congestion().ok().map(|name| String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned());
    copies.filter_map(name).collect()
}

/// Returns a copy of a descriptor of this process, if it is open.
#[expect(unsafe_code, reason = "descriptors are known by their numbers alone")]
fn duplicate(number: i32) -> Option<std::os::fd::OwnedFd> {
    // SAFETY: the descriptor is only copied. If another thread has closed it meanwhile, the copy fails.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(number) }.try_clone_to_owned().ok()
}

/// Runs one rank: it reduces a long vector, and prints on which addresses it listens, and what came over `eth1`.
fn rank_that_shows_its_addresses() {
    const COUNT: usize = 1 << 18;
    let outcome = Communicator::from_env().and_then(|comm| {
        let mut x = vec![comm.rank() as u64 + 1; COUNT];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        let ranks = comm.world_size() as u64;
        assert!(x.iter().all(|x| *x == ranks * (ranks + 1) / 2));
        comm.barrier()?;
        let received = fs::read_to_string("/sys/class/net/eth1/statistics/rx_bytes").unwrap_or_default();
        let received: usize = received.trim().parse().unwrap_or(0);
        println!("\n@over eth1: {}", received > 8 * COUNT / 2);
        for (listener, ..) in sockets().into_iter().filter(|(local, _, state)| state == "0A" && local.port() != STORE) {
            println!("@listens {listener}");
        }
        congestion_controls().into_iter().for_each(|name| println!("@paced by {name}"));
        if std::env::var_os("COLLECTIVES_TEST_SPLITS").is_some() {
            let half = comm.split(Some(0), 0).map(drop);
            println!("@split {}", half.map_or_else(|error| error.to_string(), |()| "ok".to_owned()));
            // The others may not have heard yet that there is no such communicator.
            comm.barrier()?;
        }
        comm.close()
    });
    match outcome {
        Ok(()) => println!("@ok"),
        Err(error) => println!("@failed: {}", error.to_string().replace('\n', " ")),
    }
}

/// Makes two hosts with two networks: 10.99.`net`.0 on `eth0`, 10.98.`net`.0 on `eth1`.
fn two_networks(net: u8) -> Result<Hosts, String> {
    let hosts = Hosts::up(net, 2)?;
    let [first, second] = [0, 1].map(|host| hosts.space(host));
    run("ip", &["-n", &first, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", &second])?;
    for (space, host) in [(&first, 1), (&second, 2)] {
        run("ip", &["-n", space, "addr", "add", &format!("10.98.{net}.{host}/24"), "dev", "eth1"])?;
        run("ip", &["-n", space, "link", "set", "eth1", "up"])?;
    }
    Ok(hosts)
}

/// Runs a rank on each of two hosts, each with its own names of interfaces, and returns what they print.
fn on_two_networks(hosts: &Hosts, name: &str, net: u8, names: [&str; 2]) -> Vec<String> {
    let on = |rank: usize| {
        let mut command = hosts.command(rank, "env");
        command.env("COLLECTIVES_SOCKET_IFNAME", names[rank]).env("MASTER_ADDR", format!("10.99.{net}.1"));
        start(name, command, rank, 2, STORE)
    };
    said((0..2).map(on).collect())
}

#[test]
fn ranks_listen_on_the_interfaces_that_the_variable_selects() {
    const NAME: &str = "addresses::ranks_listen_on_the_interfaces_that_the_variable_selects";
    const NET: u8 = 24;
    if is_rank_of(NAME) {
        return rank_that_shows_its_addresses();
    }
    let hosts = match two_networks(NET) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    // Before these come those that leave `eth1` unused.
    for (names, network) in [("eth", 99), ("^eth1", 99), ("=eth0,eth1", 99), ("eth1", 98), ("^eth0,lo", 98), ("=eth1,eth0", 98)] {
        for (rank, said) in on_two_networks(&hosts, NAME, NET, [names; 2]).into_iter().enumerate() {
            assert!(said.ends_with("ok"), "{names}: {said}");
            let listeners: Vec<&str> = said.split("; ").filter_map(|line| line.strip_prefix("listens ")).collect();
            let own = format!("10.{network}.{NET}.{}:", rank + 1);
            assert!(listeners.len() == 2 && listeners.iter().all(|at| at.starts_with(&own)), "{names}: rank {rank}: {said}");
            assert!(said.contains(&format!("over eth1: {}", network == 98)), "{names}: rank {rank}: {said}");
            // The two hosts are one machine, whose ranks share no network.
            let paced: Vec<&str> = said.split("; ").filter_map(|line| line.strip_prefix("paced by ")).collect();
            assert!(!paced.is_empty() && paced.iter().all(|name| ["cubic", "reno"].contains(name)), "{names}: rank {rank}: {said}");
        }
    }
}

#[test]
fn a_name_that_fits_no_interface_is_an_error_on_every_rank_at_once() {
    const NAME: &str = "addresses::a_name_that_fits_no_interface_is_an_error_on_every_rank_at_once";
    const NET: u8 = 25;
    if is_rank_of(NAME) {
        return rank_that_shows_its_addresses();
    }
    let hosts = match two_networks(NET) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    for wrong in 0..2 {
        let mut names = ["eth"; 2];
        names[wrong] = "=eth,ib";
        let began = Instant::now();
        let said = on_two_networks(&hosts, NAME, NET, names);
        assert!(began.elapsed() < SOON, "{:?}: {said:?}", began.elapsed());
        let words = ["COLLECTIVES_SOCKET_IFNAME==eth,ib", "lo (127.0.0.1", &format!("eth1 (10.98.{NET}.{}", wrong + 1)];
        for said in &said {
            assert!(said.starts_with("failed") && words.iter().all(|words| said.contains(words)), "{said}");
        }
        assert!(said[1 - wrong].contains(&format!("rank {wrong} cannot continue")), "{said:?}");
    }
}

/// Returns the first of `count` ports that follow each other, and are free.
fn free_ports(count: u16) -> u16 {
    let (mut first, mut last) = (free_port(), None);
    loop {
        let next = last.map_or(first, |_| free_port());
        if last.is_some_and(|last| next != last + 1) {
            first = next;
        }
        last = Some(next);
        if next - first + 1 == count {
            return first;
        }
    }
}

/// Starts three ranks that use TCP and ports of a range.
fn in_range(name: &str, low: u16, high: u16) -> Vec<Child> {
    let store = free_port();
    let ranks = (0..3).map(|rank| {
        let mut command = Command::new("env");
        command.env("COLLECTIVES_TRANSPORT", "tcp").env("COLLECTIVES_PORT_RANGE", format!("{low}:{high}"));
        command.env("COLLECTIVES_TEST_SPLITS", "1");
        start(name, command, rank, 3, store)
    });
    ranks.collect()
}

#[test]
fn ranks_listen_on_ports_of_the_range_and_share_them() {
    const NAME: &str = "addresses::ranks_listen_on_ports_of_the_range_and_share_them";
    /// For each of three ranks: the job, and its two communicators.
    const PORTS: u16 = 9;
    if is_rank_of(NAME) {
        return rank_that_shows_its_addresses();
    }
    let low = free_ports(PORTS);
    // The second time, connections of the first job may still be closing.
    for attempt in 0..2 {
        let mut used = HashSet::new();
        for said in said(in_range(NAME, low, low + PORTS - 1)) {
            assert!(said.ends_with("ok") && said.contains("split ok"), "{attempt}: {said}");
            let ports = said.split("; ").filter_map(|line| line.strip_prefix("listens ")?.rsplit_once(':')?.1.parse::<u16>().ok());
            // The port of the store is not one of them.
            used.extend(ports.filter(|port| (low..low + PORTS).contains(port)));
        }
        assert_eq!(used.len(), 6, "{attempt}: {used:?}");
    }
}

#[test]
fn a_range_without_a_free_port_is_an_error_on_every_rank_at_once() {
    const NAME: &str = "addresses::a_range_without_a_free_port_is_an_error_on_every_rank_at_once";
    if is_rank_of(NAME) {
        return rank_that_shows_its_addresses();
    }
    let low = free_ports(7);
    let range = |high: u16| format!("COLLECTIVES_PORT_RANGE={low}:{high}");
    // Too few for the recovery listeners, and too few for the links.
    for count in [2, 5] {
        let began = Instant::now();
        let said = said(in_range(NAME, low, low + count - 1));
        assert!(began.elapsed() < SOON, "{count}: {:?}: {said:?}", began.elapsed());
        for said in &said {
            assert!(said.starts_with("failed") && said.contains(&range(low + count - 1)), "{count}: {said}");
        }
    }
    // Enough for the job, but not for another communicator. The job goes on.
    let began = Instant::now();
    for said in said(in_range(NAME, low, low + 6)) {
        assert!(said.contains("split ") && said.contains(&range(low + 6)) && said.ends_with("ok"), "{said}");
    }
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    // One port that another program uses.
    let _other = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, low)).unwrap();
    let builder = Communicator::builder().configure(|config| {
        config.port_range = Some(collectives::network::PortRange::new(low, low).unwrap());
        config.timeout = patience(60);
    });
    let error = builder.local(2).unwrap_err();
    assert!(matches!(error, collectives::Error::Config { .. }) && error.to_string().contains(&range(low)), "{error}");
}
