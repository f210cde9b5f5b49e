//! Who sends what to whom, and who folds what: pure values, no I/O.
//!
//! A plan is one rank's part of a collective among `n` participants, numbered from 0. Streams between two participants are
//! first in, first out: the k-th [`Action::Send`] of `a` to `b` meets the k-th [`Action::Receive`] of `b` from `a`, and both
//! have the same length (zero is allowed: it carries the agreement alone).

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
