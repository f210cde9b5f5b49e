//! Watches the ranks: how they end, which signals arrive, and when their grace period is over.
//!
//! A rank that has ended stays a zombie until all have ended. So its process group's number is not reused before the
//! group is signalled.

mod replacing;

use std::io;
use std::path::PathBuf;
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGKILL, SIGPIPE, SIGTERM};

use super::event::{Event, Settled};
use super::exit::{ExitReason, wait_for};
use super::failure::{self, Failure, nanoseconds};
use super::guardian::Guardian;
use super::hosts::Hosts;
use super::replacement::Replacements;
use super::signals::{Interrupts, Request, ends_jobs, signal_name};
use super::{Job, child, say};

/// How long the other ranks have to report errors after one has failed: their errors often name the cause.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// How an attempt ended on this host.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The exit code of the rank that failed first, else of a verdict, else 0.
    pub(super) code: u8,
    /// The rank that failed first, here or on another host.
    pub(super) failure: Option<Failure>,
    /// The signal that ended it, if one did. If so, the job is not restarted.
    pub(super) interrupted: Option<i32>,
    /// Whether the attempt is the job's last one, although no signal ended it.
    pub(super) is_last: bool,
}

/// One rank.
struct Watched {
    rank: usize,
    local_rank: usize,
    child: Child,
    group: Pid,
    error_file: Option<PathBuf>,
    /// The file to which it writes its join address, if others may have to join.
    join_file: Option<PathBuf>,
    /// Whether it was started in the place of another process.
    is_replacement: bool,
    started: Instant,
    exit: Option<ExitReason>,
    /// When its end was noticed, and whether it had been asked to stop by then, because another failed or a signal
    /// arrived.
    seen: u64,
    was_stopped: bool,
    was_interrupted: bool,
}

/// What ends the supervisor's wait.
pub(super) enum Waited {
    /// The attempt is over.
    Over(Outcome),
    /// The replacement of this local rank is due.
    Replace(usize),
}

