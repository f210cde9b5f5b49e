//! PyTorch's TCPStore protocol as values: converts requests and replies to bytes and back. No sockets.
//!
//! A request is one byte that identifies the query, then its fields. A reply is its fields alone. Integers are
//! little-endian; lengths and counts have 64 bits. Text and bytes are a length and then that many bytes. There are no
//! frames. The end of a message is known only by reading its fields, which [`scan`] does as bytes arrive.

mod scan;
#[cfg(test)]
mod tests;

pub(super) use scan::Malformed;
use scan::{Field, Fields, Repeat, Scan, Shape};

/// The number in the first request of a connection.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// The answer to WAIT and BARRIER: the wait has succeeded.
pub(super) const STOP_WAITING: u8 = 0;
/// The answer to CANCEL_WAIT.
pub(super) const WAIT_CANCELED: u8 = 1;
/// The answer to CHECK if every key exists.
pub(super) const READY: u8 = 0;
/// The answer to CHECK if a key is missing.
pub(super) const NOT_READY: u8 = 1;

/// The byte that begins each request.
pub(super) mod query {
    pub(in crate::rendezvous) const VALIDATE: u8 = 0;
    pub(in crate::rendezvous) const SET: u8 = 1;
    pub(in crate::rendezvous) const COMPARE_SET: u8 = 2;
    pub(in crate::rendezvous) const GET: u8 = 3;
    pub(in crate::rendezvous) const ADD: u8 = 4;
    pub(in crate::rendezvous) const CHECK: u8 = 5;
    pub(in crate::rendezvous) const WAIT: u8 = 6;
    pub(in crate::rendezvous) const NUM_KEYS: u8 = 7;
    pub(in crate::rendezvous) const DELETE_KEY: u8 = 8;
    pub(in crate::rendezvous) const APPEND: u8 = 9;
    pub(in crate::rendezvous) const MULTI_GET: u8 = 10;
    pub(in crate::rendezvous) const MULTI_SET: u8 = 11;
    pub(in crate::rendezvous) const CANCEL_WAIT: u8 = 12;
    pub(in crate::rendezvous) const PING: u8 = 13;
    pub(in crate::rendezvous) const QUEUE_PUSH: u8 = 14;
    pub(in crate::rendezvous) const QUEUE_POP: u8 = 15;
    pub(in crate::rendezvous) const QUEUE_LEN: u8 = 16;
    pub(in crate::rendezvous) const LIST_KEYS: u8 = 17;
    pub(in crate::rendezvous) const BARRIER: u8 = 18;
}

/// A request as a server reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoreRequest {
    Validate,
    Set { key: Vec<u8>, value: Vec<u8> },
    CompareSet { key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8> },
    Get { key: Vec<u8> },
    Add { key: Vec<u8>, delta: i64 },
    Check { keys: Vec<Vec<u8>> },
    Wait { keys: Vec<Vec<u8>> },
    NumKeys,
    DeleteKey { key: Vec<u8> },
    Append { key: Vec<u8>, value: Vec<u8> },
    MultiGet { keys: Vec<Vec<u8>> },
    MultiSet { pairs: Vec<(Vec<u8>, Vec<u8>)> },
    CancelWait,
    Ping { nonce: u32 },
    QueuePush { key: Vec<u8>, value: Vec<u8> },
    QueuePop { key: Vec<u8> },
    QueueLen { key: Vec<u8> },
    ListKeys,
    Barrier { key: Vec<u8>, world_size: i64 },
}

/// Returns the fields of a query.
fn shape(code: u8) -> Result<Shape, Malformed> {
    use Field::{Fixed, Key, Value};
    Ok(match code {
        query::VALIDATE | query::PING => Shape::once(&[Fixed(4)]),
        query::SET | query::APPEND | query::QUEUE_PUSH => Shape::once(&[Key, Value]),
        query::COMPARE_SET => Shape::once(&[Key, Value, Value]),
        query::GET | query::DELETE_KEY | query::QUEUE_POP | query::QUEUE_LEN => Shape::once(&[Key]),
        query::ADD | query::BARRIER => Shape::once(&[Key, Fixed(8)]),
        query::CHECK | query::WAIT | query::MULTI_GET => Shape::counted(&[Key]),
        query::MULTI_SET => Shape::counted(&[Key, Value]),
        query::NUM_KEYS | query::CANCEL_WAIT | query::LIST_KEYS => Shape::once(&[]),
        unknown => return Err(Malformed(format!("an unknown query {unknown}"))),
    })
}

