//! Makes the job of a checked call, for the backend of its buffers.

use std::any::Any;
use std::marker::PhantomData;

use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut};
use crate::call::buffer::{HostMemory, HostMemoryMut, Memory, MemoryMut};
use crate::call::element::{DType, Data, Element, F8E4M3, F8E5M2, TypeTag};
use crate::call::job::Operands;
use crate::call::op::{ReduceOp, Reduction, ReductionKind};
use crate::call::{BlockLayout, Call, Collective};
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::prepare::device_call::{DeviceCall, device_reduction};
#[cfg(feature = "cuda")]
use crate::device;
use crate::error::{Error, Result};
use crate::host::backend::{self, Job, Jobs};
use crate::host::fold::Fold;
use crate::host::reduce::{self, Kernel};

/// The source of a call: nothing, a separate buffer, or the buffer that it writes (in place).
pub(in crate::communicator) enum Source<M> {
    Nothing,
    Separate(M),
    InPlace,
}

impl<M> Source<M> {
    #[inline]
    fn map<N>(self, map: impl FnOnce(M) -> N) -> Source<N> {
        match self {
            Source::Nothing => Source::Nothing,
            Source::Separate(memory) => Source::Separate(map(memory)),
            Source::InPlace => Source::InPlace,
        }
    }
}

/// A checked call, for the backend that runs it. It borrows its buffers as long as it lives.
pub(in crate::communicator) enum Prepared<'a> {
    Host(Job, PhantomData<&'a mut ()>),
    /// One call on several buffers in host memory.
    HostMany(Jobs, PhantomData<&'a mut ()>),
    #[cfg(feature = "cuda")]
    Device(DeviceCall<'a>),
    #[cfg(feature = "cuda")]
    DeviceMany(Vec<DeviceCall<'a>>),
}

impl Prepared<'_> {
    /// Returns the element type of the buffers, if this is a single call.
    pub(in crate::communicator) fn element(&self) -> Option<TypeTag> {
        match self {
            Prepared::Host(job, _) => Some(job.call.element),
            #[cfg(feature = "cuda")]
            Prepared::Device(call) => Some(call.job.call.element),
            _ => None,
        }
    }
}

/// A call's two buffers, both on one backend.
enum OneBackend<'a, T> {
    Host(Source<HostMemory<'a, T>>, HostMemoryMut<'a, T>),
    #[cfg(feature = "cuda")]
    Device(Source<DeviceMemory<'a, T>>, Option<DeviceMemoryMut<'a, T>>),
}

/// Refuses a call whose two buffers are on different backends.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "without devices there is one backend"))]
#[inline(always)]
fn on_one_backend<'a, T>(
    kind: Collective,
    source: Source<Memory<'a, T>>,
    destination: Option<MemoryMut<'a, T>>,
) -> Result<OneBackend<'a, T>> {
    Ok(match (source, destination) {
        (Source::Nothing, Some(MemoryMut::Host(destination))) => OneBackend::Host(Source::Nothing, destination),
        (Source::InPlace, Some(MemoryMut::Host(destination))) => OneBackend::Host(Source::InPlace, destination),
        (Source::Separate(Memory::Host(source)), Some(MemoryMut::Host(destination))) => {
            OneBackend::Host(Source::Separate(source), destination)
        }
        (Source::Separate(Memory::Host(source)), None) => OneBackend::Host(Source::Separate(source), HostMemoryMut::from(&mut [][..])),
        (Source::Nothing | Source::InPlace, None) => OneBackend::Host(Source::Nothing, HostMemoryMut::from(&mut [][..])),
        #[cfg(feature = "cuda")]
        (Source::Nothing, Some(MemoryMut::Device(destination))) => OneBackend::Device(Source::Nothing, Some(destination)),
        #[cfg(feature = "cuda")]
        (Source::InPlace, Some(MemoryMut::Device(destination))) => OneBackend::Device(Source::InPlace, Some(destination)),
        #[cfg(feature = "cuda")]
        (Source::Separate(Memory::Device(source)), Some(MemoryMut::Device(destination))) => {
            OneBackend::Device(Source::Separate(source), Some(destination))
        }
        #[cfg(feature = "cuda")]
        (Source::Separate(Memory::Device(source)), None) => OneBackend::Device(Source::Separate(source), None),
        #[cfg(feature = "cuda")]
        (Source::Separate(_), Some(_)) => {
            return Err(Error::argument(
                kind.name(),
                "one buffer is on the host and the other on a device: pass both on the host, or both on a device",
            ));
        }
    })
}

