//! Sizes and times that may be tuned. What is "agreed" must be the same on all ranks.

#[cfg(feature = "cuda")]
use std::time::Duration;

/// Bytes of the first bucket of an element type, at most: small, so that the first reduction starts early. Agreed.
pub(crate) const FIRST_BUCKET_BYTES: usize = 1 << 20;
/// Bytes of every other bucket, at most: torch's default. Agreed.
pub(crate) const BUCKET_BYTES: usize = 25 << 20;
/// Bytes of a parameter from which it is alone in its bucket in host memory: it is not copied then. Agreed.
pub(crate) const OWN_BUCKET_BYTES: usize = 256 << 10;
/// Elements that are converted at a time: they stay in the nearest cache.
pub(crate) const CONVERTED_AT_ONCE: usize = 1024;
/// How long kernels are waited for before they are unloaded. Those that take longer are never unloaded.
#[cfg(feature = "cuda")]
pub(crate) const UNLOAD_PATIENCE: Duration = Duration::from_secs(5);
/// The pause between two looks at whether they have ended.
#[cfg(feature = "cuda")]
pub(crate) const UNLOAD_POLL: Duration = Duration::from_millis(1);
/// Blocks of a kernel for each multiprocessor at most: as many as run at once.
#[cfg(feature = "cuda")]
pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
/// Chunks of 16 B that a thread adds to a sum of squares before there are more blocks instead.
#[cfg(feature = "cuda")]
pub(crate) const CHUNKS_PER_THREAD: u64 = 2;

/// Checkpoints (`checkpoint/`).
#[cfg(feature = "checkpoint")]
pub(crate) mod checkpoint {
    /// Bytes that are read from a file at a time, at most.
    pub(crate) const READ_BYTES: usize = 1 << 20;
    /// Bytes between two wanted ranges of a file up to which both are read at once: reading them costs less than a system call.
    pub(crate) const GAP_BYTES: usize = 4 << 10;
    /// Ranges that are read at once, at most: a list of them is kept for each file.
    pub(crate) const RANGES_AT_ONCE: usize = 512;
}
