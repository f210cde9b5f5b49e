//! Sizes, counts and times at which behaviour changes, and nothing else: this file uses nothing of the crate.
//!
//! Each can be changed without a change of what a call means. Those that ranks must agree on say so. Limits of protocols and formats stand
//! where these are defined.

/// Barriers (`communicator/forms/barrier.rs`).
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
    /// Bytes that a backend has for folds from the start: enough for vectors of 16 MiB. The first call that needs more takes all that
    /// `Config::device_scratch_bytes` allows. Agreed.
    pub(crate) const FIRST_SCRATCH_BYTES: usize = 8 << 20;
    /// Bytes from which a piece is copied to where the device reads fast before it is folded: for fewer, two copies cost more than they save.
    pub(crate) const STAGED_BYTES: usize = 64 << 10;
    /// Bytes of an all-reduce, or in all of a reduce-scatter, from which a mean is a sum in the NVLink switch and a division of ours. By estimate,
    /// not measured: for 8 ranks, 475 instead of 365 GB/s save 37 of 161 µs, and the division takes 25. Agreed.
    pub(crate) const DIVIDES_FROM: usize = 32 << 20;
    /// Ranks from which it is: between 4 the switch gains as much as the division takes. Agreed.
    pub(crate) const DIVIDES_RANKS: usize = 8;
    /// Blocks of a kernel for each multiprocessor at most: as many as run at once.
    pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
}

/// How long NCCL, streams and devices are waited for (`device/`).
#[cfg(feature = "cuda")]
pub(crate) mod device {
    use std::time::Duration;

    /// Looks of a waiter before it reads the clock.
    pub(crate) const SPINS: u32 = 100;
    /// How long a waiter spins before it sleeps: most calls of up to a few MiB have ended by then, and waking up takes a few microseconds.
    pub(crate) const AWAKE: Duration = Duration::from_micros(400);
    /// A sleep between two looks takes such a share of what has been waited: the end of a wait is seen late by no more than that.
    pub(crate) const NAP_SHARE: u32 = 128;
    /// The shortest and the longest such sleep.
    pub(crate) const NAPS: (Duration, Duration) = (Duration::from_micros(5), Duration::from_millis(1));
    /// The time between two rounds of the watchdog: a tenth of the shortest timeout, within these.
    pub(crate) const ROUNDS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
    /// Events of the watchdog on one stream at a time. It makes about ten in the time that a call may take.
    pub(crate) const MARKS: usize = 16;
    /// How long the driver may say nothing about work whose time is over before that counts as overdue without its word.
    pub(crate) const STUCK: Duration = Duration::from_secs(1);
    /// Words of pinned memory that the calls in graphs of one communicator share, at first: one for each capture and stream.
    pub(crate) const GRAPH_WORDS: usize = 1024;
    /// How long the caller of an abort waits for it. It goes on in the background: NCCL may wait for other ranks to abort, too.
    pub(crate) const ABORT_WAIT: Duration = Duration::from_secs(2);
    /// How long a rank waits until the other end of a message has heard in what the two differ, before it ends the communicator.
    pub(crate) const HEARING_WAIT: Duration = Duration::from_secs(2);
    /// How long a thread waits for another one's launch, or an abort for work on a control communicator, before it goes on without.
    pub(crate) const FENCE: Duration = Duration::from_secs(1);
    /// How much longer than its deadline a call waits for the thread that makes it: that knows more of what was late.
    pub(crate) const ANSWER_WAIT: Duration = Duration::from_millis(200);
    /// How long ranks have at least to agree on whether all have started.
    pub(crate) const AGREEMENT_WAIT: Duration = Duration::from_secs(5);
    /// How long a communicator that is dropped, and was not closed, may take to finish what was begun.
    pub(crate) const COMMUNICATOR_DROP_WAIT: Duration = Duration::from_secs(5);
    /// How long the end of a backend waits for its kernels on streams of the caller's.
    pub(crate) const BACKEND_DROP_WAIT: Duration = Duration::from_secs(5);
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
    /// How long the rank is looked for of which NCCL says that it is gone: what broke its connection may still be under way. Other communicators of
    /// the device are not looked at meanwhile: with probes that nobody answers it takes up to 1.5 s.
    pub(crate) const SEARCH: Duration = Duration::from_millis(500);
    /// How long ranks are asked after that whose processes seem to be there. A probe that has begun ends.
    pub(crate) const LAST_LOOK: Duration = Duration::from_millis(1);
}

