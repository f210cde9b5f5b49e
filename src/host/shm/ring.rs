//! Byte streams between two ranks of one host: a ring of bytes per direction and channel, with one writer and one reader.

#![expect(unsafe_code, reason = "a link may move to another thread")]

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::region::Region;
use super::ring_end::{End, Peeked};
use crate::base::tuning::shm::{LIVENESS_INTERVAL, RING_TRIES_PER_LOOK};
use crate::host::copy::{Copy, copy, copy_streaming};
use crate::host::link::{Bell, ByteLink, Head, Heard};
use crate::host::waiting::Interval;

/// One of the streams between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Channel {
    /// Collectives that run over links.
    Collective = 0,
    /// Sends and receives.
    PointToPoint = 1,
}

/// The link between this rank and another rank of its host, in both directions. Keeps the region mapped.
pub(crate) struct RingLink {
    sender: End,
    receiver: End,
    region: Arc<Region>,
    peer: usize,
    tries: u32,
    /// When to ask the kernel again whether the peer lives.
    liveness: Interval,
}

// SAFETY: the pointers lead into the region, which the link keeps mapped. Each end of a ring exists once (`Group::link`
// returns each link once), and what both ends access is ordered by the cursors, or is atomic. Nothing in it belongs to
// a thread.
unsafe impl Send for RingLink {}

impl RingLink {
    /// Creates the link to `peer`. Called once per peer and channel.
    pub(super) fn new(region: Arc<Region>, peer: usize, channel: Channel) -> Self {
        let (layout, bytes) = (*region.layout(), region.ring_bytes());
        let end = |from, to| End::new(region.at(layout.ring(from, to, channel as usize)), bytes);
        Self { sender: end(region.me(), peer), receiver: end(peer, region.me()), peer, tries: 0, liveness: Interval::default(), region }
    }

    /// Counts an attempt without success. Returns whether the peer has left or died, which is checked rarely.
    fn is_peer_gone(&mut self) -> bool {
        self.tries += 1;
        if self.tries < RING_TRIES_PER_LOOK {
            return false;
        }
        self.tries = 0;
        if self.region.member(self.peer).has_departed() {
            return true;
        }
        self.liveness.is_due(Instant::now(), LIVENESS_INTERVAL) && !self.region.lives(self.peer)
    }
}

/// Wakes a rank whose rings have moved.
struct RingBell(Arc<Region>);

impl Bell for RingBell {
    fn listen(&self) -> Heard {
        let is_new = self.0.sleeps_lightly();
        Heard { word: self.0.member(self.0.me()).listen(), is_new }
    }

    fn sleep(&self, heard: Heard, limit: Duration) {
        self.0.member(self.0.me()).doze(heard.word, limit);
    }

    fn leave(&self) {
        self.0.member(self.0.me()).stop_listening();
    }
}

impl RingLink {
    /// Wakes the peer if it sleeps, since a cursor has moved.
    #[inline]
    fn tell(&mut self) {
        self.tries = 0;
        if self.region.control().has_light_sleepers() {
            self.region.ring(self.peer);
        }
    }

    #[inline]
    fn read(&mut self, into: &mut [u8], copy: Copy) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        let mut read = self.receiver.read(into, copy)?;
        if read == 0 {
            if !self.is_peer_gone() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            // What it wrote before it ended is still to be read.
            read = self.receiver.read(into, copy)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.tell();
        Ok(read)
    }
}

impl ByteLink for RingLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let wanted = parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.len()));
        if wanted == 0 {
            return Ok(0);
        }
        let written = self.sender.write(parts, wanted)?;
        if written == 0 {
            let kind = if self.is_peer_gone() { io::ErrorKind::BrokenPipe } else { io::ErrorKind::WouldBlock };
            return Err(kind.into());
        }
        self.tell();
        Ok(written)
    }

    #[inline]
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read(into, copy)
    }

    fn try_read_past(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read(into, copy_streaming)
    }

    #[inline]
    fn try_write_frame(&mut self, head: &Head, payload: &[u8]) -> io::Result<bool> {
        let is_written = self.sender.write_frame(head, payload)?;
        if is_written {
            self.tell();
        }
        Ok(is_written)
    }

    #[inline]
    fn peek_frame(&mut self, looks: u32) -> io::Result<Option<Head>> {
        let mut found = self.receiver.peek_frame(looks)?;
        if matches!(found, Peeked::Nothing) {
            if !self.is_peer_gone() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            // What it wrote before it ended is still to be read.
            found = self.receiver.peek_frame(0)?;
        }
        match found {
            Peeked::Nothing => Err(io::ErrorKind::UnexpectedEof.into()),
            Peeked::Frame(head) => Ok(Some(head)),
            Peeked::Other => Ok(None),
        }
    }

    #[inline]
    fn take_frame(&mut self, header_bytes: usize, payload: &mut [u8]) {
        self.receiver.take_frame(header_bytes, payload);
        self.tell();
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn bell(&self) -> Option<Arc<dyn Bell>> {
        Some(Arc::new(RingBell(Arc::clone(&self.region))))
    }
}

