//! Asks NCCL's own service for reliability, availability and serviceability (RAS), which each process with NCCL 2.24 or
//! later has. NCCL knows which of its ranks have made how many calls. It does not know how long a call has waited, so it
//! may call a job that hangs healthy.
//!
//! The protocol is lines of text over TCP, as in NCCL's program `ncclras`: a greeting of both ends, the time that the
//! answer may take, and the question. The answer ends with the connection.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::document::{Process, Ras};
use crate::hang::Backend;

/// Where NCCL listens unless `NCCL_RAS_ADDR` says otherwise.
const ADDRESS: &str = "localhost:28028";
/// The time that an answer may take in addition to the time that NCCL gives to its ranks.
const BEYOND: Duration = Duration::from_millis(500);
/// The most bytes of an answer, and of a line before it.
const MOST: usize = 1 << 20;
const LONGEST: usize = 1024;
/// The most services that are asked.
const SERVICES: usize = 4;

/// Asks the services of processes that have made device calls. Addresses at which no program listens are left out.
pub(super) fn ask_all(processes: &[Process], limit: Duration) -> Vec<Ras> {
    let has_devices =
        |process: &&Process| process.records().any(|record| record.entries.iter().any(|entry| entry.backend == Backend::Device));
    let services: BTreeSet<(&str, String)> =
        processes.iter().filter(has_devices).map(|process| (&*process.host_name, address_of(process.pid))).collect();
    let ask = |(host_name, address): (&str, String)| {
        let (text, error) = match ask(&address, limit) {
            Ok(text) => (Some(text), None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return None,
            Err(error) => (None, Some(error.to_string())),
        };
        Some(Ras { host_name: host_name.to_owned(), address, text, error })
    };
    services.into_iter().take(SERVICES).filter_map(ask).collect()
}

/// Returns the address of the service of a process, from its environment.
fn address_of(pid: u32) -> String {
    let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let set = variables.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"NCCL_RAS_ADDR="));
    set.map_or_else(|| ADDRESS.to_owned(), |address| String::from_utf8_lossy(address).into_owned())
}

/// Returns the answer of a service.
fn ask(address: &str, limit: Duration) -> io::Result<String> {
    let until = Instant::now() + limit + BEYOND;
    let stream = connect(address, limit)?;
    let mut answers = BufReader::new(stream);
    let greeting = exchange(&mut answers, "CLIENT PROTOCOL 2", until)?;
    if !greeting.to_ascii_uppercase().starts_with("SERVER PROTOCOL ") {
        return Err(io::Error::other(format!("it is not NCCL: it said {greeting:?}")));
    }
    let seconds = limit.as_secs().max(1);
    let agreed = exchange(&mut answers, &format!("TIMEOUT {seconds}"), until)?;
    if !agreed.trim().eq_ignore_ascii_case("OK") {
        return Err(io::Error::other(format!("it refused a timeout: it said {agreed:?}")));
    }
    answers.get_mut().write_all(b"STATUS\n")?;
    read(&mut answers, MOST, None, until)
}

/// Reads until `end` has come, the service has closed the connection, or there are `most` bytes.
fn read(answers: &mut BufReader<TcpStream>, most: usize, end: Option<u8>, until: Instant) -> io::Result<String> {
    let mut text = Vec::new();
    while text.len() < most && (end.is_none() || text.last() != end.as_ref()) {
        expect_by(answers, until)?;
        let part = answers.fill_buf().map_err(late)?;
        if part.is_empty() {
            break;
        }
        let count = part.iter().position(|byte| Some(*byte) == end).map_or(part.len(), |at| at + 1).min(most - text.len());
        text.extend_from_slice(&part[..count]);
        answers.consume(count);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn connect(address: &str, limit: Duration) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "no such address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => {
                stream.set_write_timeout(Some(limit))?;
                return Ok(stream);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Sends a line, and returns the line that comes back.
fn exchange(answers: &mut BufReader<TcpStream>, line: &str, until: Instant) -> io::Result<String> {
    answers.get_mut().write_all(format!("{line}\n").as_bytes())?;
    Ok(read(answers, LONGEST, Some(b'\n'), until)?.trim_end().to_owned())
}

/// Makes the next read end by this time.
fn expect_by(answers: &BufReader<TcpStream>, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(late(io::ErrorKind::TimedOut.into()));
    }
    answers.get_ref().set_read_timeout(Some(left))
}

/// Says what a read without an answer means.
fn late(error: io::Error) -> io::Error {
    let is_late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
    if is_late { io::Error::new(io::ErrorKind::TimedOut, "no answer in time") } else { error }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    /// Runs a service that expects a line for each of these lines, and sends the latter. After the last one it waits until
    /// the client is gone if `waits`. Returns its address.
    fn service(lines: &'static [(&'static str, &'static str)], waits: bool) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut client = BufReader::new(listener.accept().unwrap().0);
            for (expected, answer) in lines {
                let mut line = String::new();
                client.read_line(&mut line).unwrap();
                assert_eq!(line.trim_end(), *expected);
                client.get_mut().write_all(answer.as_bytes()).unwrap();
            }
            if waits {
                let _ = io::copy(&mut client, &mut io::sink());
            }
        });
        address
    }

    #[test]
    fn the_answer_of_ncclras_is_returned() {
        let lines = &[("CLIENT PROTOCOL 2", "SERVER PROTOCOL 3\n"), ("TIMEOUT 5", "OK\n"), ("STATUS", "NCCL version 2.28\nall\nwell\n")];
        assert_eq!(ask(&service(lines, false), Duration::from_secs(5)).unwrap(), "NCCL version 2.28\nall\nwell\n");
    }

    #[test]
    fn services_that_are_absent_silent_or_something_else_are_errors() {
        let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        assert_eq!(ask(&gone, SHORT).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let silent = [
            service(&[], true),
            service(&[("CLIENT PROTOCOL 2", "SERVER PROTOCOL 2\n")], true),
            service(&[("CLIENT PROTOCOL 2", "SERVER PROTOCOL 2\n"), ("TIMEOUT 1", "OK\n"), ("STATUS", "half")], true),
        ];
        for address in silent {
            assert_eq!(ask(&address, SHORT).unwrap_err().kind(), io::ErrorKind::TimedOut, "{address}");
        }
        let dripping = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = dripping.local_addr().unwrap().to_string();
        let drip = thread::spawn(move || {
            let mut client = dripping.accept().unwrap().0;
            while client.write_all(b"S").is_ok() {
                thread::sleep(SHORT / 4);
            }
        });
        assert_eq!(ask(&address, SHORT).unwrap_err().kind(), io::ErrorKind::TimedOut, "each byte comes in time");
        drip.join().unwrap();
        let said = ask(&service(&[("CLIENT PROTOCOL 2", "HTTP/1.1 400 Bad Request\n")], false), SHORT).unwrap_err().to_string();
        assert!(said.contains("it is not NCCL") && said.contains("400"), "{said}");
        let refused = &[("CLIENT PROTOCOL 2", "SERVER PROTOCOL 2\n"), ("TIMEOUT 1", "ERROR\n")];
        assert!(ask(&service(refused, false), SHORT).unwrap_err().to_string().contains("refused a timeout"));
        assert!(ask("not an address", SHORT).is_err());
    }
}
