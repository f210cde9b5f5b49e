//! Buffers that live on a GPU.

#![expect(unsafe_code, reason = "views over addresses that the caller vouches for")]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DriverError, SyncOnDrop};

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
    /// All uses of the buffer follow one stream.
    Followed(#[expect(dead_code, reason = "what it does it does when it is dropped")] Followed<'a>),
    /// The caller sees to it.
    Unordered,
}

/// A call on memory whose uses follow another stream than the call's: that stream goes on after the call.
pub(crate) struct Followed<'a> {
    home: &'a CudaStream,
    stream: &'a CudaStream,
}

impl<'a> Ordered<'a> {
    /// Has `stream` wait for what is queued on `home`; and `home`, when this is dropped, for what is queued on `stream` by then.
    pub(crate) fn after(home: &'a CudaStream, stream: &'a CudaStream) -> Self {
        // The handle 2 means another stream on every thread, so that it is not known to be the same one.
        let same = home.cu_stream() == stream.cu_stream() && home.cu_stream().addr() != 2;
        // Inside a graph the other stream would be drawn into it; what a graph uses is ordered where it is launched.
        if same || is_capturing(stream) {
            return Self::Unordered;
        }
        if is_capturing(home) {
            stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
            return Self::Unordered;
        }
        stream.context().record_err(stream.join(home));
        Self::Followed(Followed { home, stream })
    }
}

fn is_capturing(stream: &CudaStream) -> bool {
    stream.capture_status().is_ok_and(|status| status != CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        self.stream.context().record_err(self.home.join(self.stream));
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
                let (address, guard) = ::cudarc::driver::DevicePtr::<T>::device_ptr(self, stream);
                (address, $crate::buffer::device::Ordered::Tracked(guard))
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
                let (address, guard) = ::cudarc::driver::DevicePtrMut::<T>::device_ptr_mut(self, stream);
                (address, $crate::buffer::device::Ordered::Tracked(guard))
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
