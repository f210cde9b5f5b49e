//! Sizes and times that may be tuned. "Agreed" marks those that must be the same on all ranks.

#[cfg(feature = "cuda")]
use std::time::Duration;

/// Most bytes of the first bucket of an element type. Small, so that the first reduction starts early. Agreed.
pub(crate) const FIRST_BUCKET_BYTES: usize = 1 << 20;
/// Most bytes of every other bucket: torch's default. Agreed.
pub(crate) const BUCKET_BYTES: usize = 25 << 20;
/// The size in bytes from which a parameter in host memory is alone in its bucket, so that its gradient need not be
/// copied. Agreed.
pub(crate) const OWN_BUCKET_BYTES: usize = 256 << 10;
/// Elements that are converted at a time. They stay in the first-level cache.
pub(crate) const CONVERTED_AT_ONCE: usize = 1024;
/// How long to wait for kernels before they are unloaded. Kernels that take longer are never unloaded.
#[cfg(feature = "cuda")]
pub(crate) const UNLOAD_PATIENCE: Duration = Duration::from_secs(5);
/// The pause between two checks of whether those kernels have ended.
#[cfg(feature = "cuda")]
pub(crate) const UNLOAD_POLL: Duration = Duration::from_millis(1);
/// Most blocks of a kernel per multiprocessor: as many as run at once.
#[cfg(feature = "cuda")]
pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
/// Chunks of 16 B that a thread adds to a sum of squares before more blocks are used instead.
#[cfg(feature = "cuda")]
pub(crate) const CHUNKS_PER_THREAD: u64 = 2;

/// Checkpoints (`checkpoint/`).
#[cfg(feature = "checkpoint")]
pub(crate) mod checkpoint {
    /// Most bytes that are read from a file at a time.
    pub(crate) const READ_BYTES: usize = 1 << 20;
    /// Largest gap, in bytes, between two wanted ranges of a file that are read together. Reading the gap costs less
    /// than a system call.
    pub(crate) const GAP_BYTES: usize = 4 << 10;
    /// Most ranges that are read at once. A list of them is kept for each file.
    pub(crate) const RANGES_AT_ONCE: usize = 512;
}

/// Transfers of state between ranks (`state_transfer/`).
#[cfg(feature = "checkpoint")]
pub(crate) mod state_transfer {
    /// Most bytes of a message. Agreed.
    pub(crate) const MOST_BYTES: usize = 1 << 20;
    /// Fewest bytes of a message, except for small tensors. Smaller messages take more time for each byte. Agreed.
    pub(crate) const LEAST_BYTES: usize = 64 << 10;
    /// Most messages of all ranks together, each of at most `MOST_BYTES`: 256 TiB. Every rank plans all messages, so this
    /// limits the time of planning. Agreed.
    pub(crate) const MOST_MESSAGES: u64 = 1 << 28;
    /// Most ranks that offer the same elements and are compared before one of them is chosen to send. Agreed.
    pub(crate) const COMPARED_HOLDERS: usize = 64;
    /// Most messages of a rank that have started and not ended.
    pub(crate) const IN_FLIGHT: usize = 16;
    /// Most bytes that all ranks together need to describe their parts. Agreed.
    pub(crate) const MOST_DESCRIBED: u64 = 256 << 20;
}
