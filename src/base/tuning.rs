//! Sizes, counts and times at which behaviour changes, and nothing else. This file does not depend on the rest of the
//! crate.
//!
//! Each constant can change without changing the meaning of a call. "Agreed" marks constants that must be the same on
//! every rank. Limits of a protocol or a format are not in this file, but in the file that defines the protocol or
//! format.

/// Barriers (`communicator/forms/barrier.rs`).
pub(crate) mod barrier {
    use std::time::Duration;

    /// Extra time that the other ranks wait for the verdict of a monitored barrier, beyond the time that rank 0 waits
    /// for them.
    pub(crate) const VERDICT_PATIENCE: Duration = Duration::from_secs(5);
}

/// Folds on devices (`device/plan/`, `device/kernels/`).
#[cfg(feature = "cuda")]
pub(crate) mod device_folds {
    /// Largest vector, in bytes from all ranks together, that is gathered whole and then folded. This takes one step
    /// fewer than folding shares. Agreed.
    pub(crate) const SMALL_BYTES: usize = 256 << 10;
    /// Bytes of the smallest slab. The exchange of a smaller slab would overlap with nothing. Agreed.
    pub(crate) const LEAST_SLAB_BYTES: usize = 4 << 20;
    /// Slabs of a large vector. With this many, exchange and fold overlap. Agreed.
    pub(crate) const SLABS: usize = 4;
    /// Bytes that a backend reserves for folds from the start: enough for vectors of 16 MiB. The first call that needs
    /// more takes all that `Config::device_scratch_bytes` allows. Agreed.
    pub(crate) const FIRST_SCRATCH_BYTES: usize = 8 << 20;
    /// Bytes from which a piece is first copied to memory that the device reads fast, and then folded. For a smaller
    /// piece, the two copies cost more than they save.
    pub(crate) const STAGED_BYTES: usize = 64 << 10;
    /// Bytes of an all-reduce, or of a whole reduce-scatter, from which a mean is computed as a sum in the NVLink
    /// switch and a division by a kernel of this crate. An estimate, not measured: for 8 ranks, 475 instead of 365 GB/s
    /// saves 37 of 161 µs, and the division takes 25 µs. Agreed.
    pub(crate) const DIVIDES_FROM: usize = 32 << 20;
    /// Number of ranks from which a mean is computed in this way. With 4 ranks the switch saves no more than the
    /// division costs. Agreed.
    pub(crate) const DIVIDES_RANKS: usize = 8;
    /// The largest number of blocks of a kernel per multiprocessor: as many as run at once.
    pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
}

/// Durations of waits for NCCL, streams and devices (`device/`).
#[cfg(feature = "cuda")]
pub(crate) mod device {
    use std::time::Duration;

    /// Polls of a waiter before it reads the clock.
    pub(crate) const SPINS: u32 = 100;
    /// Time that a waiter spins before it sleeps. Most calls of up to a few MiB have ended by then, and a wake-up takes
    /// a few microseconds.
    pub(crate) const AWAKE: Duration = Duration::from_micros(400);
    /// A sleep between two polls lasts this fraction (1/128) of the time waited so far. So a wait ends late by at most
    /// that.
    pub(crate) const NAP_SHARE: u32 = 128;
    /// The shortest and the longest such sleep.
    pub(crate) const NAPS: (Duration, Duration) = (Duration::from_micros(5), Duration::from_millis(1));
    /// The shortest and the longest time between two rounds of the watchdog. The time itself is a tenth of the shortest
    /// timeout.
    pub(crate) const ROUNDS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
    /// The largest number of events that the watchdog has on one stream. It records about ten in the time that a call
    /// may take.
    pub(crate) const MARKS: usize = 16;
    /// How long the driver may report nothing about work that is past its deadline. After that the work counts as
    /// overdue.
    pub(crate) const STUCK: Duration = Duration::from_secs(1);
    /// Words of pinned memory in one page for the graph calls of one communicator. Each capture and stream takes one
    /// word.
    pub(crate) const GRAPH_WORDS: usize = 1024;
    /// How long the caller of an abort waits for it. The abort continues in the background, because NCCL may wait for
    /// other ranks to abort too.
    pub(crate) const ABORT_WAIT: Duration = Duration::from_secs(2);
    /// If the two ends of a message differ, how long a rank waits for the other end to learn of the difference before
    /// it ends the communicator.
    pub(crate) const HEARING_WAIT: Duration = Duration::from_secs(2);
    /// How long a thread waits for another thread's launch, or an abort for work on a control communicator, before it
    /// continues without waiting further.
    pub(crate) const FENCE: Duration = Duration::from_secs(1);
    /// Extra time, beyond its deadline, that a call waits for the thread that makes it. That thread can report better
    /// what was late.
    pub(crate) const ANSWER_WAIT: Duration = Duration::from_millis(200);
    /// The shortest time that ranks have to agree whether all have started.
    pub(crate) const AGREEMENT_WAIT: Duration = Duration::from_secs(5);
    /// How long a communicator that is dropped without being closed may take to finish the calls in progress.
    pub(crate) const COMMUNICATOR_DROP_WAIT: Duration = Duration::from_secs(5);
    /// How long the end of a backend waits for its kernels on the caller's streams.
    pub(crate) const BACKEND_DROP_WAIT: Duration = Duration::from_secs(5);
    /// How long the drop of an NCCL buffer waits for the streams that use it. After that its memory is leaked.
    pub(crate) const BUFFER_DROP_WAIT: Duration = Duration::from_secs(60);
    /// How long the end of a registration or a window waits for the device.
    pub(crate) const REGISTRATION_DROP_WAIT: Duration = Duration::from_secs(600);
    /// How long the end of a registration or a window waits until a communicator that has ended is destroyed.
    pub(crate) const GONE_WAIT: Duration = Duration::from_secs(10);
}

