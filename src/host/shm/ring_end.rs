//! One end of a ring of bytes in shared memory.
//!
//! The two cursors count bytes since the start and lie on lines of their own. Each end keeps the other's cursor as it
//! last saw it, and looks again only when it would otherwise have nothing to do. Long parts are published in chunks, so
//! that the reader copies out while the writer still copies in.
//!
//! A short write is also stored on the writer's line, beside the cursor, and so is the beginning of a frame that is
//! written at once ([`InlineCopy`]). So the line that notifies the reader also contains these bytes. The reader copies
//! the rest directly to its destination.

#![expect(unsafe_code, reason = "copies between the caller's slices and the mapped ring")]

use std::io::{self, IoSlice};
use std::ptr;

use super::layout::CURSORS_BYTES;
use super::stores::Stores;
use crate::base::sync::{AtomicU64, Ordering, fence};
use crate::base::tuning::shm::{RING_CHUNK_BYTES, RING_LONG_BYTES, RING_LONG_CHUNK_BYTES};
use crate::host::copy::{Copy, copy, prefetch_for_writing};
use crate::host::link::Head;

/// Returns how much of `bytes` bytes is copied before the other end is notified.
#[inline]
const fn chunk_bytes(bytes: usize) -> usize {
    if bytes < RING_LONG_BYTES { RING_CHUNK_BYTES } else { RING_LONG_CHUNK_BYTES }
}

/// One end of a ring.
pub(super) struct End {
    /// The writer's cursor. The reader's is on the next pair of lines, and the bytes come after that.
    ring: *mut u8,
    pub(super) capacity: usize,
    /// This end's own cursor.
    mine: u64,
    /// The other end's cursor, as last seen.
    theirs: u64,
    /// The stores with which the writer writes.
    stores: Stores,
}

/// The longest write after which the writer prefetches the lines for its next write, which is usually as long.
const PREFETCHED_BYTES: usize = 2048;

/// The result of a look for a frame.
#[derive(Debug)]
pub(super) enum Peeked {
    Nothing,
    /// Something was written since the last look. This is the head of the last write. `bytes` is the total length of
    /// all writes since the last look. If the length in the header is equal to `bytes`, there was only one write.
    Frame(Head),
    /// Something else.
    Other,
}

impl End {
    /// Creates an end of a ring that lies at `ring` and has not been used.
    pub(super) fn new(ring: *mut u8, capacity: usize) -> Self {
        Self { ring, capacity, mine: 0, theirs: 0, stores: Stores::new() }
    }

    /// Returns the writer's cursor, or the reader's.
    #[inline]
    pub(super) fn cursor(&self, reader: bool) -> &AtomicU64 {
        let offset = if reader { CURSORS_BYTES / 2 } else { 0 };
        // SAFETY: inside the ring's first lines, aligned to 128 bytes, only ever used as this atomic, for which any
        // bytes are valid. Mapped as long as the link that owns this end, which holds the region.
        unsafe { &*self.ring.add(offset).cast() }
    }

    /// Returns the copy beside the writer's cursor.
    #[inline]
    fn inline_copy(&self) -> &InlineCopy {
        // SAFETY: the words after the cursor on the writer's line, aligned to 8, only ever used as these atomics, for
        // which any bytes are valid. Mapped as long as the link that owns this end, which holds the region.
        unsafe { &*self.ring.add(8).cast() }
    }