/// Parses a complete message as a request.
fn parse(message: &[u8]) -> Result<StoreRequest, Malformed> {
    let mut fields = Fields::new(message);
    let request = match fields.byte()? {
        query::VALIDATE => match fields.number32()? {
            MAGIC => StoreRequest::Validate,
            other => return Err(Malformed(format!("a VALIDATE with {other:#010x} instead of {MAGIC:#010x}"))),
        },
        query::SET => StoreRequest::Set { key: fields.bytes()?, value: fields.bytes()? },
        query::COMPARE_SET => StoreRequest::CompareSet { key: fields.bytes()?, expected: fields.bytes()?, desired: fields.bytes()? },
        query::GET => StoreRequest::Get { key: fields.bytes()? },
        query::ADD => StoreRequest::Add { key: fields.bytes()?, delta: fields.number()? },
        query::CHECK => StoreRequest::Check { keys: keys(&mut fields)? },
        query::WAIT => StoreRequest::Wait { keys: keys(&mut fields)? },
        query::NUM_KEYS => StoreRequest::NumKeys,
        query::DELETE_KEY => StoreRequest::DeleteKey { key: fields.bytes()? },
        query::APPEND => StoreRequest::Append { key: fields.bytes()?, value: fields.bytes()? },
        query::MULTI_GET => StoreRequest::MultiGet { keys: keys(&mut fields)? },
        query::MULTI_SET => {
            let count = fields.number()?;
            StoreRequest::MultiSet { pairs: (0..count).map(|_| Ok((fields.bytes()?, fields.bytes()?))).collect::<Result<_, _>>()? }
        }
        query::CANCEL_WAIT => StoreRequest::CancelWait,
        query::PING => StoreRequest::Ping { nonce: fields.number32()? },
        query::QUEUE_PUSH => StoreRequest::QueuePush { key: fields.bytes()?, value: fields.bytes()? },
        query::QUEUE_POP => StoreRequest::QueuePop { key: fields.bytes()? },
        query::QUEUE_LEN => StoreRequest::QueueLen { key: fields.bytes()? },
        query::LIST_KEYS => StoreRequest::ListKeys,
        query::BARRIER => StoreRequest::Barrier { key: fields.bytes()?, world_size: fields.number()? },
        unknown => return Err(Malformed(format!("an unknown query {unknown}"))),
    };
    debug_assert!(fields.is_empty());
    Ok(request)
}

/// Reads a count and that many keys.
fn keys(fields: &mut Fields<'_>) -> Result<Vec<Vec<u8>>, Malformed> {
    let count = fields.number()?;
    (0..count).map(|_| fields.bytes()).collect()
}

/// Collects bytes as they arrive and returns requests as they are complete.
#[derive(Debug, Default)]
pub(super) struct RequestDecoder {
    buffer: Vec<u8>,
    /// Bytes at the front that belong to requests already returned.
    taken: usize,
    /// The state of the request that is incomplete.
    scan: Option<Scan>,
}

impl RequestDecoder {
    /// Takes in bytes that have arrived.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the number of bytes not yet returned as requests.
    pub(super) fn waiting(&self) -> usize {
        self.buffer.len() - self.taken
    }

    /// Whether the next request is of the kind `code`; `None` if its first byte has not arrived.
    pub(super) fn next_is(&self, code: u8) -> Option<bool> {
        self.buffer.get(self.taken).map(|&first| first == code)
    }

    /// Returns the next request, if all of it has arrived.
    pub(super) fn next(&mut self) -> Result<Option<StoreRequest>, Malformed> {
        let bytes = &self.buffer[self.taken..];
        let Some(&code) = bytes.first() else { return Ok(None) };
        let mut scan = match self.scan.take() {
            Some(scan) => scan,
            None => Scan::new(shape(code)?, 1),
        };
        let Some(end) = scan.advance(bytes)? else {
            self.scan = Some(scan);
            return Ok(None);
        };
        let request = parse(&bytes[..end])?;
        self.taken += end;
        if self.taken == self.buffer.len() {
            // A long request must not keep its memory for the life of the connection.
            self.buffer = Vec::new();
            self.taken = 0;
        }
        Ok(Some(request))
    }
}

/// Encodes a request whose fields come once: its code, keys and values, and a number at its end.
pub(super) fn encode(code: u8, texts: &[&[u8]], number: Option<i64>) -> Vec<u8> {
    let length = texts.iter().map(|text| 8 + text.len()).sum::<usize>();
    let mut message = Vec::with_capacity(1 + length + 8);
    message.push(code);
    texts.iter().for_each(|text| push_bytes(&mut message, text));
    message.extend(number.iter().flat_map(|number| number.to_le_bytes()));
    message
}

/// Encodes a request with a count, and the texts of that many groups.
pub(super) fn encode_keys<'a>(code: u8, count: usize, texts: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut message = vec![code];
    message.extend((count as u64).to_le_bytes());
    texts.for_each(|text| push_bytes(&mut message, text));
    message
}

/// The kind of answer that a client expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expect {
    /// One byte, such as STOP_WAITING or READY.
    Flag,
    /// The nonce of a PING.
    Nonce,
    /// A number.
    Number,
    /// This many values.
    Values(usize),
    /// The number of values that the queue held, and the first value if there was one.
    Popped,
    /// A number of keys, and that many keys.
    Keys,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    Flag(u8),
    Nonce(u32),
    Number(i64),
    Values(Vec<Vec<u8>>),
    Popped(Option<Vec<u8>>),
    Keys(Vec<Vec<u8>>),
}

impl Expect {
    /// Returns the fields of the answer.
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

    /// Parses a complete message as an answer.
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

/// Collects the bytes of one answer.
#[derive(Debug)]
pub(super) struct ReplyDecoder {
    expect: Expect,
    buffer: Vec<u8>,
    scan: Scan,
}

impl ReplyDecoder {
    /// Creates a decoder for an answer of the kind `expect`.
    pub(super) fn new(expect: Expect) -> Self {
        Self { expect, buffer: Vec::new(), scan: Scan::new(expect.shape(), 0) }
    }

    /// Takes in bytes that have arrived. Returns the answer once it is complete, with the bytes after it.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Option<(Reply, Vec<u8>)>, Malformed> {
        self.buffer.extend_from_slice(bytes);
        let Some(end) = self.scan.advance(&self.buffer)? else { return Ok(None) };
        let rest = self.buffer.split_off(end);
        Ok(Some((self.expect.parse(&self.buffer)?, rest)))
    }
}

/// Appends a length and its bytes.
pub(super) fn push_bytes(message: &mut Vec<u8>, bytes: &[u8]) {
    message.extend((bytes.len() as u64).to_le_bytes());
    message.extend_from_slice(bytes);
}
