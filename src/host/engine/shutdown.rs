//! The end of a communicator: finding the reason and notifying the peers.

use std::time::Instant;

use super::memory::Context;
use super::peer::{PeerState, Trouble};
use super::{End, Engine, Execution, Health, Links, wire};
use crate::base::tuning::engine::{LONG_SHUTDOWN, SHUTDOWN, SHUTDOWN_INTERVAL};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::Silence;

impl Engine {
    /// Notifies every open link, once, that the communicator ended. Spends at most a few milliseconds on this.
    pub(crate) fn propagate<L: Links>(&mut self, links: &mut L, abort_reason: &AbortReason) {
        self.spread(&wire::encode_abort_reason(abort_reason), None, None, links);
    }

    /// Notifies every open link that this rank closes its communicator normally, unless a reason to abort has been
    /// sent.
    pub(crate) fn leave<L: Links>(&mut self, links: &mut L) {
        self.spread(&wire::encode_leave(), None, None, links);
    }

    /// Ends the communicator: records the reason, unless it ended before, and notifies the peers.
    pub(super) fn fail<L: Links>(&mut self, end: End, context: Option<&Context<'_>>, health: &Health, links: &mut L) -> Interrupted {
        health.end(end.stop.abort_reason);
        let abort_reason = health.abort_reason().copied().unwrap_or(end.stop.abort_reason);
        self.spread(&wire::encode_abort_reason(&abort_reason), end.told_by, context, links);
        if abort_reason == end.stop.abort_reason { end.stop } else { abort_reason.into() }
    }

    /// Returns the reason behind a problem with a peer. A broken link may have delivered the reason before it broke.
    pub(super) fn explain<L: Links>(&mut self, rank: usize, trouble: Trouble, links: &mut L) -> End {
        let error = match trouble {
            Trouble::Aborted(abort_reason) => return End { stop: abort_reason.into(), told_by: Some(rank) },
            Trouble::Found(abort_reason) => return abort_reason.into(),
            Trouble::Link(error) => error,
        };
        let last_words = links.link(rank).ok().and_then(|link| self.peers[rank].last_words(link));
        match last_words {
            Some(abort_reason) => End { stop: abort_reason.into(), told_by: Some(rank) },
            None => {
                crate::base::event::warn!(rank = self.rank, peer = rank, %error, "the link to a peer broke");
                AbortReason::of_link(rank as u32, self.rank as u32, Silence::of(&error)).into()
            }
        }
    }

    /// Returns the end of a run whose deadline passed: the ranks it waits for, and those known to have arrived.
    pub(super) fn timed_out<L: Links>(&mut self, request: &Execution<'_>, links: &mut L) -> End {
        let waiting = self.rank as u32;
        let missing = self.awaited(request, links);
        let has_come = |rank: usize| rank == self.rank || (!missing.contains(&(rank as u32)) && self.peers[rank].has_come());
        let arrived: Vec<u32> = request.participants.iter().filter(|rank| has_come(**rank)).map(|rank| *rank as u32).collect();
        // If no rank is missing, the time was spent in this rank's own folds.
        let first = missing.first().copied().unwrap_or(waiting);
        Interrupted { abort_reason: AbortReason::TimedOut { waiting, missing: first }, missing, arrived }.into()
    }

    /// Adds the ranks that this rank waits for to an abort reason that reports another rank's timeout.
    pub(super) fn with_own_view<L: Links>(&mut self, end: End, request: &Execution<'_>, links: &mut L) -> End {
        if !matches!(end.stop.abort_reason, AbortReason::TimedOut { waiting, .. } if waiting != self.rank as u32) {
            return end;
        }
        let awaited = self.awaited(request, links);
        End { stop: end.stop.seen_by(self.rank as u32, awaited), ..end }
    }

    /// Returns the participants that this run waits for.
    pub(super) fn awaited<L: Links>(&mut self, request: &Execution<'_>, links: &mut L) -> Vec<u32> {
        let mut awaited = Vec::new();
        for &rank in request.participants {
            if self.active.contains(&rank) {
                let link = links.link(rank).ok();
                if self.peers[rank].is_missing(link, &self.schedule) {
                    awaited.push(rank as u32);
                }
            }
        }
        awaited
    }

    /// Writes the final message to every open link except one, after any partly sent message.
    fn spread<L: Links>(&mut self, message: &[u8], except: Option<usize>, context: Option<&Context<'_>>, links: &mut L) {
        if std::mem::replace(&mut self.has_told, true) {
            return;
        }
        if let Some(peer) = except.and_then(|rank| self.peers.get_mut(rank)) {
            peer.close_writes();
        }
        let began = Instant::now();
        loop {
            let mut is_pending = false;
            links.for_each_open(&mut |rank, link| {
                if let Some(peer) = self.peers.get_mut(rank)
                    && peer.say(message, link, context)
                {
                    // Two ranks that end at the same time may each have to read before the other can write.
                    peer.drain(link);
                    is_pending = true;
                }
            });
            let is_cut_off = |peer: &PeerState| peer.is_cut_off(message.len());
            let elapsed = began.elapsed();
            if !is_pending || elapsed >= LONG_SHUTDOWN || (elapsed >= SHUTDOWN && !self.peers.iter().any(is_cut_off)) {
                break;
            }
            if elapsed < SHUTDOWN_INTERVAL { std::thread::yield_now() } else { std::thread::sleep(SHUTDOWN_INTERVAL) }
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            if peer.is_cut_off(message.len()) {
                links.drop_link(rank);
            }
        }
    }
}
