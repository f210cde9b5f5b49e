//! The means by which calls use the memory and streams of other crates: small traits for GPU memory, raw addresses, and
//! DLPack tensors.

pub mod dlpack;
#[cfg(feature = "cuda")]
mod foreign;

#[cfg(feature = "cuda")]
pub use foreign::{AsDevicePtr, AsDevicePtrMut, AsStream, ForeignBuffer, RawStream};

#[cfg(feature = "cuda")]
pub use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut};
#[cfg(feature = "cuda")]
pub use crate::call::buffer::device_buffers::RawDeviceSlice;
pub use crate::call::buffer::{HostMemory, HostMemoryMut, Memory, MemoryMut, RawHostSlice, StableMemory};
pub use crate::call::element::AnyElement;
