//! Memory and streams of other crates: small traits for what lies on a GPU, and DLPack.

pub mod dlpack;
#[cfg(feature = "cuda")]
mod foreign;

#[cfg(feature = "cuda")]
pub use foreign::{AsDevicePtr, AsDevicePtrMut, AsStream, ForeignBuffer, RawStream};
