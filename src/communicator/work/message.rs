//! What a message is: with whom, under which tag, of which type, where its bytes lie, and what came of it.

use std::time::Duration;

use crate::call::buffer::{HostMemory, HostMemoryMut};
use crate::call::element::{Data, TypeTag};
use crate::flight::{self, Message};
use crate::host::point_to_point::Envelope as Arrived;
use crate::observe::{CallReport, Watch};

/// Tags with this bit are the crate's own.
pub(in crate::communicator) const INTERNAL_TAG: u64 = 1 << 63;

/// The messages of tagged barriers, which have the barrier's tag besides. Other internal tags have a bit above this one's.
pub(in crate::communicator) const BARRIER_TAG: u64 = INTERNAL_TAG | 1 << 59;

/// The other end of a message: a rank, or any; the tag; and how long the call may take. A rank's number is one, under tag 0.
///
/// ```
/// # use collectives::Envelope;
/// # use std::time::Duration;
/// let envelope = Envelope::rank(3).tag(7).timeout(Duration::from_secs(1));
/// assert_ne!(envelope, Envelope::from(3));
/// assert_eq!(Envelope::rank(3), 3.into());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "it says where a message goes, or where it comes from"]
pub struct Envelope {
    pub(in crate::communicator) peer: Option<usize>,
    pub(in crate::communicator) tag: u64,
    pub(in crate::communicator) timeout: Option<Duration>,
}

impl Envelope {
    /// To a rank, or from it.
    pub const fn rank(rank: usize) -> Self {
        Self { peer: Some(rank), tag: 0, timeout: None }
    }

    /// From whichever rank sends first under the tag.
    #[doc(alias = "MPI_ANY_SOURCE")]
    pub const fn any() -> Self {
        Self { peer: None, tag: 0, timeout: None }
    }

    /// Under a tag below 2⁶³, in place of 0.
    pub const fn tag(self, tag: u64) -> Self {
        Self { tag, ..self }
    }

    /// Within a time of its own, in place of [`Communicator::timeout`](crate::Communicator::timeout).
    pub const fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }
}

impl From<usize> for Envelope {
    fn from(rank: usize) -> Self {
        Self::rank(rank)
    }
}

/// What a receive got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Who sent it.
    pub source: usize,
    /// The tag it was sent under.
    pub tag: u64,
    /// How many elements came: the buffer's length or less.
    pub count: usize,
}

/// What is sent or received: with whom, under which tag, of which type.
#[derive(Debug, Clone, Copy)]
pub(in crate::communicator) struct MessageContext {
    /// `None`: from any rank.
    pub(in crate::communicator) peer: Option<usize>,
    pub(in crate::communicator) tag: u64,
    pub(in crate::communicator) element: TypeTag,
    pub(in crate::communicator) element_bytes: usize,
}

impl MessageContext {
    /// The message as it is put on record.
    #[inline]
    pub(in crate::communicator) fn recorded(&self, sends: bool, bytes: usize) -> Message {
        let MessageContext { peer, tag, element, element_bytes } = *self;
        Message { sends, peer, tag, count: (bytes / element_bytes) as u64, element }
    }

    /// `send to rank 3, tag 7`.
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

    /// What came, in the caller's terms.
    #[inline]
    pub(in crate::communicator) fn received(&self, envelope: Arrived) -> Received {
        Received { source: envelope.source, tag: envelope.tag, count: envelope.bytes / self.element_bytes }
    }
}

/// Where a posted message's bytes are.
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
    /// An object of at most so many bytes is received, into memory that is made for it.
    #[cfg_attr(not(feature = "serde"), expect(dead_code, reason = "there are no objects without serde"))]
    Object {
        most: usize,
    },
}

impl MessageBuffer {
    /// How many bytes there are; none where that is not known yet.
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

    /// The message as it is put on record.
    #[inline]
    pub(in crate::communicator) fn recorded(&self, context: &MessageContext) -> Message {
        context.recorded(self.sends(), self.bytes())
    }

    /// The message, for those who listen.
    pub(in crate::communicator) fn report<'a>(&self, watch: &'a Watch, context: &MessageContext) -> CallReport<'a> {
        watch.message(&self.recorded(context), flight::Backend::Host, self.bytes())
    }
}

/// Where a message that is sent lies.
#[inline]
pub(in crate::communicator) fn send_place<T: Data>(memory: HostMemory<'_, T>) -> MessageBuffer {
    let (data, bytes) = memory.parts();
    MessageBuffer::Send { data, bytes }
}

/// Where a message that is received goes.
#[inline]
pub(in crate::communicator) fn receive_place<T: Data>(mut memory: HostMemoryMut<'_, T>) -> MessageBuffer {
    let (into, bytes) = memory.parts();
    MessageBuffer::Receive { into, bytes }
}
