//! The messages of a link, as bytes. No I/O, no clock.
//!
//! A message begins with eight bytes: kind (one byte), three zero bytes, and the length of its body as a little-endian
//! `u32`. In the first message of a call, two fields precede the body: the sender's call (32 bytes) and the total
//! payload bytes that it will send on this link in this call (a little-endian `u64`).

use std::fmt;

use crate::call::Call;
use crate::host::abort_reason::AbortReason;

/// Length of the header of every message.
pub(super) const HEADER_BYTES: usize = 8;
/// Length of everything before the payload of the first message of a call.
pub(super) const FIRST_BYTES: usize = HEADER_BYTES + Call::FINGERPRINT_BYTES + 8;
/// Length of the message that carries an abort reason.
pub(super) const ABORT_REASON_BYTES: usize = HEADER_BYTES + AbortReason::BYTES;
/// The longest payload of one message. A longer one is split, so that a reason to abort never waits behind more than
/// this.
pub(super) const PAYLOAD_MAX: usize = 1 << 20;

const FIRST: u8 = 1;
const NEXT: u8 = 2;
const ABORT: u8 = 3;
const LEAVE: u8 = 4;

/// A parsed message. Its payload, if it has one, follows in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// The sender's first message in a call. `call` is the encoded call, and `total` is the number of payload bytes
    /// that the sender will send on this link during the call. `payload` is the number of payload bytes in this
    /// message.
    First { call: [u8; Call::FINGERPRINT_BYTES], total: u64, payload: usize },
    /// A later message of the call.
    Next { payload: usize },
    /// The communicator ended.
    AbortReason(AbortReason),
    /// The sender closed its communicator normally.
    Leave,
}

impl Message {
    /// Returns how many bytes of payload follow.
    pub(super) fn payload(&self) -> usize {
        match self {
            Self::First { payload, .. } | Self::Next { payload } => *payload,
            Self::AbortReason(_) | Self::Leave => 0,
        }
    }
}

/// Bytes that are not the beginning of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed {
    /// The first eight bytes.
    pub(super) header: [u8; HEADER_BYTES],
    /// What is wrong with them.
    pub(super) reason: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a message that begins with {:02x?}: {}", self.header, self.reason)
    }
}

/// Returns the eight header bytes of a message.
fn header(kind: u8, body: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0] = kind;
    bytes[4..].copy_from_slice(&(body as u32).to_le_bytes());
    bytes
}

/// Returns everything before the payload of the first message of a call. `payload` is at most [`PAYLOAD_MAX`].
pub(super) fn encode_first(call: &[u8; Call::FINGERPRINT_BYTES], total: u64, payload: usize) -> [u8; FIRST_BYTES] {
    let mut bytes = [0; FIRST_BYTES];
    let (head, total_at) = (HEADER_BYTES, HEADER_BYTES + Call::FINGERPRINT_BYTES);
    bytes[..head].copy_from_slice(&header(FIRST, payload));
    bytes[head..total_at].copy_from_slice(call);
    bytes[total_at..].copy_from_slice(&total.to_le_bytes());
    bytes
}

/// Returns everything before the payload of a later message. `payload` is at most [`PAYLOAD_MAX`].
pub(super) fn encode_next(payload: usize) -> [u8; HEADER_BYTES] {
    header(NEXT, payload)
}

/// Returns an abort reason as a message.
pub(super) fn encode_abort_reason(abort_reason: &AbortReason) -> [u8; ABORT_REASON_BYTES] {
    let mut bytes = [0; ABORT_REASON_BYTES];
    bytes[..HEADER_BYTES].copy_from_slice(&header(ABORT, AbortReason::BYTES));
    bytes[HEADER_BYTES..].copy_from_slice(&abort_reason.to_bytes());
    bytes
}

/// Returns the message of a rank that closes its communicator normally.
pub(super) fn encode_leave() -> [u8; HEADER_BYTES] {
    header(LEAVE, 0)
}

