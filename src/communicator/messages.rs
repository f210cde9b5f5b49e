//! Messages between two ranks.

#![expect(unsafe_code, reason = "posting raw places to the progress engine")]

use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use super::message::{INTERNAL_TAG, MessageContext, Received, receive_place, send_place};
use super::pinned::PinnedBuffer;
use super::prepare::element;
use super::work::{Drive, OwnedBuffer, Work};
use crate::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::element::Data;
use crate::error::{Error, Result};

impl Communicator {
    /// A peer and a tag that can be.
    pub(super) fn context<T: Data>(&self, call: &'static str, peer: Option<usize>, tag: u64) -> Result<MessageContext> {
        if let Some(peer) = peer
            && peer >= self.world_size()
        {
            return Err(Error::argument(call, format!("rank {peer} does not exist: the ranks are 0 to {}", self.world_size() - 1)));
        }
        if tag & INTERNAL_TAG != 0 {
            return Err(Error::argument(call, format!("tag {tag} is too large: tags are below 2^63")));
        }
        let (element, element_bytes) = element::<T>(call)?;
        Ok(MessageContext { peer, tag, element, element_bytes })
    }

    fn receive_now<B>(&self, call: &'static str, buffer: &mut B, from: Option<usize>, tag: u64) -> Result<Received>
    where
        B: BufferMut + ?Sized,
    {
        let context = self.context::<B::Element>(call, from, tag)?;
        let memory = match buffer.memory_mut() {
            MemoryMut::Host(slice) => receive_place(slice),
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => {
                let from = from
                    .ok_or_else(|| Error::unsupported(format!("{call} into device memory"), "NCCL needs to know the source; use recv"))?;
                return self.queue_messages(call, tag, |batch| batch.receive(memory, from));
            }
        };
        // SAFETY: the buffer is borrowed mutably for the whole call.
        unsafe { self.core.shared.progress.transfer_one(&context, memory, self.timeout()) }
    }

    fn send_background<B: Buffer + Send + 'static>(&self, buffer: B, to: usize, tag: u64, limit: Duration) -> Result<Work<B>> {
        let context = MessageContext { tag, ..self.context::<B::Element>("isend", Some(to), tag & !INTERNAL_TAG)? };
        let mut buffer = PinnedBuffer::new(buffer);
        let memory = match buffer.value().memory() {
            Memory::Host(slice) => send_place(slice),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => {
                let queued = self.queue_messages_and_mark("isend", tag, |batch| batch.send(memory, to))?.0;
                return Ok(queued.into_work(buffer));
            }
        };
        // SAFETY: the place lies in the kept buffer.
        let state = unsafe { self.core.shared.progress.post_background(context, memory, Box::new(buffer), limit) }?;
        Ok(Work::new(state, Some(Arc::clone(&self.core.shared.progress) as Arc<dyn Drive>)))
    }

    fn receive_background<B: OwnedBuffer>(&self, buffer: B, from: Option<usize>, tag: u64, limit: Duration) -> Result<Work<(B, Received)>> {
        let context = MessageContext { tag, ..self.context::<B::Element>("irecv", from, tag & !INTERNAL_TAG)? };
        let mut buffer = PinnedBuffer::new(buffer);
        let memory = match buffer.value().memory_mut() {
            MemoryMut::Host(slice) => receive_place(slice),
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => {
                let from =
                    from.ok_or_else(|| Error::unsupported("irecv_any into device memory", "NCCL needs to know the source; use irecv"))?;
                let (queued, received) = self.queue_messages_and_mark("irecv", tag, |batch| batch.receive(memory, from))?;
                return Ok(queued.into_receiving_work(buffer, received));
            }
        };
        // SAFETY: the place lies in the kept buffer.
        let state = unsafe { self.core.shared.progress.post_background(context, memory, Box::new(buffer), limit) }?;
        Ok(Work::<B>::receiving(state, Some(Arc::clone(&self.core.shared.progress) as Arc<dyn Drive>)))
    }

    /// A message of the crate's own; the tag carries the internal bit.
    pub(super) fn post_internal_send(&self, to: usize, tag: u64, bytes: Vec<u8>, limit: Duration) -> Result<Work<Vec<u8>>> {
        self.send_background(bytes, to, tag, limit)
    }

