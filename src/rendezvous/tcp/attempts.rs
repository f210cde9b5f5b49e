//! Counts failed attempts to connect by cause, to tell apart a wrong port, a firewall and a name without an address.

use std::fmt;
use std::io::ErrorKind;

/// Attempts that failed.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    /// The host answered that no process listens on the port.
    refused: u64,
    /// No reply came.
    unanswered: u64,
    others: u64,
    /// The message of the last attempt that failed in another way.
    last: String,
}

impl Attempts {
    /// Counts an attempt that failed, with the kind of the system's error if there was one.
    pub(super) fn add(&mut self, kind: Option<ErrorKind>, problem: &str) {
        match kind {
            Some(ErrorKind::ConnectionRefused) => self.refused += 1,
            Some(ErrorKind::TimedOut) => self.unanswered += 1,
            _ => {
                self.others += 1;
                problem.clone_into(&mut self.last);
            }
        }
    }

    fn advice(&self) -> &'static str {
        // The deadline may have cut the last attempt short. It then counts as unanswered, and means little.
        match (self.refused, self.unanswered) {
            (0, 0) => "is rank 0 running there?",
            (refused, unanswered) if refused >= unanswered => {
                "that host answers, but no process listens on this port: is rank 0 running there, and is the port right?"
            }
            _ => "is the address right, and does every firewall on the way let this port through?",
        }
    }
}

impl fmt::Display for Attempts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |what: &str, count: u64| format!("{what} {count} time{}", if count == 1 { "" } else { "s" });
        let mut parts = Vec::new();
        if self.refused > 0 {
            parts.push(times("connection refused", self.refused));
        }
        if self.unanswered > 0 {
            parts.push(times("no answer", self.unanswered));
        }
        if self.others > 0 {
            parts.push(format!("{}, the last: {}", times("failed", self.others), self.last));
        }
        write!(f, "{}; {}", parts.join(", "), self.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(kinds: &[Option<ErrorKind>]) -> String {
        let mut attempts = Attempts::default();
        for (number, kind) in kinds.iter().enumerate() {
            attempts.add(*kind, &format!("problem {number}"));
        }
        attempts.to_string()
    }

    #[test]
    fn a_wrong_port_and_a_firewall_are_told_apart() {
        let (refused, unanswered) = (Some(ErrorKind::ConnectionRefused), Some(ErrorKind::TimedOut));
        let wrong_port = said(&[refused, refused, refused, unanswered]);
        assert!(wrong_port.starts_with("connection refused 3 times, no answer 1 time; that host answers"), "{wrong_port}");
        let firewall = said(&[unanswered, unanswered]);
        assert!(firewall.starts_with("no answer 2 times; is the address right") && firewall.contains("firewall"), "{firewall}");
        let neither = said(&[Some(ErrorKind::HostUnreachable), None]);
        assert_eq!(neither, "failed 2 times, the last: problem 1; is rank 0 running there?");
    }
}