/// Connections that have not proven themselves (`authentication/admission.rs`).
pub(crate) mod admission {
    use std::time::Duration;

    /// How many a listener has, and when they make room for others.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Limits {
        /// Most at a time: each costs a descriptor.
        pub(crate) most: usize,
        /// How long each is left alone although others want its place.
        pub(crate) grace: Duration,
        /// How long nothing is accepted where there is no room, or after the system ran out of descriptors or memory.
        pub(crate) rest: Duration,
    }

    /// Of a store's server, to which a whole job may connect at once.
    pub(crate) const STORE: Limits = Limits { most: 512, grace: Duration::from_millis(200), rest: Duration::from_millis(100) };
    /// Of a rank's listener, on which every other rank may open a link at once.
    pub(crate) const LINKS: Limits = Limits { most: 256, grace: Duration::from_millis(100), rest: Duration::from_millis(50) };
    /// Of the server that hands out shared memory: the ranks of one host.
    pub(crate) const MEMORY: Limits = Limits { most: 64, grace: Duration::from_millis(100), rest: Duration::from_millis(20) };
    /// How long a lack of descriptors or memory lasts, with no unproven connection that could make room, before whoever waits is told.
    pub(crate) const STARVED: Duration = Duration::from_secs(1);
    /// How long each may take to prove itself, or to say hello where there is no secret.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
    /// Connections that are accepted, or make room, at a time: a flood of them holds up nobody who is there already.
    pub(crate) const BATCH: usize = 64;
    /// Refusals that are each reported. Of further ones those are whose number is a power of two.
    pub(crate) const REPORTED: u64 = 16;
}

/// Links between ranks over TCP (`host/net/`), and what a backend makes of them.
pub(crate) mod net {
    use std::time::Duration;

    /// Connections that the kernel keeps until they are accepted: a large job may connect all at once.
    pub(crate) const BACKLOG: i32 = 1024;
    /// The first pause after a failed attempt to connect. Each further one is twice as long.
    pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(4);
    /// The same for a rank that only looks whether a peer lives: the peer is left alone for so long first.
    pub(crate) const FIRST_PROBE: Duration = Duration::from_millis(100);
    /// The longest pause between two attempts.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_millis(500);
    /// The longest wait for a link without a look at whether it still makes sense.
    pub(crate) const OPENING_SLICE: Duration = Duration::from_millis(20);
    /// How long a peer's host may leave unanswered what it was sent, unless `Config::silence_timeout` says otherwise. All that takes a host for
    /// lost goes by this.
    ///
    /// TCP sends again after 0.2 s, and waits twice as long each time: again after 0.6, 1.4, 3, 6.2, 12.6, 25.4 and 51 s. A line that
    /// is back is first heard of then. The failover of a switch takes up to 30 s, the move of a virtual machine as long: over after 51 s. A dead
    /// process is noticed by its kernel's word, and does not wait for this.
    pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
    /// One part in so many of that time a connection is idle before the kernel asks whether the peer's host is still there.
    pub(crate) const IDLE_SHARE: u64 = 4;
    /// How often the kernel asks in the rest of it.
    pub(crate) const KEEP_ALIVE_PROBES: u64 = 9;
    /// Time between two looks of a link that cannot move at whether the peer's host still answers.
    pub(crate) const SILENCE_INTERVAL: Duration = Duration::from_secs(1);
    /// How many records of an encrypted link go in one write, and how many are read at once.
    pub(crate) const RECORDS_WRITTEN: usize = 4;
    pub(crate) const RECORDS_READ: usize = 2;
    /// How long a broken stream is not yet taken for a lost peer: whoever knows why it broke gets a moment to say so.
    pub(crate) const BROKEN_GRACE: Duration = Duration::from_millis(200);
}

