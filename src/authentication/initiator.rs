//! The initiator: the end that connects, and the first of the two to prove that it knows the secret.

use std::{fmt, io};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::frame::{
    AuthenticationError, CHALLENGE, ENCRYPTED, FRAME_BYTES, PLAIN, PROOF, REFUSED, REPLY_MAGIC, Reason, VERSION, Word, split,
};
use super::noise::{Cipher, HANDSHAKE_BYTES, Handshake, TAG_BYTES};
use super::secret::Secret;
use super::{CONTEXT_BYTES, OPENING_MAGIC, Purpose, Side, check_begin, confirm, handshake_key, is_confirmed, mac, prologue, random};

/// The initiator's end.
pub(crate) struct Initiator {
    secret: Secret,
    purpose: Purpose,
    context: Vec<u8>,
    opening: Vec<u8>,
    stage: Stage,
    heard: Vec<u8>,
}

/// The mechanism of the proof, and how far it has come.
pub(super) enum Stage {
    /// HMACs over two nonces: the initiator's `nonce` and the responder's `challenge`. `challenge` is `None` until it
    /// has arrived.
    Hmac { nonce: Word, challenge: Option<Word> },
    /// The handshake of an encrypted connection. The opening is its first message.
    Handshake(Handshake),
    /// The handshake is complete, and the responder must show that it has the keys.
    Keys(Cipher),
    /// Both ends have the keys.
    Sealed(Cipher),
    /// The proof has ended: it has failed, or it has succeeded on a connection that is not encrypted.
    Over,
}

/// What the initiator does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Receive more.
    Listen,
    /// Send these bytes, then receive more.
    Send(Word),
    /// Both ends have proven that they know the secret.
    Done,
}

impl Initiator {
    /// Begins a proof; `context` has at most 64 bytes.
    pub(crate) fn new(secret: &Secret, purpose: Purpose, context: &[u8]) -> io::Result<Self> {
        debug_assert!(context.len() <= CONTEXT_BYTES);
        let head = |mode| [&OPENING_MAGIC[..], &[VERSION, purpose as u8, context.len() as u8, mode]].concat();
        let (stage, opening) = if purpose.encrypts(secret) {
            let (handshake, message) = Handshake::begin(&handshake_key(secret), &prologue(purpose, context))?;
            let (key, tag) = message.split_at(size_of::<Word>());
            (Stage::Handshake(handshake), [&head(ENCRYPTED), key, context, tag].concat())
        } else {
            let nonce = random()?;
            (Stage::Hmac { nonce, challenge: None }, [&head(PLAIN), &nonce[..], context].concat())
        };
        Ok(Self { secret: secret.clone(), purpose, context: context.to_vec(), opening, stage, heard: Vec::new() })
    }

    /// Returns the bytes to send first.
    pub(crate) fn opening(&self) -> Vec<u8> {
        self.opening.clone()
    }

    /// Returns how many bytes the next [`Initiator::receive`] may take. Bytes after those are not part of the proof.
    pub(crate) fn wants(&self) -> usize {
        self.reply_bytes() - self.heard.len()
    }

    /// Returns the length of the incoming reply, as far as it is known.
    fn reply_bytes(&self) -> usize {
        let has_tag = matches!(self.stage, Stage::Handshake(_)) && self.heard.get(9) == Some(&CHALLENGE);
        if has_tag { FRAME_BYTES + TAG_BYTES } else { FRAME_BYTES }
    }

    /// Takes in bytes from the responder.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<Step, AuthenticationError> {
        if bytes.len() > self.wants() {
            return Err(AuthenticationError::Junk(format!("its reply is {} bytes too long", bytes.len() - self.wants())));
        }
        self.heard.extend_from_slice(bytes);
        check_begin(&self.heard, &REPLY_MAGIC)?;
        if self.heard.len() < self.reply_bytes() {
            return Ok(Step::Listen);
        }
        let heard = std::mem::take(&mut self.heard);
        let Some((frame, tag)) = heard.split_first_chunk::<FRAME_BYTES>() else { return Ok(Step::Listen) };
        let (head, word) = split(frame);
        match (head, std::mem::replace(&mut self.stage, Stage::Over)) {
            ([REFUSED, reason, 0], _) => Err(AuthenticationError::Refused(Reason::from_code(reason))),
            ([CHALLENGE, 0, PLAIN], Stage::Hmac { nonce, challenge: None }) => {
                self.stage = Stage::Hmac { nonce, challenge: Some(word) };
                Ok(Step::Send(self.mac(Side::Initiator, &nonce, &word).finalize().into_bytes().into()))
            }
            ([PROOF, 0, PLAIN], Stage::Hmac { nonce, challenge: Some(challenge) }) => {
                let verified = self.mac(Side::Responder, &nonce, &challenge).verify_slice(&word);
                verified.map(|()| Step::Done).map_err(|_| AuthenticationError::Found(Reason::Wrong))
            }
            ([CHALLENGE, 0, ENCRYPTED], Stage::Handshake(handshake)) => {
                let mut message = [0; HANDSHAKE_BYTES];
                message[..word.len()].copy_from_slice(&word);
                message[word.len()..].copy_from_slice(tag);
                let mut cipher = handshake.finish(&message).ok_or(AuthenticationError::Found(Reason::Wrong))?;
                let confirmation = confirm(&mut cipher)?;
                self.stage = Stage::Keys(cipher);
                Ok(Step::Send(confirmation))
            }
            ([PROOF, 0, ENCRYPTED], Stage::Keys(mut cipher)) => {
                if !is_confirmed(&mut cipher, &word) {
                    return Err(AuthenticationError::Found(Reason::Wrong));
                }
                self.stage = Stage::Sealed(cipher);
                Ok(Step::Done)
            }
            (head, _) => Err(AuthenticationError::Junk(format!("its reply begins with {head:?}, which is out of order"))),
        }
    }

    /// Returns the keys for later bytes, once both ends are proven; `None` if the connection is not encrypted.
    pub(crate) fn into_cipher(self) -> Option<Cipher> {
        match self.stage {
            Stage::Sealed(cipher) => Some(cipher),
            Stage::Hmac { .. } | Stage::Handshake(_) | Stage::Keys(_) | Stage::Over => None,
        }
    }

    pub(super) fn mac(&self, side: Side, nonce: &Word, challenge: &Word) -> Hmac<Sha256> {
        mac(&self.secret, side, self.purpose, [nonce, challenge], &self.context)
    }

    #[cfg(test)]
    pub(super) fn stage(&self) -> &Stage {
        &self.stage
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("purpose", &self.purpose).finish_non_exhaustive()
    }
}
