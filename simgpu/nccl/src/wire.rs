//! Frames between a rank and the process that holds its clique: a length, then numbers and byte strings in a fixed order.

use std::io::{self, Read, Write};

/// The length limit: longer frames are refused.
const LONGEST: u32 = 1 << 30;

/// A frame under construction.
#[derive(Default)]
pub(crate) struct Frame(Vec<u8>);

impl Frame {
    pub(crate) fn number(mut self, number: u64) -> Frame {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(crate) fn bytes(self, bytes: &[u8]) -> Frame {
        let mut frame = self.number(bytes.len() as u64);
        frame.0.extend_from_slice(bytes);
        frame
    }

    pub(crate) fn list<T>(self, items: &[T], put: impl Fn(Frame, &T) -> Frame) -> Frame {
        items.iter().fold(self.number(items.len() as u64), put)
    }

    /// Returns the bytes alone, for a caller that records the length elsewhere.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn send(&self, mut to: impl Write) -> io::Result<()> {
        let length = u32::try_from(self.0.len()).ok().filter(|&length| length <= LONGEST);
        let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "more than 1 GiB in one launch"))?;
        to.write_all(&length.to_le_bytes())?;
        to.write_all(&self.0)
    }
}

/// Receives the next frame.
pub(crate) fn receive(mut from: impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame of more than 1 GiB"));
    }
    let mut frame = vec![0; length as usize];
    from.read_exact(&mut frame)?;
    Ok(frame)
}

/// Reads the parts of a frame. Each read returns `None` if the frame is too short.
pub(crate) struct Parser<'a>(pub(crate) &'a [u8]);

impl<'a> Parser<'a> {
    pub(crate) fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    pub(crate) fn size(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.size()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    pub(crate) fn list<T>(&mut self, mut take: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        (0..self.number()?).map(|_| take(self)).collect()
    }
}