    /// A message of the crate's own; the tag carries the internal bit.
    pub(super) fn post_internal_receive(&self, from: usize, tag: u64, room: Vec<u8>, limit: Duration) -> Result<Work<(Vec<u8>, Received)>> {
        self.receive_background(room, Some(from), tag, limit)
    }
}

/// # Messages
///
/// A message goes from one rank to another under a tag (0 where none is given) and is received by a call that names its source
/// and its tag, or any source. Messages of one source and tag arrive in the order in which they were sent. The element types of
/// the two ends must agree, and the receiver's buffer must be long enough; a shorter message is fine.
///
/// A small message is on its way when `send` returns; a large one waits for its receive. So two ranks that send each other
/// large messages before they receive wait for each other: use [`group`](Self::group), [`send_recv`](Self::send_recv) or
/// [`isend`](Self::isend) there.
///
/// Messages on device buffers go over NCCL: both ends must name the same length and type; there are no tags, and no receiving from any source.
/// A sender says over the host plane what it sends, and a receive waits on the host until its sender has made the call, before it is queued
/// on the device. Where the two ends differ, the receiver gets a `Mismatch`, and the communicator ends on all ranks.
///
/// Errors: `InvalidArgument` for a rank or tag that cannot be, `Message` where the two ends do not fit together (both get it,
/// and the communicator lives on), `PeerLost`, `Timeout`, `Poisoned`.
impl Communicator {
    /// Sends a buffer to a rank. The buffer may be reused when it returns.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut x = [0i64; 3];
    ///     match comm.rank() {
    ///         0 => comm.send(&[7i64, 8], 1)?,
    ///         _ => assert_eq!(comm.recv(&mut x, 0)?.count, 2),
    ///     }
    ///     Ok(x)
    /// })?;
    /// assert_eq!(got[1], [7, 8, 0]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those common to messages.
    #[doc(alias("ncclSend", "MPI_Send"))]
    pub fn send<B: Buffer + ?Sized>(&self, buffer: &B, to: usize) -> Result<()> {
        self.send_tagged(buffer, to, 0)
    }

    /// Sends a buffer to a rank under a tag below 2⁶³.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let (mut first, mut second) = (0u8, 0u8);
    ///     if comm.rank() == 0 {
    ///         comm.send_tagged(&1u8, 1, 100)?;
    ///         comm.send_tagged(&2u8, 1, 200)?;
    ///     } else {
    ///         comm.recv_tagged(&mut second, 0, 200)?; // in any order
    ///         comm.recv_tagged(&mut first, 0, 100)?;
    ///     }
    ///     Ok((first, second))
    /// })?;
    /// assert_eq!(got[1], (1, 2));
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those common to messages.
    pub fn send_tagged<B: Buffer + ?Sized>(&self, buffer: &B, to: usize, tag: u64) -> Result<()> {
        let context = self.context::<B::Element>("send", Some(to), tag)?;
        let memory = match buffer.memory() {
            Memory::Host(slice) => send_place(slice),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => return self.queue_messages("send", tag, |batch| batch.send(memory, to)),
        };
        // SAFETY: the buffer is borrowed for the whole call.
        unsafe { self.core.shared.progress.transfer_one(&context, memory, self.timeout()) }.map(drop)
    }

    /// Receives a message from a rank.
    ///
    /// # Errors
    ///
    /// Those common to messages.
    #[doc(alias("ncclRecv", "MPI_Recv"))]
    pub fn recv<B: BufferMut + ?Sized>(&self, buffer: &mut B, from: usize) -> Result<Received> {
        self.receive_now("recv", buffer, Some(from), 0)
    }

    /// Receives a message that was sent under a tag.
    ///
    /// # Errors
    ///
    /// Those common to messages.
    pub fn recv_tagged<B: BufferMut + ?Sized>(&self, buffer: &mut B, from: usize, tag: u64) -> Result<Received> {
        self.receive_now("recv", buffer, Some(from), tag)
    }

    /// Receives a message from whichever rank sends first.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(3, |comm| {
    ///     if comm.rank() > 0 {
    ///         return comm.send(&(comm.rank() as u64), 0).map(|()| 0);
    ///     }
    ///     let (mut x, mut sum) = (0u64, 0);
    ///     for _ in 1..comm.world_size() {
    ///         let received = comm.recv_any(&mut x)?;
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
    /// Those common to messages.
    pub fn recv_any<B: BufferMut + ?Sized>(&self, buffer: &mut B) -> Result<Received> {
        self.receive_now("recv_any", buffer, None, 0)
    }

