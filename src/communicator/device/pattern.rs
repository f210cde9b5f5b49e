//! Filling device memory and comparing it, on the device: for programs that check what they move.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed are handed to kernels")]

use super::guards::{Guards, Hold};
use super::handle::Device;
use crate::buffer::device::{DeviceMemory, DeviceMemoryMut};
use crate::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::communicator::Communicator;
use crate::device::{self, DevicePlane};
use crate::error::{Error, Result};

/// The bytes that the filling kernel moves at a time.
const VECTOR_BYTES: usize = 16;

impl Device<'_> {
    /// Fills a buffer with a pattern again and again, beginning with the pattern's `phase`-th element, on [`Device::stream`]. The
    /// pattern has a multiple of 16 bytes. One pass over the memory.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for memory that is not on this device, or a pattern that is empty or has other lengths; `Cuda`.
    pub fn fill<B, P>(&self, buffer: &mut B, pattern: &P, phase: usize) -> Result<()>
    where
        B: BufferMut + ?Sized,
        P: Buffer<Element = B::Element> + ?Sized,
    {
        let call = "fill";
        let (Memory::Device(pattern), MemoryMut::Device(buffer)) = (pattern.memory(), buffer.memory_mut()) else {
            return Err(Error::argument(call, "both buffers must be on the device"));
        };
        let element = size_of::<B::Element>();
        let pattern_bytes = pattern.len() * element;
        if pattern_bytes == 0 || !pattern_bytes.is_multiple_of(VECTOR_BYTES) {
            return Err(Error::argument(call, format!("a pattern has a multiple of {VECTOR_BYTES} B, and this one has {pattern_bytes} B")));
        }
        let plane = self.raw().plane();
        Communicator::same_device(plane, call, "the pattern", pattern.inner.context())?;
        Communicator::same_device(plane, call, "the buffer", buffer.inner.context())?;
        let bytes = buffer.len() * element;
        self.run_fill(plane, buffer, bytes, pattern, pattern_bytes, phase % pattern.len() * element)
    }

    fn run_fill<T>(
        &self,
        plane: &DevicePlane,
        buffer: DeviceMemoryMut<'_, T>,
        bytes: usize,
        pattern: DeviceMemory<'_, T>,
        pattern_bytes: usize,
        phase: usize,
    ) -> Result<()> {
        let stream = plane.stream();
        let mut guards = Guards::new(Hold::Borrowed);
        let from = guards.read(pattern.inner, stream);
        let to = guards.write(buffer.inner, stream);
        // SAFETY: both are borrowed, on this device (checked by the caller), as long as they say; their events order what follows.
        let queued = unsafe { plane.kernels().fill_pattern((to, bytes as u64), (from, pattern_bytes as u64), phase as u64, stream) };
        // The end of the plane waits for its own stream: its kernels are not taken away from under this.
        queued.and(Communicator::release(guards, plane, stream, "fill"))
    }

    /// How many elements of a buffer differ from a pattern that is repeated from its `phase`-th element on; compares bytes. Waits for
    /// the answer. One pass over the memory.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for memory that is not on this device, or an empty pattern; `Timeout`, `Cuda`.
    pub fn count_differing<B, P>(&self, buffer: &B, pattern: &P, phase: usize) -> Result<u64>
    where
        B: Buffer + ?Sized,
        P: Buffer<Element = B::Element> + ?Sized,
    {
        let call = "count_differing";
        let (Memory::Device(pattern), Memory::Device(buffer)) = (pattern.memory(), buffer.memory()) else {
            return Err(Error::argument(call, "both buffers must be on the device"));
        };
        if pattern.len() == 0 || size_of::<B::Element>() == 0 {
            return Err(Error::argument(call, "an empty pattern is like nothing"));
        }
        let plane = self.raw().plane();
        Communicator::same_device(plane, call, "the pattern", pattern.inner.context())?;
        Communicator::same_device(plane, call, "the buffer", buffer.inner.context())?;
        let failed = |error| device::cuda_error(call, error);
        let stream = plane.stream();
        let mut counter = stream.alloc_zeros::<u64>(1).map_err(failed)?;
        let (count, pattern_elements) = (buffer.len() as u64, pattern.len() as u64);
        let (phase, element_bytes) = (phase as u64 % pattern_elements, size_of::<B::Element>() as u32);
        let mut guards = Guards::new(Hold::Borrowed);
        let (of, like) = (guards.read(buffer.inner, stream), guards.read(pattern.inner, stream));
        let wrong = guards.write(&mut counter, stream);
        // SAFETY: buffer and pattern are borrowed until the count has been waited for, on this device (checked), and as long as they say; the
        // counter is an allocation of ours, aligned for its type; the events of all three order what follows.
        let queued = unsafe { plane.kernels().check_pattern((of, count), element_bytes, (like, pattern_elements), phase, wrong, stream) };
        queued.and(Communicator::release(guards, plane, stream, call))?;
        self.synchronize()?;
        let counted = stream.clone_dtoh(&counter).map_err(failed)?;
        Ok(counted.first().copied().unwrap_or_default())
    }
}
