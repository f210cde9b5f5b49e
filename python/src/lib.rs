//! The Rust side of `collectives_torch`: a group of ranks over a PyTorch store, calls on tensor memory, and their ends.
//!
//! Python passes the addresses, lengths and types of tensors. A background call owns a reference to its tensors
//! (`owner`) until it has ended, so their memory stays valid if the program drops them. Python makes all copies before
//! and after a call.

mod buffer;
mod completion;
mod error;
mod group;
mod store;
mod work;

use pyo3::prelude::*;

/// The module that Python imports as `collectives_torch._core`.
#[pymodule(name = "_core")]
mod core {
    #[pymodule_export]
    use crate::completion::stop_telling;
    #[pymodule_export]
    use crate::group::Group;
    #[pymodule_export]
    use crate::work::Work;
}
