//! Calls that put work on streams: one at a time, or several at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::NcclComm;
use super::lock::lock_within;
use super::state::{Inner, settle};
use crate::deadline::Deadline;
use crate::device::nccl::{Raw, Refusal};
use crate::error::{Error, Result};

/// One communicator's share of a group: the stream that all its calls use, and what makes them.
pub(crate) type Part<'a> = (&'a NcclComm, &'a Arc<CudaStream>, &'a mut dyn FnMut(&Raw<'_>) -> std::result::Result<(), Refusal>);

impl NcclComm {
    /// Puts work on the stream. Returns when it is there, which takes other ranks only where NCCL has to connect to them first.
    ///
    /// The device may take `timeout` for it, and so may NCCL before that, and other threads' calls; what takes longer ends the communicator.
    /// Streams of the kind "the calling thread's own" are not watched.
    ///
    /// # Safety
    ///
    /// `work` uses no stream but this one, and keeps to what [`Raw`] asks.
    #[inline]
    pub(crate) unsafe fn enqueue(
        &self,
        doing: &dyn Fn() -> String,
        stream: &Arc<CudaStream>,
        timeout: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        let inner = self.inner();
        let mut last = inner.enter(doing, timeout)?;
        if inner.inside(doing, timeout, work)? {
            let settled = settle(&[inner], doing, &Deadline::after(timeout), Inner::is_over);
            // Who revokes it means to go on with what comes of it.
            settled.map_err(|(_, error)| if inner.is_revoked() { error } else { inner.end(error, doing) })?;
        }
        inner.note(&mut last, stream, timeout);
        Ok(())
    }
}

/// Puts the work of several calls, of one or several communicators, on their streams together.
///
/// What fails ends all of the communicators: some of the work may be on its way.
///
/// # Safety
///
/// Each part's work uses its stream alone, and keeps to what [`Raw`] asks. What the parts make become one group of NCCL's, and must make sense as one.
pub(crate) unsafe fn grouped(parts: &mut [Part<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    match parts {
        [] => Ok(()),
        [(comm, stream, work)] => {
            // SAFETY: the part's work uses this stream alone and keeps to what `Raw` asks: this function's contract.
            unsafe { comm.enqueue(doing, stream, timeout, |raw| group(raw, || work(raw))) }
        }
        parts => several(parts, doing, timeout),
    }
}

/// Runs `work` as one group. The group is ended whatever happens.
fn group(raw: &Raw<'_>, work: impl FnOnce() -> std::result::Result<(), Refusal>) -> std::result::Result<(), Refusal> {
    raw.group_start()?;
    let open = Open(raw);
    let made = work();
    std::mem::forget(open);
    let ended = raw.group_end();
    made.and(ended).map_err(Refusal::in_group)
}

/// A group that is open, and is ended when `work` panics.
struct Open<'a>(&'a Raw<'a>);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        drop(self.0.group_end());
    }
}

fn several(parts: &mut [Part<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    let mut inners: Vec<Arc<Inner>> = parts.iter().map(|(comm, ..)| Arc::clone(comm.inner())).collect();
    inners.sort_unstable_by_key(|inner| inner.number);
    inners.dedup_by_key(|inner| inner.number);
    if inners.iter().any(|inner| !std::ptr::eq(inner.library, inners[0].library)) {
        return Err(Error::argument("group", "the communicators belong to two different NCCL libraries, and a group is made by one"));
    }
    let mut gates = Vec::with_capacity(inners.len());
    for inner in &inners {
        gates.push(inner.enter(doing, timeout)?);
    }
    let everyone: Vec<&Arc<Inner>> = inners.iter().collect();
    let made = launch(parts, &everyone, doing, timeout);
    let settled = made.and_then(|()| settle(&everyone, doing, &Deadline::after(timeout), Inner::is_over));
    if let Err((culprit, error)) = settled {
        if everyone[culprit].is_revoked() {
            return Err(error);
        }
        for inner in everyone.iter().filter(|inner| !Arc::ptr_eq(inner, everyone[culprit])) {
            inner.fail(error.clone(), Duration::ZERO);
        }
        return Err(everyone[culprit].end(error, doing));
    }
    for (comm, stream, _) in parts.iter() {
        let place = inners.iter().position(|inner| Arc::ptr_eq(inner, comm.inner()));
        if let Some(gate) = place.and_then(|place| gates.get_mut(place)) {
            comm.inner().note(gate, stream, timeout);
        }
    }
    Ok(())
}

/// Makes the calls of all parts, with the locks of all their devices. An error comes with the place of the communicator that it is about.
fn launch(
    parts: &mut [Part<'_>],
    inners: &[&Arc<Inner>],
    doing: &dyn Fn() -> String,
    timeout: Duration,
) -> std::result::Result<(), (usize, Error)> {
    let mut devices: Vec<_> = inners.iter().map(|inner| inner.device).collect();
    devices.sort_unstable_by_key(|device| device.number);
    devices.dedup_by_key(|device| device.number);
    let mut locks = Vec::with_capacity(devices.len());
    for device in devices {
        let late = || (0, Error::Timeout { doing: doing(), elapsed: timeout, missing: Vec::new(), arrived: Vec::new() });
        locks.push(lock_within(&device.lock, timeout).ok_or_else(late)?);
    }
    if let Some(index) = inners.iter().position(|inner| inner.is_over()) {
        return Err((index, inners[index].refuse(doing)));
    }
    let mut culprit = 0;
    let mut all = parts.iter_mut();
    let first = Raw::new(inners[0].library, inners[0].handle.load(Ordering::Acquire));
    let made = group(&first, || {
        all.try_for_each(|(comm, _, work)| {
            let inner = comm.inner();
            culprit = inners.iter().position(|known| Arc::ptr_eq(known, inner)).unwrap_or(0);
            inner.call(inner.handle.load(Ordering::Acquire), |raw| work(raw)).map(|_| ())
        })
    });
    made.map_err(|refusal| (culprit, refusal.into_error(doing())))
}
