//! The frames on a link between two ranks: a fixed header, and for some kinds a payload. No I/O.
//!
//! The header is little-endian: kind `u8`, three zero bytes, message `u32`, reply `u32`, element `u32`, tag `u64`,
//! length `u64`. Fields that a kind does not use are zero. Anything else is refused, so that a stream that is out of
//! step is detected at once.

use crate::call::element::TypeTag;
use crate::host::abort_reason::AbortReason;
use crate::host::link::Head;

/// Length of a header.
pub(super) const HEADER_BYTES: usize = 32;

/// Longest message that is sent in one frame with its header, without a request to send.
pub(super) const EAGER_BYTES: usize = 64 << 10;

/// Longest piece of a long message: between two pieces, other messages get their turn.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// Longest frame that is encoded completely: an abort reason with its header.
pub(super) const WHOLE_BYTES: usize = HEADER_BYTES + AbortReason::BYTES;

/// Bytes of a message that fit in the head of its frame.
pub(super) const IN_HEAD_BYTES: usize = Head::BYTES - HEADER_BYTES;

/// One frame. `message` is the sender's number for a long message, `reply` is the receiver's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// A short message. The message's bytes follow this frame.
    Eager { tag: u64, element: TypeTag, bytes: usize },
    /// The sender has a long message, which waits for a receive.
    RequestToSend { message: u32, tag: u64, element: TypeTag, bytes: usize },
    /// The long message has been matched with its receive, and the sender may send it.
    ClearToSend { message: u32, reply: u32 },
    /// The long message was matched with a receive that cannot take it. The receive has this element type and capacity.
    /// This frame is also the answer to the `Withdraw` of a message that has not been matched. So every request to send
    /// has exactly one answer.
    Refuse { message: u32, element: TypeTag, capacity: u64 },
    /// The next piece of a long message. The piece's bytes follow this frame.
    Data { reply: u32, bytes: usize },
    /// The sender has given up a message that it had announced, after this many milliseconds.
    Withdraw { message: u32, after: u64 },
    /// The communicator has ended, for this reason.
    AbortReason(AbortReason),
    /// Messages of this total cost, which were sent on this link, have been received. So the sender may send further
    /// messages of the same total cost.
    Credit { cost: u64 },
    /// A placeholder for a message that was given up before its turn, after this many milliseconds.
    GaveUp { tag: u64, after: u64 },
    /// The receiver has given up a long message that it had cleared, and drops the message's remaining bytes.
    Abandon { message: u32, reply: u32 },
    /// No more frames follow on this link. `opened` is the number of links that the leaving rank has opened to this
    /// peer. Each of these links will carry its own `Leave`.
    Leave { opened: u32 },
}

/// The fields of a header that has not been interpreted.
#[derive(Debug, Clone, Copy, Default)]
struct Fields {
    kind: u8,
    message: u32,
    reply: u32,
    element: u32,
    tag: u64,
    length: u64,
}

impl Fields {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind;
        bytes[4..8].copy_from_slice(&self.message.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.reply.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.element.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tag.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..].first_chunk().map(|chunk| u32::from_le_bytes(*chunk));
        let long = |at: usize| bytes[at..].first_chunk().map(|chunk| u64::from_le_bytes(*chunk));
        Some(Self { kind: bytes[0], message: word(4)?, reply: word(8)?, element: word(12)?, tag: long(16)?, length: long(24)? })
    }

    /// Returns the length as a `usize`, if it lies between two bounds.
    fn length_within(&self, least: usize, most: usize) -> Option<usize> {
        usize::try_from(self.length).ok().filter(|length| (least..=most).contains(length))
    }

    /// Returns the frame that these fields begin; `None` if they are invalid.
    fn to_frame(self, payload: &[u8]) -> Option<Frame> {
        let Self { message, reply, tag, length, .. } = self;
        let element = TypeTag::from_code(self.element)?;
        Some(match self.kind {
            1 => Frame::Eager { tag, element, bytes: self.length_within(0, EAGER_BYTES)? },
            2 => Frame::RequestToSend { message, tag, element, bytes: self.length_within(EAGER_BYTES + 1, isize::MAX as usize)? },
            3 => Frame::ClearToSend { message, reply },
            4 => Frame::Refuse { message, element, capacity: length },
            5 => Frame::Data { reply, bytes: self.length_within(1, CHUNK_BYTES)? },
            6 => Frame::Withdraw { message, after: length },
            ABORT => Frame::AbortReason(payload.first_chunk().and_then(AbortReason::from_bytes)?),
            8 => Frame::Leave { opened: message },
            9 => Frame::Credit { cost: length },
            10 => Frame::GaveUp { tag, after: length },
            11 => Frame::Abandon { message, reply },
            _ => return None,
        })
    }
}

