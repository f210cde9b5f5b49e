//! A stream of bytes to one peer and back, that never blocks.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// A reliable, ordered stream of bytes in each direction between this rank and one peer.
///
/// It carries messages of at least two bytes, each of which begins with a part of its own. Who has written some of a message, but not all,
/// writes the rest next, or nothing more.
///
/// Every call returns `WouldBlock` where nothing can move now. Any other error means that the peer is gone:
/// `UnexpectedEof` where it closed its end, `ConnectionReset` or `BrokenPipe` where it died, [`Silence`] where its host has stopped answering. That
/// alone may be over at the next call.
pub(crate) trait ByteLink {
    /// Writes what fits of `parts`, in order, and says how many bytes that was (never `Ok(0)`, unless all parts are empty).
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Reads what is there into `into` and says how many bytes that was (never `Ok(0)`, unless `into` is empty).
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// As [`ByteLink::try_read`], for a part of so much that it will not stay in the cache: it need not go there first.
    fn try_read_past(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.try_read(into)
    }

    /// Writes a frame whole, where it has a quicker way for that, and room; whether it did. `payload` is all that follows the header.
    #[inline]
    fn try_write_frame(&mut self, _head: &Head, _payload: &[u8]) -> io::Result<bool> {
        Ok(false)
    }

    /// How the frame begins that comes next, and the bytes that are there. Where nothing is, it looks so many times more, and then returns `WouldBlock`.
    /// `Ok(None)` where that is not known, and [`ByteLink::try_read`] is to tell. Where more than one frame is there it may be how the last of them begins: it is the next one where
    /// its header says that it is as long as all that is there. It stays next until [`ByteLink::take_frame`].
    #[inline]
    fn peek_frame(&mut self, _looks: u32) -> io::Result<Option<Head>> {
        Ok(None)
    }

    /// Reads all that [`ByteLink::peek_frame`] has just found; what follows a header of so many bytes goes into `payload`, as much as that holds.
    fn take_frame(&mut self, _header_bytes: usize, _payload: &mut [u8]) {}

    /// What a poll can wait on; `None` where a poll does not see all that can be read: a stream in shared memory, or one that has read ahead.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// What wakes this rank when anything moves on this link or another one of its kind, where there is no descriptor.
    fn bell(&self) -> Option<Arc<dyn Bell>> {
        None
    }
}

/// What a rank sleeps on whose links have no descriptors. It listens, looks at its links once more, and sleeps where nothing has moved; in any case it
/// leaves afterwards.
pub(crate) trait Bell {
    /// From here on what moves is heard.
    fn listen(&self) -> Heard;

    /// Sleeps until more is heard, at most for `limit`.
    fn sleep(&self, heard: Heard, limit: Duration);

    /// Listens no longer.
    fn leave(&self);
}

/// What a bell has told until now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heard {
    pub(crate) word: u32,
    /// The peers may not know yet that somebody listens: this sleep is to be a nap.
    pub(crate) is_new: bool,
}

/// What a link says of a peer whose host has stopped answering: for how long nothing came back. It may be heard again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer's host has not answered for {:.0} s", .0.as_secs_f64())]
pub(crate) struct Silence(pub(crate) Duration);

impl Silence {
    /// That of a link's error, where it is one.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<Silence> for io::Error {
    fn from(silence: Silence) -> Self {
        Self::new(io::ErrorKind::TimedOut, silence)
    }
}

/// How a frame begins, as words that move without being copied from place to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The first bytes in memory order; those behind the frame's end mean nothing.
    pub(crate) words: [u64; Self::WORDS],
    /// How many bytes the frame is.
    pub(crate) bytes: usize,
}

impl Head {
    /// How many words it is.
    pub(crate) const WORDS: usize = 6;
    /// How many bytes of a frame it has.
    pub(crate) const BYTES: usize = 8 * Self::WORDS;
}

/// A link for fuzzing: a peer that sends given bytes.
#[cfg(feature = "__internals")]
pub(super) mod script {
    use std::io::{self, IoSlice};
    use std::os::fd::BorrowedFd;

    use super::ByteLink;

    /// A peer that sends these bytes and takes whatever it is sent, a few at a time.
    pub(in crate::host) struct Script {
        bytes: Vec<u8>,
        at: usize,
        /// What comes when they are over; the end of the stream where there is nothing.
        filler: Option<u8>,
        /// State of the generator that says how many bytes move; all that can where it is 0.
        jitter: u64,
        /// What it was sent.
        pub(in crate::host) taken: Vec<u8>,
    }

    impl Script {
        pub(in crate::host) fn new(bytes: &[u8], filler: Option<u8>, jitter: u64) -> Self {
            Self { bytes: bytes.to_vec(), at: 0, filler, jitter, taken: Vec::new() }
        }

        /// How many of so many bytes move, at least one.
        fn part(&mut self, most: usize) -> usize {
            if self.jitter == 0 {
                return most;
            }
            self.jitter ^= self.jitter << 13;
            self.jitter ^= self.jitter >> 7;
            self.jitter ^= self.jitter << 17;
            most.min(1 + (self.jitter >> 20) as usize % 70)
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
}
