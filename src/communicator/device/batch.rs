//! Device calls that are queued together: those of a group, and messages.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed, or owned by a work, are handed to the device backend")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::headers::Headers;
use super::queue::CommitGuard;
use super::started::Queued;
use crate::base::ticket_lock::Turn;
use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut, DeviceRead, DeviceWrite};
use crate::call::element::Data;
use crate::communicator::Communicator;
use crate::communicator::prepare::device_call::{DeviceCall, Guards, Hold, check_place, check_places, overlap, resolve};
use crate::communicator::work::message::Received;
use crate::config::launches_block;
use crate::device::{self, DeviceBackend};
use crate::error::{Error, Result};
use crate::flight::{self, Message};
use crate::observe::{Moved, Track};

/// The memory at this rank's end of a message.
enum End<'a> {
    Read(&'a dyn DeviceRead),
    Write(&'a mut dyn DeviceWrite),
}

/// A message on device memory.
struct DeviceMessage<'a> {
    message: device::Message,
    end: End<'a>,
}

/// Device calls of one communicator, recorded to be queued together.
#[derive(Default)]
pub(in crate::communicator) struct Batch<'a> {
    calls: Vec<DeviceCall<'a>>,
    messages: Vec<DeviceMessage<'a>>,
}

/// A batch whose buffers have addresses.
pub(super) struct Resolved<'s> {
    jobs: Vec<device::Job>,
    pub(super) messages: Vec<device::Message>,
    pub(super) guards: Guards<'s>,
}

impl<'a> From<Vec<DeviceCall<'a>>> for Batch<'a> {
    fn from(calls: Vec<DeviceCall<'a>>) -> Self {
        Self { calls, messages: Vec::new() }
    }
}

impl<'a> Batch<'a> {
    pub(in crate::communicator) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.messages.is_empty()
    }

    /// Records a collective.
    pub(in crate::communicator) fn call(&mut self, call: DeviceCall<'a>) {
        self.calls.push(call);
    }

    /// Records a send.
    pub(in crate::communicator) fn send<T: Data>(&mut self, memory: DeviceMemory<'a, T>, to: usize) {
        let (bytes, element) = (memory.bytes(), memory.element());
        let message = device::Message { peer: to, sends: true, address: 0, bytes, element };
        self.messages.push(DeviceMessage { message, end: End::Read(memory.inner) });
    }

    /// Records a receive, and returns its source and count.
    pub(in crate::communicator) fn receive<T: Data>(&mut self, memory: DeviceMemoryMut<'a, T>, from: usize) -> Received {
        let (count, bytes, element) = (memory.len(), memory.bytes(), memory.element());
        let message = device::Message { peer: from, sends: false, address: 0, bytes, element };
        self.messages.push(DeviceMessage { message, end: End::Write(memory.inner) });
        Received { source: from, tag: 0, count }
    }

    /// Refuses messages whose memory is on a device other than the backend's.
    pub(super) fn check_devices(&self, backend: &DeviceBackend) -> Result<()> {
        self.messages.iter().try_for_each(|DeviceMessage { message, end }| {
            match end {
                End::Read(memory) => Communicator::same_device(backend, "send", "the buffer", memory.context()),
                End::Write(memory) => Communicator::same_device(backend, "recv", "the buffer", memory.context()),
            }?;
            backend.refuse_message_without_kernels(message)
        })
    }

    /// Orders every buffer before `stream`, and fills in the addresses.
    pub(super) fn resolve<'s>(&'s mut self, stream: &'s CudaStream, hold: Hold<'_>) -> Result<Resolved<'s>> {
        let mut guards = Guards::new(hold);
        let mut jobs = Vec::with_capacity(self.calls.len());
        for mut call in std::mem::take(&mut self.calls) {
            resolve(&mut call, stream, &mut guards);
            let job = call.job;
            if overlap(&job) {
                return Err(Error::argument(job.call.kind.name(), "source and destination overlap"));
            }
            check_places(&job)?;
            jobs.push(job);
        }
        let mut messages = Vec::with_capacity(self.messages.len());
        for DeviceMessage { message, end } in &mut self.messages {
            let address = match end {
                End::Read(memory) => guards.read(*memory, stream),
                End::Write(memory) => guards.write(*memory, stream),
            };
            check_place(if message.sends { "send" } else { "recv" }, "the buffer", message.element, address, message.bytes)?;
            messages.push(device::Message { address, ..*message });
        }
        Ok(Resolved { jobs, messages, guards })
    }
}

