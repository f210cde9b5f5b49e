//! Headers for comparing the calls that are not compared in a collective: messages, and the collectives of groups of
//! several communicators. Before a rank queues such a call, it sends a header over the host backend. The receiver waits
//! for the header, and compares it with its own call.
//!
//! After a rank has sent its first header, other ranks rely on its calls. So either these calls are queued, or the
//! communicator ends. If an announced call were not queued, NCCL would match the other end with a later call, perhaps
//! of a different length.
//!
//! A rank waits for headers while it holds its turn at the device backend, so its other threads cannot queue calls in
//! this time. The reason is the order of kernels:
//! - NCCL runs the kernels of one communicator in the order of their launches, across streams. So sends, receives and
//!   collectives have one common order, which must be the same on both ranks.
//! - A send that is larger than NCCL's buffers does not end before its receive begins.
//! - Suppose that rank 0 queues a send and then an `all_reduce`, and that rank 1 waits for the header without holding
//!   its turn. Then another thread of rank 1 could queue its `all_reduce` before the receive, although the receive was
//!   called first. Rank 0's device would run the send, and rank 1's device the `all_reduce`. Each would wait for the
//!   other.
//!
//! Without the turn, rank 1 would have to know every send that other ranks queued before their `all_reduce`. A header
//! does not contain this information. With the turn, calls are queued in the order in which the program makes them. A
//! thread that cannot get the turn gets an error that names what it waited for.

#![expect(unsafe_code, reason = "passing addresses of buffers to the progress engine")]

use std::time::Duration;

use super::compare::{self, CallDigest};
use crate::call::element::{DType, TypeTag};
use crate::call::{Call, CallKind};
use crate::communicator::Communicator;
use crate::communicator::handle::state::Shared;
use crate::communicator::work::message::{INTERNAL_TAG, MessageBuffer, MessageContext, receive_place, send_place};
use crate::device::{self, DeviceBackend, Job, Message};
use crate::error::{Error, Result};
use crate::flight;

/// The tag of a message's header.
const MESSAGE_TAG: u64 = INTERNAL_TAG | 1 << 61;
/// The tag of the digests of a group's collectives, for groups of several communicators.
const CALLS_TAG: u64 = INTERNAL_TAG | 1 << 60;

/// The header of a message: its number among the messages between the two ranks in this direction, its type, and its
/// number of elements.
type Header = [u8; 24];

/// The bit of a header's second word that marks a message as captured into a graph.
const CAPTURED_AT: u32 = 32;

/// A message, and its header.
struct WithHeader<'a> {
    message: &'a Message,
    header: Header,
}

impl<'a> WithHeader<'a> {
    fn new(message: &'a Message, number: u64, is_captured: bool) -> Self {
        let count = message.bytes / message.element.size_bytes().max(1);
        let mut header = [0; size_of::<Header>()];
        let words = [number, u64::from(message.element.to_code()) | u64::from(is_captured) << CAPTURED_AT, count as u64];
        header.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        Self { message, header }
    }
}

/// Formats a header, such as `send of 5 elements (u8), device message number 3 from rank 0 to rank 1`.
fn in_words(header: &Header, sends: bool, from: usize, to: usize) -> String {
    let word = |at: usize| header[8 * at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let element = TypeTag::from_code(word(1) as u32);
    let captured = if word(1) >> CAPTURED_AT == 0 { "" } else { ", captured into a graph" };
    let element = element.map_or_else(|| "an unknown type".to_owned(), |element| element.to_string());
    let call = if sends { "send" } else { "recv" };
    let (number, count) = (word(0), word(2));
    let elements = if count == 1 { "element" } else { "elements" };
    format!("{call} of {count} {elements} ({element}){captured}, device message number {number} from rank {from} to rank {to}")
}

/// Rewords an error of a header for a caller who sent no message on the host.
#[cold]
fn comparing(mut error: Error, what: impl FnOnce() -> String) -> Error {
    if let Error::Timeout { doing, .. } | Error::PeerLost { doing, .. } = &mut error {
        *doing = format!("comparing {} (Config::check_device_calls)", what());
    }
    error
}

/// Describes the receive that holds the turn at the device backend while it waits for its sender.
#[cold]
pub(super) fn awaited_header(shared: &Shared) -> Option<String> {
    let records = shared.recorder.records();
    let is_awaited = |record: &&flight::Record| {
        record.state == flight::State::Started && record.kind == CallKind::Recv && record.tag == Some(MESSAGE_TAG)
    };
    let from = records.iter().rev().find(is_awaited)?.peer?;
    Some(format!("a recv on the device from rank {from}, which has not made the matching send yet"))
}

/// Returns the parameters of a header to or from a rank.
fn message_context(peer: usize, tag: u64) -> MessageContext {
    MessageContext { peer: Some(peer), tag, element: TypeTag::Scalar(DType::U8), element_bytes: 1 }
}

/// The digests of a group's collectives that every rank sends to every other.
struct Calls {
    /// The digest of all calls, and that of the first.
    mine: [CallDigest; 2],
    heard: Vec<[CallDigest; 2]>,
}

/// Headers of one communicator: those that this rank sends, and space for those that it awaits.
pub(super) struct Headers<'a> {
    comm: &'a Communicator,
    sent: Vec<WithHeader<'a>>,
    awaited: Vec<WithHeader<'a>>,
    heard: Vec<Header>,
    calls: Option<Calls>,
    /// Whether the calls to be queued are captured into a graph.
    is_captured: bool,
}

