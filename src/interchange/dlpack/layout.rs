//! What a tensor's fields say, checked before anything is believed.

use super::abi::{DLDevice, DLTensor, K_DL_CPU, K_DL_CUDA, K_DL_CUDA_HOST, K_DL_CUDA_MANAGED};
use crate::element::DType;
use crate::error::{Error, Result};

/// The most dimensions that any library makes.
const MOST_DIMENSIONS: i32 = 1024;

/// A tensor of a known type, all of whose elements lie side by side, row by row.
#[derive(Debug)]
pub(super) struct TensorLayout {
    /// Of the first element, aligned; never used where there are none.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "what lies on the host has a pointer"))]
    pub(super) address: u64,
    pub(super) elements: usize,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) device: DLDevice,
}

/// A tensor that cannot be used.
pub(super) fn refused(reason: impl Into<String>) -> Error {
    Error::argument("DLPack import", reason)
}

impl TensorLayout {
    /// What `tensor` says, where all of it holds.
    ///
    /// # Safety
    ///
    /// `shape` and `strides` are null, or point at `ndim` numbers.
    pub(super) unsafe fn of(tensor: &DLTensor) -> Result<Self> {
        let (dtype, device) = (element_type(tensor)?, known_device(tensor.device)?);
        if !(0..=MOST_DIMENSIONS).contains(&tensor.ndim) {
            return Err(refused(format!("it has {} dimensions; 0 to {MOST_DIMENSIONS} can be understood", tensor.ndim)));
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
            return Err(refused(format!("its elements do not lie row by row: shape {shape:?}, strides {strides:?}; copy it first")));
        }
        let address = address(tensor, elements, dtype)?;
        Ok(Self { address, elements, shape, dtype, device })
    }

    /// Whether the processor can reach it.
    pub(super) fn is_on_host(&self) -> bool {
        matches!(self.device.device_type, K_DL_CPU | K_DL_CUDA_HOST)
    }

    /// The number of the CUDA device that can reach it.
    #[cfg(feature = "cuda")]
    pub(super) fn cuda_device(&self) -> Option<usize> {
        let is_cuda = matches!(self.device.device_type, K_DL_CUDA | K_DL_CUDA_MANAGED);
        is_cuda.then_some(self.device.device_id).and_then(|id| usize::try_from(id).ok())
    }
}

fn element_type(tensor: &DLTensor) -> Result<DType> {
    let found = tensor.dtype;
    if found.lanes != 1 {
        return Err(refused(format!("its elements are vectors of {} lanes; only single values can be understood", found.lanes)));
    }
    found.known().ok_or_else(|| refused(format!("its element type (code {}, {} bits) is none of this crate's", found.code, found.bits)))
}

fn known_device(device: DLDevice) -> Result<DLDevice> {
    let DLDevice { device_type, device_id } = device;
    match device_type {
        K_DL_CPU | K_DL_CUDA_HOST => Ok(device),
        K_DL_CUDA | K_DL_CUDA_MANAGED if device_id >= 0 => Ok(device),
        K_DL_CUDA | K_DL_CUDA_MANAGED => Err(refused(format!("CUDA device {device_id} does not exist"))),
        other => Err(refused(format!("it lies on a device of type {other}; host memory (1, 3) and CUDA's (2, 13) can be used"))),
    }
}

/// `count` numbers; `None` where there should be some and the pointer is null.
///
/// # Safety
///
/// `first` is null or points at as many.
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

/// How many elements a shape has, if so many fit into an address space.
fn count(shape: &[usize], element_bytes: usize) -> Result<usize> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let elements = shape.iter().try_fold(1_usize, |product, length| product.checked_mul(*length));
    let fits = |elements: &usize| elements.checked_mul(element_bytes).is_some_and(|bytes| bytes <= isize::MAX as usize);
    elements.filter(fits).ok_or_else(|| refused(format!("its shape {shape:?} has more elements than an address space holds")))
}

/// Whether the last index moves by one, and each other by as much as the ones behind it have. Dimensions of one element never move.
fn is_row_major(shape: &[usize], strides: &[i64]) -> bool {
    let mut expected = 1_usize;
    shape.iter().zip(strides).rev().filter(|(length, _)| **length != 1).all(|(length, stride)| {
        let fits = usize::try_from(*stride) == Ok(expected);
        expected = expected.saturating_mul(*length);
        fits
    })
}

/// Where the first element is.
fn address(tensor: &DLTensor, elements: usize, dtype: DType) -> Result<u64> {
    let (base, offset, bytes) = (tensor.data.addr() as u64, tensor.byte_offset, (elements * dtype.size_bytes()) as u64);
    if elements == 0 {
        return Ok(0);
    }
    if base == 0 {
        return Err(refused(format!("it has {elements} elements and no data")));
    }
    let first = base.checked_add(offset).filter(|first| first.checked_add(bytes).is_some());
    let first = first.ok_or_else(|| refused(format!("its offset of {offset} B leads out of the address space")))?;
    if !first.is_multiple_of(dtype.size_bytes() as u64) {
        return Err(refused(format!("its elements, {dtype}, lie at {first:#x}, which is not aligned to {} B", dtype.size_bytes())));
    }
    Ok(first)
}
