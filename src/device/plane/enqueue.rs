//! Puts calls on streams: one by itself, or several together.

#![expect(unsafe_code, reason = "calls take addresses of device memory")]

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::run::{self, Running};
use super::{DevicePlane, GroupPart};
use crate::Result;
use crate::device::plan::{self, Job, Plan};

impl DevicePlane {
    /// Puts a collective on a stream.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported` where the call cannot be done; nothing was queued then, and the other ranks say the same. Any
    /// other error ends the communicator.
    ///
    /// # Safety
    ///
    /// - The addresses of the job are memory of this device, as long as their lengths say, until the stream has passed the call; the two
    ///   buffers are one, as the job says, or apart; nobody else writes them meanwhile, nor reads the destination.
    /// - What is read there are elements of the call's type.
    /// - All ranks make the same call as their next one: with the same op, type, root and lengths. NCCL compares nothing and writes what
    ///   it is sent. (Truth values need no promise: what comes as some is made some.)
    #[inline]
    pub(crate) unsafe fn enqueue(&self, job: &Job, stream: &Arc<CudaStream>, timeout: Duration) -> Result<()> {
        // SAFETY: this function's own contract.
        let queued = unsafe { self.enqueue_uncounted(job, stream, timeout) };
        self.count(1, &queued);
        queued
    }

    /// # Safety
    ///
    /// The contract of [`DevicePlane::enqueue`].
    #[inline]
    unsafe fn enqueue_uncounted(&self, job: &Job, stream: &Arc<CudaStream>, timeout: Duration) -> Result<()> {
        self.check_stream(stream)?;
        let plan = self.plan(job, stream)?;
        self.comm.label(&job.call);
        let doing = || job.call.to_string();
        match plan {
            Plan::Nothing => self.refuse_if_over(&doing),
            Plan::One(transfer) => {
                let queue = stream.cu_stream();
                // SAFETY: the transfer uses this stream alone; its addresses and lengths are the job's, whose memory is there until the stream has
                // passed the call (this function's contract).
                unsafe { self.comm.enqueue(&doing, stream, timeout, |raw| self.issue(raw, &transfer, queue)) }
            }
            plan => {
                let running = Running::new(self, plan, stream);
                // SAFETY: the steps use the job's memory, which is there until the stream has passed the call (this function's contract), and the
                // plane's room, which lives as long as the plane and is taken and freed in the order of streams.
                unsafe { run::together(&mut [running], &doing, timeout) }
            }
        }
    }

    /// Puts several collectives and messages of one or several communicators on their streams together: what NCCL does in one call each
    /// becomes one group; the rest follows, in order.
    ///
    /// # Errors
    ///
    /// Those of [`DevicePlane::enqueue`].
    ///
    /// # Safety
    ///
    /// For every job what [`DevicePlane::enqueue`] asks. For every message: its address is memory of this device, as long as it says, until
    /// the stream has passed the group; nobody else writes it meanwhile, nor reads what is received; what is sent are elements of its type; and
    /// the other end names the same type and length. No call of the group uses what another one writes.
    pub(crate) unsafe fn enqueue_group(parts: &[GroupPart<'_>], timeout: Duration) -> Result<()> {
        // SAFETY: this function's own contract.
        let queued = unsafe { Self::enqueue_group_uncounted(parts, timeout) };
        parts.iter().for_each(|(plane, jobs, ..)| plane.count(jobs.len(), &queued));
        queued
    }

    /// # Safety
    ///
    /// The contract of [`DevicePlane::enqueue_group`].
    unsafe fn enqueue_group_uncounted(parts: &[GroupPart<'_>], timeout: Duration) -> Result<()> {
        let mut all = Vec::with_capacity(parts.len());
        for (plane, jobs, messages, stream) in parts {
            plane.check_stream(stream)?;
            let (mut transfers, mut after) = plan::nccl::messages(messages, plane.ranks.me)?;
            let mut rest = Vec::new();
            for job in *jobs {
                plane.comm.label(&job.call);
                match plane.plan(job, stream)? {
                    Plan::Nothing => {}
                    Plan::One(transfer) => transfers.push(transfer),
                    Plan::Group { transfers: more, after: work } => {
                        transfers.extend(more);
                        after.extend(work);
                    }
                    Plan::Steps(steps) => rest.extend(steps),
                }
            }
            all.push(Running::of_steps(plane, transfers, after, rest, stream));
        }
        let doing = || {
            let (jobs, messages) = parts.iter().fold((0, 0), |(jobs, messages), part| (jobs + part.1.len(), messages + part.2.len()));
            format!("a group of {jobs} collectives and {messages} messages")
        };
        for (plane, ..) in parts {
            plane.refuse_if_over(&doing)?;
        }
        // SAFETY: the steps read and write the memory of the jobs and messages, which is there long enough and used by no other call of the group
        // (this function's contract), and the planes' own room.
        unsafe { run::together(&mut all, &doing, timeout) }
    }
}