/// The store over TCP (`rendezvous/tcp/`).
pub(crate) mod store {
    use std::time::Duration;

    /// Connections that the kernel keeps until they are accepted; it lowers this to its own limit (`net.core.somaxconn`).
    pub(crate) const BACKLOG: i32 = 4096;
    /// How long a server that is dropped waits for its clients to leave, unless told otherwise.
    pub(crate) const LINGER: Duration = Duration::from_secs(5);
    /// Connections with something to say that are served between two looks at everything else.
    pub(crate) const EVENTS: usize = 256;
    /// The pause after a wait for events that failed, which only a lack of memory explains.
    pub(crate) const FAILED_WAIT_PAUSE: Duration = Duration::from_millis(100);
    /// The longest attempt to connect: a host that drops packets must not use up the whole deadline.
    pub(crate) const ATTEMPT: Duration = Duration::from_secs(10);
    /// How long a process whose rank is none of the job's tries to tell the others so.
    pub(crate) const TELL_OF_OUTSIDER: Duration = Duration::from_secs(2);
    /// The first pause between two attempts to connect. Each further one is half as long again.
    pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(5);
    /// The longest pause between two attempts to connect.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// The longest single poll. A longer wait polls again.
    pub(crate) const LONGEST_POLL: Duration = Duration::from_secs(3600);
    /// Time without a connection after which a failed attempt is logged, and again after twice that, and so on.
    pub(crate) const REPORT_AFTER: Duration = Duration::from_secs(10);
    /// How long a server may close every connection that asks for a proof, before it is taken for one that knows none. So does what stands in for
    /// a server that has not started yet (a proxy), so it is as long as silence is borne.
    pub(crate) const CLOSING_GRACE: Duration = super::net::SILENCE_TIMEOUT;
    /// How long a wait that is cancelled waits for the server to say so. Where it takes longer, the next request hears it first.
    pub(crate) const CANCEL: Duration = Duration::from_millis(400);
    /// How often, and for how long, a failed wait asks which keys are missing. Those it does not come to are reported missing too.
    pub(crate) const QUESTIONS: usize = 64;
    pub(crate) const ASKING: Duration = Duration::from_millis(200);
    /// How long a name is waited for although the deadline is shorter: it may be in a file of this host.
    pub(crate) const LEAST_RESOLVE: Duration = Duration::from_millis(20);
}

/// Where survivors of a failure meet (`communicator/recovery.rs`).
pub(crate) mod recovery {
    use std::time::Duration;

    /// How long a living rank may take to accept a connection.
    pub(crate) const PROBE: Duration = Duration::from_millis(500);
    /// How long a rank that serves may take to answer. One that does not serve takes all of it.
    pub(crate) const ANSWER: Duration = Duration::from_millis(200);
    /// How long the server of a rank that leads may take to answer the others, before they look for another leader; less where the shrink has
    /// less than four times as much.
    pub(crate) const SERVICE: Duration = Duration::from_secs(30);
    /// How long a server that is no longer needed waits for its last clients.
    pub(crate) const LINGER: Duration = Duration::from_secs(1);
}

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
    /// Bytes of answers that are encrypted at a time.
    pub(crate) const SEALED_BYTES: usize = 4 << 20;
}

/// Trace files (`observe/trace.rs`).
pub(crate) mod trace {
    /// Calls that are kept for the file; of more, the last ones. About 30 MiB.
    pub(crate) const MOST_EVENTS: usize = 1 << 17;
}

/// Collectives and links in shared memory (`host/shm/`).
pub(crate) mod shm {
    use std::time::Duration;

