//! What the kernel says about a process.

use std::fs;

use serde::{Deserialize, Serialize};

/// The state of a process's first thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// On a core, or ready to be.
    Running,
    Sleeping,
    /// In a wait that no signal ends, often for storage or a driver.
    Uninterruptible,
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// Its parent has not waited for it yet.
    Ended,
    /// There is no such process.
    Gone,
    #[serde(other)]
    Unknown,
}

impl State {
    /// Returns one word for a table.
    pub(super) fn name(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Sleeping => "sleeping",
            State::Uninterruptible => "uninterruptible",
            State::Stopped => "stopped",
            State::Traced => "traced",
            State::Ended => "ended",
            State::Gone => "gone",
            State::Unknown => "unknown",
        }
    }

    /// Returns why a process in this state cannot answer; `None` if it can.
    pub(super) fn silence(self) -> Option<&'static str> {
        match self {
            State::Stopped => Some("stopped by a signal, such as SIGSTOP or Ctrl-Z; SIGCONT continues it"),
            State::Traced => Some("stopped by a debugger"),
            State::Ended => Some("ended, and its parent has not waited for it yet"),
            State::Gone => Some("gone: there is no such process any more"),
            State::Running | State::Sleeping | State::Uninterruptible | State::Unknown => None,
        }
    }
}

/// Returns the name and the state of a process of this host.
pub(super) fn look(pid: u32) -> (String, State) {
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => read(&String::from_utf8_lossy(&text)).unwrap_or((String::new(), State::Unknown)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => (String::new(), State::Gone),
        // The process ended between the opening and the reading of the file.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => (String::new(), State::Gone),
        Err(_) => (String::new(), State::Unknown),
    }
}

/// Reads `7 (name) S …`. The name may contain any bytes.
fn read(text: &str) -> Option<(String, State)> {
    let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
    let state = match rest.trim_start().chars().next()? {
        'R' => State::Running,
        'S' | 'I' => State::Sleeping,
        'D' => State::Uninterruptible,
        'T' => State::Stopped,
        't' => State::Traced,
        'Z' => State::Ended,
        'X' | 'x' => State::Gone,
        _ => State::Unknown,
    };
    Some((name.to_owned(), state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_after_any_name() {
        for (text, name, state) in [
            ("7 (python3) S 1 7", "python3", State::Sleeping),
            ("7 (a) R b) (c) T 1", "a) R b) (c", State::Stopped),
            ("7 () t 1", "", State::Traced),
            ("7 (x) Q 1", "x", State::Unknown),
        ] {
            assert_eq!(read(text), Some((name.to_owned(), state)));
        }
        assert!(read("7 python").is_none() && read("").is_none());
        let (name, state) = look(std::process::id());
        assert!(!name.is_empty() && [State::Running, State::Sleeping].contains(&state), "{name} {state:?}");
        assert_eq!(look(u32::MAX).1, State::Gone);
        assert_eq!(serde_json::from_str::<State>("\"of a newer collperf\"").unwrap(), State::Unknown);
    }
}
