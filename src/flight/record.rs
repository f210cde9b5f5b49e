//! The records that the recorder returns, and the communicator that they belong to.

use std::sync::Arc;
use std::time::Duration;

use crate::call::element::TypeTag;
use crate::call::{Call, CallKind, Collective};
use crate::error::{Error, Peer};

/// The backend of a recorded call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// The host.
    Host,
    /// A device. The call is recorded when it is queued, and a check about every 100 milliseconds finds out whether it
    /// has ended. A call captured into a graph counts as finished when the capture has ended. The record of a call on
    /// CUDA's per-thread default stream stays in the state `Queued`.
    Device,
}

/// The state of a recorded call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// A background call that has not begun yet, or a call that is queued on a device.
    Queued,
    /// Under way.
    Started,
    /// Ended without an error.
    Finished,
    /// Ended with an error.
    Failed,
}

/// One call in a [`Recorder`](crate::flight::Recorder).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Record {
    /// The call's number among the collectives, messages or device calls of its communicator on this rank.
    pub number: u64,
    /// The backend of the call.
    pub backend: Backend,
    /// The collective, or `send` or `recv` for a message.
    pub kind: CallKind,
    /// The number by which ranks compare their collectives. Errors quote it. `None` for a message.
    pub sequence: Option<u64>,
    /// The reduction op: `sum`, `avg`, `custom op #5d3f21`.
    pub op: Option<String>,
    /// The element type: `f32`, `[u8; 16]`, `plain data of 12 B`.
    pub element: String,
    /// The number of elements in each block, in the whole vector, or in the message, depending on the kind of call. If
    /// the call has a list of counts, this is their sum. It is 0 if the number may differ between ranks.
    pub count: u64,
    /// 24 bits of a hash of the counts, if every rank passes the counts as a list.
    pub counts_hash: Option<u32>,
    /// The root, if the call has one.
    pub root: Option<usize>,
    /// The other end of a message; `None` for a receive from any rank.
    pub peer: Option<usize>,
    /// The tag of a message. The crate's own messages have tags from 2⁶³ on.
    pub tag: Option<u64>,
    /// The start time, in nanoseconds since 1970. For a message that ended without a wait, this can be the start time
    /// of one of the 16 messages before it. For a collective that ended without a wait, because all other ranks were
    /// already waiting, it is `None` in 15 of 16 cases.
    pub started_ns: Option<u64>,
    /// The end time, in nanoseconds since 1970. `None` until the call ends, and also afterwards if the call took only a
    /// few microseconds and the clock was not read.
    pub finished_ns: Option<u64>,
    /// The state of the call.
    pub state: State,
    /// The error, if the call failed. If several device calls fail together, only the record of the first of these
    /// calls contains the error.
    pub error: Option<Error>,
    /// The ranks for which a collective still waits, as this rank knew them at most 50 milliseconds ago.
    pub waiting_for: Vec<usize>,
}

/// The description of a communicator, known once it has been created.
#[derive(Debug, Clone)]
pub(crate) struct About {
    /// An id that is the same on every rank and differs from the ids of other communicators.
    pub(crate) id: u64,
    /// The name, the same on every rank: `world`, or the name of its parent and a description of the split.
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) peers: Arc<[Peer]>,
    /// The ranks of the peers in the job.
    pub(crate) world_ranks: Arc<[usize]>,
    /// A description of how the communicator's ranks are connected.
    pub(crate) wiring: String,
    pub(crate) timeout: Duration,
}

impl About {
    /// Returns a short id for a communicator, derived from the random id that its ranks share.
    pub(crate) fn id_of(drawn: [u8; 16]) -> u64 {
        drawn.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }
}

/// The value that stands for no root or no peer.
const NOBODY: u32 = u32::MAX;

/// The kinds of messages, in place of a collective's kind.
const SEND: u64 = 64;
const RECEIVE: u64 = 65;

/// A message as it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) sends: bool,
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u64,
    pub(crate) count: u64,
    pub(crate) element: TypeTag,
}

impl Message {
    /// Encodes the message in the form of a call's fingerprint: tag, count, type, peer and kind.
    #[inline]
    pub(super) fn words(&self) -> [u64; 4] {
        let kind = if self.sends { SEND } else { RECEIVE };
        let peer = self.peer.map_or(NOBODY, |peer| peer as u32);
        [self.tag, self.count, u64::from(self.element.to_code()) << 32, u64::from(peer) | kind << 32]
    }
}

/// Describes the call that four words of a ring encode, in the form that errors use: `all_reduce(sum, f32, count 4)
/// number 7`, `recv from rank 1, tag 5`.
pub(super) fn in_words(backend: Backend, words: [u64; 4]) -> Option<String> {
    let record = Record::decode(0, backend, words)?;
    let words = match (Call::from_record(words).filter(|_| record.sequence.is_some()), record.peer) {
        (Some(call), _) => call.to_string(),
        (None, Some(peer)) => format!("{} {} rank {peer}", record.kind, if record.kind == CallKind::Send { "to" } else { "from" }),
        (None, None) => "recv from any rank".to_owned(),
    };
    // Larger tags belong to the crate itself.
    let tag = record.tag.filter(|tag| (1..1 << 63).contains(tag)).map_or_else(String::new, |tag| format!(", tag {tag}"));
    let place = if backend == Backend::Device { " on the device" } else { "" };
    Some(words + &tag + place)
}

impl Record {
    /// Decodes four words of a ring; `None` for words that encode no call.
    pub(super) fn decode(number: u64, backend: Backend, words: [u64; 4]) -> Option<Self> {
        let kind = words[3] >> 32 & 0xff;
        let blank = Self {
            number,
            backend,
            kind: if kind == SEND { CallKind::Send } else { CallKind::Recv },
            sequence: None,
            op: None,
            element: TypeTag::from_code((words[2] >> 32) as u32)?.to_string(),
            count: words[1],
            counts_hash: None,
            root: None,
            peer: None,
            tag: None,
            started_ns: None,
            finished_ns: None,
            state: State::Started,
            error: None,
            waiting_for: Vec::new(),
        };
        if kind == SEND || kind == RECEIVE {
            let peer = words[3] as u32;
            return Some(Self { peer: (peer != NOBODY).then_some(peer as usize), tag: Some(words[0]), ..blank });
        }
        let call = Call::from_record(words)?;
        Some(Self {
            kind: call.call_kind(),
            sequence: Some(call.sequence),
            op: call.op_name(),
            count: if call.kind == Collective::Barrier { 0 } else { call.count },
            counts_hash: call.lists_counts().then_some(call.counts_hash as u32),
            root: call.root.map(|root| root as usize),
            ..blank
        })
    }
}