    /// Bytes of a vector from which each rank folds a share and passes it on. Below, every rank folds everything: one step less. Agreed.
    pub(crate) const SHARES_FROM_BYTES: usize = 32 << 10;
    /// Bytes of a result from which it goes past the cache, where it would not stay. A broadcast is faster without.
    pub(crate) const STREAM_FROM_BYTES: usize = 4 << 20;
    /// Bytes of the smallest step in which one rank copies in while another copies out: a smaller one costs more than its bytes. Agreed.
    pub(crate) const LEAST_STEP_BYTES: usize = 16 << 10;
    /// Bytes of a block up to which it is gathered in the smallest steps, whose slots stay in the first-level cache. Agreed.
    pub(crate) const SMALL_BLOCK_BYTES: usize = 128 << 10;
    /// Bytes of the longest block that is folded out of a mailbox: 4 KiB take 2 ranks 0.50 µs there, 0.33 µs out of a slot. Agreed.
    pub(crate) const FOLDED_LINES_BYTES: usize = 2 << 10;
    /// Bytes of an all-reduce from which windows are looked for: 64 KiB take 2.4 µs through slots, which are cached, 3.4 µs directly. Agreed.
    pub(crate) const DIRECT_FROM_BYTES: usize = 256 << 10;
    /// Bytes that a rank copies or folds in place between two looks at the communicator's health.
    pub(crate) const TURN_BYTES: usize = 1 << 20;
    /// Bytes of the shortest copy for which it matters with which stores a rank writes what another reads.
    pub(crate) const PASSING_LEAST_BYTES: usize = 4 << 10;
    /// How often a writer tries either kind of stores before it chooses one.
    pub(crate) const STORE_TRIALS: u32 = 3;
    /// Bytes written before the first such trial, and at most between two; each time twice as many. 64 MiB take 6 ms at 10 GB/s, of which
    /// trying the slower kind takes up to 1 %.
    pub(crate) const STORE_TRIALS_EVERY_BYTES: (usize, usize) = (512 << 10, 64 << 20);
    /// Second-level caches that a lap of a ring is as long as: the writer's, the reader's, and one more.
    pub(crate) const LAP_CACHES: usize = 3;
    /// Bytes of a lap if the kernel says nothing of caches.
    pub(crate) const USUAL_LAP_BYTES: usize = 3 << 20;
    /// Bytes of the least lap between ranks that have a processor each, and of a ring between ranks that share them.
    pub(crate) const LEAST_LAP_BYTES: usize = 256 << 10;
    /// Bytes that one end of a ring copies before it tells the other end, so that both copy at once.
    pub(crate) const RING_CHUNK_BYTES: usize = 8 << 10;
    /// Bytes of a part from which chunks are [`RING_LONG_CHUNK_BYTES`].
    pub(crate) const RING_LONG_BYTES: usize = 128 << 10;
    /// Bytes of a chunk of a long part: with shorter ones the ends only contend for the cursors' lines.
    pub(crate) const RING_LONG_CHUNK_BYTES: usize = 32 << 10;
    /// Fruitless tries of a ring between two looks at whether the peer has left.
    pub(crate) const RING_TRIES_PER_LOOK: u32 = 32;
    /// Time between two system calls that ask whether a peer still lives.
    pub(crate) const LIVENESS_INTERVAL: Duration = Duration::from_millis(5);
    /// How long a rank waits for readers of a buffer that it cannot make private, before its process ends; longer under slow checkers.
    pub(crate) const READERS_LEAVE_WITHIN: Duration = Duration::from_secs(if cfg!(any(miri, one_mapping)) { 300 } else { 10 });
    /// Time between two looks at whether those readers have left.
    pub(crate) const READERS_INTERVAL: Duration = Duration::from_millis(1);
}

/// Calls on several buffers (`host/backend/many.rs`).
pub(crate) mod many {
    /// Bytes of a buffer up to which it is joined with others where the ranks share a host: 100 of 1 KiB take 2 ranks 54 µs joined, 101 µs one
    /// by one. Where each rank has a core a call of 4 KiB takes 0.5 µs, and the two copies about as much; where ranks share cores, joining pays
    /// up to 64 KiB. Agreed.
    pub(crate) const SHARED_BYTES: usize = 4 << 10;
    /// The same where they do not: 100 of 64 KiB take 5.6 ms joined over TCP, 9.9 ms one by one; 40 of 256 KiB take 9 ms either way. Agreed.
    pub(crate) const LINKS_BYTES: usize = 64 << 10;
    /// Bytes of buffers that are joined in one call at most: of 100 of 64 KiB 1 MiB each time takes 5.6 ms, all at once 7.1 ms. Agreed.
    pub(crate) const JOINED_BYTES: usize = 1 << 20;
}