    /// Writes as much of `parts` as fits; they have `wanted` bytes in total. Returns the number of bytes written.
    #[inline]
    pub(super) fn write(&mut self, parts: &[IoSlice<'_>], wanted: usize) -> io::Result<usize> {
        let most = chunk_bytes(wanted);
        if wanted <= InlineCopy::BYTES && self.room(wanted)? >= wanted {
            self.write_inline(parts, wanted);
            return Ok(wanted);
        }
        let (mut published, mut waiting) = (0, 0);
        'full: for part in parts {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let chunk = rest.len().min(most);
                let chunk = chunk.min(self.room(waiting + chunk)?.saturating_sub(waiting));
                if chunk == 0 {
                    break 'full;
                }
                self.put(waiting, &rest[..chunk]);
                rest = &rest[chunk..];
                waiting += chunk;
                if waiting >= most {
                    self.advance_writer(waiting);
                    published += std::mem::take(&mut waiting);
                }
            }
        }
        if waiting > 0 {
            self.advance_writer(waiting);
        }
        Ok(published + waiting)
    }

    /// Writes a whole frame to the ring, and its head beside the cursor, if there is room. Returns whether it did.
    #[inline]
    pub(super) fn write_frame(&mut self, head: &Head, payload: &[u8]) -> io::Result<bool> {
        let (spot, before_wrap) = self.spot(0);
        // Longer frames are published in parts.
        let most = RING_CHUNK_BYTES.min(before_wrap);
        let wanted = head.bytes.max(Head::BYTES);
        if wanted > most || self.room(wanted)? < wanted {
            return Ok(false);
        }
        // SAFETY: at least that many bytes lie before the ring wraps, and `room` has seen the reader's cursor beyond
        // what they held (acquire); no other writer has this end. The bytes after a shorter frame are overwritten by
        // the next write.
        unsafe { ptr::copy_nonoverlapping(head.words.as_ptr().cast::<u8>(), spot, Head::BYTES) };
        if head.bytes > Head::BYTES {
            self.put(head.bytes - payload.len(), payload);
        }
        self.inline_copy().put(self.mine.wrapping_add(head.bytes as u64), head.bytes, &head.words);
        self.advance_writer(head.bytes);
        Ok(true)
    }

    /// Returns the bytes that have arrived, if they may be one frame. If there are none, looks `looks` more times.
    #[inline]
    pub(super) fn peek_frame(&mut self, mut looks: u32) -> io::Result<Peeked> {
        let there = loop {
            match self.filled(1)? {
                0 if looks == 0 => return Ok(Peeked::Nothing),
                0 => std::hint::spin_loop(),
                there => break there,
            }
            looks -= 1;
        };
        Ok(self.inline_copy().get(self.theirs, there).map_or(Peeked::Other, |words| Peeked::Frame(Head { words, bytes: there })))
    }

    /// Reads all that the last look found. The bytes after a header go into `payload`, as many as fit.
    #[inline]
    pub(super) fn take_frame(&mut self, header_bytes: usize, payload: &mut [u8]) {
        let there = self.theirs.wrapping_sub(self.mine) as usize;
        let bytes = payload.len().min(there.saturating_sub(header_bytes));
        self.take(header_bytes, &mut payload[..bytes], copy);
        self.advance_reader(there);
    }

    /// Writes short parts, for which there is room, to the ring and beside the cursor.
    #[inline]
    fn write_inline(&mut self, parts: &[IoSlice<'_>], bytes: usize) {
        let mut copy = [0; InlineCopy::BYTES];
        let mut at = 0;
        for part in parts {
            copy[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.put(0, &copy[..bytes]);
        let mut words = [0; Head::WORDS];
        for (word, bytes) in words.iter_mut().zip(copy.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        self.inline_copy().put(self.mine.wrapping_add(bytes as u64), bytes, &words);
        self.advance_writer(bytes);
    }

    /// Reads the bytes that have arrived, up to the length of `into`. Returns their number.
    #[inline]
    pub(super) fn read(&mut self, into: &mut [u8], copy: Copy) -> io::Result<usize> {
        let most = chunk_bytes(into.len());
        let mut read = 0;
        while read < into.len() {
            let chunk = (into.len() - read).min(most);
            let there = self.filled(chunk)?;
            if there == 0 {
                break;
            }
            let chunk = chunk.min(there);
            if chunk < there || !self.inline_copy().take(self.theirs, &mut into[read..read + chunk]) {
                self.take(0, &mut into[read..read + chunk], copy);
            }
            self.advance_reader(chunk);
            read += chunk;
        }
        Ok(read)
    }

    /// Returns how much the writer may write now. Reads the reader's cursor only if its last known value does not
    /// suffice.
    fn room(&mut self, wanted: usize) -> io::Result<usize> {
        let used = |end: &Self| end.used(end.mine, end.theirs);
        let known = self.capacity - used(self)?;
        if known >= wanted {
            return Ok(known);
        }
        self.theirs = self.cursor(true).load(Ordering::Acquire);
        Ok(self.capacity - used(self)?)
    }

    /// Returns how much the reader may read now.
    fn filled(&mut self, wanted: usize) -> io::Result<usize> {
        let known = self.used(self.theirs, self.mine)?;
        if known >= wanted {
            return Ok(known);
        }
        self.theirs = self.cursor(false).load(Ordering::Acquire);
        self.used(self.theirs, self.mine)
    }

    /// Returns the number of bytes between the cursors. More than the ring holds means that the peer's memory is
    /// corrupt.
    fn used(&self, writer: u64, reader: u64) -> io::Result<usize> {
        usize::try_from(writer.wrapping_sub(reader)).ok().filter(|used| *used <= self.capacity).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a ring of {} bytes has the invalid cursors {reader} and {writer}", self.capacity),
            )
        })
    }

    /// Returns where the byte lies that is `ahead` of this end's cursor, and how many follow before the ring wraps.
    fn spot(&self, ahead: usize) -> (*mut u8, usize) {
        let at = (self.mine as usize).wrapping_add(ahead) & (self.capacity - 1);
        // SAFETY: less than the capacity, a power of two, after the cursors: inside this ring.
        (unsafe { self.ring.add(CURSORS_BYTES + at) }, self.capacity - at)
    }

    /// Copies `bytes` in, `ahead` of the writer's cursor. The caller has checked that there is room.
    fn put(&mut self, ahead: usize, bytes: &[u8]) {
        let (spot, before_wrap) = self.spot(ahead);
        let first = bytes.len().min(before_wrap);
        let (start, _) = self.spot(ahead + first);
        // SAFETY: `room` has seen the reader's cursor beyond what these bytes held (acquire), and no other writer has
        // this end. Both parts lie inside the ring.
        unsafe {
            self.stores.copy(bytes.as_ptr(), spot, first);
            self.stores.copy(bytes[first..].as_ptr(), start, bytes.len() - first);
        }
    }

    /// Copies bytes out that are `ahead` of the reader's cursor. The caller has checked that they are there.
    fn take(&mut self, ahead: usize, into: &mut [u8], copy: Copy) {
        let (spot, before_wrap) = self.spot(ahead);
        let first = into.len().min(before_wrap);
        let (start, _) = self.spot(ahead + first);
        let rest = into.len() - first;
        // SAFETY: `filled` has seen the writer's cursor behind these bytes (acquire), and the writer leaves them alone
        // until this end's own cursor has passed them. Both parts lie inside the ring.
        unsafe {
            copy(spot, into.as_mut_ptr(), first);
            copy(start, into[first..].as_mut_ptr(), rest);
        }
    }

    /// Makes `bytes` more bytes visible to the reader.
    fn advance_writer(&mut self, bytes: usize) {
        self.mine = self.mine.wrapping_add(bytes as u64);
        self.cursor(false).store(self.mine, Ordering::Release);
        if bytes <= PREFETCHED_BYTES {
            for ahead in (0..=bytes).step_by(64) {
                prefetch_for_writing(self.spot(ahead).0);
            }
        }
    }

    /// Returns `bytes` bytes to the writer.
    fn advance_reader(&mut self, bytes: usize) {
        self.mine = self.mine.wrapping_add(bytes as u64);
        self.cursor(true).store(self.mine, Ordering::Release);
    }
}