/// The kind of frame that contains an encoded abort reason.
const ABORT: u8 = 7;

impl Frame {
    fn to_fields(self) -> Fields {
        let none = Fields::default();
        match self {
            Frame::Eager { tag, element, bytes } => Fields { kind: 1, tag, element: element.to_code(), length: bytes as u64, ..none },
            Frame::RequestToSend { message, tag, element, bytes } => {
                Fields { kind: 2, message, tag, element: element.to_code(), length: bytes as u64, ..none }
            }
            Frame::ClearToSend { message, reply } => Fields { kind: 3, message, reply, ..none },
            Frame::Refuse { message, element, capacity } => {
                Fields { kind: 4, message, element: element.to_code(), length: capacity, ..none }
            }
            Frame::Data { reply, bytes } => Fields { kind: 5, reply, length: bytes as u64, ..none },
            Frame::Withdraw { message, after } => Fields { kind: 6, message, length: after, ..none },
            Frame::AbortReason(_) => Fields { kind: ABORT, length: AbortReason::BYTES as u64, ..none },
            Frame::Leave { opened } => Fields { kind: 8, message: opened, ..none },
            Frame::Credit { cost } => Fields { kind: 9, length: cost, ..none },
            Frame::GaveUp { tag, after } => Fields { kind: 10, tag, length: after, ..none },
            Frame::Abandon { message, reply } => Fields { kind: 11, message, reply, ..none },
        }
    }

    /// Returns the encoded frame without the bytes of a message, and how many bytes of the array it uses.
    pub(super) fn encode(self) -> ([u8; WHOLE_BYTES], usize) {
        let mut bytes = [0; WHOLE_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&self.to_fields().to_bytes());
        if let Frame::AbortReason(abort_reason) = self {
            bytes[HEADER_BYTES..].copy_from_slice(&abort_reason.to_bytes());
            return (bytes, WHOLE_BYTES);
        }
        (bytes, HEADER_BYTES)
    }

    /// Returns the beginning of the frame of a short message.
    #[inline]
    pub(super) fn head(tag: u64, element: TypeTag, message: &[u8]) -> Head {
        let [kind, of, tag, length] = Self::short_header(tag, element, message.len());
        let mut begin = [[0; 8]; IN_HEAD_BYTES / 8];
        match message.first_chunk::<IN_HEAD_BYTES>() {
            Some(chunk) => begin.as_flattened_mut().copy_from_slice(chunk),
            None => begin.as_flattened_mut()[..message.len()].copy_from_slice(message),
        }
        let [first, second] = begin.map(u64::from_ne_bytes);
        Head { words: [kind, of, tag, length, first, second], bytes: HEADER_BYTES + message.len() }
    }

    /// Returns the length and the first bytes of a short message, if `head` begins a complete frame with this tag and
    /// element and nothing else.
    #[inline]
    pub(super) fn message_of(head: &Head, tag: u64, element: TypeTag) -> Option<(usize, [u8; IN_HEAD_BYTES])> {
        let bytes = head.bytes.checked_sub(HEADER_BYTES).filter(|bytes| *bytes <= EAGER_BYTES)?;
        let [kind, of, sent, length, first, second] = head.words;
        let mut begin = [0; IN_HEAD_BYTES];
        begin[..8].copy_from_slice(&first.to_ne_bytes());
        begin[8..].copy_from_slice(&second.to_ne_bytes());
        ([kind, of, sent, length] == Self::short_header(tag, element, bytes)).then_some((bytes, begin))
    }

    /// Returns the header of a short message as words.
    #[inline]
    fn short_header(tag: u64, element: TypeTag, bytes: usize) -> [u64; HEADER_BYTES / 8] {
        // The same layout as `Fields`.
        [1, u64::from(element.to_code()) << 32, tag, bytes as u64].map(u64::to_le)
    }

