//! Puts calls on streams step by step: a single call, or several calls together. Each group of transfers is one NCCL
//! group.

#![expect(unsafe_code, reason = "calls take addresses of device memory")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::sys::{CUevent_wait_flags, CUstream};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result};
use nccl_sys::{ncclDataType_t, ncclRedOp_t};

use super::kept_plan::{KeptPlan, Steps};
use super::{DeviceBackend, GroupPart, Product};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::device::BACKEND_DROP_WAIT;
use crate::call::element::DType;
use crate::device::comm::{self, Part};
use crate::device::driver::{self, cuda_error};
use crate::device::nccl::{Raw, Refusal, data_type};
use crate::device::plan::{self, Folder, Job, NcclOp, Plan, Step, StepEvent, StreamRole, Transfer};
use crate::error::Result;

impl DeviceBackend {
    /// Puts a collective on a stream.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported` if the call cannot be done. In this case nothing was queued, and the other
    /// ranks get the same error. Any other error ends the communicator.
    ///
    /// # Safety
    ///
    /// - The addresses of the job are memory of this device, of the job's lengths, until the stream has passed the
    ///   call. The two buffers are the same or do not overlap, as the job states. Meanwhile nothing else writes them,
    ///   or reads the destination.
    /// - The memory that is read holds elements of the call's type.
    /// - All ranks make the same call as their next one, with the same op, type, root and lengths. NCCL compares
    ///   nothing and writes what it is sent. (Truth values need no promise: any byte becomes a valid one.)
    #[inline]
    pub(crate) unsafe fn enqueue(&self, job: &Job, stream: &Arc<CudaStream>, timeout: Duration) -> Result<()> {
        let mut kept = event::lock(&self.queueing);
        // SAFETY: this function's own contract.
        let queued = unsafe { self.enqueue_uncounted(job, &mut kept, stream, timeout) };
        self.count(1, &queued);
        queued
    }

    /// # Safety
    ///
    /// The contract of [`DeviceBackend::enqueue`].
    #[inline]
    unsafe fn enqueue_uncounted(&self, job: &Job, kept: &mut Option<KeptPlan>, stream: &Arc<CudaStream>, timeout: Duration) -> Result<()> {
        self.check_stream(stream)?;
        if let Some(steps) = kept.as_ref().and_then(|kept| kept.steps(job)) {
            self.comm.label(&job.call);
            // SAFETY: this function's own contract; the steps are those of a job with the same memory.
            return unsafe { self.enqueue_steps(job, steps, stream, timeout) };
        }
        let plan = self.plan(job, stream)?;
        self.comm.label(&job.call);
        let doing = || job.call.to_string();
        match plan {
            Plan::Nothing => self.refuse_if_over(&doing),
            Plan::One(transfer) => {
                let queue = stream.cu_stream();
                // SAFETY: the transfer uses this stream alone; its addresses and lengths are the job's, whose memory is
                // there until the stream has passed the call (this function's contract).
                unsafe { self.comm.enqueue(&doing, stream, timeout, |raw| self.issue(raw, &transfer, queue)) }
            }
            plan => {
                let steps = Steps::of(plan);
                *kept = KeptPlan::of(job, &steps);
                // SAFETY: this function's own contract; the steps are the job's.
                unsafe { self.enqueue_steps(job, steps, stream, timeout) }
            }
        }
    }

    /// # Safety
    ///
    /// The contract of [`DeviceBackend::enqueue`], and the steps are the job's.
    unsafe fn enqueue_steps(&self, job: &Job, steps: Steps, stream: &Arc<CudaStream>, timeout: Duration) -> Result<()> {
        // SAFETY: the steps use the job's memory, which is there until the stream has passed the call (this function's
        // contract), and the backend's memory, which lives as long as the backend and is taken and freed in the order
        // of streams.
        unsafe { together(&mut [Running::new(self, steps, stream)], &|| job.call.to_string(), timeout) }
    }

