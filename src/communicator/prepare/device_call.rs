//! A checked call on device buffers, before and after they have addresses, and the guards that are held from the
//! ordering of the buffers until the call has been queued.

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError};

use crate::call::buffer::device::{DeviceRead, DeviceWrite, Ordered, Reading};
use crate::call::element::TypeTag;
use crate::call::job::{List, Lists, Operands};
use crate::call::op;
use crate::device::{self, DeviceBackend};
use crate::error::{Error, Result};

/// A checked call on device buffers, which it borrows.
pub(in crate::communicator) struct DeviceCall<'a> {
    /// Its buffers get their addresses once the stream is known.
    pub(in crate::communicator) job: device::Job,
    pub(in crate::communicator) source: Option<&'a dyn DeviceRead>,
    pub(in crate::communicator) destination: Option<&'a mut dyn DeviceWrite>,
    /// The buffers that are lists, in place of the source and destination above.
    pub(in crate::communicator) lists: Option<Box<DeviceLists<'a>>>,
}

/// Buffers that are lists: the memory of each block, and its length in bytes.
#[derive(Default)]
pub(in crate::communicator) struct DeviceLists<'a> {
    pub(in crate::communicator) sources: Vec<(&'a dyn DeviceRead, usize)>,
    pub(in crate::communicator) destinations: Vec<(&'a mut dyn DeviceWrite, usize)>,
}

impl DeviceCall<'_> {
    /// Returns the contexts of the call's buffers, each with the buffer's name.
    pub(in crate::communicator) fn contexts(&self) -> impl Iterator<Item = (&'static str, &Arc<CudaContext>)> {
        let source = self.source.map(|source| ("the source", source.context()));
        let destination = self.destination.as_ref().map(|destination| ("the destination", destination.context()));
        let lists = self.lists.iter().flat_map(|lists| {
            let sources = lists.sources.iter().map(|(source, _)| ("a source", source.context()));
            sources.chain(lists.destinations.iter().map(|(destination, _)| ("a destination", destination.context())))
        });
        source.into_iter().chain(destination).chain(lists)
    }
}

/// Makes `stream` wait for the other uses of a call's buffers, and fills in their addresses. The call is changed in
/// place, because it is large to move.
pub(in crate::communicator) fn resolve<'s, 'a: 's>(call: &mut DeviceCall<'a>, stream: &'s CudaStream, guards: &mut Guards<'s>) {
    let DeviceCall { job, source, destination, lists } = call;
    if let Some(source) = *source {
        job.memory.source = guards.read(source, stream);
    }
    if let Some(destination) = destination.take() {
        job.memory.destination = guards.write(destination, stream);
    }
    if job.in_place {
        job.memory.source = job.memory.destination;
    }
    job.lists = lists.take().map(|lists| {
        let DeviceLists { sources, destinations } = *lists;
        // One buffer may stand for all blocks; it is then ordered only once.
        let mut last: Option<(&dyn DeviceRead, u64)> = None;
        let mut read = |block: &'s dyn DeviceRead| match last {
            Some((same, address)) if std::ptr::addr_eq(same, block) => address,
            _ => last.insert((block, guards.read(block, stream))).1,
        };
        let sources: Vec<_> = sources.into_iter().map(|(block, len)| (read(block), len)).collect();
        let destinations: Vec<_> = destinations.into_iter().map(|(block, len)| (guards.write(block, stream), len)).collect();
        let list = |blocks: Vec<(u64, usize)>| (!blocks.is_empty()).then(|| List::new(blocks.into_iter()));
        Box::new(Lists { source: list(sources), destination: list(destinations) })
    });
}

