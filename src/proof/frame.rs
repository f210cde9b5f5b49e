//! The frame of every reply of a proof: magic, version, kind, reason and one word.

/// The first bytes of a reply.
pub(super) const REPLY_MAGIC: [u8; 8] = *b"colproof";
/// The version of the protocol.
pub(super) const VERSION: u8 = 1;
/// The length of an opening without its context, and of a reply.
pub(super) const FRAME_BYTES: usize = 44;
/// The kinds of replies: a challenge, a proof, a refusal.
pub(super) const CHALLENGE: u8 = 1;
pub(super) const PROOF: u8 = 2;
pub(super) const REFUSED: u8 = 3;

/// A random number, or an HMAC.
pub(super) type Word = [u8; 32];

/// A reply.
pub(super) fn reply(kind: u8, reason: u8, word: &Word) -> [u8; FRAME_BYTES] {
    let mut bytes = [0; FRAME_BYTES];
    bytes[..8].copy_from_slice(&REPLY_MAGIC);
    bytes[8..12].copy_from_slice(&[VERSION, kind, reason, 0]);
    bytes[12..].copy_from_slice(word);
    bytes
}

/// What stands behind the version of a frame, and its word.
pub(super) fn split(frame: &[u8; FRAME_BYTES]) -> ([u8; 3], Word) {
    let mut word = [0; 32];
    word.copy_from_slice(&frame[12..]);
    ([frame[9], frame[10], frame[11]], word)
}
