//! The frame of every reply in a proof (magic, version, kind, reason and one word), and the reasons why a proof failed.

use std::fmt;

/// The first bytes of a reply.
pub(super) const REPLY_MAGIC: [u8; 8] = *b"colproof";
/// The version of the protocol.
pub(super) const VERSION: u8 = 1;
/// The length of an opening without its context, and of a reply, in bytes.
pub(super) const FRAME_BYTES: usize = 44;
/// The kinds of replies: a challenge, a proof, a refusal.
pub(super) const CHALLENGE: u8 = 1;
pub(super) const PROOF: u8 = 2;
pub(super) const REFUSED: u8 = 3;

/// A random number, or an HMAC.
pub(super) type Word = [u8; 32];

/// The last byte before the word: whether a handshake for encryption replaces the HMACs.
pub(super) const PLAIN: u8 = 0;
pub(super) const ENCRYPTED: u8 = 1;

/// Creates a reply.
pub(super) fn reply(kind: u8, mode: u8, word: &Word) -> [u8; FRAME_BYTES] {
    let mut bytes = [0; FRAME_BYTES];
    bytes[..8].copy_from_slice(&REPLY_MAGIC);
    bytes[8..12].copy_from_slice(&[VERSION, kind, 0, mode]);
    bytes[12..].copy_from_slice(word);
    bytes
}

/// Returns the three bytes after the version of a frame, and its word.
pub(super) fn split(frame: &[u8; FRAME_BYTES]) -> ([u8; 3], Word) {
    let mut word = [0; 32];
    word.copy_from_slice(&frame[12..]);
    ([frame[9], frame[10], frame[11]], word)
}

/// Why a proof failed, as a code on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The responder has no secret.
    NoSecret,
    /// The initiator began without a proof.
    Wanted,
    /// The HMAC is not the expected one. With encryption, the other end's message cannot be decrypted, or does not
    /// contain the expected bytes.
    Wrong,
    /// The initiator's bytes are not a proof, or they are a proof of a different version or for a different purpose. Also
    /// the reason if the responder's process cannot get random numbers for its own part of the proof.
    Malformed,
    /// The responder has too many other connections. Another attempt may succeed.
    Busy,
    /// The responder encrypts its connections, and the initiator does not.
    Plain,
    /// The initiator encrypts its connections, and the responder does not.
    Encrypted,
    /// The responder's process has no descriptor or memory for one more connection.
    Starved,
    /// A reason that a later version defines.
    Other(u8),
}

impl Reason {
    pub(super) const KNOWN: [Self; 8] =
        [Self::NoSecret, Self::Wanted, Self::Wrong, Self::Malformed, Self::Busy, Self::Plain, Self::Encrypted, Self::Starved];

    fn code(self) -> u8 {
        match self {
            Self::NoSecret => 1,
            Self::Wanted => 2,
            Self::Wrong => 3,
            Self::Malformed => 4,
            Self::Busy => 5,
            Self::Plain => 6,
            Self::Encrypted => 7,
            Self::Starved => 8,
            Self::Other(code) => code,
        }
    }

    pub(super) fn from_code(code: u8) -> Self {
        Self::KNOWN.into_iter().find(|reason| reason.code() == code).unwrap_or(Self::Other(code))
    }

    /// Returns the reason of a refusal, from the bytes after the first four of its reply.
    pub(crate) fn of_refusal(tail: &[u8]) -> Option<Self> {
        let [_, _, _, _, _, kind, code, ..] = tail else { return None };
        (*kind == REFUSED).then(|| Self::from_code(*code))
    }

    /// Creates the reply that refuses for this reason.
    pub(crate) fn to_reply(self) -> [u8; FRAME_BYTES] {
        let mut bytes = reply(REFUSED, PLAIN, &[0; 32]);
        bytes[10] = self.code();
        bytes
    }
}

/// Why the other end is not trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AuthenticationError {
    /// The other end refused this end.
    Refused(Reason),
    /// This end refuses the other end.
    Found(Reason),
    /// The other end sent something that is not part of a proof. The text describes the error.
    Junk(String),
}

impl AuthenticationError {
    /// Creates the responder's reply for this error.
    pub(crate) fn to_reply(&self) -> [u8; FRAME_BYTES] {
        match self {
            Self::Refused(reason) | Self::Found(reason) => reason.to_reply(),
            Self::Junk(_) => Reason::Malformed.to_reply(),
        }
    }
}

/// The advice if one end encrypts and the other does not.
const ENCRYPT_ALIKE: &str =
    "set COLLECTIVES_ENCRYPT=1 (or Config::encrypt) for all ranks and for the process that serves their store, or for none";

impl fmt::Display for AuthenticationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(Reason::NoSecret) => f.write_str(
                "it has no secret, and this process has one; set COLLECTIVES_SECRET (or Config::secret) for all ranks and for the \
                 process that serves their store, or for none",
            ),
            Self::Refused(Reason::Wanted) => f.write_str(
                "it requires a proof, and this process has no secret; set COLLECTIVES_SECRET (or Config::secret) as on the other ranks",
            ),
            Self::Refused(Reason::Wrong) => f.write_str(
                "it has a different secret than this process; compare COLLECTIVES_SECRET, COLLECTIVES_SECRET_FILE or \
                 Config::secret on all ranks",
            ),
            Self::Refused(Reason::Malformed) => f.write_str("it did not understand this process's proof; build all ranks from one release"),
            Self::Refused(Reason::Busy) => f.write_str("it is already checking too many other connections"),
            Self::Refused(Reason::Starved) => f.write_str(
                "its process has no descriptor or memory left for one more connection; raise its limit on open files (RLIMIT_NOFILE, \
                 `ulimit -n`)",
            ),
            Self::Refused(Reason::Plain) => write!(f, "it encrypts its connections, and this process does not; {ENCRYPT_ALIKE}"),
            Self::Refused(Reason::Encrypted) => write!(f, "it does not encrypt its connections, and this process does; {ENCRYPT_ALIKE}"),
            Self::Refused(Reason::Other(code)) => write!(f, "it refused this process for reason {code}, which this version does not know"),
            Self::Found(Reason::NoSecret) => f.write_str("it offers a proof, and this process has no secret"),
            Self::Found(Reason::Wanted) => f.write_str("it connected without a proof: it has no secret, or is not part of this job"),
            Self::Found(Reason::Plain) => f.write_str("it does not encrypt its connections, and this process does"),
            Self::Found(Reason::Encrypted) => f.write_str("it encrypts its connections, and this process does not"),
            Self::Found(_) => f.write_str("its proof is wrong: it has a different secret, or is not part of this job"),
            Self::Junk(what) => write!(f, "{what}"),
        }
    }
}
