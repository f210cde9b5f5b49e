//! The whole engine, over in-memory links and over sockets.

#![expect(unsafe_code, reason = "posting takes memory for longer than the call")]

mod ends;
mod given_up;
mod objects;
mod protocol;
mod traffic;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::requests::Request;
use super::{Connector, Envelope, MessageError, Messages, Outcome, Ticket};
use crate::base::deadline::Deadline;
use crate::base::random::Random;
use crate::call::element::{DType, TypeTag};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::ByteLink;
use crate::host::shm::{RingLink, ring_pair};

/// The element type of messages for which a test names none: bytes.
const BYTES: TypeTag = TypeTag::Scalar(DType::U8);

/// Returns bytes that differ from those of every other `which`, and from one position to another.
fn pattern(which: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(which.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut data = Vec::with_capacity(bytes + 8);
    // Random numbers are slow under Miri, so the same bytes are repeated.
    let drawn = if cfg!(miri) { bytes.min(500) } else { bytes };
    while data.len() < drawn {
        data.extend_from_slice(&random.next().to_le_bytes());
    }
    if drawn < bytes {
        data = data.repeat(bytes / data.len() + 1);
    }
    data.truncate(bytes);
    data
}

/// Returns a deadline that passes only if the test hangs.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// The operations that tests perform on an engine. All memory that is passed in outlives its request: each test holds
/// its buffers until it has polled, cancelled or dropped the engine.
trait Talk {
    fn isend_typed(&mut self, to: usize, tag: u64, element: TypeTag, data: &[u8]) -> Result<Ticket, Interrupted>;
    fn irecv_typed(&mut self, from: Option<usize>, tag: Option<u64>, element: TypeTag, into: &mut [u8]) -> Result<Ticket, Interrupted>;
    /// Makes progress until all these requests are finished. Ends early if one fails because its peer is gone, or if a
    /// peer reports that the communicator ended.
    fn finish_all(&mut self, tickets: &[Ticket]) -> Result<(), Interrupted>;
    fn outcome(&mut self, ticket: Ticket) -> Outcome;

    fn isend(&mut self, to: usize, tag: u64, data: &[u8]) -> Ticket {
        self.isend_typed(to, tag, BYTES, data).expect("the peer is there")
    }

    fn irecv(&mut self, from: Option<usize>, tag: Option<u64>, into: &mut [u8]) -> Ticket {
        self.irecv_typed(from, tag, BYTES, into).expect("the peer is there")
    }

    /// Sends and waits.
    fn send(&mut self, to: usize, tag: u64, data: &[u8]) {
        let ticket = self.isend(to, tag, data);
        self.finish_all(&[ticket]).expect("sent");
        assert_eq!(self.outcome(ticket).map(|envelope| envelope.bytes), Ok(data.len()));
    }

    /// Receives a message, waits for it, and returns it.
    fn recv(&mut self, from: Option<usize>, tag: Option<u64>, capacity: usize) -> (Envelope, Vec<u8>) {
        let mut into = vec![0; capacity];
        let ticket = self.irecv(from, tag, &mut into);
        self.finish_all(&[ticket]).expect("received");
        let envelope = self.outcome(ticket).expect("received well");
        into.truncate(envelope.bytes);
        (envelope, into)
    }
}

impl<C: Connector> Talk for Messages<C> {
    fn isend_typed(&mut self, to: usize, tag: u64, element: TypeTag, data: &[u8]) -> Result<Ticket, Interrupted> {
        // SAFETY: see the trait.
        unsafe { self.post_send(to, tag, element, data.as_ptr(), data.len()) }
    }

    fn irecv_typed(&mut self, from: Option<usize>, tag: Option<u64>, element: TypeTag, into: &mut [u8]) -> Result<Ticket, Interrupted> {
        // SAFETY: see the trait.
        unsafe { self.post_receive(from, tag, element, into.as_mut_ptr(), into.len()) }
    }

    fn finish_all(&mut self, tickets: &[Ticket]) -> Result<(), Interrupted> {
        let deadline = soon();
        self.progress();
        loop {
            let mut pending = false;
            for index in tickets.iter().filter_map(|ticket| self.matching_state.requests.index(*ticket)) {
                match self.matching_state.requests.request(index) {
                    Some(Request::Done(Err(MessageError::Ended(abort_reason)), _)) => return Err((*abort_reason).into()),
                    Some(Request::Done(..)) | None => {}
                    Some(_) => pending = true,
                }
            }
            match self.heard() {
                _ if !pending => return Ok(()),
                Some(abort_reason) => return Err(abort_reason.into()),
                None => assert!(!deadline.has_passed(), "a request hangs"),
            }
            self.wait_step(Duration::from_millis(1));
        }
    }

    fn outcome(&mut self, ticket: Ticket) -> Outcome {
        self.poll(ticket).expect("finished")
    }
}

// The network of a test: links of two kinds, and a connector that opens them.

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kind of link.
trait Wire: ByteLink + Sized + Send + 'static {
    /// Whether connectors of this kind have a descriptor to sleep on.
    const HAS_WAKE_UP: bool;

    fn pair(seed: u64) -> (Self, Self);
}

