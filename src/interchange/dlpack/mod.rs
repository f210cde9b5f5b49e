//! Tensors handed between libraries in one process, as DLPack defines it: in and out, in the structures of before 1.0
//! ([`DLManagedTensor`]) and of 1.x ([`DLManagedTensorVersioned`]).
//!
//! What comes in is a [`Tensor`]: host memory is lent as slices, memory of a GPU as a view that calls take. What goes out is any
//! buffer that can be owned: [`export()`] and [`export_legacy`].
//!
//! ```
//! use collectives::{Communicator, ReduceOp, dlpack};
//!
//! // A library hands over a tensor; here this crate plays its part.
//! let handed_over = dlpack::export(vec![1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//!
//! // SAFETY: made just now, and nobody else uses it.
//! let mut tensor = unsafe { dlpack::Tensor::from_versioned(handed_over) }?;
//! let comm = Communicator::local(1)?.remove(0);
//! comm.all_reduce(tensor.as_mut_slice::<f32>()?, ReduceOp::Sum)?;
//! assert_eq!(tensor.shape(), [2, 2]);
//! # Ok::<(), collectives::Error>(()) // the tensor goes back to its library here
//! ```

#![expect(unsafe_code, reason = "C structures that other libraries fill in")]

mod abi;
#[cfg(feature = "cuda")]
mod device;
mod export;
mod import;
mod layout;
#[cfg(test)]
mod tests;

pub use abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_IS_COPIED, DLPACK_FLAG_READ_ONLY, DLPackVersion, DLTensor,
    VERSION,
};
pub use abi::{K_DL_CPU, K_DL_CUDA, K_DL_CUDA_HOST, K_DL_CUDA_MANAGED};
#[cfg(feature = "cuda")]
pub use device::{DeviceTensor, DeviceTensorMut};
pub use export::{export, export_legacy};
#[cfg(feature = "cuda")]
pub use export::{export_legacy_on, export_on};
pub use import::Tensor;
