//! The elements of a part of a tensor: borrowed, or read when a rank writes them.

use std::borrow::Cow;
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::bytes::bytes_of;
use collectives::{Element, Error, Result};

/// The elements of one part.
pub(super) enum Values<'a> {
    Borrowed(&'a [u8]),
    /// Returns their bytes. Called at most once, on a rank that writes them.
    Read(Box<dyn FnOnce() -> Result<Vec<u8>> + Send + 'a>),
}

impl<'a> Values<'a> {
    pub(super) fn borrowed<T: Element>(values: &'a [T]) -> Self {
        Self::Borrowed(bytes_of(values))
    }

    /// Returns values that the program's `read` returns later. There must be `len` of them.
    pub(super) fn read_with<T: Element>(name: &str, len: usize, read: impl FnOnce() -> Result<Vec<T>> + Send + 'a) -> Self {
        let name = name.to_owned();
        let refused = move |reason: String| Error::argument("Writer::tensor_with", format!("tensor {name:?}: {reason}"));
        Self::Read(Box::new(move || match catch_unwind(AssertUnwindSafe(read)) {
            Ok(values) => match values? {
                values if values.len() == len => Ok(bytes_of(&values).to_vec()),
                values => Err(refused(format!("`read` returned {} elements, but the piece has {len}", values.len()))),
            },
            Err(panic) => {
                // Its drop is the program's code, too.
                std::mem::forget(panic);
                Err(refused("`read` panicked; the message of the panic is on standard error".to_owned()))
            }
        }))
    }

    /// Returns the bytes of the elements, as in memory.
    pub(super) fn into_bytes(self) -> Result<Cow<'a, [u8]>> {
        match self {
            Self::Borrowed(bytes) => Ok(Cow::Borrowed(bytes)),
            Self::Read(read) => read().map(Cow::Owned),
        }
    }

    /// Returns a copy of the bytes of the elements.
    pub(super) fn into_copy(self) -> Result<Vec<u8>> {
        let bytes = match self {
            Self::Borrowed(bytes) => bytes,
            Self::Read(read) => return read(),
        };
        let mut copy = Vec::new();
        let no_room = |_| {
            let doing = format!("allocating {} B for a copy of a tensor, to save the tensor in the background", bytes.len());
            Error::io(doing, io::Error::from(ErrorKind::OutOfMemory))
        };
        copy.try_reserve_exact(bytes.len()).map_err(no_room)?;
        copy.extend_from_slice(bytes);
        Ok(copy)
    }
}
