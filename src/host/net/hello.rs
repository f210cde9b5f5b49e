//! The handshake messages of a new link, as bytes. No I/O.
//!
//! The end that connects sends a [`Hello`]. The end that accepts sends an [`Answer`]. If the answer is a welcome, the
//! connecting end replies with [`CONFIRM`], and only then is the link open. So an attempt that was abandoned midway
//! never looks like a link.
//!
//! The handshake does not protect against attackers: the job's number only prevents mix-ups. If the job has a secret,
//! the hello is sent only as the context of a proof ([`crate::authentication`]), and it is evaluated only after both
//! ends are authenticated.

use std::fmt;

/// The first bytes of a hello.
const HELLO_MAGIC: [u8; 8] = *b"colhello";
/// The first bytes of an answer.
const ANSWER_MAGIC: [u8; 8] = *b"colreply";
/// The version of the handshake.
const VERSION: u8 = 1;
/// The byte that the connecting side sends after a welcome.
pub(super) const CONFIRM: u8 = b'!';
/// The longest text of a refusal, in bytes.
pub(super) const REFUSAL_TEXT_BYTES: usize = 200;

/// Whether bytes begin like a hello. A rank with a secret begins with a proof instead.
pub(super) fn is_hello(bytes: &[u8]) -> bool {
    bytes.starts_with(&HELLO_MAGIC)
}

/// The purpose of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Channel {
    /// Collective calls, in the order in which the caller makes them.
    Collective,
    /// Messages between two ranks. The progress engine sends and receives them.
    PointToPoint,
}

/// What both ends of a link must agree on: the job, its communicator, and the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) job_nonce: [u8; 16],
    pub(super) communicator: u64,
    /// This process's rank.
    pub(super) rank: u32,
    pub(super) world_size: u32,
}

/// The first message on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) channel: Channel,
    /// The number of the connection among those of its link.
    pub(super) connection: u8,
    /// The rank that connects.
    pub(super) sender: Membership,
    /// The rank that it means to reach.
    pub(super) receiver: u32,
}

/// The reason why bytes are not a hello of this version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoHello {
    /// The bytes are not a message of this crate.
    Junk(String),
    /// The bytes come from a version of this crate with a different handshake. This rank answers with this refusal.
    Refused(Refusal),
}

impl Hello {
    /// Length of the encoded form in bytes. A later version must begin with as many bytes. If bytes are left unread
    /// when a connection is closed, the refusal is lost.
    pub(super) const BYTES: usize = 52;

    /// Encodes magic, version, channel, connection, a zero, sender, receiver, world size, four zeros, communicator, job nonce.
    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        bytes[8] = VERSION;
        bytes[9] = match self.channel {
            Channel::Collective => 0,
            Channel::PointToPoint => 1,
        };
        bytes[10] = self.connection;
        bytes[12..16].copy_from_slice(&self.sender.rank.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.receiver.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.sender.world_size.to_le_bytes());
        bytes[28..36].copy_from_slice(&self.sender.communicator.to_le_bytes());
        bytes[36..52].copy_from_slice(&self.sender.job_nonce);
        bytes
    }

    /// Decodes [`Hello::to_bytes`] from what has arrived so far. Returns `None` while there are too few bytes to
    /// decide.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<Self>, NoHello> {
        check_magic(bytes, &HELLO_MAGIC).map_err(NoHello::Junk)?;
        let Some(&version) = bytes.get(8) else { return Ok(None) };
        if version != VERSION {
            let text = format!("the hello has version {version}, but this end uses version {VERSION}");
            return Err(NoHello::Refused(Refusal::new(Reason::Version, text)));
        }
        let Some(bytes) = bytes.first_chunk::<{ Self::BYTES }>() else { return Ok(None) };
        let channel = match bytes[9] {
            0 => Channel::Collective,
            1 => Channel::PointToPoint,
            other => return Err(NoHello::Junk(format!("the hello names channel {other}; only 0 and 1 exist"))),
        };
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut job_nonce = [0; 16];
        job_nonce.copy_from_slice(&bytes[36..52]);
        let communicator = u64::from(word(28)) | u64::from(word(32)) << 32;
        let sender = Membership { job_nonce, communicator, rank: word(12), world_size: word(20) };
        Ok(Some(Self { channel, connection: bytes[10], sender, receiver: word(16) }))
    }

    /// Whether the receiver opens this link: of two ranks with a link for collectives, the lower one connects.
    pub(super) fn is_opened_by_receiver(&self) -> bool {
        self.channel == Channel::Collective && self.receiver < self.sender.rank
    }

    /// Checks whether the process `me` may accept a link that begins with this hello.
    pub(super) fn check(&self, me: &Membership) -> Result<(), Refusal> {
        let sender = &self.sender;
        let refuse = |reason, text: String| Err(Refusal::new(reason, text));
        if sender.job_nonce != me.job_nonce {
            return refuse(Reason::Job, "this process belongs to another job".to_owned());
        }
        if sender.communicator != me.communicator {
            return refuse(
                Reason::Communicator,
                format!("the hello names communicator {:#x}, but this is {:#x}", sender.communicator, me.communicator),
            );
        }
        if sender.world_size != me.world_size {
            return refuse(
                Reason::WorldSize,
                format!("the hello names world size {}, but the world size here is {}", sender.world_size, me.world_size),
            );
        }
        if self.receiver != me.rank {
            return refuse(Reason::Rank, format!("the hello is for rank {}, but this is rank {}", self.receiver, me.rank));
        }
        if sender.rank >= me.world_size || sender.rank == me.rank {
            return refuse(Reason::Rank, format!("rank {} of {} cannot link to rank {}", sender.rank, me.world_size, me.rank));
        }
        if self.is_opened_by_receiver() {
            let (sender, me) = (sender.rank, me.rank);
            return refuse(Reason::Rank, format!("rank {sender} connected to rank {me}, but this link must be opened by rank {me}"));
        }
        Ok(())
    }
}