/// The search for dead ranks while a device waits (`communicator/device/liveness.rs`).
#[cfg(feature = "cuda")]
pub(crate) mod liveness {
    use std::time::Duration;

    /// How long a wait lasts before the search begins.
    pub(crate) const PATIENCE: Duration = Duration::from_millis(50);
    /// Time between two searches.
    pub(crate) const PAUSE: Duration = Duration::from_millis(20);
    /// How long a rank has been gone before it counts as lost. Its last work may still be passing through the devices.
    pub(crate) const GRACE: Duration = Duration::from_secs(1);
    /// Answers of a recovery listener, after its process is gone, that make the process count as not visible from here.
    /// While a process is being killed, its listener answers until its last thread has ended.
    pub(crate) const ANSWERS: u32 = 9;
    /// How long to search for the rank that NCCL reports as gone. The process behind its broken connection may still be
    /// ending. Meanwhile, other communicators of the device are not checked. With probes that get no answer the search
    /// takes up to 1.5 s.
    pub(crate) const SEARCH: Duration = Duration::from_millis(500);
    /// Time for the last probes, which go to ranks whose processes seem to exist. A probe that has begun is finished.
    pub(crate) const LAST_LOOK: Duration = Duration::from_millis(1);
}

/// Connections that have not proven themselves (`authentication/admission.rs`).
pub(crate) mod admission {
    use std::time::Duration;

    /// Limits on a listener's unproven connections: their number, and the time after which one is closed to make room
    /// for another.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Limits {
        /// The largest number at a time. Each costs a descriptor.
        pub(crate) most: usize,
        /// How long a connection is kept although others wait for its place.
        pub(crate) grace: Duration,
        /// How long nothing is accepted when all places are taken, or after the system ran out of descriptors or
        /// memory.
        pub(crate) rest: Duration,
    }

    /// Limits of a store's server, to which a whole job may connect at once.
    pub(crate) const STORE: Limits = Limits { most: 512, grace: Duration::from_millis(200), rest: Duration::from_millis(100) };
    /// Limits of a rank's listener, on which every other rank may open a link at once.
    pub(crate) const LINKS: Limits = Limits { most: 256, grace: Duration::from_millis(100), rest: Duration::from_millis(50) };
    /// Limits of the server that hands out shared memory to the ranks of one host.
    pub(crate) const MEMORY: Limits = Limits { most: 64, grace: Duration::from_millis(100), rest: Duration::from_millis(20) };
    /// How long a lack of descriptors or memory lasts before the waiting ranks get an error. It counts only while there
    /// is no unproven connection that could be closed.
    pub(crate) const STARVED: Duration = Duration::from_secs(1);
    /// How long a connection may take to prove itself, or to send its hello if there is no secret.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
    /// The largest number of connections that are accepted at a time, or closed to make room for others. So a flood of
    /// connections does not hold up established ones.
    pub(crate) const BATCH: usize = 64;
    /// Number of refusals that are each reported. After these, only refusals whose number is a power of two are
    /// reported.
    pub(crate) const REPORTED: u64 = 16;
}

/// Links between ranks over TCP (`host/net/`), and how a backend uses them.
pub(crate) mod net {
    use std::time::Duration;

    /// Connections that the kernel queues until they are accepted. All ranks of a large job may connect at once.
    pub(crate) const BACKLOG: i32 = 1024;
    /// The first pause after a failed attempt to connect. Each further one is twice as long.
    pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(4);
    /// The first pause of a rank that only checks whether a peer is alive. It also waits this long before the first
    /// attempt.
    pub(crate) const FIRST_PROBE: Duration = Duration::from_millis(100);
    /// The longest pause between two attempts.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_millis(500);
    /// The longest wait for a link before checking again whether the link is still needed.
    pub(crate) const OPENING_SLICE: Duration = Duration::from_millis(20);
    /// How long a peer's host may leave sent data unacknowledged, unless `Config::silence_timeout` is set. Every check
    /// that declares a host lost uses this.
    ///
    /// TCP retransmits after 0.2 s and doubles the interval each time: after 0.6, 1.4, 3, 6.2, 12.6, 25.4 and 51 s.
    /// Only then is a restored line noticed. The failover of a switch, or the move of a virtual machine, takes up to
    /// 30 s, so it is noticed after 51 s. A dead process is reported by its kernel at once and does not wait for this.
    pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
    /// A connection must be idle for the silence timeout divided by this number before the kernel probes the peer's
    /// host.
    pub(crate) const IDLE_SHARE: u64 = 4;
    /// Probes that the kernel sends in the rest of the silence timeout.
    pub(crate) const KEEP_ALIVE_PROBES: u64 = 9;
    /// Time between two checks, by a link that cannot move, of whether the peer's host still answers.
    pub(crate) const SILENCE_INTERVAL: Duration = Duration::from_secs(1);
    /// Records of an encrypted link that go in one write, and records that are read at once.
    pub(crate) const RECORDS_WRITTEN: usize = 4;
    pub(crate) const RECORDS_READ: usize = 2;
    /// Bytes that go over one connection of a link before the next connection takes its turn. With fewer bytes, there
    /// are more system calls. With more bytes, the other connections are idle for longer.
    pub(crate) const STRIPE_BYTES: usize = 128 << 10;
    /// How long a broken stream does not yet count as a lost peer. In this time, a peer that knows the cause can report
    /// it.
    pub(crate) const BROKEN_GRACE: Duration = Duration::from_millis(200);
}