/// The value that stands for the length if a write is longer than its copy.
const LONGER: usize = 63;
const _: () = assert!(Head::BYTES < LONGER);

/// A copy of a short write, or of the beginning of a longer frame, on the writer's own line, beside its cursor: its
/// number, and its words.
///
/// A reader that has read all earlier bytes gets these bytes with the line that notifies it, and leaves the ring's own
/// lines in the writer's cache. The copy is a sequence lock whose number shows which bytes it holds. If it does not
/// hold the bytes, the ring does.
#[repr(C)]
struct InlineCopy<const WORDS: usize = { Head::WORDS }> {
    number: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl InlineCopy {
    /// The longest write that is copied here, in bytes.
    const BYTES: usize = Head::BYTES;
}

impl<const WORDS: usize> InlineCopy<WORDS> {
    /// Returns the number of a copy of the `bytes` bytes that end at a cursor, or of their beginning.
    #[inline]
    fn number(cursor: u64, bytes: usize) -> u64 {
        cursor << 6 | bytes.min(LONGER) as u64
    }

    /// Stores the `bytes` bytes that end at `cursor`. The writer stores `cursor` next, and the reader acquires it.
    /// `copy` fills the words.
    #[inline]
    fn put(&self, cursor: u64, bytes: usize, copy: &[u64; WORDS]) {
        self.number.store(Self::number(cursor, bytes), Ordering::Relaxed);
        // A thread that sees one of the new words sees the new number as well.
        fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(copy) {
            word.store(*value, Ordering::Relaxed);
        }
    }

