//! The ranks of one communicator, and where they meet. A clique lives in the process that made the unique id. Ranks
//! there call it directly; ranks of other processes are represented by a thread there (see `hub`).

use crate::abi::Code;
use crate::connection::Direction;
use crate::control;
use crate::fault::{Fault, Outcome};
use crate::mail::Mail;
use crate::operation::Operation;
use crate::report::{lock, report};
use crate::round::Rounds;
use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Called once, when the clique breaks.
pub(crate) type Notify = Box<dyn Fn(&Fault) + Send + Sync>;

/// How a rank left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Departure {
    /// It aborted. As with NCCL, the others are not notified, and wait until they give up.
    Aborted = 0,
    /// It destroyed its communicator, which is allowed only when the others no longer need it.
    Destroyed = 1,
    /// Its process has ended.
    Dead = 2,
}

/// The error of work that was stopped by the rank's own abort or revocation: nothing was or will be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

enum Presence {
    Expected,
    Active,
    Revoked,
    /// Its abort flags are raised.
    Halted,
    Gone(Departure),
}

struct Seat {
    presence: Presence,
    notify: Option<Notify>,
    /// How often this rank has taken part in a meeting of each name.
    meetings: HashMap<String, u64>,
}

struct Meeting {
    said: HashMap<usize, Vec<u8>>,
    left: usize,
}

struct State {
    seats: Vec<Seat>,
    rounds: Rounds,
    mail: Mail,
    meetings: HashMap<(String, u64), Meeting>,
    /// The connected ends of directions for messages, each with its rank.
    ends: HashSet<(Direction, usize)>,
    fault: Option<Fault>,
}

pub(crate) struct Clique {
    state: Mutex<State>,
    changed: Condvar,
    pub(crate) errands: Errands,
}

/// Calls made for ranks of other processes that are not answered yet.
#[derive(Default)]
pub(crate) struct Errands {
    under_way: Mutex<usize>,
    fewer: Condvar,
}

/// One of these calls, until it is dropped.
pub(crate) struct Errand<'a>(&'a Errands);

impl Errands {
    pub(crate) fn begin(&self) -> Errand<'_> {
        *lock(&self.under_way) += 1;
        Errand(self)
    }

    /// Waits a short time until all are answered: some may wait for ranks that never come.
    pub(crate) fn wait(&self) {
        let under_way = lock(&self.under_way);
        drop(self.fewer.wait_timeout_while(under_way, Duration::from_secs(1), |under_way| *under_way > 0));
    }
}

impl Drop for Errand<'_> {
    fn drop(&mut self) {
        *lock(&self.0.under_way) -= 1;
        self.0.fewer.notify_all();
    }
}

