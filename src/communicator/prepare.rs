//! Every argument of a collective is checked here, once, and nowhere else.

use std::marker::PhantomData;

use super::Communicator;
use super::arguments::{Source, element, room};
#[cfg(feature = "cuda")]
use super::device::{self, DeviceCall};
#[cfg(feature = "cuda")]
use crate::buffer::device::{DeviceMemory, DeviceMemoryMut};
use crate::buffer::{Memory, MemoryMut};
use crate::call::{BlockLayout, Call, Kind};
use crate::element::Data;
use crate::error::{Error, Result};
use crate::host::plane::{Job, Operands};
use crate::host::reduce::{self, Kernel};
use crate::op::Reduction;

/// A checked call, and the plane that runs it. Its buffers are borrowed as long as it lives.
pub(super) enum Prepared<'a> {
    Host(Job, PhantomData<&'a mut ()>),
    #[cfg(feature = "cuda")]
    Device(DeviceCall<'a>),
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
fn on_one_plane<'a, T>(kind: Kind, source: Source<Memory<'a, T>>, destination: Option<MemoryMut<'a, T>>) -> Result<OnePlane<'a, T>> {
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
    /// A root that exists.
    pub(super) fn checked_root(&self, kind: Kind, root: usize) -> Result<Option<u32>> {
        if root < self.world_size() {
            return Ok(Some(root as u32));
        }
        Err(Error::argument(kind.name(), format!("root {root} does not exist: the ranks are 0 to {}", self.world_size() - 1)))
    }

    /// The block length where `whole` elements are shared out equally between the ranks.
    pub(super) fn block(&self, kind: Kind, what: &str, whole: usize) -> Result<usize> {
        let size = self.world_size();
        if whole.is_multiple_of(size) {
            return Ok(whole / size);
        }
        Err(Error::argument(kind.name(), format!("{what} has {whole} elements, which is not a multiple of the world size {size}")))
    }

    /// Refuses two lengths that should be equal.
    pub(super) fn equal(kind: Kind, what: &str, length: usize, expected: usize, why: &str) -> Result<()> {
        if length == expected {
            return Ok(());
        }
        Err(Error::argument(kind.name(), format!("{what} has {length} elements, and {expected} are needed: {why}")))
    }

    /// Per-rank counts that cover a buffer exactly.
    pub(super) fn checked_counts(&self, kind: Kind, what: &str, counts: &[usize], length: usize) -> Result<()> {
        if counts.len() != self.world_size() {
            let reason = format!("{} counts were given for {what}, and the world size is {}", counts.len(), self.world_size());
            return Err(Error::argument(kind.name(), reason));
        }
        let sum = counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
        match sum {
            Some(sum) if sum == length => Ok(()),
            Some(sum) => Err(Error::argument(kind.name(), format!("{what} has {length} elements, but its counts add up to {sum}"))),
            None => Err(Error::argument(kind.name(), format!("the counts of {what} add up to more than memory can hold"))),
        }
    }

    /// A call that moves elements.
    #[inline]
    pub(super) fn moving<'a, T: Data>(
        &self,
        kind: Kind,
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
            OnePlane::Device(source, destination) => Prepared::Device(DeviceCall::new(call, source, destination, layout, None)),
        })
    }

    /// A call that reduces: as one that moves, with a kernel, and the contribution multiplied first where the op says so.
    #[expect(clippy::too_many_arguments, reason = "one place where all that a reduction is made of comes together")]
    #[inline]
    pub(super) fn reducing<'a, T: Data>(
        &self,
        kind: Kind,
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
                let reduction = device::reduction(reduction)?;
                Ok(Prepared::Device(DeviceCall::new(call, source, destination, layout, Some(reduction))))
            }
        }
    }
}

/// What the ranks must agree on.
#[inline]
fn described<T: Data>(kind: Kind, root: Option<u32>, count: usize, layout: &BlockLayout, op: u64) -> Result<Call> {
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
    Job { call, memory, layout, kernel: None, element_bytes: size_of::<T>(), in_place, scaled: None }
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
    job.kernel = Some(kernel);
    job.in_place = in_place;
    job.scaled = scaled.map(|scaled| Box::new(scaled) as Box<dyn std::any::Any + Send>);
    Ok(job)
}

/// A contribution times its scalar, in memory of its own.
fn premultiplied<T: Data>(kind: Kind, reduction: &Reduction<T>, contribution: &[T]) -> Result<Vec<T>> {
    let mut scaled = room(kind.name(), "the contribution times its scalar", contribution.len())?;
    reduce::premultiply(reduction, contribution, &mut scaled);
    Ok(scaled)
}
