//! The Rust side of `collectives_torch`: a group of ranks over a store of PyTorch's, its calls on memory of tensors, and their ends.
//!
//! Python passes addresses, lengths and types of tensors and keeps nothing else: a call owns a reference to what it was given (`owner`) until it
//! has ended, so a tensor that nobody else holds stays where it is. What has to be copied before or after a call, Python copies.

mod buffer;
mod completion;
mod error;
mod group;
mod store;
mod work;

use pyo3::prelude::*;

/// What Python imports as `collectives_torch._core`.
#[pymodule(name = "_core")]
mod core {
    #[pymodule_export]
    use crate::completion::stop_telling;
    #[pymodule_export]
    use crate::group::Group;
    #[pymodule_export]
    use crate::work::Work;
}
