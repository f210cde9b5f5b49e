//! What servers answer.

use super::Malformed;
use super::scan::{Field, Fields, Repeat, Scan, Shape};

/// The kind of answer that a client expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rendezvous) enum Expect {
    /// One byte: STOP_WAITING, READY and their kin.
    Flag,
    /// The nonce of a PING.
    Nonce,
    /// A number.
    Number,
    /// So many values.
    Values(usize),
    /// The number of values that a queue held, and its first if there was one.
    Popped,
    /// A number of keys, and so many keys.
    Keys,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::rendezvous) enum Reply {
    Flag(u8),
    Nonce(u32),
    Number(i64),
    Values(Vec<Vec<u8>>),
    Popped(Option<Vec<u8>>),
    Keys(Vec<Vec<u8>>),
}

impl Expect {
    /// The fields of the answer.
    fn shape(self) -> Shape {
        match self {
            Self::Flag => Shape::once(&[Field::Fixed(1)]),
            Self::Nonce => Shape::once(&[Field::Fixed(4)]),
            Self::Number => Shape::once(&[Field::Fixed(8)]),
            Self::Values(count) => Shape { once: &[], repeat: Repeat::Times(count), each: &[Field::Reply] },
            Self::Popped => Shape { once: &[], repeat: Repeat::IfPositive, each: &[Field::Reply] },
            Self::Keys => Shape { once: &[], repeat: Repeat::Listed, each: &[Field::Reply] },
        }
    }

    /// Turns a complete message into an answer.
    fn parse(self, message: &[u8]) -> Result<Reply, Malformed> {
        let mut fields = Fields::new(message);
        Ok(match self {
            Self::Flag => Reply::Flag(fields.byte()?),
            Self::Nonce => Reply::Nonce(fields.number32()?),
            Self::Number => Reply::Number(fields.number()?),
            Self::Values(count) => Reply::Values((0..count).map(|_| fields.bytes()).collect::<Result<_, _>>()?),
            Self::Popped => Reply::Popped(if fields.number()? > 0 { Some(fields.bytes()?) } else { None }),
            Self::Keys => {
                let count = fields.number()?;
                Reply::Keys((0..count).map(|_| fields.bytes()).collect::<Result<_, _>>()?)
            }
        })
    }
}

/// Gathers the bytes of one answer.
#[derive(Debug)]
pub(in crate::rendezvous) struct ReplyDecoder {
    expect: Expect,
    buffer: Vec<u8>,
    scan: Scan,
}

impl ReplyDecoder {
    /// Expects an answer of the kind `expect`.
    pub(in crate::rendezvous) fn new(expect: Expect) -> Self {
        Self { expect, buffer: Vec::new(), scan: Scan::new(expect.shape(), 0) }
    }

    /// Takes in what has come; hands out the answer once it is complete, with the bytes that came behind it.
    pub(in crate::rendezvous) fn push(&mut self, bytes: &[u8]) -> Result<Option<(Reply, Vec<u8>)>, Malformed> {
        self.buffer.extend_from_slice(bytes);
        let Some(end) = self.scan.advance(&self.buffer)? else { return Ok(None) };
        let rest = self.buffer.split_off(end);
        Ok(Some((self.expect.parse(&self.buffer)?, rest)))
    }
}

/// A length and its bytes.
pub(in crate::rendezvous) fn push_bytes(message: &mut Vec<u8>, bytes: &[u8]) {
    message.extend((bytes.len() as u64).to_le_bytes());
    message.extend_from_slice(bytes);
}