impl<'a> Headers<'a> {
    /// Makes the headers of messages, and numbers the messages.
    pub(super) fn of_messages(comm: &'a Communicator, backend: &DeviceBackend, messages: &'a [Message]) -> Self {
        let is_captured = device::is_capturing(comm.device_stream(backend));
        let (mut sent, mut awaited) = (Vec::new(), Vec::new());
        // A message from a rank to itself was compared when it was recorded.
        for message in messages.iter().filter(|message| message.peer != comm.rank()) {
            let number = backend.number_message(message);
            if comm.config().check_device_calls.covers(number) {
                if message.sends { &mut sent } else { &mut awaited }.push(WithHeader::new(message, number, is_captured));
            }
        }
        let heard = vec![[0; size_of::<Header>()]; awaited.len()];
        Self { comm, sent, awaited, heard, calls: None, is_captured }
    }

    /// Adds digests of collectives. In a group of several communicators, each thread runs several ranks, so these ranks
    /// cannot wait for each other in a collective.
    pub(super) fn with_calls(mut self, jobs: &[Job]) -> Self {
        if let Some(first) = self.comm.compared(jobs.iter()) {
            let mine = [compare::digest_of(first, jobs.iter(), self.is_captured), compare::first_of(first, jobs.iter(), self.is_captured)];
            self.calls = Some(Calls { mine, heard: vec![mine; self.comm.world_size()] });
        }
        self
    }

    /// Returns whether the calls are captured, as the headers report it; `None` if there are no headers.
    pub(super) fn is_captured(&self) -> Option<bool> {
        (!self.is_empty()).then_some(self.is_captured)
    }

    fn is_empty(&self) -> bool {
        self.sent.is_empty() && self.awaited.is_empty() && self.calls.is_none()
    }

    /// Returns what is sent: the peer, the tag and the bytes.
    fn outgoing(&self) -> impl Iterator<Item = (usize, u64, &[u8])> {
        let me = self.comm.rank();
        let messages = self.sent.iter().map(|told| (told.message.peer, MESSAGE_TAG, &told.header[..]));
        let others = move |calls: &'_ Calls| (0..calls.heard.len()).filter(move |rank| *rank != me);
        let calls = self.calls.iter().flat_map(move |calls| others(calls).map(|rank| (rank, CALLS_TAG, calls.mine.as_flattened())));
        messages.chain(calls)
    }

    /// Returns the memory for the headers that are awaited.
    fn incoming(&mut self) -> Vec<(MessageContext, MessageBuffer)> {
        let me = self.comm.rank();
        let messages = self.awaited.iter().zip(&mut self.heard);
        let messages =
            messages.map(|(told, heard)| (message_context(told.message.peer, MESSAGE_TAG), receive_place(heard.as_mut_slice().into())));
        let calls = self.calls.iter_mut().flat_map(|calls| calls.heard.iter_mut().enumerate()).filter(|(rank, _)| *rank != me);
        let calls = calls.map(|(rank, said)| (message_context(rank, CALLS_TAG), receive_place(said.as_flattened_mut().into())));
        messages.chain(calls).collect()
    }

    /// Describes what is being compared.
    fn doing(&self) -> String {
        let me = self.comm.rank();
        let awaited = self.awaited.first().map(|told| in_words(&told.header, false, told.message.peer, me));
        let sent = self.sent.first().map(|told| in_words(&told.header, true, me, told.message.peer));
        awaited.or(sent).unwrap_or_else(|| "the calls of a group of several communicators".to_owned())
    }

    /// Sends all headers, awaits those of the others, and compares.
    pub(super) fn exchange(mut self, limit: Duration) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut places = self.incoming();
        places.extend(self.outgoing().map(|(peer, tag, bytes)| (message_context(peer, tag), send_place(bytes.into()))));
        self.transfer(&places, limit)
    }

    /// Sends the headers in the background: the ranks that wait for them may belong to this thread.
    pub(super) fn send(&self, limit: Duration) -> Result<()> {
        self.outgoing().try_for_each(|(peer, tag, bytes)| self.comm.post_internal_send(peer, tag, bytes.to_vec(), limit).map(drop))
    }

    /// Awaits the others' headers, and compares.
    pub(super) fn hear(mut self, limit: Duration) -> Result<()> {
        let places = self.incoming();
        self.transfer(&places, limit)
    }

    fn transfer(&self, places: &[(MessageContext, MessageBuffer)], limit: Duration) -> Result<()> {
        // SAFETY: the places are in the vectors and the arrays of `self`, which stays in place during the call and
        // is not read before the call has returned: nothing is touched after that.
        let exchanged = unsafe { self.comm.core.shared.progress.transfer(places, limit) };
        exchanged.map_err(|error| comparing(error, || self.doing()))?;
        self.judge()
    }

    /// Compares what was received.
    fn judge(&self) -> Result<()> {
        let (me, peers) = (self.comm.rank(), self.comm.peers());
        if let Some((told, heard)) = self.awaited.iter().zip(&self.heard).find(|(told, heard)| told.header != **heard) {
            let from = told.message.peer;
            return Err(Error::Mismatch {
                first: peers[from].clone(),
                first_call: in_words(heard, true, from, me),
                second: peers[me].clone(),
                second_call: in_words(&told.header, false, from, me),
            });
        }
        let Some(Calls { heard, .. }) = &self.calls else { return Ok(()) };
        let Some(other) = heard.iter().position(|said| said[0] != heard[0][0]) else { return Ok(()) };
        let firsts: Vec<CallDigest> = heard.iter().map(|said| said[1]).collect();
        let later = || {
            let words = format!("{} (the two ranks' groups differ in a later call)", compare::in_words(&firsts[0]));
            Error::Mismatch { first: peers[0].clone(), first_call: words.clone(), second: peers[other].clone(), second_call: words }
        };
        Err(self.comm.difference(&firsts).unwrap_or_else(later))
    }
}

/// A fingerprint fits into a digest.
const _: () = assert!(Call::FINGERPRINT_BYTES + 8 == size_of::<CallDigest>());
