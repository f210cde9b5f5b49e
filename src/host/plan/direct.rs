//! Reduction without partial results: the owner of a share receives every rank's contribution to it and folds them all
//! at once, in rank order. So the bits depend only on the number of ranks, and the op need not be commutative.
//!
//! Shares are cut into segments, two of which are in progress at a time. For each segment, a rank sends its
//! contributions before it sends the previous segment's result. It waits only for messages that belong to earlier
//! segments. So progress does not depend on the links' capacity.

use super::builder::{Builder, Part};
use super::ring::Sink;
use super::{Plan, Space, Span};
use crate::base::tuning::plan::DIRECT_IN_FLIGHT as IN_FLIGHT;

/// A completed segment of this rank's share.
#[derive(Clone, Copy)]
struct Complete {
    span: Span,
    ready: usize,
}

/// The state of a plan under construction.
struct Direct<'a> {
    n: usize,
    me: usize,
    shares: &'a [Part],
    element: usize,
    segment: usize,
    sink: Sink,
    plan: Builder,
    /// For each segment in progress, a slot for each other rank's contribution, in rank order, without this rank's.
    slots: [Vec<Span>; IN_FLIGHT],
    /// The step after which these slots may be filled again.
    free: [Option<usize>; IN_FLIGHT],
    complete: [Option<Complete>; IN_FLIGHT],
    /// The step that reads this rank's contribution to each share's segment in progress.
    readers: [Vec<Option<usize>>; IN_FLIGHT],
}

/// Returns a plan that reduces among at least two ranks.
///
/// Scratch: at most `2 * (n - 1)` slots of `segment_bytes` (or one element), each rounded up to its alignment.
pub(super) fn direct(n: usize, me: usize, shares: &[Part], element: usize, segment: usize, sink: Sink) -> Plan {
    let segments = |share: &Part| share.segments(segment, element);
    let most = shares.iter().map(segments).max().unwrap_or(1);
    let mut plan = Builder::new(most.saturating_mul(4 * n).min(1 << 20));
    let own = segments(&shares[me]);
    let slot_len = shares[me].piece(own, 0, element).len;
    let slots = [0, 1].map(|flight| {
        let needed = if flight < own && slot_len > 0 { n - 1 } else { 0 };
        (0..needed).map(|_| plan.scratch(slot_len, element)).collect()
    });
    let readers = [vec![None; n], vec![None; n]];
    let (free, complete) = ([None; IN_FLIGHT], [None; IN_FLIGHT]);
    let mut direct = Direct { n, me, shares, element, segment, sink, plan, slots, free, complete, readers };
    for index in 0..most {
        direct.contribute(index);
        direct.fold(index);
        if index > 0 {
            direct.distribute(index - 1);
        }
    }
    direct.distribute(most - 1);
    direct.plan.finish()
}

impl Direct<'_> {
    /// Returns a segment of a share; it is empty if the share has fewer segments.
    fn part(&self, share: usize, index: usize) -> Part {
        let whole = self.shares[share];
        let segments = whole.segments(self.segment, self.element);
        if index < segments { whole.piece(segments, index, self.element) } else { Part { len: 0, ..whole } }
    }

    /// Whether contributions to this share's segment are sent. They are sent if there are any. The first message is
    /// sent even if it is empty, so that the owner hears from every rank, unless the owner writes nothing.
    fn travels(&self, share: usize, index: usize, part: Part) -> bool {
        let writes = !matches!(self.sink, Sink::Root(root) if root != share);
        part.len > 0 || (index == 0 && writes)
    }

    /// Sends this rank's contribution to every other rank's segment.
    fn contribute(&mut self, index: usize) {
        for to in (1..self.n).map(|distance| (self.me + distance) % self.n) {
            let part = self.part(to, index);
            if self.travels(to, index, part) {
                self.readers[index % IN_FLIGHT][to] = Some(self.plan.send(to, part.of(Space::Source), &[]));
            }
        }
    }

    /// Receives every rank's contribution to this rank's segment, and folds them.
    fn fold(&mut self, index: usize) {
        let (part, flight) = (self.part(self.me, index), index % IN_FLIGHT);
        self.complete[flight] = None;
        if !self.travels(self.me, index, part) {
            return;
        }
        let slot = |direct: &Self, rank: usize| {
            let place = if rank < direct.me { rank } else { rank - 1 };
            let nowhere = Part::whole(0).of(Space::Scratch);
            direct.slots[flight].get(place).map_or(nowhere, |slot| Span { len: part.len, ..*slot })
        };
        let mut received = Vec::with_capacity(self.n - 1);
        for from in (1..self.n).map(|distance| (self.me + self.n - distance) % self.n) {
            let into = slot(self, from);
            received.push(Some(self.plan.receive(from, into, &[self.free[flight]])));
        }
        if part.len == 0 {
            return;
        }
        let own = part.of(Space::Source);
        let inputs: Vec<Span> = (0..self.n).map(|rank| if rank == self.me { own } else { slot(self, rank) }).collect();
        // The result of a share for another rank stays in the slot of one of its inputs until it is sent.
        let into = self.sink.complete(self.me, self.shares[self.me], part).unwrap_or_else(|| slot(self, (self.me + 1) % self.n));
        let folded = self.plan.fold(into, inputs, true, &received);
        self.free[flight] = Some(folded);
        self.complete[flight] = Some(Complete { span: into, ready: folded });
    }

    /// Sends the completed segment of this rank's share to the ranks that need it, and receives the other ranks'
    /// segments.
    fn distribute(&mut self, index: usize) {
        let flight = index % IN_FLIGHT;
        for distance in 1..self.n {
            let to = (self.me + distance) % self.n;
            if let Some(complete) = self.complete[flight].filter(|_| self.wants(to)) {
                let sent = self.plan.send(to, complete.span, &[Some(complete.ready)]);
                if complete.span.space == Space::Scratch {
                    self.free[flight] = Some(sent);
                }
            }
            let from = (self.me + self.n - distance) % self.n;
            let part = self.part(from, index);
            if self.wants(self.me) && part.len > 0 {
                self.plan.receive(from, part.of(Space::Destination), &[self.readers[flight][from]]);
            }
        }
    }

    /// Whether `rank` gets other ranks' completed shares.
    fn wants(&self, rank: usize) -> bool {
        match self.sink {
            Sink::Own => false,
            Sink::Everyone => true,
            Sink::Root(root) => root == rank,
        }
    }
}
