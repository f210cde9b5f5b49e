//! Groups: calls that are recorded first and launched together.

#![expect(unsafe_code, reason = "passing addresses of recorded buffers to the progress engine")]

use std::fmt;
use std::marker::PhantomData;

use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::op::Reduction;
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::device::{Batch, untagged};
#[cfg(feature = "cuda")]
use crate::communicator::prepare::device_call::Hold;
use crate::communicator::prepare::prepared::{Prepared, Source, held};
use crate::communicator::work::message::{Envelope, MessageBuffer, MessageContext, Received, receive_place, send_place};
use crate::error::{Error, Result};
use crate::host::backend::Jobs;

/// The calls that [`Communicator::group`] records. Their device buffers are borrowed until the group has been launched,
/// and their host buffers until the group has ended.
pub struct Group<'buffers, 'comm> {
    pub(in crate::communicator) comm: &'comm Communicator,
    messages: Vec<(MessageContext, MessageBuffer)>,
    collectives: Vec<Jobs>,
    #[cfg(feature = "cuda")]
    device: Batch<'buffers>,
    /// For each receive: on a device, the result that it will have; on the host `None`, because the result is known
    /// only when the receive has ended.
    receives: Vec<Option<Received>>,
    /// Invariant: the borrows last for exactly `'buffers`.
    buffers: PhantomData<std::cell::Cell<&'buffers mut ()>>,
}

impl fmt::Debug for Group<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { comm, messages, collectives, .. } = self;
        write!(f, "Group({comm:?}, {} messages, {} collectives)", messages.len(), collectives.len())
    }
}

impl Communicator {
    /// Records calls and launches them together. All messages of the group start together, so two ranks can send to
    /// each other without one waiting for the other. Collectives run in the order in which they were recorded. Nothing
    /// is sent before the closure has returned `Ok`, so nothing is sent if it fails or panics.
    ///
    /// Returns the results of the receives, in the order in which they were recorded.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(3, |comm| {
    ///     let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
    ///     let (mine, mut theirs) = ([comm.rank() as u64], [0u64]);
    ///     comm.group(|group| {
    ///         group.send(&mine, next)?;
    ///         group.recv(&mut theirs, previous)
    ///     })?;
    ///     Ok(theirs[0])
    /// })?;
    /// assert_eq!(got, [2, 0, 1]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The closure's errors, and the errors of the recorded calls.
    #[doc(alias("ncclGroupStart", "ncclGroupEnd", "batch_isend_irecv"))]
    pub fn group<'buffers>(&self, record: impl FnOnce(&mut Group<'buffers, '_>) -> Result<()>) -> Result<Vec<Received>> {
        let mut group = Group::new(self);
        record(&mut group)?;
        group.have_thread()?;
        #[cfg(feature = "cuda")]
        if !group.device.is_empty() {
            // The group's own communicator: safe code can swap this group with that of another communicator.
            group.comm.queue_batch(std::mem::take(&mut group.device), Hold::Borrowed)?;
        }
        group.run_on_host()
    }

    /// Records calls of several communicators and launches them together, as [`group`](Self::group) does for one
    /// communicator. So one thread can drive several GPUs, each with its own communicator. `record` gets one group for
    /// each communicator, in the order of `comms`. Works only on device buffers, because calls on host memory need a
    /// thread for each rank.
    ///
    /// If one rank of a communicator makes calls through `group_across`, every other rank must make them through
    /// `group_across` too. The reason is that the ranks compare these calls by messages, one from each rank to each
    /// other rank, instead of by a collective. If the calls differ, all communicators of the group end.
    ///
    /// Before you use a custom op in `group_across`, use it once on each of these communicators, in a single call or in
    /// a [`group`](Self::group). During this first use, the ranks agree that all of them can compile the op.
    ///
    /// Returns, for each communicator, the results of its receives.
    ///
    /// # Errors
    ///
    /// The closure's errors, the errors of the recorded calls, and `Unsupported` if host buffers were recorded.
    #[cfg(feature = "cuda")]
    pub fn group_across<'buffers, 'comm>(
        comms: &[&'comm Self],
        record: impl FnOnce(&mut [Group<'buffers, 'comm>]) -> Result<()>,
    ) -> Result<Vec<Vec<Received>>> {
        let mut groups: Vec<_> = comms.iter().map(|comm| Group::new(comm)).collect();
        record(&mut groups)?;
        if groups.iter().any(|group| !group.messages.is_empty() || !group.collectives.is_empty()) {
            return Err(Error::unsupported("a group of several communicators on host memory", "give each rank a thread of its own"));
        }
        let received = groups.iter().map(|group| group.receives.iter().flatten().copied().collect()).collect();
        let mut parts: Vec<_> = groups.into_iter().map(|group| (group.comm, group.device)).filter(|(_, batch)| !batch.is_empty()).collect();
        if !parts.is_empty() {
            Self::queue_across(&mut parts)?;
        }
        Ok(received)
    }
}

