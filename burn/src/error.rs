//! What can go wrong.

use burn::tensor::DType;

/// Why a call on a tensor failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed: see [`collectives::Error`] for what to do.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
    /// A tensor's type is none that collectives have.
    #[error("{what}: collectives know no {dtype:?}; cast it to one of theirs first")]
    Type {
        /// Which tensor.
        what: String,
        /// Its type.
        dtype: DType,
    },
    /// A tensor's shape does not fit a call.
    #[error("{what}: {reason}")]
    Shape {
        /// Which call, or tensor.
        what: String,
        /// What does not fit.
        reason: String,
    },
    /// burn could not read a tensor, or make one.
    #[error("{what}: burn says: {reason}")]
    Burn {
        /// Which tensor.
        what: String,
        /// Its words.
        reason: String,
    },
}

/// What a call gives.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn burn(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Burn { what: what.to_owned(), reason: error.to_string() }
    }

    pub(crate) fn shape(what: &str, reason: impl Into<String>) -> Self {
        Self::Shape { what: what.to_owned(), reason: reason.into() }
    }
}