    /// Receives a message under a tag from whichever rank sends first.
    ///
    /// # Errors
    ///
    /// Those common to messages.
    pub fn recv_any_tagged<B: BufferMut + ?Sized>(&self, buffer: &mut B, tag: u64) -> Result<Received> {
        self.receive_now("recv_any", buffer, None, tag)
    }

    /// Sends to one rank while receiving from another (or the same), without waiting for either first.
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
    /// Those common to messages.
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_recv<S, R>(&self, send: &S, to: usize, receive: &mut R, from: usize) -> Result<Received>
    where
        S: Buffer + ?Sized,
        R: BufferMut + ?Sized,
    {
        let (to_terms, from_terms) =
            (self.context::<S::Element>("send_recv", Some(to), 0)?, self.context::<R::Element>("send_recv", Some(from), 0)?);
        let (send, receive) = match (send.memory(), receive.memory_mut()) {
            (Memory::Host(send), MemoryMut::Host(receive)) => (send_place(send), receive_place(receive)),
            #[cfg(feature = "cuda")]
            (Memory::Device(send), MemoryMut::Device(receive)) => {
                return self.queue_messages("send_recv", 0, |batch| {
                    batch.send(send, to);
                    batch.receive(receive, from)
                });
            }
            #[cfg(feature = "cuda")]
            _ => {
                return Err(Error::argument(
                    "send_recv",
                    "one buffer is on the host and the other on a device: pass both on the same side",
                ));
            }
        };
        let (sending, receiving) = ((to_terms, send), (from_terms, receive));
        // SAFETY: both buffers are borrowed for the whole call.
        let received = unsafe { self.core.shared.progress.transfer(&[receiving, sending], self.timeout()) }?;
        received.first().copied().ok_or_else(|| Error::argument("send_recv", "no message was posted"))
    }

    /// Starts a send; the buffer comes back through the [`Work`]. Any number may be outstanding.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let other = 1 - comm.rank();
    ///     let sent = comm.isend(vec![comm.rank() as u32; 1 << 16], other)?;
    ///     let (theirs, received) = comm.irecv(vec![0u32; 1 << 16], other)?.wait()?;
    ///     sent.wait()?; // gives the buffer back
    ///     Ok((theirs[0], received.count))
    /// })?;
    /// assert_eq!(got, [(1, 1 << 16), (0, 1 << 16)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Poisoned` here; the rest through the [`Work`].
    #[doc(alias = "MPI_Isend")]
    pub fn isend<B: OwnedBuffer>(&self, buffer: B, to: usize) -> Result<Work<B>> {
        self.send_background(buffer, to, 0, self.timeout())
    }

    /// Starts a send under a tag below 2⁶³.
    ///
    /// # Errors
    ///
    /// As [`isend`](Self::isend).
    pub fn isend_tagged<B: OwnedBuffer>(&self, buffer: B, to: usize, tag: u64) -> Result<Work<B>> {
        self.context::<B::Element>("isend", Some(to), tag)?;
        self.send_background(buffer, to, tag, self.timeout())
    }

    /// Starts a receive; the buffer and what came into it come back through the [`Work`].
    ///
    /// # Errors
    ///
    /// As [`isend`](Self::isend).
    #[doc(alias = "MPI_Irecv")]
    pub fn irecv<B: OwnedBuffer>(&self, buffer: B, from: usize) -> Result<Work<(B, Received)>> {
        self.receive_background(buffer, Some(from), 0, self.timeout())
    }

    /// Starts a receive of a message under a tag.
    ///
    /// # Errors
    ///
    /// As [`isend`](Self::isend).
    pub fn irecv_tagged<B: OwnedBuffer>(&self, buffer: B, from: usize, tag: u64) -> Result<Work<(B, Received)>> {
        self.context::<B::Element>("irecv", Some(from), tag)?;
        self.receive_background(buffer, Some(from), tag, self.timeout())
    }

    /// Starts a receive from whichever rank sends first.
    ///
    /// # Errors
    ///
    /// As [`isend`](Self::isend).
    pub fn irecv_any<B: OwnedBuffer>(&self, buffer: B) -> Result<Work<(B, Received)>> {
        self.receive_background(buffer, None, 0, self.timeout())
    }
}
