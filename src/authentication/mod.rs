//! Lets two processes prove to each other that they know the job's secret, before either acts on anything else that the
//! other sends.
//!
//! This module reads and writes bytes, and uses no sockets and no clock. The end that connects is the initiator, the
//! end that accepts is the responder.
//!
//! ```text
//! initiator  opening    "colprove", version, purpose, context length, 0, nonce (32), context     44 B + context
//! responder  reply      "colproof", version, CHALLENGE, 0, 0, nonce (32)                          44 B
//! initiator  tag        HMAC of INITIATOR                                                         32 B
//! responder  reply      "colproof", version, PROOF, 0, 0, HMAC of RESPONDER                       44 B
//! ```
//!
//! Instead of either reply the responder may send `"colproof", version, REFUSED, reason, 0, 32 zeros` and close the
//! connection. Neither end sends anything before its turn. The HMAC is HMAC-SHA-256, keyed with the secret, over
//!
//! ```text
//! "collectives proof 1\0", side, purpose, context length (1), the initiator's nonce, the responder's nonce, context
//! ```
//!
//! The context identifies the subject of the connection. Between ranks, the context is the hello (job, communicator,
//! both ranks, channel). For shared memory, it is the name of the socket. These properties follow:
//!
//! - Both nonces are new for each connection, so a recorded proof is worthless.
//! - The side is part of the proof, so an end's own bytes cannot be sent back to it.
//! - The initiator proves itself first, so an unproven connection sees nothing that was computed with the secret.
//!
//! The bytes after the proof are not protected. An attacker that controls the network between the two ends can let
//! them complete the proof and then take over the connection. SECURITY.md lists the guarantees.
//!
//! # Encryption
//!
//! If the job encrypts ([`Secret::encrypting`]), the Noise handshake replaces the HMACs, with a key derived from the
//! secret. The handshake gives the same proof, and also gives both ends keys. So a connection uses only one of the two
//! mechanisms. The order of the messages stays the same, and so do the rules for unproven connections and the reasons
//! for refusal. Public keys take the place of the nonces, with a tag after them:
//!
//! ```text
//! initiator  opening    "colprove", version, purpose, context length, 1, public key (32), context, its tag (16)   60 B + context
//! responder  reply      "colproof", version, CHALLENGE, 0, 1, public key (32), its tag (16)                        60 B
//! initiator  tag        16 zeros, encrypted                                                                        32 B
//! responder  reply      "colproof", version, PROOF, 0, 1, 16 zeros, encrypted                                      44 B
//! ```
//!
//! The version, the purpose and the context are Noise's prologue: ends that disagree on them get different keys. The
//! third message shows that the first was not a replay. All bytes after the handshake are [`record`]s, in both
//! directions.
//!
//! Each end knows from its own settings which of the two mechanisms it requires. It refuses the other mechanism with a
//! reason of its own: there is no fallback. As with HMACs, an unproven connection sees nothing that was computed with
//! the secret, because the responder checks the first tag before it answers.
//!
//! [`admission`] limits how many connections may exist without a proof, and for how long.

mod admission;
mod frame;
#[cfg(all(feature = "__internals", feature = "encryption"))]
pub(crate) mod fuzz;
mod initiator;
#[cfg(feature = "encryption")]
mod noise;
#[cfg(all(test, feature = "encryption"))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod noise_tests;
pub(crate) mod record;
mod responder;
mod secret;
mod spare;
#[cfg(test)]
mod tests;
#[cfg(not(feature = "encryption"))]
mod without_noise;

use std::io;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

pub(crate) use admission::Admission;
pub(crate) use frame::{AuthenticationError, Reason};
use frame::{REPLY_MAGIC, VERSION, Word};
pub(crate) use initiator::{Initiator, Step};
pub(crate) use noise::Cipher;
pub(crate) use responder::Responder;
pub use secret::Secret;
pub(crate) use spare::Spare;
#[cfg(not(feature = "encryption"))]
use without_noise as noise;

/// The first bytes of an opening.
const OPENING_MAGIC: [u8; 8] = *b"colprove";
/// The prefix of the HMAC input of a proof.
const LABEL: &[u8] = b"collectives proof 1\0";
/// The prefix of the HMAC input of [`vouch`].
const VOUCH_LABEL: &[u8] = b"collectives vouch 1\0";
/// The input that a handshake's key is derived from, and the prefix of its prologue.
const KEY_LABEL: &[u8] = b"collectives noise key 1\0";
const PROLOGUE_LABEL: &[u8] = b"collectives noise 1\0";
/// The longest context, in bytes.
pub(crate) const CONTEXT_BYTES: usize = 64;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A client and a server of a store.
    Store = 1,
    /// Two ranks.
    Link = 2,
    /// Two ranks of one host, one of which passes a file to the other.
    Memory = 3,
}

