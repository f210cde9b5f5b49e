//! What the fuzz targets call, each with any bytes: functions that panic where something does not hold. They lie beside what they try.

#[cfg(feature = "serde")]
pub use crate::communicator::fuzz::objects;
pub use crate::host::fuzz::{
    acceptor, algorithms, engine_headers, engine_peer, facts, fingerprints, greetings, message_frames, message_peer, shared_memory_file,
    shared_memory_layout, shared_memory_ring,
};
pub use crate::rendezvous::fuzz::{file_log, launchers, settings, store_replies, store_requests, store_service, urls};

/// Inputs to begin with, each with the name of its target: what is sent and said where all is in order.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds = crate::rendezvous::fuzz::seeds();
    seeds.extend(crate::host::fuzz::seeds());
    #[cfg(feature = "serde")]
    seeds.extend(crate::communicator::fuzz::seeds());
    seeds
}