/// Refuses tags on device messages: NCCL has none.
pub(in crate::communicator) fn untagged(call: &str, tag: u64) -> Result<()> {
    match tag {
        0 => Ok(()),
        _ => Err(Error::unsupported(
            format!("{call} of device memory under tag {tag}"),
            "NCCL has no tags; use tag 0 with messages in the same order on both ends, or use buffers in host memory",
        )),
    }
}

/// Runs `record` on a new batch. Returns the batch and what `record` returned.
fn recorded<'a, R>(call: &str, tag: u64, record: impl FnOnce(&mut Batch<'a>) -> R) -> Result<(Batch<'a>, R)> {
    untagged(call, tag)?;
    let mut batch = Batch::default();
    let recorded = record(&mut batch);
    Ok((batch, recorded))
}

impl Communicator {
    /// Records a batch and its outcome in the flight recorder, and notifies the observers.
    fn note_batch(&self, backend: &DeviceBackend, part: &Resolved<'_>, error: Option<&Error>, elapsed: Duration) {
        let (flight, tracker) = (&self.core.shared.recorder, backend.comm().last_tracker());
        let watch = self.core.shared.observers.watch();
        for job in &part.jobs {
            flight.note_device_call(&job.call, tracker, error);
            if let Some(watch) = watch {
                let moved = Moved { bytes: job.bytes(), algorithm: None };
                watch.ended(watch.call(&job.call, flight::Backend::Device, moved), elapsed, error, Track::Device);
            }
        }
        for device::Message { peer, sends, bytes, element, .. } in &part.messages {
            let count = (*bytes / element.size_bytes().max(1)) as u64;
            let message = Message { sends: *sends, peer: Some(*peer), tag: 0, count, element: *element };
            flight.note_device_message(&message, tracker, error);
            if let Some(watch) = watch {
                watch.ended(watch.message(&message, flight::Backend::Device, *bytes), elapsed, error, Track::Device);
            }
        }
        if let Some(error) = error {
            flight.after_error(error);
        }
    }

