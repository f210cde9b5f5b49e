//! Byte streams between two ranks of one host: a ring of bytes per direction and channel, with one writer and one reader.
//!
//! The two cursors count bytes since the start and lie on lines of their own. Each end keeps the other's cursor as it last saw
//! it, and looks again only when that leaves it nothing to do.

#![expect(unsafe_code, reason = "copies between the caller's slices and the mapped ring")]

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::layout::CURSORS_BYTES;
use super::region::Region;
use super::wait::PULSE;
use crate::host::link::ByteLink;

/// Which of the streams between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Channel {
    /// For collectives that are not of the whole host alone.
    Collective = 0,
    /// For sends and receives.
    PointToPoint = 1,
}

/// Fruitless tries between two looks at the clock.
const TRIES: u32 = 32;

/// Both directions between this rank and another one of its host. Keeps the region mapped.
pub(crate) struct RingLink {
    sender: End,
    receiver: End,
    region: Arc<Region>,
    peer: usize,
    tries: u32,
    pulse: Instant,
}

/// One end of a ring.
struct End {
    /// The writer's cursor; the reader's is on the next pair of lines, the bytes after that.
    ring: *mut u8,
    capacity: usize,
    /// This end's own cursor.
    mine: u64,
    /// The other's, as last seen.
    theirs: u64,
}

// SAFETY: the pointers lead into the region, which the link keeps mapped; each end of a ring exists once (`Group::link` gives
// each link away once), and what both ends touch is ordered by the cursors.
unsafe impl Send for RingLink {}

impl RingLink {
    /// The link to `peer`. Made once per peer and channel.
    pub(super) fn new(region: Arc<Region>, peer: usize, channel: Channel) -> Self {
        let layout = *region.layout();
        let end =
            |from, to| End { ring: region.at(layout.ring(from, to, channel as usize)), capacity: layout.ring_bytes(), mine: 0, theirs: 0 };
        Self { sender: end(region.me(), peer), receiver: end(peer, region.me()), peer, tries: 0, pulse: Instant::now(), region }
    }

    /// Counts a fruitless try; says whether the peer has left or died, which is looked at rarely.
    fn is_peer_gone(&mut self) -> bool {
        self.tries += 1;
        if self.tries < TRIES {
            return false;
        }
        self.tries = 0;
        if self.region.member(self.peer).has_departed() {
            return true;
        }
        let now = Instant::now();
        if now.duration_since(self.pulse) < PULSE {
            return false;
        }
        self.pulse = now;
        !self.region.lives(self.peer)
    }
}

