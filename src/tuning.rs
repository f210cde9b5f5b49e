//! Sizes, counts and times at which behaviour changes, and nothing else: this file uses nothing of the crate.
//!
//! Each can be changed without a change of what a call means. Those that ranks must agree on say so. Limits of protocols and formats stand
//! where these are defined.

/// Barriers (`communicator/barrier.rs`).
pub(crate) mod barrier {
    use std::time::Duration;

    /// How much longer the others wait for the verdict of a monitored barrier than rank 0, which gives it, waits for them.
    pub(crate) const VERDICT_PATIENCE: Duration = Duration::from_secs(5);
}

/// Folds on devices (`device/plan/`, `device/kernels/`).
#[cfg(feature = "cuda")]
pub(crate) mod device_folds {
    /// Bytes from all ranks together up to which a vector is gathered and then folded: one step less than in shares. Agreed.
    pub(crate) const SMALL_BYTES: usize = 256 << 10;
    /// Bytes of the smallest slab: the exchange of a smaller one hides nothing. Agreed.
    pub(crate) const LEAST_SLAB_BYTES: usize = 4 << 20;
    /// Slabs of a large vector: with so many, exchange and fold overlap. Agreed.
    pub(crate) const SLABS: usize = 4;
    /// Blocks of a kernel for each multiprocessor at most: as many as run at once.
    pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
    /// Chunks of 16 B that a thread adds to a sum of squares before there are more blocks instead.
    pub(crate) const CHUNKS_PER_THREAD: u64 = 2;
}

/// How long NCCL, streams and devices are waited for (`device/`).
#[cfg(feature = "cuda")]
pub(crate) mod device {
    use std::time::Duration;

    /// Looks of a waiter that spins between them, before it yields: what NCCL is asked for is mostly done by then.
    pub(crate) const SPINS: u32 = 100;
    /// Looks of a waiter that spins or yields between them, before it sleeps.
    pub(crate) const YIELDS: u32 = 150;
    /// Microseconds of the first and the longest sleep between two looks; each is one longer than the last.
    pub(crate) const SLEEP_MICROS: (u32, u32) = (20, 1000);
    /// Looks of a started call's waiter at its event without sleeping: a short call has ended by then.
    pub(crate) const LOOKS: u32 = 200;
    /// Its sleep between two later looks.
    pub(crate) const NAP: Duration = Duration::from_micros(20);
    /// The time between two rounds of the watchdog: a tenth of the shortest timeout, within these.
    pub(crate) const ROUNDS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
    /// Events of the watchdog on one stream at a time. It makes about ten in the time that a call may take.
    pub(crate) const MARKS: usize = 16;
    /// How long the caller of an abort waits for it. It goes on in the background: NCCL may wait for other ranks to abort, too.
    pub(crate) const ABORT_WAIT: Duration = Duration::from_secs(2);
    /// How long an abort waits for threads to come out of NCCL before it goes on without them.
    pub(crate) const FENCE: Duration = Duration::from_secs(1);
    /// How long a communicator that is dropped, and was not closed, may take to finish what was begun.
    pub(crate) const COMMUNICATOR_DROP_WAIT: Duration = Duration::from_secs(5);
    /// How long the end of a plane waits for its kernels on streams of the caller's.
    pub(crate) const PLANE_DROP_WAIT: Duration = Duration::from_secs(5);
    /// How long a buffer of NCCL's that is dropped waits for the streams that use it. After that its memory is lost.
    pub(crate) const BUFFER_DROP_WAIT: Duration = Duration::from_secs(60);
    /// How long the end of a registration or a window waits for the device.
    pub(crate) const REGISTRATION_DROP_WAIT: Duration = Duration::from_secs(600);
    /// How long it waits for a communicator that has ended to be gone.
    pub(crate) const GONE_WAIT: Duration = Duration::from_secs(10);
}

/// Who is gone while a device waits (`communicator/device/liveness.rs`).
#[cfg(feature = "cuda")]
pub(crate) mod liveness {
    use std::time::Duration;

    /// How long something waits before anybody is looked for.
    pub(crate) const PATIENCE: Duration = Duration::from_millis(50);
    /// The time between two looks.
    pub(crate) const PAUSE: Duration = Duration::from_millis(20);
    /// How long a rank has been gone before it is lost: what it did last may still be on its way through the devices.
    pub(crate) const GRACE: Duration = Duration::from_secs(1);
    /// Answers of a recovery listener whose process is gone, after which the process is taken for one that is not seen from here. While a
    /// process is being killed its listener answers until its last thread has ended.
    pub(crate) const ANSWERS: u32 = 9;
    /// How long the rank is looked for of which NCCL says that it is gone: what broke its connection may still be under way.
    pub(crate) const SEARCH: Duration = Duration::from_millis(500);
}