/// The capacity of one direction of an in-memory link. It is less than a message, and its rest is now and then less
/// than a header.
const PIPE_BYTES: usize = 40_000;

/// One direction of a link.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    is_closed: bool,
}

/// An in-memory link that moves as many bytes as a seeded generator decides.
struct MemoryLink {
    input: Arc<Mutex<Pipe>>,
    output: Arc<Mutex<Pipe>>,
    random: Random,
}

impl MemoryLink {
    /// Returns how many of `most` bytes move this time: mostly many, sometimes one or none.
    fn some(&mut self, most: usize) -> io::Result<usize> {
        let some = match self.random.below(8) {
            0 => return Err(io::ErrorKind::WouldBlock.into()),
            1 => 1 + self.random.below(40),
            2 => 1 + self.random.below(3000),
            _ => most,
        };
        if most == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(some.min(most)) }
    }
}

impl ByteLink for MemoryLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let output = Arc::clone(&self.output);
        let mut pipe = lock(&output);
        if pipe.is_closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let some = self.some(total.min(PIPE_BYTES - pipe.bytes.len()))?;
        pipe.bytes.extend(parts.iter().flat_map(|part| part.iter()).take(some));
        Ok(some)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let input = Arc::clone(&self.input);
        let mut pipe = lock(&input);
        if pipe.bytes.is_empty() && pipe.is_closed {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let there = into.len().min(pipe.bytes.len());
        // Once the other end is closed, everything that is left can be read, as with a socket.
        let some = if pipe.is_closed { there } else { self.some(there)? };
        pipe.bytes.read_exact(&mut into[..some])?;
        Ok(some)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        lock(&self.input).is_closed = true;
        lock(&self.output).is_closed = true;
    }
}

impl Wire for MemoryLink {
    const HAS_WAKE_UP: bool = false;

    fn pair(seed: u64) -> (Self, Self) {
        let (there, back) = (Arc::<Mutex<Pipe>>::default(), Arc::<Mutex<Pipe>>::default());
        let end = |input: &Arc<_>, output: &Arc<_>, seed| MemoryLink {
            input: Arc::clone(input),
            output: Arc::clone(output),
            random: Random(seed | 1),
        };
        (end(&back, &there, seed), end(&there, &back, seed.rotate_left(7)))
    }
}

impl Wire for RingLink {
    const HAS_WAKE_UP: bool = false;

    fn pair(_: u64) -> (Self, Self) {
        ring_pair(2)
    }
}

/// A nonblocking socket.
struct SocketLink(File);

impl ByteLink for SocketLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(parts)
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.read(into)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => Ok(read),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

impl Wire for SocketLink {
    const HAS_WAKE_UP: bool = true;

    fn pair(_seed: u64) -> (Self, Self) {
        let (one, other) = sockets();
        (SocketLink(one), SocketLink(other))
    }
}

/// Returns a pair of nonblocking sockets, written and read like files, the only way that Miri supports.
fn sockets() -> (File, File) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a pair of sockets");
    (one.into(), other.into())
}

/// A rank's listener in the network.
struct Acceptor<W> {
    waiting: Vec<(usize, W)>,
    /// While it is set, links that were opened are not visible yet.
    is_shut: bool,
    is_gone: bool,
}

/// The state that the ranks of a test share.
struct TestNetwork<W> {
    acceptors: Vec<Mutex<Acceptor<W>>>,
    wake_ups: Vec<OwnedFd>,
    random: Mutex<Random>,
}

