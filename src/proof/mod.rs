//! How two processes prove to each other that they know the job's secret, before either acts on anything else that the other says.
//!
//! Bytes in, bytes out: no sockets, no clock. The end that connects is the initiator, the end that accepts the responder.
//!
//! ```text
//! initiator  opening    "colprove", version, purpose, context length, 0, nonce (32), context     44 B + context
//! responder  reply      "colproof", version, CHALLENGE, 0, 0, nonce (32)                          44 B
//! initiator  tag        HMAC of INITIATOR                                                         32 B
//! responder  reply      "colproof", version, PROOF, 0, 0, HMAC of RESPONDER                       44 B
//! ```
//!
//! Instead of either reply the responder may send `"colproof", version, REFUSED, reason, 0, 32 zeros` and hang up. Neither end sends
//! anything before its turn. The HMAC is that of SHA-256, keyed with the secret, over
//!
//! ```text
//! "collectives proof 1\0", side, purpose, context length (1), the initiator's nonce, the responder's nonce, context
//! ```
//!
//! where the context is what the connection is about: between ranks the hello (job, communicator, both ranks, channel), for shared
//! memory the name of the socket. Both nonces are drawn anew for each connection, so a recorded proof is worth nothing. The side is part of
//! what is proven, so neither end's own words can be sent back to it. The initiator proves itself first, so an unproven connection sees
//! nothing that was computed with the secret. What follows is not protected: whoever controls the network between the two ends can let them
//! prove themselves and then take the connection over. SECURITY.md says what is promised.
//!
//! [`admission`] says how many connections may be there without a proof, and for how long.

mod admission;
mod frame;
mod secret;
#[cfg(test)]
mod tests;

use std::{fmt, io};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

pub(crate) use admission::Admission;
use frame::{CHALLENGE, FRAME_BYTES, PROOF, REFUSED, REPLY_MAGIC, VERSION, Word, reply, split};
pub(crate) use frame::{Reason, Unproven};
pub use secret::Secret;

/// The first bytes of an opening.
const OPENING_MAGIC: [u8; 8] = *b"colprove";
/// What every HMAC of a proof begins with.
const LABEL: &[u8] = b"collectives proof 1\0";
/// The same for what a rank vouches for.
const VOUCH_LABEL: &[u8] = b"collectives vouch 1\0";
/// The longest context.
const CONTEXT_BYTES: usize = 64;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A client and a server of a store.
    Store = 1,
    /// Two ranks.
    Link = 2,
    /// Two ranks of one host, one of which hands a file to the other.
    Memory = 3,
}

/// Who computed an HMAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Initiator = 1,
    Responder = 2,
}

/// Whether bytes are the beginning of an opening.
pub(crate) fn is_opening(bytes: &[u8]) -> bool {
    bytes.starts_with(&OPENING_MAGIC)
}

/// Whether four bytes are the beginning of a reply, where something else was asked for.
pub(crate) fn is_reply(bytes: [u8; 4]) -> bool {
    REPLY_MAGIC.starts_with(&bytes)
}

/// Proves that somebody who knows the secret said `words`, at some time, to somebody. It does not keep out whoever can repeat it.
pub(crate) fn vouch(secret: &Secret, words: &[u8]) -> Word {
    vouching(secret, words).finalize().into_bytes().into()
}

/// Whether `tag` is what [`vouch`] gives.
pub(crate) fn is_vouched(secret: &Secret, words: &[u8], tag: &Word) -> bool {
    vouching(secret, words).verify_slice(tag).is_ok()
}

/// The initiator's end.
pub(crate) struct Initiator {
    secret: Secret,
    purpose: Purpose,
    context: Vec<u8>,
    nonce: Word,
    /// The responder's nonce, once it is known.
    challenge: Option<Word>,
    heard: Vec<u8>,
}

/// What the initiator does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Listen on.
    Listen,
    /// Send this, then listen on.
    Send(Word),
    /// Both are proven.
    Done,
}

impl Initiator {
    /// Begins a proof; `context` has at most 64 bytes.
    pub(crate) fn new(secret: &Secret, purpose: Purpose, context: &[u8]) -> io::Result<Self> {
        debug_assert!(context.len() <= CONTEXT_BYTES);
        Ok(Self { secret: secret.clone(), purpose, context: context.to_vec(), nonce: random()?, challenge: None, heard: Vec::new() })
    }