/// The reason why a link was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Version,
    Job,
    Communicator,
    WorldSize,
    Rank,
    /// The sender already has a link of this kind.
    Duplicate,
    /// The sender has not proven that it knows the job's secret.
    Unauthenticated,
    /// The link has fewer connections here.
    Connection,
    /// A reason that only a later version of this crate knows.
    Other(u8),
}

impl Reason {
    /// Returns the code on the wire; 0 is a welcome.
    fn code(self) -> u8 {
        match self {
            Self::Version => 1,
            Self::Job => 2,
            Self::Communicator => 3,
            Self::WorldSize => 4,
            Self::Rank => 5,
            Self::Duplicate => 6,
            Self::Unauthenticated => 7,
            Self::Connection => 8,
            Self::Other(code) => code,
        }
    }

    /// Decodes [`Reason::code`].
    fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Version,
            2 => Self::Job,
            3 => Self::Communicator,
            4 => Self::WorldSize,
            5 => Self::Rank,
            6 => Self::Duplicate,
            7 => Self::Unauthenticated,
            8 => Self::Connection,
            other => Self::Other(other),
        }
    }
}

/// A refused link: the reason, and an explanation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) text: String,
}

impl Refusal {
    /// Creates a refusal. The text is cut to the length that an answer can carry.
    pub(super) fn new(reason: Reason, mut text: String) -> Self {
        let mut end = text.len().min(REFUSAL_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        Self { reason, text }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (reason {})", self.text.escape_debug(), self.reason.code())
    }
}

/// The reply to a hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// The connection reached the right process.
    Welcome,
    /// The process refuses the link.
    Refused(Refusal),
}

impl Answer {
    /// Length of an answer without its text.
    const HEAD_BYTES: usize = 12;
    /// The longest encoded form.
    pub(super) const MAX_BYTES: usize = Self::HEAD_BYTES + REFUSAL_TEXT_BYTES;

    /// Encodes magic, version, code, length of the text, text.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let (code, text) = match self {
            Self::Welcome => (0, ""),
            Self::Refused(refusal) => (refusal.reason.code(), refusal.text.as_str()),
        };
        let mut bytes = Vec::with_capacity(Self::HEAD_BYTES + text.len());
        bytes.extend_from_slice(&ANSWER_MAGIC);
        bytes.extend_from_slice(&[VERSION, code, text.len() as u8, 0]);
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    /// Decodes [`Answer::to_bytes`] from what has arrived so far. Returns `None` while there are too few bytes to
    /// decide. If the bytes are not an answer, the error quotes them.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<Self>, String> {
        check_magic(bytes, &ANSWER_MAGIC)?;
        let Some(head) = bytes.first_chunk::<{ Self::HEAD_BYTES }>() else { return Ok(None) };
        let (version, code, len) = (head[8], head[9], usize::from(head[10]));
        if len > REFUSAL_TEXT_BYTES {
            return Err(format!("the answer's text has {len} bytes, but the limit is {REFUSAL_TEXT_BYTES}"));
        }
        let Some(text) = bytes.get(Self::HEAD_BYTES..Self::HEAD_BYTES + len) else { return Ok(None) };
        // The refusal of another version is readable text, but its welcome may mean something else.
        match code {
            0 if version != VERSION => Err(format!("the welcome has version {version}, but this end uses version {VERSION}")),
            0 if len > 0 => Err(format!("the welcome carries {len} bytes of text: {}", quote(text))),
            0 => Ok(Some(Self::Welcome)),
            code => Ok(Some(Self::Refused(Refusal::new(Reason::from_code(code), String::from_utf8_lossy(text).into_owned())))),
        }
    }
}

/// Checks that `bytes` begin like `magic`, as far as they go.
fn check_magic(bytes: &[u8], magic: &[u8; 8]) -> Result<(), String> {
    let seen = bytes.len().min(magic.len());
    if bytes[..seen] == magic[..seen] { Ok(()) } else { Err(format!("the bytes {} are not a greeting of this crate", quote(bytes))) }
}

