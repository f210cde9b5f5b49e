//! Who sends what to whom, and who folds what: pure values, no I/O.
//!
//! A plan is one rank's part of a collective among `n` participants, numbered from 0. Streams between two participants are first in, first
//! out: the k-th [`Action::Send`] of `a` to `b` meets the k-th [`Action::Receive`] of `b` from `a`. Both have the same length. It may be
//! zero: such a message carries the agreement alone.
//!
//! Every plan of this module keeps these promises. The tests check each of them for every algorithm:
//!
//! - **Agreement.** A rank writes no byte of its destination before it has heard, transitively, from every participant. What counts as
//!   heard is the first message of a direction of a link (whatever its length), and messages with bytes. A plan never waits for anything
//!   else that has no bytes. Plans whose data flow does not bring this about start with a barrier. Those of `gather_v`, `scatter_v` and
//!   `all_to_all_v` do not promise this: they are run when the ranks have agreed, which they have by comparing counts.
//! - **In place.** Source and destination may be the same memory, in the layout of the collective: equal for `all_reduce`,
//!   `reduce`, `broadcast` and `all_to_all`; the destination is the rank's own block inside the source for `reduce_scatter` and
//!   for the root of `scatter`; the source is the own block inside the destination for `all_gather` and for the root of
//!   `gather`. No destination byte is written before every step that reads the source byte at that place is done.
//! - **No races.** Of two steps that touch the same bytes, one of them writing, one is `after` the other, directly or not.
//! - **No deadlock**, whatever the links' capacity, provided that sends and receives of different links progress independently.
//! - `after` names earlier steps only; a rank's sends on one link, and its receives from one link, can be done in step order.
//!
//! Not every collective has every algorithm: see [`cost::candidates`]. One that is asked for an algorithm that it lacks uses its first
//! candidate.
//!
//! Sizes are bytes. Whoever calls has checked that `n >= 1`, that `me` and `root` are below `n`, that there is one block for
//! each rank, that lengths are multiples of the element's size where something is folded, and that the sum of all lengths
//! fits in memory.

mod all_gather;
mod all_to_all;
mod builder;
pub(crate) mod cost;
mod direct;
mod reduce;
mod ring;
mod rooted;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use builder::Blocks;
pub(crate) use shape::Shape;

/// Which memory a span lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    /// What the caller contributes; never written.
    Source,
    /// Where the caller wants the result. May be the same memory as the source (in place).
    Destination,
    /// The plan's own memory, not initialised.
    Scratch,
}

/// A range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) space: Space,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send these bytes. Done when they have been handed to the link: the span may be reused.
    Send { to: usize, from: Span },
    /// Receive as many bytes as the span has.
    Receive { from: usize, into: Span },
    /// `into = inputs[0] op inputs[1] op …`, in this order. `into` may be one of the inputs. `last`: no further fold of this
    /// part follows on any rank, so an average divides here.
    Fold { into: Span, inputs: Vec<Span>, last: bool },
    /// Copy; nothing where both are the same memory.
    Copy { from: Span, into: Span },
}

/// An action and the earlier steps of this rank (by index) that must be done before it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) after: Vec<usize>,
}

/// One rank's part of a collective.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    pub(crate) scratch_bytes: usize,
}

impl Plan {
    /// About how many bytes of memory it takes.
    pub(crate) fn bytes(&self) -> usize {
        let of = |step: &Step| {
            let inputs = if let Action::Fold { inputs, .. } = &step.action { inputs.capacity() } else { 0 };
            step.after.capacity() * size_of::<usize>() + inputs * size_of::<Span>()
        };
        self.steps.capacity() * size_of::<Step>() + self.steps.iter().map(of).sum::<usize>()
    }
}
