//! A link that encrypts everything: a layer over another link.
//!
//! **Writing.** The bytes of a write become records (`authentication/record.rs`), and the link below accepts as much of
//! these as fits. The rest of the records waits here, and no more bytes are accepted before it is sent. If all bytes of
//! a write were reported as written, the caller would not write again, and the rest would not be sent. So the last byte
//! of a write is reported as written only when all of its records have been sent. A caller that has begun a message
//! thus still has that byte to write: it sleeps until the link is writable, and does not consider its message sent
//! before then. Callers need not know about this, as long as they meet the requirement of [`ByteLink`]: if only a part
//! of a message has been accepted, the rest comes first in the next write. A message may begin with a part, so a write
//! never takes just the first byte of a part.
//!
//! **Reading.** Only whole records are decrypted, into memory of the link. The caller gets its bytes from this memory,
//! so it never gets a byte that was not authenticated. A poll of the link below cannot see bytes that are left in this
//! memory. So as long as there are any, the link has no descriptor to poll on ([`ByteLink::descriptor`]).

#[cfg(all(feature = "__internals", feature = "encryption"))]
pub(super) mod fuzz;
#[cfg(all(test, feature = "encryption"))]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests;

use std::fmt;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::BorrowedFd;

use super::link::ByteLink;
use crate::authentication::Cipher;
use crate::authentication::record::{self, CONTENT_BYTES, RECORD_BYTES};
use crate::base::tuning::net::{RECORDS_READ, RECORDS_WRITTEN};

/// An encrypted stream over `L`.
pub(crate) struct EncryptedLink<L> {
    below: L,
    cipher: Cipher,
    out: Outgoing,
    come: Incoming,
}

/// Records to send.
#[derive(Default)]
struct Outgoing {
    /// Content from several parts, side by side.
    gathered: Vec<u8>,
    /// Records, and how many of their bytes the link below has accepted.
    records: Vec<u8>,
    sent: usize,
    /// The last byte in them, if it has not been reported as written.
    unreported: Option<u8>,
}

/// Records received.
#[derive(Default)]
struct Incoming {
    /// Records as they arrive: the bytes between `start` and `end` are not decrypted yet.
    records: Vec<u8>,
    start: usize,
    end: usize,
    /// The content of one record, of which the bytes between `next` and `content` are still to be read.
    plain: Vec<u8>,
    next: usize,
    content: usize,
}

impl<L: ByteLink> EncryptedLink<L> {
    /// Creates the link. Both ends begin at once: from now on, only sealed bytes go over `below`.
    pub(crate) fn new(below: L, cipher: Cipher) -> Self {
        Self { below, cipher, out: Outgoing::default(), come: Incoming::default() }
    }

    /// Returns the link below.
    pub(crate) fn below(&self) -> &L {
        &self.below
    }

    /// Sends the waiting records. Returns `WouldBlock` if some still wait.
    fn flush(&mut self) -> io::Result<()> {
        while self.out.sent < self.out.records.len() {
            self.out.sent += self.below.try_write(&[IoSlice::new(&self.out.records[self.out.sent..])])?;
        }
        self.out.records.clear();
        self.out.sent = 0;
        Ok(())
    }

