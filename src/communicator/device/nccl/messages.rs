//! Typed messages of an `NcclCommunicator`, single or in groups.
//!
//! Before the two ends of a message queue their parts, each end sends the other 64 bytes. The 64 bytes describe all
//! messages of the group between these two ranks, in both directions. So a `send` or `recv` returns only after the
//! other end has made its call. NCCL matches the messages of two ranks only by their order. After this exchange, NCCL
//! never gets two ends that differ.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed are handed to the device backend")]

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use sha2::{Digest, Sha256};

use super::agreement::refuse_capture;
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::element::TypeTag;
use crate::communicator::Communicator;
use crate::communicator::device::batch::Batch;
use crate::communicator::device::queue::CommitGuard;
use crate::communicator::prepare::device_call::Hold;
use crate::communicator::prepare::prepared::element;
use crate::device::{DeviceBackend, Message, NcclCommunicator, Words};
use crate::error::{Error, Peer, Result};

/// The error text for a buffer in host memory.
pub(super) const HOST_MEMORY: &str =
    "is in host memory, but an NcclCommunicator works only on device memory; for host memory, use a Communicator";

/// A group of messages; see the example at [`NcclCommunicator::group`]. The messages' buffers are borrowed until the
/// group has been queued.
pub struct NcclGroup<'buffers, 'comm> {
    comm: &'comm NcclCommunicator,
    batch: Batch<'buffers>,
}

impl fmt::Debug for NcclGroup<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclGroup({:?})", self.comm)
    }
}

impl<'buffers> NcclGroup<'buffers, '_> {
    /// Records a send to another rank.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank that is not a peer, and for host memory.
    pub fn send<B: Buffer + ?Sized>(&mut self, buffer: &'buffers B, to: usize) -> Result<()> {
        const CALL: &str = "send";
        self.comm.check_peer(CALL, to)?;
        element::<B::Element>(CALL)?;
        match buffer.memory() {
            Memory::Device(memory) => self.batch.send(memory, to),
            Memory::Host(_) => return Err(Error::argument(CALL, format!("the buffer {HOST_MEMORY}"))),
        }
        Ok(())
    }

    /// Records a receive from another rank. The buffer must be as long as the message.
    ///
    /// # Errors
    ///
    /// The errors of [`NcclGroup::send`].
    pub fn recv<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, from: usize) -> Result<()> {
        const CALL: &str = "recv";
        self.comm.check_peer(CALL, from)?;
        element::<B::Element>(CALL)?;
        match buffer.memory_mut() {
            MemoryMut::Device(memory) => self.batch.receive(memory, from),
            MemoryMut::Host(_) => return Err(Error::argument(CALL, format!("the buffer {HOST_MEMORY}"))),
        };
        Ok(())
    }
}

