//! Properties that must hold whatever bytes a peer of messages sends.

#![expect(unsafe_code, reason = "posting takes memory for longer than the call")]

use std::os::fd::BorrowedFd;

use super::frame::{Frame, HEADER_BYTES};
use super::{Connector, MessageError, Messages, Outcome, Ticket};
use crate::call::element::{DType, TypeTag};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::script::Script;

/// The element type of the correct peer's message: any byte is a value.
const BYTES: TypeTag = TypeTag::Scalar(DType::U8);
/// The element type of the other peer's messages, and of those sent to it: only 0 and 1 are values.
const TRUTHS: TypeTag = TypeTag::Scalar(DType::Bool);
/// The content of the guards around the destinations, which initially hold 0.
const UNTOUCHED: u8 = 0xa5;
/// The length of each guard.
const GUARD: usize = 64;
/// The tag with which an object is received, and the largest object accepted.
const OBJECT_TAG: u64 = 4;
const OBJECT_BYTES: usize = 150_000;
/// The tag and the message of the correct peer.
const RIGHT: (u64, &[u8]) = (7, b"well said");

/// Checks that bytes decode as a frame only if the frame is complete, and that the decoded frame encodes to the same
/// bytes again.
pub fn message_frames(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((frame, used))) = Frame::decode(rest) {
        let (encoded, length) = frame.encode();
        assert_eq!(encoded[..length], rest[..used], "{frame:?}");
        assert!((0..used).all(|short| Frame::decode(&rest[..short]) == Ok(None)), "{frame:?} in part");
        rest = &rest[used..];
    }
}

/// Checks a run in which one of two peers sends any bytes. The first byte of `data` selects how the other bytes, which
/// the peer sends, are split.
///
/// - When the link of this peer ends, every request with this peer ends.
/// - What this peer sends is received in the same way however the bytes are split.
/// - The other peer's message arrives.
/// - Every received `bool` is 0 or 1, even of a message that arrived in part.
pub fn message_peer(data: &[u8]) {
    let Some((&jitter, bytes)) = data.split_first() else { return };
    let whole = run(bytes, 0);
    let split = run(bytes, u64::from(jitter) + 1);
    assert_eq!(whole, split, "in parts");
}

/// Two peers that have opened their links.
struct Opened(Vec<(usize, Script)>);

impl Connector for Opened {
    type Link = Script;

    fn connect(&mut self, peer: usize) -> Result<Script, Interrupted> {
        Err(AbortReason::Lost { rank: peer as u32, by: 0 }.into())
    }