    /// Returns the first words of the `bytes` bytes that end at `cursor`, if they are here. The reader has acquired
    /// `cursor`. For [`LONGER`] bytes and more, these are the words of the last write, which may be shorter.
    #[inline]
    fn get(&self, cursor: u64, bytes: usize) -> Option<[u64; WORDS]> {
        let number = Self::number(cursor, bytes);
        if self.number.load(Ordering::Relaxed) != number {
            return None;
        }
        let copy = std::array::from_fn(|word| self.words[word].load(Ordering::Relaxed));
        // If one of the words is newer, so is the number by now.
        fence(Ordering::Acquire);
        (self.number.load(Ordering::Relaxed) == number).then_some(copy)
    }

    /// Copies out the bytes that end at `cursor`. Returns whether they were here.
    #[inline]
    fn take(&self, cursor: u64, into: &mut [u8]) -> bool {
        if into.len() > 8 * WORDS {
            return false;
        }
        let Some(words) = self.get(cursor, into.len()) else { return false };
        let copy = words.map(u64::to_ne_bytes);
        into.copy_from_slice(&copy.as_flattened()[..into.len()]);
        true
    }
}

#[cfg(all(test, loom))]
mod models {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib shm::ring_end`.

    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use std::sync::atomic::AtomicUsize;

    /// Bytes of each write, all of which hold its number.
    const BYTES: usize = 16;

    fn written(write: u64) -> [u8; BYTES] {
        [write as u8; BYTES]
    }

    struct Line {
        cursor: AtomicU64,
        inline_copy: InlineCopy<2>,
    }

    impl Line {
        /// Takes the write that ends at the cursor, if it is here. Returns the write's index, or 3 for none.
        fn look(&self) -> usize {
            let cursor = self.cursor.load(Ordering::Acquire);
            let write = cursor / BYTES as u64;
            let mut into = [0; BYTES];
            if write == 0 || !self.inline_copy.take(cursor, &mut into) {
                return 3;
            }
            assert_eq!(into, written(write));
            write as usize - 1
        }
    }

    /// The reader is the thread that begins later, so that loom lets each of its looks find every value that is not
    /// ruled out.
    #[test]
    fn what_is_taken_is_the_write_that_ends_at_the_cursor() {
        // The number of executions in which each write was taken, and in which none was.
        let counts = std::sync::Arc::new(<[AtomicUsize; 4]>::default());
        let seen = std::sync::Arc::clone(&counts);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let words = std::array::from_fn(|_| AtomicU64::new(0));
            let line = Arc::new(Line { cursor: AtomicU64::new(0), inline_copy: InlineCopy { number: AtomicU64::new(0), words } });
            let (read, seen) = (Arc::clone(&line), std::sync::Arc::clone(&seen));
            let reader = thread::spawn(move || {
                seen[read.look()].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            });
            for write in 1..=3 {
                let cursor = write * BYTES as u64;
                line.inline_copy.put(cursor, BYTES, &[u64::from_ne_bytes([write as u8; 8]); 2]);
                line.cursor.store(cursor, Ordering::Release);
            }
            reader.join().unwrap();
        });
        assert!(counts.iter().all(|count| count.load(std::sync::atomic::Ordering::Relaxed) > 0), "{counts:?}");
    }
}
