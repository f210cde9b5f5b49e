//! The responder: the end that accepts a connection, and proves that it knows the secret only after the other end has.

use std::fmt;

use hmac::Mac;

use super::frame::{AuthenticationError, CHALLENGE, ENCRYPTED, FRAME_BYTES, PLAIN, PROOF, Reason, Word, reply, split};
use super::noise::{Cipher, HANDSHAKE_BYTES, Handshake, TAG_BYTES};
use super::secret::Secret;
use super::{CONTEXT_BYTES, OPENING_MAGIC, Purpose, Side, check_begin, confirm, handshake_key, is_confirmed, mac, prologue, random};

/// The responder's end.
pub(crate) struct Responder {
    secret: Secret,
    purpose: Purpose,
    /// The required length of the context, in bytes.
    context_bytes: usize,
    heard: Vec<u8>,
    stage: Stage,
}

/// How far the proof has come.
enum Stage {
    Opening,
    /// The responder waits for the initiator's proof. The bytes are the opening's context.
    Challenged(Challenge, Vec<u8>),
    /// The initiator has proven that it knows the secret. On an encrypted connection, the cipher has the keys for later
    /// bytes.
    Done(Option<Cipher>, Vec<u8>),
    /// The proof has failed.
    Over,
}

/// What the initiator must prove.
enum Challenge {
    /// An HMAC over both nonces.
    Hmac([Word; 2]),
    /// Possession of the handshake's keys. The opening does not prove possession, because anyone can replay a recorded
    /// opening.
    Keys(Cipher),
}

impl Responder {
    /// Waits for an opening with a context of `context_bytes` bytes.
    pub(crate) fn new(secret: &Secret, purpose: Purpose, context_bytes: usize) -> Self {
        debug_assert!(context_bytes <= CONTEXT_BYTES);
        Self { secret: secret.clone(), purpose, context_bytes, heard: Vec::new(), stage: Stage::Opening }
    }

    /// Whether a handshake replaces the HMACs.
    fn encrypts(&self) -> bool {
        self.purpose.encrypts(&self.secret)
    }