    /// Returns the frame at the front of `bytes` and the length of its encoding; `Ok(None)` if there are too few bytes.
    /// The error describes bytes that no rank sends.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let whole = if header[0] == ABORT { WHOLE_BYTES } else { HEADER_BYTES };
        let Some(payload) = bytes.get(HEADER_BYTES..whole) else { return Ok(None) };
        let frame = Fields::from_bytes(header)
            .and_then(|fields| fields.to_frame(payload))
            .filter(|frame| frame.to_fields().to_bytes() == *header)
            .ok_or_else(|| format!("an invalid frame header: {header:02x?}"))?;
        Ok(Some((frame, whole)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;
    use crate::call::element::DType;

    fn examples() -> Vec<Frame> {
        let element = TypeTag::Scalar(DType::Bf16);
        let plain = TypeTag::Plain(24);
        vec![
            Frame::Eager { tag: u64::MAX, element, bytes: 0 },
            Frame::Eager { tag: 0, element: plain, bytes: EAGER_BYTES },
            Frame::RequestToSend { message: 9, tag: 1 << 63, element: plain, bytes: EAGER_BYTES + 1 },
            Frame::RequestToSend { message: u32::MAX, tag: 4, element, bytes: isize::MAX as usize },
            Frame::ClearToSend { message: 3, reply: 4 },
            Frame::Refuse { message: 3, element, capacity: u64::MAX },
            Frame::Data { reply: 5, bytes: 1 },
            Frame::Data { reply: 5, bytes: CHUNK_BYTES },
            Frame::Withdraw { message: 77, after: 1500 },
            Frame::GaveUp { tag: 1 << 60, after: u64::MAX },
            Frame::Abandon { message: 77, reply: 6 },
            Frame::AbortReason(AbortReason::TimedOut { waiting: 1, missing: 2 }),
            Frame::Leave { opened: 1 },
            Frame::Credit { cost: 1 << 40 },
        ]
    }

    #[test]
    fn frames_survive_the_wire() {
        for frame in examples() {
            let (mut bytes, length) = frame.encode();
            assert_eq!(Frame::decode(&bytes[..length]), Ok(Some((frame, length))));
            for short in 0..length {
                assert_eq!(Frame::decode(&bytes[..short]), Ok(None), "{frame:?} cut to {short}");
            }
            bytes[1] = 1;
            assert!(Frame::decode(&bytes).is_err(), "{frame:?} with a padding byte set");
        }
    }

    #[test]
    fn the_head_of_a_message_is_how_its_frame_begins() {
        let (tag, element) = (0x0123_4567_89ab_cdef, TypeTag::Scalar(DType::F32));
        let message: Vec<u8> = (0..EAGER_BYTES).map(|at| (at % 251) as u8 + 1).collect();
        for bytes in (0..=3 * IN_HEAD_BYTES).chain([EAGER_BYTES]) {
            let message = &message[..bytes];
            let head = Frame::head(tag, element, message);
            let (header, length) = Frame::Eager { tag, element, bytes }.encode();
            let frame = [&header[..length], message].concat();
            assert_eq!(head.bytes, frame.len());
            let in_head = frame.len().min(Head::BYTES);
            assert_eq!(head.words.map(u64::to_ne_bytes).as_flattened()[..in_head], frame[..in_head]);
            let (found, begin) = Frame::message_of(&head, tag, element).unwrap();
            assert_eq!((found, &begin[..bytes.min(IN_HEAD_BYTES)]), (bytes, &message[..bytes.min(IN_HEAD_BYTES)]));
            assert_eq!(Frame::message_of(&head, tag + 1, element), None);
            assert_eq!(Frame::message_of(&head, tag, TypeTag::Scalar(DType::I32)), None);
            for other in [0, HEADER_BYTES - 1, head.bytes - 1, head.bytes + 1, usize::MAX] {
                assert_eq!(Frame::message_of(&Head { bytes: other, ..head }, tag, element), None);
            }
        }
    }

    #[test]
    fn lengths_beyond_their_bounds_are_refused() {
        let element = TypeTag::Scalar(DType::U8);
        for frame in [
            Frame::Eager { tag: 0, element, bytes: EAGER_BYTES + 1 },
            Frame::RequestToSend { message: 0, tag: 0, element, bytes: EAGER_BYTES },
            Frame::RequestToSend { message: 0, tag: 0, element, bytes: usize::MAX },
            Frame::Data { reply: 0, bytes: 0 },
            Frame::Data { reply: 0, bytes: CHUNK_BYTES + 1 },
        ] {
            assert!(Frame::decode(&frame.encode().0).is_err(), "{frame:?}");
        }
    }

    #[test]
    fn whatever_is_understood_encodes_to_the_same_bytes() {
        let seed = 0x5eed_0001;
        let mut random = Random(seed);
        let examples = examples();
        let mut understood = 0;
        for round in 0..60_000 {
            let mut bytes = [0; WHOLE_BYTES];
            if round % 3 == 0 {
                bytes.fill_with(|| random.next() as u8);
            } else {
                // Nearly valid: a real frame with a few bytes changed.
                bytes = examples[random.below(examples.len())].encode().0;
                for _ in 0..random.below(3) {
                    bytes[random.below(HEADER_BYTES)] = random.next() as u8;
                }
            }
            if let Ok(decoded) = Frame::decode(&bytes) {
                let (frame, length) = decoded.expect("enough bytes were there");
                assert_eq!(frame.encode().0[..HEADER_BYTES], bytes[..HEADER_BYTES], "seed {seed:#x} round {round}");
                assert!(length <= WHOLE_BYTES);
                understood += 1;
            }
        }
        assert!(understood > 1000, "only {understood} were understood: the test tests nothing");
    }
}