/// Plans over links (`host/engine/`), and the memory that they use.
pub(crate) mod engine {
    use std::time::Duration;

    /// Bytes that one link moves before the others have their turn.
    pub(crate) const TURN_BYTES: usize = 1 << 20;
    /// Bytes of a result that are folded or copied before the links have their turn.
    pub(crate) const PIECE_BYTES: usize = 256 << 10;
    /// Bytes that one write to a link gathers where as much can go: a write of 1 MiB takes half the time of sixteen.
    pub(crate) const WRITE_BYTES: usize = 1 << 20;
    /// Messages that go in one write behind the first.
    pub(crate) const FOLLOWERS: usize = 7;
    /// Bytes read at once where they are not read straight into place: a small message takes one system call.
    pub(crate) const INPUT_BYTES: usize = 4096;
    /// Rounds in which something moved between two looks at the clock, which costs more than a small message.
    pub(crate) const ROUNDS_PER_CHECK: u32 = 64;
    /// How long a run lasts before it first says whom it waits for.
    pub(crate) const FIRST_REPORT: Duration = Duration::from_millis(10);
    /// How long a rank that ends tries to send its last message. A peer that takes no bytes for so long hears of the end when the link closes.
    pub(crate) const SHUTDOWN: Duration = Duration::from_millis(20);
    /// The same with a message half sent: cut off, it looks like this rank's death, so a peer that only lacks a core gets more time.
    pub(crate) const LONG_SHUTDOWN: Duration = Duration::from_millis(100);
    /// Time between two such tries, and how long the core is only yielded before.
    pub(crate) const SHUTDOWN_INTERVAL: Duration = Duration::from_micros(100);
    /// Bytes of scratch memory that are kept from one call to the next.
    pub(crate) const KEPT_SCRATCH_BYTES: usize = 64 << 20;
}

/// Waiting while nothing moves (`host/waiting.rs`): one policy, with limits for each kind of wait.
pub(crate) mod waiting {
    use std::time::Duration;

    /// When a rank that waits looks at the clock, gives up its core, and sleeps.
    #[derive(Debug)]
    pub(crate) struct Limits {
        /// Looks before the policy begins, without a clock or anything else between them: with a core for every rank, and without.
        pub(crate) first_looks: [u32; 2],
        /// How long it keeps the core, where there is one for every rank.
        pub(crate) spin_for: Duration,
        /// How long it stays awake in all.
        pub(crate) awake_for: Duration,
        /// Fruitless rounds between two looks at the clock.
        pub(crate) rounds_per_look: u32,
        /// With more ranks than cores: after how many rounds it sleeps, without a look at the clock. `None`: by the clock there too.
        pub(crate) crowded_rounds: Option<u32>,
        /// The first sleep on something that can wake the sleeper. Each further one is twice as long. Where it ends after the next tick of the system's
        /// clock, it costs no timer of its own.
        pub(crate) first_sleep: Duration,
        /// The longest such sleep: how late a rank may notice what nobody wakes it for.
        pub(crate) longest_sleep: Duration,
    }

    /// Between two looks at the clock, with no yield in between: so late is the second only where somebody else had the core.
    pub(crate) const LATE: Duration = Duration::from_micros(50);
    /// So long takes a yield only where somebody has taken the core: otherwise less than a microsecond.
    pub(crate) const LATE_YIELD: Duration = Duration::from_micros(8);
    /// The same where ranks give up the core for each other: less than a time slice, more than what they do in their turns.
    pub(crate) const LATE_AMONG_RANKS: Duration = Duration::from_millis(1);
    /// A wait that ends so long after a look at the clock has hardly been awake all the time.
    pub(crate) const BRIEFLY: Duration = Duration::from_micros(12);
    /// How many times as long as they have had it is remembered that others want the core.
    pub(crate) const MEMORY: u32 = 100;
    /// How often the time that a wait stays awake is halved before it is none.
    pub(crate) const MOST_HASTE: u32 = 5;
    /// One wait of so many stays awake all the same, to see whether that has become worth while.
    pub(crate) const TRY_EVERY: u32 = 64;
    /// Publishes for which the others look whether a rank sleeps after it has slept last.
    pub(crate) const LIGHT_FOR: u32 = 4096;

