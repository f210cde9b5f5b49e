//! Makes the job of a checked call, for the plane on which its buffers are.

use std::any::Any;
use std::marker::PhantomData;

use super::Communicator;
#[cfg(feature = "cuda")]
use super::device::{DeviceCall, device_reduction};
#[cfg(feature = "cuda")]
use crate::buffer::device::{DeviceMemory, DeviceMemoryMut};
use crate::buffer::{Memory, MemoryMut};
use crate::call::{BlockLayout, Call, Collective};
#[cfg(feature = "cuda")]
use crate::device;
use crate::element::{Data, TypeTag};
use crate::error::{Error, Result};
use crate::host::plane::{self, Job, Jobs};
use crate::host::reduce::{self, Kernel};
use crate::job::Operands;
use crate::op::Reduction;

/// What a call reads: nothing, a buffer of its own, or the buffer it writes (in place).
pub(super) enum Source<M> {
    Nothing,
    Separate(M),
    InPlace,
}

/// A checked call, and the plane that runs it. Its buffers are borrowed as long as it lives.
pub(super) enum Prepared<'a> {
    Host(Job, PhantomData<&'a mut ()>),
    /// One call on several buffers.
    HostMany(Jobs, PhantomData<&'a mut ()>),
    #[cfg(feature = "cuda")]
    Device(DeviceCall<'a>),
    #[cfg(feature = "cuda")]
    DeviceMany(Vec<DeviceCall<'a>>),
}

/// A call's two buffers, both on one plane.
enum OnePlane<'a, T> {
    Host(Source<&'a [T]>, &'a mut [T]),
    #[cfg(feature = "cuda")]
    Device(Source<DeviceMemory<'a, T>>, Option<DeviceMemoryMut<'a, T>>),
}

/// Refuses buffers of two planes in one call.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "without devices there is one plane"))]
#[inline]
fn on_one_plane<'a, T>(kind: Collective, source: Source<Memory<'a, T>>, destination: Option<MemoryMut<'a, T>>) -> Result<OnePlane<'a, T>> {
    Ok(match (source, destination) {
        (Source::Nothing, Some(MemoryMut::Host(destination))) => OnePlane::Host(Source::Nothing, destination),
        (Source::InPlace, Some(MemoryMut::Host(destination))) => OnePlane::Host(Source::InPlace, destination),
        (Source::Separate(Memory::Host(source)), Some(MemoryMut::Host(destination))) => {
            OnePlane::Host(Source::Separate(source), destination)
        }
        (Source::Separate(Memory::Host(source)), None) => OnePlane::Host(Source::Separate(source), &mut []),
        (Source::Nothing | Source::InPlace, None) => OnePlane::Host(Source::Nothing, &mut []),
        #[cfg(feature = "cuda")]
        (Source::Nothing, Some(MemoryMut::Device(destination))) => OnePlane::Device(Source::Nothing, Some(destination)),
        #[cfg(feature = "cuda")]
        (Source::InPlace, Some(MemoryMut::Device(destination))) => OnePlane::Device(Source::InPlace, Some(destination)),
        #[cfg(feature = "cuda")]
        (Source::Separate(Memory::Device(source)), Some(MemoryMut::Device(destination))) => {
            OnePlane::Device(Source::Separate(source), Some(destination))
        }
        #[cfg(feature = "cuda")]
        (Source::Separate(Memory::Device(source)), None) => OnePlane::Device(Source::Separate(source), None),
        #[cfg(feature = "cuda")]
        (Source::Separate(_), Some(_)) => {
            return Err(Error::argument(kind.name(), "one buffer is on the host and the other on a device: pass both on the same side"));
        }
    })
}

impl Communicator {
    /// A call that moves elements.
    #[inline]
    pub(super) fn moving<'a, T: Data>(
        &self,
        kind: Collective,
        root: Option<u32>,
        count: usize,
        source: Source<Memory<'a, T>>,
        destination: impl Into<Option<MemoryMut<'a, T>>>,
        layout: BlockLayout,
    ) -> Result<Prepared<'a>> {
        let call = described::<T>(kind, root, count, &layout, 0)?;
        Ok(match on_one_plane(kind, source, destination.into())? {
            OnePlane::Host(source, destination) => Prepared::Host(host_job(call, source, destination, layout), PhantomData),
            #[cfg(feature = "cuda")]
            OnePlane::Device(source, destination) => Prepared::Device(device_call(call, source, destination, layout, None)),
        })
    }

    /// A call that reduces: as one that moves, with a kernel, and the contribution multiplied first where the op says so.
    #[expect(clippy::too_many_arguments, reason = "one place where all that a reduction is made of comes together")]
    #[inline]
    pub(super) fn reducing<'a, T: Data>(
        &self,
        kind: Collective,
        root: Option<u32>,
        count: usize,
        source: Source<Memory<'a, T>>,
        destination: impl Into<Option<MemoryMut<'a, T>>>,
        layout: BlockLayout,
        reduction: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        let call = described::<T>(kind, root, count, &layout, reduction.code())?;
        match on_one_plane(kind, source, destination.into())? {
            OnePlane::Host(source, destination) => {
                let kernel = Kernel::of(reduction, self.world_size())?;
                Ok(Prepared::Host(folding_job(call, source, destination, layout, kernel, reduction)?, PhantomData))
            }
            #[cfg(feature = "cuda")]
            OnePlane::Device(source, destination) => {
                let reduction = device_reduction(reduction)?;
                Ok(Prepared::Device(device_call(call, source, destination, layout, Some(reduction))))
            }
        }
    }
}