/// The store over TCP (`rendezvous/tcp/`).
pub(crate) mod store {
    use std::time::Duration;

    /// Connections that the kernel queues until they are accepted. The kernel lowers this to its own limit
    /// (`net.core.somaxconn`).
    pub(crate) const BACKLOG: i32 = 4096;
    /// How long a server that is dropped waits for its clients to leave, unless set otherwise.
    pub(crate) const LINGER: Duration = Duration::from_secs(5);
    /// Ready connections that are served before everything else is checked again.
    pub(crate) const EVENTS: usize = 256;
    /// The pause after waiting for events has failed. Only a lack of memory causes that.
    pub(crate) const FAILED_WAIT_PAUSE: Duration = Duration::from_millis(100);
    /// The longest attempt to connect: a host that drops packets must not exhaust the whole deadline.
    pub(crate) const ATTEMPT: Duration = Duration::from_secs(10);
    /// How long a process whose rank is outside the job tries to report that to the other ranks.
    pub(crate) const TELL_OF_OUTSIDER: Duration = Duration::from_secs(2);
    /// The first pause between two attempts to connect. Each further one is half as long again.
    pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(5);
    /// The longest pause between two attempts to connect.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// The longest single poll. A longer wait polls again.
    pub(crate) const LONGEST_POLL: Duration = Duration::from_secs(3600);
    /// Time without a connection after which a failed attempt is logged. The next one is logged after twice that time,
    /// and so on.
    pub(crate) const REPORT_AFTER: Duration = Duration::from_secs(10);
    /// How long a server may close every connection that asks for a proof, before it counts as a server without a
    /// secret. A proxy in front of a server that has not started also closes connections, so this is as long as the
    /// silence timeout.
    pub(crate) const CLOSING_GRACE: Duration = super::net::SILENCE_TIMEOUT;
    /// How long a cancelled wait waits for the server to confirm. If that takes longer, the next request reads the
    /// confirmation first.
    pub(crate) const CANCEL: Duration = Duration::from_millis(400);
    /// The largest number of requests by which a failed wait asks which keys are missing, and the time for them. Keys
    /// that it did not ask about are also reported as missing.
    pub(crate) const QUESTIONS: usize = 64;
    pub(crate) const ASKING: Duration = Duration::from_millis(200);
    /// The shortest time for resolving a name, even if the deadline is earlier. The name may be in a file of this host.
    pub(crate) const LEAST_RESOLVE: Duration = Duration::from_millis(20);
}

/// The store at which survivors of a failure meet (`communicator/recovery.rs`).
pub(crate) mod recovery {
    use std::time::Duration;

    /// The number of ranks that one rank probes or visits at the same time, with a thread for each.
    pub(crate) const AT_ONCE: usize = 128;
    /// How long a living rank may take to accept a connection.
    pub(crate) const PROBE: Duration = Duration::from_millis(500);
    /// How long a rank that serves may take to answer. If the rank does not serve, the whole time passes.
    pub(crate) const ANSWER: Duration = Duration::from_millis(200);
    /// How long the server of the leading rank may take to answer the others before they look for another leader. The
    /// time is shorter if the whole shrink has less than four times this time.
    pub(crate) const SERVICE: Duration = Duration::from_secs(30);
    /// How long a server that is no longer needed waits for its last clients.
    pub(crate) const LINGER: Duration = Duration::from_secs(1);
}

/// The admission of newcomers (`communicator/life/membership/`).
pub(crate) mod membership {
    use std::time::Duration;

    /// How long members wait for a newcomer to confirm that it is there.
    pub(crate) const CONFIRMED: Duration = Duration::from_secs(2);
    /// How long members and newcomers may take to connect. A newcomer that is stopped meanwhile cannot be distinguished
    /// from a slow one.
    pub(crate) const CONNECTED: Duration = Duration::from_secs(30);
    /// The additional time for each rank.
    pub(crate) const CONNECTED_PER_RANK: Duration = Duration::from_millis(20);
    /// The number of attempts to connect with a newcomer before it is refused.
    pub(crate) const ATTEMPTS: u64 = 3;
    /// One wait of a newcomer at a member's store, before it checks its deadline.
    pub(crate) const SLICE: Duration = Duration::from_secs(1);
    /// The pause of a newcomer before it asks at the next address.
    pub(crate) const PAUSE: Duration = Duration::from_millis(50);
}

