//! Links between threads: rings in memory that misbehave as sockets may, and real sockets.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::Random;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::engine::Links;
use crate::host::link::ByteLink;

/// One direction of an in-memory link.
#[derive(Default)]
struct Ring {
    bytes: VecDeque<u8>,
    is_closed: bool,
}

/// One end of a pair of rings. It accepts and returns random parts, and at random nothing.
pub(super) struct Chaos {
    to: Arc<Mutex<Ring>>,
    from: Arc<Mutex<Ring>>,
    capacity: usize,
    random: Random,
}

impl Chaos {
    pub(super) fn pair(seed: u64, capacity: usize) -> (Self, Self) {
        let (a, b) = (Arc::<Mutex<Ring>>::default(), Arc::<Mutex<Ring>>::default());
        let end =
            |to: &Arc<_>, from: &Arc<_>, seed| Self { to: Arc::clone(to), from: Arc::clone(from), capacity, random: Random(seed | 1) };
        (end(&a, &b, seed), end(&b, &a, seed.wrapping_mul(31)))
    }

    /// Returns how many of `len` bytes move this time.
    fn part(&mut self, len: usize) -> io::Result<usize> {
        if len == 0 || self.random.below(4) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(1 + self.random.below(len))
    }
}

impl Drop for Chaos {
    fn drop(&mut self) {
        for ring in [&self.to, &self.from] {
            ring.lock().expect("ring").is_closed = true;
        }
    }
}

impl ByteLink for Chaos {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let to = Arc::clone(&self.to);
        let mut ring = to.lock().expect("ring");
        if ring.is_closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let all = parts.iter().map(|part| part.len()).sum::<usize>();
        let count = self.part(all.min(self.capacity - ring.bytes.len()))?;
        ring.bytes.extend(parts.iter().flat_map(|part| part.iter()).take(count));
        Ok(count)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let from = Arc::clone(&self.from);
        let mut ring = from.lock().expect("ring");
        if ring.bytes.is_empty() && ring.is_closed {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let count = self.part(into.len().min(ring.bytes.len()))?;
        into.iter_mut().zip(ring.bytes.drain(..count)).for_each(|(to, from)| *to = from);
        Ok(count)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// One end of a pair of sockets.
pub(super) struct Socket(File);

impl Socket {
    pub(super) fn pair() -> (Self, Self) {
        // They are written and read like files, the only way that Miri supports.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a pair of sockets");
        (Self(a.into()), Self(b.into()))
    }
}

impl ByteLink for Socket {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(parts)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.read(into)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => Ok(count),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// Counts the calls that moved something.
pub(super) struct Counting {
    inner: Socket,
    pub(super) writes: usize,
    pub(super) reads: usize,
}

impl Counting {
    pub(super) fn pair() -> (Self, Self) {
        let (a, b) = Socket::pair();
        let counting = |inner| Self { inner, writes: 0, reads: 0 };
        (counting(a), counting(b))
    }
}

impl ByteLink for Counting {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let result = self.inner.try_write(parts);
        self.writes += usize::from(result.is_ok());
        result
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let result = self.inner.try_read(into);
        self.reads += usize::from(result.is_ok());
        result
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}

/// The links of one rank.
pub(super) struct Mesh<K>(pub(super) Vec<Option<K>>);

impl<K: ByteLink> Links for Mesh<K> {
    type Link = K;

    fn link(&mut self, rank: usize) -> Result<&mut K, Interrupted> {
        self.0[rank].as_mut().ok_or_else(|| AbortReason::Lost { rank: rank as u32, by: rank as u32 }.into())
    }

    fn for_each_open(&mut self, visit: &mut dyn FnMut(usize, &mut K)) {
        let open = self.0.iter_mut().enumerate().filter_map(|(rank, link)| Some((rank, link.as_mut()?)));
        open.for_each(|(rank, link)| visit(rank, link));
    }

    fn drop_link(&mut self, rank: usize) {
        self.0[rank] = None;
    }
}

/// Returns a mesh for each rank. `pair` makes the two ends of the link between two ranks, if there is to be one.
pub(super) fn meshes<K>(size: usize, mut pair: impl FnMut(usize, usize) -> Option<(K, K)>) -> Vec<Mesh<K>> {
    let mut meshes: Vec<_> = (0..size).map(|_| Mesh((0..size).map(|_| None).collect())).collect();
    for a in 0..size {
        for b in a + 1..size {
            if let Some((end_a, end_b)) = pair(a, b) {
                meshes[a].0[b] = Some(end_a);
                meshes[b].0[a] = Some(end_b);
            }
        }
    }
    meshes
}

/// Connects all ranks by in-memory rings of random small sizes.
pub(super) fn chaos(size: usize, seed: u64) -> Vec<Mesh<Chaos>> {
    let mut random = Random(seed);
    meshes(size, |_, _| {
        let capacity = 1 + random.below(9000);
        Some(Chaos::pair(random.below(1 << 40) as u64, capacity))
    })
}

/// Connects all ranks by sockets.
pub(super) fn sockets(size: usize) -> Vec<Mesh<Socket>> {
    meshes(size, |_, _| Some(Socket::pair()))
}
