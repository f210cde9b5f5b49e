//! Messages between two ranks.

#![expect(unsafe_code, reason = "posting raw places to the progress engine")]

#[cfg(feature = "cuda")]
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::element::TypeTag;
use crate::communicator::Communicator;
use crate::communicator::prepare::prepared::held;
use crate::communicator::work::message::{Envelope, INTERNAL_TAG, MessageContext, Received, receive_place, send_place};
use crate::communicator::work::pinned::PinnedBuffer;
use crate::communicator::work::{Drive, OwnedBuffer, OwnedSource, Work};
use crate::error::{Error, Result};

impl Communicator {
    /// Checks an envelope and returns the context of its message, for a buffer that holds elements of type `held`.
    #[inline]
    pub(in crate::communicator) fn context(
        &self,
        call: &'static str,
        envelope: &Envelope,
        held: (TypeTag, usize),
    ) -> Result<MessageContext> {
        if envelope.tag & INTERNAL_TAG != 0 {
            return Err(Error::argument(call, format!("tag {} is too large: tags must be below 2^63", envelope.tag)));
        }
        self.any_context(call, envelope, held)
    }

    /// Does the same, but also accepts the crate's own messages, whose tags carry the internal bit.
    #[inline]
    fn any_context(&self, call: &'static str, envelope: &Envelope, (element, element_bytes): (TypeTag, usize)) -> Result<MessageContext> {
        let Envelope { peer, tag, .. } = *envelope;
        if let Some(peer) = peer
            && peer >= self.world_size()
        {
            return Err(Error::argument(call, format!("rank {peer} does not exist: the ranks are 0 to {}", self.world_size() - 1)));
        }
        Ok(MessageContext { peer, tag, element, element_bytes })
    }

    /// Returns the rank that a message goes to.
    pub(in crate::communicator) fn destination(call: &'static str, envelope: &Envelope) -> Result<usize> {
        envelope.peer.ok_or_else(|| Error::argument(call, "a send needs a destination: pass one rank instead of Envelope::any()"))
    }

    /// Returns the rank that a message on a device comes from.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) fn device_source(call: &'static str, envelope: &Envelope) -> Result<usize> {
        envelope.peer.ok_or_else(|| {
            Error::unsupported(
                format!("{call} from any rank into device memory"),
                "NCCL needs to know the source; name the rank that sends",
            )
        })
    }

    /// Returns this communicator with the envelope's timeout, if it has one.
    #[cfg(feature = "cuda")]
    fn within(&self, envelope: &Envelope) -> Cow<'_, Self> {
        envelope.timeout.map_or(Cow::Borrowed(self), |timeout| Cow::Owned(self.with_timeout(timeout)))
    }

    /// Returns how long a message may take.
    #[inline]
    fn limit(&self, envelope: &Envelope) -> Duration {
        envelope.timeout.unwrap_or_else(|| self.timeout())
    }

    fn send_background<B: OwnedSource>(&self, buffer: B, to: &Envelope, terms: Terms) -> Result<Work<B>> {
        const CALL: &str = "start_send";
        let mut buffer = PinnedBuffer::new(buffer);
        let value = buffer.value();
        let memory = value.memory();
        let context = terms(self, CALL, to, held::<B::Element>(CALL, "the buffer", memory.element(), memory.misplaced())?)?;
        let memory = match memory {
            Memory::Host(memory) => send_place(memory),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => {
                let rank = Self::destination(CALL, to)?;
                let queued = self.within(to).queue_messages_and_mark(CALL, to.tag, |batch| batch.send(memory, rank))?.0;
                return Ok(queued.into_work(buffer));
            }
        };
        // SAFETY: the place lies in the kept buffer.
        let state = unsafe { self.core.shared.progress.post_background(context, memory, Box::new(buffer), self.limit(to)) }?;
        Ok(Work::new(state, Some(Arc::clone(&self.core.shared.progress) as Arc<dyn Drive>)))
    }

    fn receive_background<B: OwnedBuffer>(&self, buffer: B, from: &Envelope, terms: Terms) -> Result<Work<(B, Received)>> {
        const CALL: &str = "start_recv";
        let mut buffer = PinnedBuffer::new(buffer);
        let memory = buffer.value().memory_mut();
        let context = terms(self, CALL, from, held::<B::Element>(CALL, "the buffer", memory.element(), memory.misplaced())?)?;
        let memory = match memory {
            MemoryMut::Host(memory) => receive_place(memory),
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => {
                let rank = Self::device_source(CALL, from)?;
                let (queued, received) = self.within(from).queue_messages_and_mark(CALL, from.tag, |batch| batch.receive(memory, rank))?;
                return Ok(queued.into_receiving_work(buffer, received));
            }
        };
        // SAFETY: the place lies in the kept buffer.
        let state = unsafe { self.core.shared.progress.post_background(context, memory, Box::new(buffer), self.limit(from)) }?;
        Ok(Work::<B>::receiving(state, Some(Arc::clone(&self.core.shared.progress) as Arc<dyn Drive>)))
    }

    /// Starts to send one of the crate's own messages. The tag carries the internal bit.
    pub(in crate::communicator) fn post_internal_send(
        &self,
        to: usize,
        tag: u64,
        bytes: Vec<u8>,
        limit: Duration,
    ) -> Result<Work<Vec<u8>>> {
        self.send_background(bytes, &Envelope::rank(to).tag(tag).timeout(limit), Self::any_context)
    }

    /// Starts to receive one of the crate's own messages. The tag carries the internal bit.
    pub(in crate::communicator) fn post_internal_receive(
        &self,
        from: usize,
        tag: u64,
        room: Vec<u8>,
        limit: Duration,
    ) -> Result<Work<(Vec<u8>, Received)>> {
        self.receive_background(room, &Envelope::rank(from).tag(tag).timeout(limit), Self::any_context)
    }
}