    /// What is to be sent first.
    pub(crate) fn opening(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FRAME_BYTES + self.context.len());
        bytes.extend(OPENING_MAGIC);
        bytes.extend([VERSION, self.purpose as u8, self.context.len() as u8, 0]);
        bytes.extend(self.nonce);
        bytes.extend(&self.context);
        bytes
    }

    /// How many bytes the next [`Initiator::receive`] may be given. Those behind them are no part of the proof.
    pub(crate) fn wants(&self) -> usize {
        FRAME_BYTES - self.heard.len()
    }

    /// Takes in what the responder sent.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<Step, Unproven> {
        if bytes.len() > self.wants() {
            return Err(Unproven::Junk(format!("it sent {} bytes more than a reply has", bytes.len() - self.wants())));
        }
        self.heard.extend_from_slice(bytes);
        check_begin(&self.heard, &REPLY_MAGIC)?;
        let Some(frame) = self.heard.first_chunk::<FRAME_BYTES>() else { return Ok(Step::Listen) };
        let (head, word) = split(frame);
        self.heard.clear();
        match (head, self.challenge) {
            ([REFUSED, reason, 0], _) => Err(Unproven::Told(Reason::from_code(reason))),
            ([CHALLENGE, 0, 0], None) => {
                self.challenge = Some(word);
                Ok(Step::Send(self.mac(Side::Initiator, &word).finalize().into_bytes().into()))
            }
            ([PROOF, 0, 0], Some(challenge)) => match self.mac(Side::Responder, &challenge).verify_slice(&word) {
                Ok(()) => Ok(Step::Done),
                Err(_) => Err(Unproven::Found(Reason::Wrong)),
            },
            (head, _) => Err(Unproven::Junk(format!("its reply begins with {head:?}, out of turn"))),
        }
    }

    fn mac(&self, side: Side, challenge: &Word) -> Hmac<Sha256> {
        mac(&self.secret, side, self.purpose, [&self.nonce, challenge], &self.context)
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("purpose", &self.purpose).field("challenged", &self.challenge.is_some()).finish_non_exhaustive()
    }
}

/// The responder's end.
pub(crate) struct Responder {
    secret: Secret,
    purpose: Purpose,
    /// How long the context has to be.
    context_bytes: usize,
    heard: Vec<u8>,
    stage: Stage,
}

/// How far a responder is.
enum Stage {
    Opening,
    /// With both nonces and the context.
    Challenged([Word; 2], Vec<u8>),
    Done(Vec<u8>),
}

impl Responder {
    /// Waits for an opening with a context of so many bytes.
    pub(crate) fn new(secret: &Secret, purpose: Purpose, context_bytes: usize) -> Self {
        debug_assert!(context_bytes <= CONTEXT_BYTES);
        Self { secret: secret.clone(), purpose, context_bytes, heard: Vec::new(), stage: Stage::Opening }
    }

