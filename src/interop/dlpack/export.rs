//! Exports of buffers as tensors.

use std::ffi::c_void;
#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaStream, DriverError};

use super::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, K_DL_CPU, VERSION};
use crate::call::buffer::{BufferMut, Memory, MemoryMut};
use crate::call::element::Element;
use crate::error::{Error, Result};

/// Exports a buffer in host memory as a tensor of DLPack 1.x. The buffer is a vector, a boxed slice, an array, or a
/// buffer from [`Communicator::alloc`](crate::Communicator::alloc). The consumer of the pointer must call the tensor's
/// deleter once, on any thread. The deleter drops the buffer. If no code calls the deleter, the buffer is leaked.
///
/// # Errors
///
/// `InvalidArgument` if the shape does not have as many elements as the buffer, or if the buffer is on a device.
pub fn export<B>(buffer: B, shape: &[usize]) -> Result<*mut DLManagedTensorVersioned>
where
    B: BufferMut<Element: Element> + Send + 'static,
{
    on_host(buffer, shape).map(|(tensor, keeper)| hand_over(versioned(tensor), keeper))
}

/// Exports like [`export`], but in the structure that was used before DLPack 1.0.
///
/// # Errors
///
/// The errors of [`export`].
pub fn export_legacy<B>(buffer: B, shape: &[usize]) -> Result<*mut DLManagedTensor>
where
    B: BufferMut<Element: Element> + Send + 'static,
{
    on_host(buffer, shape).map(|(tensor, keeper)| hand_over(legacy(tensor), keeper))
}

/// Exports a buffer on a GPU as a tensor of DLPack 1.x, to a consumer that works on `stream`. That stream first waits
/// for the earlier work on the buffer. The deleter frees the memory in the order of `stream`, after all work that was
/// queued on `stream` before the deleter was called.
///
/// # Errors
///
/// - `InvalidArgument` if the shape does not have as many elements as the buffer.
/// - `InvalidArgument` if the buffer is not on the stream's device.
/// - `InvalidArgument` for the per-thread stream, because the deleter may be called on another thread.
/// - Errors of the driver.
#[cfg(feature = "cuda")]
pub fn export_on<B>(buffer: B, shape: &[usize], stream: &Arc<CudaStream>) -> Result<*mut DLManagedTensorVersioned>
where
    B: BufferMut<Element: Element> + Send + 'static,
{
    on_device(buffer, shape, stream).map(|(tensor, keeper)| hand_over(versioned(tensor), keeper))
}

/// Exports like [`export_on`], but in the structure that was used before DLPack 1.0.
///
/// # Errors
///
/// The errors of [`export_on`].
#[cfg(feature = "cuda")]
pub fn export_legacy_on<B>(buffer: B, shape: &[usize], stream: &Arc<CudaStream>) -> Result<*mut DLManagedTensor>
where
    B: BufferMut<Element: Element> + Send + 'static,
{
    on_device(buffer, shape, stream).map(|(tensor, keeper)| hand_over(legacy(tensor), keeper))
}

/// An exported buffer, with the arrays that its tensor points to.
struct Keeper<B: BufferMut> {
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// The consumer's stream; the memory may be freed after its work.
    #[cfg(feature = "cuda")]
    consumer: Option<Arc<CudaStream>>,
    buffer: B,
}

impl<B: BufferMut> Drop for Keeper<B> {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let (Some(consumer), Memory::Device(memory)) = (&self.consumer, self.buffer.memory()) {
            let freed_on = memory.inner.owner();
            let ordered = freed_on.map_or_else(|| consumer.synchronize(), |owner| owner.join(consumer).or_else(|_| consumer.synchronize()));
            consumer.context().record_err(ordered);
        }
    }
}

/// A kind of managed tensor, which stores its owner.
trait Managed: Sized {
    fn with_owner<B: BufferMut>(self, owner: *mut c_void) -> Self;
}

impl Managed for DLManagedTensor {
    fn with_owner<B: BufferMut>(self, manager_ctx: *mut c_void) -> Self {
        unsafe extern "C" fn delete<B: BufferMut>(this: *mut DLManagedTensor) {
            // SAFETY: a pointer that `hand_over` returned, and the code that took it calls this once (dlpack.h): it
            // owns both boxes.
            unsafe { drop((Box::from_raw((*this).manager_ctx.cast::<Keeper<B>>()), Box::from_raw(this))) }
        }
        Self { manager_ctx, deleter: Some(delete::<B>), ..self }
    }
}

impl Managed for DLManagedTensorVersioned {
    fn with_owner<B: BufferMut>(self, manager_ctx: *mut c_void) -> Self {
        unsafe extern "C" fn delete<B: BufferMut>(this: *mut DLManagedTensorVersioned) {
            // SAFETY: a pointer that `hand_over` returned, and the code that took it calls this once (dlpack.h): it
            // owns both boxes, which are of these types.
            unsafe { drop((Box::from_raw((*this).manager_ctx.cast::<Keeper<B>>()), Box::from_raw(this))) }
        }
        Self { manager_ctx, deleter: Some(delete::<B>), ..self }
    }
}

fn legacy(dl_tensor: DLTensor) -> DLManagedTensor {
    DLManagedTensor { dl_tensor, manager_ctx: std::ptr::null_mut(), deleter: None }
}

