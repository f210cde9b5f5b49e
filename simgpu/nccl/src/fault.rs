//! The reason for a failed call: the code for the caller, the text for `ncclGetLastError`.

use crate::abi::Code;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The code that the caller gets.
    pub(crate) code: Code,
    /// The text of `ncclGetLastError`.
    pub(crate) text: String,
}

/// The result of calls inside this library. `Ok` may still carry `IN_PROGRESS`.
pub(crate) type Outcome<T> = Result<T, Fault>;

impl Fault {
    /// Makes a fault with this code.
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Fault {
        Fault { code, text: text.into() }
    }

    /// Makes the fault of a wrong argument; a communicator survives it.
    pub(crate) fn argument(text: impl Into<String>) -> Fault {
        Fault::new(Code::INVALID_ARGUMENT, text)
    }

    /// Makes the fault of a call that is not allowed here.
    pub(crate) fn usage(text: impl Into<String>) -> Fault {
        Fault::new(Code::INVALID_USAGE, text)
    }

    /// Makes the fault of a lost peer.
    pub(crate) fn remote(text: impl Into<String>) -> Fault {
        Fault::new(Code::REMOTE_ERROR, text)
    }

    /// Makes the fault of a refused driver call.
    pub(crate) fn cuda(what: &str, code: i32) -> Fault {
        Fault::new(Code::UNHANDLED_CUDA_ERROR, format!("Cuda failure {code} in {what}"))
    }
}