impl Communicator {
    /// Makes a call that moves elements. The layout is in elements.
    #[inline]
    pub(in crate::communicator) fn moving<'a, T: Data>(
        &self,
        kind: Collective,
        root: Option<u32>,
        count: usize,
        source: Source<Memory<'a, T>>,
        destination: impl Into<Option<MemoryMut<'a, T>>>,
        layout: BlockLayout,
    ) -> Result<Prepared<'a>> {
        let destination = destination.into();
        let (element, element_bytes) = agreed(kind, &source, &destination)?;
        let layout = layout.in_bytes(element_bytes);
        let call = described(kind, element, root, count, &layout, 0);
        Ok(match on_one_backend(kind, source, destination)? {
            OneBackend::Host(source, destination) => {
                Prepared::Host(host_job(call, source.map(HostMemory::parts), destination, layout, element_bytes), PhantomData)
            }
            #[cfg(feature = "cuda")]
            OneBackend::Device(source, destination) => {
                Prepared::Device(device_call(call, source, destination, layout, element_bytes, None))
            }
        })
    }

    /// Makes a call that reduces: like `moving`, with a kernel. If the op requires it, the contribution is multiplied
    /// first. The layout is in elements.
    #[expect(clippy::too_many_arguments, reason = "all parts of a reduction come together here")]
    #[inline]
    pub(in crate::communicator) fn reducing<'a, T: Data>(
        &self,
        kind: Collective,
        root: Option<u32>,
        count: usize,
        source: Source<Memory<'a, T>>,
        destination: impl Into<Option<MemoryMut<'a, T>>>,
        layout: BlockLayout,
        reduction: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        let destination = destination.into();
        let (element, element_bytes) = agreed(kind, &source, &destination)?;
        let layout = layout.in_bytes(element_bytes);
        let call = described(kind, element, root, count, &layout, reduction.code());
        match on_one_backend(kind, source, destination)? {
            OneBackend::Host(source, destination) => {
                let kernel = Kernel::of(reduction, element, self.world_size())?;
                Ok(Prepared::Host(folding_job(call, source, destination, layout, kernel, reduction)?, PhantomData))
            }
            #[cfg(feature = "cuda")]
            OneBackend::Device(source, destination) => {
                let reduction = device_reduction(reduction, element)?;
                Ok(Prepared::Device(device_call(call, source, destination, layout, element_bytes, Some(reduction))))
            }
        }
    }
}

/// Returns the tag and the size of an element type. Types of size 0 and types that are too large are refused.
#[inline(always)]
pub(in crate::communicator) fn element<T: Data>(call: &'static str) -> Result<(TypeTag, usize)> {
    match size_of::<T>() {
        0 => Err(Error::argument(call, "elements of size 0 cannot be sent")),
        size if size > TypeTag::MAX_BYTES => Err(Error::argument(
            call,
            format!("elements of {size} B are too large: the limit is {} B; use smaller elements", TypeTag::MAX_BYTES),
        )),
        size => Ok((TypeTag::of::<T>(), size)),
    }
}

/// Returns the tag and the size of a buffer's elements, unless the buffer is misaligned.
#[inline]
pub(in crate::communicator) fn held<T: Data>(
    call: &'static str,
    what: &str,
    element: TypeTag,
    misplaced_at: Option<u64>,
) -> Result<(TypeTag, usize)> {
    let known = self::element::<T>(call)?;
    match misplaced_at {
        None if T::KNOWN_AT_RUN_TIME => Ok((element, element.size_bytes())),
        None => Ok(known),
        Some(address) => Err(Error::argument(call, element.misplaced(what, address))),
    }
}

/// Returns the tag and the size of the elements in both buffers of a call.
#[inline(always)]
pub(in crate::communicator) fn agreed<T: Data>(
    kind: Collective,
    source: &Source<Memory<'_, T>>,
    destination: &Option<MemoryMut<'_, T>>,
) -> Result<(TypeTag, usize)> {
    if T::KNOWN_AT_RUN_TIME { agreed_at_run_time(kind, source, destination) } else { element::<T>(kind.name()) }
}

/// Does the same as [`agreed`], for a type that is known only at run time.
fn agreed_at_run_time<T: Data>(
    kind: Collective,
    source: &Source<Memory<'_, T>>,
    destination: &Option<MemoryMut<'_, T>>,
) -> Result<(TypeTag, usize)> {
    let call = kind.name();
    let source = match source {
        Source::Separate(source) => Some(held::<T>(call, "the source", source.element(), source.misplaced())?),
        Source::Nothing | Source::InPlace => None,
    };
    let destination = match destination {
        Some(destination) => Some(held::<T>(call, "the destination", destination.element(), destination.misplaced())?),
        None => None,
    };
    match (source, destination) {
        (Some((source, _)), Some((destination, _))) if source != destination => Err(Error::argument(
            call,
            format!("the source holds {source}, but the destination holds {destination}: pass two buffers of one type"),
        )),
        (source, destination) => source.or(destination).map_or_else(|| element::<T>(call), Ok),
    }
}

/// Returns an empty vector with capacity for `count` elements.
pub(in crate::communicator) fn room<T>(call: &str, what: &str, count: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    match room.try_reserve_exact(count) {
        Ok(()) => Ok(room),
        Err(_) => {
            let doing = format!("{call}: allocating memory for {what}, {} B", count.saturating_mul(size_of::<T>()));
            Err(Error::io(doing, std::io::Error::from(std::io::ErrorKind::OutOfMemory)))
        }
    }
}