/// All ranks of this host in one attempt.
pub(super) struct Supervisor<'a> {
    /// The program's name, before each message.
    name: &'a str,
    job: &'a Job,
    attempt: u32,
    hosts: Option<Hosts>,
    /// The exit that is a rank's verdict rather than a failure, and whether a rank ended with it.
    verdict: Option<ExitReason>,
    verdict_told: bool,
    ranks: Vec<Watched>,
    guardian: Option<&'a Guardian>,
    sender: Sender<Event>,
    events: Option<Receiver<Event>>,
    /// The exit of the first rank that did not succeed.
    failure: Option<ExitReason>,
    /// How the attempt has ended for all hosts.
    settled: Option<Settled>,
    settled_at: u64,
    /// The signals that were passed on: a rank that is killed by such a signal has not failed.
    passed_on: Vec<i32>,
    interrupts: Interrupts,
    /// Whether ranks were killed; these have not failed either.
    killed: bool,
    /// When ranks are asked to stop because one has failed.
    stops_at: Option<Instant>,
    /// Whether ranks were asked to stop, and when the remaining ones are killed.
    stopping: bool,
    patience_ends: Option<Instant>,
    /// The signal that asked the ranks to stop, and their grace period.
    asked: (i32, Duration),
    replacements: Replacements,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        name: &'a str,
        job: &'a Job,
        attempt: u32,
        hosts: Option<Hosts>,
        guardian: Option<&'a Guardian>,
        sender: Sender<Event>,
        events: Receiver<Event>,
    ) -> Self {
        let verdict = job.verdict.map(|code| ExitReason::Exit(code.into()));
        Self {
            name,
            job,
            attempt,
            hosts,
            verdict,
            verdict_told: false,
            ranks: vec![],
            guardian,
            sender,
            events: Some(events),
            failure: None,
            settled: None,
            settled_at: 0,
            passed_on: vec![],
            interrupts: Interrupts::default(),
            killed: false,
            stops_at: None,
            stopping: false,
            patience_ends: None,
            asked: (SIGTERM, job.grace),
            replacements: Replacements::new(job.replacements, job.local_world_size),
        }
    }

    /// Adds a process of a rank; a thread waits for its end.
    pub(super) fn watch(&mut self, rank: usize, place: child::Place, child: Child) -> io::Result<()> {
        let group = Pid::from_child(&child);
        let child::Place { local_rank, error_file, join_file, joins, .. } = place;
        let place = self.ranks.len();
        self.ranks.push(Watched {
            rank,
            local_rank,
            child,
            group,
            error_file,
            join_file,
            is_replacement: !joins.is_empty(),
            started: Instant::now(),
            exit: None,
            seen: 0,
            was_stopped: false,
            was_interrupted: false,
        });
        let sender = self.sender.clone();
        let waiting = thread::Builder::new().name(format!("rank {rank}")).spawn(move || {
            let _ = sender.send(Event::Ended(place, wait_for(group)));
        });
        if let (Err(_), Some(watched)) = (&waiting, self.ranks.last_mut()) {
            // No thread would notice its end.
            let _ = kill_process_group(group, Signal::KILL);
            (watched.exit, watched.was_stopped) = (Some(ExitReason::Signal(SIGKILL)), true);
        }
        waiting.map(drop)
    }

    /// Waits for all ranks of this host, and for the other hosts' if all may have to restart. Returns earlier if a rank
    /// is to be replaced.
    pub(super) fn wait(&mut self) -> Waited {
        while self.runs() {
            if let Some(local_rank) = self.replacements.due(Instant::now()) {
                return Waited::Replace(local_rank);
            }
            self.handle_one();
        }
        let succeeded = self.failure.is_none() && !self.is_interrupted() && self.settled.is_none();
        if succeeded && self.job.waits_for_all() {
            self.wait_for_other_hosts();
        }
        self.say_replaced();
        Waited::Over(self.outcome())
    }

    /// Whether a rank of this host runs.
    fn runs(&self) -> bool {
        self.ranks.iter().any(|watched| watched.exit.is_none())
    }

    /// Returns the channel of events after all ranks have ended. Kills the processes that they left behind, and reaps
    /// the ranks.
    pub(super) fn close(mut self) -> Receiver<Event> {
        let events = self.events.take();
        // Only this method takes it, once. The substitute is a closed channel.
        events.unwrap_or_else(|| std::sync::mpsc::channel().1)
    }

    fn handle_one(&mut self) {
        match self.next_event() {
            Some(Event::Ended(place, exit)) => self.ended(place, exit),
            Some(Event::Signal(signal)) => self.pass_on(signal),
            Some(Event::Orphaned) => self.orphaned(),
            Some(Event::Unread) => self.unread(),
            Some(Event::Settled(attempt, settled)) if attempt == self.attempt => self.take(settled),
            Some(Event::Cut(words)) => self.take(Settled::Lost(words)),
            Some(Event::Settled(..) | Event::Message) => {}
            None => self.time_has_passed(Instant::now()),
        }
    }

    /// Waits for the next event; returns `None` if something is to be done first.
    fn next_event(&self) -> Option<Event> {
        // `events` is set until `close`, and this struct holds a sender, so the channel cannot be closed.
        let events = self.events.as_ref()?;
        let until = self.stops_at.or(self.patience_ends).into_iter().chain(self.replacements.next()).min();
        let Some(until) = until else { return events.recv().ok() };
        events.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// Stops or kills the ranks if it is time to.
    fn time_has_passed(&mut self, now: Instant) {
        let is_over = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        if is_over(self.stops_at) {
            self.stop();
        } else if self.stops_at.is_none() && is_over(self.patience_ends) {
            self.lose_patience();
        }
        if self.replacements.take_check(now) {
            self.check_replacements();
        }
    }

    /// Waits until the ranks of all hosts have succeeded, or one has not.
    fn wait_for_other_hosts(&mut self) {
        let Some(hosts) = &self.hosts else { return };
        if let Err(error) = hosts.succeed(self.attempt) {
            return self.settled = Some(Settled::Lost(error.to_string()));
        }
        while self.settled.is_none() && !self.is_interrupted() {
            self.handle_one();
        }
    }

    /// Records how the attempt has ended for all hosts, and stops this host's ranks that still run.
    fn take(&mut self, settled: Settled) {
        // After a signal, other hosts fail because they have lost ranks of this host.
        if self.settled.is_some() || (self.is_interrupted() && matches!(settled, Settled::Failed(_) | Settled::Changed(_))) {
            return;
        }
        let failed = match &settled {
            Settled::Done => None,
            Settled::Failed(failure) => Some(format!("rank {} on {} failed with {}", failure.rank, failure.host, failure.ended)),
            // Without restarts, the store's host may finish before this one.
            Settled::Lost(_) if !self.job.waits_for_all() => return,
            Settled::Changed(change) => Some(change.why.clone()),
            Settled::Lost(words) => {
                let server = self.hosts.as_ref().map_or("the launcher that serves the store", |hosts| &hosts.server);
                Some(format!("lost {server}: {words}"))
            }
        };
        let is_first = self.failure.is_none();
        (self.settled, self.settled_at) = (Some(settled), nanoseconds(SystemTime::now()));
        let Some(failed) = failed.filter(|_| is_first && !self.job.keep_going) else { return };
        let runs = self.runs();
        self.say(&format!("{failed}{}", if runs { "; stopping the ranks of this host" } else { "" }));
        if runs {
            self.stop_soon();
        }
    }

    fn ended(&mut self, place: usize, exit: ExitReason) {
        let (was_stopped, was_interrupted) = (self.stopping, self.is_interrupted());
        let Some(watched) = self.ranks.get_mut(place) else { return };
        (watched.exit, watched.seen) = (Some(exit), nanoseconds(SystemTime::now()));
        (watched.was_stopped, watched.was_interrupted) = (was_stopped, was_interrupted);
        self.replacements.ended(Instant::now());
        self.verdict_told |= Some(exit) == self.verdict;
        if exit.is_success() || Some(exit) == self.verdict || (self.failure.is_some() && !self.job.keep_going) {
            return;
        }
        self.failure.get_or_insert(exit);
        let (rank, group) = (watched.rank, watched.group);
        let left = self.ranks.iter().filter(|watched| watched.exit.is_none()).count();
        // Interrupted ranks have been asked to end already, and have their own grace period.
        let stops = !self.job.keep_going && !was_interrupted;
        let follows = was_stopped || (was_interrupted && self.has_ended_one());
        if !self.is_ours(exit) && !follows {
            let stopping = match (left, self.job.keep_going) {
                (1.., true) => "; the others continue",
                (1.., false) if stops => "; stopping the others",
                _ => "",
            };
            let replacement = self.replacement_of(place);
            self.say(&format!("rank {rank} (pid {group}) failed with {exit}{stopping}{replacement}"));
            self.tell_other_hosts();
        }
        if stops {
            self.stop_soon();
        }
    }

    /// Whether the job was asked to end by a signal, or because its launcher or reader is gone.
    fn is_interrupted(&self) -> bool {
        self.ended_by().is_some()
    }

    /// Returns the first signal that ends the job.
    fn ended_by(&self) -> Option<i32> {
        self.passed_on.iter().copied().find(|signal| ends_jobs(*signal))
    }

    /// Whether this launcher caused an end, by a signal that it passed on or by killing.
    fn is_ours(&self, exit: ExitReason) -> bool {
        matches!(exit, ExitReason::Signal(signal) if self.passed_on.contains(&signal) || (self.killed && signal == SIGKILL))
    }

    /// Whether this launcher has ended a rank; others may have lost it then.
    fn has_ended_one(&self) -> bool {
        self.ranks.iter().any(|watched| watched.exit.is_some_and(|exit| self.is_ours(exit)))
    }

    /// Notifies the other hosts of the first failure here, unless the ranks keep going.
    fn tell_other_hosts(&self) {
        if let (Some(hosts), false, Some(failure)) = (&self.hosts, self.job.keep_going, self.first_failure()) {
            hosts.fail(self.attempt, &failure);
        }
    }

    /// Returns the rank of this host that failed first, by the time at which it wrote its error or ended. Only ranks
    /// that failed by themselves or wrote an error count. Ranks that panicked or were killed come before ranks that
    /// exited with another code and no error. The latter may have failed because they lost the former, even if they
    /// ended earlier: a panic takes longer to end.
    fn first_failure(&self) -> Option<Failure> {
        let failed = self.ranks.iter().filter_map(|watched| {
            let exit = watched.exit.filter(|exit| !exit.is_success() && Some(*exit) != self.verdict)?;
            let said = watched.error_file.as_deref().and_then(failure::read);
            let is_ours = self.is_ours(exit);
            if (watched.was_interrupted && (is_ours || self.has_ended_one())) || (said.is_none() && (watched.was_stopped || is_ours)) {
                return None;
            }
            let by_itself = match self.job.call_failed {
                Some(code) => exit != ExitReason::Exit(code.into()),
                None => matches!(exit, ExitReason::Exit(101) | ExitReason::Signal(_)),
            };
            let may_follow = said.is_none() && !by_itself;
            Some((may_follow, self.failure_of(watched, exit, said)))
        });
        failed.min_by_key(|(may_follow, failure)| (*may_follow, failure.time)).map(|(_, failure)| failure)
    }

    /// Describes the failure of a rank; `said` is the cause that the rank wrote, and when, if it wrote one.
    fn failure_of(&self, watched: &Watched, exit: ExitReason, said: Option<(String, u64)>) -> Failure {
        let (cause, time) = said.map_or((None, watched.seen), |(cause, written)| (Some(cause), written));
        // It wrote why it failed, but was ended by the stop signal.
        let was_ended = watched.was_stopped && matches!(exit, ExitReason::Signal(SIGTERM | SIGKILL));
        Failure {
            host: child::host_name(),
            rank: watched.rank,
            local_rank: watched.local_rank,
            pid: watched.group.as_raw_nonzero().get().unsigned_abs(),
            ended: if was_ended { format!("{exit} when it was stopped") } else { exit.to_string() },
            code: if was_ended { 1 } else { exit.code() },
            time,
            cause,
            done_before: self.done_before(watched.seen),
        }
    }

    /// Returns the ranks of this host whose success had been noticed by `time`.
    fn done_before(&self, time: u64) -> Vec<usize> {
        let done = self.ranks.iter().filter(|watched| watched.exit.is_some_and(ExitReason::is_success) && watched.seen <= time);
        done.map(|watched| watched.rank).collect()
    }

    /// Returns the result of the attempt.
    fn outcome(&mut self) -> Outcome {
        let interrupted = self.ended_by();
        let is_last = match &self.settled {
            Some(Settled::Done | Settled::Lost(_)) => true,
            Some(Settled::Changed(change)) => change.is_last,
            Some(Settled::Failed(_)) | None => false,
        };
        if self.job.keep_going && self.ranks.iter().any(|watched| watched.exit.is_some_and(ExitReason::is_success)) {
            return Outcome { code: 0, failure: None, interrupted, is_last };
        }
        if let Some(signal) = interrupted.filter(|_| self.replacements.are_allowed() && self.has_ended_one()) {
            // The job had survived the failures before.
            return Outcome { code: ExitReason::Signal(signal).code(), failure: None, interrupted, is_last };
        }
        let is_here = |failure: &Failure| self.ranks.iter().any(|watched| watched.rank == failure.rank);
        // A failure that another host reported first is the cause of the failures here.
        let elsewhere = match self.settled.take() {
            Some(Settled::Failed(failure)) if !is_here(&failure) => {
                let done = self.done_before(self.settled_at);
                Some(failure.and_done_before(done))
            }
            Some(Settled::Lost(_)) if self.job.waits_for_all() && interrupted.is_none() && self.first_failure().is_none() => {
                return Outcome { code: 1, failure: None, interrupted, is_last };
            }
            // Ranks that fail because of a change have not failed first.
            Some(Settled::Changed(_)) if interrupted.is_none() => return Outcome { code: 1, failure: None, interrupted, is_last },
            _ => None,
        };
        let failure = elsewhere.or_else(|| self.first_failure());
        Outcome { code: self.code(failure.as_ref()), failure, interrupted, is_last }
    }

    /// Returns the job's exit code, given its first failure, if any.
    fn code(&self, failure: Option<&Failure>) -> u8 {
        let verdict = self.verdict.filter(|_| self.verdict_told);
        match (failure, self.ended_by()) {
            (Some(failure), _) => failure.code,
            (None, Some(signal)) if self.has_ended_one() => ExitReason::Signal(signal).code(),
            _ => self.failure.or(verdict).map_or(0, ExitReason::code),
        }
    }

    fn pass_on(&mut self, signal: i32) {
        let request = self.interrupts.heard(signal, Instant::now());
        if request == Request::Kill {
            return self.end_at_once(signal);
        }
        if !self.passed_on.contains(&signal) {
            self.passed_on.push(signal);
        }
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.signal_all(signal);
        }
        if request == Request::Stop {
            // A stopped rank would not receive it.
            self.signal_all(Signal::CONT);
        }
        if request == Request::Stop && self.patience_ends.is_none() {
            self.replacements.cancel();
            self.asked = (signal, self.job.grace_after_signal);
            self.patience_ends = Some(Instant::now() + self.job.grace_after_signal);
        }
    }

    /// Kills the ranks that were asked to end and did not, after a second request.
    fn end_at_once(&mut self, signal: i32) {
        // After SIGKILL, the launcher that started this one has printed the message.
        let (running, is_first) = (self.running(), !self.killed);
        (self.stops_at, self.patience_ends) = (None, None);
        self.kill_all();
        // Last, because standard error may have no reader.
        if signal != SIGKILL && is_first && !running.is_empty() {
            self.say(&format!("second request to end ({}); killing rank {running}", signal_name(signal)));
        }
    }

    /// Stops the ranks without a restart, because the launcher that started this one is gone.
    fn orphaned(&mut self) {
        self.passed_on.push(SIGTERM);
        self.stop();
    }

    /// Ends all ranks before any can report that another is lost. The exit code is that of a program that died of
    /// SIGPIPE.
    fn unread(&mut self) {
        self.failure = Some(ExitReason::Signal(SIGPIPE));
        self.passed_on.push(SIGPIPE);
        self.stopping = true;
        self.signal_all(Signal::STOP);
        self.kill_all();
    }

    /// Schedules a stop, and leaves the other ranks time to report errors first. They detect by themselves that a rank
    /// is lost or makes a different call.
    fn stop_soon(&mut self) {
        if !self.stopping {
            self.stops_at.get_or_insert(Instant::now() + LAST_WORDS);
        }
    }

    /// Asks all ranks to stop, and starts their grace period.
    fn stop(&mut self) {
        self.stops_at = None;
        self.replacements.cancel();
        self.signal_all(Signal::TERM);
        self.signal_all(Signal::CONT);
        self.stopping = true;
        self.asked = (SIGTERM, self.job.grace);
        self.patience_ends = Some(Instant::now() + self.job.grace);
    }

    fn lose_patience(&mut self) {
        self.patience_ends = None;
        let late = self.running();
        if late.is_empty() {
            return;
        }
        let (grace, asked) = (self.asked.1.as_secs_f64(), signal_name(self.asked.0));
        self.kill_all();
        // Last, because standard error may have no reader.
        self.say(&format!("killing rank {late}: still running {grace} s after {asked}"));
    }

    /// Lists the ranks that have not ended.
    fn running(&self) -> String {
        let running = self.ranks.iter().filter(|watched| watched.exit.is_none());
        running.map(|watched| watched.rank.to_string()).collect::<Vec<_>>().join(", ")
    }

    fn kill_all(&mut self) {
        self.killed = true;
        self.replacements.cancel();
        self.signal_all(Signal::KILL);
    }

    fn say(&self, text: &str) {
        say(self.name, text);
    }

    /// Signals the process group of every rank, including ranks that have ended: processes that they started may still
    /// run.
    fn signal_all(&self, signal: Signal) {
        for watched in &self.ranks {
            // The group exists until its leader is reaped. An error means that no process in it can be signalled.
            let _ = kill_process_group(watched.group, signal);
        }
    }
}

impl Drop for Supervisor<'_> {
    /// Kills the processes that are left in the ranks' process groups, then reaps the ranks, which frees their numbers.
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        self.guardian.iter().for_each(|guardian| guardian.forget());
        for watched in &mut self.ranks {
            let _ = watched.child.wait();
        }
    }
}