/// The store in a file (`rendezvous/file/`).
pub(crate) mod file_store {
    use std::time::Duration;

    /// The first and the longest pause between two reads of the file for a key.
    pub(crate) const KEY_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
    /// The first and the longest pause between two attempts to take the file's lock, which others hold for a few
    /// writes.
    pub(crate) const LOCK_PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
    /// How long a store that is dropped waits for the lock, to remove itself from the count.
    pub(crate) const CLOSING: Duration = Duration::from_secs(5);
}

/// Limits on the data that a store's server keeps for each client (`rendezvous/service/`).
pub(crate) mod service {
    /// Unsent bytes of answers from which a client's further requests wait until the client has read some.
    pub(crate) const UNSENT_BYTES: usize = 1 << 20;
    /// Unread bytes of requests from which the server stops reading from a client whose wait is parked.
    pub(crate) const UNREAD_BYTES: usize = 1 << 20;
    /// Bytes of answers that are encrypted at a time.
    pub(crate) const SEALED_BYTES: usize = 4 << 20;
}

/// Trace files (`observe/trace.rs`).
pub(crate) mod trace {
    /// The largest number of calls that are kept for the file, which take about 30 MiB. If there are more, the latest
    /// are kept.
    pub(crate) const MOST_EVENTS: usize = 1 << 17;
}

/// Collectives and links in shared memory (`host/shm/`).
pub(crate) mod shm {
    use std::time::Duration;

    /// Bytes of a vector from which each rank folds a share and passes it on. Below that, every rank folds everything,
    /// which takes one step fewer. Agreed.
    pub(crate) const SHARES_FROM_BYTES: usize = 32 << 10;
    /// Bytes of a result from which it is written with stores that bypass the cache, because the cache could not hold
    /// it. A broadcast is faster without such stores.
    pub(crate) const STREAM_FROM_BYTES: usize = 4 << 20;
    /// Bytes of the smallest step in which one rank copies in while another copies out. A smaller step costs more than
    /// the copy of its bytes. Agreed.
    pub(crate) const LEAST_STEP_BYTES: usize = 16 << 10;
    /// Largest block, in bytes, that is gathered in the smallest steps, whose slots fit the first-level cache. Agreed.
    pub(crate) const SMALL_BLOCK_BYTES: usize = 128 << 10;
    /// Largest block, in bytes, that is folded out of a mailbox. For 2 ranks, 4 KiB take 0.50 µs there and 0.33 µs out
    /// of a slot. Agreed.
    pub(crate) const FOLDED_LINES_BYTES: usize = 2 << 10;
    /// Bytes of an all-reduce from which windows are looked for. 64 KiB take 2.4 µs through slots, which are cached,
    /// and 3.4 µs directly. Agreed.
    pub(crate) const DIRECT_FROM_BYTES: usize = 256 << 10;
    /// Bytes that a rank copies or folds in place between two checks of the communicator's health.
    pub(crate) const TURN_BYTES: usize = 1 << 20;
    /// Bytes of the shortest copy for which the kind of stores matters when one rank writes what another reads.
    pub(crate) const PASSING_LEAST_BYTES: usize = 4 << 10;
    /// Times that a writer tries each kind of stores before it chooses one.
    pub(crate) const STORE_TRIALS: u32 = 3;
    /// Bytes written before the first such trial, and the most between two trials. The distance doubles each time.
    /// 64 MiB take 6 ms at 10 GB/s, of which trying the slower kind takes up to 1 %.
    pub(crate) const STORE_TRIALS_EVERY_BYTES: (usize, usize) = (512 << 10, 64 << 20);
    /// Length of a ring's lap, in second-level caches: the writer's, the reader's, and one more.
    pub(crate) const LAP_CACHES: usize = 3;
    /// Bytes of a lap if the kernel reports no caches.
    pub(crate) const USUAL_LAP_BYTES: usize = 3 << 20;
    /// Bytes of the shortest lap between ranks that have a processor each, and of a ring between ranks that share
    /// processors.
    pub(crate) const LEAST_LAP_BYTES: usize = 256 << 10;
    /// Bytes that one end of a ring copies before it notifies the other end, so that both copy at once.
    pub(crate) const RING_CHUNK_BYTES: usize = 8 << 10;
    /// Bytes of a part from which chunks are [`RING_LONG_CHUNK_BYTES`].
    pub(crate) const RING_LONG_BYTES: usize = 128 << 10;
    /// Bytes of a chunk of a long part. With shorter chunks the two ends contend for the cursors' cache lines.
    pub(crate) const RING_LONG_CHUNK_BYTES: usize = 32 << 10;
    /// Fruitless tries of a ring between two checks whether the peer has left.
    pub(crate) const RING_TRIES_PER_LOOK: u32 = 32;
    /// Time between two system calls that check whether a peer is alive.
    pub(crate) const LIVENESS_INTERVAL: Duration = Duration::from_millis(5);
    /// How long a rank waits for readers of a buffer that it cannot make private, before its process ends. It is longer
    /// under slow checkers such as Miri.
    pub(crate) const READERS_LEAVE_WITHIN: Duration = Duration::from_secs(if cfg!(any(miri, one_mapping)) { 300 } else { 10 });
    /// Time between two checks whether those readers have left.
    pub(crate) const READERS_INTERVAL: Duration = Duration::from_millis(1);
}

