//! Who sends what to whom, and who folds what: pure values, no I/O.
//!
//! A plan is one rank's part of a collective among `n` participants, numbered from 0. Streams between two participants are
//! first in, first out: the k-th [`Action::Send`] of `a` to `b` meets the k-th [`Action::Receive`] of `b` from `a`, and both
//! have the same length (zero is allowed: it carries the agreement alone).

mod all_reduce;
mod cost;
mod draft;
mod moves;
mod reduce;
#[cfg(test)]
mod simulator;

pub(crate) use cost::{Algorithm, Choice};

/// How much is sent at once where sending, receiving and folding are to overlap.
pub(crate) const SEGMENT_BYTES: usize = 128 << 10;

/// Participant `me` of `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) n: usize,
    pub(crate) me: usize,
}

/// All-reduce of `bytes`.
pub(crate) fn all_reduce(algorithm: Algorithm, Place { n, me }: Place, bytes: usize, element_bytes: usize, segment_bytes: usize) -> Plan {
    match algorithm {
        Algorithm::Doubling => all_reduce::doubling(n, me, bytes),
        Algorithm::Direct => all_reduce::direct(n, me, bytes, element_bytes),
        _ => all_reduce::ring(n, me, bytes, element_bytes, segment_bytes),
    }
}

/// Reduce of `bytes` to participant `root`.
pub(crate) fn reduce(
    algorithm: Algorithm,
    Place { n, me }: Place,
    bytes: usize,
    element_bytes: usize,
    segment_bytes: usize,
    root: usize,
) -> Plan {
    match algorithm {
        Algorithm::Tree => reduce::binomial(n, me, bytes, root),
        Algorithm::Direct => reduce::scatter_gather(n, me, bytes, element_bytes, None, root),
        _ => reduce::scatter_gather(n, me, bytes, element_bytes, Some(segment_bytes), root),
    }
}

/// Reduce-scatter of blocks of these lengths in bytes.
pub(crate) fn reduce_scatter(
    algorithm: Algorithm,
    Place { n, me }: Place,
    lengths: &[usize],
    element_bytes: usize,
    segment_bytes: usize,
) -> Plan {
    match algorithm {
        Algorithm::Direct => reduce::scatter_direct(n, me, lengths),
        _ => reduce::scatter_ring(n, me, lengths, element_bytes, segment_bytes),
    }
}

/// Broadcast of `bytes` from participant `root`.
pub(crate) fn broadcast(algorithm: Algorithm, Place { n, me }: Place, bytes: usize, segment_bytes: usize, root: usize) -> Plan {
    match algorithm {
        Algorithm::Tree => moves::broadcast_tree(n, me, bytes, root),
        _ => moves::broadcast_chain(n, me, bytes, segment_bytes, root),
    }
}

/// All-gather of blocks of these lengths in bytes.
pub(crate) fn all_gather(algorithm: Algorithm, Place { n, me }: Place, lengths: &[usize], segment_bytes: usize) -> Plan {
    match algorithm {
        Algorithm::Direct => moves::all_gather_direct(n, me, lengths),
        _ => moves::all_gather_ring(n, me, lengths, segment_bytes),
    }
}

/// Gather to participant `root`, which knows all lengths; each knows its own.
pub(crate) fn gather(Place { n, me }: Place, own: usize, lengths: Option<&[usize]>, root: usize) -> Plan {
    moves::gather(n, me, own, lengths, root)
}

/// Scatter from participant `root`, which knows all lengths; each knows its own.
pub(crate) fn scatter(Place { n, me }: Place, own: usize, lengths: Option<&[usize]>, root: usize) -> Plan {
    moves::scatter(n, me, own, lengths, root)
}

/// All-to-all of blocks of these lengths in bytes.
pub(crate) fn all_to_all(Place { n, me }: Place, sends: &[usize], receives: &[usize], in_place: bool) -> Plan {
    moves::all_to_all(n, me, sends, receives, in_place)
}

/// Everyone hears from everyone.
pub(crate) fn barrier(Place { n, me }: Place) -> Plan {
    moves::barrier(n, me)
}

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
