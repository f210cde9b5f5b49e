//! Sizes, counts and times at which behaviour changes, and nothing else: this file uses nothing of the crate.
//!
//! Each can be changed without a change of what a call means. Those that ranks must agree on say so. Limits of protocols and formats stand
//! where these are defined.

/// The store in a file (`rendezvous/file/`).
pub(crate) mod file_store {
    use std::time::Duration;

    /// The first and the longest pause between two looks at the file for a key.
    pub(crate) const KEY_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
    /// The same between two looks at its lock, which others hold for a few writes.
    pub(crate) const LOCK_PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
    /// How long a store that is dropped waits for the lock, to count itself out.
    pub(crate) const CLOSING: Duration = Duration::from_secs(5);
}

/// What a store's server keeps for each client (`rendezvous/service/`).
pub(crate) mod service {
    /// Unsent bytes of answers from which a client's further requests wait until it has read some.
    pub(crate) const UNSENT_BYTES: usize = 1 << 20;
    /// Unread bytes of requests from which a client whose wait is parked is not read from.
    pub(crate) const UNREAD_BYTES: usize = 1 << 20;
}

/// Trace files (`observe/trace.rs`).
pub(crate) mod trace {
    /// Calls that are kept for the file; of more, the last ones. About 30 MiB.
    pub(crate) const MOST_EVENTS: usize = 1 << 17;
}

/// Training (`train/`).
pub(crate) mod train {
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
}
