//! Waiting for requests: briefly on the core, then by giving it up, then asleep on the links' descriptors.

use std::hint;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_yield;

use crate::deadline::Deadline;
use crate::host::health::Health;
use crate::host::link::ByteLink;
use crate::host::notice::{Notice, Stop};

use super::requests::{Receiving, Request, Sending};
use super::{Connector, MessageError, Messages, Ticket};

/// Fruitless rounds before the core is given up, where there seem to be cores enough.
const SPINS: u32 = 64;

/// Fruitless rounds with the core given up before sleeping.
const YIELDS: u32 = 64;

/// How long the first sleep on descriptors may take; each further one twice as long, up to 16 times.
const SLEEP: Duration = Duration::from_millis(1);

/// The same where some link cannot be slept on, up to 4 times.
const NAP: Duration = Duration::from_micros(50);

/// Where the search for news outside the links is done although something moves.
const ASK_EVERY: u32 = 64;

/// What to do after a round in which nothing moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Try again at once.
    Spin,
    /// Give up the core for others.
    Yield,
    /// Sleep; the how-manieth time.
    Sleep(u32),
}

/// Counts fruitless rounds.
#[derive(Debug)]
pub(super) struct Patience {
    spins: u32,
    rounds: u32,
}

impl Patience {
    /// Where there are more ranks than cores, cores are given up at once.
    pub(super) fn new(is_crowded: bool) -> Self {
        Self { spins: if is_crowded { 0 } else { SPINS }, rounds: 0 }
    }

    /// What to do after one more fruitless round.
    pub(super) fn next(&mut self) -> Rest {
        let round = self.rounds;
        self.rounds = round.saturating_add(1);
        if round < self.spins {
            Rest::Spin
        } else if round < self.spins + YIELDS {
            Rest::Yield
        } else {
            Rest::Sleep(round - self.spins - YIELDS)
        }
    }

    /// Something moved.
    pub(super) fn reset(&mut self) {
        self.rounds = 0;
    }
}

impl<C: Connector> Messages<C> {
    /// Moves things until all these requests are finished; their outcomes are then there to be polled.
    ///
    /// Ends early, with the reason, where one of them fails because its peer is gone, the deadline passes, the communicator ends
    /// (`health`, or a peer's word), or `interrupted` says so. The requests stay as they are: poll or cancel them.
    pub(crate) fn wait(
        &mut self,
        tickets: &[Ticket],
        deadline: &Deadline,
        health: &Health,
        interrupted: &mut dyn FnMut() -> Option<Notice>,
    ) -> Result<(), Stop> {
        let (mut finished, mut failures, mut rounds) = (0, None, 0_u32);
        loop {
            let moved = self.progress();
            // Each ticket is looked at until it is finished, and all of them again only where a request has failed.
            if failures != Some(self.board.requests.failures()) {
                failures = Some(self.board.requests.failures());
                if let Some(notice) = tickets.iter().find_map(|ticket| self.failure(*ticket)) {
                    return Err(notice.into());
                }
            }
            finished += tickets[finished..].iter().take_while(|ticket| !self.is_pending(**ticket)).count();
            if finished == tickets.len() {
                return Ok(());
            }
            if let Some(notice) = health.notice().copied().or(self.heard()) {
                return Err(notice.into());
            }
            rounds = rounds.wrapping_add(1);
            let rest = if moved { None } else { Some(self.patience.next()) };
            if (rounds.is_multiple_of(ASK_EVERY) || rest.is_some_and(|rest| rest != Rest::Spin))
                && let Some(notice) = interrupted()
            {
                return Err(notice.into());
            }
            if deadline.has_passed() {
                return Err(self.timed_out(tickets));
            }
            if let Some(rest) = rest {
                self.rest(rest, deadline.remaining());
            }
        }
    }

    /// Rounds until something moves or, after a few fruitless ones, one sleep of at most `budget` is over; whether anything
    /// moved. For a thread that shares the engine and must let go of it in between.
    pub(crate) fn wait_step(&mut self, budget: Duration) -> bool {
        loop {
            if self.progress() {
                return true;
            }
            let rest = self.patience.next();
            self.rest(rest, budget);
            if matches!(rest, Rest::Sleep(_)) {
                return self.progress();
            }
        }
    }

    /// Passes the time after a fruitless round, at most `limit` of it.
    pub(super) fn rest(&self, rest: Rest, limit: Duration) {
        match rest {
            Rest::Spin => hint::spin_loop(),
            Rest::Yield => sched_yield(),
            Rest::Sleep(times) => self.sleep(limit.min(SLEEP * (1 << times.min(4))), NAP * (1 << times.min(2))),
        }
    }

    /// Sleeps until a link or the connector has something, at most `limit`; at most `nap` where not all can be slept on.
    fn sleep<'a>(&'a self, limit: Duration, nap: Duration) {
        let mut descriptors = Vec::with_capacity(self.channels.len() + 1);
        let mut all = true;
        let mut add = |descriptor: Option<BorrowedFd<'a>>, events| match descriptor {
            Some(descriptor) => descriptors.push(PollFd::from_borrowed_fd(descriptor, events)),
            None => all = false,
        };
        add(self.connector.descriptor(), PollFlags::IN);
        for channel in self.channels.iter().flatten().filter(|channel| channel.end().is_none()) {
            let write = if channel.outgoing.is_stuck() { PollFlags::OUT } else { PollFlags::empty() };
            add(channel.link.descriptor(), PollFlags::IN | write);
        }
        let limit = if all { limit } else { limit.min(nap) };
        let result = Timespec::try_from(limit).map(|limit| poll(&mut descriptors, Some(&limit)));
        if !matches!(result, Ok(Ok(_) | Err(rustix::io::Errno::INTR))) {
            // No descriptor to sleep on, for whatever reason: the clock remains.
            thread::sleep(limit.min(nap));
        }
    }

    /// Whether a request is under way.
    fn is_pending(&self, ticket: Ticket) -> bool {
        let request = self.board.requests.index(ticket).and_then(|index| self.board.requests.request(index));
        matches!(request, Some(Request::Send(_) | Request::Receive(_)))
    }

    /// Why a request failed, where a peer is gone.
    fn failure(&self, ticket: Ticket) -> Option<Notice> {
        match self.board.requests.request(self.board.requests.index(ticket)?)? {
            Request::Done(Err(MessageError::Ended(notice))) => Some(*notice),
            _ => None,
        }
    }

    /// Who had not arrived when the deadline passed, and who had.
    fn timed_out(&self, tickets: &[Ticket]) -> Stop {
        let rank = self.rank as u32;
        let (mut missing, mut arrived) = (Vec::new(), vec![rank]);
        for index in tickets.iter().filter_map(|ticket| self.board.requests.index(*ticket)) {
            match self.board.requests.request(index) {
                Some(Request::Send(Sending { to, .. })) => missing.push(*to as u32),
                Some(Request::Receive(Receiving { from: Some(from), .. })) => missing.push(*from as u32),
                Some(Request::Receive(_)) => missing.extend(self.living_peers().map(|peer| peer as u32)),
                Some(Request::Done(Ok(envelope))) => arrived.push(envelope.source as u32),
                Some(Request::Done(Err(_))) | None => {}
            }
        }
        missing.sort_unstable();
        missing.dedup();
        arrived.sort_unstable();
        arrived.dedup();
        arrived.retain(|peer| *peer == rank || !missing.contains(peer));
        let notice = Notice::TimedOut { waiting: rank, missing: missing.first().copied().unwrap_or(rank) };
        Stop { notice, missing, arrived }
    }
}
