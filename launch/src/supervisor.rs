//! Watches the ranks: who has ended and how, what signals came, and when patience is over.
//!
//! A rank that has ended is kept as a zombie until all have: its process group then cannot be another's by the time it
//! is signalled.

use std::fmt;
use std::io::{self, Write};
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::Job;

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitReason {
    /// It exited with this code.
    Exit(i32),
    /// This signal killed it.
    Signal(i32),
}

impl ExitReason {
    /// What the kernel says about a process that has ended.
    fn of(status: &WaitIdStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self::Exit(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Exit(1),
        }
    }

    /// Whether the rank did what it should.
    fn is_success(self) -> bool {
        self == Self::Exit(0)
    }

    /// As shells number it: the code, or 128 and the signal.
    fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code as u8,
            Self::Signal(signal) => 128_u8.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX)),
        }
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
        }
    }
}

/// `SIGKILL` for 9.
fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("no name")
}

/// What the supervisor waits for.
pub(super) enum Event {
    /// The rank at this place of the list has ended.
    Ended(usize, ExitReason),
    /// This signal came.
    Signal(i32),
}

/// Sends the signals that are to be passed on to `events`, from a thread of its own.
pub(super) fn listen(events: &Sender<Event>) -> io::Result<()> {
    let ignored = ignored_signals();
    // A launcher under nohup ignores SIGHUP, and so shall it stay.
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = Signals::new(wanted)?;
    let events = events.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// The signals that this process was started to ignore, one bit each; none where the kernel does not say.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// One rank.
struct Watched {
    rank: usize,
    child: Child,
    group: Pid,
    exit: Option<ExitReason>,
}

/// All ranks of this host.
pub(super) struct Supervisor<'a> {
    /// The program's name, before each message.
    name: &'a str,
    grace: Duration,
    /// An exit that is a rank's verdict and no failure, and whether there was one.
    verdict: Option<ExitReason>,
    verdict_told: bool,
    keep_going: bool,
    ranks: Vec<Watched>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// The exit of the rank that failed first.
    failure: Option<ExitReason>,
    /// The last signal that was passed on: ranks that die of it have not failed by themselves.
    passed_on: Option<i32>,
    /// When ranks that were asked to stop are killed.
    patience_ends: Option<Instant>,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(name: &'a str, job: &Job, sender: Sender<Event>, events: Receiver<Event>) -> Self {
        let verdict = job.verdict.map(|code| ExitReason::Exit(code.into()));
        Self {
            name,
            grace: job.grace,
            verdict,
            verdict_told: false,
            keep_going: job.keep_going,
            ranks: vec![],
            sender,
            events,
            failure: None,
            passed_on: None,
            patience_ends: None,
        }
    }

    /// Takes charge of a rank; a thread waits for its end.
    pub(super) fn watch(&mut self, rank: usize, child: Child) -> io::Result<()> {
        let group = Pid::from_child(&child);
        let place = self.ranks.len();
        self.ranks.push(Watched { rank, child, group, exit: None });
        let sender = self.sender.clone();
        thread::Builder::new().name(format!("rank {rank}")).spawn(move || {
            let _ = sender.send(Event::Ended(place, wait_for(group)));
        })?;
        Ok(())
    }

    /// Waits for all ranks and returns the exit code: that of the rank that failed first, else of a verdict, else 0. Where ranks go on without
    /// those that fail, 0 if one has succeeded.
    pub(super) fn wait(&mut self) -> u8 {
        while self.ranks.iter().any(|watched| watched.exit.is_none()) {
            match self.next_event() {
                Some(Event::Ended(place, exit)) => self.ended(place, exit),
                Some(Event::Signal(signal)) => self.pass_on(signal),
                None => self.lose_patience(),
            }
        }
        if self.keep_going && self.ranks.iter().any(|watched| watched.exit.is_some_and(ExitReason::is_success)) {
            return 0;
        }
        let verdict = self.verdict.filter(|_| self.verdict_told);
        self.failure.or(verdict).map_or(0, ExitReason::code)
    }

    /// The next event; `None` when patience ends first.
    fn next_event(&self) -> Option<Event> {
        let Some(until) = self.patience_ends else {
            // This struct holds a sender, so the channel cannot be closed.
            return self.events.recv().ok();
        };
        self.events.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    fn ended(&mut self, place: usize, exit: ExitReason) {
        let Some(watched) = self.ranks.get_mut(place) else { return };
        watched.exit = Some(exit);
        self.verdict_told |= Some(exit) == self.verdict;
        if exit.is_success() || Some(exit) == self.verdict || (self.failure.is_some() && !self.keep_going) {
            return;
        }
        self.failure.get_or_insert(exit);
        let (rank, group) = (watched.rank, watched.group);
        let left = self.ranks.iter().filter(|watched| watched.exit.is_none()).count();
        if self.passed_on.is_none_or(|signal| exit != ExitReason::Signal(signal)) {
            let stopping = match (left, self.keep_going) {
                (0, _) => "",
                (_, true) => "; the others go on",
                (_, false) => "; stopping the others",
            };
            self.say(&format!("rank {rank} (pid {group}) failed with {exit}{stopping}"));
        }
        if self.keep_going {
            return;
        }
        self.signal_all(Signal::TERM);
        self.patience_ends = Some(Instant::now() + self.grace);
    }

    fn pass_on(&mut self, signal: i32) {
        self.passed_on = Some(signal);
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.signal_all(signal);
        }
    }

    fn lose_patience(&mut self) {
        self.patience_ends = None;
        let late: Vec<_> = self.ranks.iter().filter(|watched| watched.exit.is_none()).map(|watched| watched.rank.to_string()).collect();
        let (grace, asked) = (self.grace.as_secs_f64(), signal_name(SIGTERM));
        self.say(&format!("still running {grace} s after {asked}: rank {}; killing", late.join(", ")));
        self.signal_all(Signal::KILL);
    }

    /// Says something on standard error, in one piece: ranks write there too.
    fn say(&self, text: &str) {
        // There is nobody to tell that nobody listens.
        let _ = io::stderr().write_all(format!("{}: {text}\n", self.name).as_bytes());
    }

    /// Signals the process group of every rank, also of those that have ended: what they started may live on.
    fn signal_all(&self, signal: Signal) {
        for watched in &self.ranks {
            // The group is there as long as its leader is not reaped; that nothing in it can be signalled is no news.
            let _ = kill_process_group(watched.group, signal);
        }
    }
}

impl Drop for Supervisor<'_> {
    /// Kills what is left in the ranks' process groups, and only then lets go of their numbers.
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for watched in &mut self.ranks {
            let _ = watched.child.wait();
        }
    }
}

/// Waits until a process has ended, and leaves it to be reaped.
fn wait_for(process: Pid) -> ExitReason {
    loop {
        match waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => return ExitReason::of(&status),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            // Reaped behind our back; only the drop of the supervisor does that, and then nobody asks.
            Err(_) => return ExitReason::Exit(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_numbered_as_shells_do() {
        assert_eq!(ExitReason::Exit(3).code(), 3);
        assert_eq!(ExitReason::Signal(9).code(), 137);
        assert_eq!(ExitReason::Signal(15).to_string(), "signal 15 (SIGTERM)");
        assert!(ExitReason::Exit(0).is_success() && !ExitReason::Exit(1).is_success() && !ExitReason::Signal(1).is_success());
    }
}