    /// Takes in bytes from the initiator. Returns the reply to send once they are complete.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<Option<Vec<u8>>, AuthenticationError> {
        let tag_bytes = if self.encrypts() { TAG_BYTES } else { 0 };
        let wanted = match self.stage {
            Stage::Opening => FRAME_BYTES + self.context_bytes + tag_bytes,
            Stage::Challenged(..) => size_of::<Word>(),
            Stage::Done(..) | Stage::Over => 0,
        };
        let room = FRAME_BYTES + CONTEXT_BYTES + TAG_BYTES + 1 - self.heard.len();
        self.heard.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if let Stage::Opening = self.stage {
            self.check_opening()?;
        }
        if self.heard.len() > wanted {
            return Err(AuthenticationError::Junk("it sent bytes too early".to_owned()));
        }
        if self.heard.len() < wanted {
            return Ok(None);
        }
        let heard = std::mem::take(&mut self.heard);
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Opening => self.challenge(&heard).map(Some),
            Stage::Challenged(Challenge::Hmac(nonces), context) => self.judge(&heard, nonces, context).map(Some),
            Stage::Challenged(Challenge::Keys(cipher), context) => self.judge_keys(&heard, cipher, context).map(Some),
            stage @ (Stage::Done(..) | Stage::Over) => {
                self.stage = stage;
                Ok(None)
            }
        }
    }

    /// Returns the context, once both ends are proven.
    pub(crate) fn proven(&self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Done(_, context) => Some(context),
            _ => None,
        }
    }

    /// Returns the keys for later bytes, once both ends are proven; `None` if the connection is not encrypted.
    pub(crate) fn take_cipher(&mut self) -> Option<Cipher> {
        match &mut self.stage {
            Stage::Done(cipher, _) => cipher.take(),
            _ => None,
        }
    }

    /// Refuses bytes that cannot become an opening for this purpose.
    fn check_opening(&self) -> Result<(), AuthenticationError> {
        let seen = self.heard.len().min(OPENING_MAGIC.len());
        if self.heard[..seen] != OPENING_MAGIC[..seen] {
            return Err(AuthenticationError::Found(Reason::Wanted));
        }
        check_begin(&self.heard, &OPENING_MAGIC)?;
        let expected = [self.purpose as u8, self.context_bytes as u8];
        match self.heard.get(9..12) {
            Some(&[purpose, length, PLAIN]) if [purpose, length] == expected && self.encrypts() => {
                Err(AuthenticationError::Found(Reason::Plain))
            }
            Some(&[purpose, length, ENCRYPTED]) if [purpose, length] == expected && !self.encrypts() => {
                Err(AuthenticationError::Found(Reason::Encrypted))
            }
            Some(&[purpose, length, PLAIN | ENCRYPTED]) if [purpose, length] == expected => Ok(()),
            Some(head) => Err(AuthenticationError::Junk(format!("its proof is for another purpose: got {head:?}, expected {expected:?}"))),
            None => Ok(()),
        }
    }

    /// Returns the answer to a complete opening.
    fn challenge(&mut self, opening: &[u8]) -> Result<Vec<u8>, AuthenticationError> {
        let (frame, rest) =
            opening.split_first_chunk::<FRAME_BYTES>().ok_or_else(|| AuthenticationError::Junk("an incomplete opening".to_owned()))?;
        let (context, tag) = rest.split_at(self.context_bytes);
        let theirs = split(frame).1;
        if !self.encrypts() {
            let nonce = random()
                .map_err(|error| AuthenticationError::Junk(format!("this process cannot get random numbers for the proof: {error}")))?;
            self.stage = Stage::Challenged(Challenge::Hmac([theirs, nonce]), context.to_vec());
            return Ok(reply(CHALLENGE, PLAIN, &nonce).to_vec());
        }
        let mut message = [0; HANDSHAKE_BYTES];
        message[..theirs.len()].copy_from_slice(&theirs);
        message[theirs.len()..].copy_from_slice(tag);
        let answered = Handshake::answer(&handshake_key(&self.secret), &prologue(self.purpose, context), &message);
        let (cipher, answer) = answered.ok_or(AuthenticationError::Found(Reason::Wrong))?;
        self.stage = Stage::Challenged(Challenge::Keys(cipher), context.to_vec());
        let mut key = [0; 32];
        key.copy_from_slice(&answer[..32]);
        Ok([&reply(CHALLENGE, ENCRYPTED, &key), &answer[32..]].concat())
    }

    /// Returns the answer to a tag.
    fn judge(&mut self, tag: &[u8], nonces: [Word; 2], context: Vec<u8>) -> Result<Vec<u8>, AuthenticationError> {
        let mac = |side| mac(&self.secret, side, self.purpose, [&nonces[0], &nonces[1]], &context);
        mac(Side::Initiator).verify_slice(tag).map_err(|_| AuthenticationError::Found(Reason::Wrong))?;
        let proof = reply(PROOF, PLAIN, &mac(Side::Responder).finalize().into_bytes().into());
        self.stage = Stage::Done(None, context);
        Ok(proof.to_vec())
    }

    /// Returns the answer to the initiator's confirmation that it has the keys.
    fn judge_keys(&mut self, confirmation: &[u8], mut cipher: Cipher, context: Vec<u8>) -> Result<Vec<u8>, AuthenticationError> {
        if !is_confirmed(&mut cipher, confirmation) {
            return Err(AuthenticationError::Found(Reason::Wrong));
        }
        let proof = reply(PROOF, ENCRYPTED, &confirm(&mut cipher)?);
        self.stage = Stage::Done(Some(cipher), context);
        Ok(proof.to_vec())
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder").field("purpose", &self.purpose).field("proven", &self.proven().is_some()).finish_non_exhaustive()
    }
}
