//! Errors of calls on tensors.

use burn::tensor::DType;

/// The reason why a call on a tensor failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed: see [`collectives::Error`] for what to do.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
    /// `collectives` does not support the tensor's type.
    #[error("{what}: collectives does not support {dtype:?}; cast the tensor to a supported type first")]
    Type {
        /// The tensor.
        what: String,
        /// Its type.
        dtype: DType,
    },
    /// A tensor's shape does not fit a call.
    #[error("{what}: {reason}")]
    Shape {
        /// The call, or the tensor.
        what: String,
        /// The mismatch.
        reason: String,
    },
    /// burn could not read a tensor or create one.
    #[error("{what}: burn failed: {reason}")]
    Burn {
        /// The tensor.
        what: String,
        /// The message of burn's error.
        reason: String,
    },
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn burn(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Burn { what: what.to_owned(), reason: error.to_string() }
    }

    pub(crate) fn shape(what: &str, reason: impl Into<String>) -> Self {
        Self::Shape { what: what.to_owned(), reason: reason.into() }
    }
}
