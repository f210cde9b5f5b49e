//! A link for fuzzing: a peer that sends given bytes.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use super::link::ByteLink;
use crate::random::Random;

/// A peer that sends these bytes and takes whatever it is sent, a few at a time.
pub(super) struct Script {
    bytes: Vec<u8>,
    at: usize,
    /// What comes when they are over; the end of the stream where there is nothing.
    filler: Option<u8>,
    /// Says how many bytes move; without it, all that can.
    jitter: Option<Random>,
    /// What it was sent.
    pub(super) taken: Vec<u8>,
}

impl Script {
    pub(super) fn new(bytes: &[u8], filler: Option<u8>, jitter: u64) -> Self {
        Self { bytes: bytes.to_vec(), at: 0, filler, jitter: (jitter != 0).then_some(Random(jitter)), taken: Vec::new() }
    }

    /// How many of so many bytes move, at least one.
    fn part(&mut self, most: usize) -> usize {
        self.jitter.as_mut().map_or(most, |jitter| most.min(1 + jitter.below(70)))
    }
}

impl ByteLink for Script {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let count = self.part(parts.iter().map(|part| part.len()).sum());
        self.taken.extend(parts.iter().flat_map(|part| part.iter()).take(count));
        Ok(count)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = &self.bytes[self.at..];
        match self.filler {
            None if left.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(filler) if left.is_empty() => {
                into.fill(filler);
                Ok(into.len())
            }
            _ => {
                let most = into.len().min(left.len());
                let count = self.part(most);
                into[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
                self.at += count;
                Ok(count)
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
