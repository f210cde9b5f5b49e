//! Ports for the listeners of tests.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The first port that is given out. Few programs listen between here and the system's range of ephemeral ports.
const FIRST: u32 = 10_000;

/// Returns a port of 127.0.0.1 on which no process listens. This process receives each port only once.
///
/// The port lies below the system's range for connections and for listeners on any port. A port in that range could be
/// taken by another test between the check and its use. The check is a connection, not a listener: a process that
/// another test starts holds a copy of such a listener until its program runs, and the port stays taken for that long.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let span = first_of_the_system() - FIRST;
    loop {
        // Test programs that run at the same time begin at different ports.
        let given = GIVEN.fetch_add(1, Ordering::Relaxed);
        assert!(given < span, "every port from {FIRST} on was given, or is taken");
        let port = (FIRST + std::process::id().wrapping_mul(1009).wrapping_add(given) % span) as u16;
        let tried = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), Duration::from_secs(1));
        if tried.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            return port;
        }
    }
}

/// Returns the first port of the system's range, or Linux's default if that cannot be read.
fn first_of_the_system() -> u32 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(32_768);
    if first > FIRST { first } else { 32_768 }
}