    /// For the flags of other ranks. The first looks take a few microseconds; with fewer cores than ranks, less than giving up the core.
    pub(crate) static SHARED_MEMORY: Limits = Limits {
        first_looks: [400, 20],
        spin_for: Duration::ZERO,
        awake_for: Duration::from_micros(200),
        rounds_per_look: 1,
        crowded_rounds: None,
        first_sleep: Duration::from_millis(10),
        longest_sleep: Duration::from_millis(50),
    };
    /// For the links of a plan. The sleep ends with a descriptor; its length is for an abort, which no descriptor tells.
    pub(crate) static LINKS: Limits = Limits {
        first_looks: [0, 0],
        spin_for: Duration::from_micros(30),
        awake_for: Duration::from_micros(100),
        rounds_per_look: 1,
        crowded_rounds: None,
        first_sleep: Duration::from_millis(50),
        longest_sleep: Duration::from_millis(50),
    };
    /// For messages.
    pub(crate) static MESSAGES: Limits = Limits {
        first_looks: [0, 0],
        spin_for: Duration::from_micros(30),
        awake_for: Duration::from_micros(200),
        rounds_per_look: 1,
        crowded_rounds: Some(64),
        first_sleep: Duration::from_millis(10),
        longest_sleep: Duration::from_millis(20),
    };
    /// The first sleep where nothing can wake the sleeper. Each further one is twice as long.
    pub(crate) const FIRST_NAP: Duration = Duration::from_micros(50);
    /// The longest such sleep: what a byte in shared memory may wait for its reader.
    pub(crate) const LONGEST_NAP: Duration = Duration::from_micros(200);
}

/// Copies and truth values (`host/copy.rs`, `host/bools.rs`).
pub(crate) mod copy {
    /// Bytes of a copy from which a loop of ours is faster than the C library.
    pub(crate) const VECTORS_FROM_BYTES: usize = 1 << 10;
    /// Bytes that are read before they are, where need be, normalised.
    pub(crate) const BOOLS_BLOCK_BYTES: usize = 4096;
}

/// Folds on the processor (`host/reduce/`).
pub(crate) mod reduce {
    /// Bytes that are folded before they are copied to a second destination: they are still in the first-level cache.
    pub(crate) const TWICE_READ_BYTES: usize = 16 << 10;
    /// Bytes of the block on the stack in which elements are folded: in the first-level cache beside the inputs, and its loops are long.
    pub(crate) const BLOCK_BYTES: usize = 4096;
}

/// Plans of collectives over links (`host/plan/`). Ranks plan alike, so these must be the same on every rank.
pub(crate) mod plan {
    /// Bytes in all, up to which a broadcast, an all-gather or an all-to-all of equal blocks goes through scratch instead of waiting for an
    /// agreement: a copy of that much costs less than a round of messages.
    pub(crate) const CARRIED_BYTES: usize = 64 << 10;
    /// Received bytes, up to which a direct all-reduce sends whole vectors instead of shares: one exchange instead of two.
    pub(crate) const FLAT_BYTES: usize = 32 << 10;
    /// Bytes, up to which a direct reduce brings whole vectors to the root instead of shares to everyone.
    pub(crate) const STAR_BYTES: usize = 8 << 10;
    /// Pieces under way at once in one direction of a ring, so that sending, receiving and folding overlap.
    pub(crate) const RING_IN_FLIGHT: usize = 4;
    /// Segments under way at once in a direct reduction: one is folded while the next comes in.
    pub(crate) const DIRECT_IN_FLIGHT: usize = 2;
    /// Exchanges under way at once in an all-to-all.
    pub(crate) const EXCHANGES_IN_FLIGHT: usize = 4;
    /// Plans that a communicator keeps: a training step repeats its calls.
    pub(crate) const KEPT: usize = 32;
    /// Bytes that kept plans take in all.
    pub(crate) const KEPT_BYTES: usize = 1 << 20;
    /// Bytes of the largest plan that is kept: building a larger one takes little time beside its transfer.
    pub(crate) const KEPT_BYTES_OF_ONE: usize = KEPT_BYTES / 8;
}