    /// Puts several collectives and messages of one or several communicators on their streams together. The calls that
    /// NCCL implements become one group; the others follow, in order.
    ///
    /// # Errors
    ///
    /// The errors of [`DeviceBackend::enqueue`].
    ///
    /// # Safety
    ///
    /// - Every job meets the contract of [`DeviceBackend::enqueue`].
    /// - The address of every message is memory of this device, of the stated length, until the stream has passed the
    ///   group. Meanwhile nothing else writes the memory, or reads what is received.
    /// - A sent message holds elements of its type, and the other end gives the same type and length.
    /// - No call of the group uses memory that another one writes.
    pub(crate) unsafe fn enqueue_group(parts: &[GroupPart<'_>], timeout: Duration) -> Result<()> {
        // Every thread that takes several backends takes them in the same order.
        let mut backends: Vec<&DeviceBackend> = parts.iter().map(|(backend, ..)| *backend).collect();
        backends.sort_unstable_by_key(|backend| std::ptr::from_ref::<DeviceBackend>(backend).addr());
        let _alone: Vec<_> = backends.into_iter().map(|backend| event::lock(&backend.queueing)).collect();
        // SAFETY: this function's own contract.
        let queued = unsafe { Self::enqueue_group_uncounted(parts, timeout) };
        parts.iter().for_each(|(backend, jobs, ..)| backend.count(jobs.len(), &queued));
        queued
    }

    /// # Safety
    ///
    /// The contract of [`DeviceBackend::enqueue_group`].
    unsafe fn enqueue_group_uncounted(parts: &[GroupPart<'_>], timeout: Duration) -> Result<()> {
        let mut all = Vec::with_capacity(parts.len());
        for (backend, jobs, messages, stream) in parts {
            backend.check_stream(stream)?;
            let (mut transfers, mut after) = plan::nccl::messages(messages, backend.ranks.me)?;
            let mut rest = Vec::new();
            for job in *jobs {
                backend.comm.label(&job.call);
                match backend.plan(job, stream)? {
                    Plan::Nothing => {}
                    Plan::One(transfer) => transfers.push(transfer),
                    Plan::Group { transfers: more, after: work } => {
                        transfers.extend(more);
                        after.extend(work);
                    }
                    Plan::Steps(steps) => rest.extend(steps),
                }
            }
            all.push(Running::new(backend, Steps::joined(transfers, after, rest), stream));
        }
        let doing = || {
            let (jobs, messages) = parts.iter().fold((0, 0), |(jobs, messages), part| (jobs + part.1.len(), messages + part.2.len()));
            format!("a group of {jobs} collectives and {messages} messages")
        };
        for (backend, ..) in parts {
            backend.refuse_if_over(&doing)?;
        }
        // SAFETY: the steps read and write the memory of the jobs and messages, which is there long enough and used by
        // no other call of the group (this function's contract), and the backends' own memory.
        unsafe { together(&mut all, &doing, timeout) }
    }
}

/// NCCL's type for bytes.
const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;

/// The steps of one communicator, and how many of them are on the stream.
pub(super) struct Running<'a> {
    backend: &'a DeviceBackend,
    stream: &'a Arc<CudaStream>,
    steps: Steps,
    done: usize,
}

impl<'a> Running<'a> {
    pub(super) fn new(backend: &'a DeviceBackend, steps: Steps, stream: &'a Arc<CudaStream>) -> Self {
        Self { backend, stream, steps, done: 0 }
    }

    /// Does this rank's own work up to the next transfers, and returns their place; `None` if there are no more.
    ///
    /// # Safety
    ///
    /// The addresses of the steps are memory of the backend's device until the stream has passed the steps.
    unsafe fn advance(&mut self) -> Result<Option<usize>> {
        while let Some(step) = self.steps.list.get(self.done) {
            self.done += 1;
            match step {
                Step::Transfer(_) => return Ok(Some(self.done - 1)),
                // SAFETY: memory that remains until the stream has passed the step: this function's contract.
                step => unsafe { self.backend.work(step, self.stream) }?,
            }
        }
        Ok(None)
    }

    /// Returns the transfers at a place.
    fn transfers(&self, place: usize) -> &[Transfer] {
        match self.steps.list.get(place) {
            Some(Step::Transfer(transfers)) => transfers,
            _ => &[],
        }
    }