impl Clique {
    pub(crate) fn new(size: usize) -> Clique {
        let seats = (0..size).map(|_| Seat { presence: Presence::Expected, notify: None, meetings: HashMap::new() }).collect();
        let state =
            State { seats, rounds: Rounds::new(size), mail: Mail::default(), meetings: HashMap::new(), ends: HashSet::new(), fault: None };
        Clique { state: Mutex::new(state), changed: Condvar::new(), errands: Errands::default() }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a rank in its place.
    pub(crate) fn sit(&self, rank: usize, size: usize, notify: Notify) -> Outcome<()> {
        let mut state = lock(&self.state);
        if state.seats.len() != size {
            let text = format!("rank {rank} joins a communicator of {size} ranks, others one of {}", state.seats.len());
            report(text.as_str());
            return Err(Fault::usage(text));
        }
        let seat = &mut state.seats[rank];
        if !matches!(seat.presence, Presence::Expected) {
            let text = format!("rank {rank} of {size} joins twice with one unique id");
            report(text.as_str());
            return Err(Fault::usage(text));
        }
        seat.presence = Presence::Active;
        seat.notify = Some(notify);
        self.changed.notify_all();
        Ok(())
    }

    /// Sends `words` to all `participants` and waits for the words of each. The result is in their order.
    pub(crate) fn confer(&self, rank: usize, participants: &[usize], name: &str, words: Vec<u8>) -> Outcome<Vec<Vec<u8>>> {
        let mut state = lock(&self.state);
        let times = state.seats[rank].meetings.entry(name.to_owned()).or_insert(0);
        *times += 1;
        let key = (name.to_owned(), *times);
        let meeting = state.meetings.entry(key.clone()).or_insert_with(|| Meeting { said: HashMap::new(), left: 0 });
        meeting.said.insert(rank, words);
        self.changed.notify_all();
        loop {
            if let Presence::Halted | Presence::Gone(_) = state.seats[rank].presence {
                return Err(Fault::new(Code::INTERNAL_ERROR, format!("rank {rank} was aborted while it waited for its peers")));
            }
            let said = &state.meetings[&key].said;
            let missing = participants.iter().find(|&&peer| !said.contains_key(&peer));
            let Some(&missing) = missing else { break };
            let is_known_to_be_gone = |presence: &Presence| match presence {
                Presence::Gone(Departure::Dead) => !control::deaths_are_silent(),
                presence => matches!(presence, Presence::Gone(_)),
            };
            if participants.iter().any(|peer| !said.contains_key(peer) && is_known_to_be_gone(&state.seats[*peer].presence)) {
                return Err(Fault::remote(format!("rank {missing} is gone while rank {rank} waits for it")));
            }
            state = self.wait(state);
        }
        let meeting = state.meetings.get_mut(&key).expect("a meeting lasts until all have left it");
        let heard = participants.iter().map(|peer| meeting.said[peer].clone()).collect();
        meeting.left += 1;
        if meeting.left == participants.len() {
            state.meetings.remove(&key);
        }
        Ok(heard)
    }

    /// Connects this rank's ends of directions, and waits until their other ends are connected.
    pub(crate) fn connect(&self, rank: usize, directions: &[Direction]) -> Outcome<()> {
        let mut state = lock(&self.state);
        state.ends.extend(directions.iter().map(|&direction| (direction, rank)));
        self.changed.notify_all();
        loop {
            if let Presence::Halted | Presence::Gone(_) = state.seats[rank].presence {
                return Err(Fault::new(Code::INTERNAL_ERROR, format!("rank {rank} was aborted while it connected to its peers")));
            }
            let other = |&(from, to): &Direction| if from == rank { to } else { from };
            let missing: Vec<usize> =
                directions.iter().filter(|direction| !state.ends.contains(&(**direction, other(direction)))).map(other).collect();
            if missing.is_empty() {
                return Ok(());
            }
            // A rank that has aborted sends no notification.
            let is_known_to_be_gone = |peer: &&usize| match state.seats[**peer].presence {
                Presence::Gone(Departure::Dead) => !control::deaths_are_silent(),
                Presence::Gone(how) => how == Departure::Destroyed,
                _ => false,
            };
            if let Some(gone) = missing.iter().find(is_known_to_be_gone) {
                return Err(Fault::remote(format!("rank {gone} is gone while rank {rank} connects to it")));
            }
            state = self.wait(state);
        }
    }

    /// Runs the operations of one launch, sends and receives at the same time. Waits for peers; if the clique is
    /// broken, waits until this rank stops.
    pub(crate) fn run(&self, rank: usize, operations: &[Operation]) -> Result<(), Stopped> {
        let mut state = lock(&self.state);
        let (point_to_point, collective): (Vec<&Operation>, Vec<&Operation>) =
            operations.iter().partition(|operation| operation.signature.verb.is_point_to_point());
        let (mut tickets, mut stuck) = (Vec::new(), false);
        for operation in point_to_point {
            let peer = operation.signature.root;
            stuck = !state.usable(rank) || !self.admit(&mut state, rank, peer..peer + 1, operation);
            if stuck {
                break;
            }
            match state.mail.post(rank, operation) {
                Ok(ticket) => tickets.push(ticket),
                Err(text) => {
                    stuck = true;
                    self.mismatch(&mut state, text);
                }
            }
        }
        self.changed.notify_all();
        for operation in collective {
            state = self.collect(state, rank, operation)?;
        }
        while stuck || tickets.iter().any(|&ticket| state.mail.is_open(ticket)) {
            if !state.active(rank) {
                state.mail.withdraw(&tickets);
                return Err(Stopped);
            }
            state = self.wait(state);
        }
        Ok(())
    }

    /// Takes part in the next collective and waits for its end.
    fn collect<'a>(&self, mut state: MutexGuard<'a, State>, rank: usize, operation: &Operation) -> Result<MutexGuard<'a, State>, Stopped> {
        let mut turn = None;
        let size = state.seats.len();
        if state.usable(rank) && self.admit(&mut state, rank, 0..size, operation) {
            match state.rounds.arrive(rank, operation) {
                Ok(round) => turn = Some(round),
                Err(text) => self.mismatch(&mut state, text),
            }
            self.changed.notify_all();
        }
        loop {
            if let Some(round) = turn
                && state.rounds.leave_finished(round)
            {
                return Ok(state);
            }
            if !state.active(rank) {
                if let Some(round) = turn {
                    state.rounds.withdraw(round, rank);
                    // The kernels of a process end with it.
                    let is_dead = matches!(state.seats[rank].presence, Presence::Gone(Departure::Dead));
                    if control::aborted_kernels_go_on() && !is_dead {
                        state.rounds.finish_without_work(round);
                        self.changed.notify_all();
                    }
                }
                return Err(Stopped);
            }
            state = self.wait(state);
        }
    }

    /// Checks that the peers that an operation needs are still there. A peer that has destroyed its communicator
    /// breaks the clique.
    fn admit(&self, state: &mut State, rank: usize, peers: std::ops::Range<usize>, operation: &Operation) -> bool {
        let destroyed = |peer: &usize| matches!(state.seats[*peer].presence, Presence::Gone(Departure::Destroyed));
        let Some(gone) = peers.into_iter().find(destroyed) else { return true };
        let text = format!("rank {gone} destroyed its communicator before rank {rank} ran {}", operation.signature);
        report(text.as_str());
        self.fail(state, &Fault::remote(text));
        false
    }

    fn mismatch(&self, state: &mut State, text: String) {
        report(text.as_str());
        self.fail(state, &Fault::usage(text));
    }

    /// Breaks the clique, the first time.
    fn fail(&self, state: &mut State, fault: &Fault) {
        if state.fault.is_some() {
            return;
        }
        state.fault = Some(fault.clone());
        for seat in &state.seats {
            if let (Presence::Active | Presence::Revoked, Some(notify)) = (&seat.presence, &seat.notify) {
                notify(fault);
            }
        }
        self.changed.notify_all();
    }

    /// Continues after a halt. A rank that is revoked may confer and nothing else.
    pub(crate) fn resume(&self, rank: usize, revoked: bool) {
        let mut state = lock(&self.state);
        if let Presence::Halted = state.seats[rank].presence {
            state.seats[rank].presence = if revoked { Presence::Revoked } else { Presence::Active };
        }
    }

    /// Stops this rank's work and its waits for others.
    pub(crate) fn halt(&self, rank: usize) {
        let mut state = lock(&self.state);
        if !matches!(state.seats[rank].presence, Presence::Gone(_)) {
            state.seats[rank].presence = Presence::Halted;
        }
        self.changed.notify_all();
    }

    /// Gives up a rank's place and stops its work. Returns whether no rank is left.
    pub(crate) fn leave(&self, rank: usize, how: Departure) -> bool {
        let mut state = lock(&self.state);
        if !matches!(state.seats[rank].presence, Presence::Gone(_)) {
            state.seats[rank].presence = Presence::Gone(how);
            state.seats[rank].notify = None;
            let waiting = state.rounds.waiting_for(rank).or_else(|| state.mail.waiting_for(rank));
            match (how, waiting) {
                (Departure::Dead, _) if control::deaths_are_silent() => {}
                (Departure::Dead, _) => self.fail(&mut state, &Fault::remote(format!("the process of rank {rank} is gone"))),
                (Departure::Destroyed, Some(text)) => {
                    let text = format!("rank {rank} destroyed its communicator while {text}");
                    report(text.as_str());
                    self.fail(&mut state, &Fault::remote(text));
                }
                _ => {}
            }
        }
        self.changed.notify_all();
        state.seats.iter().all(|seat| matches!(seat.presence, Presence::Gone(_)))
    }
}

impl State {
    fn active(&self, rank: usize) -> bool {
        matches!(self.seats[rank].presence, Presence::Active)
    }

    fn usable(&self, rank: usize) -> bool {
        self.active(rank) && self.fault.is_none()
    }
}
