//! One call that waits for requests to the end, for tests; users of the engine wait in steps, so that they can share it.

use super::super::requests::{Receiving, Request, Sending};
use super::super::wait::Rest;
use super::super::{Connector, MessageError, Messages, Ticket};
use crate::deadline::Deadline;
use crate::host::health::Health;
use crate::host::notice::{Notice, Stop};

/// Where the search for news outside the links is done although something moves.
const ASK_EVERY: u32 = 64;

impl<C: Connector> Messages<C> {
    /// Moves things until all these requests are finished; their outcomes are then there to be polled.
    ///
    /// Ends early, with the reason, where one of them fails because its peer is gone, the deadline passes, the communicator ends
    /// (`health`, or a peer's word), or `interrupted` says so. The requests stay as they are: poll or cancel them.
    pub(in crate::host::point_to_point) fn wait(
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
