//! What calls are made of: sources, elements, counts, room for results.

use crate::element::{Data, TypeTag};
use crate::error::{Error, Result};

/// What a call reads: nothing, a buffer of its own, or the buffer it writes (in place).
pub(super) enum Source<M> {
    Nothing,
    Separate(M),
    InPlace,
}

/// An element type with a name and a size; types of size 0 and huge ones are refused.
pub(super) fn element<T: Data>(call: &'static str) -> Result<(TypeTag, usize)> {
    match size_of::<T>() {
        0 => Err(Error::argument(call, "elements of size 0 carry nothing")),
        size if size > TypeTag::MAX_BYTES => {
            Err(Error::argument(call, format!("elements of {size} B are too large: at most {} B, or send their parts", TypeTag::MAX_BYTES)))
        }
        size => Ok((TypeTag::of::<T>(), size)),
    }
}

/// An empty vector with room for so many elements.
pub(super) fn room<T>(call: &str, what: &str, count: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    match room.try_reserve_exact(count) {
        Ok(()) => Ok(room),
        Err(_) => {
            let doing = format!("{call}: room for {what}, {} B", count.saturating_mul(size_of::<T>()));
            Err(Error::io(doing, std::io::Error::from(std::io::ErrorKind::OutOfMemory)))
        }
    }
}

/// Counts of elements as counts of bytes.
pub(super) fn to_bytes<T>(counts: &[usize]) -> Vec<usize> {
    counts.iter().map(|count| count * size_of::<T>()).collect()
}
