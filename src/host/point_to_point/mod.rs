//! Sends and receives with tags: the engine of one rank.
//!
//! Messages travel over links that are opened when first needed. A message to a peer always takes the same link, so that two of
//! them never change places; the first link there is becomes that one, whoever opened it. Where both ranks open one at the same
//! moment there are two, and both are read.
//!
//! A short message (up to 64 KiB) is sent at once, and is done for the sender when the link has taken it. If no receive wants it yet, the
//! receiving rank buffers it: up to 64 MiB over all peers, shared out evenly, with at least 1 MiB for each. The sender keeps account. When
//! that is used up, its further messages to that peer wait until some were received: their sends stay pending, but links are read on, so
//! nothing else is held up. A long message is announced first. It moves when a receive has met it, in pieces, from the sender's memory to
//! the receiver's.
//!
//! A send or a receive may be given up at any time. No message is lost by that without a word. A short message that has begun to be written is sent. Any
//! other send that was given up leaves a note in its place, and the receive that meets the note fails. A message that has begun to come in is kept for the
//! next receive; where that is impossible, both ends are told.
//!
//! A message and a receive whose element types differ, or a message longer than the receive's memory, make both ends fail,
//! and nothing else: the message is used up. A short message is done for its sender by then, so only the receiver is told.
//!
//! Where two ranks take turns with short messages, neither a send nor a receive becomes a request (`direct`). The bytes on the link, the
//! order and the accounts are the same.
//!
//! Nothing here blocks but `Messages::wait_step` and leaving. Whatever is waited for, everything that can move moves, in both directions and
//! on all links, so two ranks that send to each other do not wait for each other.

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

/// Opens links to peers, and hands out those that peers have opened.
pub(crate) trait Connector {
    /// The kind of link.
    type Link: ByteLink;

    /// A link to `peer`: to send on it, or to notice the peer's death while it is waited for. Called at most once for a peer, unless it
    /// fails. Must not depend on the peer doing anything meanwhile: the peer may be in this function too, waiting for this rank.
    fn connect(&mut self, peer: usize) -> Result<Self::Link, Interrupted>;

    /// The links that peers have opened to this rank since the last call, with who opened them. Must not block. No more than
    /// one of each peer is taken.
    fn accept(&mut self) -> Vec<(usize, Self::Link)>;

    /// Whether no peer will open a link any more.
    fn is_complete(&self) -> bool {
        false
    }

    /// What becomes readable when a peer opens a link; `None` where that must be looked for every now and then.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Names a posted request until its outcome was taken or it was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ticket(u64);

/// What a message was: the outcome of a request that went well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope {
    /// Who sent it (for a send: this rank).
    pub(crate) source: usize,
    /// Its tag.
    pub(crate) tag: u64,
    /// Its element type.
    pub(crate) element: TypeTag,
    /// Its length, which for a receive may be less than the capacity. Not checked to be whole elements.
    pub(crate) bytes: usize,
}

/// Why a message did not get through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MessageError {
    /// The two sides mean different element types. Nothing was written.
    #[error("a message of {sent} met a receive of {expected} (the other side is rank {peer})")]
    TypeMismatch {
        /// The other side.
        peer: usize,
        /// What the sender said.
        sent: TypeTag,
        /// What the receiver said.
        expected: TypeTag,
    },
    /// The message is longer than the receive's memory. Nothing was written.
    #[error("a message of {sent} B met a receive of {capacity} B (the other side is rank {peer})")]
    Truncated {
        /// The other side.
        peer: usize,
        /// Length of the message in bytes.
        sent: usize,
        /// Length of the receive's memory in bytes.
        capacity: usize,
    },
    /// The receiver has no memory for the object.
    #[error("there is no memory for an object of {sent} B (the other side is rank {peer})")]
    NoMemory {
        /// The other side.
        peer: usize,
        /// Length of the object in bytes.
        sent: usize,
    },
    /// The object is larger than its receiver takes.
    #[error("an object of {sent} B met a receive that takes {most} B at most (Config::object_limit_bytes; the other side is rank {peer})")]
    TooLarge {
        /// The other side.
        peer: usize,
        /// Size of the object in bytes.
        sent: usize,
        /// The largest that the receiver takes.
        most: usize,
    },
    /// The sender gave the message up. Where it had met this receive by then, some of it may have been written.
    #[error("rank {peer} gave up sending this message after {:.3} s: it had not been received by then", after.as_secs_f64())]
    Withdrawn {
        /// The sender.
        peer: usize,
        /// How long it had tried.
        after: Duration,
    },
    /// The receiver gave up in the middle of a long message, and could not keep it, or its next receive could not take it.
    #[error(
        "rank {peer} gave up receiving this message in the middle of it, and no other receive there could take it: the message is lost"
    )]
    Abandoned {
        /// The receiver.
        peer: usize,
    },
    /// A peer is gone.
    #[error("the message's peer is gone: {0:?}")]
    Ended(AbortReason),
}

/// What a request leaves behind that was given up before it had ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GivenUp {
    /// Nothing: it had ended, no message had met it, or the whole communicator has ended.
    Nothing,
    /// The message of a send, which is on its way all the same.
    Sent(Envelope),
    /// A note to the receiver: the receive that meets it fails.
    Withdrawn,
    /// A message that had begun to come in, for the next receive.
    Kept {
        /// Who sent it.
        source: usize,
        /// Its length.
        bytes: usize,
    },
    /// Nothing of a message that had begun to come in: it is lost, and its sender is told unless it was done by then.
    Lost {
        /// Who sent it.
        source: usize,
        /// Its length.
        bytes: usize,
    },
}

/// How a request ended.
pub(crate) type Outcome = Result<Envelope, MessageError>;
