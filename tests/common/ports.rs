//! Ports for the listeners of tests.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Where the ports that are given begin: few programs listen between here and the system's own range.
const FIRST: u32 = 10_000;

/// A port of 127.0.0.1 where nobody listens, which this process is given once.
///
/// It lies below the ports that the system gives to connections and to listeners that ask for any: one of those could be taken by a test
/// beside this one between the question and the use. It is tried by a connection, not by a listener of our own: a process
/// that another test starts keeps a copy of such a listener until its program runs, and the port is taken for that long.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let span = first_of_the_system() - FIRST;
    loop {
        // Test programs that run at the same time begin at different places.
        let given = GIVEN.fetch_add(1, Ordering::Relaxed);
        assert!(given < span, "every port from {FIRST} on was given, or is taken");
        let port = (FIRST + std::process::id().wrapping_mul(1009).wrapping_add(given) % span) as u16;
        let tried = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), Duration::from_secs(1));
        if tried.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            return port;
        }
    }
}

/// Where the system's own range begins, as Linux has it unless it is set otherwise.
fn first_of_the_system() -> u32 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(32_768);
    if first > FIRST { first } else { 32_768 }
}
