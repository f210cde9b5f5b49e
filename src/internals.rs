//! Functions for the crate's own benchmarks and fuzz targets, which check their arguments. Not part of the interface.

#![expect(unsafe_code, reason = "folds and copies take pointers")]
#![allow(missing_docs, reason = "seen by benchmarks alone")]

use std::fmt;
use std::io::{self, IoSlice};
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::authentication::Secret;
use crate::base::deadline::Deadline;
use crate::call::element::{DType, Element, TypeTag};
use crate::call::op::ReduceOp;
use crate::call::{Call, Collective};
use crate::error::Result;
use crate::error::{Error, Peer};
use crate::flight::Flight;
use crate::host::copy;
use crate::host::exchange::{Exchange, local};
use crate::host::fold::Fold;
use crate::host::health::Health;
use crate::host::link::ByteLink;
use crate::host::net;
use crate::host::net::mesh::Mesh;
use crate::host::reduce::Kernel as Inner;
use crate::host::shm::{CallContext, Channel, Group};

/// The largest number of inputs of a [`Kernel`]. The destination is not counted.
pub const MOST_INPUTS: usize = 16;

/// Returns the instruction sets that this processor has, the smallest first.
pub fn levels() -> Vec<&'static str> {
    Inner::levels().collect()
}

/// The kernel of one op on one type, for a world size of two.
#[derive(Debug)]
pub struct Kernel<T: Element> {
    inner: Inner,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Kernel<T> {
    /// Creates the kernel for the instruction set `level`, or for the best instruction set if [`levels`] does not
    /// contain `level`.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the operation cannot be done on the element type.
    pub fn new(op: ReduceOp, dtype: DType, level: &str) -> Result<Self> {
        assert_eq!(dtype.size_bytes(), size_of::<T>(), "{dtype} has another size");
        Ok(Self { inner: Inner::on(level, op, dtype, 2)?, element: std::marker::PhantomData })
    }

    /// Computes `into = into op others[0] op …`
    pub fn in_place(&self, into: &mut [T], others: &[&[T]]) {
        let (into, bytes) = (into.as_mut_ptr().cast::<u8>(), size_of_val(into));
        let (pointers, count) = pointers(Some(into), others, bytes);
        // SAFETY: all slices have one length (checked), and the destination, which is one of the inputs, is exclusively
        // borrowed.
        unsafe { self.inner.fold(into, &pointers[..count], bytes, true) }
    }

    /// Computes `into = inputs[0] op …`
    pub fn apart(&self, into: &mut [T], inputs: &[&[T]]) {
        let (pointers, count) = pointers(None, inputs, size_of_val(into));
        // SAFETY: all slices have one length (checked), and the destination is exclusively borrowed.
        unsafe { self.inner.fold(into.as_mut_ptr().cast(), &pointers[..count], size_of_val(into), true) }
    }

    /// Computes like [`Kernel::apart`], and writes the result to two destinations.
    pub fn to_two(&self, into: &mut [T], also: &mut [T], inputs: &[&[T]]) {
        assert_eq!(into.len(), also.len(), "one length");
        let (pointers, count) = pointers(None, inputs, size_of_val(into));
        let (into, also, bytes) = (into.as_mut_ptr().cast(), also.as_mut_ptr().cast(), size_of_val(into));
        // SAFETY: as for `apart`; the second destination is exclusively borrowed too and has the same length (checked).
        unsafe { self.inner.fold_to_two((into, also), crate::host::copy::copy, &pointers[..count], bytes, true) }
    }
}

/// Returns the inputs' addresses, and their number.
fn pointers<T>(first: Option<*mut u8>, others: &[&[T]], bytes: usize) -> ([*const u8; MOST_INPUTS + 1], usize) {
    assert!(others.len() <= MOST_INPUTS, "too many inputs");
    let mut pointers = [std::ptr::null(); MOST_INPUTS + 1];
    let mut count = 0;
    for pointer in first.map(<*mut u8>::cast_const).into_iter().chain(others.iter().map(|other| other.as_ptr().cast())) {
        pointers[count] = pointer;
        count += 1;
    }
    assert!(others.iter().all(|other| size_of_val(*other) == bytes), "one length");
    (pointers, count)
}

/// Returns the results of `make` for each rank, by rank. Each runs on its own thread and can exchange data with the
/// others.
fn exchanging<T: Send>(ranks: usize, make: impl Fn(usize, &mut dyn Exchange) -> Result<T> + Sync) -> Result<Vec<T>> {
    let make = &make;
    std::thread::scope(|scope| {
        let ends = local::exchanges(ranks).into_iter().enumerate();
        let threads: Vec<_> = ends.map(|(rank, mut exchange)| scope.spawn(move || make(rank, &mut exchange))).collect();
        let failed = |_| Err(Error::argument("internals", "a rank's thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect()
    })
}

/// Copies to a destination that is read again soon.
pub fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "one length");
    // SAFETY: two borrowed slices of one length.
    unsafe { copy::copy(from.as_ptr(), to.as_mut_ptr(), from.len()) }
}

/// Copies with stores that bypass the cache.
pub fn copy_streaming(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "one length");
    // SAFETY: two borrowed slices of one length.
    unsafe { copy::copy_streaming(from.as_ptr(), to.as_mut_ptr(), from.len()) }
}

