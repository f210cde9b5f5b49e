//! Records as they are given out, and whose they are.

use std::sync::Arc;
use std::time::Duration;

use crate::call::element::TypeTag;
use crate::call::{Call, CallKind, Collective};
use crate::error::{Error, Peer};

/// Where a recorded call ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// On the host.
    Host,
    /// On a device: on record when it is queued. Whether it is over is looked at about every 100 milliseconds; one that was captured into a
    /// graph counts as over when the capture is, and one on the calling thread's own stream stays queued.
    Device,
}

/// How far a recorded call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Started in the background and not taken up yet, or queued on a device.
    Queued,
    /// Under way.
    Started,
    /// Over, and it went well.
    Finished,
    /// Over, with an error.
    Failed,
}

/// One call in a [`Recorder`](crate::flight::Recorder).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Record {
    /// Its number among the collectives, messages or device calls of its communicator on this rank.
    pub number: u64,
    /// Where it ran.
    pub backend: Backend,
    /// The collective, or which end of a message.
    pub kind: CallKind,
    /// For collectives the number by which ranks compare them, as errors name it.
    pub sequence: Option<u64>,
    /// What it reduces with: `sum`, `avg`, `custom op #5d3f21`.
    pub op: Option<String>,
    /// The element type: `f32`, `[u8; 16]`, `plain data of 12 B`.
    pub element: String,
    /// Elements in each block, of the whole vector (where counts are a list: of all blocks), or of the message; 0 where ranks may differ.
    pub count: u64,
    /// 24 bits of a hash of the counts that every rank passes, where they are a list.
    pub counts_hash: Option<u32>,
    /// The root, where there is one.
    pub root: Option<usize>,
    /// For messages the other end; `None` for a receive from any rank.
    pub peer: Option<usize>,
    /// For messages the tag; from 2⁶³ on in the crate's own.
    pub tag: Option<u64>,
    /// When it was started, in nanoseconds since 1970. For a message that was over at once, of the last look at the clock for one, at
    /// most 16 messages before; `None` for 15 of 16 collectives that were over at once because all other ranks were there already.
    pub started_ns: Option<u64>,
    /// When it was over, in nanoseconds since 1970. `None` while it is not, and for calls that were over within a few microseconds,
    /// which nobody timed.
    pub finished_ns: Option<u64>,
    /// How far it is.
    pub state: State,
    /// Why it failed. Of several device calls that fail together the first has it.
    pub error: Option<Error>,
    /// For a collective that is under way: whom it waits for, as far as is known. Up to date to 50 milliseconds.
    pub waiting_for: Vec<usize>,
}

/// What is known of a communicator once it is made.
#[derive(Debug, Clone)]
pub(crate) struct About {
    /// The same on every rank, and on no other communicator's.
    pub(crate) id: u64,
    /// The same on every rank: `world`, or what it was split from and how.
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) peers: Arc<[Peer]>,
    /// How its ranks reach each other, in words.
    pub(crate) wiring: String,
    pub(crate) timeout: Duration,
}

impl About {
    /// A short number for a communicator, made from the long one that its ranks drew.
    pub(crate) fn id_of(drawn: [u8; 16]) -> u64 {
        drawn.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }
}

/// No root, or no peer.
const NOBODY: u32 = u32::MAX;

/// The numbers that stand where a collective has its kind.
const SEND: u64 = 64;
const RECEIVE: u64 = 65;

/// A message, as it is put on record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) sends: bool,
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u64,
    pub(crate) count: u64,
    pub(crate) element: TypeTag,
}

impl Message {
    /// In the form of a call's fingerprint: tag, count, type, peer and kind.
    #[inline]
    pub(super) fn words(&self) -> [u64; 4] {
        let kind = if self.sends { SEND } else { RECEIVE };
        let peer = self.peer.map_or(NOBODY, |peer| peer as u32);
        [self.tag, self.count, u64::from(self.element.to_code()) << 32, u64::from(peer) | kind << 32]
    }
}

/// What four words of a ring say, as errors name it: `all_reduce(sum, f32, count 4) number 7`, `recv from rank 1, tag 5`.
pub(super) fn in_words(backend: Backend, words: [u64; 4]) -> Option<String> {
    let record = Record::decode(0, backend, words)?;
    let words = match (Call::from_record(words).filter(|_| record.sequence.is_some()), record.peer) {
        (Some(call), _) => call.to_string(),
        (None, Some(peer)) => format!("{} {} rank {peer}", record.kind, if record.kind == CallKind::Send { "to" } else { "from" }),
        (None, None) => "recv from any rank".to_owned(),
    };
    // Larger tags are the crate's own.
    let tag = record.tag.filter(|tag| (1..1 << 63).contains(tag)).map_or_else(String::new, |tag| format!(", tag {tag}"));
    let place = if backend == Backend::Device { " on the device" } else { "" };
    Some(words + &tag + place)
}

impl Record {
    /// What four words of a ring say; `None` for words that no call has.
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