/// Returns the first bytes in printable form.
pub(super) fn quote(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes[..bytes.len().min(16)].escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(rank: u32) -> Membership {
        Membership { job_nonce: *b"0123456789abcdef", communicator: 0x1122_3344_5566_7788, rank, world_size: 9 }
    }

    fn hello(channel: Channel, sender: u32, receiver: u32) -> Hello {
        Hello { channel, connection: 0, sender: membership(sender), receiver }
    }

    #[test]
    fn hellos_survive_the_wire() {
        for channel in [Channel::Collective, Channel::PointToPoint] {
            let hello = hello(channel, 3, 4);
            let bytes = hello.to_bytes();
            for len in 0..bytes.len() {
                assert_eq!(Hello::decode(&bytes[..len]), Ok(None), "{len} bytes");
            }
            assert_eq!(Hello::decode(&bytes), Ok(Some(hello)));
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        let bytes = hello(Channel::PointToPoint, 3, 4).to_bytes();
        let expected = b"colhello\x01\x01\0\0\x03\0\0\0\x04\0\0\0\x09\0\0\0\0\0\0\0\x88\x77\x66\x55\x44\x33\x22\x110123456789abcdef";
        assert_eq!(&bytes, expected);
        assert_eq!(Answer::Welcome.to_bytes(), b"colreply\x01\0\0\0");
    }

    #[test]
    fn junk_is_quoted() {
        let Err(NoHello::Junk(text)) = Hello::decode(b"GET / HTTP/1.1\r\n\r\n") else { panic!("taken for a hello") };
        assert!(text.contains(r#""GET / HTTP/1.1\r\n""#), "{text}");
        assert!(matches!(Hello::decode(b"x"), Err(NoHello::Junk(_))), "one wrong byte is enough");

        let mut bytes = hello(Channel::Collective, 3, 4).to_bytes();
        bytes[9] = 7;
        let Err(NoHello::Junk(text)) = Hello::decode(&bytes) else { panic!("channel 7 taken") };
        assert!(text.contains("channel 7"), "{text}");

        bytes[8] = 2;
        let Err(NoHello::Refused(refusal)) = Hello::decode(&bytes[..9]) else { panic!("version 2 taken") };
        assert_eq!(refusal.reason, Reason::Version);
        assert!(refusal.text.contains("version 2"), "{refusal}");
    }

    #[test]
    fn whoever_does_not_belong_is_refused() {
        let me = membership(4);
        assert_eq!(hello(Channel::Collective, 3, 4).check(&me), Ok(()));
        assert_eq!(hello(Channel::PointToPoint, 5, 4).check(&me), Ok(()));
        let refused = |change: &dyn Fn(&mut Hello)| {
            let mut hello = hello(Channel::Collective, 3, 4);
            change(&mut hello);
            hello.check(&me).expect_err("refused").reason
        };
        assert_eq!(refused(&|hello| hello.sender.job_nonce[15] ^= 1), Reason::Job);
        assert_eq!(refused(&|hello| hello.sender.communicator ^= 1 << 63), Reason::Communicator);
        assert_eq!(refused(&|hello| hello.sender.world_size = 10), Reason::WorldSize);
        assert_eq!(refused(&|hello| hello.receiver = 5), Reason::Rank);
        assert_eq!(refused(&|hello| hello.sender.rank = 4), Reason::Rank);
        assert_eq!(refused(&|hello| hello.sender.rank = 9), Reason::Rank);
        assert_eq!(refused(&|hello| hello.sender.rank = u32::MAX), Reason::Rank);
        assert_eq!(refused(&|hello| hello.sender.rank = 5), Reason::Rank, "the lower rank connects");
    }

    #[test]
    fn answers_survive_the_wire() {
        let long = "ü".repeat(150);
        for answer in [
            Answer::Welcome,
            Answer::Refused(Refusal::new(Reason::Job, "no".to_owned())),
            Answer::Refused(Refusal::new(Reason::Other(200), String::new())),
            Answer::Refused(Refusal::new(Reason::Rank, long)),
        ] {
            let bytes = answer.to_bytes();
            assert!(bytes.len() <= Answer::MAX_BYTES);
            for len in 0..bytes.len() {
                assert_eq!(Answer::decode(&bytes[..len]), Ok(None), "{len} bytes of {answer:?}");
            }
            assert_eq!(Answer::decode(&bytes), Ok(Some(answer)));
        }
    }

    #[test]
    fn malformed_answers_are_quoted() {
        let text = Answer::decode(b"colhello\x01\x01\0\0").expect_err("my own hello");
        assert!(text.contains("colhello"), "{text}");
        let text = Answer::decode(b"colreply\x01\x01\xff\0").expect_err("too long");
        assert!(text.contains("255"), "{text}");
        let text = Answer::decode(b"colreply\x02\0\0\0").expect_err("another version's welcome");
        assert!(text.contains("version 2"), "{text}");
        assert!(Answer::decode(b"colreply\x01\0\x02\0ab").is_err());
        let not_utf8 = Answer::decode(b"colreply\x09\x01\x01\0\xff").expect("an answer");
        assert!(matches!(not_utf8, Some(Answer::Refused(refusal)) if refusal.reason == Reason::Version));
    }
}
