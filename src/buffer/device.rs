//! Buffers that live on a GPU.

#![expect(unsafe_code, reason = "views over addresses that the caller vouches for")]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DriverError, SyncOnDrop};

use super::{Buffer, BufferMut, Memory, MemoryMut, sealed};
use crate::element::Data;

/// Device memory that can be read, whatever its elements are.
pub(crate) trait DeviceRead {
    /// The context that it belongs to.
    fn context(&self) -> &Arc<CudaContext>;

    /// The stream on which it will be freed, where that is known.
    fn owner(&self) -> Option<&Arc<CudaStream>>;

    /// Its address, once `stream` waits for the last write; the guard is dropped when the read has been queued.
    fn read<'a>(&'a self, stream: &'a CudaStream) -> (u64, Ordered<'a>);
}

/// Device memory that can be written.
pub(crate) trait DeviceWrite {
    /// The context that it belongs to.
    fn context(&self) -> &Arc<CudaContext>;

    /// Its address, once `stream` waits for the last reads and writes; the guard is dropped when the write has been queued.
    fn write<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, Ordered<'a>);
}

/// What is held from when a stream was made to wait for a buffer's last use until the call has been queued on it.
pub(crate) enum Ordered<'a> {
    /// The buffer has events of cudarc's.
    Tracked(SyncOnDrop<'a>),
    /// It has, but cudarc would not record the one for a call on this stream, whose context has no second stream.
    Recorded(Recorded<'a>),
    /// All uses of the buffer follow one stream.
    Followed(#[expect(dead_code, reason = "what it does it does when it is dropped")] Followed<'a>),
    /// The caller sees to it.
    Unordered,
}

/// An event that is recorded when this is dropped.
pub(crate) struct Recorded<'a>(&'a CudaEvent, &'a CudaStream);

/// A call on memory whose uses follow another stream than the call's: that stream goes on after the call.
pub(crate) struct Followed<'a> {
    home: Arc<CudaStream>,
    stream: &'a CudaStream,
    /// Of cudarc's memory: for the day when its context has a second stream.
    _event: Option<SyncOnDrop<'a>>,
}

/// Whether both are the same. The handle 2 means another stream on every thread, so that it is not known to be.
fn same(first: &CudaStream, second: &CudaStream) -> bool {
    first.cu_stream() == second.cu_stream() && first.cu_stream().addr() != 2
}

/// Whether cudarc takes everything here to be on one stream. It counts those of each `CudaContext`, though several can stand for one
/// context of the driver's.
fn has_one_stream(context: &CudaContext) -> bool {
    context.is_event_tracking() && !context.is_in_multi_stream_mode()
}

/// The stream that all uses of cudarc's memory follow, where no events are kept for it.
pub(crate) fn only_stream(owner: &Arc<CudaStream>) -> Option<Arc<CudaStream>> {
    has_one_stream(owner.context()).then(|| Arc::clone(owner))
}

impl<'a> Ordered<'a> {
    /// Has `stream` wait for what is queued on `home`; and `home`, when this is dropped, for what is queued on `stream` by then.
    pub(crate) fn after(home: &Arc<CudaStream>, stream: &'a CudaStream) -> Self {
        // Inside a graph the other stream would be drawn into it; what a graph uses is ordered where it is launched.
        if same(home, stream) || is_capturing(stream) {
            return Self::Unordered;
        }
        Self::follow(home, stream, None)
    }

    fn follow(home: &Arc<CudaStream>, stream: &'a CudaStream, event: Option<SyncOnDrop<'a>>) -> Self {
        if is_capturing(home) {
            stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
            return Self::Unordered;
        }
        stream.context().record_err(stream.join(home));
        Self::Followed(Followed { home: Arc::clone(home), stream, _event: event })
    }

    /// What cudarc's `guard` does for a use on `stream`, and what it leaves out because the memory belongs to another `CudaContext` than
    /// the stream; `only` is what [`only_stream`] says of the memory.
    pub(crate) fn tracked(guard: SyncOnDrop<'a>, only: Option<&Arc<CudaStream>>, stream: &'a CudaStream) -> Self {
        match (only, &guard) {
            (Some(home), _) if same(home, stream) => Self::Tracked(guard),
            // Its owner knows of no other stream, and so would not order a graph's launch either.
            (Some(_), _) if is_capturing(stream) => {
                stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
                // Dropped, it would make the memory's event a part of the graph.
                std::mem::forget(guard);
                Self::Unordered
            }
            (Some(home), _) => Self::follow(home, stream, Some(guard)),
            (None, SyncOnDrop::Record(Some((event, _)))) if has_one_stream(stream.context()) => Self::Recorded(Recorded(event, stream)),
            (None, _) => Self::Tracked(guard),
        }
    }

    /// The event of cudarc's memory that tells of this use.
    fn event(&self) -> Option<&'a CudaEvent> {
        match self {
            Self::Tracked(SyncOnDrop::Record(Some((event, _)))) | Self::Recorded(Recorded(event, _)) => Some(*event),
            _ => None,
        }
    }
}