    /// Takes in what the initiator sent, and says what to send in return, if it is complete.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<Option<[u8; FRAME_BYTES]>, Unproven> {
        let wanted = match self.stage {
            Stage::Opening => FRAME_BYTES + self.context_bytes,
            Stage::Challenged(..) => size_of::<Word>(),
            Stage::Done(_) => 0,
        };
        self.heard.extend_from_slice(&bytes[..bytes.len().min(FRAME_BYTES + CONTEXT_BYTES + 1 - self.heard.len())]);
        if let Stage::Opening = self.stage {
            self.check_opening()?;
        }
        if self.heard.len() > wanted {
            return Err(Unproven::Junk("it sent bytes before its turn".to_owned()));
        }
        if self.heard.len() < wanted {
            return Ok(None);
        }
        let heard = std::mem::take(&mut self.heard);
        match std::mem::replace(&mut self.stage, Stage::Opening) {
            Stage::Opening => self.challenge(&heard).map(Some),
            Stage::Challenged(nonces, context) => self.judge(&heard, nonces, context).map(Some),
            done @ Stage::Done(_) => {
                self.stage = done;
                Ok(None)
            }
        }
    }

    /// What the connection is about, once both ends are proven.
    pub(crate) fn proven(&self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Done(context) => Some(context),
            _ => None,
        }
    }

    /// Refuses bytes that cannot become an opening for this purpose.
    fn check_opening(&self) -> Result<(), Unproven> {
        let seen = self.heard.len().min(OPENING_MAGIC.len());
        if self.heard[..seen] != OPENING_MAGIC[..seen] {
            return Err(Unproven::Found(Reason::Wanted));
        }
        check_begin(&self.heard, &OPENING_MAGIC)?;
        let expected = [self.purpose as u8, self.context_bytes as u8, 0];
        match self.heard.get(9..12) {
            Some(head) if head != expected => {
                Err(Unproven::Junk(format!("its proof is for another purpose: {head:?} where {expected:?} is wanted")))
            }
            _ => Ok(()),
        }
    }

    /// The answer to a complete opening.
    fn challenge(&mut self, opening: &[u8]) -> Result<[u8; FRAME_BYTES], Unproven> {
        let (frame, context) = opening.split_first_chunk::<FRAME_BYTES>().ok_or_else(|| Unproven::Junk("half an opening".to_owned()))?;
        let nonce = random().map_err(|error| Unproven::Junk(format!("this process has no random numbers for it: {error}")))?;
        self.stage = Stage::Challenged([split(frame).1, nonce], context.to_vec());
        Ok(reply(CHALLENGE, 0, &nonce))
    }

    /// The answer to a tag.
    fn judge(&mut self, tag: &[u8], nonces: [Word; 2], context: Vec<u8>) -> Result<[u8; FRAME_BYTES], Unproven> {
        let mac = |side| mac(&self.secret, side, self.purpose, [&nonces[0], &nonces[1]], &context);
        mac(Side::Initiator).verify_slice(tag).map_err(|_| Unproven::Found(Reason::Wrong))?;
        let proof = reply(PROOF, 0, &mac(Side::Responder).finalize().into_bytes().into());
        self.stage = Stage::Done(context);
        Ok(proof)
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder").field("purpose", &self.purpose).field("proven", &self.proven().is_some()).finish_non_exhaustive()
    }
}

/// An HMAC that is keyed and has taken in `parts`.
fn keyed<const N: usize>(secret: &Secret, parts: [&[u8]; N]) -> Hmac<Sha256> {
    // HMAC takes keys of any length: the error that the interface knows cannot occur.
    let mac = Hmac::<Sha256>::new_from_slice(secret.expose()).unwrap_or_else(|_| unreachable!("a key of any length will do"));
    parts.into_iter().fold(mac, |mac, part| mac.chain_update(part))
}

/// What one side of a proof computes.
fn mac(secret: &Secret, side: Side, purpose: Purpose, nonces: [&Word; 2], context: &[u8]) -> Hmac<Sha256> {
    keyed(secret, [LABEL, &[side as u8, purpose as u8, context.len() as u8], nonces[0], nonces[1], context])
}

fn vouching(secret: &Secret, words: &[u8]) -> Hmac<Sha256> {
    keyed(secret, [VOUCH_LABEL, words])
}

/// Refuses bytes that begin otherwise, as far as they go, and another version.
fn check_begin(bytes: &[u8], magic: &[u8; 8]) -> Result<(), Unproven> {
    let seen = bytes.len().min(magic.len());
    if bytes[..seen] != magic[..seen] {
        let begin = bytes[..bytes.len().min(16)].escape_ascii();
        return Err(Unproven::Junk(format!("it sent \"{begin}\" where one was wanted")));
    }
    match bytes.get(8) {
        Some(&version) if version != VERSION => {
            Err(Unproven::Junk(format!("it proves in version {version}, and this process in version {VERSION}; build all ranks alike")))
        }
        _ => Ok(()),
    }
}

/// 256 random bits from the system.
pub(crate) fn random() -> io::Result<Word> {
    let mut word = [0; 32];
    // The kernel gives up to 256 bytes whole.
    rustix::rand::getrandom(&mut word, rustix::rand::GetRandomFlags::empty())?;
    Ok(word)
}
