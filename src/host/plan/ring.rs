//! Reduction by passing partial results from neighbour to neighbour.
//!
//! The vector is cut into one share for each rank, and each share into pieces. A piece travels once around the ring,
//! and every rank folds its own contribution in. The rank that the share belongs to completes it. A few pieces are in
//! progress at once, so that sending, receiving and folding overlap. Partial results use one more slot of scratch than
//! there are pieces in progress.
//!
//! All messages have one order, by (group of pieces, hop, direction, piece), and each link keeps this order. A step
//! waits only for messages that are earlier in this order. A slot is reused after `IN_FLIGHT + 1` receives, and its
//! previous content is sent `IN_FLIGHT` messages after it arrived. So progress does not depend on the links' capacity.

use super::builder::{Builder, Part};
use super::{Plan, Space, Span};
use crate::base::tuning::plan::RING_IN_FLIGHT as IN_FLIGHT;

/// The destination of completed shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sink {
    /// Each share stays with its rank. The destination of a rank contains only that rank's share.
    Own,
    /// To every rank's destination.
    Everyone,
    /// To this rank's destination.
    Root(usize),
}

impl Sink {
    /// Returns where `part` of the completed share `own` of the rank `me` is written; `None` if that rank writes
    /// nothing.
    pub(super) fn complete(self, me: usize, own: Part, part: Part) -> Option<Span> {
        match self {
            Sink::Own => Some(Part { offset: part.offset - own.offset, len: part.len }.of(Space::Destination)),
            Sink::Root(root) if root != me => None,
            Sink::Everyone | Sink::Root(_) => Some(part.of(Space::Destination)),
        }
    }
}

/// A slot of scratch, and the step after which it may be filled again.
struct Slot {
    span: Span,
    free: Option<usize>,
}

/// A partial result that this rank sends in the next hop.
#[derive(Clone, Copy)]
struct Partial {
    span: Span,
    ready: usize,
    slot: Option<usize>,
}

/// One direction around the ring: its part of every share, and where its pieces are. Ranks are numbered so that pieces
/// always travel from number i to i + 1.
struct Direction {
    forward: bool,
    shares: Vec<Part>,
    slots: Vec<Slot>,
    next_slot: usize,
    held: [Option<Partial>; IN_FLIGHT],
    /// The step that reads this rank's contribution to (share, piece in progress).
    readers: Vec<[Option<usize>; IN_FLIGHT]>,
}

/// The plan, and the data that every hop needs.
struct Ring {
    n: usize,
    me: usize,
    own: Part,
    element: usize,
    pieces: usize,
    sink: Sink,
    plan: Builder,
}

/// Returns a plan that reduces over a ring of at least two ranks. The order of operands is the ring's, the same for
/// every rank.
///
/// Scratch: at most `2 * (IN_FLIGHT + 1)` slots of `segment_bytes` (or one element), each rounded up to its alignment.
pub(super) fn ring(n: usize, me: usize, shares: &[Part], element: usize, segment: usize, sink: Sink) -> Plan {
    let total = shares.iter().fold(0_usize, |sum, share| sum.saturating_add(share.len));
    let largest = shares.iter().map(|share| share.len).max().unwrap_or(0);
    // Both directions are used only if there are two, and enough bytes for both.
    let directions = if n > 2 && total > segment && largest >= 2 * element { 2 } else { 1 };
    let halves = |direction| shares.iter().map(|share| share.piece(directions, direction, element)).collect::<Vec<_>>();
    let mut directions: Vec<Direction> = (0..directions).map(|direction| Direction::new(halves(direction), direction == 0)).collect();
    let longest = directions.iter().flat_map(|direction| &direction.shares).map(|share| share.len).max().unwrap_or(0);
    let pieces = Part::whole(longest).segments(segment, element);

    let steps = directions.len() * pieces.saturating_mul(5 * n);
    let mut ring = Ring { n, me, own: shares[me], element, pieces, sink, plan: Builder::new(steps.min(1 << 20)) };
    // An empty piece is not sent, and so does not carry the agreement.
    if directions.iter().flat_map(|direction| &direction.shares).any(|share| share.len / element < pieces) {
        ring.plan.agree(n, me);
    }
    let slot_len = Part::whole(longest).piece(pieces, 0, element).len;
    for direction in &mut directions {
        let slots = (IN_FLIGHT.min(pieces) + 1).min(pieces.saturating_mul(n - 1));
        direction.slots = (0..slots).map(|_| Slot { span: ring.plan.scratch(slot_len, element), free: None }).collect();
    }
    for first in (0..pieces).step_by(IN_FLIGHT) {
        ring.group(&mut directions, first..(first + IN_FLIGHT).min(pieces));
    }
    ring.plan.finish()
}

