//! The flat buffer of a bucket on a device: copies are queued on the caller's stream, and reductions on the communicator's, beside it.

#![expect(unsafe_code, reason = "copies between addresses of the device")]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, DevicePtrMut, DeviceSlice, result};

use super::float::Float;
use crate::buffer::device::{DeviceMemory, DeviceMemoryMut, Reading};
use crate::buffer::{BufferMut as _, MemoryMut};
use crate::device::cuda_error;
use crate::error::{Error, Result};

/// Elements on a device, and the stream on which their owner works.
#[derive(Debug)]
pub(super) struct DeviceFlat<T> {
    pub(super) slice: CudaSlice<T>,
    stream: Arc<CudaStream>,
}

/// Refuses memory of another context than the stream's.
fn same_context(stream: &CudaStream, context: &Arc<CudaContext>) -> Result<()> {
    if stream.context().cu_ctx() == context.cu_ctx() {
        return Ok(());
    }
    let (own, other) = (stream.context().ordinal(), context.ordinal());
    Err(Error::argument("train", format!("a buffer of device {other}, or of another context, where the buckets are on device {own}")))
}

impl<T> From<CudaSlice<T>> for DeviceFlat<T> {
    fn from(slice: CudaSlice<T>) -> Self {
        Self { stream: Arc::clone(slice.stream()), slice }
    }
}

impl<T: Float> DeviceFlat<T> {
    /// `len` zeros.
    pub(super) fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        let failed = |error| cuda_error(format!("allocating a bucket of {len} elements"), error);
        // A driver need not give memory of no bytes.
        let bytes = stream.alloc_zeros::<u8>((len * size_of::<T>()).max(1)).map_err(failed)?;
        // The leaked slice's events are gone: what it was told to do ends first.
        stream.synchronize().map_err(failed)?;
        // SAFETY: an allocation of at least that many bytes that nobody else owns any more, all of them zeros, which are a value of
        // every float type.
        let slice = unsafe { stream.upgrade_device_ptr(bytes.leak(), len) };
        Ok(Self { slice, stream: Arc::clone(stream) })
    }

    /// A slice of the caller's in this one's place: used on this one's stream.
    pub(super) fn replaced_by(&self, given: Self) -> Result<Self> {
        same_context(&self.stream, given.slice.context())?;
        Ok(Self { slice: given.slice, stream: Arc::clone(&self.stream) })
    }

    /// A copy of the elements in a range.
    pub(super) fn copied(&self, range: Range<usize>) -> Result<Self> {
        let mut copy = Self::new(&self.stream, range.len())?;
        if let MemoryMut::Device(destination) = copy.slice.memory_mut() {
            self.copy_to(range, destination)?;
        }
        Ok(copy)
    }

    /// Where a range lies, once the stream waits for who uses it, and what is done with it there. Nothing where there is nothing in it.
    fn at(&mut self, range: Range<usize>, work: impl FnOnce(u64, &CudaStream) -> Result<()>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let stream = Arc::clone(&self.stream);
        let outside = || Error::argument("train", format!("elements {range:?} of a bucket that ends before"));
        let mut view = self.slice.try_slice_mut(range.clone()).ok_or_else(outside)?;
        stream.context().bind_to_thread().map_err(|error| cuda_error("using a bucket".to_owned(), error))?;
        let (address, _recorded) = view.device_ptr_mut(&stream);
        work(address, &stream)
    }

    /// Copies a gradient of as many elements in.
    pub(super) fn put(&mut self, range: Range<usize>, gradient: DeviceMemory<'_, T>) -> Result<()> {
        same_context(&self.stream, gradient.inner.context())?;
        let bytes = range.len() * size_of::<T>();
        let failed = |error| cuda_error("copying a gradient into its bucket".to_owned(), error);
        self.at(range, |address, stream| {
            let (from, guard) = gradient.inner.read(stream);
            let reading = Reading::of(gradient.inner, &guard, stream);
            stream.context().check_err().map_err(failed)?;
            // SAFETY: both are memory of this context (checked) with that many bytes (the caller compares lengths), borrowed until their
            // guards, which are dropped behind the copy, have made later users wait for it.
            unsafe { result::memcpy_dtod_async(address, from, bytes, stream.cu_stream()) }.map_err(failed)?;
            drop(guard);
            reading.map_or(Ok(()), |reading| reading.hold_owner(stream)).map_err(failed)
        })
    }

    /// Copies as many elements out.
    pub(super) fn copy_to(&self, range: Range<usize>, destination: DeviceMemoryMut<'_, T>) -> Result<()> {
        let Some(view) = self.view(range).filter(|view| !view.is_empty()) else { return Ok(()) };
        same_context(&self.stream, destination.inner.context())?;
        let failed = |error| cuda_error("copying a gradient out of its bucket".to_owned(), error);
        self.stream.context().bind_to_thread().map_err(failed)?;
        let (from, _read) = crate::buffer::device::DeviceRead::read(&view, &self.stream);
        let (into, _written) = destination.inner.write(&self.stream);
        self.stream.context().check_err().map_err(failed)?;
        // SAFETY: as in `put`.
        unsafe { result::memcpy_dtod_async(into, from, view.num_bytes(), self.stream.cu_stream()) }.map_err(failed)
    }

    /// Makes elements zeros.
    pub(super) fn clear(&mut self, range: Range<usize>) -> Result<()> {
        let bytes = range.len() * size_of::<T>();
        self.at(range, |address, stream| {
            // SAFETY: memory of the slice with that many bytes; zeros are a value of every float type.
            unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }
                .map_err(|error| cuda_error("clearing a part of a bucket".to_owned(), error))
        })
    }

    /// The elements in a range.
    pub(super) fn view(&self, range: Range<usize>) -> Option<CudaView<'_, T>> {
        self.slice.try_slice(range)
    }
}
