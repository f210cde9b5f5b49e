//! Puts a plan together, step by step.

use super::blocks::Part;
use super::{Action, Plan, Space, Span, Step};

/// Scratch buffers start on cache lines, and on the largest power of two that divides the element's size: no type is
/// aligned to more.
const LINE: usize = 64;

/// A plan in the making.
pub(super) struct Builder {
    plan: Plan,
    /// A step that every later step that writes to the destination comes after.
    gate: Option<usize>,
}

impl Builder {
    /// An empty plan with room for so many steps.
    pub(super) fn new(steps: usize) -> Self {
        Self { plan: Plan { steps: Vec::with_capacity(steps), scratch_bytes: 0 }, gate: None }
    }

    /// A plan that begins with an agreement of all ranks. Nothing is written to the destination before it is complete; what may
    /// be sent or copied aside meanwhile is.
    pub(super) fn agreed(n: usize, me: usize) -> Self {
        let mut builder = Self::new(0);
        builder.agree(n, me);
        builder
    }

    /// Every rank hears, transitively, from every other; what writes to the destination later comes after that. Each ordered pair
    /// is used at most once.
    ///
    /// A receive waits for the one before, so that a rank that sends in round k has heard all that rounds below k bring.
    pub(super) fn agree(&mut self, n: usize, me: usize) {
        let nothing = Part::whole(0).of(Space::Scratch);
        let mut distance = 1;
        while distance < n {
            let heard = self.gate;
            self.send((me + distance) % n, nothing, &[heard]);
            self.gate = Some(self.receive((me + n - distance) % n, nothing, &[heard]));
            distance *= 2;
        }
    }

    /// The step that completes the agreement, where there is one: for what must wait for it though it writes nothing.
    pub(super) fn agreement(&self) -> Option<usize> {
        self.gate
    }

    /// Sets memory of the plan's own aside, aligned for elements of this size.
    pub(super) fn scratch(&mut self, len: usize, element: usize) -> Span {
        let alignment = LINE.max(element & element.wrapping_neg());
        let offset = self.plan.scratch_bytes.next_multiple_of(alignment);
        self.plan.scratch_bytes = offset + len;
        Span { space: Space::Scratch, offset, len }
    }

    /// Adds a send; returns its index.
    pub(super) fn send(&mut self, to: usize, from: Span, after: &[Option<usize>]) -> usize {
        self.push(Action::Send { to, from }, after)
    }

    /// Adds a receive; returns its index.
    pub(super) fn receive(&mut self, from: usize, into: Span, after: &[Option<usize>]) -> usize {
        self.push(Action::Receive { from, into }, after)
    }

    /// Adds a fold; returns its index.
    pub(super) fn fold(&mut self, into: Span, inputs: Vec<Span>, last: bool, after: &[Option<usize>]) -> usize {
        self.push(Action::Fold { into, inputs, last }, after)
    }

    /// Adds a copy; returns its index.
    pub(super) fn copy(&mut self, from: Span, into: Span, after: &[Option<usize>]) -> usize {
        self.push(Action::Copy { from, into }, after)
    }

    /// The finished plan.
    pub(super) fn finish(self) -> Plan {
        self.plan
    }

    /// A step that does nothing, and comes after all of these: many steps can come after it for one edge each.
    pub(super) fn join(&mut self, after: &[Option<usize>]) -> usize {
        let nothing = Part::whole(0).of(Space::Scratch);
        self.copy(nothing, nothing, after)
    }

    /// Adds a step that comes after those named and, if it writes to the destination, after the agreement.
    fn push(&mut self, action: Action, after: &[Option<usize>]) -> usize {
        let mut after: Vec<usize> = after.iter().flatten().copied().collect();
        let into = match &action {
            Action::Send { .. } => None,
            Action::Receive { into, .. } | Action::Fold { into, .. } | Action::Copy { into, .. } => Some(into.space),
        };
        if into == Some(Space::Destination) {
            after.extend(self.gate.filter(|gate| !after.contains(gate)));
        }
        self.plan.steps.push(Step { action, after });
        self.plan.steps.len() - 1
    }
}

/// The plan of a rank that is alone: a copy, if there is anything to copy.
pub(super) fn alone(len: usize) -> Plan {
    let mut builder = Builder::new(1);
    if len > 0 {
        builder.copy(Part::whole(len).of(Space::Source), Part::whole(len).of(Space::Destination), &[]);
    }
    builder.finish()
}
