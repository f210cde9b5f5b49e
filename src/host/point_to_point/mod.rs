//! Sends and receives with tags: the engine of one rank.
//!
//! Messages travel over links that are opened when first needed. All messages to a peer take the same link, so they are
//! never reordered. The first available link is chosen, no matter which rank opened it. If both ranks open one at the
//! same moment, there are two, and both are read.
//!
//! A short message (up to 64 KiB) is sent at once, and the send is complete when the link has taken it. If no receive
//! matches yet, the receiving rank buffers it: up to 64 MiB over all peers, shared out evenly, with at least 1 MiB for
//! each. This share is the sender's credit with the receiving rank, and the sender keeps track of it. When the credit
//! is exhausted, further messages to that rank wait until earlier ones have been received. Their sends stay pending,
//! but links are still read, so nothing else is held up. A long message is announced first. When a receive has matched
//! it, the message moves in pieces from the sender's memory to the receiver's.
//!
//! A send or a receive may be given up at any time. No message is lost without notification. A short message that has
//! begun to be written is sent. Any other send that is given up leaves a note in its place, and the receive that
//! matches the note fails. A message that has begun to arrive is kept for the next receive. If that is impossible, both
//! ends are notified.
//!
//! If the element types of a message and its receive differ, or a message is longer than the receive's memory, both
//! ends fail, but nothing else does: the message is consumed. The send of a short message is complete by then, so only
//! the receiver is notified.
//!
//! When two ranks take turns with short messages, neither a send nor a receive becomes a request (`direct`). The bytes
//! on the link, the order and the accounts are the same.
//!
//! Only `Messages::wait_step` and leaving block. During every wait, all links make progress in both directions, so two
//! ranks that send to each other do not block each other.

mod channel;
mod direct;
mod frame;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod incoming;
mod links;
mod long_messages;
mod matching;
mod matching_state;
mod messages;
mod outgoing;
mod requests;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::call::element::TypeTag;

use super::abort_reason::{AbortReason, Interrupted};
use super::link::ByteLink;

pub(crate) use direct::Attempt;
pub(crate) use messages::Messages;

/// A source of links: opens them to peers, and returns those that peers have opened.
pub(crate) trait Connector {
    /// The kind of link.
    type Link: ByteLink;

    /// Returns a link to `peer`, to send on it or to notice the peer's death while waiting for it. Called at most once
    /// for each peer, unless it fails. An implementation must not depend on the peer doing anything meanwhile: the peer
    /// may be in this function too, and wait for this rank.
    fn connect(&mut self, peer: usize) -> Result<Self::Link, Interrupted>;

    /// Returns the links that peers have opened to this rank since the last call, with the ranks that opened them. Must
    /// not block. At most one link of each peer is used.
    fn accept(&mut self) -> Vec<(usize, Self::Link)>;

    /// Whether no peer will open another link.
    fn is_complete(&self) -> bool {
        false
    }

    /// Returns a descriptor that becomes readable when a peer opens a link; `None` if the connector must be polled now
    /// and then.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// The identifier of a posted request, valid until its outcome is taken or it is cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ticket(u64);

/// The description of a message: the outcome of a successful request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope {
    /// The rank that sent it (for a send: this rank).
    pub(crate) source: usize,
    /// Its tag.
    pub(crate) tag: u64,
    /// Its element type.
    pub(crate) element: TypeTag,
    /// Its length, which for a receive may be less than the capacity. It is not checked to be a whole number of
    /// elements.
    pub(crate) bytes: usize,
}

/// The reason why a message was not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MessageError {
    /// The two sides use different element types. Nothing was written.
    #[error("a message of {sent} does not match a receive of {expected} (the other side is rank {peer})")]
    TypeMismatch {
        /// The other side.
        peer: usize,
        /// The sender's element type.
        sent: TypeTag,
        /// The receiver's element type.
        expected: TypeTag,
    },
    /// The message is longer than the receive's memory. Nothing was written.
    #[error("a message of {sent} B does not fit a receive of {capacity} B (the other side is rank {peer})")]
    Truncated {
        /// The other side.
        peer: usize,
        /// Length of the message in bytes.
        sent: usize,
        /// Length of the receive's memory in bytes.
        capacity: usize,
    },
    /// The receiver has no memory for the object.
    #[error("the receiver has no memory for an object of {sent} B (the other side is rank {peer})")]
    NoMemory {
        /// The other side.
        peer: usize,
        /// Length of the object in bytes.
        sent: usize,
    },
    /// The object is larger than its receiver accepts.
    #[error(
        "an object of {sent} B is larger than the limit of the receive, {most} B (Config::object_limit_bytes; the other side is rank \
         {peer})"
    )]
    TooLarge {
        /// The other side.
        peer: usize,
        /// Size of the object in bytes.
        sent: usize,
        /// The largest object that the receiver accepts.
        most: usize,
    },
    /// The sender gave the message up. If it had been matched with this receive by then, some of it may have been
    /// written.
    #[error("rank {peer} gave up sending this message after {:.3} s: it had not been received by then", after.as_secs_f64())]
    Withdrawn {
        /// The sender.
        peer: usize,
        /// How long the sender had tried.
        after: Duration,
    },
    /// The receive gave up in the middle of a long message. The receiver then could not keep the message, or its next
    /// receive could not take the message.
    #[error("rank {peer} gave up receiving this message partway, and no other receive there could take it: the message is lost")]
    Abandoned {
        /// The receiver.
        peer: usize,
    },
    /// A peer is gone.
    #[error("the message's peer is gone: {0:?}")]
    Ended(AbortReason),
}

/// What remains of a request that was given up before it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GivenUp {
    /// Nothing: the request had already ended or was not yet matched, or the whole communicator had ended.
    Nothing,
    /// The message of a send, which is sent anyway.
    Sent(Envelope),
    /// A note to the receiver: the receive that matches it fails.
    Withdrawn,
    /// A message that had begun to arrive, for the next receive.
    Kept {
        /// The rank that sent it.
        source: usize,
        /// Its length.
        bytes: usize,
    },
    /// Nothing: a message that had begun to arrive is lost. Its sender is notified, unless it has sent the whole
    /// message.
    Lost {
        /// The rank that sent it.
        source: usize,
        /// Its length.
        bytes: usize,
    },
}

/// The result of a request.
pub(crate) type Outcome = Result<Envelope, MessageError>;
