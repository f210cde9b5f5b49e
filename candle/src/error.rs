//! Errors of collectives inside errors of candle.

use std::error::Error as StdError;
use std::io;

use candle_core::Error;

/// Wraps an error of a collective in an error of candle. candle has no variant for errors of other crates that keeps
/// their type, except for errors of input and output.
pub(crate) fn failed(error: collectives::Error) -> Error {
    Error::Io(io::Error::other(error)).bt()
}

/// Returns the error of a collective that caused an error of candle, or `None` if the error has another cause. So a
/// program can tell a lost peer from a wrong shape. Also finds the cause if a context, a path or a backtrace was added
/// to the error.
///
/// The cause is found in errors that functions of this crate return. If your own code gets an error of a collective,
/// convert it with [`std::io::Error::other`], or add a context with `candle_core::Context`, so that the cause is found.
/// `candle_core::Error::wrap` keeps only the text, so the cause is not found.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use collectives::{Communicator, ReduceOp};
/// use collectives_candle::{all_reduce, cause};
///
/// let lost = Communicator::run_local(2, |comm| {
///     if comm.rank() == 1 {
///         return Ok(None); // and leaves
///     }
///     let x = Tensor::ones(4, DType::F32, &Device::Cpu).expect("memory");
///     let error = all_reduce(comm, &x, ReduceOp::Sum).expect_err("rank 1 left").context("layer 3");
///     Ok(cause(&error).and_then(|error| error.peer()).map(|peer| peer.rank))
/// })?;
/// assert_eq!(lost[0], Some(1));
/// assert!(cause(&candle_core::Error::Msg("a wrong shape".to_owned())).is_none());
/// # Ok::<(), collectives::Error>(())
/// ```
#[must_use]
pub fn cause(error: &Error) -> Option<&collectives::Error> {
    match error {
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => cause(inner),
        Error::WrappedContext { wrapped, .. } | Error::Cuda(wrapped) => cause_of(&**wrapped),
        Error::Io(error) => cause_of(error),
        _ => None,
    }
}

/// Does the same with an error whose type is not known.
fn cause_of<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a collectives::Error> {
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return error.get_ref().and_then(|error| cause_of(error));
    }
    error.downcast_ref().or_else(|| error.downcast_ref().and_then(cause))
}
