//! The end of a communicator: finding out why, and telling everyone.

use std::time::Instant;

use super::memory::Context;
use super::peer::{PeerState, Trouble};
use super::{End, Engine, Execution, Health, Links, wire};
use crate::base::tuning::engine::{LONG_SHUTDOWN, SHUTDOWN, SHUTDOWN_INTERVAL};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::Silence;

impl Engine {
    /// Tells every open link that the communicator ended, once, as far as a few milliseconds suffice.
    pub(crate) fn propagate<L: Links>(&mut self, links: &mut L, abort_reason: &AbortReason) {
        self.spread(&wire::encode_abort_reason(abort_reason), None, None, links);
    }

    /// Tells every open link that this rank closes its communicator in good order, unless it was told something worse.
    pub(crate) fn leave<L: Links>(&mut self, links: &mut L) {
        self.spread(&wire::encode_leave(), None, None, links);
    }

    /// Ends the communicator: records why, unless something else ended it before, and tells the peers.
    pub(super) fn fail<L: Links>(&mut self, end: End, context: Option<&Context<'_>>, health: &Health, links: &mut L) -> Interrupted {
        health.end(end.stop.abort_reason);
        let abort_reason = health.abort_reason().copied().unwrap_or(end.stop.abort_reason);
        self.spread(&wire::encode_abort_reason(&abort_reason), end.told_by, context, links);
        if abort_reason == end.stop.abort_reason { end.stop } else { abort_reason.into() }
    }

    /// What trouble with a peer means: a broken link may have brought the reason before it broke.
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
                AbortReason::of_link(rank as u32, Silence::of(&error)).into()
            }
        }
    }

    /// The deadline passed: says whom this rank waits for, and who is known to have come.
    pub(super) fn timed_out<L: Links>(&mut self, request: &Execution<'_>, links: &mut L) -> End {
        let waiting = self.rank as u32;
        let missing = self.awaited(request, links);
        let has_come = |rank: usize| rank == self.rank || (!missing.contains(&(rank as u32)) && self.peers[rank].has_come());
        let arrived: Vec<u32> = request.participants.iter().filter(|rank| has_come(**rank)).map(|rank| *rank as u32).collect();
        // Where nobody is missing, the time went into this rank's own folds.
        let first = missing.first().copied().unwrap_or(waiting);
        Interrupted { abort_reason: AbortReason::TimedOut { waiting, missing: first }, missing, arrived }.into()
    }

    /// Adds whom this rank waits for to the abort reason of another rank's deadline.
    pub(super) fn with_own_view<L: Links>(&mut self, end: End, request: &Execution<'_>, links: &mut L) -> End {
        if !matches!(end.stop.abort_reason, AbortReason::TimedOut { waiting, .. } if waiting != self.rank as u32) {
            return end;
        }
        let awaited = self.awaited(request, links);
        End { stop: end.stop.seen_by(self.rank as u32, awaited), ..end }
    }

    /// The participants that this run waits for.
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

    /// Writes the last message of all to every open link but one, after what is half sent there.
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
                    // Two ranks that end at once may each have to read before the other can write.
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