    /// Encrypts `count` bytes of `parts`, from byte `from` on.
    fn seal(&mut self, parts: &[IoSlice<'_>], from: usize, count: usize) -> io::Result<()> {
        let mut skipped = from;
        let rest = parts.iter().map(|part| {
            let part_from = skipped.min(part.len());
            skipped -= part_from;
            &part[part_from..]
        });
        let mut rest = rest.skip_while(|part| part.is_empty());
        let Some(first) = rest.next() else { return Ok(()) };
        if first.len() >= count {
            return record::seal(&mut self.cipher, &first[..count], &mut self.out.records);
        }
        self.out.gathered.clear();
        self.out.gathered.extend_from_slice(first);
        for part in rest {
            let left = count - self.out.gathered.len();
            self.out.gathered.extend_from_slice(&part[..left.min(part.len())]);
        }
        record::seal(&mut self.cipher, &self.out.gathered, &mut self.out.records)
    }

    /// Copies decrypted bytes into the caller's buffer.
    fn hand_out(&mut self, into: &mut [u8]) -> usize {
        let come = &mut self.come;
        let count = into.len().min(come.content - come.next);
        into[..count].copy_from_slice(&come.plain[come.next..come.next + count]);
        come.next += count;
        count
    }

    /// Decrypts the next record if it is whole. The content of the previous one must have been read. Returns whether
    /// the record was whole.
    fn decrypt(&mut self) -> io::Result<bool> {
        let come = &mut self.come;
        let Some((message, length)) = record::front(&come.records[come.start..come.end])? else { return Ok(false) };
        if come.plain.len() < message.len() {
            come.plain.resize(message.len().next_power_of_two(), 0);
        }
        come.content = self.cipher.open(message, &mut come.plain).ok_or_else(record::forged)?;
        come.next = 0;
        come.start += length;
        Ok(true)
    }

    /// Reads from the link below. Returns whether it gave all that was asked for, in which case there may be more.
    fn fetch(&mut self) -> io::Result<bool> {
        let come = &mut self.come;
        if come.start == come.end {
            (come.start, come.end) = (0, 0);
        }
        if come.records.is_empty() {
            // Fresh zeros: memory is used only as far as records reach.
            come.records = vec![0; RECORDS_READ * RECORD_BYTES];
        }
        if come.records.len() - come.start < RECORD_BYTES {
            come.records.copy_within(come.start..come.end, 0);
            (come.start, come.end) = (0, come.end - come.start);
        }
        let room = &mut come.records[come.end..];
        let asked = room.len();
        let read = self.below.try_read(room)?;
        come.end += read.min(asked);
        Ok(read >= asked)
    }
}

impl<L: ByteLink> ByteLink for EncryptedLink<L> {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush()?;
        let mut written = 0;
        if let Some(byte) = self.out.unreported.take() {
            if byte_at(parts, 0) != Some(byte) {
                return Err(io::Error::new(ErrorKind::InvalidInput, "the bytes written differ from those of the message that was begun"));
            }
            written = 1;
        }
        loop {
            let count = cut(parts, written, RECORDS_WRITTEN * CONTENT_BYTES);
            if count == 0 {
                return Ok(written);
            }
            self.seal(parts, written, count)?;
            written += count;
            match self.flush() {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    self.out.unreported = byte_at(parts, written - 1);
                    return if written > 1 { Ok(written - 1) } else { Err(error) };
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let (mut filled, mut may_have_more) = (0, true);
        loop {
            filled += self.hand_out(&mut into[filled..]);
            if filled == into.len() {
                return Ok(filled);
            }
            let trouble = match self.decrypt() {
                Ok(true) => continue,
                Ok(false) if filled > 0 && !may_have_more => return Ok(filled),
                Ok(false) => match self.fetch() {
                    Ok(more) => {
                        may_have_more = more;
                        continue;
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            // What was there before the error counts; the error will come again.
            return if filled > 0 { Ok(filled) } else { Err(trouble) };
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let come = &self.come;
        // What cannot be decrypted counts as something to read: the next read returns the error.
        let is_waiting = come.next < come.content || !matches!(record::front(&come.records[come.start..come.end]), Ok(None));
        if is_waiting { None } else { self.below.descriptor() }
    }

    fn has_unsent(&self) -> bool {
        self.below.has_unsent()
    }
}

impl<L: fmt::Debug> fmt::Debug for EncryptedLink<L> {
    /// Shows nothing of the bytes that go over it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncryptedLink").field("below", &self.below).finish_non_exhaustive()
    }
}

/// Returns how many bytes of `parts` to write next, from byte `from` on: at most `most`. If it must cut a part, it
/// never takes just one byte of that part.
fn cut(parts: &[IoSlice<'_>], from: usize, most: usize) -> usize {
    let mut begin = 0;
    let mut count = 0;
    for part in parts {
        let end = begin + part.len();
        let left = end.saturating_sub(from.max(begin));
        if count + left > most {
            let taken = most - count;
            return if taken == 1 && from < begin + 1 && count > 0 { count } else { most };
        }
        count += left;
        begin = end;
    }
    count
}

/// Returns the byte at index `at` of the parts.
fn byte_at(parts: &[IoSlice<'_>], mut at: usize) -> Option<u8> {
    for part in parts {
        match part.get(at) {
            Some(byte) => return Some(*byte),
            None => at -= part.len(),
        }
    }
    None
}
