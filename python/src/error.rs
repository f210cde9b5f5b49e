//! Errors, as the exceptions that PyTorch has for them.

use std::fmt::Display;

use collectives::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The exception for an error: a wrong argument is a `ValueError`, as everywhere in PyTorch; a peer that is gone is a `DistNetworkError`; all else
/// is a `DistBackendError`. The words are the error's own.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::InvalidArgument { .. } | Error::Config { .. } => PyValueError::new_err(error.to_string()),
        Error::Timeout { .. } => of_torch(py, "DistBackendError", &format_args!("the timeout of a call has passed: {error}")),
        Error::PeerLost { .. } | Error::Io { .. } | Error::Protocol { .. } => of_torch(py, "DistNetworkError", error),
        _ => of_torch(py, "DistBackendError", error),
    }
}

/// An exception of `torch.distributed`.
fn of_torch(py: Python<'_>, name: &str, words: &dyn Display) -> PyErr {
    let class = py.import("torch.distributed").and_then(|module| module.getattr(name));
    match class.and_then(|class| class.call1((words.to_string(),))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(words.to_string()),
    }
}

/// Raises an error of a call.
pub(crate) fn raise<T>(py: Python<'_>, result: Result<T, Error>) -> PyResult<T> {
    result.map_err(|error| exception(py, &error))
}