/// The check of a message's envelope: [`Communicator::context`] or, for the crate's own messages,
/// [`Communicator::any_context`].
type Terms = fn(&Communicator, &'static str, &Envelope, (TypeTag, usize)) -> Result<MessageContext>;

/// # Messages
///
/// A message goes from one rank to another with a tag (0 by default). The receiving call names the tag, and either
/// names the source or accepts any source. Both ends pass an [`Envelope`], or simply the other rank's number. Messages
/// with the same source and tag arrive in the order in which they were sent. The element types of the two ends must
/// agree. The receiver's buffer must be long enough; a shorter message is allowed.
///
/// A `send` of up to 64 KiB returns without waiting for its receive, unless too many earlier messages have not been
/// received yet. A larger `send` waits for its receive. So if two ranks send each other large messages, and both send
/// before they receive, they wait for each other. Use [`group`](Self::group), [`send_recv`](Self::send_recv) or
/// [`start_send`](Self::start_send) instead. Messages and collectives do not wait for each other: any number of threads
/// may send and receive while others are in a barrier.
///
/// # Device buffers
///
/// Messages on device buffers go over NCCL. Both ends must pass the same length and type. Tags are not supported, and a
/// receive must name its source. A sender announces its message over the host backend. A receive waits on the host for
/// this announcement, and is then queued on the device. If the two ends differ, the receiver gets a `Mismatch`, and the
/// communicator ends on all ranks.
///
/// NCCL runs all device calls of a communicator, messages included, one after the other in the order in which they were
/// queued, whatever their streams. So the device calls of several threads take turns, and a receive keeps its turn
/// until its sender has made the call. Otherwise, another call could be queued before the receive on this rank, but
/// after the send on the other rank, and the two devices would wait for each other. A call that waits behind a receive
/// for longer than its timeout gets a `Timeout` that reports this, and the communicator stays usable. If threads send
/// and receive on devices at the same time, put these messages into one [`group`](Self::group), or give each thread its
/// own communicator.
///
/// # Errors of messages
///
/// If a send gives up before its message was received, the matching receive fails immediately with `Message`. If a
/// receive gives up in the middle of a message, the message is kept for the next receive. A rank keeps at most 256 MiB
/// of such messages. Beyond that, the message is lost, and both ends get an error that says so. Once a part of a
/// message of at most 64 KiB is written, its send no longer gives up: it writes the rest, and succeeds.
///
/// Errors common to messages:
/// - `InvalidArgument` if a rank or tag is out of range.
/// - `Message` if the two ends do not match (both ends get this error), or if the other end gave up.
/// - `PeerLost`, `Timeout`, `Poisoned`.
///
/// After all of these except `PeerLost` and `Poisoned`, the communicator stays usable. After `PeerLost`, only messages
/// between other ranks still work. (For a message on device buffers, a `Timeout` also ends the communicator, unless the
/// call was still waiting for its turn.)
impl Communicator {
    /// Sends a buffer to a rank. The program may reuse the buffer when the call returns.
    ///
    /// ```
    /// # use collectives::{Communicator, Envelope};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let (mut x, mut first, mut second) = ([0i64; 3], 0u8, 0u8);
    ///     if comm.rank() == 0 {
    ///         comm.send(&[7i64, 8], 1)?;
    ///         comm.send(&1u8, Envelope::rank(1).tag(100))?;
    ///         comm.send(&2u8, Envelope::rank(1).tag(200))?;
    ///     } else {
    ///         assert_eq!(comm.recv(&mut x, 0)?.count, 2);
    ///         comm.recv(&mut second, Envelope::rank(0).tag(200))?; // tags in any order
    ///         comm.recv(&mut first, Envelope::rank(0).tag(100))?;
    ///     }
    ///     Ok((x, first, second))
    /// })?;
    /// assert_eq!(got[1], ([7, 8, 0], 1, 2));
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to messages. If the send returns `Timeout`, the message was not sent, and the matching receive
    /// gets an error that reports this.
    #[doc(alias("ncclSend", "MPI_Send"))]
    pub fn send<B: Buffer + ?Sized>(&self, buffer: &B, to: impl Into<Envelope>) -> Result<()> {
        let to = to.into();
        let memory = buffer.memory();
        let context = self.context("send", &to, held::<B::Element>("send", "the buffer", memory.element(), memory.misplaced())?)?;
        Self::destination("send", &to)?;
        let memory = match memory {
            Memory::Host(memory) => send_place(memory),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => {
                let rank = Self::destination("send", &to)?;
                return self.within(&to).queue_messages("send", to.tag, |batch| batch.send(memory, rank));
            }
        };
        // SAFETY: the buffer is borrowed for the whole call.
        unsafe { self.core.shared.progress.transfer_one(&context, memory, self.limit(&to)) }.map(drop)
    }

    /// Receives a message from one rank. With [`Envelope::any`], receives from the rank that sends first.
    ///
    /// ```
    /// # use collectives::{Communicator, Envelope};
    /// let got = Communicator::run_local(3, |comm| {
    ///     if comm.rank() > 0 {
    ///         return comm.send(&(comm.rank() as u64), 0).map(|()| 0);
    ///     }
    ///     let (mut x, mut sum) = (0u64, 0);
    ///     for _ in 1..comm.world_size() {
    ///         let received = comm.recv(&mut x, Envelope::any())?;
    ///         assert_eq!((received.source, received.count), (x as usize, 1));
    ///         sum += x;
    ///     }
    ///     Ok(sum)
    /// })?;
    /// assert_eq!(got[0], 3);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to messages. If the timeout passes while the message is arriving, the buffer may contain a
    /// part of the message, and the next receive gets the whole message.
    #[doc(alias("ncclRecv", "MPI_Recv"))]
    pub fn recv<B: BufferMut + ?Sized>(&self, buffer: &mut B, from: impl Into<Envelope>) -> Result<Received> {
        let from = from.into();
        let memory = buffer.memory_mut();
        let context = self.context("recv", &from, held::<B::Element>("recv", "the buffer", memory.element(), memory.misplaced())?)?;
        let memory = match memory {
            MemoryMut::Host(memory) => receive_place(memory),
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => {
                let rank = Self::device_source("recv", &from)?;
                return self.within(&from).queue_messages("recv", from.tag, |batch| batch.receive(memory, rank));
            }
        };
        // SAFETY: the buffer is borrowed mutably for the whole call.
        unsafe { self.core.shared.progress.transfer_one(&context, memory, self.limit(&from)) }
    }

    /// Sends to one rank and receives from another rank (or the same rank) at the same time. If both envelopes have a
    /// timeout, the shorter timeout applies.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let (other, mut theirs) = (1 - comm.rank(), vec![0.0f32; 100_000]);
    ///     comm.send_recv(&vec![comm.rank() as f32; 100_000], other, &mut theirs, other)?;
    ///     Ok(theirs[0])
    /// })?;
    /// assert_eq!(got, [1.0, 0.0]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to messages.
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_recv<S, R>(&self, send: &S, to: impl Into<Envelope>, receive: &mut R, from: impl Into<Envelope>) -> Result<Received>
    where
        S: Buffer + ?Sized,
        R: BufferMut + ?Sized,
    {
        const CALL: &str = "send_recv";
        let (to, from) = (to.into(), from.into());
        let (send, receive) = (send.memory(), receive.memory_mut());
        let sends = held::<S::Element>(CALL, "the buffer that is sent", send.element(), send.misplaced())?;
        let receives = held::<R::Element>(CALL, "the buffer that receives", receive.element(), receive.misplaced())?;
        let (to_context, from_context) = (self.context(CALL, &to, sends)?, self.context(CALL, &from, receives)?);
        Self::destination(CALL, &to)?;
        let (send, receive) = match (send, receive) {
            (Memory::Host(send), MemoryMut::Host(receive)) => (send_place(send), receive_place(receive)),
            #[cfg(feature = "cuda")]
            (Memory::Device(send), MemoryMut::Device(receive)) => {
                let (rank, source) = (Self::destination(CALL, &to)?, Self::device_source(CALL, &from)?);
                let both = Envelope { timeout: to.timeout.into_iter().chain(from.timeout).min(), ..from };
                return self.within(&both).queue_messages(CALL, to.tag | from.tag, |batch| {
                    batch.send(send, rank);
                    batch.receive(receive, source)
                });
            }
            #[cfg(feature = "cuda")]
            _ => {
                return Err(Error::argument(
                    CALL,
                    "one buffer is on the host and the other on a device: pass both on the host, or both on a device",
                ));
            }
        };
        let (sending, receiving) = ((to_context, send), (from_context, receive));
        let limit = self.limit(&to).min(self.limit(&from));
        // SAFETY: both buffers are borrowed for the whole call.
        let received = unsafe { self.core.shared.progress.transfer(&[receiving, sending], limit) }?;
        received.first().copied().ok_or_else(|| Error::argument(CALL, "no message was posted"))
    }

    /// Starts a send. The [`Work`] gives the buffer back. Any number of sends may be under way. A send only reads its
    /// buffer, so several sends can share one: for example, an `Arc<[T]>`, `Arc<Vec<T>>` or `&'static [T]` can be on
    /// its way to several ranks at the same time.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use std::sync::Arc;
    /// let got = Communicator::run_local(3, |comm| {
    ///     let n = comm.world_size();
    ///     let (next, after) = ((comm.rank() + 1) % n, (comm.rank() + 2) % n);
    ///     let mine: Arc<[u32]> = vec![comm.rank() as u32; 1 << 16].into();
    ///     let sent = [comm.start_send(Arc::clone(&mine), next)?, comm.start_send(mine, after)?];
    ///     let (theirs, received) = comm.start_recv(vec![0u32; 1 << 16], next)?.wait()?;
    ///     comm.recv(&mut vec![0u32; 1 << 16], after)?;
    ///     for work in sent {
    ///         work.wait()?;
    ///     }
    ///     Ok((theirs[0], received.count))
    /// })?;
    /// assert_eq!(got, [(1, 1 << 16), (2, 1 << 16), (0, 1 << 16)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `start_send` itself can return `InvalidArgument`, `Poisoned`, and `Io` (if no thread can be started). If it
    /// returns one of these errors, nothing was sent, and the buffer is freed. All other errors come through the
    /// [`Work`].
    #[doc(alias("isend", "MPI_Isend"))]
    pub fn start_send<B: OwnedSource>(&self, buffer: B, to: impl Into<Envelope>) -> Result<Work<B>> {
        let to = to.into();
        Self::destination("start_send", &to)?;
        self.send_background(buffer, &to, Self::context)
    }

    /// Starts a receive. The [`Work`] gives the buffer back, with a [`Received`] that describes the message.
    ///
    /// # Errors
    ///
    /// The errors of [`start_send`](Self::start_send).
    #[doc(alias("irecv", "MPI_Irecv"))]
    pub fn start_recv<B: OwnedBuffer>(&self, buffer: B, from: impl Into<Envelope>) -> Result<Work<(B, Received)>> {
        let from = from.into();
        self.receive_background(buffer, &from, Self::context)
    }
}
