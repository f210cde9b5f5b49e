//! A non-blocking stream of bytes to one peer and back.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// A reliable, ordered stream of bytes in each direction between this rank and one peer.
///
/// It carries messages of at least two bytes. In a write, each message begins with a new part. A caller that has
/// written some of a message, but not all, writes the rest next, or nothing more.
///
/// Every call returns `WouldBlock` if nothing can move now. Any other error means that the peer is gone:
/// - `UnexpectedEof` if it closed its end;
/// - `ConnectionReset` or `BrokenPipe` if it died;
/// - [`Silence`] if its host has stopped answering. This is the only error that may no longer apply at the next call.
pub(crate) trait ByteLink {
    /// Writes as much of `parts` as fits, in order. Returns the number of bytes written, which is 0 only if all parts
    /// are empty.
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Reads bytes that have arrived, as many as fit into `into`. Returns the number of bytes read, which is 0 only if
    /// `into` is empty.
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Reads like [`ByteLink::try_read`], but may bypass the cache, because the caller reads more than fits into the
    /// cache.
    fn try_read_past(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.try_read(into)
    }

    /// Writes a whole frame if this link has room for the frame and can write it faster than [`ByteLink::try_write`].
    /// Returns whether the frame was written. `payload` consists of all bytes that follow the header.
    #[inline]
    fn try_write_frame(&mut self, _head: &Head, _payload: &[u8]) -> io::Result<bool> {
        Ok(false)
    }

    /// Returns the beginning of the next frame, and the number of bytes that have arrived. If no bytes have arrived,
    /// looks again, up to `looks` times, and then returns `WouldBlock`. Returns `Ok(None)` if the beginning is unknown.
    /// The caller must then use [`ByteLink::try_read`]. If several frames have arrived, the result may be the beginning
    /// of the last frame instead. To find out, compare the length in the header with the number of bytes that have
    /// arrived. If both are equal, the result is the beginning of the next frame. That frame remains the next one until
    /// [`ByteLink::take_frame`] is called.
    #[inline]
    fn peek_frame(&mut self, _looks: u32) -> io::Result<Option<Head>> {
        Ok(None)
    }

    /// Reads all bytes that [`ByteLink::peek_frame`] has just found. The first `header_bytes` bytes are the header. The
    /// bytes after the header are written to `payload`, as many as fit.
    fn take_frame(&mut self, _header_bytes: usize, _payload: &mut [u8]) {}

    /// Returns a descriptor that a poll can wait on. Returns `None` for a stream in shared memory and for a stream that
    /// has read ahead, because a poll does not notice all bytes of such a stream.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Returns the descriptor on which a poll shows that more can be written, if it is another than
    /// [`ByteLink::descriptor`].
    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor()
    }

    /// Whether written bytes are still on this host. These bytes are lost if this end is closed and the peer then
    /// writes to it.
    fn has_unsent(&self) -> bool {
        false
    }

    /// Returns this link's bell if the link is in shared memory, else `None`. The bell wakes this rank when bytes are
    /// written or read on this link, or on another link of the same kind.
    fn bell(&self) -> Option<Arc<dyn Bell>> {
        None
    }
}

/// Lets a rank sleep until something moves on its links, if they have no descriptors. The rank starts listening, looks
/// at its links once more, and sleeps if nothing has moved. In either case, it stops listening afterwards.
pub(crate) trait Bell {
    /// Starts listening. After this call, the bell notices each time that bytes are written or read on the links.
    fn listen(&self) -> Heard;

    /// Sleeps until the bell notices a read or write that `heard` does not include, or until `limit` has passed.
    fn sleep(&self, heard: Heard, limit: Duration);

    /// Stops listening.
    fn leave(&self);
}

/// What a bell has noticed so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heard {
    pub(crate) word: u32,
    /// Whether the peers may not know yet that this rank listens, so that this sleep must be short.
    pub(crate) is_new: bool,
}

/// The error of a link whose peer's host has stopped answering, with the time since anything was last received. The
/// peer may answer again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer's host has not answered for {:.0} s", .0.as_secs_f64())]
pub(crate) struct Silence(pub(crate) Duration);

impl Silence {
    /// Returns the silence that a link's error reports, if it reports one.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<Silence> for io::Error {
    fn from(silence: Silence) -> Self {
        Self::new(io::ErrorKind::TimedOut, silence)
    }
}

/// The beginning of a frame, as words that are passed on without copies between buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The first bytes in memory order. Those after the frame's end have no meaning.
    pub(crate) words: [u64; Self::WORDS],
    /// Number of bytes of the frame.
    pub(crate) bytes: usize,
}

impl Head {
    /// Number of words.
    pub(crate) const WORDS: usize = 6;
    /// Number of bytes of a frame that the words hold.
    pub(crate) const BYTES: usize = 8 * Self::WORDS;
}

/// A link for fuzzing: a peer that sends given bytes.
#[cfg(feature = "__internals")]
pub(super) mod script {
    use std::io::{self, IoSlice};
    use std::os::fd::BorrowedFd;

    use super::ByteLink;

    /// A peer that sends these bytes and accepts whatever it is sent, a few at a time.
    pub(in crate::host) struct Script {
        bytes: Vec<u8>,
        at: usize,
        /// What follows after the last of them; `None` for the end of the stream.
        filler: Option<u8>,
        /// State of the generator that decides how many bytes move. If it is 0, as many as possible move.
        jitter: u64,
        /// What the peer was sent.
        pub(in crate::host) taken: Vec<u8>,
    }

    impl Script {
        pub(in crate::host) fn new(bytes: &[u8], filler: Option<u8>, jitter: u64) -> Self {
            Self { bytes: bytes.to_vec(), at: 0, filler, jitter, taken: Vec::new() }
        }

        /// Returns the number of bytes to read or write: between 1 and `most`.
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
