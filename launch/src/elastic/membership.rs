//! Decides which hosts take part in each attempt of an elastic job, and when an attempt begins. Pure: the caller passes
//! the time, and what it has heard of the hosts and of the attempt.
//!
//! The rules are torchrun's: the job begins when the largest number of hosts is there, or when the smallest number is
//! there and a last call has passed. All ranks of an attempt know the same world size. When a host is lost, the attempt
//! ends, and the next one begins with the hosts that are left. A host that comes late ends the attempt too, and takes
//! part in the next one.
//!
//! One host decides for all: the one that serves the store. If it is lost, the job ends, because the ranks have lost
//! their store too. Only this host's clock counts, so clocks of hosts may differ.

use std::time::Duration;

use super::messages::{Arrival, Message, Report, Start};
use crate::event::{Change, Settled};

/// The most hosts that a job keeps waiting. More are refused.
const MOST_WAITING: usize = 4096;

/// The rules of a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) least: usize,
    pub(super) most: usize,
    /// How long the job waits for more hosts once the smallest number is there.
    pub(super) last_call: Duration,
    /// How long a host may be silent before it counts as lost.
    pub(super) lost_after: Duration,
    /// How long the job waits while too few hosts are there.
    pub(super) join: Duration,
    /// How many failures lead to a restart.
    pub(super) restarts: u32,
}

/// What the caller must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Send a message to a host. Messages to a host are numbered from 0.
    Tell { id: String, number: u64, message: Message },
    /// Record the end of an attempt, unless another end is recorded already.
    Settle { attempt: u32, change: Change },
    /// Print a message.
    Say(String),
}

/// A host.
#[derive(Debug)]
struct Host {
    id: String,
    name: String,
    report: Report,
    /// When its counter was last seen to move.
    heard: Duration,
    /// How many messages it was sent.
    given: u64,
    /// Its number in the current attempt, or in the last one.
    node: Option<usize>,
}

impl Host {
    /// Whether it waits for its next message.
    fn waits(&self) -> bool {
        self.report.ready == self.given
    }
}

/// What the job does.
#[derive(Debug)]
enum Phase {
    /// The first hosts gather. The last call ends at this time, once it has begun.
    First { last_call: Option<Duration> },
    /// The attempt runs. `settled` is whether its end has been asked for.
    Running { settled: bool },
    /// The attempt has ended, and its hosts stop their ranks.
    Between { since: Duration, why: String },
    /// The job is over.
    Over,
}

/// The hosts of a job.
#[derive(Debug)]
pub(super) struct Membership {
    rules: Rules,
    /// The host that serves the store.
    leader: String,
    /// The number of ranks of each host, once one has arrived.
    ranks: Option<usize>,
    hosts: Vec<Host>,
    phase: Phase,
    attempt: u32,
    failures: u32,
    /// The hosts that were lost since the attempt began.
    lost: Vec<String>,
    /// When the last step was made.
    stepped: Duration,
    actions: Vec<Action>,
}

impl Membership {
    pub(super) fn new(rules: Rules, leader: String) -> Self {
        Self {
            rules,
            leader,
            ranks: None,
            hosts: vec![],
            phase: Phase::First { last_call: None },
            attempt: 0,
            failures: 0,
            lost: vec![],
            stepped: Duration::ZERO,
            actions: vec![],
        }
    }