/// Messages between two ranks (`host/point_to_point/`).
pub(crate) mod point_to_point {
    /// Bytes of messages that no receive wants yet, over all peers. Both ends count with it, so it must be the same on every rank.
    pub(crate) const UNEXPECTED_BYTES: usize = 64 << 20;
    /// Bytes of that for each peer at least, however many there are.
    pub(crate) const UNEXPECTED_LEAST_BYTES: usize = 1 << 20;
    /// Rounds between two looks for newly opened links: a look is a system call.
    pub(crate) const ACCEPT_EVERY: u64 = 64;
    /// Looks of a receive at its source's stream before it becomes a request.
    pub(crate) const LOOKS: u32 = 256;
    /// The same where each look is a system call.
    pub(crate) const READS: u32 = 32;
    /// Bytes read ahead: a header and a short message in one read.
    pub(crate) const AHEAD_BYTES: usize = 2048;
    /// Bytes from which on a message is read straight to where it belongs: copying fewer costs less than a read.
    pub(crate) const DIRECT_BYTES: usize = 1024;
    /// Bytes from which on a message is received past the cache, which it would only empty.
    pub(crate) const PAST_CACHE_BYTES: usize = 4 << 20;
    /// Bytes that one link reads, or writes, before the others get their turn.
    pub(crate) const PASS_BYTES: usize = 1 << 20;
    /// Frames that one link reads before the others get their turn.
    pub(crate) const PASS_FRAMES: usize = 256;
    /// Reads of a link whose peer is lost: what it sent before still counts, but it might be alive and send without end.
    pub(crate) const LAST_READS: usize = 64;
    /// Reads of a link that is about to be closed, so that closing does not look like a failure to a peer that still sends.
    pub(crate) const DRAIN_READS: usize = 8192;
    /// Buffers kept for short messages that no receive wants yet.
    pub(crate) const SPARE_BUFFERS: usize = 64;
    /// Bytes of long messages that are kept after their receives gave up, over all peers.
    pub(crate) const KEPT_BYTES: usize = 256 << 20;
}

/// Who moves messages on, and for how long (`communicator/progress/`).
pub(crate) mod progress {
    use std::time::Duration;

    /// How long a thread stays away from the lock between two turns where others wait for it: a sleeper needs about as long to wake up.
    pub(crate) const HAND_OVER: Duration = Duration::from_micros(50);
    /// How long one turn of a waiter may hold the lock, so that others can post and wait too.
    pub(crate) const TURN: Duration = Duration::from_micros(200);
    /// The same until another thread has wanted the lock for the first time: a sleep of this length costs no timer of its own.
    pub(crate) const LONE_TURN: Duration = Duration::from_millis(5);
    /// Messages of which the last does not try the short way, so that everything else is moved on.
    pub(crate) const DIRECT: u32 = 64;
    /// How long the background thread sleeps where nothing moves.
    pub(crate) const NAP: Duration = Duration::from_millis(1);
    /// How long it sleeps where nothing is outstanding: it is woken when something is, and looks now and then whether the communicator lives.
    pub(crate) const IDLE: Duration = Duration::from_secs(1);
    /// For how long peers are told of the end of the communicator: a link that one opens to ask takes a moment.
    pub(crate) const TELLING: Duration = Duration::from_secs(2);
    /// For how long closing waits for sends that are under way.
    pub(crate) const FLUSH: Duration = Duration::from_secs(5);
    /// For how long closing then waits for links to take what is left.
    pub(crate) const LEAVE: Duration = Duration::from_secs(1);
}

/// Threads on which the program's code runs (`own_thread.rs`).
pub(crate) mod own_thread {
    use std::time::Duration;

    /// How long the end of one is waited for that has nothing left to do. What the program does there may last longer; the thread is left to itself
    /// then.
    pub(crate) const LAST: Duration = Duration::from_secs(5);
}

/// The flight recorder (`flight/`).
pub(crate) mod flight {
    use std::time::Duration;