/// Makes the part of a call that the ranks must agree on.
#[inline(always)]
pub(in crate::communicator) fn described(
    kind: Collective,
    element: TypeTag,
    root: Option<u32>,
    count: usize,
    layout: &BlockLayout,
    op: u64,
) -> Call {
    let (op, counts_hash) = match layout {
        // The digest covers the whole op.
        BlockLayout::Blocks(counts) if kind.lists_counts() => (op & 0xffff_ffff, Call::hash_counts(op, counts)),
        _ => (op, 0),
    };
    Call { kind, op, element, count: count as u64, root, counts_hash, sequence: 0 }
}

/// Makes a job of the host backend that moves elements.
#[inline(always)]
fn host_job<T: Data>(
    call: Call,
    source: Source<(*const u8, usize)>,
    mut destination: HostMemoryMut<'_, T>,
    layout: BlockLayout,
    element_bytes: usize,
) -> Job {
    let in_place = matches!(source, Source::InPlace);
    let (destination, destination_len) = destination.parts();
    let (source, source_len) = match source {
        Source::Nothing => (std::ptr::null(), 0),
        Source::Separate(parts) => parts,
        // Both come from the same pointer: a pointer made from a shared borrow must not be read after the other has
        // written.
        Source::InPlace => (destination.cast_const(), destination_len),
    };
    let memory = Operands { source, source_len, destination, destination_len };
    Job { call, memory, layout, reduction: None, element_bytes, in_place, lists: None }
}

/// Makes a job of the host backend that folds elements.
#[inline(always)]
fn folding_job<T: Data>(
    call: Call,
    source: Source<HostMemory<'_, T>>,
    destination: HostMemoryMut<'_, T>,
    layout: BlockLayout,
    kernel: Kernel,
    reduction: &Reduction<T>,
) -> Result<Job> {
    let in_place = matches!(source, Source::InPlace);
    let element_bytes = kernel.element_bytes();
    let scaled = match reduction.kind {
        ReductionKind::Builtin(op) if kernel.needs_premultiply() => {
            let contribution = match &source {
                Source::Separate(memory) => *memory,
                Source::InPlace | Source::Nothing => destination.read(),
            };
            Some(premultiplied(call.kind, op, contribution)?)
        }
        _ => None,
    };
    let source = match &scaled {
        Some((_, parts)) => Source::Separate(*parts),
        None => source.map(HostMemory::parts),
    };
    let mut job = host_job(call, source, destination, layout, element_bytes);
    (job.reduction, job.in_place) = (Some(backend::Reduction::new(kernel, scaled.map(|(scaled, _)| scaled))), in_place);
    Ok(job)
}

/// The owner of a contribution multiplied by its scalar, and the contribution's address and length.
type Scaled = (Box<dyn Any + Send>, (*const u8, usize));

/// Multiplies a contribution of floats by its scalar, into separate memory.
fn premultiplied<T: Data>(kind: Collective, op: ReduceOp, contribution: HostMemory<'_, T>) -> Result<Scaled> {
    match contribution.element() {
        TypeTag::Scalar(DType::F64) => premultiplied_as::<f64, T>(kind, op, contribution),
        TypeTag::Scalar(DType::F16) => premultiplied_as::<f16, T>(kind, op, contribution),
        TypeTag::Scalar(DType::Bf16) => premultiplied_as::<bf16, T>(kind, op, contribution),
        TypeTag::Scalar(DType::F8E4M3) => premultiplied_as::<F8E4M3, T>(kind, op, contribution),
        TypeTag::Scalar(DType::F8E5M2) => premultiplied_as::<F8E5M2, T>(kind, op, contribution),
        _ => premultiplied_as::<f32, T>(kind, op, contribution),
    }
}

fn premultiplied_as<E: Element, T: Data>(kind: Collective, op: ReduceOp, contribution: HostMemory<'_, T>) -> Result<Scaled> {
    let elements = contribution.elements::<E>().ok_or_else(|| Error::unsupported(op.name(), "the elements are not floats"))?;
    let mut scaled: Vec<E> = room(kind.name(), "the contribution times its scalar", elements.len())?;
    reduce::premultiply(&op.into(), elements, &mut scaled);
    let parts = (scaled.as_ptr().cast(), size_of_val(&scaled[..]));
    Ok((Box::new(scaled), parts))
}

/// Makes a call of the device backend. Its addresses are filled in once the stream is known.
#[cfg(feature = "cuda")]
fn device_call<'a, T: Data>(
    call: Call,
    source: Source<DeviceMemory<'a, T>>,
    destination: Option<DeviceMemoryMut<'a, T>>,
    layout: BlockLayout,
    element_bytes: usize,
    reduction: Option<device::Reduction>,
) -> DeviceCall<'a> {
    let destination_len = destination.as_ref().map_or(0, DeviceMemoryMut::bytes);
    let (in_place, source_len, source) = match source {
        Source::Nothing => (false, 0, None),
        Source::InPlace => (true, destination_len, None),
        Source::Separate(memory) => (false, memory.bytes(), Some(memory.inner)),
    };
    let memory = Operands { source: 0, source_len, destination: 0, destination_len };
    let job = device::Job { call, memory, layout, reduction, element_bytes, in_place, lists: None };
    DeviceCall { job, source, destination: destination.map(|memory| memory.inner), lists: None }
}
