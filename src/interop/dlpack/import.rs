//! Imports of tensors.

use std::fmt;
use std::ptr::NonNull;

#[cfg(feature = "cuda")]
use super::on_gpu::OnGpu;
use super::{DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_READ_ONLY, DLTensor, TensorLayout, VERSION, refused};
use crate::call::element::{DType, Element};
use crate::error::Result;

/// The structure that the deleter takes.
enum Managed {
    Legacy(NonNull<DLManagedTensor>),
    Versioned(NonNull<DLManagedTensorVersioned>),
}

/// A tensor that another library lends until this value is dropped.
///
/// The import has checked that this crate supports the element type, and that the elements are aligned, contiguous, and
/// in row-major order.
pub struct Tensor {
    managed: Managed,
    /// The `data` pointer from the tensor's library; slices are made from it.
    data: *mut u8,
    pub(super) layout: TensorLayout,
    read_only: bool,
    /// The tensor's memory on a GPU, once the stream that orders its uses is known.
    #[cfg(feature = "cuda")]
    pub(super) on_gpu: Option<OnGpu>,
}

// SAFETY: elements are plain data, and the caller who imported the tensor promised that its deleter may be called on
// any thread. For a stream of one thread alone, the caller who named it promised to stay there (`Tensor::order_by`).
unsafe impl Send for Tensor {}
// SAFETY: shared references only read.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Takes a tensor of DLPack 1.x, as in a Python capsule named `dltensor_versioned`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`, with the cause, in each of these cases:
    ///
    /// - `managed` is null.
    /// - The tensor has a different major version of DLPack.
    /// - The tensor has an element type that this crate does not have.
    /// - The elements are not in row-major order.
    /// - The tensor is on an unsupported kind of device.
    ///
    /// After an error, the tensor still belongs to the caller: the deleter was not called.
    ///
    /// # Safety
    ///
    /// `managed` must be null, or point to a tensor that conforms to dlpack.h and that no other code takes. Until the
    /// returned value is dropped:
    ///
    /// - The tensor's memory must stay valid.
    /// - No other code may write to the memory, or read data that is written through this value.
    /// - Any thread must be able to call the tensor's deleter.
    /// - Truth values must be 0 or 1. This crate checks them only when it makes a slice. After this check, no other
    ///   code may change them.
    pub unsafe fn from_versioned(managed: *mut DLManagedTensorVersioned) -> Result<Self> {
        let managed = NonNull::new(managed).ok_or_else(|| refused("the pointer is null"))?;
        if !managed.is_aligned() {
            return Err(refused(format!("the pointer {managed:p} is not aligned")));
        }
        // SAFETY: a tensor (the caller's promise), whose first fields are the same in every version.
        let version = unsafe { (*managed.as_ptr()).version };
        if version.major != VERSION.major {
            let reason =
                format!("it has the layout of DLPack {}.{}, but only {}.x is supported", version.major, version.minor, VERSION.major);
            return Err(refused(reason));
        }
        // SAFETY: a tensor that obeys dlpack.h (the caller's promise), and its major version, which has this layout,
        // was checked.
        let (tensor, flags) = unsafe { ((*managed.as_ptr()).dl_tensor, (*managed.as_ptr()).flags) };
        // SAFETY: what `new` requires is what this function requires of its caller: the tensor obeys dlpack.h, and
        // stays valid until the value is dropped.
        unsafe { Self::new(Managed::Versioned(managed), &tensor, flags & DLPACK_FLAG_READ_ONLY != 0) }
    }

    /// Takes a tensor in the structure that was used before DLPack 1.0, as in a Python capsule named `dltensor`. Such
    /// tensors do not state whether they may be written. By convention, they may be written.
    ///
    /// # Errors
    ///
    /// The errors of [`Tensor::from_versioned`].
    ///
    /// # Safety
    ///
    /// The conditions of [`Tensor::from_versioned`] must hold.
    pub unsafe fn from_legacy(managed: *mut DLManagedTensor) -> Result<Self> {
        let managed = NonNull::new(managed).ok_or_else(|| refused("the pointer is null"))?;
        if !managed.is_aligned() {
            return Err(refused(format!("the pointer {managed:p} is not aligned")));
        }
        // SAFETY: a tensor (the caller's promise).
        let tensor = unsafe { (*managed.as_ptr()).dl_tensor };
        // SAFETY: what `new` requires is what this function requires of its caller: the tensor obeys dlpack.h, and
        // stays valid until the value is dropped.
        unsafe { Self::new(Managed::Legacy(managed), &tensor, false) }
    }

    /// Checks a tensor, and takes it.
    ///
    /// # Safety
    ///
    /// `managed` obeys dlpack.h and is taken by no other code; `tensor` is the tensor in it. The tensor's memory stays
    /// valid until the value is dropped.
    unsafe fn new(managed: Managed, tensor: &DLTensor, read_only: bool) -> Result<Self> {
        // SAFETY: the tensor obeys dlpack.h: its arrays are as long as it has dimensions.
        let layout = unsafe { TensorLayout::of(tensor) }?;
        let offset = usize::try_from(tensor.byte_offset).map_err(|_| refused("its offset does not fit into the address space"))?;
        Ok(Self {
            managed,
            data: tensor.data.cast::<u8>().wrapping_add(offset),
            layout,
            read_only,
            #[cfg(feature = "cuda")]
            on_gpu: None,
        })
    }

    /// Returns the tensor's element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// Returns the lengths of the tensor's dimensions, the outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// Returns the tensor's number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.layout.elements
    }

    /// Returns the device that the tensor is on.
    #[must_use]
    pub fn device(&self) -> DLDevice {
        self.layout.device
    }

    /// Returns whether the tensor's library forbids writing to the tensor.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the tensor's elements, if they are of type `T` and in host memory (pinned or not).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a different element type, for device memory, or for a truth value that is neither 0 nor 1.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let first = self.host::<T>()?;
        // SAFETY: - this many elements, of this type (checked), aligned (checked), in memory that stays valid until
        //   the tensor is dropped and that no other code writes (promised when it was taken);
        // - every pattern is a value of the type: truth values were checked.
        Ok(unsafe { std::slice::from_raw_parts(first, self.layout.elements) })
    }

    /// Returns the tensor's elements, for writing.
    ///
    /// # Errors
    ///
    /// The errors of [`Tensor::as_slice`], and `InvalidArgument` for a read-only tensor.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.writable()?;
        let first = self.host::<T>()?;
        // SAFETY: - this many elements, of this type (checked), aligned (checked), in memory that stays valid until
        //   the tensor is dropped, that may be written (checked), and that no other code writes, or reads meanwhile
        //   (promised when it was taken); the borrow is exclusive;
        // - every pattern is a value of the type: truth values were checked just now, and only values are written
        //   through the slice.
        Ok(unsafe { std::slice::from_raw_parts_mut(first, self.layout.elements) })
    }

    /// Refuses a tensor that may not be written.
    pub(super) fn writable(&self) -> Result<()> {
        if self.read_only { Err(refused("its library forbids writing to it")) } else { Ok(()) }
    }

    /// Refuses element types other than `T`.
    pub(super) fn has_type<T: Element>(&self) -> Result<()> {
        match (T::ELEMENT_TYPE, self.layout.dtype) {
            (asked, found) if asked == found => Ok(()),
            (asked, found) => Err(refused(format!("its elements are {found}, but {asked} was requested"))),
        }
    }

    /// Returns the first element, if the CPU can access it and it is a `T`.
    fn host<T: Element>(&self) -> Result<*mut T> {
        self.has_type::<T>()?;
        let first = self.host_bytes().ok_or_else(|| {
            let DLDevice { device_type, device_id } = self.layout.device;
            refused(format!("it is on device {device_id} of type {device_type}, not in host memory"))
        })?;
        if self.layout.elements == 0 {
            return Ok(NonNull::dangling().as_ptr());
        }
        if self.layout.dtype == DType::Bool {
            // SAFETY: as many bytes as elements, which stay valid and are not written (promised when it was taken);
            // any byte is a `u8`.
            let bytes = unsafe { std::slice::from_raw_parts(self.data, self.layout.elements) };
            if let Some(at) = bytes.iter().position(|byte| *byte > 1) {
                return Err(refused(format!("its truth value at index {at} is {:#04x}, which is neither 0 nor 1", bytes[at])));
            }
        }
        Ok(first.cast())
    }

    /// Returns the address of its first byte, if the CPU can access it. Never null.
    pub(super) fn host_bytes(&self) -> Option<*mut u8> {
        match (self.layout.is_on_host(), self.layout.elements) {
            (false, _) => None,
            (true, 0) => Some(NonNull::dangling().as_ptr()),
            (true, _) => Some(self.data),
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor").field("layout", &self.layout).field("read_only", &self.read_only).finish_non_exhaustive()
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: a tensor that only this value took, which is being dropped: its deleter, if it has one, is called
        // once.
        unsafe {
            match self.managed {
                Managed::Legacy(managed) => (*managed.as_ptr()).deleter.into_iter().for_each(|delete| delete(managed.as_ptr())),
                Managed::Versioned(managed) => (*managed.as_ptr()).deleter.into_iter().for_each(|delete| delete(managed.as_ptr())),
            }
        }
    }
}