/// An element type with a name and a size; types of size 0 and huge ones are refused.
pub(super) fn element<T: Data>(call: &'static str) -> Result<(TypeTag, usize)> {
    match size_of::<T>() {
        0 => Err(Error::argument(call, "elements of size 0 carry nothing")),
        size if size > TypeTag::MAX_BYTES => {
            Err(Error::argument(call, format!("elements of {size} B are too large: at most {} B, or send their parts", TypeTag::MAX_BYTES)))
        }
        size => Ok((TypeTag::of::<T>(), size)),
    }
}

/// An empty vector with room for so many elements.
pub(super) fn room<T>(call: &str, what: &str, count: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    match room.try_reserve_exact(count) {
        Ok(()) => Ok(room),
        Err(_) => {
            let doing = format!("{call}: room for {what}, {} B", count.saturating_mul(size_of::<T>()));
            Err(Error::io(doing, std::io::Error::from(std::io::ErrorKind::OutOfMemory)))
        }
    }
}

/// What the ranks must agree on.
#[inline]
pub(super) fn described<T: Data>(kind: Collective, root: Option<u32>, count: usize, layout: &BlockLayout, op: u64) -> Result<Call> {
    let (element, _) = element::<T>(kind.name())?;
    let (op, counts_hash) = match layout {
        // The digest has the whole op.
        BlockLayout::Blocks(counts) if kind.lists_counts() => (op & 0xffff_ffff, Call::hash_counts(op, counts)),
        _ => (op, 0),
    };
    Ok(Call { kind, op, element, count: count as u64, root, counts_hash, sequence: 0 })
}

/// A job of the host plane that moves elements.
#[inline]
fn host_job<T>(call: Call, source: Source<&[T]>, destination: &mut [T], layout: BlockLayout) -> Job {
    let in_place = matches!(source, Source::InPlace);
    let destination_len = size_of_val(destination);
    let destination = destination.as_mut_ptr().cast::<u8>();
    let (source, source_len) = match source {
        Source::Nothing => (std::ptr::null(), 0),
        Source::Separate(slice) => (slice.as_ptr().cast::<u8>(), size_of_val(slice)),
        // From the same pointer: one made from a shared borrow may not be read through once the other has written.
        Source::InPlace => (destination.cast_const(), destination_len),
    };
    let memory = Operands { source, source_len, destination, destination_len };
    Job { call, memory, layout, reduction: None, element_bytes: size_of::<T>(), in_place, lists: None }
}

/// A job of the host plane that folds elements.
#[inline]
fn folding_job<T: Data>(
    call: Call,
    source: Source<&[T]>,
    destination: &mut [T],
    layout: BlockLayout,
    kernel: Kernel,
    reduction: &Reduction<T>,
) -> Result<Job> {
    let in_place = matches!(source, Source::InPlace);
    let scaled = if kernel.needs_premultiply() {
        let contribution = match &source {
            Source::Separate(slice) => slice,
            Source::InPlace | Source::Nothing => &*destination,
        };
        Some(premultiplied(call.kind, reduction, contribution)?)
    } else {
        None
    };
    let source = match &scaled {
        Some(scaled) => Source::Separate(&scaled[..]),
        None => source,
    };
    let mut job = host_job(call, source, destination, layout);
    let scaled = scaled.map(|scaled| Box::new(scaled) as Box<dyn Any + Send>);
    (job.reduction, job.in_place) = (Some(plane::Reduction::new(kernel, scaled)), in_place);
    Ok(job)
}

/// A contribution times its scalar, in memory of its own.
fn premultiplied<T: Data>(kind: Collective, reduction: &Reduction<T>, contribution: &[T]) -> Result<Vec<T>> {
    let mut scaled = room(kind.name(), "the contribution times its scalar", contribution.len())?;
    reduce::premultiply(reduction, contribution, &mut scaled);
    Ok(scaled)
}

/// A call of the device plane, without addresses yet: those come with the stream.
#[cfg(feature = "cuda")]
fn device_call<'a, T>(
    call: Call,
    source: Source<DeviceMemory<'a, T>>,
    destination: Option<DeviceMemoryMut<'a, T>>,
    layout: BlockLayout,
    reduction: Option<device::Reduction>,
) -> DeviceCall<'a> {
    let destination_len = destination.as_ref().map_or(0, |memory| memory.len() * size_of::<T>());
    let (in_place, source_len, source) = match source {
        Source::Nothing => (false, 0, None),
        Source::InPlace => (true, destination_len, None),
        Source::Separate(memory) => (false, memory.len() * size_of::<T>(), Some(memory.inner)),
    };
    let memory = Operands { source: 0, source_len, destination: 0, destination_len };
    let job = device::Job { call, memory, layout, reduction, element_bytes: size_of::<T>(), in_place, lists: None };
    DeviceCall { job, source, destination: destination.map(|memory| memory.inner), lists: None }
}