/// How long one frame, one step, or opening a link may take.
const LIMIT: Duration = Duration::from_secs(20);
/// Fruitless tries between two readings of the clock.
const TRIES: u32 = 1024;

/// One end of a link between two ranks.
pub struct Link {
    stream: Box<dyn ByteLink + Send>,
    /// Keeps the other end from treating this rank as gone.
    _group: Option<Mutex<Group>>,
}

impl Link {
    /// Creates both ends of a pair of rings in shared memory.
    ///
    /// # Errors
    ///
    /// An error if the region cannot be created or mapped.
    pub fn rings() -> Result<Vec<Self>> {
        exchanging(2, |rank, exchange| {
            let mut group = Group::connect(exchange, &[0, 1], rank, 2, None, &Deadline::after(LIMIT))?;
            let link = group.link(1 - rank, Channel::PointToPoint).ok_or_else(|| Error::argument("link", "taken twice"))?;
            Ok(Self { stream: Box::new(link), _group: Some(Mutex::new(group)) })
        })
    }

    /// Creates both ends of a TCP connection over the loopback interface, opened with a hello as between hosts.
    ///
    /// # Errors
    ///
    /// An error if a rank cannot listen or connect.
    pub fn tcp() -> Result<Vec<Self>> {
        Self::tcp_with(None)
    }

    /// Creates both ends of a TCP connection like [`Link::tcp`], with encryption.
    ///
    /// # Errors
    ///
    /// The errors of [`Link::tcp`], and an error if this build cannot encrypt.
    pub fn encrypted() -> Result<Vec<Self>> {
        Self::tcp_with(Some(&Secret::random()?.encrypting()?))
    }

    fn tcp_with(secret: Option<&Secret>) -> Result<Vec<Self>> {
        let listen = Ipv4Addr::LOCALHOST.into();
        let terms = &net::Terms { secret: secret.cloned(), silence_timeout: LIMIT, connections: 1, ports: None };
        let meshes =
            exchanging(2, |rank, exchange| Mesh::exchange(exchange, rank, 2, true, listen, [7; 16], 0, terms, &Deadline::after(LIMIT)))?;
        let deadline = Deadline::after(LIMIT);
        let stopped = |stop: crate::host::abort_reason::Interrupted| stop.to_error("opening a link", &Deadline::after(LIMIT), 0, &[]);
        let mut connector = meshes[0].connecting(net::Channel::PointToPoint, 1).map_err(stopped)?;
        let (mut near, mut far) = (None, None);
        while !deadline.has_passed() {
            if near.is_none() {
                near = connector.advance().map_err(|error| stopped(error.met_by(0)))?;
            }
            far = far.or_else(|| meshes[1].accepted(net::Channel::PointToPoint).pop());
            if let (Some(near), Some((_, far))) = (near.take_if(|_| far.is_some()), far.take()) {
                return Ok(vec![Self { stream: Box::new(near), _group: None }, Self { stream: Box::new(far), _group: None }]);
            }
            std::thread::yield_now();
        }
        Err(Error::Timeout {
            doing: "opening a link".to_owned(),
            elapsed: LIMIT,
            missing: Vec::new(),
            arrived: Vec::new(),
            meanwhile: Vec::new(),
        })
    }

    /// Writes a header and its whole payload.
    ///
    /// # Errors
    ///
    /// An error if the other end is gone or does not read.
    pub fn write(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        let mut parts = [IoSlice::new(header), IoSlice::new(payload)];
        let mut parts = &mut parts[..];
        let mut left = header.len() + payload.len();
        while left > 0 {
            let written = patiently(|| self.stream.try_write(parts))?;
            IoSlice::advance_slices(&mut parts, written);
            left -= written;
        }
        Ok(())
    }

    /// Reads until `into` is full.
    ///
    /// # Errors
    ///
    /// An error if the other end is gone or does not write.
    pub fn read(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let read = patiently(|| self.stream.try_read(into))?;
            into = &mut into[read..];
        }
        Ok(())
    }
}

