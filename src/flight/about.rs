//! Whose records these are.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Peer;

/// What is known of a communicator once it is made.
#[derive(Debug, Clone)]
pub(crate) struct About {
    /// The same on every rank, and on no other communicator's.
    pub(crate) id: u64,
    /// The same on every rank: `world`, or what it was split from and how.
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) peers: Arc<[Peer]>,
    /// How its ranks reach each other, in words.
    pub(crate) wiring: String,
    pub(crate) timeout: Duration,
}

impl About {
    /// A short number for a communicator, of the long one that its ranks drew.
    pub(crate) fn id_of(drawn: [u8; 16]) -> u64 {
        drawn.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }
}
