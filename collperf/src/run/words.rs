//! The exchange of facts between ranks.

use collectives::{Communicator, Data};

/// Gathers one part from each rank, all of the same length, in rank order.
pub(super) fn share<T: Data + Default>(comm: &Communicator, mine: &[T]) -> collectives::Result<Vec<T>> {
    let mut all = vec![T::default(); mine.len() * comm.world_size()];
    comm.all_gather_into(mine, &mut all)?;
    Ok(all)
}

/// Bytes of a name that ranks exchange; longer names are cut.
pub(super) const NAME_BYTES: usize = 128;

/// Reads a name that [`name`] has made.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

/// Makes a name of fixed length from a text.
pub(super) fn name(text: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0_u8; NAME_BYTES];
    for (byte, from) in bytes.iter_mut().zip(text.bytes()) {
        *byte = from;
    }
    bytes
}