    /// Calls that are over at once, of which one has a time: a look at the clock costs a part of such a call.
    pub(crate) const LOOK_EVERY: u64 = 16;
    /// Errors that are kept.
    pub(crate) const ERRORS: usize = 32;
    /// Between two times that a waiter says whom it waits for.
    pub(crate) const TELL_EVERY: Duration = Duration::from_millis(50);
    /// Records of each kind that are read of every communicator of the process where a deadline has passed.
    pub(crate) const LOOKED_AT: u64 = 16;
    /// Calls of other communicators that the error of a deadline names at most.
    pub(crate) const MEANWHILE: usize = 3;
    /// Such a call has waited for one part in so many of the time that the deadline gave, or more: what is quick has nothing to do with it.
    pub(crate) const SHARE: u64 = 10;
}

/// Start-up.
pub(crate) mod bootstrap {
    use std::time::Duration;

    /// One look at the store, before the key of contradictions is looked at again, where there are few ranks.
    pub(crate) const SLICE: Duration = Duration::from_millis(100);
    /// The same for each rank where there are many. A look costs the store four requests: all ranks together ask no more often than this.
    pub(crate) const SLICE_PER_RANK: Duration = Duration::from_micros(250);
    /// How long after its deadline a start may still ask the store who has not come: its error comes within a second of it.
    pub(crate) const LAST_QUESTIONS: Duration = Duration::from_millis(800);
    /// How long the rank that finds that out for all may take, and how long the others wait for it.
    pub(crate) const FINDING_OUT: Duration = Duration::from_millis(300);
    /// Ranks of which an error of the start says host and process. The others are numbers.
    pub(crate) const INTRODUCED: usize = 32;
    /// How long rank 0 serves the store after its own deadline, for those who came a little later than it did.
    pub(crate) const LATE_LINGER: Duration = Duration::from_millis(500);
    /// Ranks that one root of NCCL's bootstrap serves, where the library can have several roots.
    #[cfg(feature = "cuda")]
    pub(crate) const RANKS_PER_ROOT: usize = 256;
}

/// The host backend.
pub(crate) mod backend {
    /// Bytes from which a look at the clock costs nothing beside the call: its end goes on record with its time.
    pub(crate) const LONG_CALL_BYTES: usize = 16 << 10;
}

/// The agreement of a shrink on who is left.
pub(crate) mod shrink {
    use std::time::Duration;

    /// One wait at the leader's store, before other recovery listeners are looked at.
    pub(crate) const SLICE: Duration = Duration::from_millis(50);
    /// Between two rounds of probing while nobody leads.
    pub(crate) const PAUSE: Duration = Duration::from_millis(10);
    /// The longest such pause: each look costs a place among those who wait at a closed recovery listener.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// Time without a leader after which all lower ranks are looked at, not the lowest alone.
    pub(crate) const LOOK_FURTHER: Duration = Duration::from_millis(250);
    /// For which a leader waits for ranks that were given up once.
    pub(crate) const GRACE: Duration = Duration::from_secs(1);
    /// Time after which a leader that was held up may have been given up itself.
    pub(crate) const LONG: Duration = Duration::from_secs(3);
    /// Looks at others' recovery listeners by a rank that goes on, at most, where it is held up each time.
    pub(crate) const LOOKS: usize = 4;
}

/// Turns of the threads that share a communicator (`ticket_lock.rs`).
pub(crate) mod ticket_lock {
    use std::time::Duration;

    /// Looks of a waiter before it sleeps: a call in shared memory is over by then.
    pub(crate) const LOOKS: usize = if cfg!(loom) { 1 } else { 200 };
    /// The first sleep, which bounds how late a waiter is that was missed when its turn came.
    pub(crate) const FIRST_NAP: Duration = Duration::from_millis(1);
    /// How long an abort waits for its turn to tell the peers, where another thread is in a call, which tells them too.
    pub(crate) const ABORTING: Duration = Duration::from_millis(50);
    /// Later sleeps: whoever leaves wakes this waiter, and this is only how often it looks all the same.
    pub(crate) const NAP: Duration = Duration::from_millis(100);
}
