//! A link on which nothing goes in plain: a layer over another one.
//!
//! **Writing.** What is written becomes records (`authentication/record.rs`), of which the link below takes what it takes. The rest waits here: of one
//! write, and nothing more is taken before it is gone. Nobody would come back for it on its own account, so the last byte of a write is not
//! reported as written until all of its records are: whoever has begun a message comes back for that byte, sleeps until the link is
//! writable, and does not take its message for sent. So callers need to know nothing of this, as long as they keep to what [`ByteLink`] asks of
//! them: the bytes that were not taken come first in the next write, once any byte of their message was. A write is therefore never cut
//! behind the first byte of a part, where a message may begin.
//!
//! **Reading.** Whole records alone are decrypted, into memory of the link's own, and go to the caller from there: no byte that was
//! not authenticated reaches it. What is left here no poll can see, so there is nothing to poll on meanwhile ([`ByteLink::descriptor`]).

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

/// What is on its way out.
#[derive(Default)]
struct Outgoing {
    /// Content that lies in several parts, side by side.
    gathered: Vec<u8>,
    /// Records, and how much of them the link below has taken.
    records: Vec<u8>,
    sent: usize,
    /// Whether the last byte in them has not been reported as written, and which it is.
    unreported: Option<u8>,
}

/// What has come in.
#[derive(Default)]
struct Incoming {
    /// Records as they come: those between `start` and `end` are not decrypted.
    records: Vec<u8>,
    start: usize,
    end: usize,
    /// The content of one record, of which the bytes between `next` and `content` are to be read.
    plain: Vec<u8>,
    next: usize,
    content: usize,
}

impl<L: ByteLink> EncryptedLink<L> {
    /// Both ends begin at once: nothing that was not sealed goes over `below` from now on.
    pub(crate) fn new(below: L, cipher: Cipher) -> Self {
        Self { below, cipher, out: Outgoing::default(), come: Incoming::default() }
    }

    /// The link below.
    pub(crate) fn below(&self) -> &L {
        &self.below
    }

    /// Sends what waits. `WouldBlock` where some of it still does.
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

    /// Moves what was decrypted to where it is wanted.
    fn hand_out(&mut self, into: &mut [u8]) -> usize {
        let come = &mut self.come;
        let count = into.len().min(come.content - come.next);
        into[..count].copy_from_slice(&come.plain[come.next..come.next + count]);
        come.next += count;
        count
    }

    /// Decrypts the next record, where it is whole and the one before was read; says whether it was.
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

    /// Reads from the link below; says whether it gave all that was asked for, so that there may be more.
    fn fetch(&mut self) -> io::Result<bool> {
        let come = &mut self.come;
        if come.start == come.end {
            (come.start, come.end) = (0, 0);
        }
        if come.records.is_empty() {
            // Fresh zeros: memory is used as far as records reach.
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
                return Err(io::Error::new(ErrorKind::InvalidInput, "a message was begun and another one goes on in its place"));
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
            // What was there before the trouble counts; it will be met again.
            return if filled > 0 { Ok(filled) } else { Err(trouble) };
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let come = &self.come;
        // What cannot be decrypted counts as something to be read: the next read says so.
        let is_waiting = come.next < come.content || !matches!(record::front(&come.records[come.start..come.end]), Ok(None));
        if is_waiting { None } else { self.below.descriptor() }
    }
}

impl<L: fmt::Debug> fmt::Debug for EncryptedLink<L> {
    /// Nothing of what goes over it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncryptedLink").field("below", &self.below).finish_non_exhaustive()
    }
}

/// How many bytes to write next of `parts`, from byte `from` on: at most `most`, and where that is not all, no single byte of the part that
/// is cut.
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

/// The byte at this place of the parts.
fn byte_at(parts: &[IoSlice<'_>], mut at: usize) -> Option<u8> {
    for part in parts {
        match part.get(at) {
            Some(byte) => return Some(*byte),
            None => at -= part.len(),
        }
    }
    None
}