/// Calls on several buffers (`host/backend/joined_buffers.rs`).
pub(crate) mod many {
    /// Largest buffer, in bytes, that is joined with others if the ranks share a host. For 2 ranks, 100 buffers of 1
    /// KiB take 54 µs joined and 101 µs one by one. If each rank has a core, a call of 4 KiB takes 0.5 µs, and the two
    /// copies for joining take about as long. If ranks share cores, joining is faster up to 64 KiB. Agreed.
    pub(crate) const SHARED_BYTES: usize = 4 << 10;
    /// The same if the ranks do not share a host. Over TCP, 100 buffers of 64 KiB take 5.6 ms joined and 9.9 ms one by
    /// one; 40 of 256 KiB take 9 ms either way. Agreed.
    pub(crate) const LINKS_BYTES: usize = 64 << 10;
    /// The largest number of bytes of buffers that are joined in one call. 100 buffers of 64 KiB take 5.6 ms with 1 MiB
    /// at a time, and 7.1 ms all at once. Agreed.
    pub(crate) const JOINED_BYTES: usize = 1 << 20;
}

/// Plans over links (`host/engine/`), and the memory that they use.
pub(crate) mod engine {
    use std::time::Duration;

    /// Bytes that one link moves before the other links get their turn.
    pub(crate) const TURN_BYTES: usize = 1 << 20;
    /// Bytes of a result that are folded or copied before the links get their turn.
    pub(crate) const PIECE_BYTES: usize = 256 << 10;
    /// Bytes that one write to a link gathers, if that many are ready. One write of 1 MiB takes half the time of
    /// sixteen writes.
    pub(crate) const WRITE_BYTES: usize = 1 << 20;
    /// Messages that follow the first one in the same write.
    pub(crate) const FOLLOWERS: usize = 7;
    /// Bytes of one read that does not go directly to its destination. With it, a small message takes one system call.
    pub(crate) const INPUT_BYTES: usize = 4096;
    /// Rounds with progress between two readings of the clock. A reading costs more than a small message.
    pub(crate) const ROUNDS_PER_CHECK: u32 = 64;
    /// How long a run lasts before it first reports which rank it waits for.
    pub(crate) const FIRST_REPORT: Duration = Duration::from_millis(10);
    /// How long a rank that ends tries to send its last message. A peer that takes no bytes for this long learns of the
    /// end when the link closes.
    pub(crate) const SHUTDOWN: Duration = Duration::from_millis(20);
    /// The same if a message is partly sent. If it were cut off, this rank would look dead. So a peer that is slow only
    /// because it lacks a core gets more time.
    pub(crate) const LONG_SHUTDOWN: Duration = Duration::from_millis(100);
    /// Time between two such tries, and the time before the first sleep, in which the rank only yields its core.
    pub(crate) const SHUTDOWN_INTERVAL: Duration = Duration::from_micros(100);
    /// Bytes of scratch memory that are kept from one call to the next.
    pub(crate) const KEPT_SCRATCH_BYTES: usize = 64 << 20;
}

/// Waiting while nothing moves (`host/waiting.rs`): one policy, with limits for each kind of wait.
pub(crate) mod waiting {
    use std::time::Duration;

    /// When a waiting rank reads the clock, gives up its core, and sleeps.
    #[derive(Debug)]
    pub(crate) struct Limits {
        /// Polls before the policy begins, with no clock or pause between them. The first number is for ranks that have
        /// a core each, the second for others.
        pub(crate) first_looks: [u32; 2],
        /// How long the rank keeps its core, if every rank has one.
        pub(crate) spin_for: Duration,
        /// How long the rank stays awake in all.
        pub(crate) awake_for: Duration,
        /// Fruitless rounds between two readings of the clock.
        pub(crate) rounds_per_look: u32,
        /// If there are more ranks than cores: the number of rounds after which the rank sleeps, without reading the
        /// clock. `None` if the clock also decides in this case.
        pub(crate) crowded_rounds: Option<u32>,
        /// The first sleep on something that can wake the sleeper. Each further one is twice as long. A sleep that ends
        /// after the next tick of the system's clock needs no separate timer.
        pub(crate) first_sleep: Duration,
        /// The longest such sleep. A rank notices an event for which it is not woken late by at most this time.
        pub(crate) longest_sleep: Duration,
    }