impl ByteLink for RingLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if parts.iter().all(|part| part.is_empty()) {
            return Ok(0);
        }
        let wanted = parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.len()));
        let room = self.sender.room(wanted)?;
        if room == 0 {
            let kind = if self.is_peer_gone() { io::ErrorKind::BrokenPipe } else { io::ErrorKind::WouldBlock };
            return Err(kind.into());
        }
        self.tries = 0;
        let mut written = 0;
        for part in parts {
            let len = part.len().min(room - written);
            self.sender.put(written, &part[..len]);
            written += len;
        }
        self.sender.advance_writer(written);
        Ok(written)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        let mut there = self.receiver.filled(into.len())?;
        if there == 0 {
            if !self.is_peer_gone() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            // What it wrote before it went is still to be read.
            there = self.receiver.filled(into.len())?;
            if there == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.tries = 0;
        let len = there.min(into.len());
        self.receiver.take(&mut into[..len]);
        self.receiver.advance_reader(len);
        Ok(len)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl End {
    /// The writer's cursor, or the reader's.
    fn cursor(&self, reader: bool) -> &AtomicU64 {
        let offset = if reader { CURSORS_BYTES / 2 } else { 0 };
        // SAFETY: inside the ring's first lines, aligned to 128 bytes, only ever used as this atomic; mapped as long as the link.
        unsafe { &*self.ring.add(offset).cast() }
    }

    /// How much the writer may write now. Looks at the reader's cursor only where what it knows does not suffice.
    fn room(&mut self, wanted: usize) -> io::Result<usize> {
        let used = |end: &Self| end.used(end.mine, end.theirs);
        let known = self.capacity - used(self)?;
        if known >= wanted {
            return Ok(known);
        }
        self.theirs = self.cursor(true).load(Ordering::Acquire);
        Ok(self.capacity - used(self)?)
    }

    /// How much the reader may read now.
    fn filled(&mut self, wanted: usize) -> io::Result<usize> {
        let known = self.used(self.theirs, self.mine)?;
        if known >= wanted {
            return Ok(known);
        }
        self.theirs = self.cursor(false).load(Ordering::Acquire);
        self.used(self.theirs, self.mine)
    }

    /// The bytes between the cursors. More than the ring holds means that the peer's memory is broken.
    fn used(&self, writer: u64, reader: u64) -> io::Result<usize> {
        usize::try_from(writer.wrapping_sub(reader)).ok().filter(|used| *used <= self.capacity).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("a ring of {} bytes has cursors {reader} and {writer}", self.capacity))
        })
    }

    /// Where the byte lies that is `ahead` of this end's cursor, and how many follow before the ring wraps.
    fn spot(&self, ahead: usize) -> (*mut u8, usize) {
        let at = (self.mine as usize).wrapping_add(ahead) & (self.capacity - 1);
        // SAFETY: less than the capacity, a power of two, after the cursors: inside this ring.
        (unsafe { self.ring.add(CURSORS_BYTES + at) }, self.capacity - at)
    }

    /// Copies `bytes` in, `ahead` of the writer's cursor. There is room (the caller has asked).
    fn put(&mut self, ahead: usize, bytes: &[u8]) {
        let (spot, before_wrap) = self.spot(ahead);
        let first = bytes.len().min(before_wrap);
        let (start, _) = self.spot(ahead + first);
        // SAFETY: `room` has said that the reader is done with these bytes; both parts lie inside the ring.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), spot, first);
            ptr::copy_nonoverlapping(bytes[first..].as_ptr(), start, bytes.len() - first);
        }
    }

    /// Copies bytes out from the reader's cursor on. They are there (the caller has asked).
    fn take(&mut self, into: &mut [u8]) {
        let (spot, before_wrap) = self.spot(0);
        let first = into.len().min(before_wrap);
        let (start, _) = self.spot(first);
        let rest = into.len() - first;
        // SAFETY: `filled` has said that the writer has written these bytes and leaves them; both parts lie inside the ring.
        unsafe {
            ptr::copy_nonoverlapping(spot, into.as_mut_ptr(), first);
            ptr::copy_nonoverlapping(start, into[first..].as_mut_ptr(), rest);
        }
    }

    /// Makes `bytes` more visible to the reader.
    fn advance_writer(&mut self, bytes: usize) {
        self.mine = self.mine.wrapping_add(bytes as u64);
        self.cursor(false).store(self.mine, Ordering::Release);
    }

    /// Gives `bytes` back to the writer.
    fn advance_reader(&mut self, bytes: usize) {
        self.mine = self.mine.wrapping_add(bytes as u64);
        self.cursor(true).store(self.mine, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::shm::region::tests::regions;
    use crate::host::shm::tests::Random;

    /// Two ranks' links to each other, among `ranks`.
    fn pair(ranks: usize) -> (RingLink, RingLink) {
        let mut regions = regions(ranks);
        let (b, a) = (regions.pop().unwrap(), regions.swap_remove(0));
        (RingLink::new(Arc::new(a), ranks - 1, Channel::PointToPoint), RingLink::new(Arc::new(b), 0, Channel::PointToPoint))
    }

    /// Retries until the call does not block.
    fn patiently<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    /// The byte at a place of a stream.
    fn byte(stream: u64, at: usize) -> u8 {
        (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15 + stream).to_le_bytes()[6]
    }

    /// Sends and receives a stream at once, in random parts.
    fn talk(link: &mut RingLink, me: u64, total: usize, seed: u64) {
        let mut random = Random::new(seed);
        let (mut sent, mut received) = (0, 0);
        let mut buffer = vec![0; 100_000];
        while sent < total || received < total {
            let mut progress = false;
            let bytes: Vec<u8> = (sent..total.min(sent + random.below(90_000))).map(|at| byte(me, at)).collect();
            let cuts = [random.below(bytes.len() + 1), random.below(bytes.len() + 1)];
            let (low, high) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
            let parts = [&bytes[..low], &[], &bytes[low..high], &bytes[high..]].map(IoSlice::new);
            match link.try_write(&parts) {
                Ok(written) => (sent, progress) = (sent + written, written > 0),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "seed {seed}"),
            }
            let into = &mut buffer[..(total - received).min(random.below(90_000))];
            match link.try_read(into) {
                Ok(read) => {
                    assert!(into[..read].iter().enumerate().all(|(at, value)| *value == byte(1 - me, received + at)), "seed {seed}");
                    (received, progress) = (received + read, progress || read > 0);
                }
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "seed {seed}"),
            }
            if !progress {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn both_streams_arrive_whole_whatever_the_parts() {
        for (ranks, total, seed) in [(2, 700_000, 1), (9, 300_000, 2), (33, 90_000, 3)] {
            let (mut a, mut b) = pair(ranks);
            std::thread::scope(|scope| {
                scope.spawn(|| talk(&mut a, 0, total, seed));
                talk(&mut b, 1, total, seed + 100);
            });
        }
    }

    #[test]
    fn nothing_is_something_only_where_nothing_was_asked() {
        let (mut a, mut b) = pair(2);
        assert_eq!(a.try_write(&[IoSlice::new(&[]), IoSlice::new(&[])]).unwrap(), 0);
        assert_eq!(b.try_read(&mut []).unwrap(), 0);
        assert_eq!(b.try_read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let large = vec![7; 1 << 20];
        let capacity = a.sender.capacity;
        assert_eq!(a.try_write(&[IoSlice::new(&large)]).unwrap(), capacity);
        assert_eq!(a.try_write(&[IoSlice::new(&large)]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(b.try_read(&mut vec![0; 1 << 20]).unwrap(), capacity);
        assert!(a.descriptor().is_none());
    }

    #[test]
    fn a_peer_that_left_ends_the_stream_after_its_last_byte() {
        let (mut a, mut b) = pair(2);
        a.try_write(&[IoSlice::new(b"last words")]).unwrap();
        a.region.depart();
        drop(a);
        let mut words = [0; 4];
        let mut heard = Vec::new();
        let end = loop {
            match patiently(|| b.try_read(&mut words)) {
                Ok(read) => heard.extend_from_slice(&words[..read]),
                Err(error) => break error,
            }
        };
        assert_eq!((heard.as_slice(), end.kind()), (&b"last words"[..], io::ErrorKind::UnexpectedEof));
        let large = vec![7; 1 << 20];
        let end = loop {
            if let Err(error) = patiently(|| b.try_write(&[IoSlice::new(&large)])) {
                break error;
            }
        };
        assert_eq!(end.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_peer_that_died_is_noticed() {
        let (a, mut b) = pair(2);
        // As a process that is killed: its lock goes, and nothing is said.
        drop(a);
        let began = Instant::now();
        assert_eq!(patiently(|| b.try_read(&mut [0])).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(began.elapsed().as_millis() < 1000);
    }

    #[test]
    fn broken_cursors_are_an_error() {
        let (mut a, mut b) = pair(2);
        a.sender.cursor(false).store(1 << 40, Ordering::Release);
        assert_eq!(b.try_read(&mut [0]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        a.sender.cursor(true).store(5, Ordering::Release);
        a.sender.capacity = 1;
        assert!(a.try_write(&[IoSlice::new(&[1, 2])]).is_err());
    }
}