impl Purpose {
    /// Whether connections for this purpose are encrypted. Connections inside a host are not encrypted: the system
    /// protects them from others.
    fn encrypts(self, secret: &Secret) -> bool {
        secret.encrypts() && self != Self::Memory
    }
}

/// The side that computed an HMAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Initiator = 1,
    Responder = 2,
}

/// Whether bytes begin an opening.
pub(crate) fn is_opening(bytes: &[u8]) -> bool {
    bytes.starts_with(&OPENING_MAGIC)
}

/// Whether four bytes begin a reply of a proof, received in place of another answer.
pub(crate) fn is_reply(bytes: [u8; 4]) -> bool {
    REPLY_MAGIC.starts_with(&bytes)
}

/// Proves that some process that knows the secret produced `words` at some time. It does not protect against replays.
pub(crate) fn vouch(secret: &Secret, words: &[u8]) -> Word {
    vouching(secret, words).finalize().into_bytes().into()
}

/// Whether `tag` is what [`vouch`] returns.
pub(crate) fn is_vouched(secret: &Secret, words: &[u8], tag: &Word) -> bool {
    vouching(secret, words).verify_slice(tag).is_ok()
}

/// Creates an HMAC with the secret as key and `parts` as input.
fn keyed<const N: usize>(secret: &Secret, parts: [&[u8]; N]) -> Hmac<Sha256> {
    // HMAC accepts keys of any length, so the error in the signature cannot occur.
    let mac = Hmac::<Sha256>::new_from_slice(secret.expose()).unwrap_or_else(|_| unreachable!("a key of any length will do"));
    parts.into_iter().fold(mac, |mac, part| mac.chain_update(part))
}

/// Creates the HMAC of one side of a proof.
fn mac(secret: &Secret, side: Side, purpose: Purpose, nonces: [&Word; 2], context: &[u8]) -> Hmac<Sha256> {
    keyed(secret, [LABEL, &[side as u8, purpose as u8, context.len() as u8], nonces[0], nonces[1], context])
}

fn vouching(secret: &Secret, words: &[u8]) -> Hmac<Sha256> {
    keyed(secret, [VOUCH_LABEL, words])
}

/// Derives the key of a handshake: Noise needs 32 bytes, and a secret may have a different length.
fn handshake_key(secret: &Secret) -> Word {
    keyed(secret, [KEY_LABEL]).finalize().into_bytes().into()
}

/// Derives the key for NCCL, which reveals nothing about the secret or any other key.
#[cfg(feature = "cuda")]
pub(crate) fn nccl_key(secret: &Secret) -> Word {
    keyed(secret, [b"collectives nccl key 1\0"]).finalize().into_bytes().into()
}

/// Returns the data that both ends of a handshake must agree on.
fn prologue(purpose: Purpose, context: &[u8]) -> Vec<u8> {
    [PROLOGUE_LABEL, &[VERSION, purpose as u8, context.len() as u8], context].concat()
}

/// Creates the bytes that show that their sender has the keys.
fn confirm(cipher: &mut Cipher) -> Result<Word, AuthenticationError> {
    let mut word = [0; 32];
    let sealed = cipher.seal(&[0; size_of::<Word>() - noise::TAG_BYTES], &mut word);
    sealed.map(|()| word).map_err(|error| AuthenticationError::Junk(format!("this process cannot encrypt: {error}")))
}

/// Whether `word` shows that its sender has the keys.
fn is_confirmed(cipher: &mut Cipher, word: &[u8]) -> bool {
    let mut plain = [1; size_of::<Word>()];
    cipher.open(word, &mut plain).is_some_and(|length| plain[..length] == [0; size_of::<Word>() - noise::TAG_BYTES])
}

/// Refuses bytes that do not begin with `magic`, as far as they have arrived, and any version but this one.
fn check_begin(bytes: &[u8], magic: &[u8; 8]) -> Result<(), AuthenticationError> {
    let seen = bytes.len().min(magic.len());
    if bytes[..seen] != magic[..seen] {
        let begin = bytes[..bytes.len().min(16)].escape_ascii();
        return Err(AuthenticationError::Junk(format!("it sent \"{begin}\" instead of a proof")));
    }
    match bytes.get(8) {
        Some(&version) if version != VERSION => Err(AuthenticationError::Junk(format!(
            "its proof has version {version}, and this process uses version {VERSION}; build all ranks from one release"
        ))),
        _ => Ok(()),
    }
}

/// Returns 256 random bits from the system.
pub(crate) fn random() -> io::Result<Word> {
    let mut word = [0; 32];
    // The kernel returns up to 256 bytes without a short read.
    rustix::rand::getrandom(&mut word, rustix::rand::GetRandomFlags::empty())?;
    Ok(word)
}