    /// If this much time passes between two readings of the clock without a yield, another thread had the core.
    pub(crate) const LATE: Duration = Duration::from_micros(50);
    /// If a yield takes this long, another thread had the core. A yield takes less than a microsecond if no other
    /// thread wants the core.
    pub(crate) const LATE_YIELD: Duration = Duration::from_micros(8);
    /// The same if ranks give up the core for each other: less than a time slice, but more than a rank's own turn.
    pub(crate) const LATE_AMONG_RANKS: Duration = Duration::from_millis(1);
    /// A wait that ends this long after a reading of the clock has probably not been awake all the time.
    pub(crate) const BRIEFLY: Duration = Duration::from_micros(12);
    /// If other threads had the core, this is remembered for this many times as long as they had it.
    pub(crate) const MEMORY: u32 = 100;
    /// Times that the awake time of a wait is halved before it is zero.
    pub(crate) const MOST_HASTE: u32 = 5;
    /// One wait in this many stays awake anyway, to find out whether staying awake has become faster.
    pub(crate) const TRY_EVERY: u32 = 64;
    /// Number of publishes for which the others check whether a rank sleeps, counted from its last sleep.
    pub(crate) const LIGHT_FOR: u32 = 4096;

    /// Limits for the flags of other ranks. The first polls take a few microseconds. If there are fewer cores than
    /// ranks, they take less time than giving up the core.
    pub(crate) static SHARED_MEMORY: Limits = Limits {
        first_looks: [400, 20],
        spin_for: Duration::ZERO,
        awake_for: Duration::from_micros(200),
        rounds_per_look: 1,
        crowded_rounds: None,
        first_sleep: Duration::from_millis(10),
        longest_sleep: Duration::from_millis(50),
    };
    /// Limits for the links of a plan. A descriptor ends the sleep. The length of the sleep matters only for an abort,
    /// which no descriptor reports.
    pub(crate) static LINKS: Limits = Limits {
        first_looks: [0, 0],
        spin_for: Duration::from_micros(30),
        awake_for: Duration::from_micros(100),
        rounds_per_look: 1,
        crowded_rounds: None,
        first_sleep: Duration::from_millis(50),
        longest_sleep: Duration::from_millis(50),
    };
    /// Limits for messages.
    pub(crate) static MESSAGES: Limits = Limits {
        first_looks: [0, 0],
        spin_for: Duration::from_micros(30),
        awake_for: Duration::from_micros(200),
        rounds_per_look: 1,
        crowded_rounds: Some(64),
        first_sleep: Duration::from_millis(10),
        longest_sleep: Duration::from_millis(20),
    };
    /// The first sleep if nothing can wake the sleeper. Each further one is twice as long.
    pub(crate) const FIRST_NAP: Duration = Duration::from_micros(50);
    /// The longest such sleep: how long a byte in shared memory may wait for its reader.
    pub(crate) const LONGEST_NAP: Duration = Duration::from_micros(200);
}

/// Copies and truth values (`host/copy.rs`, `host/bools.rs`).
pub(crate) mod copy {
    /// Bytes of a copy from which this crate's loop is faster than the C library.
    pub(crate) const VECTORS_FROM_BYTES: usize = 1 << 10;
    /// Bytes that are read before they are normalised, if necessary.
    pub(crate) const BOOLS_BLOCK_BYTES: usize = 4096;
}

/// Folds on the processor (`host/reduce/`).
pub(crate) mod reduce {
    /// Bytes that are folded before they are copied to a second destination, while they are still in the first-level
    /// cache.
    pub(crate) const TWICE_READ_BYTES: usize = 16 << 10;
    /// Bytes of the stack block in which elements are folded. It fits the first-level cache together with the inputs,
    /// and is long enough for efficient loops.
    pub(crate) const BLOCK_BYTES: usize = 4096;
}

/// Plans of collectives over links (`host/plan/`). Ranks compute the same plans, so these constants must be the same on
/// every rank.
pub(crate) mod plan {
    /// Total bytes up to which a broadcast, an all-gather or an all-to-all of equal blocks goes through scratch memory
    /// instead of waiting for an agreement. Copying that much costs less than a round of messages.
    pub(crate) const CARRIED_BYTES: usize = 64 << 10;
    /// Received bytes up to which a direct all-reduce sends whole vectors instead of shares: one exchange instead of
    /// two.
    pub(crate) const FLAT_BYTES: usize = 32 << 10;
    /// Bytes up to which a direct reduce sends whole vectors to the root instead of shares to every rank.
    pub(crate) const STAR_BYTES: usize = 8 << 10;
    /// Pieces under way at once in one direction of a ring, so that sending, receiving and folding overlap.
    pub(crate) const RING_IN_FLIGHT: usize = 4;
    /// Segments under way at once in a direct reduction: one is folded while the next arrives.
    pub(crate) const DIRECT_IN_FLIGHT: usize = 2;
    /// Exchanges under way at once in an all-to-all.
    pub(crate) const EXCHANGES_IN_FLIGHT: usize = 4;
    /// Plans that a communicator keeps: a training step repeats its calls.
    pub(crate) const KEPT: usize = 32;
    /// Bytes that kept plans take in all.
    pub(crate) const KEPT_BYTES: usize = 1 << 20;
    /// Bytes of the largest plan that is kept: building a larger one takes little time compared with its transfer.
    pub(crate) const KEPT_BYTES_OF_ONE: usize = KEPT_BYTES / 8;
}

