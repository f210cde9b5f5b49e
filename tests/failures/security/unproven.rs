//! A thousand unproven connections at the listeners of a job that is starting.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use collectives::{
    Communicator, Secret, Transport,
    store::{TcpStore, TcpStoreServer},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{LONG, RIGHT, messages, secret};
use crate::common::oracle::hash;
use crate::common::ranks::{self, Meeting, listening, patience};

const RANKS: usize = 4;
/// The number of connections at the store, and of those at the ranks' listeners.
const CONNECTIONS: usize = 500;
/// The longest start with unproven connections. It must have a bound, even on a slow machine.
const BOUND: Duration = patience(10);

/// Returns the first bytes of an unproven connection: none, random ones, half a greeting, another protocol, or lengths
/// that exceed all memory.
fn words(number: usize, seed: u64) -> Vec<u8> {
    let validate = [0, 0xce, 0xf7, 0x85, 0x3c];
    match number % 7 {
        0 => Vec::new(),
        1 => (0..200).map(|index| hash(seed, number, index) as u8).collect(),
        2 => validate[..3].to_vec(),
        3 => b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        4 => [&validate[..], &[1], &[0xff; 8]].concat(),
        5 => [b"colprove\x01\x01".as_slice(), &[0xff; 30]].concat(),
        _ => b"colhello\x01\0\0\0\xff\xff\xff".to_vec(),
    }
}

/// Opens `count` unproven connections, spread over the addresses. They stay open until they are dropped.
fn connections(addresses: &[SocketAddr], count: usize, seed: u64) -> Vec<TcpStream> {
    let connect = |number: usize| {
        let mut stream = TcpStream::connect(addresses[number % addresses.len()]).unwrap();
        // A connection that is refused at its first byte cannot send the rest.
        let _ = stream.write_all(&words(number, seed));
        stream
    };
    (0..count).map(connect).collect()
}

/// Returns how many threads, descriptors and bytes of memory this process has.
fn holdings() -> (usize, usize, usize) {
    let count = |path| fs::read_dir(path).unwrap().count();
    let status = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split(' ').nth(1).unwrap().parse().unwrap();
    (count("/proc/self/task"), count("/proc/self/fd"), pages * rustix::param::page_size())
}

/// Raises the limit of descriptors for both ends of every connection.
fn allow_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = Some(maximum.map_or(8192, |most| most.min(8192)));
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

/// Starts a job, lets each rank send to every other, ends it, and returns the time taken. The unproven connections
/// reach the store before the ranks do. They reach the ranks before their links for messages are opened.
fn job(secret: Option<&Secret>, count: usize, seed: u64) -> Duration {
    let server = match secret {
        Some(secret) => TcpStoreServer::bind_with_secret("127.0.0.1:0", secret),
        None => TcpStoreServer::bind("127.0.0.1:0"),
    };
    let server = server.unwrap();
    let port = server.local_addr().port();
    let before = listening();
    let mut company = connections(&[server.local_addr()], count, seed);
    let (started, besieged) = (Meeting::new(RANKS + 1), Meeting::new(RANKS + 1));
    let rank = |rank: usize| {
        let begun = Instant::now();
        let builder = Communicator::builder().configure(|config| {
            config.timeout = LONG;
            config.transport = Transport::Tcp;
            config.secret = secret.cloned();
        });
        let store = match secret {
            Some(secret) => TcpStore::connect_with_secret("127.0.0.1", port, LONG, secret),
            None => TcpStore::connect("127.0.0.1", port, LONG),
        };
        let comm = builder.with_store(store.unwrap(), rank, RANKS).unwrap();
        let start = begun.elapsed();
        started.meet();
        besieged.meet();
        let begun = Instant::now();
        messages(&comm).unwrap();
        comm.close().unwrap();
        start + begun.elapsed()
    };
    let took = std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        started.meet();
        let listeners: Vec<SocketAddr> = listening().difference(&before).copied().collect();
        assert_eq!(listeners.len(), 2 * RANKS, "for each rank a listener for links, and one to be found by after a failure");
        company.extend(connections(&listeners, count, seed ^ 1));
        besieged.meet();
        ranks.into_iter().map(|rank| rank.join().unwrap()).max().unwrap()
    });
    drop(company);
    took
}

fn besieged(secret: Option<&Secret>) {
    allow_descriptors();
    let seed = 20_261;
    // After this run, everything that is allocated only once exists.
    let alone = job(secret, 0, seed);
    let before = holdings();
    let took = job(secret, CONNECTIONS, seed);
    println!("seed {seed}: {alone:?} alone, {took:?} among {} unproven connections", 2 * CONNECTIONS);
    assert!(took < BOUND, "{took:?} among unproven connections, {alone:?} without");
    // The kernel removes a thread a moment after it was joined.
    let begun = Instant::now();
    let is_more = |after: (usize, usize, usize)| after.0 > before.0 || after.1 > before.1;
    while is_more(holdings()) && begun.elapsed() < LONG {
        std::thread::yield_now();
    }
    let after = holdings();
    assert!(!is_more(after), "threads, descriptors and bytes: {before:?} before, {after:?} after");
    assert!(after.2 < before.2 + (64 << 20), "{} B of memory before, {} B after", before.2, after.2);
}

#[test]
fn a_thousand_unproven_connections_do_not_hold_up_a_job_with_a_secret() {
    const NAME: &str = "unproven::a_thousand_unproven_connections_do_not_hold_up_a_job_with_a_secret";
    ranks::alone_in_a_process(NAME, || besieged(Some(&secret(RIGHT))));
}

#[cfg(feature = "encryption")]
#[test]
fn a_thousand_unproven_connections_do_not_hold_up_a_job_that_encrypts() {
    const NAME: &str = "unproven::a_thousand_unproven_connections_do_not_hold_up_a_job_that_encrypts";
    ranks::alone_in_a_process(NAME, || besieged(Some(&secret(RIGHT).encrypting().unwrap())));
}

#[test]
fn a_thousand_unproven_connections_do_not_hold_up_a_job_without_one() {
    const NAME: &str = "unproven::a_thousand_unproven_connections_do_not_hold_up_a_job_without_one";
    ranks::alone_in_a_process(NAME, || besieged(None));
}
