//! Imported tensors in GPU memory.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::import::Tensor;
use super::on_gpu::{Bytes, Place};
use super::refused;
use crate::call::element::Element;
use crate::error::Result;
use crate::interop::{AsDevicePtr, AsDevicePtrMut, AsStream, ForeignBuffer};

/// The elements of a GPU tensor, for calls that only read them. A [`ForeignBuffer`] can be made from this type; see
/// [`Tensor::on_device`].
pub struct DeviceTensor<'a, T> {
    tensor: &'a Tensor,
    at: Place,
    elements: PhantomData<&'a [T]>,
}

/// The elements of a GPU tensor, for calls that may write them. A [`ForeignBuffer`] can be made from this type; see
/// [`Tensor::on_device_mut`].
pub struct DeviceTensorMut<'a, T> {
    tensor: &'a mut Tensor,
    at: Place,
    elements: PhantomData<&'a mut [T]>,
}

impl Place {
    fn of<T: Element>(tensor: &Tensor, stream: &(impl AsStream + ?Sized)) -> Result<Self> {
        tensor.has_type::<T>()?;
        Self::at(tensor, stream)
    }

    fn at(tensor: &Tensor, stream: &(impl AsStream + ?Sized)) -> Result<Self> {
        let lies = tensor.device();
        let device = tensor.layout.cuda_device();
        let device = device.ok_or_else(|| refused(format!("it is on a device of type {}, not in GPU memory", lies.device_type)))?;
        // All devices can use managed memory; its device number only names the device on which it was allocated.
        if lies.device_type == super::K_DL_CUDA && stream.device() != device {
            return Err(refused(format!("it is on device {device}, but the stream belongs to device {}", stream.device())));
        }
        Ok(Self { device: stream.device(), stream: stream.as_raw_stream() })
    }
}

impl Tensor {
    /// Sets the stream that orders the uses of a tensor on a GPU (or in managed memory). After that, the tensor can be
    /// a buffer for calls ([`Tensor::as_buffer`], [`Tensor::as_buffer_mut`] and so on). `context` must be
    /// [`Device::context`](crate::Device::context) of the communicator. Does nothing for a tensor in host memory, so
    /// that the same code works for both locations.
    ///
    /// ```no_run
    /// # use collectives::{Communicator, ReduceOp, interop::{AsStream, dlpack::Tensor}};
    /// # fn example(comm: &Communicator, mut tensor: Tensor, stream: &impl AsStream) -> collectives::Result<()> {
    /// # let device = comm.device().expect("a device was asked for");
    /// // SAFETY: the library has ordered its tensor for `stream`, which outlives the tensor.
    /// unsafe { tensor.order_by(device.context(), stream) }?;
    /// comm.all_reduce(&mut tensor.as_buffer_mut()?, ReduceOp::Sum)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a stream or a context of another device.
    ///
    /// # Safety
    ///
    /// The conditions of [`Tensor::on_device`] must hold as long as the tensor lives. The stream must live until the
    /// tensor has been dropped. If the stream is the per-thread default stream, the tensor must stay on the thread that
    /// the stream belongs to.
    pub unsafe fn order_by<S: AsStream + ?Sized>(&mut self, context: &Arc<CudaContext>, stream: &S) -> Result<()> {
        if self.layout.is_on_host() {
            return Ok(());
        }
        let length = self.layout.elements * self.layout.dtype.size_bytes();
        let bytes = Bytes { address: self.layout.address, length, at: Place::at(self, stream)? };
        self.on_gpu = Some(ForeignBuffer::new(context, bytes)?);
        Ok(())
    }

    /// Returns the tensor's elements on a GPU (or in managed memory), for calls that only read them.
    ///
    /// ```no_run
    /// # use collectives::{Communicator, ReduceOp, interop::{AsStream, ForeignBuffer, dlpack::Tensor}};
    /// # fn example(comm: &Communicator, tensor: &mut Tensor, stream: &impl AsStream) -> collectives::Result<()> {
    /// # let device = comm.device().expect("a device was asked for");
    /// // SAFETY: the library has ordered its tensor for `stream`.
    /// let memory = unsafe { tensor.on_device_mut::<f32, _>(stream) }?;
    /// comm.all_reduce(&mut ForeignBuffer::new(device.context(), memory)?, ReduceOp::Sum)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a different element type, for host memory, or for a stream of another device.
    ///
    /// # Safety
    ///
    /// - The tensor's library must have ordered its own work on the tensor before all work that is queued on `stream`
    ///   after this call. In Python, `__dlpack__(stream=…)` establishes this order.
    /// - After a call has returned, or after the deleter has run, the library may use the memory again. It must order
    ///   this use after all work that is already queued on `stream` at that time. To ensure this order, pass the stream
    ///   that the library itself works on.
    /// - The memory must be initialised. Truth values must be 0 or 1.
    pub unsafe fn on_device<'a, T: Element, S: AsStream + ?Sized>(&'a self, stream: &'a S) -> Result<DeviceTensor<'a, T>> {
        let at = Place::of::<T>(self, stream)?;
        Ok(DeviceTensor { tensor: self, at, elements: PhantomData })
    }

    /// Returns the tensor's elements on a GPU (or in managed memory), for calls that may write them.
    ///
    /// # Errors
    ///
    /// The errors of [`Tensor::on_device`], and `InvalidArgument` for a read-only tensor.
    ///
    /// # Safety
    ///
    /// The conditions of [`Tensor::on_device`] must hold.
    pub unsafe fn on_device_mut<'a, T: Element, S: AsStream + ?Sized>(&'a mut self, stream: &'a S) -> Result<DeviceTensorMut<'a, T>> {
        self.writable()?;
        let at = Place::of::<T>(self, stream)?;
        Ok(DeviceTensorMut { tensor: self, at, elements: PhantomData })
    }
}

macro_rules! device_memory {
    ($($memory:ident),*) => {$(
        // SAFETY: - this many elements of this type are there, aligned (checked), as long as the tensor is borrowed;
        // - the stream is borrowed as long (an `AsStream`), and the tensor's uses follow it (promised when this was
        //   made).
        unsafe impl<T: Element> AsDevicePtr for $memory<'_, T> {
            type Element = T;

            fn device_ptr(&self) -> u64 {
                self.tensor.layout.address
            }

            fn elements(&self) -> usize {
                self.tensor.layout.elements
            }

            fn device(&self) -> usize {
                self.at.device
            }

            fn raw_stream(&self) -> *mut c_void {
                self.at.stream
            }
        }

        impl<T: Element> fmt::Debug for $memory<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($memory)).field("tensor", &self.tensor).field("at", &self.at).finish_non_exhaustive()
            }
        }
    )*};
}

device_memory!(DeviceTensor, DeviceTensorMut);

// SAFETY: the tensor may be written (checked), and is borrowed mutably.
unsafe impl<T: Element> AsDevicePtrMut for DeviceTensorMut<'_, T> {}
