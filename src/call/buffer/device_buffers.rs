//! Buffers on a GPU: memory from cudarc, and addresses of memory that other code owns.

#![expect(unsafe_code, reason = "views over addresses that the caller vouches for")]

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut};

use super::device::{DeviceMemory, DeviceMemoryMut, DeviceRead, DeviceWrite, Ordered, write_slice_in_order};
use super::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::Data;

/// Implements buffers for cudarc's readable memory.
macro_rules! readable {
    ($([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::call::buffer::device::DeviceRead for $buffer {
            fn context(&self) -> &::std::sync::Arc<::cudarc::driver::CudaContext> {
                ::cudarc::driver::DeviceSlice::<T>::stream(self).context()
            }
            fn owner(&self) -> Option<&::std::sync::Arc<::cudarc::driver::CudaStream>> {
                Some(::cudarc::driver::DeviceSlice::<T>::stream(self))
            }
            fn read<'a>(&'a self, stream: &'a ::cudarc::driver::CudaStream) -> (u64, $crate::call::buffer::device::Ordered<'a>) {
                $crate::call::buffer::device::read_in_order::<T, Self>(self, stream)
            }
        }
        // SAFETY: cudarc's memory, whose address stays the same until it is dropped.
        unsafe impl<$($generics)*> $crate::call::buffer::StableMemory for $buffer {}
        impl<$($generics)*> $crate::call::buffer::Buffer for $buffer {
            type Element = T;
            fn memory(&self) -> $crate::call::buffer::Memory<'_, T> {
                $crate::call::buffer::Memory::Device($crate::call::buffer::device::DeviceMemory::new(self, ::cudarc::driver::DeviceSlice::<T>::len(self)))
            }
        }
    )*};
}

/// Implements writable buffers for cudarc's writable memory; with a function that orders the write if cudarc's own way
/// is not used.
macro_rules! writable {
    ($([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        $crate::call::buffer::device_buffers::writable!($crate::call::buffer::device::write_in_order; [$($generics)*] $buffer);
    )*};
    ($write:path; $([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::call::buffer::device::DeviceWrite for $buffer {
            fn context(&self) -> &::std::sync::Arc<::cudarc::driver::CudaContext> {
                ::cudarc::driver::DeviceSlice::<T>::stream(self).context()
            }
            fn write<'a>(&'a mut self, stream: &'a ::cudarc::driver::CudaStream) -> (u64, $crate::call::buffer::device::Ordered<'a>) {
                $write(self, stream)
            }
        }
        impl<$($generics)*> $crate::call::buffer::BufferMut for $buffer {
            fn memory_mut(&mut self) -> $crate::call::buffer::MemoryMut<'_, T> {
                let length = ::cudarc::driver::DeviceSlice::<T>::len(self);
                $crate::call::buffer::MemoryMut::Device($crate::call::buffer::device::DeviceMemoryMut::new(self, length))
            }
        }
    )*};
}
pub(crate) use {readable, writable};

readable!([T: Data] CudaSlice<T>, ['v, T: Data] CudaView<'v, T>, ['v, T: Data] CudaViewMut<'v, T>);
writable!(write_slice_in_order; [T: Data] CudaSlice<T>, ['v, T: Data] CudaViewMut<'v, T>);

/// Elements in GPU memory that other code owns. This type is for engines with their own allocators.
///
/// This crate keeps no events for the memory, so you must order each call relative to other work. To do so, choose the
/// stream that the call runs on (see [`Communicator::with_stream`](crate::Communicator::with_stream)).
///
/// ```no_run
/// # use collectives::{Communicator, ReduceOp, interop::RawDeviceSlice};
/// # fn example(comm: &Communicator, address: u64) -> collectives::Result<()> {
/// let device = comm.device().expect("a device was asked for");
/// // SAFETY: 1000 elements that an engine keeps allocated, and leaves alone until the call has ended on the communicator's stream.
/// let mut gradient = unsafe { RawDeviceSlice::<f32>::new(device.context(), address, 1000) };
/// comm.all_reduce(&mut gradient, ReduceOp::Avg)
/// # }
/// ```
#[derive(Debug)]
pub struct RawDeviceSlice<'a, T> {
    address: u64,
    length: usize,
    context: Arc<CudaContext>,
    memory: PhantomData<&'a mut [T]>,
}

impl<T: Data> RawDeviceSlice<'_, T> {
    /// Wraps `length` elements at `address`, in the memory of the device of `context`.
    ///
    /// # Safety
    ///
    /// As long as this value lives, and until every call that received it has ended on its stream:
    ///
    /// - The memory must be allocated.
    /// - No other code may write the memory. If a call writes the memory, no other code may read it.
    /// - The parts of the memory that a call reads must contain elements of type `T`.
    #[must_use]
    pub unsafe fn new(context: &Arc<CudaContext>, address: u64, length: usize) -> Self {
        Self { address, length, context: Arc::clone(context), memory: PhantomData }
    }
}

impl<T> DeviceRead for RawDeviceSlice<'_, T> {
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

impl<T> DeviceWrite for RawDeviceSlice<'_, T> {
    fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn write<'a>(&'a mut self, _stream: &'a CudaStream) -> (u64, Ordered<'a>) {
        (self.address, Ordered::Unordered)
    }
}

// SAFETY: an address and a length, which never change.
unsafe impl<T: Data> StableMemory for RawDeviceSlice<'_, T> {}

impl<T: Data> Buffer for RawDeviceSlice<'_, T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        Memory::Device(DeviceMemory::new(self, self.length))
    }
}

impl<T: Data> BufferMut for RawDeviceSlice<'_, T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        let length = self.length;
        MemoryMut::Device(DeviceMemoryMut::new(self, length))
    }
}