    /// Checks a batch before anything is queued.
    fn admit_batch<'s>(&'s self, batch: &Batch<'_>) -> Result<(&'s DeviceBackend, &'s Arc<CudaStream>)> {
        let backend = self.backend("group")?;
        for call in &batch.calls {
            self.check_call(backend, call)?;
        }
        batch.check_devices(backend)?;
        for DeviceMessage { message, .. } in &batch.messages {
            if message.peer == self.rank() && !batch.answers(message) {
                let reason =
                    "a rank that sends a device message to itself must receive it in the same group, with the same length and element type";
                return Err(Error::argument(if message.sends { "send" } else { "recv" }, reason));
            }
        }
        let shared = &self.core.shared;
        if let Some(refusal) = shared.health.refusal(|| "a group of device calls".to_owned(), &shared.peers) {
            return Err(refusal);
        }
        self.check_stream(backend, "group")?;
        Ok((backend, self.device_stream(backend)))
    }

    /// Queues the messages that `record` records, and returns the result of `record`.
    pub(in crate::communicator) fn queue_messages<'a, R>(
        &self,
        call: &str,
        tag: u64,
        record: impl FnOnce(&mut Batch<'a>) -> R,
    ) -> Result<R> {
        let (batch, recorded) = recorded(call, tag, record)?;
        self.queue_batch(batch, Hold::Borrowed)?;
        Ok(recorded)
    }

    /// Queues the messages that `record` records, for a work that owns their buffers.
    pub(in crate::communicator) fn queue_messages_and_mark<'a, R>(
        &self,
        call: &'static str,
        tag: u64,
        record: impl FnOnce(&mut Batch<'a>) -> R,
    ) -> Result<(Queued, R)> {
        let (batch, recorded) = recorded(call, tag, record)?;
        let queued = self.and_mark(call, call.to_owned(), |hold| self.queue_batch(batch, hold))?;
        Ok((queued, recorded))
    }

    /// Queues the collectives of one call together, for a work that owns their buffers.
    pub(in crate::communicator) fn queue_all_and_mark(&self, calls: Vec<DeviceCall<'_>>) -> Result<Queued> {
        let doing =
            calls.first().map_or(String::new(), |call| format!("{} collectives, of which the first is {}", calls.len(), call.job.call));
        self.and_mark("group", doing, |hold| self.queue_batch(calls.into(), hold))
    }

    /// Queues what was recorded on this communicator in one group.
    pub(in crate::communicator) fn queue_batch(&self, batch: Batch<'_>, hold: Hold<'_>) -> Result<()> {
        Self::queue_batches(&mut [(self, batch)], hold, Self::agree_together)
    }

    /// Queues what was recorded on one or several communicators of this thread in one group. All ranks of each
    /// communicator must do the same, because the way in which they compare their calls depends on it.
    pub(in crate::communicator) fn queue_across(parts: &mut [(&Communicator, Batch<'_>)]) -> Result<()> {
        if parts.len() > 1 && launches_block() {
            let reason = "CUDA_LAUNCH_BLOCKING=1 makes the thread wait for the first communicator's kernel, which waits for kernels that the \
                          same thread has not launched yet: unset it, or give each communicator a thread of its own";
            return Err(Error::unsupported("a group of several communicators", reason));
        }
        // All ranks refuse these calls, before they compare them.
        for (comm, batch) in parts.iter() {
            let backend = comm.backend("group")?;
            batch.calls.iter().try_for_each(|call| backend.refuse_missing_kernels(&call.job))?;
        }
        Self::queue_batches(parts, Hold::Borrowed, Self::agree_across)
    }

    fn queue_batches(parts: &mut [(&Communicator, Batch<'_>)], hold: Hold<'_>, agree: Agree) -> Result<()> {
        let began = Instant::now();
        // The calls of one communicator have one order, and run on one stream at a time.
        let twice = |index: usize| parts[..index].iter().any(|(other, _)| Arc::ptr_eq(&other.core, &parts[index].0.core));
        if (1..parts.len()).any(twice) {
            return Err(Error::argument("group_across", "a communicator is listed twice; record all its calls in one group"));
        }
        let mut admitted = Vec::with_capacity(parts.len());
        for (comm, batch) in parts.iter() {
            let (backend, stream) = comm.admit_batch(batch)?;
            hold.refuse_if_over(backend, &|| "a started call".to_owned())?;
            admitted.push((backend, stream));
        }
        let timeout = parts.iter().map(|(comm, _)| comm.timeout()).min().unwrap_or_default();
        let comms: Vec<&Communicator> = parts.iter().map(|(comm, _)| *comm).collect();
        let _turns = turns(&comms)?;
        let mut resolved = Vec::with_capacity(parts.len());
        for ((_, batch), (_, stream)) in parts.iter_mut().zip(&admitted) {
            resolved.push(batch.resolve(stream, hold)?);
        }
        for ((backend, stream), part) in admitted.iter().zip(&resolved) {
            part.guards.check(&backend.gpu().context, stream, "group")?;
        }
        admitted.iter().zip(&mut resolved).for_each(|((backend, _), part)| backend.number(&mut part.jobs));
        let backends: Vec<&DeviceBackend> = admitted.iter().map(|(backend, _)| *backend).collect();
        let commits = agree(&comms, &backends, &resolved)?;
        let ready: Vec<_> = admitted
            .iter()
            .zip(&resolved)
            .map(|((backend, stream), part)| (*backend, &part.jobs[..], &part.messages[..], *stream))
            .collect();
        // SAFETY: - every address belongs to a buffer that is borrowed (or owned by a work) until the guards in
        //   `resolved` have been dropped. That is after everything has been queued: their events then make later users
        //   wait. The buffer is as long as its job or message states, on the device of its backend (checked in
        //   `admit_batch`);
        // - two buffers of one job are the same or apart (checked in `resolve`). No two calls of the group share a
        //   buffer that one of them writes: the group holds each such buffer by a borrow of its own;
        // - other ranks make the same collectives, and the other ends of messages have the same types and lengths:
        //   compared by `agree`, or promised by the caller who disabled the comparison
        //   (`CheckDeviceCalls::unchecked_after`).
        let queued = unsafe { DeviceBackend::enqueue_group(&ready, timeout) };
        backends.iter().for_each(|backend| hold.note(backend, &queued));
        commits.into_iter().for_each(|commit| commit.settle(&queued));
        drop(ready);
        for ((comm, part), (backend, _)) in comms.iter().zip(&resolved).zip(&admitted) {
            comm.note_batch(backend, part, queued.as_ref().err(), began.elapsed());
        }
        let mut outcome = queued;
        for ((backend, stream), part) in admitted.iter().zip(resolved) {
            // Each part is released, even if another failed.
            outcome = outcome.and(Self::release(part.guards, backend, stream, timeout));
        }
        outcome
    }
}

/// Takes a turn at each of several communicators. The order is the same for every thread; otherwise two threads
/// could wait for each other.
fn turns<'a>(comms: &[&'a Communicator]) -> Result<Vec<Turn<'a, ()>>> {
    let mut order: Vec<usize> = (0..comms.len()).collect();
    order.sort_unstable_by_key(|at| Arc::as_ptr(&comms[*at].core).addr());
    order.into_iter().filter_map(|at| comms[at].device_turn("group").transpose()).collect()
}

/// Makes the ranks compare what they are about to queue. After an error this rank queues nothing. If other ranks may
/// already have queued their part, the communicators are ended.
type Agree = for<'a> fn(&[&'a Communicator], &[&'a DeviceBackend], &[Resolved<'_>]) -> Result<Vec<CommitGuard<'a>>>;