/// Messages between two ranks (`host/point_to_point/`).
pub(crate) mod point_to_point {
    /// Bytes of messages that no receive wants yet, over all peers. Both ends rely on this limit, so it must be the
    /// same on every rank.
    pub(crate) const UNEXPECTED_BYTES: usize = 64 << 20;
    /// The minimum of these bytes for each peer, regardless of the number of peers.
    pub(crate) const UNEXPECTED_LEAST_BYTES: usize = 1 << 20;
    /// Rounds between two checks for newly opened links. A check is a system call.
    pub(crate) const ACCEPT_EVERY: u64 = 64;
    /// Number of times that a receive polls its source's stream before it becomes a request.
    pub(crate) const LOOKS: u32 = 256;
    /// The same if each poll is a system call.
    pub(crate) const READS: u32 = 32;
    /// Bytes read ahead: a header and a short message in one read.
    pub(crate) const AHEAD_BYTES: usize = 2048;
    /// Bytes from which a message is read directly to its destination. Copying fewer costs less than a read.
    pub(crate) const DIRECT_BYTES: usize = 1024;
    /// Bytes from which a message is received with stores that bypass the cache, because it would only evict other
    /// data.
    pub(crate) const PAST_CACHE_BYTES: usize = 4 << 20;
    /// Bytes that one link reads, or writes, before the others get their turn.
    pub(crate) const PASS_BYTES: usize = 1 << 20;
    /// Frames that one link reads before the others get their turn.
    pub(crate) const PASS_FRAMES: usize = 256;
    /// Reads of a link whose peer is lost. Bytes that the peer sent before still count, but it might be alive and send
    /// without end.
    pub(crate) const LAST_READS: usize = 64;
    /// Reads of a link that is about to be closed, so that a peer that is still sending does not mistake the closing
    /// for a failure.
    pub(crate) const DRAIN_READS: usize = 8192;
    /// Buffers kept for short messages that no receive wants yet.
    pub(crate) const SPARE_BUFFERS: usize = 64;
    /// Bytes of long messages, over all peers, that are kept after their receives have given up.
    pub(crate) const KEPT_BYTES: usize = 256 << 20;
}

/// The threads that advance messages, and the times for which they do so (`communicator/progress/`).
pub(crate) mod progress {
    use std::time::Duration;

    /// How long a thread leaves the lock free between two turns if others wait for it. A sleeper needs about as long to
    /// wake up.
    pub(crate) const HAND_OVER: Duration = Duration::from_micros(50);
    /// How long one turn of a waiter may hold the lock, so that others can also post and wait.
    pub(crate) const TURN: Duration = Duration::from_micros(200);
    /// The same until another thread first wants the lock. A sleep of this length needs no separate timer.
    pub(crate) const LONE_TURN: Duration = Duration::from_millis(5);
    /// One message in this many does not take the short path, so that everything else also makes progress.
    pub(crate) const DIRECT: u32 = 64;
    /// How long the background thread sleeps when nothing moves.
    pub(crate) const NAP: Duration = Duration::from_millis(1);
    /// How long the background thread sleeps when nothing is outstanding. New work wakes it. The limit allows for an
    /// occasional check whether the communicator is still usable.
    pub(crate) const IDLE: Duration = Duration::from_secs(1);
    /// For how long peers are notified of the end of the communicator. It takes a moment until a peer has opened a link
    /// to ask.
    pub(crate) const TELLING: Duration = Duration::from_secs(2);
    /// How long closing waits for sends that are under way.
    pub(crate) const FLUSH: Duration = Duration::from_secs(5);
    /// How long closing then waits for links to take the remaining bytes.
    pub(crate) const LEAVE: Duration = Duration::from_secs(1);
}

/// Threads on which the program's code runs (`own_thread.rs`).
pub(crate) mod own_thread {
    use std::time::Duration;

    /// How long to wait for the end of a thread that has nothing left to do. If the program's code on it runs longer,
    /// the thread is left running.
    pub(crate) const LAST: Duration = Duration::from_secs(5);
}

/// The flight recorder (`flight/`).
pub(crate) mod flight {
    use std::time::Duration;

    /// One in this many calls that end at once gets a time. Reading the clock costs a fraction of such a call.
    pub(crate) const LOOK_EVERY: u64 = 16;
    /// Errors that are kept.
    pub(crate) const ERRORS: usize = 32;
    /// Time between two reports by a waiter of the ranks that it waits for.
    pub(crate) const TELL_EVERY: Duration = Duration::from_millis(50);
    /// Time between two warnings of the same call.
    pub(crate) const WARN_EVERY: Duration = Duration::from_secs(60);
    /// Records of each kind that are read from every communicator of the process when a deadline has passed.
    pub(crate) const LOOKED_AT: u64 = 16;
    /// The largest number of calls of other communicators that the error of a deadline names.
    pub(crate) const MEANWHILE: usize = 3;
    /// Such a call has waited for at least the deadline's time divided by this number. A quicker call is unrelated.
    pub(crate) const SHARE: u64 = 10;
}

/// Files and ports of metrics.
pub(crate) mod metrics {
    use std::time::Duration;

