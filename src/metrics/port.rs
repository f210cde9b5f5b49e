//! The port on which a process answers collectors of metrics.
//!
//! One thread answers one connection after the other. Each connection has [`PATIENCE`] to send its request and to read the
//! answer, so a client that does neither delays the others for that time only. The thread sleeps in `accept` until a
//! collector connects.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::sleep;
use std::time::Duration;

use super::request::{LONGEST, answer, status};
use crate::base::deadline::Deadline;
use crate::base::tuning::metrics::{PATIENCE, WITHOUT_RESOURCES};

/// The position of a process among the processes of its host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The index of the process's first rank among the ranks of its host.
    pub(crate) index: usize,
    /// The number of ranks of the host.
    pub(crate) count: usize,
}

/// Listens on the port of `first` plus the index of the process. If that port is in use, listens on the next free one of the
/// host's ranks: in an elastic job, a new process takes the port of one that has ended.
pub(super) fn listen(first: SocketAddr, place: Place) -> io::Result<TcpListener> {
    let count = place.count.max(1);
    let mut failed = None;
    for offset in (0..count).map(|step| (place.index + step) % count) {
        let port = u16::try_from(offset).ok().and_then(|offset| first.port().checked_add(offset));
        let Some(port) = port else { continue };
        match TcpListener::bind(SocketAddr::new(first.ip(), port)) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => failed = Some(error),
            Err(error) => return Err(error),
        }
    }
    let no_port = || io::Error::new(ErrorKind::InvalidInput, "the port of this rank would be larger than 65535");
    Err(failed.unwrap_or_else(no_port))
}

/// Answers with the text that `metrics` returns as long as the process lives.
pub(super) fn serve(listener: &TcpListener, metrics: impl Fn() -> String) {
    loop {
        match listener.accept() {
            // A client that is gone or too slow gets no answer, or a part, which its length shows.
            Ok((mut connection, _)) => drop(serve_one(&mut connection, &Deadline::after(PATIENCE), &metrics)),
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
            Err(_) => sleep(WITHOUT_RESOURCES),
        }
    }
}

/// Reads a request, and sends the answer.
fn serve_one(connection: &mut TcpStream, deadline: &Deadline, metrics: impl Fn() -> String) -> io::Result<()> {
    let mut received = Vec::with_capacity(LONGEST);
    let mut part = [0; 1024];
    let status = loop {
        if let Some(status) = status(&received) {
            break status;
        }
        connection.set_read_timeout(Some(left(deadline)?))?;
        match connection.read(&mut part) {
            Ok(0) => return Ok(()),
            Ok(count) => received.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    };
    let text = answer(status, metrics);
    send(connection, text.as_bytes(), deadline)?;
    connection.shutdown(Shutdown::Write)
}

/// Sends all bytes before the deadline.
fn send(connection: &mut TcpStream, mut bytes: &[u8], deadline: &Deadline) -> io::Result<()> {
    while !bytes.is_empty() {
        connection.set_write_timeout(Some(left(deadline)?))?;
        match connection.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the time that is left. If there is none, that is an error, because a timeout of zero would be refused.
fn left(deadline: &Deadline) -> io::Result<Duration> {
    Some(deadline.remaining()).filter(|left| !left.is_zero()).ok_or_else(|| ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns the answer to `request`. The server has `patience`, and answers with `text`.
    fn asked(request: &[u8], patience: Duration, text: &str) -> (String, io::Result<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut connection, _) = listener.accept().unwrap();
        client.write_all(request).unwrap();
        thread::scope(|scope| {
            let served = scope.spawn(move || serve_one(&mut connection, &Deadline::after(patience), || text.to_owned()));
            let mut said = Vec::new();
            // A server that closes the connection before it has read all bytes resets it.
            let _ = client.read_to_end(&mut said);
            (String::from_utf8_lossy(&said).into_owned(), served.join().unwrap())
        })
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_collector_gets_the_text() {
        let (said, served) = asked(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", LONG, "text\n");
        assert!(served.is_ok() && said.starts_with("HTTP/1.0 200 OK\r\n") && said.ends_with("\r\n\r\ntext\n"), "{said}");
        let (said, served) = asked(b"PUT /metrics HTTP/1.1\r\n\r\n", LONG, "text\n");
        assert!(served.is_ok() && said.starts_with("HTTP/1.0 405 ") && !said.contains("text\n"), "{said}");
        let (said, _) = asked(&vec![b'a'; LONGEST], LONG, "text\n");
        assert!(said.starts_with("HTTP/1.0 431 "), "{said}");
    }

    #[test]
    fn a_client_that_sends_or_reads_nothing_is_left_at_the_deadline() {
        let (said, served) = asked(b"GET /metrics HTTP/1.1\r\n", Duration::from_millis(30), "text\n");
        let kind = served.unwrap_err().kind();
        assert!(said.is_empty() && matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{said} {kind}");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut connection, _) = listener.accept().unwrap();
        let error = send(&mut connection, &vec![7; 64 << 20], &Deadline::after(Duration::from_millis(30))).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
    }

    #[test]
    fn a_process_takes_its_own_port_or_another_one_of_its_host() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let first = taken.local_addr().unwrap();
        let place = |index, count| Place { index, count };
        assert_eq!(listen(first, place(0, 1)).unwrap_err().kind(), ErrorKind::AddrInUse);
        let largest = SocketAddr::new(first.ip(), u16::MAX);
        assert!(listen(largest, place(1, 2)).map_or(true, |listener| listener.local_addr().unwrap() == largest));
        assert_eq!(listen(largest, place(0, 0)).map_or(u16::MAX, |listener| listener.local_addr().unwrap().port()), u16::MAX);
        // Another program may take ports at the same time, so only the range is certain.
        if let Ok(listener) = listen(first, place(0, 64)) {
            let port = listener.local_addr().unwrap().port();
            assert!(port > first.port() && port - first.port() < 64, "{port} after {first}");
        }
    }
}
