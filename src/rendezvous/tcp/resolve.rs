//! Addresses of a name, asked for with a deadline.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use crate::deadline::Deadline;

/// How long a name is waited for at least, also by those who have no time: it may be in a file of this host's.
const LEAST: Duration = Duration::from_millis(20);

/// The addresses of a host, of which there is at least one. The system's resolver knows no deadline: it is asked on a thread of its own, which is left behind where it
/// does not answer in time, and ends when it does.
pub(in crate::rendezvous) fn resolve(host: &str, port: u16, deadline: &Deadline) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = host.to_owned();
    let addresses: Vec<_> = within(deadline, move || Ok((name.as_str(), port).to_socket_addrs()?.collect()))?;
    if addresses.is_empty() {
        return Err(io::Error::new(ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

fn within<T: Send + 'static>(deadline: &Deadline, ask: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    let (answer, answered) = mpsc::sync_channel(1);
    std::thread::Builder::new().name("resolver".to_owned()).spawn(move || answer.send(ask()))?;
    match answered.recv_timeout(deadline.remaining().max(LEAST)) {
        Ok(addresses) => addresses,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(io::Error::new(ErrorKind::TimedOut, "the name was not resolved in time")),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(io::Error::other("the thread that resolves the name panicked")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_its_own_and_a_name_is_looked_up() {
        let soon = Deadline::after(Duration::from_secs(20));
        assert_eq!(resolve("192.0.2.7", 5, &soon).unwrap(), [SocketAddr::from(([192, 0, 2, 7], 5))]);
        assert_eq!(resolve("::1", 5, &soon).unwrap(), [SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 5))]);
        let own = resolve("localhost", 5, &soon).unwrap();
        assert!(own.iter().all(|address| address.ip().is_loopback() && address.port() == 5) && !own.is_empty(), "{own:?}");
    }

    #[test]
    fn a_resolver_that_does_not_answer_is_waited_for_until_the_deadline_alone() {
        let (end, ended) = mpsc::channel::<()>();
        let silent = move || ended.recv().map_err(io::Error::other);
        let error = within(&Deadline::after(Duration::from_millis(20)), silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        end.send(()).unwrap();
        assert_eq!(within(&Deadline::after(Duration::from_secs(20)), || Ok(7)).unwrap(), 7);
    }
}