fn is_capturing(stream: &CudaStream) -> bool {
    stream.capture_status().is_ok_and(|status| status != CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        self.1.context().record_err(self.0.record(self.1));
    }
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        self.stream.context().record_err(self.home.join(self.stream));
    }
}

/// A read of memory of cudarc's on another stream than the one it will be freed on.
///
/// A slice of cudarc's remembers its last reader only: once somebody else has read it, whoever frees it would no longer wait for this
/// reader. So the stream on which it will be freed is made to wait at once. What remains is cudarc's own: a writer on a third stream, after
/// a reader that is not ours, waits for that reader alone.
pub(crate) struct Reading<'a> {
    owner: &'a CudaStream,
    event: &'a CudaEvent,
}

impl<'a> Reading<'a> {
    /// The read of `buffer` that `ordered` orders on `stream`, where that is another stream than its owner's.
    pub(crate) fn of(buffer: &'a dyn DeviceRead, ordered: &Ordered<'a>, stream: &CudaStream) -> Option<Self> {
        let (owner, event) = (buffer.owner()?, ordered.event()?);
        if same(owner, stream) || !owner.context().is_managing_stream_synchronization() {
            return None;
        }
        // The event is about to forget the reader before this one: whoever waits for this one waits for both.
        stream.context().record_err(stream.wait(event));
        Some(Self { owner, event })
    }

    /// Has the owner's stream wait for the read, once it has been queued on `stream` and what ordered it was dropped.
    pub(crate) fn hold_owner(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // Inside a graph the other stream would be drawn into it.
        if is_capturing(stream) { Ok(()) } else { self.owner.wait(self.event) }
    }
}

/// Memory of a GPU that a call reads.
pub struct DeviceMemory<'a, T> {
    pub(crate) inner: &'a dyn DeviceRead,
    length: usize,
    elements: PhantomData<&'a [T]>,
}

/// Memory of a GPU that a call writes.
pub struct DeviceMemoryMut<'a, T> {
    pub(crate) inner: &'a mut dyn DeviceWrite,
    length: usize,
    elements: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DeviceMemory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceMemory<'_, T> {}

impl<'a, T> DeviceMemory<'a, T> {
    pub(crate) fn new(inner: &'a dyn DeviceRead, length: usize) -> Self {
        Self { inner, length, elements: PhantomData }
    }

    /// How many elements it has.
    pub(crate) fn len(&self) -> usize {
        self.length
    }
}

impl<'a, T> DeviceMemoryMut<'a, T> {
    pub(crate) fn new(inner: &'a mut dyn DeviceWrite, length: usize) -> Self {
        Self { inner, length, elements: PhantomData }
    }

    /// How many elements it has.
    pub(crate) fn len(&self) -> usize {
        self.length
    }
}

impl<T> fmt::Debug for DeviceMemory<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} elements on device {})", self.length, self.inner.context().ordinal())
    }
}

impl<T> fmt::Debug for DeviceMemoryMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemoryMut({} elements on device {})", self.length, self.inner.context().ordinal())
    }
}

/// Makes buffers of what cudarc can read.
macro_rules! readable {
    ($([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::buffer::device::DeviceRead for $buffer {
            fn context(&self) -> &::std::sync::Arc<::cudarc::driver::CudaContext> {
                ::cudarc::driver::DeviceSlice::<T>::stream(self).context()
            }
            fn owner(&self) -> Option<&::std::sync::Arc<::cudarc::driver::CudaStream>> {
                Some(::cudarc::driver::DeviceSlice::<T>::stream(self))
            }
            fn read<'a>(&'a self, stream: &'a ::cudarc::driver::CudaStream) -> (u64, $crate::buffer::device::Ordered<'a>) {
                let only = $crate::buffer::device::only_stream(::cudarc::driver::DeviceSlice::<T>::stream(self));
                let (address, guard) = ::cudarc::driver::DevicePtr::<T>::device_ptr(self, stream);
                (address, $crate::buffer::device::Ordered::tracked(guard, only.as_ref(), stream))
            }
        }
        impl<$($generics)*> $crate::buffer::sealed::Sealed for $buffer {}
        impl<$($generics)*> $crate::buffer::Buffer for $buffer {
            type Element = T;
            fn memory(&self) -> $crate::buffer::Memory<'_, T> {
                $crate::buffer::Memory::Device($crate::buffer::device::DeviceMemory::new(self, ::cudarc::driver::DeviceSlice::<T>::len(self)))
            }
        }
    )*};
}

