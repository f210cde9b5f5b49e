//! Conversion of errors to PyTorch's exceptions.

use std::fmt::Display;

use collectives::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Returns the exception for an error, with the error's text: `ValueError` for a wrong argument, as everywhere in
/// PyTorch, `DistNetworkError` for a lost peer or a network error, and `DistBackendError` for all other errors.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::InvalidArgument { .. } | Error::Config { .. } => PyValueError::new_err(error.to_string()),
        Error::Timeout { .. } => of_torch(py, "DistBackendError", &format_args!("the timeout of a call has passed: {error}")),
        Error::PeerLost { .. } | Error::Io { .. } | Error::Protocol { .. } => of_torch(py, "DistNetworkError", error),
        _ => of_torch(py, "DistBackendError", error),
    }
}

/// Returns an exception of this class in `torch.distributed`, or a `RuntimeError` if there is none.
fn of_torch(py: Python<'_>, name: &str, words: &dyn Display) -> PyErr {
    let class = py.import("torch.distributed").and_then(|module| module.getattr(name));
    match class.and_then(|class| class.call1((words.to_string(),))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(words.to_string()),
    }
}

/// Converts the error of a call to an exception.
pub(crate) fn raise<T>(py: Python<'_>, result: Result<T, Error>) -> PyResult<T> {
    result.map_err(|error| exception(py, &error))
}