    /// Returns the function that makes the transfers at a place.
    ///
    /// # Safety
    ///
    /// The addresses of the transfers are memory of the backend's device until the stream has passed the transfers.
    unsafe fn calls(&self, place: usize) -> impl FnMut(&Raw<'_>) -> std::result::Result<(), Refusal> {
        let (backend, queue) = (self.backend, self.stream.cu_stream());
        // SAFETY: the transfers use the part's stream alone; their addresses are memory that remains until it has
        // passed them: this function's contract.
        move |raw: &Raw<'_>| self.transfers(place).iter().try_for_each(|transfer| unsafe { backend.issue(raw, transfer, queue) })
    }
}

/// Puts the steps of all parts on their streams, one group of transfers after another: ranks in one thread must not
/// wait for each other.
///
/// # Errors
///
/// The errors of NCCL and the driver. They end the communicators, because other ranks may wait for work that was not
/// queued.
///
/// # Safety
///
/// The addresses of the steps are memory of the backends' devices until the streams have passed the steps.
pub(super) unsafe fn together(parts: &mut [Running<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    // SAFETY: memory that remains until the streams have passed the steps: this function's contract, which is the same.
    let outcome = unsafe { put(parts, doing, timeout) };
    if outcome.is_err() {
        for Running { backend, stream, .. } in parts.iter() {
            backend.comm.abort();
            backend.leave(stream);
        }
    }
    outcome
}

/// # Safety
///
/// The addresses of the steps are memory of the backends' devices until the streams have passed the steps.
unsafe fn put(parts: &mut [Running<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    for part in parts.iter() {
        part.backend.refuse_if_over(doing)?;
    }
    for part in parts.iter().filter(|part| part.steps.uses_room) {
        part.backend.take_room(part.stream)?;
    }
    match &mut *parts {
        // Without a list of the parts.
        [part] => {
            // SAFETY: memory that remains until the stream has passed the steps: this function's contract.
            while let Some(place) = unsafe { part.advance() }? {
                if part.transfers(place).is_empty() {
                    continue;
                }
                // SAFETY: memory that remains until the stream has passed the transfers: this function's contract.
                let mut calls = unsafe { part.calls(place) };
                let mut group: [Part<'_>; 1] = [(&part.backend.comm, part.stream, &mut calls)];
                // SAFETY: the part's calls use its stream alone, and are valid as one group: they do not use what
                // others write.
                unsafe { comm::grouped(&mut group, doing, timeout) }?;
            }
        }
        // SAFETY: memory that remains until the streams have passed the steps: this function's contract.
        parts => while unsafe { put_next(parts, doing, timeout) }? {},
    }
    for Running { backend, stream, .. } in parts.iter().filter(|part| part.steps.uses_room) {
        if backend.free_room(stream).is_err() {
            // Everything is queued, so a thread that waits here needs no mark.
            backend.comm.outlast(stream, &Deadline::after(timeout))?;
        }
    }
    Ok(())
}

/// Puts the next group of transfers of all parts on their streams, with their own work before it; returns `false` if
/// there are no more.
///
/// # Safety
///
/// The contract of [`put`].
unsafe fn put_next(parts: &mut [Running<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<bool> {
    let mut places = Vec::with_capacity(parts.len());
    for part in parts.iter_mut() {
        // SAFETY: memory that remains until the streams have passed the steps: this function's contract.
        places.push(unsafe { part.advance() }?);
    }
    let waiting = parts.iter().zip(&places).filter_map(|(part, place)| Some((part, place.filter(|at| !part.transfers(*at).is_empty())?)));
    let waiting: Vec<_> = waiting.collect();
    // SAFETY: memory that remains until the streams have passed the transfers: this function's contract.
    let mut calls: Vec<_> = waiting.iter().map(|(part, place)| unsafe { part.calls(*place) }).collect();
    let mut group: Vec<Part<'_>> = Vec::with_capacity(waiting.len());
    for ((part, _), call) in waiting.iter().zip(&mut calls) {
        group.push((&part.backend.comm, part.stream, call));
    }
    // SAFETY: each part's calls use its stream alone, and are valid as one group: they do not use what others write.
    unsafe { comm::grouped(&mut group, doing, timeout) }?;
    Ok(places.iter().any(Option::is_some))
}

impl DeviceBackend {
    /// Makes one NCCL call.
    ///
    /// # Safety
    ///
    /// The addresses of the transfer are memory of this device until the stream has passed the call.
    #[inline]
    pub(super) unsafe fn issue(&self, raw: &Raw<'_>, transfer: &Transfer, stream: CUstream) -> std::result::Result<(), Refusal> {
        // NCCL itself refuses a type that it has no number for.
        let number = |dtype| data_type(dtype, raw.version()).unwrap_or(ncclDataType_t::ncclNumTypes);
        // SAFETY: addresses are the caller's promise, lengths are those of the buffers there.
        unsafe {
            match *transfer {
                Transfer::AllReduce { source, destination, count, dtype, op } => {
                    raw.all_reduce(source, destination, count, number(dtype), self.operation(raw, op, dtype)?, stream)
                }
                Transfer::Reduce { source, destination, count, dtype, op, root } => {
                    raw.reduce(source, destination, count, number(dtype), self.operation(raw, op, dtype)?, root, stream)
                }
                Transfer::ReduceScatter { source, destination, count, dtype, op } => {
                    raw.reduce_scatter(source, destination, count, number(dtype), self.operation(raw, op, dtype)?, stream)
                }
                Transfer::Broadcast { source, destination, bytes, root } => raw.broadcast(source, destination, bytes, BYTES, root, stream),
                Transfer::AllGather { source, destination, bytes } => raw.all_gather(source, destination, bytes, BYTES, stream),
                Transfer::AllToAll { source, destination, bytes } => raw.all_to_all(source, destination, bytes, BYTES, stream),
                Transfer::Gather { source, destination, bytes, root } => raw.gather(source, destination, bytes, BYTES, root, stream),
                Transfer::Scatter { source, destination, bytes, root } => raw.scatter(source, destination, bytes, BYTES, root, stream),
                Transfer::Send { address, bytes, peer } => raw.send(address, bytes, BYTES, peer, stream),
                Transfer::Receive { address, bytes, peer } => raw.recv(address, bytes, BYTES, peer, stream),
            }
        }
    }

    /// Returns NCCL's number of an op. For a `PreMulSum` the op is created here and kept, because the next call often
    /// has the same scalar.
    #[inline]
    fn operation(&self, raw: &Raw<'_>, op: NcclOp, dtype: DType) -> std::result::Result<ncclRedOp_t, Refusal> {
        match op {
            NcclOp::Sum => Ok(ncclRedOp_t::ncclSum),
            NcclOp::Prod => Ok(ncclRedOp_t::ncclProd),
            NcclOp::Min => Ok(ncclRedOp_t::ncclMin),
            NcclOp::Max => Ok(ncclRedOp_t::ncclMax),
            NcclOp::Avg => Ok(ncclRedOp_t::ncclAvg),
            NcclOp::PreMulSum(scalar) => self.product(raw, scalar, dtype),
        }
    }

    fn product(&self, raw: &Raw<'_>, scalar: f64, dtype: DType) -> std::result::Result<ncclRedOp_t, Refusal> {
        let last = *event::lock(&self.product);
        if let Some(known) = last.filter(|known| known.scalar == scalar.to_bits() && known.dtype == dtype) {
            return Ok(known.op);
        }
        let op = raw.pre_mul_sum(scalar, dtype)?;
        *event::lock(&self.product) = Some(Product { scalar: scalar.to_bits(), dtype, op });
        // The calls that used the old op have been made, and NCCL has copied it into them.
        last.map_or(Ok(()), |old| raw.destroy_op(old.op))?;
        Ok(op)
    }

    /// Does one step of this rank's own work.
    ///
    /// # Safety
    ///
    /// The step's addresses are memory of the backend's device, of the stated length, until the stream has passed it.
    unsafe fn work(&self, step: &Step, stream: &Arc<CudaStream>) -> Result<()> {
        driver::bind(&self.gpu.context).map_err(|error| cuda_error("making a device current", error))?;
        match *step {
            Step::Transfer(_) => Ok(()),
            Step::Copy { role, source, destination, bytes } => {
                let stream = self.stream_of(role, stream);
                // SAFETY: both are memory of this device, and apart or two different blocks: the caller's promise.
                let copied = unsafe { result::memcpy_dtod_async(destination, source, bytes, stream.cu_stream()) };
                copied.map_err(|error| cuda_error(format!("copying {bytes} B inside a device"), error))
            }
            Step::Fold { role, folder, ref arguments, element_bytes } => {
                let function = match folder {
                    Folder::Ours(op, dtype) => self.kernels.fold_of(op, dtype)?,
                    Folder::User(place) => event::lock(&self.custom_kernels).function(place)?,
                };
                let stream = self.stream_of(role, stream);
                // SAFETY: the kernels are loaded as long as the backend exists; addresses are the caller's promise.
                unsafe { self.kernels.fold(function, arguments, element_bytes, stream) }
            }
            Step::Divide { data, count, dtype, divisor } => {
                // SAFETY: addresses are the caller's promise.
                unsafe { self.kernels.divide(dtype, data, count as u64, divisor, stream) }
            }
            Step::Multiply { source, destination, count, dtype, scalar } => {
                // SAFETY: addresses are the caller's promise.
                unsafe { self.kernels.multiply(dtype, source, destination, count as u64, scalar, stream) }
            }
            Step::Truths { data, bytes } => {
                // SAFETY: the bytes are this rank's part of the destination, or a receive's memory: the caller's promise.
                unsafe { self.kernels.make_truths(data, bytes as u64, stream) }
            }
            Step::Record(event @ StepEvent::Arrived) => record(self.event(event), stream),
            Step::Record(event @ StepEvent::Folded(_)) => record(self.event(event), &self.side),
            Step::Wait(event @ StepEvent::Arrived) => wait(self.event(event), &self.side),
            Step::Wait(event @ StepEvent::Folded(_)) => wait(self.event(event), stream),
        }
    }

    /// Returns the stream for this rank's own work, for a call on `stream`.
    fn stream_of<'a>(&'a self, role: StreamRole, stream: &'a Arc<CudaStream>) -> &'a Arc<CudaStream> {
        if role == StreamRole::Side { &self.side } else { stream }
    }

    fn event(&self, event: StepEvent) -> &CudaEvent {
        match event {
            StepEvent::Arrived => &self.arrived,
            StepEvent::Folded(half) => &self.folded[half],
        }
    }

    /// Makes the stream wait until the backend's memory is free. Work that becomes part of a graph cannot wait for work
    /// outside.
    fn take_room(&self, stream: &CudaStream) -> Result<()> {
        driver::bind(&self.gpu.context).map_err(|error| cuda_error("making a device current", error))?;
        let in_order = event::lock(&self.last).cu_stream() == stream.cu_stream() && !driver::is_per_thread(stream);
        if in_order || driver::is_capturing(stream) { Ok(()) } else { wait(&self.free, stream) }
    }

    /// Makes the stream wait for the side stream.
    fn join_side(&self, stream: &CudaStream) -> Result<()> {
        driver::bind(&self.gpu.context).map_err(|error| cuda_error("making a device current", error))?;
        record(&self.arrived, &self.side)?;
        wait(&self.arrived, stream)
    }

    /// Ensures that a wait for the stream, or for the backend's memory, includes all work of a call that was partly
    /// queued and then aborted.
    #[cold]
    fn leave(&self, stream: &Arc<CudaStream>) {
        if self.join_side(stream).is_err() && !driver::is_capturing(stream) {
            // A wait for the call's stream does not include the side stream.
            self.comm.position(&self.side).is_passed_within(&Deadline::after(BACKEND_DROP_WAIT));
        }
        if self.free_room(stream).is_err() {
            self.is_room_lost.store(true, Ordering::Release);
        }
    }

    /// Notes when the stream has finished with the backend's memory.
    fn free_room(&self, stream: &Arc<CudaStream>) -> Result<()> {
        if driver::is_capturing(stream) {
            return Ok(());
        }
        // Kept, so that no other stream gets its handle meanwhile.
        *event::lock(&self.last) = Arc::clone(stream);
        record(&self.free, stream)
    }
}

/// Records what is on a stream now. The context is current.
fn record(event: &CudaEvent, stream: &CudaStream) -> Result<()> {
    // SAFETY: event and stream are alive, and of one context.
    unsafe { result::event::record(event.cu_event(), stream.cu_stream()) }.map_err(failed("recording an event"))
}

/// Makes a stream wait for an event. The context is current.
fn wait(event: &CudaEvent, stream: &CudaStream) -> Result<()> {
    // SAFETY: event and stream are alive, and of one context.
    unsafe { result::stream::wait_event(stream.cu_stream(), event.cu_event(), CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
        .map_err(failed("making a stream wait for an event"))
}

fn failed(doing: &'static str) -> impl FnOnce(DriverError) -> crate::error::Error {
    move |error| cuda_error(doing, error)
}