    /// Returns the attempt that runs, or ran last.
    pub(super) fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether an attempt runs.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// Returns the arrivals that are known, for whose reports the caller looks.
    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.hosts.iter().map(|host| &*host.id)
    }

    /// Describes for which hosts the job waits; `None` if it does not wait.
    pub(super) fn awaited(&self) -> Option<String> {
        let waiting = self.waiting().len();
        let is_waiting = match &self.phase {
            Phase::First { .. } => true,
            // While ranks of the last attempt still stop, nothing is known of their hosts.
            Phase::Between { .. } => waiting < self.rules.least && waiting == self.hosts.len(),
            Phase::Running { .. } | Phase::Over => false,
        };
        let Rules { least, most, .. } = self.rules;
        is_waiting.then(|| format!("waiting for hosts: {waiting} there, at least {least} and at most {most} take part"))
    }

    /// Notes that a host wants to take part.
    pub(super) fn arrive(&mut self, now: Duration, arrival: Arrival) {
        let Arrival { id, name, ranks } = arrival;
        if self.hosts.iter().any(|host| host.id == id) {
            return;
        }
        let expected = *self.ranks.get_or_insert(ranks);
        let refused = if ranks != expected {
            Some(format!("{name} starts {ranks} ranks, and the other hosts start {expected}; give every host the same --nproc-per-node"))
        } else {
            (self.hosts.len() >= MOST_WAITING).then(|| format!("{MOST_WAITING} hosts are there already"))
        };
        if let Some(why) = refused {
            return self.actions.push(Action::Tell { id, number: 0, message: Message::Over { code: 2, why: Some(why) } });
        }
        self.hosts.push(Host { id, name, report: Report::default(), heard: now, given: 0, node: None });
    }

    /// Notes what a host reports.
    pub(super) fn hear(&mut self, now: Duration, id: &str, report: Report) {
        let Some(host) = self.hosts.iter_mut().find(|host| host.id == id) else { return };
        if report.beat != host.report.beat {
            host.heard = now;
        }
        host.report = report;
    }

    /// Decides what to do now. `end` is how the current attempt has ended, if it has, and `succeeded` is whether all ranks
    /// of a host have succeeded in it.
    pub(super) fn step(&mut self, now: Duration, end: Option<&Settled>, succeeded: bool) -> Vec<Action> {
        // If this process did not run for a while, the others may not have been heard for that reason.
        if now.saturating_sub(self.stepped) > self.rules.lost_after / 2 {
            self.hosts.iter_mut().for_each(|host| host.heard = now);
        }
        self.stepped = now;
        if let (Phase::Running { .. }, Some(end)) = (&self.phase, end) {
            self.end(now, end);
        }
        self.lose(now);
        match &mut self.phase {
            Phase::First { .. } => self.gather(now),
            Phase::Running { settled: false } => self.look_for_changes(succeeded),
            Phase::Between { .. } => self.go_on(now),
            Phase::Running { .. } => {}
            Phase::Over => self.finish(1, Some("the job has ended".to_owned())),
        }
        std::mem::take(&mut self.actions)
    }

    /// Ends the job, because the host that serves the store leaves it.
    pub(super) fn close(&mut self, why: &str) -> Vec<Action> {
        if self.is_running() {
            let change = Change { why: why.to_owned(), is_loss: true, is_last: true };
            self.actions.push(Action::Settle { attempt: self.attempt, change });
        }
        if !matches!(self.phase, Phase::Over) {
            self.finish(1, Some(why.to_owned()));
        }
        std::mem::take(&mut self.actions)
    }

    /// Notes how the attempt has ended.
    fn end(&mut self, now: Duration, end: &Settled) {
        let (why, counts) = match end {
            Settled::Done => return self.finish(0, None),
            Settled::Failed(failure) => (format!("a failure: {failure}"), true),
            Settled::Changed(change) => (change.why.clone(), change.is_loss),
            Settled::Lost(words) => (words.clone(), true),
        };
        self.failures += u32::from(counts);
        self.phase = Phase::Between { since: now, why };
    }

    /// Gives up hosts that are silent or leave.
    fn lose(&mut self, now: Duration) {
        let limit = self.rules.lost_after;
        let hosts = std::mem::take(&mut self.hosts);
        for host in hosts {
            let is_silent = now.saturating_sub(host.heard) > limit && host.id != self.leader;
            let silence = || format!("its collrun has not answered for {} s", limit.as_secs_f64());
            match host.report.leaves.clone().or_else(|| is_silent.then(silence)) {
                Some(why) => self.leave_out(&host, &why),
                None => self.hosts.push(host),
            }
        }
    }

    /// Gives up a host that is not in the list any more.
    fn leave_out(&mut self, host: &Host, why: &str) {
        if host.id == self.leader {
            let why = format!("lost node 0 ({}), which serves the store: {why}", host.name);
            self.tell(&host.id, host.given, Message::Over { code: 1, why: Some(why.clone()) });
            let mut last = self.close(&why);
            return self.actions.append(&mut last);
        }
        self.tell(&host.id, host.given, Message::LeftOut(why.to_owned()));
        let Some(node) = host.node else {
            return self.actions.push(Action::Say(format!("{}, which waited for a place, is gone: {why}", host.name)));
        };
        let why = format!("lost node {node} ({}): {why}", host.name);
        self.lost.push(why.clone());
        match &mut self.phase {
            Phase::Running { settled } => {
                *settled = true;
                self.actions.push(Action::Settle { attempt: self.attempt, change: Change { why, is_loss: true, is_last: false } });
            }
            Phase::Between { .. } => self.actions.push(Action::Say(why)),
            Phase::First { .. } | Phase::Over => {}
        }
    }

    fn tell(&mut self, id: &str, number: u64, message: Message) {
        self.actions.push(Action::Tell { id: id.to_owned(), number, message });
    }

    /// Returns the hosts that wait for an attempt: first the one that serves the store, then those of the last attempt in
    /// their order, then others in the order in which they came.
    fn waiting(&self) -> Vec<usize> {
        let mut waiting: Vec<usize> = (0..self.hosts.len()).filter(|place| self.hosts[*place].waits()).collect();
        waiting.sort_by_key(|place| {
            let host = &self.hosts[*place];
            (host.id != self.leader, host.node.unwrap_or(usize::MAX), *place)
        });
        waiting
    }

    /// Begins the first attempt if it is time.
    fn gather(&mut self, now: Duration) {
        let (waiting, Rules { least, most, last_call, join, .. }) = (self.waiting(), self.rules);
        let Phase::First { last_call: ends } = &mut self.phase else { return };
        if waiting.len() < least {
            *ends = None;
            if now >= join {
                self.give_up(waiting.len(), join);
            }
            return;
        }
        if ends.is_none() && waiting.len() < most {
            let (count, seconds) = (waiting.len(), last_call.as_secs_f64());
            let said = format!("{count} of at most {most} hosts have come; the job starts in {seconds} s, or when all have come");
            self.actions.push(Action::Say(said));
        }
        let ends = *ends.get_or_insert(now.saturating_add(last_call));
        if waiting.len() >= most || now >= ends {
            self.start(&waiting, None);
        }
    }

    /// Ends the attempt if a host has stopped its ranks, or if a host waits for a place.
    fn look_for_changes(&mut self, succeeded: bool) {
        let members = self.hosts.iter().filter(|host| host.node.is_some());
        let change = if let Some(host) = members.clone().find(|host| host.waits()) {
            let why = format!("node {} ({}) has ended its ranks", host.node.unwrap_or(0), host.name);
            Change { why, is_loss: true, is_last: false }
        } else {
            let room = self.rules.most.saturating_sub(members.count());
            let come = self.hosts.iter().filter(|host| host.node.is_none() && host.waits()).take(room);
            let names = come.map(|host| &*host.name).collect::<Vec<_>>().join(", ");
            // A job that begins to end needs no more hosts.
            if names.is_empty() || succeeded {
                return;
            }
            Change { why: format!("new hosts: {names}"), is_loss: false, is_last: false }
        };
        self.phase = Phase::Running { settled: true };
        self.actions.push(Action::Settle { attempt: self.attempt, change });
    }

    /// Begins the next attempt once all hosts of the last one have stopped their ranks or are lost.
    fn go_on(&mut self, now: Duration) {
        let (join, failures) = (self.rules.join, self.failures);
        let Phase::Between { since, why } = &self.phase else { return };
        let (is_late, why) = (now.saturating_sub(*since) >= join, why.clone());
        let runs = |host: &Host| host.node.is_some() && !host.waits();
        if self.hosts.iter().any(runs) && !is_late {
            return;
        }
        let (late, left): (Vec<Host>, Vec<Host>) = std::mem::take(&mut self.hosts).into_iter().partition(runs);
        self.hosts = left;
        late.iter().for_each(|host| self.leave_out(host, &format!("its ranks have not ended for {} s", join.as_secs_f64())));
        if matches!(self.phase, Phase::Over) {
            return;
        }
        if failures > self.rules.restarts {
            let lost = self.lost.join("; ");
            return self.finish(1, (!lost.is_empty()).then_some(lost));
        }
        let waiting = self.waiting();
        if waiting.len() >= self.rules.least {
            self.start(&waiting, Some(why));
        } else if is_late {
            self.give_up(waiting.len(), join);
        }
    }

    /// Begins an attempt with the first of these hosts.
    fn start(&mut self, waiting: &[usize], why: Option<String>) {
        let chosen = &waiting[..waiting.len().min(self.rules.most)];
        self.attempt += u32::from(why.is_some());
        let names: Vec<String> = chosen.iter().map(|place| self.hosts[*place].name.clone()).collect();
        self.hosts.iter_mut().for_each(|host| host.node = None);
        for (node, place) in chosen.iter().enumerate() {
            let host = &mut self.hosts[*place];
            host.node = Some(node);
            let start = Start { attempt: self.attempt, node, names: names.clone(), failures: self.failures, why: why.clone() };
            self.actions.push(Action::Tell { id: host.id.clone(), number: host.given, message: Message::Start(start) });
            host.given += 1;
        }
        self.lost.clear();
        self.phase = Phase::Running { settled: false };
    }

    /// Ends the job because too few hosts are there.
    fn give_up(&mut self, there: usize, waited: Duration) {
        let lost = self.lost.iter().map(|lost| format!("; {lost}")).collect::<String>();
        let (least, seconds) = (self.rules.least, waited.as_secs_f64());
        self.finish(1, Some(format!("the job needs at least {least} hosts, and has {there} after {seconds} s{lost}")));
    }

    /// Ends the job for all hosts that wait. Hosts whose ranks have succeeded know that it has ended.
    fn finish(&mut self, code: u8, why: Option<String>) {
        let succeeded = code == 0 && !matches!(self.phase, Phase::Over);
        for host in std::mem::take(&mut self.hosts) {
            if !(succeeded && host.node.is_some()) {
                let why = why.clone().or_else(|| succeeded.then(|| "the job has ended without needing this host".to_owned()));
                self.tell(&host.id, host.given, Message::Over { code, why });
            }
        }
        self.phase = Phase::Over;
    }
}
