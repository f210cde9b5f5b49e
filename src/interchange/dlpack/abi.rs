//! The structures of dlpack.h, with its names, and what its codes mean here.

use std::ffi::c_void;

use crate::element::DType;

/// The version of DLPack that is written, and whose major number is read.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// The tensor may not be written.
pub const DLPACK_FLAG_READ_ONLY: u64 = 1;
/// The tensor is a copy that its producer made, and the consumer's alone.
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
    /// Changes with the layout of the structures.
    pub major: u32,
    /// Changes with the codes.
    pub minor: u32,
}

/// Where a tensor lies.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// A `DLDeviceType`.
    pub device_type: i32,
    /// Which of that type.
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

/// A tensor that somebody else owns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLTensor {
    /// The address that `byte_offset` counts from.
    pub data: *mut c_void,
    /// Where it lies.
    pub device: DLDevice,
    /// How many dimensions it has.
    pub ndim: i32,
    /// What its elements are.
    pub dtype: DLDataType,
    /// `ndim` lengths.
    pub shape: *mut i64,
    /// `ndim` steps in elements; null means row by row.
    pub strides: *mut i64,
    /// Where its first element is, in bytes from `data`.
    pub byte_offset: u64,
}

/// A tensor with its owner's deleter, as it was before DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The owner's.
    pub manager_ctx: *mut c_void,
    /// Called once, by whoever takes the tensor, when it is done.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A tensor with its owner's deleter, as it is since DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The layout that the rest has.
    pub version: DLPackVersion,
    /// The owner's.
    pub manager_ctx: *mut c_void,
    /// Called once, by whoever takes the tensor, when it is done.
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
    /// The element type, where it is one of this crate's.
    pub(super) fn known(self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| Self::from(*dtype) == self)
    }
}