/// Orders a call on `stream` relative to other uses of its buffers. After that the call can be queued, and then the
/// guards can be released.
pub(in crate::communicator) fn ordered<'s, 'a: 's>(
    call: &mut DeviceCall<'a>,
    backend: &CudaContext,
    stream: &'s CudaStream,
    guards: &mut Guards<'s>,
) -> Result<()> {
    let name = call.job.call.kind.name();
    resolve(call, stream, guards);
    if overlap(&call.job) {
        let reason = "source and destination overlap; use the in-place form, or buffers that do not overlap";
        return Err(Error::argument(name, reason));
    }
    check_places(&call.job)?;
    guards.check(backend, stream, name)
}

/// Returns the device's form of the caller's reduction.
pub(in crate::communicator) fn device_reduction<T>(reduction: &op::Reduction<T>, element: TypeTag) -> Result<device::Reduction> {
    match &reduction.kind {
        op::ReductionKind::Builtin(op) => op.fits(element).map(|_| device::Reduction::Builtin(*op)),
        op::ReductionKind::Custom(op) => {
            op.check(element)?;
            op.device.clone().map(device::Reduction::User).ok_or_else(|| {
                let reason = "the op has a function for host memory only; give it an expression with CustomOp::with_expression";
                Error::unsupported(format!("{:?} on device memory", op.name), reason)
            })
        }
    }
}

/// Refuses an address that is misaligned for its elements: a type known only at run time does not ensure alignment.
pub(in crate::communicator) fn check_place(call: &'static str, what: &str, element: TypeTag, address: u64, bytes: usize) -> Result<()> {
    let TypeTag::Scalar(dtype) = element else { return Ok(()) };
    if bytes == 0 || address.is_multiple_of(dtype.size_bytes() as u64) {
        return Ok(());
    }
    Err(Error::argument(call, element.misplaced(what, address)))
}

/// Refuses a call whose buffers are misaligned for their elements.
pub(in crate::communicator) fn check_places(job: &device::Job) -> Result<()> {
    let Operands { source, source_len, destination, destination_len } = job.memory;
    let (call, element) = (job.call.kind.name(), job.call.element);
    let Some(lists) = job.lists.as_deref() else {
        check_place(call, "the source", element, source, source_len)?;
        return check_place(call, "the destination", element, destination, destination_len);
    };
    let listed = |list: Option<&List<u64>>, whole| list.map_or(vec![whole], |list| list.blocks().collect());
    for (start, len) in listed(lists.source.as_ref(), (source, source_len)) {
        check_place(call, "a source", element, start, len)?;
    }
    for (start, len) in listed(lists.destination.as_ref(), (destination, destination_len)) {
        check_place(call, "a destination", element, start, len)?;
    }
    Ok(())
}

/// Returns whether source and destination share bytes, unless the call is in place.
pub(in crate::communicator) fn overlap(job: &device::Job) -> bool {
    let Operands { source, source_len, destination, destination_len } = job.memory;
    let end = |start: u64, length: usize| start.saturating_add(length as u64);
    let overlap = |(source, source_len): (u64, usize), (destination, destination_len): (u64, usize)| {
        let is_apart = source >= end(destination, destination_len) || destination >= end(source, source_len);
        !(source_len == 0 || destination_len == 0 || is_apart)
    };
    let Some(lists) = job.lists.as_deref() else { return !job.in_place && overlap((source, source_len), (destination, destination_len)) };
    let pieces = |list: Option<&List<u64>>, whole| list.map_or(vec![whole], |list| list.blocks().collect());
    let sources = pieces(lists.source.as_ref(), (source, source_len));
    let destinations = pieces(lists.destination.as_ref(), (destination, destination_len));
    sources.iter().any(|source| destinations.iter().any(|destination| overlap(*source, *destination)))
}

type Outcome = std::result::Result<(), DriverError>;

/// The guards of a call's buffers. They are released once the call has been queued, and make later users of the buffers
/// wait for it.
pub(in crate::communicator) struct Guards<'s> {
    is_owned: bool,
    guards: Vec2<Ordered<'s>>,
    readings: Vec2<Reading<'s>>,
}