impl<'comm> Group<'_, 'comm> {
    /// Makes a group with nothing recorded.
    fn new(comm: &'comm Communicator) -> Self {
        Self {
            comm,
            messages: Vec::new(),
            collectives: Vec::new(),
            #[cfg(feature = "cuda")]
            device: Batch::default(),
            receives: Vec::new(),
            buffers: PhantomData,
        }
    }

    /// Starts the thread that advances messages while collectives run. This happens before anything else begins.
    fn have_thread(&self) -> Result<()> {
        if self.messages.is_empty() || self.collectives.is_empty() {
            return Ok(());
        }
        let shared = &self.comm.core.shared;
        // A forked process does not have the parent's thread.
        shared.health.refusal(|| "group".to_owned(), self.comm.peers()).map_or(Ok(()), Err)?;
        shared.progress.start_background()
    }

    /// Runs the calls that were recorded on host memory. Returns the results of all receives, in the order in which
    /// they were recorded.
    fn run_on_host(self) -> Result<Vec<Received>> {
        let Self { comm, messages, collectives, receives, .. } = self;
        let run = || collectives.iter().try_for_each(|jobs| comm.run_all(jobs));
        let progress = &comm.core.shared.progress;
        // SAFETY: every recorded buffer is borrowed for `'buffers`, which the caller chose and which outlasts this
        // call. A buffer that is written is accessed by no other code meanwhile, including the jobs that run here,
        // since its borrow is exclusive.
        let ended = unsafe {
            match (messages.is_empty(), collectives.is_empty()) {
                (_, true) => progress.transfer(&messages, comm.timeout()),
                (true, false) => run().map(|()| Vec::new()),
                (false, false) => progress.transfer_while(&messages, comm.timeout(), || progress.while_away(run)),
            }
        }?;
        let is_receive = |(_, memory): &(MessageContext, MessageBuffer)| matches!(memory, MessageBuffer::Receive { .. });
        let mut ended = ended.into_iter().zip(&messages).filter(|(_, message)| is_receive(message)).map(|(received, _)| received);
        Ok(receives.into_iter().filter_map(|device| device.or_else(|| ended.next())).collect())
    }
}

