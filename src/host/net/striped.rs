//! A link over several TCP connections.
//!
//! The bytes of each direction are cut into stripes of a fixed size. The stripes take turns on the connections, in the
//! same order at both ends, so no stripe needs a header. Each connection has its own congestion window and its own
//! buffers. So if one connection waits for a lost packet, the others still move what their buffers hold.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};

use super::tcp::TcpLink;
use crate::base::tuning::net::STRIPE_BYTES;
use crate::host::link::ByteLink;

/// The most parts of a write that go over a connection at once. A caller writes the rest next.
const MOST_PARTS: usize = 8;

/// Several connections to one peer, in the same order at both ends. The link never blocks.
#[derive(Debug)]
pub(crate) struct StripedLink {
    connections: Vec<TcpLink>,
    writing: Place,
    reading: Place,
}

/// The next byte of a direction.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    connection: usize,
    /// Bytes of the current stripe that have moved.
    moved: usize,
}

impl Place {
    /// Returns how many bytes of the current stripe are left.
    fn left(self) -> usize {
        STRIPE_BYTES - self.moved
    }

    /// Records that bytes of the current stripe have moved.
    fn advance(&mut self, count: usize, connections: usize) {
        self.moved += count;
        if self.moved >= STRIPE_BYTES {
            *self = Self { connection: (self.connection + 1) % connections, moved: 0 };
        }
    }
}

impl StripedLink {
    /// Creates the link. There is at least one connection.
    pub(super) fn new(connections: Vec<TcpLink>) -> Self {
        debug_assert!(!connections.is_empty());
        Self { connections, writing: Place::default(), reading: Place::default() }
    }
}

impl AsFd for StripedLink {
    /// Returns the first connection, on which the link begins.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connections[0].as_fd()
    }
}

impl ByteLink for StripedLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut written = 0;
        while written < total {
            let (stripe, asked) = cut(parts, written, self.writing.left());
            match self.connections[self.writing.connection].try_write(&stripe) {
                Ok(count) => {
                    written += count;
                    self.writing.advance(count, self.connections.len());
                    if count < asked {
                        break;
                    }
                }
                // If the error remains, the next write returns it.
                Err(error) => return if written > 0 { Ok(written) } else { Err(error) },
            }
        }
        Ok(written)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while read < into.len() {
            let asked = self.reading.left().min(into.len() - read);
            match self.connections[self.reading.connection].try_read(&mut into[read..read + asked]) {
                Ok(count) => {
                    read += count;
                    self.reading.advance(count, self.connections.len());
                    if count < asked {
                        break;
                    }
                }
                Err(error) => return if read > 0 { Ok(read) } else { Err(error) },
            }
        }
        Ok(read)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.connections[self.reading.connection].descriptor()
    }

    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.connections[self.writing.connection].descriptor()
    }

    fn has_unsent(&self) -> bool {
        self.connections.iter().any(ByteLink::has_unsent)
    }
}

/// Returns the bytes of `parts` from byte `from` on, at most `most`, and their number.
fn cut<'a>(parts: &'a [IoSlice<'_>], mut from: usize, most: usize) -> ([IoSlice<'a>; MOST_PARTS], usize) {
    let mut stripe = [IoSlice::new(&[]); MOST_PARTS];
    let (mut count, mut index) = (0, 0);
    for part in parts {
        let skipped = from.min(part.len());
        from -= skipped;
        let taken = (part.len() - skipped).min(most - count);
        if taken > 0 {
            stripe[index] = IoSlice::new(&part[skipped..skipped + taken]);
            count += taken;
            index += 1;
        }
        if count == most || index == MOST_PARTS {
            break;
        }
    }
    (stripe, count)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::base::random::Random;
    use crate::base::tuning::net::SILENCE_TIMEOUT;

    /// Returns the two ends of a link over `count` connections.
    fn pair(count: usize) -> [StripedLink; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let end = |stream: TcpStream| {
            stream.set_nonblocking(true).unwrap();
            TcpLink::new(stream, SILENCE_TIMEOUT)
        };
        let connect = |_| {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (end(near), end(listener.accept().unwrap().0))
        };
        let (near, far): (Vec<_>, Vec<_>) = (0..count).map(connect).unzip();
        [near, far].map(StripedLink::new)
    }

    /// Returns the number of bytes that moved; 0 if nothing could.
    fn moved(result: io::Result<usize>) -> usize {
        result.unwrap_or_else(|error| {
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            0
        })
    }

    #[test]
    fn bytes_arrive_in_order_over_any_number_of_connections() {
        let mut random = Random(7);
        for count in [1, 2, 3, 16] {
            let [mut near, mut far] = pair(count);
            let sent = random.bytes(5 * STRIPE_BYTES + 17);
            let (mut written, mut got) = (0, Vec::new());
            while got.len() < sent.len() {
                if written < sent.len() {
                    let rest = &sent[written..];
                    let ends = [random.below(3), random.below(STRIPE_BYTES * 2), rest.len()].map(|end| end.min(rest.len()));
                    let middle = ends[0].max(ends[1]);
                    let parts = [&rest[..ends[0]], &rest[ends[0]..middle], &[], &rest[middle..]].map(IoSlice::new);
                    written += moved(near.try_write(&parts));
                }
                let mut buffer = vec![0; 1 + random.below(STRIPE_BYTES * 2)];
                let read = moved(far.try_read(&mut buffer));
                got.extend_from_slice(&buffer[..read]);
            }
            assert!(got == sent, "{count} connections");
            assert_eq!(moved(far.try_write(&[IoSlice::new(b"back")])), 4);
            let mut back = [0; 4];
            while moved(near.try_read(&mut back)) == 0 {}
            assert_eq!(&back, b"back");
        }
    }

    #[test]
    fn the_connection_that_is_due_is_the_one_to_wait_for() {
        let [mut near, far] = pair(2);
        let number = |descriptor: Option<BorrowedFd<'_>>| descriptor.unwrap().as_raw_fd();
        assert_eq!(number(near.descriptor()), number(near.write_descriptor()));
        assert_eq!(near.try_write(&[IoSlice::new(&vec![1; STRIPE_BYTES])]).unwrap(), STRIPE_BYTES);
        assert_ne!(number(near.descriptor()), number(near.write_descriptor()));
        assert_eq!(number(near.write_descriptor()), near.connections[1].descriptor().unwrap().as_raw_fd());
        drop(far);
    }

    #[test]
    fn a_write_of_many_parts_is_cut_and_an_end_is_reported() {
        let [mut near, mut far] = pair(2);
        let byte = [9];
        let parts = [IoSlice::new(&byte); 3 * MOST_PARTS];
        let mut written = 0;
        while written < parts.len() {
            written += moved(near.try_write(&parts[written..]));
        }
        let mut all = [0; 3 * MOST_PARTS];
        let mut read = 0;
        while read < all.len() {
            read += moved(far.try_read(&mut all[read..]));
        }
        assert_eq!(all, [9; 3 * MOST_PARTS]);
        assert_eq!((near.try_write(&[]).unwrap(), near.try_read(&mut []).unwrap()), (0, 0));
        drop(far);
        let error = loop {
            match near.try_read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => break other.unwrap_err(),
            }
        };
        assert!(matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{error}");
    }
}