/// The party that can reach a call's buffers while the call runs.
#[derive(Debug, Clone, Copy)]
pub(in crate::communicator) enum Hold<'a> {
    /// The caller, who lent the buffers.
    Borrowed,
    /// Only the `Work` of the call, which owns the buffers. The flag is set as soon as a part of the call may be on the
    /// stream. If the flag is set, the call must get a `Work`, even if the call fails.
    Owned(&'a Cell<bool>),
}

impl Hold<'_> {
    /// Refuses a call that a work would own, before anything is queued. A call that is refused later must be assumed to
    /// be on the stream.
    pub(in crate::communicator) fn refuse_if_over(self, backend: &DeviceBackend, doing: &dyn Fn() -> String) -> Result<()> {
        if matches!(self, Self::Owned(_)) { backend.refuse_if_over(doing) } else { Ok(()) }
    }

    /// Records that the call has been passed to NCCL and the driver. If one of these, or an earlier step, refused the
    /// call, nothing was queued.
    pub(in crate::communicator) fn note(self, backend: &DeviceBackend, queued: &Result<()>) {
        let is_refused = matches!(queued, Err(Error::InvalidArgument { .. } | Error::Unsupported { .. }));
        if let Self::Owned(may_run) = self
            && !(is_refused && backend.comm().failure().is_none())
        {
            may_run.set(true);
        }
    }
}

/// A list that allocates only for its third item and later ones: most calls have one or two buffers.
struct Vec2<T> {
    few: [Option<T>; 2],
    more: Vec<T>,
}

impl<T> Default for Vec2<T> {
    fn default() -> Self {
        Self { few: [None, None], more: Vec::new() }
    }
}

impl<T> Vec2<T> {
    fn push(&mut self, item: T) {
        match self.few.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(item),
            None => self.more.push(item),
        }
    }
}

impl<'s> Guards<'s> {
    pub(in crate::communicator) fn new(hold: Hold<'_>) -> Self {
        Self { is_owned: matches!(hold, Hold::Owned(_)), guards: Vec2::default(), readings: Vec2::default() }
    }

    /// Makes `stream` wait for the last write of a buffer. Returns the buffer's address.
    pub(in crate::communicator) fn read(&mut self, buffer: &'s dyn DeviceRead, stream: &'s CudaStream) -> u64 {
        let (address, guard) = buffer.read(stream);
        // If the call owns its buffers, its work waits for the read.
        if let (Some(reading), false) = (Reading::of(buffer, &guard, stream), self.is_owned) {
            self.readings.push(reading);
        }
        self.guards.push(guard);
        address
    }

    /// Makes `stream` wait for the last reads and writes of a buffer. Returns the buffer's address.
    pub(in crate::communicator) fn write(&mut self, buffer: &'s mut (dyn DeviceWrite + '_), stream: &'s CudaStream) -> u64 {
        let (address, guard) = buffer.write(stream);
        self.guards.push(guard);
        address
    }

    /// Refuses a call that could not be ordered, before it is queued.
    pub(in crate::communicator) fn check(&self, backend: &CudaContext, stream: &CudaStream, call: &str) -> Result<()> {
        check_ordering(backend, stream).map_err(|error| device::cuda_error(format!("{call}: ordering its buffers"), error))
    }

    /// Releases the guards, after the call has been queued on `stream`. A failure for one buffer does not stop the
    /// others.
    pub(in crate::communicator) fn release(self, backend: &CudaContext, stream: &CudaStream) -> Outcome {
        let Self { guards, readings, .. } = self;
        drop(guards);
        let mut outcome = Ok(());
        for reading in readings.few.into_iter().flatten().chain(readings.more) {
            outcome = outcome.and(reading.hold_owner(stream));
        }
        outcome.and(check_ordering(backend, stream))
    }
}

/// Returns the error that cudarc met while it ordered buffers for `stream`; cudarc has no other way to report it. The
/// stream's `CudaContext` may differ from the device backend's.
pub(in crate::communicator) fn check_ordering(backend: &CudaContext, stream: &CudaStream) -> Outcome {
    stream.context().check_err().and(backend.check_err())
}