    fn accept(&mut self) -> Vec<(usize, Script)> {
        std::mem::take(&mut self.0)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Memory that a message is received into, with a guard on each side.
struct Into {
    bytes: Vec<u8>,
    ticket: Option<Ticket>,
}

impl Into {
    fn new(capacity: usize) -> Self {
        let mut bytes = vec![UNTOUCHED; capacity + 2 * GUARD];
        bytes[GUARD..GUARD + capacity].fill(0);
        Self { bytes, ticket: None }
    }

    fn post(&mut self, messages: &mut Messages<Opened>, from: usize, tag: Option<u64>) {
        let capacity = self.bytes.len() - 2 * GUARD;
        let into = self.bytes[GUARD..].as_mut_ptr();
        let element = if tag == Some(RIGHT.0) { BYTES } else { TRUTHS };
        // SAFETY: the vector is neither touched nor moved nor dropped before the engine is dropped.
        self.ticket = unsafe { messages.post_receive(Some(from), tag, element, into, capacity) }.ok();
    }

    /// Returns what was received, once the engine has been dropped.
    fn check(&self, outcome: Option<Outcome>) -> Received {
        let (guard, rest) = self.bytes.split_at(GUARD);
        let (into, behind) = rest.split_at(rest.len() - GUARD);
        assert!(guard.iter().chain(behind).all(|byte| *byte == UNTOUCHED), "written beside the place");
        let is_right = into == RIGHT.1;
        assert!(is_right || into.iter().all(|byte| *byte <= 1), "a truth value is neither 0 nor 1");
        outcome.map(|outcome| {
            let envelope = outcome?;
            assert!(envelope.bytes <= into.len());
            assert!(into[envelope.bytes..].iter().all(|byte| *byte == 0), "written behind the message");
            Ok((envelope.source, envelope.tag, into[..envelope.bytes].to_vec()))
        })
    }
}

/// The source, tag and bytes of a message, or the reason why there is none.
type Received = Option<Result<(usize, u64, Vec<u8>), MessageError>>;

/// Returns the results of receives from rank 1, which sends `bytes` and then closes its link.
fn run(bytes: &[u8], jitter: u64) -> (Vec<Received>, Option<AbortReason>) {
    let frame = Frame::Eager { tag: RIGHT.0, element: BYTES, bytes: RIGHT.1.len() }.encode();
    // The incomplete frame keeps the link open without sending anything more.
    let right = [&frame.0[..frame.1], RIGHT.1, &Frame::Credit { cost: 0 }.encode().0[..8]].concat();
    let links = vec![(1, Script::new(bytes, None, jitter)), (2, Script::new(&right, None, jitter))];
    let mut places = [Into::new(64), Into::new(0), Into::new(200_000), Into::new(RIGHT.1.len())];
    let (short, long) = ([1_u8; 40], vec![2_u8; 100_000]);
    let mut messages = Messages::new(0, 3, false, Opened(links));
    for (place, (from, tag)) in places.iter_mut().zip([(1, Some(1)), (1, Some(2)), (1, None), (2, Some(RIGHT.0))]) {
        place.post(&mut messages, from, tag);
    }
    let object = messages.post_object_receive(Some(1), OBJECT_TAG, OBJECT_BYTES);
    for data in [&short[..], &long] {
        // SAFETY: both outlive the engine and are not written.
        let _ = unsafe { messages.post_send(1, 5, TRUTHS, data.as_ptr(), data.len()) };
    }
    for _ in 0..100_000 {
        if !messages.progress() {
            break;
        }
    }
    let outcomes = places.each_ref().map(|place| place.ticket.map(|ticket| messages.poll(ticket)));
    let object = object.ok().map(|ticket| {
        let (outcome, bytes) = messages.poll_object(ticket).expect("a request has ended once its peer's link has ended");
        assert!(bytes.len() <= OBJECT_BYTES && outcome.is_ok_and(|envelope| envelope.bytes == bytes.len()) || bytes.is_empty());
        outcome.map(|envelope| (envelope.source, envelope.tag, bytes))
    });
    let heard = messages.heard();
    drop(messages);
    let mut received: Vec<Received> = places
        .iter()
        .zip(outcomes)
        .map(|(place, outcome)| place.check(outcome.map(|outcome| outcome.expect("a request has ended once its peer's link has ended"))))
        .collect();
    received.push(object);
    assert_eq!(received[3], Some(Ok((2, RIGHT.0, RIGHT.1.to_vec()))), "the other peer's message");
    (received, heard)
}

/// Returns the initial inputs.
pub(in crate::host) fn seeds(abort_reasons: &[AbortReason]) -> Vec<(&'static str, Vec<u8>)> {
    let frame = |frame: Frame| {
        let (bytes, length) = frame.encode();
        bytes[..length].to_vec()
    };
    let eager = |tag, bytes: usize| [frame(Frame::Eager { tag, element: TRUTHS, bytes }), vec![3; bytes]].concat();
    let long = |message, bytes| frame(Frame::RequestToSend { message, tag: 3, element: TRUTHS, bytes });
    let object = |bytes: usize| [frame(Frame::Eager { tag: OBJECT_TAG, element: TypeTag::Object, bytes }), vec![5; bytes]].concat();
    let large_object = |bytes| frame(Frame::RequestToSend { message: 7, tag: OBJECT_TAG, element: TypeTag::Object, bytes });
    let mut streams = vec![
        [eager(1, 20), eager(2, 0), eager(9, 100)].concat(),
        [eager(3, 100), eager(1, 64), eager(1, 8), frame(Frame::Credit { cost: 1 << 10 })].concat(),
        [long(0, 70_000), frame(Frame::Data { reply: 0, bytes: 100 }), vec![4; 100]].concat(),
        [long(4, 70_000), frame(Frame::Withdraw { message: 4, after: 30 })].concat(),
        // The first is matched, and is given up in the middle; the others have not been matched.
        [
            long(4, 70_000),
            frame(Frame::Data { reply: 0, bytes: 9 }),
            vec![4; 9],
            frame(Frame::Withdraw { message: 4, after: 1 }),
            long(5, 80_000),
            frame(Frame::Withdraw { message: 5, after: u64::MAX }),
            frame(Frame::GaveUp { tag: 8, after: 2 }),
        ]
        .concat(),
        [frame(Frame::GaveUp { tag: 1, after: 2 }), eager(1, 3)].concat(),
        [frame(Frame::ClearToSend { message: 1, reply: 9 }), frame(Frame::Abandon { message: 1, reply: 9 })].concat(),
        // The first goes to the receive with any tag, the second to that of an object.
        [object(3), object(900), object(0)].concat(),
        [eager(9, 1), large_object(150_000), frame(Frame::Data { reply: 0, bytes: 5000 }), vec![6; 5000]].concat(),
        [eager(9, 1), large_object(150_001)].concat(),
        frame(Frame::ClearToSend { message: 1, reply: 9 }),
        frame(Frame::Refuse { message: 1, element: TypeTag::Plain(12), capacity: 10 }),
        frame(Frame::Leave { opened: 0 }),
        [eager(1, 3), frame(Frame::Leave { opened: 1 })].concat(),
    ];
    streams.extend(abort_reasons.iter().map(|abort_reason| frame(Frame::AbortReason(*abort_reason))));
    let heads = streams.iter().map(|stream| stream[..stream.len().min(HEADER_BYTES)].to_vec()).filter(|head| head[0] != 7);
    let mut seeds = vec![("message_frames", heads.collect::<Vec<_>>().concat())];
    seeds.extend(streams.iter().filter(|stream| stream.len() < 200).map(|stream| ("message_frames", stream.clone())));
    seeds.extend(streams.into_iter().map(|stream| ("message_peer", [vec![9], stream].concat())));
    seeds
}
