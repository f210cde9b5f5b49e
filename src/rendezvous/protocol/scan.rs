//! Finds where a message ends while its bytes are still coming in, checking each length before anything is kept for it.

use crate::rendezvous::limits::{KEY_BYTES, KEYS, MESSAGE_BYTES, VALUE_BYTES};

/// Bytes that are not the protocol, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::rendezvous) struct Malformed(pub(in crate::rendezvous) String);

/// One field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    /// So many bytes.
    Fixed(usize),
    /// A length of at most [`KEY_BYTES`] and that many bytes.
    Key,
    /// A length of at most [`VALUE_BYTES`] and that many bytes.
    Value,
    /// A length within the message limit: what a server without a limit of its own may hold.
    Reply,
}

/// How often the second group of fields comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    /// As often as known beforehand.
    Times(usize),
    /// As often as a count before it says, at most [`KEYS`] times.
    Counted,
    /// As often as a count before it says, bounded by the message limit alone.
    Listed,
    /// Once if the number before it is positive, else never.
    IfPositive,
}

/// The fields of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Fields that come once.
    pub(super) once: &'static [Field],
    /// How often the others come.
    pub(super) repeat: Repeat,
    /// The others.
    pub(super) each: &'static [Field],
}

impl Shape {
    /// A message whose fields come once.
    pub(super) const fn once(once: &'static [Field]) -> Self {
        Self { once, repeat: Repeat::Times(0), each: &[] }
    }

    /// A message that is a count and then so many groups of fields.
    pub(super) const fn counted(each: &'static [Field]) -> Self {
        Self { once: &[], repeat: Repeat::Counted, each }
    }
}

/// How far into a message the scan has come. Each field is looked at once, however the bytes are split.
#[derive(Debug)]
pub(super) struct Scan {
    shape: Shape,
    /// Where the next field begins.
    offset: usize,
    /// How many fields of the first group are behind.
    passed: usize,
    /// How many fields of the second group are still to come; `None` before the count was read.
    remaining: Option<u64>,
}

impl Scan {
    /// A scan that begins at `offset`.
    pub(super) fn new(shape: Shape, offset: usize) -> Self {
        Self { shape, offset, passed: 0, remaining: None }
    }

    /// Goes on through what has come; says where the message ends once it is complete.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        while let Some(&field) = self.shape.once.get(self.passed) {
            if !self.pass(field, bytes)? {
                return Ok(None);
            }
            self.passed += 1;
        }
        let Some(mut remaining) = self.count(bytes)? else { return Ok(None) };
        let width = self.shape.each.len();
        while remaining > 0 {
            let index = (width - (remaining % width as u64) as usize) % width;
            if !self.pass(self.shape.each[index], bytes)? {
                break;
            }
            remaining -= 1;
        }
        self.remaining = Some(remaining);
        Ok((remaining == 0).then_some(self.offset))
    }

    /// Reads the count before the second group, once.
    fn count(&mut self, bytes: &[u8]) -> Result<Option<u64>, Malformed> {
        if let Some(remaining) = self.remaining {
            return Ok(Some(remaining));
        }
        let times = match self.shape.repeat {
            Repeat::Times(times) => times as u64,
            Repeat::Counted | Repeat::Listed | Repeat::IfPositive => {
                let Some(number) = word(bytes, self.offset) else { return Ok(None) };
                self.offset += 8;
                self.times(number)?
            }
        };
        self.remaining = Some(times.saturating_mul(self.shape.each.len() as u64));
        Ok(self.remaining)
    }

    /// How often the second group comes by the number before it.
    fn times(&self, number: u64) -> Result<u64, Malformed> {
        let limit = match self.shape.repeat {
            Repeat::IfPositive => return Ok(u64::from(number.cast_signed() > 0)),
            Repeat::Listed => MESSAGE_BYTES / 8,
            Repeat::Counted | Repeat::Times(_) => KEYS,
        };
        if number > limit as u64 {
            return Err(Malformed(format!("a count of {number}, the limit is {limit}")));
        }
        Ok(number)
    }

    /// Passes one field if all of it is there.
    fn pass(&mut self, field: Field, bytes: &[u8]) -> Result<bool, Malformed> {
        let limit = match field {
            Field::Fixed(width) => {
                let there = bytes.len() - self.offset >= width;
                self.offset += if there { width } else { 0 };
                return Ok(there);
            }
            Field::Key => KEY_BYTES,
            Field::Value => VALUE_BYTES,
            Field::Reply => MESSAGE_BYTES,
        };
        let Some(length) = word(bytes, self.offset) else { return Ok(false) };
        if length > limit as u64 {
            return Err(Malformed(format!("a length of {length} bytes, the limit is {limit}")));
        }
        let end = self.offset + 8 + length as usize;
        if end > MESSAGE_BYTES {
            return Err(Malformed(format!("a message of more than {MESSAGE_BYTES} bytes")));
        }
        if end > bytes.len() {
            return Ok(false);
        }
        self.offset = end;
        Ok(true)
    }
}

/// The 64-bit number at `offset`, if all of it is there.
pub(super) fn word(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes.get(offset..)?.first_chunk().map(|word| u64::from_le_bytes(*word))
}

/// Takes fields out of a message that a scan has found complete.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The fields of `message`.
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// The next `N` bytes.
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(|| Malformed("a message that ends too early".to_owned()))?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// The next byte.
    pub(super) fn byte(&mut self) -> Result<u8, Malformed> {
        self.fixed::<1>().map(|[byte]| byte)
    }

    /// The next 32-bit number.
    pub(super) fn number32(&mut self) -> Result<u32, Malformed> {
        self.fixed().map(u32::from_le_bytes)
    }

    /// The next 64-bit number.
    pub(super) fn number(&mut self) -> Result<i64, Malformed> {
        self.fixed().map(i64::from_le_bytes)
    }

    /// The next length and its bytes.
    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, Malformed> {
        let length = u64::from_le_bytes(self.fixed()?);
        let split = usize::try_from(length).ok().and_then(|length| self.rest.split_at_checked(length));
        let (bytes, rest) = split.ok_or_else(|| Malformed(format!("a length of {length} bytes where {} are left", self.rest.len())))?;
        self.rest = rest;
        Ok(bytes.to_vec())
    }

    /// Whether nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}
