//! What ranks tell each other before they can talk: who is where.

use crate::Result;
use crate::deadline::Deadline;

/// Lets the ranks of a new communicator exchange small blobs: over a store, or over the communicator it is split from.
pub(crate) trait Exchange {
    /// Hands in this rank's blob and gets everyone's, in rank order. Every rank calls it the same number of times.
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>>;
}
