//! The end of a communicator: finding out why, and telling everyone.

use std::time::{Duration, Instant};

use super::lane::Context;
use super::peer::{Peer, Trouble};
use super::{End, Engine, Health, Links, Request, wire};
use crate::deadline::Deadline;
use crate::host::notice::{Notice, Stop};

/// How long a rank that ends tries to get its last message out. A peer that takes no bytes for so long learns of the end when
/// its link closes.
const FAREWELL: Duration = Duration::from_millis(20);
/// How long it tries where a message is half sent. Cutting it off makes the peer believe that this rank died, so a peer that
/// only lacks a core gets more time.
const LONG_FAREWELL: Duration = Duration::from_millis(100);
/// How long to wait between two tries, once yielding the core has not helped.
const NAP: Duration = Duration::from_micros(100);

impl Engine {
    /// Tells every open link that the communicator ended, once, as far as it can be done in a few milliseconds.
    pub(crate) fn tell<L: Links>(&mut self, links: &mut L, notice: &Notice) {
        self.spread(&wire::encode_notice(notice), None, None, links);
    }

    /// Tells every open link that this rank closes its communicator in good order, unless it was told something worse.
    pub(crate) fn leave<L: Links>(&mut self, links: &mut L) {
        self.spread(&wire::encode_leave(), None, None, links);
    }

    /// Ends the communicator: records why, unless something else ended it before, and tells the peers.
    pub(super) fn fail<L: Links>(&mut self, end: End, context: Option<&Context<'_>>, health: &Health, links: &mut L) -> Stop {
        health.end(end.stop.notice);
        let notice = health.notice().copied().unwrap_or(end.stop.notice);
        self.spread(&wire::encode_notice(&notice), end.told_by, context, links);
        if notice == end.stop.notice { end.stop } else { notice.into() }
    }

    /// What trouble with a peer means: a broken link may have brought the reason before it broke.
    pub(super) fn explain<L: Links>(&mut self, rank: usize, trouble: Trouble, deadline: &Deadline, links: &mut L) -> End {
        let error = match trouble {
            Trouble::Told(notice) => return End { stop: notice.into(), told_by: Some(rank) },
            Trouble::Found(notice) => return notice.into(),
            Trouble::Link(error) => error,
        };
        let last_words = links.link(rank, deadline).ok().and_then(|link| self.peers[rank].last_words(link));
        match last_words {
            Some(notice) => End { stop: notice.into(), told_by: Some(rank) },
            None => {
                crate::event::warn!(rank = self.rank, peer = rank, %error, "the link to a peer broke");
                Notice::Lost { rank: rank as u32 }.into()
            }
        }
    }

    /// The deadline passed: says whom this rank waits for, and who is known to have come.
    pub(super) fn timed_out<L: Links>(&mut self, request: &Request<'_>, links: &mut L) -> End {
        let waiting = self.rank as u32;
        let mut missing = self.awaited(request, links);
        let has_come = |rank: usize| rank == self.rank || (!missing.contains(&(rank as u32)) && self.peers[rank].has_come());
        let mut arrived: Vec<u32> = request.participants.iter().filter(|rank| has_come(**rank)).map(|rank| *rank as u32).collect();
        // Nobody is: the time went into this rank's own folds.
        if missing.is_empty() {
            arrived.retain(|rank| *rank != waiting);
            missing.push(waiting);
        }
        End { stop: Stop { notice: Notice::TimedOut { waiting, missing: missing[0] }, missing, arrived }, told_by: None }
    }

    /// Adds to another rank's deadline whom this rank waits for.
    pub(super) fn with_own_view<L: Links>(&mut self, end: End, request: &Request<'_>, links: &mut L) -> End {
        if !matches!(end.stop.notice, Notice::TimedOut { waiting, .. } if waiting != self.rank as u32) {
            return end;
        }
        let awaited = self.awaited(request, links);
        End { stop: end.stop.seen_by(self.rank as u32, awaited), ..end }
    }

    /// The participants that this run waits for.
    pub(super) fn awaited<L: Links>(&mut self, request: &Request<'_>, links: &mut L) -> Vec<u32> {
        let mut awaited = Vec::new();
        for &rank in request.participants {
            if self.active.contains(&rank) {
                let link = links.link(rank, request.deadline).ok();
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
            peer.hush();
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
            let is_cut_off = |peer: &Peer| peer.is_cut_off(message.len());
            let elapsed = began.elapsed();
            if !is_pending || elapsed >= LONG_FAREWELL || (elapsed >= FAREWELL && !self.peers.iter().any(is_cut_off)) {
                break;
            }
            if elapsed < NAP { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            if peer.is_cut_off(message.len()) {
                links.drop_link(rank);
            }
        }
    }
}
