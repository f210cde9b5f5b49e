//! Why a call failed: the code for the caller, the words for `ncclGetLastError`.

use crate::abi::Code;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// What the caller gets.
    pub(crate) code: Code,
    /// What `ncclGetLastError` says.
    pub(crate) text: String,
}

/// What calls return inside this library. `Ok` may still carry `IN_PROGRESS`.
pub(crate) type Outcome<T> = Result<T, Fault>;

impl Fault {
    /// A fault with this code.
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Fault {
        Fault { code, text: text.into() }
    }

    /// An argument that is wrong; a communicator survives it.
    pub(crate) fn argument(text: impl Into<String>) -> Fault {
        Fault::new(Code::INVALID_ARGUMENT, text)
    }

    /// A call that is not allowed here.
    pub(crate) fn usage(text: impl Into<String>) -> Fault {
        Fault::new(Code::INVALID_USAGE, text)
    }

    /// A peer that is gone.
    pub(crate) fn remote(text: impl Into<String>) -> Fault {
        Fault::new(Code::REMOTE_ERROR, text)
    }

    /// A driver call that was refused.
    pub(crate) fn cuda(what: &str, code: i32) -> Fault {
        Fault::new(Code::UNHANDLED_CUDA_ERROR, format!("Cuda failure {code} in {what}"))
    }
}