impl<W: Wire> TestNetwork<W> {
    /// Creates a network and the engines of all its ranks.
    fn new(size: usize, seed: u64) -> (Arc<Self>, Vec<Messages<Usher<W>>>) {
        let network = Arc::new(Self {
            acceptors: (0..size).map(|_| Mutex::new(Acceptor { waiting: Vec::new(), is_shut: false, is_gone: false })).collect(),
            wake_ups: (0..size).map(|_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("a wake-up")).collect(),
            random: Mutex::new(Random(seed)),
        });
        let engine = |rank| Messages::new(rank, size, true, Usher { rank, network: Arc::clone(&network) });
        let engines = (0..size).map(engine).collect();
        (network, engines)
    }

    /// Creates a network like [`TestNetwork::new`], with as many engines as the caller's pattern has.
    fn of<const SIZE: usize>(seed: u64) -> (Arc<Self>, [Messages<Usher<W>>; SIZE]) {
        let (network, engines) = Self::new(SIZE, seed);
        let engines = engines.try_into().ok().expect("as many engines as ranks");
        (network, engines)
    }

    /// Opens a link from `from` to `to`. Returns the end of `from`.
    fn open(&self, from: usize, to: usize) -> W {
        let (mine, theirs) = W::pair(lock(&self.random).next());
        // Under the lock, so that the taker of the link also finds the wake-up.
        let mut acceptor = lock(&self.acceptors[to]);
        acceptor.waiting.push((from, theirs));
        rustix::io::write(&self.wake_ups[to], &1_u64.to_ne_bytes()).expect("the wake-up rings");
        mine
    }

    /// Hides the links that are opened to a rank, or shows them.
    fn shut(&self, rank: usize, is_shut: bool) {
        lock(&self.acceptors[rank]).is_shut = is_shut;
    }
}

/// A connector of one rank.
struct Usher<W> {
    rank: usize,
    network: Arc<TestNetwork<W>>,
}

impl<W: Wire> Connector for Usher<W> {
    type Link = W;

    fn connect(&mut self, peer: usize) -> Result<W, Interrupted> {
        if lock(&self.network.acceptors[peer]).is_gone {
            return Err(AbortReason::Lost { rank: peer as u32, by: self.rank as u32 }.into());
        }
        Ok(self.network.open(self.rank, peer))
    }

    fn accept(&mut self) -> Vec<(usize, W)> {
        let mut acceptor = lock(&self.network.acceptors[self.rank]);
        if acceptor.is_shut || acceptor.waiting.is_empty() {
            return Vec::new();
        }
        rustix::io::read(&self.network.wake_ups[self.rank], &mut [0; 8]).expect("the wake-up has rung");
        std::mem::take(&mut acceptor.waiting)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        W::HAS_WAKE_UP.then(|| self.network.wake_ups[self.rank].as_fd())
    }
}

impl<W> Drop for Usher<W> {
    fn drop(&mut self) {
        let mut acceptor = lock(&self.network.acceptors[self.rank]);
        acceptor.is_gone = true;
        // Like a closed listening socket, it resets links that were never accepted.
        acceptor.waiting.clear();
    }
}

/// Runs one thread for each rank and returns the results in rank order.
fn ranks<W: Wire, R: Send>(size: usize, seed: u64, body: impl Fn(usize, &mut Messages<Usher<W>>) -> R + Sync) -> Vec<R> {
    let (_network, engines) = TestNetwork::<W>::new(size, seed);
    thread::scope(|scope| {
        let body = &body;
        let run = |(rank, mut engine): (usize, Messages<Usher<W>>)| {
            scope.spawn(move || {
                let result = body(rank, &mut engine);
                engine.leave(&soon()).expect("left in order");
                result
            })
        };
        let threads: Vec<_> = engines.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panicked")).collect()
    })
}

/// Makes progress on engines in one thread until nothing moves any more.
fn pump<W: Wire>(engines: &mut [&mut Messages<Usher<W>>]) {
    let mut idle = 0;
    // An in-memory link may return `WouldBlock` a few times in a row although data is available.
    while idle < 20 {
        let moved = engines.iter_mut().filter_map(|engine| engine.progress().then_some(())).count() > 0;
        idle = if moved { 0 } else { idle + 1 };
    }
}
