//! Traits through which other GPU crates pass their memory and streams to this crate, without a dependency in either
//! direction.

#![expect(unsafe_code, reason = "what other crates promise about addresses and handles")]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut, DeviceRead, DeviceWrite, Ordered};
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::Data;
use crate::error::{Error, Result};

/// A CUDA stream of any crate, for [`Communicator::in_order_of`](crate::Communicator::in_order_of).
///
/// This trait is implemented for cudarc's streams and for [`RawStream`]. Implement it for the stream type of your
/// crate.
///
/// # Safety
///
/// As long as the value is borrowed, [`AsStream::as_raw_stream`] must always return the handle of the same stream, and
/// this stream must not be destroyed. It must belong to the primary context of the device that [`AsStream::device`]
/// returns.
///
/// The handle 2, CUDA's per-thread default stream, means a different stream on every thread. A value with this handle
/// stands for the stream of the thread that borrows the value. A [`ForeignBuffer`] or a tensor of
/// [`dlpack`](crate::interop::dlpack) that was made from such a value must be used and dropped only on that thread.
pub unsafe trait AsStream {
    /// Returns the stream's `CUstream`, which is also its `cudaStream_t`. A null handle is the legacy default stream,
    /// and the handle 2 is the per-thread default stream of the calling thread.
    fn as_raw_stream(&self) -> *mut c_void;

    /// Returns the number that the stream's device has in this process.
    fn device(&self) -> usize;
}

// SAFETY: the stream lives as long as its owner; if its context is not the primary one, the driver refuses to mix the
// two. The per-thread stream is the calling thread's, as for everything that cudarc queues on it.
unsafe impl AsStream for CudaStream {
    fn as_raw_stream(&self) -> *mut c_void {
        self.cu_stream().cast()
    }

    fn device(&self) -> usize {
        self.context().ordinal()
    }
}

/// Implements a trait of this file for pointers to a type that implements it.
macro_rules! pointed_at {
    ($($pointer:ty),*) => {$(
        // SAFETY: it is the same stream, and the pointer borrows or owns it.
        unsafe impl<S: AsStream + ?Sized> AsStream for $pointer {
            fn as_raw_stream(&self) -> *mut c_void {
                (**self).as_raw_stream()
            }

            fn device(&self) -> usize {
                (**self).device()
            }
        }
    )*};
}

pointed_at!(&S, Arc<S>);

/// A `CUstream` or `cudaStream_t` that other code owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawStream {
    handle: *mut c_void,
    device: usize,
}

// SAFETY: a handle, which may be used on any thread, except for the handle 2: the caller who wraps that promises to
// keep the value on one thread.
unsafe impl Send for RawStream {}
// SAFETY: a shared reference only reads the handle and the device's number.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// Makes a `RawStream` from a stream's handle and the number that the stream's device has in this process. A null
    /// handle is the legacy default stream.
    ///
    /// # Safety
    ///
    /// The handle must be a stream in the primary context of that device. The stream must live until this value, its
    /// copies, and all buffers made with them have been dropped. If the handle is 2 (the per-thread default stream),
    /// this value, its copies and those buffers must stay on the thread that the stream belongs to.
    #[must_use]
    pub const unsafe fn new(handle: *mut c_void, device: usize) -> Self {
        Self { handle, device }
    }
}

// SAFETY: the caller of `new` promised that the handle is a stream in that device's primary context, and outlives this
// value and its copies.
unsafe impl AsStream for RawStream {
    fn as_raw_stream(&self) -> *mut c_void {
        self.handle
    }

    fn device(&self) -> usize {
        self.device
    }
}

/// GPU memory that another crate owns and uses in the order of one stream: the source of a [`ForeignBuffer`].
///
/// Implement this trait for a tensor type if its crate queues all work on one stream for each device (or thread), and
/// frees memory in the order of that stream. cudarc's own slices do not need this trait, because they are buffers with
/// their own events.
///
/// ```
/// use std::ffi::c_void;
///
/// struct Tensor { address: u64, elements: usize, device: usize, stream: *mut c_void }
///
/// // SAFETY: (state here why this is true)
/// unsafe impl collectives::interop::AsDevicePtr for Tensor {
///     type Element = f32;
///     fn device_ptr(&self) -> u64 { self.address }
///     fn elements(&self) -> usize { self.elements }
///     fn device(&self) -> usize { self.device }
///     fn raw_stream(&self) -> *mut c_void { self.stream }
/// }
/// ```
///
/// # Safety
///
/// As long as the value is borrowed:
///
/// - `elements()` elements of type `Element` must be at `device_ptr()`, initialised and aligned.
/// - Work in the primary context of the device `device()` must be able to access this memory.
/// - `raw_stream()` must be a stream that meets the conditions of [`AsStream`], and must live until the value has been
///   dropped.
/// - If the stream's handle is 2 (the per-thread default stream), the value, and all buffers made of it, must stay on
///   the thread that the stream belongs to.
/// - Each of the four methods must return the same result each time.
///
/// At all times, code that writes, reuses or frees the memory must do so in the order of that stream, after all work
/// that is already queued on it. If a call of this crate runs on another stream, events make the call wait for this
/// work, and make later work on the memory's stream wait for the call.
pub unsafe trait AsDevicePtr {
    /// The type of its elements.
    type Element: Data;

