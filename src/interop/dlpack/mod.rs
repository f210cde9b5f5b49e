//! Tensors that libraries exchange within a process, in the form that DLPack defines. This crate imports and exports
//! the structure of DLPack 1.x ([`DLManagedTensorVersioned`]) and the older structure ([`DLManagedTensor`]).
//!
//! An imported tensor is a [`Tensor`]. It can be a buffer for any call, whatever its element type
//! ([`Tensor::as_buffer_mut`]). If you know the element type, you can also get a slice of host memory or a view of GPU
//! memory. [`export()`] and [`export_legacy`] export any buffer that can be owned.
//!
//! ```
//! use collectives::{Communicator, ReduceOp, interop::dlpack};
//!
//! // A library hands over a tensor; in this example, this crate plays the library's part.
//! let handed_over = dlpack::export(vec![1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//!
//! // SAFETY: made just now, and no other code uses it.
//! let mut tensor = unsafe { dlpack::Tensor::from_versioned(handed_over) }?;
//! let comm = Communicator::local(1)?.remove(0);
//! comm.all_reduce(tensor.as_mut_slice::<f32>()?, ReduceOp::Sum)?;
//! assert_eq!(tensor.shape(), [2, 2]);
//! # Ok::<(), collectives::Error>(()) // the tensor goes back to its library here
//! ```

#![expect(unsafe_code, reason = "C structures that other libraries fill in")]

mod buffer;
#[cfg(feature = "cuda")]
mod device;
mod export;
mod import;
#[cfg(feature = "cuda")]
mod on_gpu;
#[cfg(test)]
mod tests;

use std::ffi::c_void;

use crate::call::element::DType;
use crate::error::{Error, Result};

pub use buffer::TensorBuffer;
#[cfg(feature = "cuda")]
pub use device::{DeviceTensor, DeviceTensorMut};
pub use export::{export, export_legacy};
#[cfg(feature = "cuda")]
pub use export::{export_legacy_on, export_on};
pub use import::Tensor;

/// The version of DLPack that exports use. Imports accept every version with the same major number.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// Marks a tensor that may not be written.
pub const DLPACK_FLAG_READ_ONLY: u64 = 1;
/// Marks a tensor that is a copy made by its producer, and that only the consumer uses.
pub const DLPACK_FLAG_IS_COPIED: u64 = 1 << 1;

/// Ordinary memory (`kDLCPU`).
pub const K_DL_CPU: i32 = 1;
/// Memory of a CUDA device (`kDLCUDA`).
pub const K_DL_CUDA: i32 = 2;
/// Host memory that CUDA has pinned (`kDLCUDAHost`).
pub const K_DL_CUDA_HOST: i32 = 3;
/// Memory that CUDA moves between host and device (`kDLCUDAManaged`).
pub const K_DL_CUDA_MANAGED: i32 = 13;

/// A version of DLPack.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes when the layout of the structures changes.
    pub major: u32,
    /// Changes when codes are added.
    pub minor: u32,
}

/// The device of a tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// A `DLDeviceType`.
    pub device_type: i32,
    /// The device's number among the devices of that type.
    pub device_id: i32,
}

/// The type of an element.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDataType {
    /// A `DLDataTypeCode`.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of one element.
    pub lanes: u16,
}

/// A tensor that other code owns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLTensor {
    /// The address to which `byte_offset` is added.
    pub data: *mut c_void,
    /// The device that it is on.
    pub device: DLDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The type of its elements.
    pub dtype: DLDataType,
    /// `ndim` lengths.
    pub shape: *mut i64,
    /// `ndim` steps in elements; null means row-major order.
    pub strides: *mut i64,
    /// The distance from `data` to the first element, in bytes.
    pub byte_offset: u64,
}

/// A tensor with its owner's deleter, as defined before DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The owner's own data.
    pub manager_ctx: *mut c_void,
    /// Called once, when the consumer of the tensor no longer needs it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A tensor with its owner's deleter, as defined since DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The version that defines the layout of the other fields.
    pub version: DLPackVersion,
    /// The owner's own data.
    pub manager_ctx: *mut c_void,
    /// Called once, when the consumer of the tensor no longer needs it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// `DLPACK_FLAG_*`.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

// The layout of dlpack.h on 64-bit systems.
const _: () = assert!(size_of::<DLTensor>() == 48 && size_of::<DLManagedTensor>() == 64 && size_of::<DLManagedTensorVersioned>() == 80);

impl From<DType> for DLDataType {
    fn from(dtype: DType) -> Self {
        let code = match dtype {
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
            DType::F16 | DType::F32 | DType::F64 => 2,
            DType::Bf16 => 4,
            DType::Bool => 6,
            DType::F8E4M3 => 10,
            DType::F8E5M2 => 12,
        };
        Self { code, bits: 8 * dtype.size_bytes() as u8, lanes: 1 }
    }
}

impl DLDataType {
    /// Returns the element type, if this crate has it.
    fn known(self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| Self::from(*dtype) == self)
    }
}

/// The largest number of dimensions that is accepted; no library makes more.
const MOST_DIMENSIONS: i32 = 1024;

/// A tensor of a known type with contiguous elements in row-major order.
#[derive(Debug)]
struct TensorLayout {
    /// The address of the first element, aligned; not used if there are none.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "what lies on the host has a pointer"))]
    address: u64,
    elements: usize,
    shape: Vec<usize>,
    dtype: DType,
    device: DLDevice,
}

/// Returns the error for a tensor that cannot be used.
fn refused(reason: impl Into<String>) -> Error {
    Error::argument("DLPack import", reason)
}