/// # Typed messages
///
/// Before either end queues its part, the two ends compare the element type, the length, and the list of messages that
/// are queued together. So `send` and `recv` return only once the other end has made its call. Two ranks that send to
/// each other must each put these messages into one [`group`](Self::group). If something differs, the communicator ends
/// on both ranks, as soon as each has received the other's values, or after 2 s at the latest.
///
/// For each pair of ranks, the comparison costs an exchange of 64 B over NCCL, for which both ranks wait. Messages that
/// are not compared ([`CheckDeviceCalls::unchecked_after`](crate::nccl::CheckDeviceCalls::unchecked_after)) do not have
/// this cost.
///
/// Even if several threads share the communicator, they must send and receive in the same order as the other ends.
impl NcclCommunicator {
    /// Queues a send of a whole device buffer to another rank. The other rank must receive into a buffer of the same
    /// length and element type.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, activations: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// match comm.rank() {
    ///     0 => comm.send(activations, 1, stream),
    ///     _ => comm.recv(activations, 0, stream),
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` for a rank that is not a peer, and for memory that is not on this device.
    /// - `Mismatch` if the two ends differ in element type or length, or if they group their messages differently. A
    ///   mismatch ends the communicator.
    /// - `Unsupported` if the stream is being captured into a graph, and the message is one that the two ends must
    ///   compare.
    /// - `Timeout`, `Nccl`, `Cuda`, `Poisoned`.
    #[doc(alias = "ncclSend")]
    pub fn send<B: Buffer + ?Sized>(&self, buffer: &B, to: usize, stream: &Arc<CudaStream>) -> Result<()> {
        self.grouped("send", stream, |group| group.send(buffer, to))
    }

    /// Queues a receive from another rank into a whole device buffer. The other rank must send a buffer of the same
    /// length and element type.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, tokens: &mut CudaSlice<u32>) -> collectives::Result<()> {
    /// comm.recv(tokens, 1, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`send`](Self::send).
    #[doc(alias = "ncclRecv")]
    pub fn recv<B: BufferMut + ?Sized>(&self, buffer: &mut B, from: usize, stream: &Arc<CudaStream>) -> Result<()> {
        self.grouped("recv", stream, |group| group.recv(buffer, from))
    }

    /// Queues several messages together, so that messages in opposite directions do not wait for each other. If a rank
    /// puts several messages to or from another rank into one group, the other rank must put its ends of these messages
    /// into one group too. If the closure fails, no message is queued.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, mine: &CudaSlice<f32>, theirs: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// let (me, n) = (comm.rank(), comm.world_size());
    /// comm.group(stream, |group| {
    ///     group.send(mine, (me + 1) % n)?;
    ///     group.recv(theirs, (me + n - 1) % n)
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of the closure and of [`send`](Self::send).
    #[doc(alias("ncclGroupStart", "ncclGroupEnd"))]
    pub fn group<'buffers>(&self, stream: &Arc<CudaStream>, record: impl FnOnce(&mut NcclGroup<'buffers, '_>) -> Result<()>) -> Result<()> {
        self.grouped("group", stream, record)
    }

    fn grouped<'buffers>(
        &self,
        call: &'static str,
        stream: &Arc<CudaStream>,
        record: impl FnOnce(&mut NcclGroup<'buffers, '_>) -> Result<()>,
    ) -> Result<()> {
        let mut group = NcclGroup { comm: self, batch: Batch::default() };
        record(&mut group)?;
        let NcclGroup { comm, mut batch } = group;
        if batch.is_empty() {
            return Ok(());
        }
        let backend = comm.backend();
        Communicator::same_device(backend, call, "the stream", stream.context())?;
        batch.check_devices(backend)?;
        let _turn = comm.turn(call)?;
        backend.refuse_if_over(&|| call.to_owned())?;
        let resolved = batch.resolve(stream, Hold::Borrowed)?;
        resolved.guards.check(&backend.gpu().context, stream, call)?;
        let is_captured = comm.agree_on_messages(call, &resolved.messages, stream)?;
        let commit = CommitGuard::new(backend, true, is_captured);
        // SAFETY: - every address belongs to a buffer that is borrowed until the guards in `resolved` have been
        //   released, which is after all has been queued: their events then make later users wait. The buffer is as
        //   long as its message states, on the backend's device (checked by `check_devices`); the group holds each
        //   buffer that it writes by a borrow of its own;
        // - the other end of each message queues it among the same messages of this pair, with the same type and
        //   length: compared by `agree_on_messages`, or promised by the caller who disabled the comparison
        //   (`CheckDeviceCalls::unchecked_after`).
        let queued = unsafe { DeviceBackend::enqueue_group(&[(backend, &[], &resolved.messages, stream)], comm.config().timeout) };
        commit.settle(&queued);
        queued.and(Communicator::release(resolved.guards, backend, stream, comm.config().timeout))
    }

    /// Makes both ends of messages agree on them. A difference ends the communicator, because other pairs of the group
    /// may have agreed and rely on their messages. Returns whether the other ends were notified of a capture, if they
    /// were notified at all.
    fn agree_on_messages(&self, call: &'static str, messages: &[Message], stream: &CudaStream) -> Result<Option<bool>> {
        let backend = self.backend();
        let mut pairs: Vec<Pair<'_>> = Vec::new();
        for message in messages {
            let place = pairs.iter().position(|pair| pair.peer == message.peer).unwrap_or(pairs.len());
            if place == pairs.len() {
                pairs.push(Pair { peer: message.peer, sends: Vec::new(), receives: Vec::new() });
            }
            let pair = &mut pairs[place];
            if message.sends { &mut pair.sends } else { &mut pair.receives }.push(message);
        }
        let covers = |message: &&Message| self.config().check_device_calls.covers(backend.messages_before(message));
        pairs.retain(|pair| pair.firsts().any(|message| covers(&message)));
        if !pairs.is_empty() {
            refuse_capture(stream, || call.to_owned())?;
        }
        let mine: Vec<(usize, Words)> = pairs.iter().map(|pair| (pair.peer, pair.words(backend))).collect();
        messages.iter().for_each(|message| {
            backend.number_message(message);
        });
        if mine.is_empty() {
            return Ok(None);
        }
        self.swap(call, &mine).inspect_err(|error| backend.comm().fail(error)).map(|()| Some(false))
    }

    fn swap(&self, call: &'static str, mine: &[(usize, Words)]) -> Result<()> {
        let me = self.rank();
        let mut heard = self.backend().swap_words(mine, &|| call.to_owned(), self.config().timeout);
        if let Err(Error::Timeout { doing, .. }) = &mut heard {
            let calls: Vec<_> = mine.iter().map(|(peer, words)| in_words(words, *peer)).collect();
            *doing = format!("comparing {} with the other end of each message (Config::check_device_calls)", calls.join(", "));
        }
        let differing: Vec<_> = mine.iter().zip(heard?).filter(|((_, words), theirs)| *theirs != mirrored(words)).collect();
        let Some(((peer, words), theirs)) = differing.first() else { return Ok(()) };
        let (first, second) = (Peer::unknown(*peer), Peer::unknown(me));
        let error = Error::Mismatch { first, first_call: in_words(theirs, me), second, second_call: in_words(words, *peer) };
        self.backend().comm().will_fail(&error);
        // The other ends find the same difference. Ranks that agree continue with their messages.
        let peers: Vec<usize> = differing.iter().map(|((peer, _), _)| *peer).collect();
        self.backend().await_hearing(&peers, &|| call.to_owned(), self.config().timeout);
        Err(error)
    }
}

/// The messages between this rank and another one in a group, in order.
struct Pair<'a> {
    peer: usize,
    sends: Vec<&'a Message>,
    receives: Vec<&'a Message>,
}

/// The offset and length of each field's two halves, the first for sends and the second for receives. The fields are:
/// - the number of elements of the first message;
/// - the number of messages;
/// - the type of the first message;
/// - half a SHA-256 of all messages.
const HALVES: [(usize, usize); 4] = [(0, 8), (16, 4), (24, 4), (32, 16)];

impl Pair<'_> {
    /// Returns the first message in each direction.
    fn firsts(&self) -> impl Iterator<Item = &Message> {
        self.sends.first().into_iter().chain(self.receives.first()).copied()
    }

    /// Returns what this rank sends to the other one.
    fn words(&self, backend: &DeviceBackend) -> Words {
        let mut words: Words = [0; _];
        for (half, messages) in [&self.sends, &self.receives].into_iter().enumerate() {
            let Some(first) = messages.first() else { continue };
            let mut digest = Sha256::new_with_prefix(backend.messages_before(first).to_le_bytes());
            for message in messages {
                digest.update(message.element.to_code().to_le_bytes());
                digest.update((message.bytes as u64).to_le_bytes());
            }
            let digest: [u8; 32] = digest.finalize().into();
            let count = (first.bytes / first.element.size_bytes().max(1)) as u64;
            let parts = [&count.to_le_bytes()[..], &(messages.len() as u32).to_le_bytes(), &first.element.to_code().to_le_bytes(), &digest];
            for ((at, length), part) in HALVES.into_iter().zip(parts) {
                words[at + half * length..][..length].copy_from_slice(&part[..length]);
            }
        }
        words
    }
}

/// Returns what the other end has to send: one end's sends are the other's receives.
fn mirrored(words: &Words) -> Words {
    let mut other = *words;
    for (at, length) in HALVES {
        other[at..at + 2 * length].rotate_left(length);
    }
    other
}

/// Describes words sent to `peer`: `send to rank 1: 5 elements (f32), and recv from rank 1: 7 elements (u8)`.
fn in_words(words: &Words, peer: usize) -> String {
    let number = |part: usize, half: usize| {
        let (at, length) = HALVES[part];
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(&words[at + half * length..][..length]);
        u64::from_le_bytes(bytes)
    };
    let direction = |(half, name): (usize, &str)| {
        let (elements, messages) = (number(0, half), number(1, half));
        let element =
            TypeTag::from_code(number(2, half) as u32).map_or_else(|| "an unknown type".to_owned(), |element| element.to_string());
        match messages {
            0 => None,
            1 => Some(format!("{name} rank {peer}: {elements} elements ({element})")),
            _ => Some(format!("{name} rank {peer}: {elements} elements ({element}), the first of {messages} messages in a group")),
        }
    };
    let directions: Vec<_> = ["send to", "recv from"].into_iter().enumerate().filter_map(direction).collect();
    if directions.is_empty() { "no message".to_owned() } else { directions.join(", and ") }
}
