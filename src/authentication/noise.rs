//! The Noise protocol by [`snow`], `Noise_NNpsk0_25519_AESGCM_SHA256`, with the primitives of `ring` and `sha2`.
//!
//! - NN: neither end has a permanent key. Each end makes a new key for each connection. So an attacker that learns the
//!   secret later cannot decrypt recorded traffic.
//! - psk0: the secret is part of the very first key, so the first message of either end is worthless without it.
//! - AES-GCM: with the processor's instructions it is twice as fast as ChaCha20-Poly1305
//!   (`benches/record/encryption.md`).
//!
//! Each direction has a key and counts its messages, so a message that was changed, dropped, repeated or moved does
//! not decrypt. The counter has 64 bits and cannot run out. But AES-GCM weakens as one key encrypts more data. So each
//! direction's key is replaced after [`MESSAGES_PER_KEY`] messages, by Noise's own `REKEY`.

use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::agreement::{self, EphemeralPrivateKey, UnparsedPublicKey, X25519};
use ring::rand::{SecureRandom, SystemRandom};
use sha2::{Digest, Sha256};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::{Builder, HandshakeState, TransportState, types};

use super::frame::Word;

/// Whether this build can encrypt.
pub(super) const IS_HERE: bool = true;
/// The protocol's name.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// The length of a public key and of a tag, in bytes.
const PUBLIC_BYTES: usize = 32;
pub(crate) const TAG_BYTES: usize = 16;
/// The length of either message of the handshake: a public key and a tag.
pub(super) const HANDSHAKE_BYTES: usize = PUBLIC_BYTES + TAG_BYTES;
/// The longest message, with its tag.
pub(crate) const MESSAGE_BYTES: usize = 65_535;
/// The number of messages that one key encrypts: at most 4 GiB, or 2^28 blocks. An observer can distinguish them from
/// noise with an advantage of 2^-73.
const MESSAGES_PER_KEY: u64 = 1 << 16;

/// A message of the handshake.
pub(super) type HandshakeMessage = [u8; HANDSHAKE_BYTES];

/// The initiator's end of a handshake that has begun.
pub(super) struct Handshake(Box<HandshakeState>);

impl Handshake {
    /// Begins a handshake and returns its first message. Both ends must use the same `prologue`.
    pub(super) fn begin(key: &Word, prologue: &[u8]) -> io::Result<(Self, HandshakeMessage)> {
        let builder = builder(key, prologue).and_then(Builder::build_initiator);
        let mut state = builder.map_err(|error| io::Error::other(format!("beginning a Noise handshake: {error}")))?;
        let mut message = [0; HANDSHAKE_BYTES];
        match state.write_message(&[], &mut message) {
            Ok(HANDSHAKE_BYTES) => Ok((Self(Box::new(state)), message)),
            other => Err(io::Error::other(format!("beginning a Noise handshake: {other:?}"))),
        }
    }

    /// Completes the handshake with the other end's message. Returns `None` if that end does not know the key, or if
    /// bytes were changed on the way.
    pub(super) fn finish(mut self, message: &HandshakeMessage) -> Option<Cipher> {
        self.0.read_message(message, &mut [0; HANDSHAKE_BYTES]).ok()?;
        Cipher::of(*self.0)
    }

    /// Answers the first message as the responder, and returns the keys and the answer. Returns `None` as
    /// [`Handshake::finish`] does.
    pub(super) fn answer(key: &Word, prologue: &[u8], message: &HandshakeMessage) -> Option<(Cipher, HandshakeMessage)> {
        let mut state = builder(key, prologue).and_then(Builder::build_responder).ok()?;
        state.read_message(message, &mut [0; HANDSHAKE_BYTES]).ok()?;
        let mut answer = [0; HANDSHAKE_BYTES];
        let length = state.write_message(&[], &mut answer).ok()?;
        Some((Cipher::of(state).filter(|_| length == HANDSHAKE_BYTES)?, answer))
    }
}

fn builder<'a>(key: &'a Word, prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::with_resolver(PATTERN.parse()?, Box::new(Primitives)).psk(0, key)?.prologue(prologue)
}

/// The keys of a connection. One end seals messages, and the other end opens them in the same order, each of them once.
pub(crate) struct Cipher {
    state: TransportState,
    /// A message could not be opened, so later ones are not opened either.
    is_broken: bool,
}

impl Cipher {
    fn of(state: HandshakeState) -> Option<Self> {
        Some(Self { state: state.into_transport_mode().ok()?, is_broken: false })
    }

    /// Encrypts a message of at most [`MESSAGE_BYTES`] less the tag. `into` has the length of the message and the
    /// tag.
    pub(crate) fn seal(&mut self, plain: &[u8], into: &mut [u8]) -> io::Result<()> {
        if is_time_to_rekey(self.state.sending_nonce()) {
            self.state.rekey_outgoing();
        }
        match self.state.write_message(plain, into) {
            Ok(length) if length == plain.len() + TAG_BYTES => Ok(()),
            other => Err(io::Error::other(format!("encrypting {} bytes: {other:?}", plain.len()))),
        }
    }