/// Tries again until something moves, and yields the core from time to time.
fn patiently(mut step: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let mut began = None;
    loop {
        for _ in 0..TRIES {
            match step() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                other => return other,
            }
        }
        if began.get_or_insert_with(Instant::now).elapsed() > LIMIT {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::yield_now();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("descriptor", &self.stream.descriptor()).finish_non_exhaustive()
    }
}

/// The number of times that a volley polls the other rank's flag. This many polls take seconds.
const LOOKS: u64 = 1 << 30;

/// One rank's part in the shared memory of a host. Each rank runs on its own thread.
pub struct Mailboxes {
    group: Group,
    health: Health,
    recorder: Flight,
    sequence: u64,
}

impl Mailboxes {
    /// Creates the `Mailboxes` of each of `ranks` ranks, all over one region.
    ///
    /// # Errors
    ///
    /// An error if the region cannot be created or mapped.
    pub fn between(ranks: usize) -> Result<Vec<Self>> {
        let members: Vec<usize> = (0..ranks).collect();
        exchanging(ranks, |rank, exchange| {
            let group = Group::connect(exchange, &members, rank, members.len(), None, &Deadline::after(LIMIT))?;
            Ok(Self { group, health: Health::default(), recorder: Flight::default(), sequence: 0 })
        })
    }

    /// Does one step: publishes a call, waits for all ranks, and compares their calls. Every rank must do the step.
    ///
    /// # Errors
    ///
    /// An error if a rank is late, gone, or at another step.
    pub fn step(&mut self) -> Result<()> {
        let sequence = self.next();
        let call = Call { kind: Collective::Barrier, op: 0, element: TypeTag::of::<u8>(), count: 0, root: None, counts_hash: 0, sequence };
        let deadline = Deadline::lazily(LIMIT);
        let met = self.group.barrier(&CallContext { call: &call, deadline: &deadline, health: &self.health, recorder: &self.recorder });
        met.map_err(|stop| stop.to_error("a step", &deadline, 0, &[]))
    }

    /// Sends one flag and receives one flag. The first of two ranks begins, and the second answers. Each rank checks
    /// the flag of the other.
    ///
    /// # Errors
    ///
    /// An error if the other rank is late, or if its flag belongs to another volley.
    pub fn volley(&mut self, is_first: bool) -> Result<()> {
        let number = self.next();
        let words = |is_first: bool| [number, u64::from(is_first), !number, 7];
        match self.group.volley(is_first, words(is_first), LOOKS) {
            Some(theirs) if theirs == words(!is_first) => Ok(()),
            Some(theirs) => Err(Error::Protocol { with: "the other rank".to_owned(), reason: format!("{theirs:?} in volley {number}") }),
            None => Err(Error::Timeout {
                doing: "a volley".to_owned(),
                elapsed: LIMIT,
                missing: vec![Peer::unknown(1)],
                arrived: Vec::new(),
                meanwhile: Vec::new(),
            }),
        }
    }

    fn next(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }
}

impl fmt::Debug for Mailboxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mailboxes(call {})", self.sequence)
    }
}

/// Functions that the fuzz targets call with arbitrary bytes. A function panics if a property that it tests does not
/// hold. Each function is defined next to the code that it tests.
pub mod fuzz {
    #[cfg(feature = "encryption")]
    pub use crate::authentication::fuzz::{handshake, records};
    #[cfg(feature = "serde")]
    pub use crate::communicator::fuzz::objects;
    #[cfg(feature = "encryption")]
    pub use crate::host::fuzz::encrypted_link;
    pub use crate::host::fuzz::{
        acceptor, algorithms, engine_headers, engine_peer, facts, fingerprints, greetings, message_frames, message_peer,
        shared_memory_file, shared_memory_layout, shared_memory_ring,
    };
    pub use crate::metrics::fuzz::metrics_requests;
    pub use crate::rendezvous::fuzz::{file_log, launchers, settings, store_replies, store_requests, store_service, urls};

    /// Returns initial inputs for the fuzz targets, each with the name of its target. The inputs are valid data of the
    /// kind that ranks send.
    pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let mut seeds = crate::rendezvous::fuzz::seeds();
        seeds.extend(crate::host::fuzz::seeds());
        seeds.extend(crate::metrics::fuzz::seeds());
        #[cfg(feature = "encryption")]
        seeds.extend(crate::authentication::fuzz::seeds());
        #[cfg(feature = "serde")]
        seeds.extend(crate::communicator::fuzz::seeds());
        seeds
    }
}
