//! Traits by which other GPU crates hand over their memory and streams, without either crate depending on the other.

#![expect(unsafe_code, reason = "what other crates promise about addresses and handles")]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut, DeviceRead, DeviceWrite, Ordered};
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::Data;
use crate::error::{Error, Result};

/// A CUDA stream, whoever made it: what [`Communicator::in_order_of`](crate::Communicator::in_order_of) takes.
///
/// Implemented for cudarc's streams and for [`RawStream`]; implement it for the stream type of your crate.
///
/// # Safety
///
/// As long as the value is borrowed, the handle that [`AsStream::as_raw_stream`] gives is that of a stream in the primary context of
/// the device that [`AsStream::device`] gives, always the same one, and the stream is not destroyed.
///
/// The handle 2, CUDA's per-thread default stream, means another stream on every thread: a value with it is that of the thread which
/// borrows it, and what is made of it (a [`ForeignBuffer`], a tensor of [`dlpack`](crate::interop::dlpack)) is used and dropped on that thread alone.
pub unsafe trait AsStream {
    /// The stream's `CUstream`, which is its `cudaStream_t` too. Null is the legacy default stream, and 2 that of the calling thread.
    fn as_raw_stream(&self) -> *mut c_void;

    /// The number, in this process, of the device that it belongs to.
    fn device(&self) -> usize;
}

// SAFETY: the stream lives as long as its owner; where its context is not the primary one, the driver refuses to mix the two. The
// per-thread one is the calling thread's, as for all that cudarc queues on it.
unsafe impl AsStream for CudaStream {
    fn as_raw_stream(&self) -> *mut c_void {
        self.cu_stream().cast()
    }

    fn device(&self) -> usize {
        self.context().ordinal()
    }
}

/// Implements a trait of this file for what points at something that has it.
macro_rules! pointed_at {
    ($($pointer:ty),*) => {$(
        // SAFETY: it is the same stream, and what points at it borrows or owns it.
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

// SAFETY: a handle, which may be used on any thread, but for 2: whoever makes that promises to keep it on one.
unsafe impl Send for RawStream {}
// SAFETY: a shared reference only reads the handle and the device's number.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The stream with this handle, on the device with this number in this process. Null is the legacy default stream.
    ///
    /// # Safety
    ///
    /// It is a stream in the primary context of that device, and is destroyed after this value, its copies, and the buffers made with
    /// them have gone. With the handle 2, the per-thread default stream, all of those stay on the thread whose stream is meant.
    #[must_use]
    pub const unsafe fn new(handle: *mut c_void, device: usize) -> Self {
        Self { handle, device }
    }
}

// SAFETY: who made it promised that the handle is a stream in that device's primary context, and outlives this value and its copies.
unsafe impl AsStream for RawStream {
    fn as_raw_stream(&self) -> *mut c_void {
        self.handle
    }

    fn device(&self) -> usize {
        self.device
    }
}

/// Memory of a GPU that another crate owns and uses in the order of one stream: what a [`ForeignBuffer`] is made of.
///
/// Tensors of crates that queue all their work on one stream for each device (or thread), and free in its order, are such memory. cudarc's
/// own slices need none of this: they are buffers, with events of their own.
///
/// ```
/// use std::ffi::c_void;
///
/// struct Tensor { address: u64, elements: usize, device: usize, stream: *mut c_void }
///
/// // SAFETY: (here stands why it is so)
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
/// - `elements()` elements of type `Element`, initialised, lie at `device_ptr()`, aligned, in memory that work in the primary context
///   of device `device()` can reach; all four methods give the same each time;
/// - `raw_stream()` is a stream as [`AsStream`] demands it, and lives until the value has gone; where it is 2, the per-thread default
///   stream, the value (and a buffer made of it) stays on the thread whose stream is meant.
///
/// And always: whoever writes, reuses or frees the memory does so in the order of that stream: after what had been queued on it by then.
/// (Calls on another stream are ordered before and after it by events.)
pub unsafe trait AsDevicePtr {
    /// What it holds.
    type Element: Data;

    /// Its address: a `CUdeviceptr`.
    fn device_ptr(&self) -> u64;

    /// How many elements it has.
    fn elements(&self) -> usize;

    /// The number, in this process, of the device that it lies on.
    fn device(&self) -> usize;

    /// The `CUstream` (or `cudaStream_t`) whose order its uses follow.
    fn raw_stream(&self) -> *mut c_void;
}

/// Memory of a GPU that calls may also write.
///
/// # Safety
///
/// Whoever else reads it does so in the order of its stream too, or has no access while the value is borrowed mutably.
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

/// A buffer, for any call, over memory that another crate owns: made of a value or a reference with [`AsDevicePtr`].
///
/// Calls are queued on the communicator's stream (or the one that is named with [`Communicator::with_stream`](crate::Communicator::with_stream)): that
/// stream first waits for the memory's own one, and the memory's own one goes on after the call. Where both are the same, nothing is
/// added. While a graph is captured nothing is added either: order the graph's launches.
pub struct ForeignBuffer<P> {
    memory: P,
    context: Arc<CudaContext>,
    /// The stream that the memory follows. It goes no further than this value, which owns or borrows what keeps it alive.
    home: Arc<CudaStream>,
}

impl<P: AsDevicePtr> ForeignBuffer<P> {
    /// A buffer over `memory`, in this context: [`Device::context`](crate::Device::context) of the communicator it is for.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for memory of another device, at no address, or not aligned.
    pub fn new(context: &Arc<CudaContext>, memory: P) -> Result<Self> {
        let (address, elements) = (memory.device_ptr(), memory.elements());
        if memory.device() != context.ordinal() {
            let reason = format!("it lives on device {}, and the context is of device {}", memory.device(), context.ordinal());
            return Err(Error::argument("ForeignBuffer::new", reason));
        }
        let fits = elements.checked_mul(size_of::<P::Element>()).is_some_and(|bytes| address.checked_add(bytes as u64).is_some());
        if elements != 0 && (address == 0 || !fits || !address.is_multiple_of(align_of::<P::Element>() as u64)) {
            let reason = format!("{elements} elements of {} B cannot lie at {address:#x}", size_of::<P::Element>());
            return Err(Error::argument("ForeignBuffer::new", reason));
        }
        // SAFETY: a stream of that device's primary context, alive until the memory has gone (the trait's contract), which this owns.
        let home = unsafe { context.wrap_borrowed_stream(memory.raw_stream().cast()) };
        Ok(Self { memory, context: Arc::clone(context), home })
    }

    /// The memory again.
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

// SAFETY: whoever has `AsDevicePtr` promises to give the same address and length each time.
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