    /// Decrypts a message and returns the length of the plain text. `into` has at least the message's length. Returns
    /// `None` if it is not the next message that the other end sealed. Then `into` contains nothing of it, and no
    /// later message is opened.
    pub(crate) fn open(&mut self, sealed: &[u8], into: &mut [u8]) -> Option<usize> {
        if !self.is_broken && is_time_to_rekey(self.state.receiving_nonce()) {
            self.state.rekey_incoming();
        }
        let opened = if self.is_broken { None } else { self.state.read_message(sealed, into).ok() };
        self.is_broken = opened.is_none();
        opened
    }
}

fn is_time_to_rekey(nonce: u64) -> bool {
    nonce > 0 && nonce.is_multiple_of(MESSAGES_PER_KEY)
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cipher").field("is_broken", &self.is_broken).finish_non_exhaustive()
    }
}

/// The source of snow's primitives.
struct Primitives;

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn types::Random>> {
        Some(Box::new(SystemRandomness))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn types::Dh>> {
        matches!(choice, DHChoice::Curve25519).then(|| Box::new(OneExchange::default()) as Box<dyn types::Dh>)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn types::Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::new(Hash(Sha256::new())) as Box<dyn types::Hash>)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn types::Cipher>> {
        matches!(choice, CipherChoice::AESGCM).then(|| Box::new(AesGcm(None)) as Box<dyn types::Cipher>)
    }
}

struct SystemRandomness;

impl types::Random for SystemRandomness {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), snow::Error> {
        SystemRandom::new().fill(dest).map_err(|_| snow::Error::Rng)
    }
}

/// A private key for a single exchange, which is all that NN needs.
#[derive(Default)]
struct OneExchange {
    private: Mutex<Option<EphemeralPrivateKey>>,
    public: [u8; PUBLIC_BYTES],
}

impl types::Dh for OneExchange {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        PUBLIC_BYTES
    }

    fn priv_len(&self) -> usize {
        PUBLIC_BYTES
    }

    /// Does nothing: this function sets a permanent key, and NN has none.
    fn set(&mut self, _: &[u8]) {}

    fn generate(&mut self, _: &mut dyn types::Random) -> Result<(), snow::Error> {
        let private = EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(|_| snow::Error::Rng)?;
        let public = private.compute_public_key().map_err(|_| snow::Error::Dh)?;
        self.public = public.as_ref().try_into().map_err(|_| snow::Error::Dh)?;
        self.private = Mutex::new(Some(private));
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    /// Returns nothing: ring does not expose it, and without permanent keys snow does not ask for it.
    fn privkey(&self) -> &[u8] {
        &[]
    }

    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let private = self.private.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(snow::Error::Dh)?;
        let theirs = UnparsedPublicKey::new(&X25519, pubkey.get(..PUBLIC_BYTES).ok_or(snow::Error::Dh)?);
        let shared = agreement::agree_ephemeral(private, &theirs, |shared| {
            out.get_mut(..PUBLIC_BYTES).zip(shared.get(..PUBLIC_BYTES)).map(|(out, shared)| out.copy_from_slice(shared))
        });
        shared.ok().flatten().ok_or(snow::Error::Dh)
    }
}

struct Hash(Sha256);

impl types::Hash for Hash {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        self.0 = Sha256::new();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(&std::mem::take(&mut self.0).finalize());
    }
}

/// AES-256-GCM. Without a key it neither encrypts nor decrypts.
struct AesGcm(Option<LessSafeKey>);

/// Returns Noise's nonce: four zero bytes, then the counter in big-endian order.
fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl types::Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.0 = UnboundKey::new(&AES_256_GCM, key).ok().map(LessSafeKey::new);
    }

    /// Returns the length written to `out`; 0, and `out` empty or zeroed, if encryption fails.
    fn encrypt(&self, counter: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let sealed = plaintext.len() + TAG_BYTES;
        let (Some(key), Some(out)) = (&self.0, out.get_mut(..sealed)) else { return 0 };
        let (body, tag) = out.split_at_mut(plaintext.len());
        body.copy_from_slice(plaintext);
        match key.seal_in_place_separate_tag(nonce(counter), Aad::from(authtext), body) {
            Ok(value) => {
                tag.copy_from_slice(value.as_ref());
                sealed
            }
            Err(_) => {
                out.fill(0);
                0
            }
        }
    }

    fn decrypt(&self, counter: u64, authtext: &[u8], ciphertext: &[u8], out: &mut [u8]) -> Result<usize, snow::Error> {
        let (Some(key), Some(out)) = (&self.0, out.get_mut(..ciphertext.len())) else { return Err(snow::Error::Decrypt) };
        out.copy_from_slice(ciphertext);
        let opened = key.open_in_place(nonce(counter), Aad::from(authtext), out).map(|plain| plain.len());
        opened.map_err(|_| {
            out.fill(0);
            snow::Error::Decrypt
        })
    }
}
