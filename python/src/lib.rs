//! The Rust side of `collectives_torch`: a group of ranks that meet at a PyTorch store, their calls on tensor memory,
//! and the notification of Python when calls end.
//!
//! Python passes the addresses, lengths and types of tensors. A background call owns a reference to its tensors
//! (`owner`) until the call has ended. So the memory of the tensors stays valid even if the program drops them. Python
//! makes all copies before and after a call.

mod buffer;
mod completion;
mod error;
mod group;
mod interrupt;
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
    use crate::interrupt::read_signals;
    #[pymodule_export]
    use crate::work::Work;
}
