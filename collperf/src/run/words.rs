//! What ranks tell each other about themselves.

use collectives::{Communicator, Data};

/// Everyone's part of the same length, in rank order.
pub(super) fn share<T: Data + Default>(comm: &Communicator, mine: &[T]) -> collectives::Result<Vec<T>> {
    let mut all = vec![T::default(); mine.len() * comm.world_size()];
    comm.all_gather_into(mine, &mut all)?;
    Ok(all)
}

/// The longest name that is told to others, in bytes.
pub(super) const NAME_BYTES: usize = 128;

/// What was told.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

/// A text in as many bytes as all ranks tell.
pub(super) fn name(text: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0_u8; NAME_BYTES];
    for (byte, from) in bytes.iter_mut().zip(text.bytes()) {
        *byte = from;
    }
    bytes
}
