//! Groups: calls that are recorded first and launched together.

#![expect(unsafe_code, reason = "posting recorded places to the desk")]

use std::marker::PhantomData;

use super::Communicator;
use super::desk::{Place, Terms};
use super::messages::{Received, receive_place, send_place};
use super::prepare::{Source, host, host_mut};
use crate::buffer::{Buffer, BufferMut};
use crate::error::Result;
use crate::host::plane::Job;
use crate::op::Reduction;

/// Calls recorded by [`Communicator::group`]; their buffers are borrowed until the group has been launched and has ended.
#[derive(Debug)]
pub struct Group<'buffers, 'comm> {
    comm: &'comm Communicator,
    messages: Vec<(Terms, Place)>,
    collectives: Vec<Job>,
    /// Invariant: the borrows last for exactly `'buffers`.
    buffers: PhantomData<std::cell::Cell<&'buffers mut ()>>,
}

impl Communicator {
    /// Records calls and launches them together: all messages are on their way at once, so opposite sends and receives do not
    /// wait for each other; collectives run in the order in which they were recorded. Nothing is sent before the closure has
    /// returned `Ok`; where it fails or panics, nothing has happened.
    ///
    /// Returns what the receives got, in the order in which they were recorded.
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
    /// The closure's own, and those of the recorded calls.
    #[doc(alias("ncclGroupStart", "ncclGroupEnd", "batch_isend_irecv"))]
    pub fn group<'buffers>(&self, record: impl FnOnce(&mut Group<'buffers, '_>) -> Result<()>) -> Result<Vec<Received>> {
        let mut group = Group { comm: self, messages: Vec::new(), collectives: Vec::new(), buffers: PhantomData };
        record(&mut group)?;
        let Group { messages, collectives, .. } = group;
        let received = messages.iter().map(|(_, place)| matches!(place, Place::Receive { .. }));
        let received: Vec<bool> = received.collect();
        let run = || collectives.iter().try_for_each(|job| self.execute(job));
        let desk = &self.shared.desk;
        // SAFETY: every recorded buffer is borrowed for `'buffers`, which the caller chose and which outlasts this call.
        let ended = unsafe {
            desk.transfer_while(&messages, self.timeout(), || match (messages.is_empty(), collectives.is_empty()) {
                (_, true) => Ok(()),
                (true, false) => run(),
                (false, false) => desk.while_away(run),
            })
        }?;
        Ok(ended.into_iter().zip(received).filter_map(|(message, receiving)| receiving.then_some(message)).collect())
    }
}

impl<'buffers> Group<'buffers, '_> {
    /// Records a [`send`](Communicator::send).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn send<B: Buffer + ?Sized>(&mut self, buffer: &'buffers B, to: usize) -> Result<()> {
        self.send_tagged(buffer, to, 0)
    }

    /// Records a [`send_tagged`](Communicator::send_tagged).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn send_tagged<B: Buffer + ?Sized>(&mut self, buffer: &'buffers B, to: usize, tag: u64) -> Result<()> {
        let terms = self.comm.terms::<B::Element>("send", Some(to), tag)?;
        self.messages.push((terms, send_place(host(buffer))));
        Ok(())
    }

    /// Records a [`recv`](Communicator::recv).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn recv<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, from: usize) -> Result<()> {
        self.recv_tagged(buffer, from, 0)
    }

    /// Records a [`recv_tagged`](Communicator::recv_tagged).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn recv_tagged<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, from: usize, tag: u64) -> Result<()> {
        let terms = self.comm.terms::<B::Element>("recv", Some(from), tag)?;
        self.messages.push((terms, receive_place(host_mut(buffer))));
        Ok(())
    }

    /// Records an [`all_reduce`](Communicator::all_reduce).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported`.
    pub fn all_reduce<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.collectives.push(self.comm.prepare_all_reduce(Source::InPlace, host_mut(buffer), &op.into())?);
        Ok(())
    }

    /// Records a [`reduce`](Communicator::reduce).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported`.
    pub fn reduce<B: BufferMut + ?Sized>(
        &mut self,
        buffer: &'buffers mut B,
        root: usize,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<()> {
        let buffer = host_mut(buffer);
        let count = buffer.len();
        self.collectives.push(self.comm.prepare_reduce(Source::InPlace, Some(buffer), count, root, &op.into())?);
        Ok(())
    }

    /// Records a [`broadcast`](Communicator::broadcast).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn broadcast<B: BufferMut + ?Sized>(&mut self, buffer: &'buffers mut B, root: usize) -> Result<()> {
        let source = if self.comm.rank() == root { Source::InPlace } else { Source::Nothing };
        self.collectives.push(self.comm.prepare_broadcast(source, host_mut(buffer), root)?);
        Ok(())
    }

    /// Records an [`all_gather_into`](Communicator::all_gather_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn all_gather_into<S, D>(&mut self, source: &'buffers S, destination: &'buffers mut D) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.collectives.push(self.comm.prepare_all_gather(Some(host(source)), host_mut(destination))?);
        Ok(())
    }

    /// Records a [`reduce_scatter_into`](Communicator::reduce_scatter_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported`.
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
        self.collectives.push(self.comm.prepare_reduce_scatter(Some(host(source)), host_mut(destination), &op.into())?);
        Ok(())
    }

    /// Records an [`all_to_all_into`](Communicator::all_to_all_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`.
    pub fn all_to_all_into<S, D>(&mut self, source: &'buffers S, destination: &'buffers mut D) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.collectives.push(self.comm.prepare_all_to_all(Source::Separate(host(source)), host_mut(destination))?);
        Ok(())
    }
}
