//! Typed collectives of an `NcclCommunicator`. Their lengths are checked in the same way as those of raw calls.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::messages::HOST_MEMORY;
use crate::call::Collective;
use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut};
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::element::Data;
use crate::call::op::Reduction;
use crate::communicator::prepare::device_call::{DeviceCall, device_reduction};
use crate::communicator::prepare::prepared::{Source, agreed};
use crate::device::{Arguments, NcclCommunicator};
use crate::error::{Error, Result};

/// Returns the device memory that a call reads.
fn readable<T>(kind: Collective, memory: Memory<'_, T>) -> Result<DeviceMemory<'_, T>> {
    match memory {
        Memory::Device(memory) => Ok(memory),
        Memory::Host(_) => Err(Error::argument(kind.name(), format!("the source {HOST_MEMORY}"))),
    }
}

/// Returns the device memory that a call writes.
fn writable<T>(kind: Collective, memory: MemoryMut<'_, T>) -> Result<DeviceMemoryMut<'_, T>> {
    match memory {
        MemoryMut::Device(memory) => Ok(memory),
        MemoryMut::Host(_) => Err(Error::argument(kind.name(), format!("the destination {HOST_MEMORY}"))),
    }
}

/// A collective's kind, and its root if it has one.
type Rooted = (Collective, Option<usize>);

impl NcclCommunicator {
    /// Checks a collective, and queues it.
    fn collective<'a, T: Data>(
        &self,
        (kind, root): Rooted,
        source: Source<Memory<'a, T>>,
        destination: Option<MemoryMut<'a, T>>,
        reduction: Option<&Reduction<T>>,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        let (element, _) = agreed(kind, &source, &destination)?;
        let in_place = matches!(source, Source::InPlace);
        let source = match source {
            Source::Separate(memory) => Some(readable(kind, memory)?),
            Source::Nothing | Source::InPlace => None,
        };
        let destination = destination.map(|memory| writable(kind, memory)).transpose()?;
        let code = reduction.map_or(0, Reduction::code);
        let arguments = Arguments {
            kind,
            root,
            reduction: (code, reduction.map(|reduction| device_reduction(reduction, element)).transpose()?),
            element,
            source: source.map(|memory| memory.len()),
            destination: destination.as_ref().map(DeviceMemoryMut::len),
            in_place,
        };
        let job = arguments.job(self.world_size())?;
        let (source, destination) = (source.map(|memory| memory.inner), destination.map(|memory| memory.inner));
        self.queue(&mut DeviceCall { job, source, destination, lists: None }, stream)
    }

    /// Refuses a buffer unless the root passes it and the other ranks do not.
    fn only_at_root(&self, kind: Collective, what: &str, is_given: bool, root: usize) -> Result<()> {
        if root >= self.world_size() || is_given == (self.rank() == root) {
            return Ok(());
        }
        Err(Error::argument(
            kind.name(),
            format!("the root, rank {root}, must pass {what}, and the other ranks must pass None; this is rank {}", self.rank()),
        ))
    }
}

/// # Typed collectives
///
/// These calls take device buffers: cudarc's slices and views, [`NcclBuffer`](crate::nccl::NcclBuffer),
/// [`RawDeviceSlice`](crate::interop::RawDeviceSlice), and memory of other crates. A method queues its call on `stream`
/// and returns. On the stream, the call waits for earlier uses of its buffers on other streams. Later uses of a buffer,
/// and its freeing, wait for the call, so you need no synchronization of your own. Ops and types are the same as for a
/// [`Communicator`](crate::Communicator), including custom ones.
///
/// All ranks must make the same calls in the same order. Before anything is queued, the ranks compare the op, the
/// element type, the count, the root, and the settings that decide how calls are cut into pieces (see
/// [`Config::check_device_calls`](crate::Config::check_device_calls)). If something differs, every rank gets a
/// `Mismatch` that names two calls, no buffer is touched, and the communicator stays usable.
///
/// The comparison costs one all-gather of 64 B over NCCL, and a wait on the host until all ranks have made the call and
/// their devices have finished the communicator's earlier calls.
/// [`CheckDeviceCalls::unchecked_after`](crate::nccl::CheckDeviceCalls::unchecked_after) avoids this cost, if you
/// promise that all ranks make the same calls with the same settings. A call that is not compared is like a raw call,
/// except that it is ordered relative to other uses of its buffers. A compared call cannot be captured into a graph; an
/// uncompared call or a raw call can.
///
/// Threads that share the communicator compare and queue their calls one after the other.
///
/// Errors common to all typed collectives:
/// - `InvalidArgument` for wrong arguments, host memory, and memory or a stream of another device. Nothing was queued
///   in this case.
/// - `Unsupported` for an op that the type does not have, and for a compared call in a capture.
/// - `Mismatch` if the ranks' calls differ.
/// - `Timeout` if ranks do not make the call. A timeout ends the communicator.
/// - `Nccl`, `Cuda`.
/// - `Poisoned` after an earlier error that ended the communicator.
impl NcclCommunicator {
    /// Reduces the buffers of all ranks element by element, in place. Every rank gets the same result.
    ///
    /// ```no_run
    /// # use collectives::{ReduceOp, nccl::NcclCommunicator};
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, gradient: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// comm.all_reduce(gradient, ReduceOp::Avg, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    #[doc(alias = "ncclAllReduce")]
    pub fn all_reduce<B>(&self, buffer: &mut B, op: impl Into<Reduction<B::Element>>, stream: &Arc<CudaStream>) -> Result<()>
    where
        B: BufferMut + ?Sized,
    {
        self.collective((Collective::AllReduce, None), Source::InPlace, Some(buffer.memory_mut()), Some(&op.into()), stream)
    }

    /// Reduces like [`all_reduce`](Self::all_reduce), from one buffer into another of the same length.
    ///
    /// ```no_run
    /// # use collectives::{ReduceOp, nccl::NcclCommunicator};
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, mine: &CudaSlice<i32>, sum: &mut CudaSlice<i32>) -> collectives::Result<()> {
    /// comm.all_reduce_into(mine, sum, ReduceOp::Sum, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    pub fn all_reduce_into<S, D>(
        &self,
        source: &S,
        destination: &mut D,
        op: impl Into<Reduction<S::Element>>,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let (source, destination) = (Source::Separate(source.memory()), Some(destination.memory_mut()));
        self.collective((Collective::AllReduce, None), source, destination, Some(&op.into()), stream)
    }

    /// Reduces the buffers of all ranks, and writes the result into the root's buffer. The other ranks' buffers do not
    /// change.
    ///
    /// ```no_run
    /// # use collectives::{ReduceOp, nccl::NcclCommunicator};
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, loss: &mut CudaSlice<f64>) -> collectives::Result<()> {
    /// comm.reduce(loss, 0, ReduceOp::Sum, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    #[doc(alias = "ncclReduce")]
    pub fn reduce<B>(&self, buffer: &mut B, root: usize, op: impl Into<Reduction<B::Element>>, stream: &Arc<CudaStream>) -> Result<()>
    where
        B: BufferMut + ?Sized,
    {
        self.collective((Collective::Reduce, Some(root)), Source::InPlace, Some(buffer.memory_mut()), Some(&op.into()), stream)
    }

    /// Reduces like [`reduce`](Self::reduce), from one buffer into another. The root passes `Some(destination)`, which
    /// must be as long as the source. The other ranks pass `None`.
    ///
    /// ```no_run
    /// # use collectives::{ReduceOp, nccl::NcclCommunicator};
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, mine: &CudaSlice<u8>, most: &mut CudaSlice<u8>) -> collectives::Result<()> {
    /// let most = (comm.rank() == 0).then_some(most);
    /// comm.reduce_into(mine, most, 0, ReduceOp::Max, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    pub fn reduce_into<S, D>(
        &self,
        source: &S,
        destination: Option<&mut D>,
        root: usize,
        op: impl Into<Reduction<S::Element>>,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.only_at_root(Collective::Reduce, "a destination", destination.is_some(), root)?;
        let destination = destination.map(|destination| destination.memory_mut());
        self.collective((Collective::Reduce, Some(root)), Source::Separate(source.memory()), destination, Some(&op.into()), stream)
    }

    /// Copies the root's buffer to every rank.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, weights: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// comm.broadcast(weights, 0, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast<B: BufferMut + ?Sized>(&self, buffer: &mut B, root: usize, stream: &Arc<CudaStream>) -> Result<()> {
        let source = if self.rank() == root { Source::InPlace } else { Source::Nothing };
        self.collective((Collective::Broadcast, Some(root)), source, Some(buffer.memory_mut()), None, stream)
    }

    /// Copies like [`broadcast`](Self::broadcast), from the root's source into the destination of every rank, including
    /// the root. The root passes `Some(source)`. The other ranks pass `None`.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, weights: &CudaSlice<f32>, copy: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// let weights = (comm.rank() == 0).then_some(weights);
    /// comm.broadcast_into(weights, copy, 0, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    pub fn broadcast_into<S, D>(&self, source: Option<&S>, destination: &mut D, root: usize, stream: &Arc<CudaStream>) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.only_at_root(Collective::Broadcast, "a source", source.is_some(), root)?;
        let source = source.map_or(Source::Nothing, |source| Source::Separate(source.memory()));
        self.collective((Collective::Broadcast, Some(root)), source, Some(destination.memory_mut()), None, stream)
    }

    /// Gathers every rank's block on every rank, in place. In each buffer, a rank's own block begins at the element
    /// with the index `rank × length / world size`.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, shards: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// comm.all_gather(shards, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    #[doc(alias = "ncclAllGather")]
    pub fn all_gather<B: BufferMut + ?Sized>(&self, buffer: &mut B, stream: &Arc<CudaStream>) -> Result<()> {
        self.collective((Collective::AllGather, None), Source::InPlace, Some(buffer.memory_mut()), None, stream)
    }

    /// Gathers like [`all_gather`](Self::all_gather), from one buffer into another. The length of the destination must
    /// be the length of the source times the world size.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, shard: &CudaSlice<f32>, whole: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// comm.all_gather_into(shard, whole, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    pub fn all_gather_into<S, D>(&self, source: &S, destination: &mut D, stream: &Arc<CudaStream>) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let (source, destination) = (Source::Separate(source.memory()), Some(destination.memory_mut()));
        self.collective((Collective::AllGather, None), source, destination, None, stream)
    }

    /// Reduces the buffers of all ranks, and writes each rank's own block of the result into that rank's buffer. The
    /// buffer's other blocks then have unspecified contents.
    ///
    /// ```no_run
    /// # use collectives::{ReduceOp, nccl::NcclCommunicator};
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, gradient: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// comm.reduce_scatter(gradient, ReduceOp::Avg, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    #[doc(alias = "ncclReduceScatter")]
    pub fn reduce_scatter<B>(&self, buffer: &mut B, op: impl Into<Reduction<B::Element>>, stream: &Arc<CudaStream>) -> Result<()>
    where
        B: BufferMut + ?Sized,
    {
        self.collective((Collective::ReduceScatter, None), Source::InPlace, Some(buffer.memory_mut()), Some(&op.into()), stream)
    }

    /// Reduces like [`reduce_scatter`](Self::reduce_scatter), from one buffer into another. The length of the source
    /// must be the length of the destination times the world size.
    ///
    /// ```no_run
    /// # use collectives::{ReduceOp, nccl::NcclCommunicator};
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, gradient: &CudaSlice<f32>, shard: &mut CudaSlice<f32>) -> collectives::Result<()> {
    /// comm.reduce_scatter_into(gradient, shard, ReduceOp::Sum, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    pub fn reduce_scatter_into<S, D>(
        &self,
        source: &S,
        destination: &mut D,
        op: impl Into<Reduction<S::Element>>,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let (source, destination) = (Source::Separate(source.memory()), Some(destination.memory_mut()));
        self.collective((Collective::ReduceScatter, None), source, destination, Some(&op.into()), stream)
    }

    /// Exchanges blocks between all ranks, in place: block `j` of rank `i` becomes block `i` of rank `j`. The buffer
    /// has one block for each rank.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, tokens: &mut CudaSlice<u32>) -> collectives::Result<()> {
    /// comm.all_to_all(tokens, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    #[doc(alias = "ncclAlltoAll")]
    pub fn all_to_all<B: BufferMut + ?Sized>(&self, buffer: &mut B, stream: &Arc<CudaStream>) -> Result<()> {
        self.collective((Collective::AllToAll, None), Source::InPlace, Some(buffer.memory_mut()), None, stream)
    }

    /// Exchanges blocks like [`all_to_all`](Self::all_to_all), from one buffer into another of the same length.
    ///
    /// ```no_run
    /// # use collectives::nccl::NcclCommunicator;
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # fn example(comm: &NcclCommunicator, stream: &Arc<CudaStream>, tokens: &CudaSlice<u32>, theirs: &mut CudaSlice<u32>) -> collectives::Result<()> {
    /// comm.all_to_all_into(tokens, theirs, stream)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all typed collectives.
    pub fn all_to_all_into<S, D>(&self, source: &S, destination: &mut D, stream: &Arc<CudaStream>) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let (source, destination) = (Source::Separate(source.memory()), Some(destination.memory_mut()));
        self.collective((Collective::AllToAll, None), source, destination, None, stream)
    }
}