    /// The time between two writes of a process's file.
    pub(crate) const EVERY: Duration = Duration::from_secs(5);
    /// Communicators with counters of their own, by name and rank. Each takes about 5 KiB.
    pub(crate) const GROUPS: usize = 1024;
    /// The time after which a lock counts as lost in a fork.
    pub(crate) const LOCK: Duration = Duration::from_secs(5);
    /// The time in which a client of the port must send its request and read the answer. Prometheus gives up after 10 s, so
    /// one silent client does not make a collector fail.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
    /// The pause before the next try if the process has no descriptor or memory for a connection.
    pub(crate) const WITHOUT_RESOURCES: Duration = Duration::from_secs(1);
}

/// The answers to `collperf ps`.
pub(crate) mod status {
    use std::time::Duration;

    /// Records of each kind of every communicator in an answer, in addition to the calls that have not ended.
    pub(crate) const RECORDS: usize = 128;
    /// Older calls of each kind that have not ended, at most.
    pub(crate) const UNFINISHED: usize = 128;
    /// The size of an answer beyond which it contains no other communicator, in bytes.
    pub(crate) const BYTES: usize = 4 << 20;
    /// Connections that the kernel queues until they are accepted, as while the process is stopped.
    pub(crate) const BACKLOG: i32 = 64;
    /// The time in which a process that has asked must read the answer.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
    /// The pause after a connection of another user, who could otherwise keep the thread busy.
    pub(crate) const AFTER_REFUSAL: Duration = Duration::from_millis(10);
    /// The pause before the next try if the process has no descriptor or memory for a connection.
    pub(crate) const WITHOUT_RESOURCES: Duration = Duration::from_secs(1);
}

/// Start-up.
pub(crate) mod bootstrap {
    use std::time::Duration;

    /// One wait at the store before the key of contradictions is read again, if there are few ranks.
    pub(crate) const SLICE: Duration = Duration::from_millis(100);
    /// The same for each rank if there are many. Each round costs the store four requests. With this time, the rate of
    /// requests from all ranks together does not grow with their number.
    pub(crate) const SLICE_PER_RANK: Duration = Duration::from_micros(250);
    /// How long after its deadline a start may still ask the store which ranks are missing. Its error comes within a
    /// second of the deadline.
    pub(crate) const LAST_QUESTIONS: Duration = Duration::from_millis(800);
    /// How long the rank that determines the missing ranks for all may take, and how long the others wait for it.
    pub(crate) const FINDING_OUT: Duration = Duration::from_millis(300);
    /// Ranks for which an error of the start gives host and process. The others are given as numbers.
    pub(crate) const INTRODUCED: usize = 32;
    /// How long rank 0 serves the store after its own deadline, for ranks that started a little later.
    pub(crate) const LATE_LINGER: Duration = Duration::from_millis(500);
    /// How long a rank 0 that cannot start serves the store, so that ranks that start a little later learn why.
    pub(crate) const ARRIVAL: Duration = Duration::from_secs(10);
    /// The pause between two looks at the number of ranks that have come.
    pub(crate) const ARRIVAL_PAUSE: Duration = Duration::from_millis(20);
    /// Ranks per root of NCCL's bootstrap, if the library supports several roots.
    #[cfg(feature = "cuda")]
    pub(crate) const RANKS_PER_ROOT: usize = 256;
}

/// The host backend.
pub(crate) mod backend {
    /// Bytes from which reading the clock costs nothing compared with the call. The end of such a call is recorded with
    /// its time.
    pub(crate) const LONG_CALL_BYTES: usize = 16 << 10;
}

/// The agreement of a shrink on the remaining ranks.
pub(crate) mod shrink {
    use std::time::Duration;

    /// One wait at the leader's store before other recovery listeners are checked.
    pub(crate) const SLICE: Duration = Duration::from_millis(50);
    /// Time between two rounds of probing while no rank leads.
    pub(crate) const PAUSE: Duration = Duration::from_millis(10);
    /// The longest such pause. Each probe takes a place in the queue of a closed recovery listener.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// Time without a leader after which all lower ranks are probed, not only the lowest.
    pub(crate) const LOOK_FURTHER: Duration = Duration::from_millis(250);
    /// How long a leader waits for ranks that were given up once.
    pub(crate) const GRACE: Duration = Duration::from_secs(1);
    /// If a leader is held up for this time, the others may have given up waiting for it.
    pub(crate) const LONG: Duration = Duration::from_secs(3);
    /// The largest number of probes of other recovery listeners by a rank that continues and is held up each time.
    pub(crate) const LOOKS: usize = 4;
}

/// Turns of the threads that share a communicator (`ticket_lock.rs`).
pub(crate) mod ticket_lock {
    use std::time::Duration;

    /// Polls of a waiter before it sleeps. A call in shared memory has ended by then.
    pub(crate) const LOOKS: usize = if cfg!(loom) { 1 } else { 200 };
    /// The first sleep. If a waiter is not woken when its turn comes, it is late by at most this time.
    pub(crate) const FIRST_NAP: Duration = Duration::from_millis(1);
    /// How long an abort waits for its turn to notify the peers if another thread is in a call. That call also notifies
    /// them.
    pub(crate) const ABORTING: Duration = Duration::from_millis(50);
    /// Later sleeps. The thread that leaves wakes this waiter; this only limits the delay after a missed wake-up.
    pub(crate) const NAP: Duration = Duration::from_millis(100);
}
