//! What has been read from one link and not been used: a small message comes in with one call to the system.

use std::io;

use super::wire::{self, Malformed, Message};
use crate::host::link::ByteLink;

/// How much is read at once where it is not read straight into its place.
pub(super) const INPUT_BYTES: usize = 4096;

/// A small buffer that survives from call to call: a peer that runs ahead may have sent what belongs to the next.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// Empty until something is read.
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// How a read into the buffer went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filled {
    /// Nothing is there now.
    Nothing,
    /// Something came, and there may be more.
    Full,
    /// Something came, and it was all there is.
    Drained,
}

impl Input {
    /// What is there.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Whether nothing is there.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Whether no byte can be added before some are used.
    pub(super) fn is_full(&self) -> bool {
        self.end - self.start == INPUT_BYTES
    }

    /// Forgets the first `count` bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The message at the front, left where it is.
    pub(super) fn front(&self) -> Result<Option<(Message, usize)>, Malformed> {
        wire::parse(self.bytes())
    }

    /// Adds what the link has, as far as it fits.
    pub(super) fn fill(&mut self, link: &mut impl ByteLink) -> io::Result<Filled> {
        if self.bytes.is_empty() {
            self.bytes = vec![0; INPUT_BYTES].into_boxed_slice();
        }
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.bytes[self.end..];
        let asked = room.len();
        let Some(count) = moved(link.try_read(room))? else { return Ok(Filled::Nothing) };
        self.end += count.min(asked);
        Ok(if count < asked { Filled::Drained } else { Filled::Full })
    }
}

/// How many bytes a link moved, at least one; `None` where none can move now.
pub(super) fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok((count > 0).then_some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