impl Communicator {
    /// Compares calls of one communicator: collectives in a collective on the host, then messages by headers.
    fn agree_together<'a>(comms: &[&'a Self], backends: &[&'a DeviceBackend], resolved: &[Resolved<'_>]) -> Result<Vec<CommitGuard<'a>>> {
        let mut commits = Vec::with_capacity(comms.len());
        for ((comm, backend), part) in comms.iter().zip(backends).zip(resolved) {
            let is_captured = comm.agree_on_calls(backend, part.jobs.iter())?;
            let headers = Headers::of_messages(comm, backend, &part.messages);
            commits.push(CommitGuard::new(backend, !part.messages.is_empty(), is_captured.or(headers.is_captured())));
            headers.exchange(comm.timeout()).inspect_err(|error| comm.end_by_device_call(backend, error))?;
        }
        Ok(commits)
    }

    /// Compares calls of several communicators, all by headers. This thread's ranks send all their headers before
    /// any of them waits.
    fn agree_across<'a>(comms: &[&'a Self], backends: &[&'a DeviceBackend], resolved: &[Resolved<'_>]) -> Result<Vec<CommitGuard<'a>>> {
        if backends.iter().zip(resolved).any(|(backend, part)| part.jobs.iter().any(|job| backend.lacks_kernel(job))) {
            let reason =
                "the ranks must first agree that all of them can run the op; use the op once on each communicator before this group";
            return Err(Error::unsupported("the first use of a custom op in a group of several communicators", reason));
        }
        if let Some(job) = resolved.iter().flat_map(|part| &part.jobs).find(|job| job.call.kind.is_pairwise()) {
            let reason = "the ranks compare its lengths by a collective, which such a group cannot make; record the call in a group of one \
                          communicator";
            return Err(Error::unsupported(format!("{} in a group of several communicators", job.call.kind.name()), reason));
        }
        Self::allocate_across(comms, backends, resolved)?;
        let headers = comms.iter().zip(backends).zip(resolved);
        let headers = headers.map(|((comm, backend), part)| Headers::of_messages(comm, backend, &part.messages).with_calls(&part.jobs));
        let headers: Vec<_> = headers.collect();
        let commits =
            backends.iter().zip(&headers).map(|(backend, headers)| CommitGuard::new(backend, true, headers.is_captured())).collect();
        let sent = headers.iter().zip(comms).try_for_each(|(headers, comm)| headers.send(comm.timeout()));
        let agreed = sent.and_then(|()| headers.into_iter().zip(comms).try_for_each(|(headers, comm)| headers.hear(comm.timeout())));
        if let Err(error) = &agreed {
            comms.iter().zip(backends).for_each(|(comm, backend)| comm.end_by_device_call(backend, error));
        }
        agreed.map(|()| commits)
    }

    /// Allocates what the first large calls of communicators need, before any other rank is notified of these calls.
    /// One thread may run several of the ranks, so they cannot agree one after the other. If a rank has no memory, it
    /// ends the communicators, and the other ranks are notified.
    fn allocate_across(comms: &[&Self], backends: &[&DeviceBackend], resolved: &[Resolved<'_>]) -> Result<()> {
        let jobs = comms.iter().zip(backends).zip(resolved).flat_map(|(of, part)| part.jobs.iter().map(move |job| (of, job)));
        let first_uses = jobs.map(|(of, job)| (of, job, of.1.first_use(job)));
        let first_uses: Vec<_> = first_uses.filter(|(.., first_use)| first_use.is_any()).collect();
        let allocated = first_uses.iter().try_for_each(|((comm, backend), job, _)| backend.load(job, comm.device_stream(backend)));
        match &allocated {
            Ok(()) => {}
            // The stream is being captured: nothing has happened, on any rank.
            Err(error) if error.is_unsupported() => {
                first_uses.iter().for_each(|((_, backend), job, first_use)| backend.unload(job, *first_use))
            }
            Err(error) => comms.iter().zip(backends).for_each(|(comm, backend)| comm.end_by_device_call(backend, error)),
        }
        allocated
    }
}

impl Batch<'_> {
    /// Whether the batch also contains the other end of a message to this rank itself.
    fn answers(&self, message: &device::Message) -> bool {
        let alike = |sends: bool| {
            let mine = self.messages.iter().map(|recorded| &recorded.message);
            let mine = mine.filter(|other| other.peer == message.peer && other.sends == sends);
            mine.map(|other| (other.bytes, other.element)).collect::<Vec<_>>()
        };
        alike(true) == alike(false)
    }
}
