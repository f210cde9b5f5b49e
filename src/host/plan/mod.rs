//! Plans: which rank sends what to which rank, and which rank folds what. Pure values, no I/O.
//!
//! A plan is one rank's part of a collective among `n` participants, numbered from 0. Streams between two participants
//! are first in, first out: the k-th [`Action::Send`] of `a` to `b` matches the k-th [`Action::Receive`] of `b` from
//! `a`. Both have the same length. It may be zero: such a message carries only the agreement.
//!
//! Every plan of this module gives the following guarantees. The tests check each of them for every algorithm:
//!
//! - **Agreement.** A rank writes no byte of its destination before it has heard, transitively, from every participant.
//!   The first message in a direction of a link counts for this, whatever its length, and so does any message with
//!   bytes. A plan never waits for any other empty message. If a plan's data flow does not ensure agreement, the plan
//!   starts with a barrier. Exception: the plans of `gather_v`, `scatter_v` and `all_to_all_v` do not guarantee an
//!   agreement; they run only after the ranks have agreed by comparing counts.
//! - **In place.** Source and destination may be the same memory, in the layout of the collective. They are equal for
//!   `all_reduce`, `reduce`, `broadcast` and `all_to_all`. The destination is the rank's own block inside the source
//!   for `reduce_scatter` and for the root of `scatter`. The source is the rank's own block inside the destination for
//!   `all_gather` and for the root of `gather`. A destination byte is written only when every step that reads the
//!   source byte at the same address is done.
//! - **No races.** If two steps touch the same bytes and at least one of these steps writes, one step is `after` the
//!   other, directly or indirectly.
//! - **No deadlock**, whatever the links' capacity, provided that sends and receives of different links progress
//!   independently.
//! - **Order.** `after` names earlier steps only. A rank's sends on one link, and its receives from one link, can be
//!   done in step order.
//!
//! Not every collective has every algorithm: see [`cost::candidates`]. If a collective is asked for an algorithm that
//! it lacks, it uses its first candidate.
//!
//! Sizes are bytes. The caller has checked that `n >= 1`, that `me` and `root` are less than `n`, that there is one
//! block for each rank, that lengths are multiples of the element's size if anything is folded, and that the sum of all
//! lengths fits in memory.

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

/// The memory that a span lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    /// The caller's contribution; never written.
    Source,
    /// The memory for the caller's result. It may be the same memory as the source (in place).
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

/// One action of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send these bytes. The step is done when they have been handed to the link; then the span may be reused.
    Send { to: usize, from: Span },
    /// Receive as many bytes as the span holds.
    Receive { from: usize, into: Span },
    /// `into = inputs[0] op inputs[1] op …`, in this order. `into` may be one of the inputs. `last`: no further fold of
    /// this part follows on any rank, so an average divides here.
    Fold { into: Span, inputs: Vec<Span>, last: bool },
    /// Copy; does nothing if both are the same memory.
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
    /// Returns the approximate size of the plan in memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let of = |step: &Step| {
            let inputs = if let Action::Fold { inputs, .. } = &step.action { inputs.capacity() } else { 0 };
            step.after.capacity() * size_of::<usize>() + inputs * size_of::<Span>()
        };
        self.steps.capacity() * size_of::<Step>() + self.steps.iter().map(of).sum::<usize>()
    }
}