/// Returns the message at the front of `bytes` and its length without payload, or `None` if more bytes are needed.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<(Message, usize)>, Malformed> {
    let Some(&header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let [kind, zeros @ .., a, b, c, d] = header;
    let malformed = |reason| Err(Malformed { header, reason });
    let body = u32::from_le_bytes([a, b, c, d]) as usize;
    if zeros != [0; 3] {
        return malformed("the bytes after the kind are not zero");
    }
    let rest = &bytes[HEADER_BYTES..];
    match kind {
        FIRST | NEXT if body > PAYLOAD_MAX => malformed("the payload is longer than the limit"),
        FIRST => {
            let Some((call, rest)) = rest.split_first_chunk() else { return Ok(None) };
            let Some(total) = rest.first_chunk() else { return Ok(None) };
            Ok(Some((Message::First { call: *call, total: u64::from_le_bytes(*total), payload: body }, FIRST_BYTES)))
        }
        NEXT => Ok(Some((Message::Next { payload: body }, HEADER_BYTES))),
        ABORT if body != AbortReason::BYTES => malformed("the length of the abort reason is wrong"),
        ABORT => match rest.first_chunk().map(AbortReason::from_bytes) {
            None => Ok(None),
            Some(None) => malformed("the abort reason is unknown"),
            Some(Some(abort_reason)) => Ok(Some((Message::AbortReason(abort_reason), ABORT_REASON_BYTES))),
        },
        LEAVE if body != 0 => malformed("a leave message must have no body"),
        LEAVE => Ok(Some((Message::Leave, HEADER_BYTES))),
        _ => malformed("the message kind is unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;
    use crate::host::engine::tests::call;

    #[test]
    fn messages_survive_the_wire_and_wait_for_their_last_byte() {
        let fingerprint = call(9).to_bytes();
        let abort_reason = AbortReason::Lost { rank: 70_000, by: 9 };
        let cases: [(Vec<u8>, Message); 4] = [
            (encode_first(&fingerprint, 1 << 40, 17).to_vec(), Message::First { call: fingerprint, total: 1 << 40, payload: 17 }),
            (encode_next(PAYLOAD_MAX).to_vec(), Message::Next { payload: PAYLOAD_MAX }),
            (encode_abort_reason(&abort_reason).to_vec(), Message::AbortReason(abort_reason)),
            (encode_leave().to_vec(), Message::Leave),
        ];
        for (bytes, message) in cases {
            for cut in 0..bytes.len() {
                assert_eq!(parse(&bytes[..cut]), Ok(None), "{message:?} cut at {cut}");
            }
            assert_eq!(parse(&bytes), Ok(Some((message, bytes.len()))));
            let longer = [bytes.as_slice(), &[0xee; 100]].concat();
            assert_eq!(parse(&longer), Ok(Some((message, bytes.len()))));
        }
    }

    #[test]
    fn nonsense_is_refused_by_its_first_eight_bytes() {
        let too_long = (PAYLOAD_MAX as u32 + 1).to_le_bytes();
        for header in [
            [0; 8],
            [5, 0, 0, 0, 0, 0, 0, 0],
            [0xff; 8],
            [NEXT, 1, 0, 0, 4, 0, 0, 0],
            [FIRST, 0, 0, 7, 4, 0, 0, 0],
            [FIRST, 0, 0, 0, too_long[0], too_long[1], too_long[2], too_long[3]],
            [NEXT, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
            [ABORT, 0, 0, 0, 79, 0, 0, 0],
            [LEAVE, 0, 0, 0, 1, 0, 0, 0],
        ] {
            let error = parse(&header).expect_err("nonsense");
            assert_eq!(error.header, header);
            assert!(error.to_string().contains(&format!("{header:02x?}")), "{error}");
        }
        let mut abort_reason = encode_abort_reason(&AbortReason::Lost { rank: 1, by: 0 });
        abort_reason[HEADER_BYTES] = 99;
        assert!(parse(&abort_reason).is_err());
    }

    #[test]
    fn random_bytes_never_claim_more_than_there_is() {
        let seed = 0x5eed_0001;
        let mut random = Random(seed);
        for round in 0..20_000 {
            let mut bytes: Vec<u8> = (0..random.below(130)).map(|_| random.below(256) as u8).collect();
            // Half of the rounds look like messages at first sight.
            if round % 2 == 0 && bytes.len() >= HEADER_BYTES {
                bytes[..4].copy_from_slice(&[random.below(6) as u8, 0, 0, 0]);
                bytes[6..8].fill(0);
            }
            if let Ok(Some((message, used))) = parse(&bytes) {
                assert!(used <= bytes.len() && message.payload() <= PAYLOAD_MAX, "seed {seed:#x} round {round}: {bytes:02x?}");
            }
        }
    }
}