impl<'buffers> Group<'buffers, '_> {
    /// Records a collective for the backend that runs it.
    pub(in crate::communicator) fn record(&mut self, prepared: Result<Prepared<'buffers>>) -> Result<()> {
        match prepared? {
            Prepared::Host(job, _) => self.collectives.push(job.into()),
            Prepared::HostMany(jobs, _) => self.collectives.push(jobs),
            #[cfg(feature = "cuda")]
            Prepared::Device(call) => self.device.call(call),
            #[cfg(feature = "cuda")]
            Prepared::DeviceMany(calls) => calls.into_iter().for_each(|call| self.device.call(call)),
        }
        Ok(())
    }

    /// Records a [`send`](Communicator::send). The group has one timeout for all its calls, so an envelope with its own
    /// timeout is refused.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if a message from device memory
    /// has a tag.
    pub fn send<B: Buffer + ?Sized>(&mut self, buffer: &'buffers B, to: impl Into<Envelope>) -> Result<()> {
        let to = Self::untimed("send", to.into())?;
        let memory = buffer.memory();
        let context = self.comm.context("send", &to, held::<B::Element>("send", "the buffer", memory.element(), memory.misplaced())?)?;
        Communicator::destination("send", &to)?;
        match memory {
            Memory::Host(memory) => self.messages.push((context, send_place(memory))),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => {
                untagged("send", to.tag)?;
                self.device.send(memory, Communicator::destination("send", &to)?);
            }
        }
        Ok(())
    }

    /// Records a [`recv`](Communicator::recv). The group has one timeout for all its calls, so an envelope with its own
    /// timeout is refused.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if a receive into device memory
    /// has a tag or names no source.
    pub fn recv<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, from: impl Into<Envelope>) -> Result<()> {
        let from = Self::untimed("recv", from.into())?;
        let memory = buffer.memory_mut();
        let context = self.comm.context("recv", &from, held::<B::Element>("recv", "the buffer", memory.element(), memory.misplaced())?)?;
        match memory {
            MemoryMut::Host(memory) => {
                self.receives.push(None);
                self.messages.push((context, receive_place(memory)));
            }
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => {
                untagged("recv", from.tag)?;
                let rank = Communicator::device_source("recv", &from)?;
                self.receives.push(Some(self.device.receive(memory, rank)));
            }
        }
        Ok(())
    }

    fn untimed(call: &'static str, envelope: Envelope) -> Result<Envelope> {
        match envelope.timeout {
            None => Ok(envelope),
            Some(_) => Err(Error::argument(
                call,
                "a message in a group cannot have its own timeout; use with_timeout to set a timeout for the whole group",
            )),
        }
    }

    /// Records an [`all_reduce`](Communicator::all_reduce).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn all_reduce<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.record(self.comm.prepare_all_reduce(Source::InPlace, buffer.memory_mut(), &op.into()))
    }

    /// Records a [`reduce`](Communicator::reduce).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce<B: BufferMut + ?Sized>(
        &mut self,
        buffer: &'buffers mut B,
        root: usize,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<()> {
        let buffer = buffer.memory_mut();
        let count = buffer.len();
        self.record(self.comm.prepare_reduce(Source::InPlace, Some(buffer), count, root, &op.into()))
    }

    /// Records a [`broadcast`](Communicator::broadcast).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn broadcast<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, root: usize) -> Result<()> {
        let source = if self.comm.rank() == root { Source::InPlace } else { Source::Nothing };
        self.record(self.comm.prepare_broadcast(source, buffer.memory_mut(), root))
    }

    /// Records an [`all_gather_into`](Communicator::all_gather_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_gather_into<S, D>(&mut self, source: &'buffers S, destination: &'buffers mut D) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_all_gather(Some(source.memory()), destination.memory_mut()))
    }

    /// Records a [`reduce_scatter_into`](Communicator::reduce_scatter_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce_scatter_into<S, D>(
        &mut self,
        source: &'buffers S,
        destination: &'buffers mut D,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_reduce_scatter(Some(source.memory()), destination.memory_mut(), &op.into()))
    }

    /// Records an [`all_to_all_into`](Communicator::all_to_all_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_to_all_into<S, D>(&mut self, source: &'buffers S, destination: &'buffers mut D) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_all_to_all(Source::Separate(source.memory()), destination.memory_mut()))
    }

    /// Records an [`all_reduce_into`](Communicator::all_reduce_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn all_reduce_into<S, D>(
        &mut self,
        source: &'buffers S,
        destination: &'buffers mut D,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_all_reduce(Source::Separate(source.memory()), destination.memory_mut(), &op.into()))
    }

    /// Records a [`reduce_into`](Communicator::reduce_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce_into<S, D>(
        &mut self,
        source: &'buffers S,
        destination: Option<&'buffers mut D>,
        root: usize,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_reduce_into(source.memory(), destination.map(BufferMut::memory_mut), root, &op.into()))
    }

    /// Records a [`broadcast_into`](Communicator::broadcast_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn broadcast_into<S, D>(&mut self, source: Option<&'buffers S>, destination: &'buffers mut D, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_broadcast_into(source.map(Buffer::memory), destination.memory_mut(), root))
    }

    /// Records an [`all_gather`](Communicator::all_gather).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_gather<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B) -> Result<()> {
        self.record(self.comm.prepare_all_gather(None, buffer.memory_mut()))
    }

    /// Records a [`reduce_scatter`](Communicator::reduce_scatter).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce_scatter<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.record(self.comm.prepare_reduce_scatter(None, buffer.memory_mut(), &op.into()))
    }

    /// Records a [`gather`](Communicator::gather).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn gather<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, root: usize) -> Result<()> {
        self.record(self.comm.prepare_gather_in_place(buffer, root))
    }

    /// Records a [`gather_into`](Communicator::gather_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn gather_into<S, D>(&mut self, source: &'buffers S, destination: Option<&'buffers mut D>, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_gather_into(source.memory(), destination.map(BufferMut::memory_mut), root))
    }

    /// Records a [`scatter`](Communicator::scatter).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn scatter<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, root: usize) -> Result<()> {
        self.record(self.comm.prepare_scatter_in_place(buffer.memory_mut(), root))
    }

    /// Records a [`scatter_into`](Communicator::scatter_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn scatter_into<S, D>(&mut self, source: Option<&'buffers S>, destination: &'buffers mut D, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_scatter_into(source.map(Buffer::memory), destination.memory_mut(), root))
    }

    /// Records an [`all_to_all`](Communicator::all_to_all).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_to_all<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B) -> Result<()> {
        self.record(self.comm.prepare_all_to_all(Source::InPlace, buffer.memory_mut()))
    }

    /// Records an [`all_gather_v`](Communicator::all_gather_v).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_gather_v<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, counts: &[usize]) -> Result<()> {
        self.record(self.comm.prepare_all_gather_v(None, buffer.memory_mut(), counts))
    }

    /// Records an [`all_gather_v_into`](Communicator::all_gather_v_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_gather_v_into<S, D>(&mut self, source: &'buffers S, destination: &'buffers mut D, counts: &[usize]) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_all_gather_v(Some(source.memory()), destination.memory_mut(), counts))
    }

    /// Records a [`reduce_scatter_v`](Communicator::reduce_scatter_v).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce_scatter_v<B: BufferMut + ?Sized>(
        &mut self,
        buffer: &'buffers mut B,
        counts: &[usize],
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<()> {
        self.record(self.comm.prepare_reduce_scatter_v(None, buffer.memory_mut(), counts, &op.into()))
    }

    /// Records a [`reduce_scatter_v_into`](Communicator::reduce_scatter_v_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce_scatter_v_into<S, D>(
        &mut self,
        source: &'buffers S,
        destination: &'buffers mut D,
        counts: &[usize],
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_reduce_scatter_v(Some(source.memory()), destination.memory_mut(), counts, &op.into()))
    }

    /// Records a [`gather_v_into`](Communicator::gather_v_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn gather_v_into<S, D>(&mut self, source: &'buffers S, destination: Option<(&'buffers mut D, &[usize])>, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_gather_v(
            source.memory(),
            destination.map(|(destination, counts)| (destination.memory_mut(), counts)),
            root,
        ))
    }

    /// Records a [`scatter_v_into`](Communicator::scatter_v_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn scatter_v_into<S, D>(&mut self, source: Option<(&'buffers S, &[usize])>, destination: &'buffers mut D, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_scatter_v(source.map(|(source, counts)| (source.memory(), counts)), destination.memory_mut(), root))
    }

    /// Records an [`all_to_all_v_into`](Communicator::all_to_all_v_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_to_all_v_into<S, D>(
        &mut self,
        source: &'buffers S,
        send_counts: &[usize],
        destination: &'buffers mut D,
        receive_counts: &[usize],
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_all_to_all_v(source.memory(), send_counts, destination.memory_mut(), receive_counts))
    }
}