#[cfg(test)]
pub(in crate::host) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::base::random::Random;
    use crate::host::shm::region::tests::regions;
    use crate::meeting::wait_until;

    /// The divisor by which less data goes through the rings under Miri.
    const LESS: usize = if cfg!(miri) { 100 } else { 1 };

    /// Returns two ranks' links to each other, among `ranks`.
    pub(in crate::host) fn pair(ranks: usize) -> (RingLink, RingLink) {
        let mut regions = regions(ranks);
        let (b, a) = (regions.pop().unwrap(), regions.swap_remove(0));
        (RingLink::new(Arc::new(a), ranks - 1, Channel::PointToPoint), RingLink::new(Arc::new(b), 0, Channel::PointToPoint))
    }

    /// Retries until the call does not block.
    fn patiently<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let mut outcome = None;
        wait_until("the other end goes on", || {
            outcome = Some(call()).filter(|outcome| !outcome.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
            outcome.is_some()
        });
        outcome.unwrap()
    }

    /// Returns the byte at a position of a stream.
    fn byte(stream: u64, at: usize) -> u8 {
        (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15 + stream).to_le_bytes()[6]
    }

    /// Sends and receives a stream at once, in random parts.
    fn talk(link: &mut RingLink, me: u64, total: usize, seed: u64) {
        let mut random = Random(seed);
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
        for (ranks, total, seed) in [(2, 700_000 / LESS, 1), (9, 300_000 / LESS, 2), (33, 90_000 / LESS, 3)] {
            let (mut a, mut b) = pair(ranks);
            std::thread::scope(|scope| {
                scope.spawn(|| talk(&mut a, 0, total, seed));
                talk(&mut b, 1, total, seed + 100);
            });
        }
    }

    /// Returns frame `index` of a stream: its length in 8 bytes, then its contents.
    fn frame(index: usize, random: &mut Random) -> Vec<u8> {
        let length = 8 + [random.below(60), random.below(1200), random.below(40_000)][random.below(3)];
        (length as u64).to_le_bytes().into_iter().chain((8..length).map(|at| byte(index as u64, at))).collect()
    }

    fn head_of(frame: &[u8]) -> Head {
        let mut words = [0; Head::WORDS];
        let padded: Vec<u8> = frame.iter().copied().chain([0xee; Head::BYTES]).collect();
        words.iter_mut().zip(padded.as_chunks().0).for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
        Head { words, bytes: frame.len() }
    }

    /// Receives `frames` frames: by their heads if available, and as bytes if not or if chance decides so. Returns how
    /// many of each.
    fn receive_frames(link: &mut RingLink, frames: usize, seed: u64, received: &AtomicUsize) -> [usize; 2] {
        let (mut sizes, mut random) = (Random(seed), Random(seed + 2));
        let (mut counts, mut ahead) = ([0; 2], Vec::new());
        for index in 0..frames {
            received.store(index, Ordering::Relaxed);
            let expected = frame(index, &mut sizes);
            let by_head = ahead.is_empty() && random.below(4) > 0;
            let head = by_head.then(|| patiently(|| link.peek_frame(3)).unwrap()).flatten();
            if let Some(head) = head.filter(|head| head.words[0].to_le() == head.bytes as u64) {
                let mut payload = vec![0; head.bytes - 8];
                link.take_frame(8, &mut payload);
                let begin = expected.len().min(Head::BYTES);
                assert!(
                    payload == expected[8..] && head.words.map(u64::to_ne_bytes).as_flattened()[..begin] == expected[..begin],
                    "{index}"
                );
                counts[0] += 1;
                continue;
            }
            while ahead.len() < expected.len() {
                let most = [expected.len() - ahead.len(), 3000][usize::from(random.below(8) == 0)];
                let mut part = vec![0; 1 + random.below(most)];
                let read = patiently(|| link.try_read(&mut part)).unwrap();
                ahead.extend_from_slice(&part[..read]);
            }
            assert!(ahead.drain(..expected.len()).eq(expected.iter().copied()), "{index}");
            counts[1] += 1;
        }
        counts
    }

    #[test]
    fn frames_arrive_whole_whichever_way_they_are_written_and_read() {
        let seed = 0x5eed_0018;
        let (mut a, mut b) = pair(2);
        let frames = 2000 / LESS;
        let received = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut sizes, mut random) = (Random(seed), Random(seed + 1));
                for index in 0..frames {
                    let frame = frame(index, &mut sizes);
                    // If a frame is all that is there, it can be read by its head.
                    let waits = random.below(2) == 0;
                    if waits {
                        wait_until("the other end has read all", || received.load(Ordering::Relaxed) >= index);
                    }
                    if random.below(4) > 0 && a.try_write_frame(&head_of(&frame), &frame[8..]).unwrap() {
                        continue;
                    }
                    let mut sent = 0;
                    while sent < frame.len() {
                        sent += patiently(|| a.try_write(&[IoSlice::new(&frame[sent..])])).unwrap();
                    }
                }
            });
            let counts = receive_frames(&mut b, frames, seed, &received);
            assert!(counts.into_iter().all(|count| count > frames / 10), "seed {seed}: {counts:?}");
        });
    }

    #[test]
    fn short_writes_arrive_whole_whether_they_are_read_at_once_or_late() {
        let seed = 0x5eed_0017;
        let (mut a, mut b) = pair(2);
        let total = 400_000 / LESS;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut random, mut sent) = (Random(seed), 0);
                while sent < total {
                    let bytes: Vec<u8> = (sent..total.min(sent + 1 + random.below(60))).map(|at| byte(0, at)).collect();
                    let (head, tail) = bytes.split_at(random.below(bytes.len() + 1));
                    sent += patiently(|| a.try_write(&[IoSlice::new(head), IoSlice::new(tail)])).unwrap();
                }
            });
            let (mut random, mut received) = (Random(seed + 1), 0);
            let mut buffer = [0; 200];
            while received < total {
                // Mostly all that is there, as messages are read; sometimes less than one write.
                let most = if random.below(8) == 0 { 1 + random.below(50) } else { buffer.len() };
                let read = patiently(|| b.try_read(&mut buffer[..most])).unwrap();
                assert!(buffer[..read].iter().enumerate().all(|(at, value)| *value == byte(0, received + at)), "seed {seed:#x}");
                received += read;
            }
        });
    }

    #[test]
    fn bytes_read_past_the_cache_are_the_same() {
        let (mut a, mut b) = pair(2);
        for (at, length) in [(0, 0), (1, 1), (3, 63), (0, 64), (61, 4096 / LESS), (7, 50_001 / LESS), (64, 100_000 / LESS)] {
            let sent: Vec<u8> = (0..length).map(|at| byte(2, at)).collect();
            let mut into = vec![0xaa; at + length + 70];
            let mut done = 0;
            assert_eq!(a.try_write(&[IoSlice::new(&sent)]).unwrap(), length);
            while done < length {
                done += b.try_read_past(&mut into[at + done..at + length]).unwrap();
            }
            assert!(into[at..at + length] == sent && into[..at].iter().chain(&into[at + length..]).all(|byte| *byte == 0xaa), "{length} B");
        }
    }

    #[test]
    fn nothing_is_something_only_where_nothing_was_asked() {
        let (mut a, mut b) = pair(2);
        assert_eq!(a.try_write(&[IoSlice::new(&[]), IoSlice::new(&[])]).unwrap(), 0);
        assert_eq!(b.try_read(&mut []).unwrap(), 0);
        assert_eq!(b.try_read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let capacity = a.sender.capacity;
        let large = vec![7; capacity + 1];
        assert_eq!(a.try_write(&[IoSlice::new(&large)]).unwrap(), capacity);
        assert_eq!(a.try_write(&[IoSlice::new(&large)]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(b.try_read(&mut vec![0; capacity + 1]).unwrap(), capacity);
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
        // Like a process that is killed: its lock vanishes, and nothing is sent.
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