impl TensorLayout {
    /// Checks `tensor` and returns its layout.
    ///
    /// # Safety
    ///
    /// `shape` and `strides` are null, or point to `ndim` numbers.
    unsafe fn of(tensor: &DLTensor) -> Result<Self> {
        let (dtype, device) = (element_type(tensor)?, known_device(tensor.device)?);
        if !(0..=MOST_DIMENSIONS).contains(&tensor.ndim) {
            return Err(refused(format!("it has {} dimensions; 0 to {MOST_DIMENSIONS} are supported", tensor.ndim)));
        }
        // SAFETY: as many as there are dimensions, or null (the caller's promise).
        let (shape, strides) = unsafe { (numbers(tensor.shape, tensor.ndim), numbers(tensor.strides, tensor.ndim)) };
        let shape = shape.ok_or_else(|| refused(format!("it has {} dimensions and no shape", tensor.ndim)))?;
        let shape = lengths(shape)?;
        let elements = count(&shape, dtype.size_bytes())?;
        if let Some(strides) = strides
            && elements > 1
            && !is_row_major(&shape, strides)
        {
            return Err(refused(format!(
                "its elements are not contiguous in row-major order: shape {shape:?}, strides {strides:?}; copy it first"
            )));
        }
        let address = address(tensor, elements, dtype)?;
        Ok(Self { address, elements, shape, dtype, device })
    }

    /// Whether the CPU can access it.
    fn is_on_host(&self) -> bool {
        matches!(self.device.device_type, K_DL_CPU | K_DL_CUDA_HOST)
    }

    /// Returns the number of the CUDA device that can access it.
    #[cfg(feature = "cuda")]
    fn cuda_device(&self) -> Option<usize> {
        let is_cuda = matches!(self.device.device_type, K_DL_CUDA | K_DL_CUDA_MANAGED);
        is_cuda.then_some(self.device.device_id).and_then(|id| usize::try_from(id).ok())
    }
}

fn element_type(tensor: &DLTensor) -> Result<DType> {
    let found = tensor.dtype;
    if found.lanes != 1 {
        return Err(refused(format!("its elements are vectors of {} lanes; only single values are supported", found.lanes)));
    }
    found.known().ok_or_else(|| refused(format!("its element type (code {}, {} bits) is not supported", found.code, found.bits)))
}

fn known_device(device: DLDevice) -> Result<DLDevice> {
    let DLDevice { device_type, device_id } = device;
    match device_type {
        K_DL_CPU | K_DL_CUDA_HOST => Ok(device),
        K_DL_CUDA | K_DL_CUDA_MANAGED if device_id >= 0 => Ok(device),
        K_DL_CUDA | K_DL_CUDA_MANAGED => Err(refused(format!("CUDA device {device_id} does not exist"))),
        other => Err(refused(format!("it is on a device of type {other}; only host memory (1, 3) and CUDA memory (2, 13) can be used"))),
    }
}

/// Returns `count` numbers; `None` if `count` is not 0 and the pointer is null.
///
/// # Safety
///
/// `first` is null or points to that many numbers.
unsafe fn numbers<'a>(first: *const i64, count: i32) -> Option<&'a [i64]> {
    match usize::try_from(count) {
        Ok(0) => Some(&[]),
        // SAFETY: the caller's promise.
        Ok(count) if !first.is_null() => Some(unsafe { std::slice::from_raw_parts(first, count) }),
        _ => None,
    }
}

fn lengths(shape: &[i64]) -> Result<Vec<usize>> {
    let lengths: std::result::Result<Vec<_>, _> = shape.iter().map(|length| usize::try_from(*length)).collect();
    lengths.map_err(|_| refused(format!("its shape {shape:?} has a negative length")))
}

/// Returns the number of elements of a shape. An error if they do not fit into the address space.
fn count(shape: &[usize], element_bytes: usize) -> Result<usize> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let elements = shape.iter().try_fold(1_usize, |product, length| product.checked_mul(*length));
    let fits = |elements: &usize| elements.checked_mul(element_bytes).is_some_and(|bytes| bytes <= isize::MAX as usize);
    elements.filter(fits).ok_or_else(|| refused(format!("its shape {shape:?} has more elements than fit into the address space")))
}

/// Whether the last dimension has stride 1, and each other dimension has the number of elements of the dimensions after
/// it as its stride. Strides of dimensions of length 1 do not matter.
fn is_row_major(shape: &[usize], strides: &[i64]) -> bool {
    let mut expected = 1_usize;
    shape.iter().zip(strides).rev().filter(|(length, _)| **length != 1).all(|(length, stride)| {
        let fits = usize::try_from(*stride) == Ok(expected);
        expected = expected.saturating_mul(*length);
        fits
    })
}

/// Returns the address of the first element.
fn address(tensor: &DLTensor, elements: usize, dtype: DType) -> Result<u64> {
    let (base, offset, bytes) = (tensor.data.addr() as u64, tensor.byte_offset, (elements * dtype.size_bytes()) as u64);
    if elements == 0 {
        return Ok(0);
    }
    if base == 0 {
        return Err(refused(format!("it has {elements} elements, but no data")));
    }
    let first = base.checked_add(offset).filter(|first| first.checked_add(bytes).is_some());
    let first = first.ok_or_else(|| refused(format!("its offset of {offset} B points outside the address space")))?;
    if !first.is_multiple_of(dtype.size_bytes() as u64) {
        return Err(refused(format!("its elements ({dtype}) are at {first:#x}, which is not aligned to {} B", dtype.size_bytes())));
    }
    Ok(first)
}