impl Direction {
    fn new(shares: Vec<Part>, forward: bool) -> Self {
        let readers = vec![[None; IN_FLIGHT]; shares.len()];
        Self { forward, shares, slots: Vec::new(), next_slot: 0, held: [None; IN_FLIGHT], readers }
    }

    /// Returns the rank that has this number in this direction, and vice versa.
    fn rank(&self, number: usize) -> usize {
        let n = self.shares.len();
        if self.forward { number % n } else { (n - number % n) % n }
    }
}

impl Ring {
    /// Adds the whole journey of a group of pieces.
    fn group(&mut self, directions: &mut [Direction], pieces: std::ops::Range<usize>) {
        for hop in 0..self.n - 1 {
            for direction in &mut *directions {
                for piece in pieces.clone() {
                    self.reduce_hop(direction, hop, piece);
                }
            }
        }
        match self.sink {
            Sink::Own => {}
            Sink::Everyone => {
                for hop in 0..self.n - 1 {
                    for direction in &mut *directions {
                        for piece in pieces.clone() {
                            self.gather_hop(direction, hop, piece);
                        }
                    }
                }
            }
            Sink::Root(root) => {
                for direction in directions {
                    for piece in pieces.clone() {
                        self.collect(direction, root, piece);
                    }
                }
            }
        }
    }

    /// Returns a piece of a share in this direction.
    fn part(&self, direction: &Direction, share: usize, piece: usize) -> Part {
        direction.shares[share].piece(self.pieces, piece, self.element)
    }

    /// Sends a partial result on, receives the next one, and folds this rank's contribution into it. The last hop
    /// completes this rank's share.
    fn reduce_hop(&mut self, direction: &mut Direction, hop: usize, piece: usize) {
        let (number, flight) = (direction.rank(self.me), piece % IN_FLIGHT);
        let (right, left) = (direction.rank(number + 1), direction.rank(number + self.n - 1));
        let outgoing = direction.rank(number + self.n - 1 - hop);
        let part = self.part(direction, outgoing, piece);
        match direction.held[flight].take().filter(|_| hop > 0) {
            Some(held) => self.pass_on(direction, right, held),
            None if hop == 0 && part.len > 0 => {
                direction.readers[outgoing][flight] = Some(self.plan.send(right, part.of(Space::Source), &[]));
            }
            None => {}
        }

        let incoming = direction.rank(number + 2 * self.n - 2 - hop);
        let part = self.part(direction, incoming, piece);
        if part.len == 0 {
            return;
        }
        let slot = direction.next_slot;
        direction.next_slot = (slot + 1) % direction.slots.len();
        let span = Span { len: part.len, ..direction.slots[slot].span };
        let received = self.plan.receive(left, span, &[direction.slots[slot].free]);
        let last = hop == self.n - 2;
        let into = if last { self.sink.complete(self.me, self.own, part).unwrap_or(span) } else { span };
        let folded = self.plan.fold(into, vec![span, part.of(Space::Source)], last, &[Some(received)]);
        direction.readers[incoming][flight] = Some(folded);
        direction.slots[slot].free = Some(folded);
        direction.held[flight] = Some(Partial { span: into, ready: folded, slot: Some(slot) });
    }

    /// Sends the piece that this rank holds. Its slot is free after that.
    fn pass_on(&mut self, direction: &mut Direction, to: usize, held: Partial) {
        let sent = self.plan.send(to, held.span, &[Some(held.ready)]);
        if let (Some(slot), Space::Scratch) = (held.slot, held.span.space) {
            direction.slots[slot].free = Some(sent);
        }
    }

    /// Sends a completed share on and receives the next one.
    fn gather_hop(&mut self, direction: &mut Direction, hop: usize, piece: usize) {
        let (number, flight) = (direction.rank(self.me), piece % IN_FLIGHT);
        let (right, left) = (direction.rank(number + 1), direction.rank(number + self.n - 1));
        if let Some(held) = direction.held[flight].take() {
            self.pass_on(direction, right, held);
        }
        let incoming = direction.rank(number + self.n - 1 - hop);
        let part = self.part(direction, incoming, piece);
        if part.len > 0 {
            let span = part.of(Space::Destination);
            let ready = self.plan.receive(left, span, &[direction.readers[incoming][flight]]);
            direction.held[flight] = Some(Partial { span, ready, slot: None });
        }
    }

    /// Brings a piece of every completed share to the root.
    fn collect(&mut self, direction: &mut Direction, root: usize, piece: usize) {
        let held = direction.held[piece % IN_FLIGHT].take();
        if self.me != root {
            if let Some(held) = held {
                self.pass_on(direction, root, held);
            }
            return;
        }
        for owner in (1..self.n).map(|distance| (root + distance) % self.n) {
            let part = self.part(direction, owner, piece);
            if part.len > 0 {
                let reader = direction.readers[owner][piece % IN_FLIGHT];
                self.plan.receive(owner, part.of(Space::Destination), &[reader]);
            }
        }
    }
}
