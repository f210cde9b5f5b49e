//! A stream of bytes to one peer and back, that never blocks.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

/// A reliable, ordered stream of bytes in each direction between this rank and one peer.
///
/// Every call returns `WouldBlock` where nothing can move now. Any other error means that the peer is gone:
/// `UnexpectedEof` where it closed its end, `ConnectionReset` or `BrokenPipe` where it died.
pub(crate) trait ByteLink {
    /// Writes what fits of `parts`, in order, and says how many bytes that was (never `Ok(0)`, unless all parts are empty).
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Reads what is there into `into` and says how many bytes that was (never `Ok(0)`, unless `into` is empty).
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// As [`ByteLink::try_read`], for a part of so much that it will not stay in the cache: it need not go there first.
    fn try_read_past(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.try_read(into)
    }

    /// What a poll can wait on; `None` for a stream in shared memory.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}