/// Makes buffers to write to of what cudarc can write.
macro_rules! writable {
    ($([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::buffer::device::DeviceWrite for $buffer {
            fn context(&self) -> &::std::sync::Arc<::cudarc::driver::CudaContext> {
                ::cudarc::driver::DeviceSlice::<T>::stream(self).context()
            }
            fn write<'a>(&'a mut self, stream: &'a ::cudarc::driver::CudaStream) -> (u64, $crate::buffer::device::Ordered<'a>) {
                let only = $crate::buffer::device::only_stream(::cudarc::driver::DeviceSlice::<T>::stream(self));
                let (address, guard) = ::cudarc::driver::DevicePtrMut::<T>::device_ptr_mut(self, stream);
                (address, $crate::buffer::device::Ordered::tracked(guard, only.as_ref(), stream))
            }
        }
        impl<$($generics)*> $crate::buffer::BufferMut for $buffer {
            fn memory_mut(&mut self) -> $crate::buffer::MemoryMut<'_, T> {
                let length = ::cudarc::driver::DeviceSlice::<T>::len(self);
                $crate::buffer::MemoryMut::Device($crate::buffer::device::DeviceMemoryMut::new(self, length))
            }
        }
    )*};
}
pub(crate) use {readable, writable};

readable!([T: Data] CudaSlice<T>, ['v, T: Data] CudaView<'v, T>, ['v, T: Data] CudaViewMut<'v, T>);
writable!([T: Data] CudaSlice<T>, ['v, T: Data] CudaViewMut<'v, T>);

/// Elements at an address of a GPU that other code owns: what a call is given by engines with allocators of their own.
///
/// No events are kept for it: order the call against other work by the stream it runs on (see
/// [`Communicator::on`](crate::Communicator::on)).
///
/// ```no_run
/// # use collectives::{Communicator, RawDevice, ReduceOp};
/// # fn example(comm: &Communicator, address: u64) -> collectives::Result<()> {
/// let device = comm.device().expect("a device was asked for");
/// // SAFETY: 1000 elements that an engine keeps allocated, and leaves alone until the call has ended on the communicator's stream.
/// let mut gradient = unsafe { RawDevice::<f32>::new(device.context(), address, 1000) };
/// comm.all_reduce(&mut gradient, ReduceOp::Avg)
/// # }
/// ```
#[derive(Debug)]
pub struct RawDevice<'a, T> {
    address: u64,
    length: usize,
    context: Arc<CudaContext>,
    memory: PhantomData<&'a mut [T]>,
}

impl<T: Data> RawDevice<'_, T> {
    /// `length` elements at `address`, in memory of this context's device.
    ///
    /// # Safety
    ///
    /// As long as this lives, and until every call that was given it has ended on its stream: the memory is allocated, nobody else
    /// writes it (or reads it, where a call writes), and it holds elements of type `T` wherever a call reads.
    #[must_use]
    pub unsafe fn new(context: &Arc<CudaContext>, address: u64, length: usize) -> Self {
        Self { address, length, context: Arc::clone(context), memory: PhantomData }
    }
}

impl<T> DeviceRead for RawDevice<'_, T> {
    fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn owner(&self) -> Option<&Arc<CudaStream>> {
        None
    }

    fn read<'a>(&'a self, _stream: &'a CudaStream) -> (u64, Ordered<'a>) {
        (self.address, Ordered::Unordered)
    }
}

impl<T> DeviceWrite for RawDevice<'_, T> {
    fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn write<'a>(&'a mut self, _stream: &'a CudaStream) -> (u64, Ordered<'a>) {
        (self.address, Ordered::Unordered)
    }
}

impl<T: Data> sealed::Sealed for RawDevice<'_, T> {}

impl<T: Data> Buffer for RawDevice<'_, T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        Memory::Device(DeviceMemory::new(self, self.length))
    }
}

impl<T: Data> BufferMut for RawDevice<'_, T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        let length = self.length;
        MemoryMut::Device(DeviceMemoryMut::new(self, length))
    }
}
