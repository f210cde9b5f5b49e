//! Finds the end of a message while its bytes arrive, and checks each length before memory is used for it.

use crate::rendezvous::limits::{KEY_BYTES, KEYS, MESSAGE_BYTES, VALUE_BYTES};

/// Why bytes do not follow the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::rendezvous) struct Malformed(pub(in crate::rendezvous) String);

/// One field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    /// This many bytes.
    Fixed(usize),
    /// A length, which is at most [`KEY_BYTES`], and then that many bytes.
    Key,
    /// A length, which is at most [`VALUE_BYTES`], and then that many bytes.
    Value,
    /// A length, which is within the message limit, and then that many bytes. Servers that do not limit values as
    /// strictly may send such values.
    Reply,
}

/// How often the second group of fields repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    /// This many times. The number is known before the message arrives.
    Times(usize),
    /// As often as the count before the group says, at most [`KEYS`] times.
    Counted,
    /// As often as the count before the group says. This count is limited only by the size of a message.
    Listed,
    /// Once if the number before the group is positive, else never.
    IfPositive,
}

/// The fields of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// The first group: fields that come once.
    pub(super) once: &'static [Field],
    /// How often the second group repeats.
    pub(super) repeat: Repeat,
    /// The second group.
    pub(super) each: &'static [Field],
}

impl Shape {
    /// Describes a message whose fields come once.
    pub(super) const fn once(once: &'static [Field]) -> Self {
        Self { once, repeat: Repeat::Times(0), each: &[] }
    }

    /// Describes a message that is a count and then that many groups of fields.
    pub(super) const fn counted(each: &'static [Field]) -> Self {
        Self { once: &[], repeat: Repeat::Counted, each }
    }
}

/// The progress of a scan. It looks at each field once, however the bytes are split.
#[derive(Debug)]
pub(super) struct Scan {
    shape: Shape,
    /// The offset of the next field.
    offset: usize,
    /// The number of fields of the first group already passed.
    passed: usize,
    /// The number of fields of the second group still to come; `None` before the count was read.
    remaining: Option<u64>,
}

impl Scan {
    /// Creates a scan that begins at `offset`.
    pub(super) fn new(shape: Shape, offset: usize) -> Self {
        Self { shape, offset, passed: 0, remaining: None }
    }

    /// Continues through the bytes that have arrived. Returns the end of the message once it is complete.
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

    /// Returns how often the second group repeats, given the number before it.
    fn times(&self, number: u64) -> Result<u64, Malformed> {
        let limit = match self.shape.repeat {
            Repeat::IfPositive => return Ok(u64::from(number.cast_signed() > 0)),
            Repeat::Listed => MESSAGE_BYTES / 8,
            Repeat::Counted | Repeat::Times(_) => KEYS,
        };
        if number > limit as u64 {
            return Err(Malformed(format!("a count of {number}, but the limit is {limit}")));
        }
        Ok(number)
    }

    /// Passes one field if all of it has arrived, and returns whether it did.
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
            return Err(Malformed(format!("a length of {length} bytes, but the limit is {limit}")));
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

/// Returns the 64-bit number at `offset`, if all of it is there.
pub(super) fn word(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes.get(offset..)?.first_chunk().map(|word| u64::from_le_bytes(*word))
}

/// Reads the fields of a message that a scan has found complete.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Creates a reader of the fields of `message`.
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// Returns the next `N` bytes.
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(|| Malformed("a message that ends too early".to_owned()))?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// Returns the next byte.
    pub(super) fn byte(&mut self) -> Result<u8, Malformed> {
        self.fixed::<1>().map(|[byte]| byte)
    }

    /// Returns the next 32-bit number.
    pub(super) fn number32(&mut self) -> Result<u32, Malformed> {
        self.fixed().map(u32::from_le_bytes)
    }

    /// Returns the next 64-bit number.
    pub(super) fn number(&mut self) -> Result<i64, Malformed> {
        self.fixed().map(i64::from_le_bytes)
    }

    /// Returns the bytes after the next length.
    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, Malformed> {
        let length = u64::from_le_bytes(self.fixed()?);
        let split = usize::try_from(length).ok().and_then(|length| self.rest.split_at_checked(length));
        let (bytes, rest) = split.ok_or_else(|| Malformed(format!("a length of {length} bytes, but {} are left", self.rest.len())))?;
        self.rest = rest;
        Ok(bytes.to_vec())
    }

    /// Whether no bytes are left.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}