    /// Returns the memory's address, a `CUdeviceptr`.
    fn device_ptr(&self) -> u64;

    /// Returns the number of elements in the memory.
    fn elements(&self) -> usize;

    /// Returns the number that the memory's device has in this process.
    fn device(&self) -> usize;

    /// Returns the `CUstream` (or `cudaStream_t`) that orders the uses of the memory.
    fn raw_stream(&self) -> *mut c_void;
}

/// GPU memory that calls may also write.
///
/// # Safety
///
/// While the value is borrowed mutably, other code may read the memory only in work that is queued on the memory's
/// stream, or that is ordered with this stream by events.
pub unsafe trait AsDevicePtrMut: AsDevicePtr {}

/// Implements the trait for references.
macro_rules! borrowed_memory {
    ($($reference:ty),*) => {$(
        // SAFETY: the same memory, borrowed as long as the reference lives.
        unsafe impl<P: AsDevicePtr + ?Sized> AsDevicePtr for $reference {
            type Element = P::Element;

            fn device_ptr(&self) -> u64 {
                (**self).device_ptr()
            }

            fn elements(&self) -> usize {
                (**self).elements()
            }

            fn device(&self) -> usize {
                (**self).device()
            }

            fn raw_stream(&self) -> *mut c_void {
                (**self).raw_stream()
            }
        }
    )*};
}

borrowed_memory!(&P, &mut P);

// SAFETY: the same memory, borrowed mutably as long as the reference lives.
unsafe impl<P: AsDevicePtrMut + ?Sized> AsDevicePtrMut for &mut P {}

/// A buffer for any call, in memory that another crate owns. It is made from a value or a reference that implements
/// [`AsDevicePtr`].
///
/// Calls are queued on the communicator's stream, or on the stream named with
/// [`Communicator::with_stream`](crate::Communicator::with_stream). That stream first waits for the memory's own
/// stream, and the memory's own stream then waits for the call. If both streams are the same, no wait is added. While a
/// graph is captured, no wait is added either, so you must order the launches of the graph relative to the memory's
/// stream.
pub struct ForeignBuffer<P> {
    memory: P,
    context: Arc<CudaContext>,
    /// The stream that the memory follows. It never leaves this value, which owns or borrows what keeps the stream
    /// alive.
    home: Arc<CudaStream>,
}

impl<P: AsDevicePtr> ForeignBuffer<P> {
    /// Makes a buffer from `memory`. `context` must be [`Device::context`](crate::Device::context) of the communicator
    /// that uses the buffer.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for memory that is on another device, at a null address, or not aligned.
    pub fn new(context: &Arc<CudaContext>, memory: P) -> Result<Self> {
        let (address, elements) = (memory.device_ptr(), memory.elements());
        if memory.device() != context.ordinal() {
            let reason = format!("it is on device {}, but the context belongs to device {}", memory.device(), context.ordinal());
            return Err(Error::argument("ForeignBuffer::new", reason));
        }
        let fits = elements.checked_mul(size_of::<P::Element>()).is_some_and(|bytes| address.checked_add(bytes as u64).is_some());
        if elements != 0 && (address == 0 || !fits || !address.is_multiple_of(align_of::<P::Element>() as u64)) {
            let reason = format!("{elements} elements of {} B cannot be at {address:#x}", size_of::<P::Element>());
            return Err(Error::argument("ForeignBuffer::new", reason));
        }
        // SAFETY: a stream of that device's primary context, alive until the memory has been dropped (the trait's
        // contract), which this owns.
        let home = unsafe { context.wrap_borrowed_stream(memory.raw_stream().cast()) };
        Ok(Self { memory, context: Arc::clone(context), home })
    }

    /// Returns the memory.
    pub fn into_inner(self) -> P {
        self.memory
    }
}

impl<P: fmt::Debug> fmt::Debug for ForeignBuffer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignBuffer").field("memory", &self.memory).field("device", &self.context.ordinal()).finish_non_exhaustive()
    }
}

impl<P: AsDevicePtr> DeviceRead for ForeignBuffer<P> {
    fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn owner(&self) -> Option<&Arc<CudaStream>> {
        None
    }

    fn read<'a>(&'a self, stream: &'a CudaStream) -> (u64, Ordered<'a>) {
        (self.memory.device_ptr(), Ordered::after(&self.home, stream))
    }
}

impl<P: AsDevicePtrMut> DeviceWrite for ForeignBuffer<P> {
    fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn write<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, Ordered<'a>) {
        (self.memory.device_ptr(), Ordered::after(&self.home, stream))
    }
}

// SAFETY: implementors of `AsDevicePtr` promise to return the same address and length each time.
unsafe impl<P: AsDevicePtr> StableMemory for ForeignBuffer<P> {}

impl<P: AsDevicePtr> Buffer for ForeignBuffer<P> {
    type Element = P::Element;

    fn memory(&self) -> Memory<'_, P::Element> {
        Memory::Device(DeviceMemory::new(self, self.memory.elements()))
    }
}

impl<P: AsDevicePtrMut> BufferMut for ForeignBuffer<P> {
    fn memory_mut(&mut self) -> MemoryMut<'_, P::Element> {
        let length = self.memory.elements();
        MemoryMut::Device(DeviceMemoryMut::new(self, length))
    }
}