fn versioned(dl_tensor: DLTensor) -> DLManagedTensorVersioned {
    DLManagedTensorVersioned { version: VERSION, manager_ctx: std::ptr::null_mut(), deleter: None, flags: 0, dl_tensor }
}

/// Returns the tensor's pointer, which owns the buffer from now on.
fn hand_over<B: BufferMut, M: Managed>(managed: M, keeper: *mut Keeper<B>) -> *mut M {
    Box::into_raw(Box::new(managed.with_owner::<B>(keeper.cast())))
}

fn refused(reason: impl Into<String>) -> Error {
    Error::argument("DLPack export", reason)
}

impl<B: BufferMut<Element: Element>> Keeper<B> {
    /// Keeps a buffer with a shape that has as many elements as the buffer.
    fn new(buffer: B, shape: &[usize]) -> Result<Box<Self>> {
        let elements = shape.iter().try_fold(1_usize, |product, length| product.checked_mul(*length));
        let length = buffer.memory().len();
        if elements != Some(length) {
            return Err(refused(format!("the buffer has {length} elements, but the shape {shape:?} has a different number")));
        }
        // No length is larger than the number of elements, unless there are none: then a length may be any number.
        let signed =
            |length: usize| i64::try_from(length).map_err(|_| refused(format!("the shape {shape:?} has a length of 2^63 or more")));
        let mut strides = vec![1_i64; shape.len()];
        for dimension in (1..shape.len()).rev() {
            strides[dimension - 1] = strides[dimension].saturating_mul(signed(shape[dimension])?);
        }
        let shape = shape.iter().map(|length| signed(*length)).collect::<Result<Vec<_>>>()?;
        Ok(Box::new(Self {
            shape,
            strides,
            #[cfg(feature = "cuda")]
            consumer: None,
            buffer,
        }))
    }

    /// Puts the buffer at its final address, and describes it as a tensor at the address that `place` returns.
    fn settle(self: Box<Self>, device: DLDevice, place: impl FnOnce(&mut B) -> *mut c_void) -> (DLTensor, *mut Self) {
        let keeper = Box::into_raw(self);
        // SAFETY: a box that was just taken apart, to which no other code has a pointer. Each field is borrowed
        // separately, so that the address of a buffer inside the box (an array) stays valid.
        unsafe {
            let data = if (*keeper).buffer.memory().is_empty() { std::ptr::null_mut() } else { place(&mut (*keeper).buffer) };
            let (shape, strides) = (&mut (*keeper).shape, &mut (*keeper).strides);
            let (ndim, dtype) = (shape.len() as i32, DLDataType::from(B::Element::ELEMENT_TYPE));
            let tensor = DLTensor { data, device, ndim, dtype, shape: shape.as_mut_ptr(), strides: strides.as_mut_ptr(), byte_offset: 0 };
            (tensor, keeper)
        }
    }
}

fn on_host<B>(buffer: B, shape: &[usize]) -> Result<(DLTensor, *mut Keeper<B>)>
where
    B: BufferMut<Element: Element>,
{
    let keeper = Keeper::new(buffer, shape)?;
    match keeper.buffer.memory() {
        Memory::Host(_) => {}
        #[cfg(feature = "cuda")]
        Memory::Device(_) => return Err(refused("it is on a device; use export_on to name the consumer's stream")),
    }
    Ok(keeper.settle(DLDevice { device_type: K_DL_CPU, device_id: 0 }, |buffer| match buffer.memory_mut() {
        MemoryMut::Host(mut memory) => memory.parts().0.cast(),
        #[cfg(feature = "cuda")]
        MemoryMut::Device(_) => unreachable!("a buffer of a known element type is where its type says"),
    }))
}

#[cfg(feature = "cuda")]
fn on_device<B>(buffer: B, shape: &[usize], stream: &Arc<CudaStream>) -> Result<(DLTensor, *mut Keeper<B>)>
where
    B: BufferMut<Element: Element>,
{
    if stream.cu_stream().addr() == 2 {
        return Err(refused("the per-thread stream is a different stream on the thread that calls the deleter; pass another stream"));
    }
    let mut keeper = Keeper::new(buffer, shape)?;
    let ordinal = stream.context().ordinal();
    let address = match keeper.buffer.memory_mut() {
        MemoryMut::Host(_) => return Err(refused("it is in host memory; use export for it")),
        MemoryMut::Device(memory) if memory.inner.context().ordinal() != ordinal => {
            let reason = format!("it is on device {}, but the stream belongs to device {ordinal}", memory.inner.context().ordinal());
            return Err(refused(reason));
        }
        // The guard is dropped at once: the consumer's work is ordered before the end of the buffer when the buffer is
        // dropped.
        MemoryMut::Device(memory) => memory.inner.write(stream).0,
    };
    let refusal = |DriverError(code): DriverError| Error::Cuda {
        doing: "DLPack export: ordering the buffer for its consumer".to_owned(),
        code: code as u32,
        text: format!("{code:?}"),
    };
    stream.context().check_err().map_err(refusal)?;
    keeper.consumer = Some(Arc::clone(stream));
    let device = DLDevice { device_type: super::K_DL_CUDA, device_id: ordinal as i32 };
    Ok(keeper.settle(device, |_| std::ptr::with_exposed_provenance_mut(address as usize)))
}
