//! The parts of a message: its peer, its tag, its element type, its memory, and the result of a receive.

use std::time::Duration;

use crate::call::buffer::{HostMemory, HostMemoryMut};
use crate::call::element::{Data, TypeTag};
use crate::flight::{self, Message};
use crate::host::point_to_point::Envelope as Arrived;
use crate::observe::{CallReport, Watch};

/// The bit that marks the tags of the crate's own messages.
pub(in crate::communicator) const INTERNAL_TAG: u64 = 1 << 63;

/// The bits that mark the messages of tagged barriers; the barrier's tag is added to them. Other internal tags use bits
/// between these two.
pub(in crate::communicator) const BARRIER_TAG: u64 = INTERNAL_TAG | 1 << 59;

/// The parameters of a message: its other end (one rank, or any rank), its tag, and how long the call may take. A plain
/// rank number stands for an envelope with this rank and tag 0.
///
/// ```
/// # use collectives::Envelope;
/// # use std::time::Duration;
/// let envelope = Envelope::rank(3).tag(7).timeout(Duration::from_secs(1));
/// assert_ne!(envelope, Envelope::from(3));
/// assert_eq!(Envelope::rank(3), 3.into());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an envelope does nothing until it is passed to a send or a receive"]
pub struct Envelope {
    pub(in crate::communicator) peer: Option<usize>,
    pub(in crate::communicator) tag: u64,
    pub(in crate::communicator) timeout: Option<Duration>,
}

impl Envelope {
    /// Names the rank that a message goes to or comes from.
    pub const fn rank(rank: usize) -> Self {
        Self { peer: Some(rank), tag: 0, timeout: None }
    }

    /// Accepts a message from any rank: the receive takes the first message that arrives with the envelope's tag.
    #[doc(alias = "MPI_ANY_SOURCE")]
    pub const fn any() -> Self {
        Self { peer: None, tag: 0, timeout: None }
    }

    /// Sets the tag, which is otherwise 0. A tag must be below 2⁶³.
    pub const fn tag(self, tag: u64) -> Self {
        Self { tag, ..self }
    }

    /// Sets a timeout for this message, in place of [`Communicator::timeout`](crate::Communicator::timeout).
    pub const fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }
}

impl From<usize> for Envelope {
    fn from(rank: usize) -> Self {
        Self::rank(rank)
    }
}

/// The result of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The rank that sent the message.
    pub source: usize,
    /// The tag that the message was sent with.
    pub tag: u64,
    /// The number of elements received: the buffer's length or less.
    pub count: usize,
}

/// The peer, the tag and the element type of a message.
#[derive(Debug, Clone, Copy)]
pub(in crate::communicator) struct MessageContext {
    /// The other rank; `None` to receive from any rank.
    pub(in crate::communicator) peer: Option<usize>,
    pub(in crate::communicator) tag: u64,
    pub(in crate::communicator) element: TypeTag,
    pub(in crate::communicator) element_bytes: usize,
}

impl MessageContext {
    /// Returns the message as the flight recorder stores it.
    #[inline]
    pub(in crate::communicator) fn recorded(&self, sends: bool, bytes: usize) -> Message {
        let MessageContext { peer, tag, element, element_bytes } = *self;
        Message { sends, peer, tag, count: (bytes / element_bytes) as u64, element }
    }

    /// Describes the message: `send to rank 3, tag 7`.
    pub(in crate::communicator) fn doing(&self, sends: bool) -> String {
        let what = if self.element == TypeTag::Object { "_object" } else { "" };
        let whom = match (sends, self.peer) {
            (true, Some(peer)) => format!("send{what} to rank {peer}"),
            (false, Some(peer)) => format!("recv{what} from rank {peer}"),
            (_, None) => format!("recv{what} from any rank"),
        };
        match self.tag {
            0 => whom,
            tag if tag >> 32 == BARRIER_TAG >> 32 => format!("tagged_barrier({}), {whom}", tag as u32),
            tag if tag & INTERNAL_TAG != 0 => format!("{whom} (internal)"),
            tag => format!("{whom}, tag {tag}"),
        }
    }

    /// Returns what was received, in the caller's terms.
    #[inline]
    pub(in crate::communicator) fn received(&self, envelope: Arrived) -> Received {
        Received { source: envelope.source, tag: envelope.tag, count: envelope.bytes / self.element_bytes }
    }
}

/// The memory of a posted message.
#[derive(Debug, Clone, Copy)]
pub(in crate::communicator) enum MessageBuffer {
    Send {
        data: *const u8,
        bytes: usize,
    },
    Receive {
        into: *mut u8,
        bytes: usize,
    },
    /// Receives an object of at most `most` bytes, into memory that is allocated for it.
    #[cfg_attr(not(feature = "serde"), expect(dead_code, reason = "there are no objects without serde"))]
    Object {
        most: usize,
    },
}

impl MessageBuffer {
    /// Returns the message's length in bytes; 0 if it is not known yet.
    #[inline]
    pub(in crate::communicator) fn bytes(&self) -> usize {
        match self {
            MessageBuffer::Send { bytes, .. } | MessageBuffer::Receive { bytes, .. } => *bytes,
            MessageBuffer::Object { .. } => 0,
        }
    }

    #[inline]
    pub(in crate::communicator) fn sends(&self) -> bool {
        matches!(self, MessageBuffer::Send { .. })
    }

    /// Returns the message as the flight recorder stores it.
    #[inline]
    pub(in crate::communicator) fn recorded(&self, context: &MessageContext) -> Message {
        context.recorded(self.sends(), self.bytes())
    }

    /// Returns the message's report for observers.
    pub(in crate::communicator) fn report<'a>(&self, watch: &'a Watch, context: &MessageContext) -> CallReport<'a> {
        watch.message(&self.recorded(context), flight::Backend::Host, self.bytes())
    }
}

/// Returns the memory of a message to send.
#[inline]
pub(in crate::communicator) fn send_place<T: Data>(memory: HostMemory<'_, T>) -> MessageBuffer {
    let (data, bytes) = memory.parts();
    MessageBuffer::Send { data, bytes }
}

/// Returns the memory for a message to receive.
#[inline]
pub(in crate::communicator) fn receive_place<T: Data>(mut memory: HostMemoryMut<'_, T>) -> MessageBuffer {
    let (into, bytes) = memory.parts();
    MessageBuffer::Receive { into, bytes }
}
