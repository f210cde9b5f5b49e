//! Sizes, counts and times at which behaviour changes, and nothing else: this file uses nothing of the crate.
//!
//! Each can be changed without a change of what a call means. Those that ranks must agree on say so. Limits of protocols and formats stand
//! where these are defined.

/// Connections that have not proven themselves (`proof/admission.rs`).
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
    /// How long each may take to prove itself, or to say hello where there is no secret.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
    /// Connections that are accepted, or make room, at a time: a flood of them holds up nobody who is there already.
    pub(crate) const BATCH: usize = 64;
    /// Refusals that are each reported. Of further ones those are whose number is a power of two.
    pub(crate) const REPORTED: u64 = 16;
}

/// Links between ranks over TCP (`host/net/`), and what a plane makes of them.
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
    /// Idle time after which the kernel asks whether a peer's host is still there.
    pub(crate) const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(3);
    /// How long the kernel waits for each answer.
    pub(crate) const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
    /// How often the kernel asks before it gives the connection up: 11 s in all.
    pub(crate) const KEEP_ALIVE_RETRIES: u32 = 4;
    /// Time between two looks of a link that cannot move at whether the peer's host still answers.
    pub(crate) const SILENCE_INTERVAL: Duration = Duration::from_secs(1);
    /// How long a peer's host may leave what was sent to it unanswered.
    pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(12);
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
    /// The first pause between two attempts to connect. Each further one is half as long again.
    pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(5);
    /// The longest pause between two attempts to connect.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// The longest single poll. A longer wait polls again.
    pub(crate) const LONGEST_POLL: Duration = Duration::from_secs(3600);
    /// Time without a connection after which a failed attempt is logged, and again after twice that, and so on.
    pub(crate) const REPORT_AFTER: Duration = Duration::from_secs(10);
    /// How long a server may close every connection that asks for a proof, before it is taken for one that knows none.
    pub(crate) const CLOSING_GRACE: Duration = Duration::from_secs(5);
    /// How long a server may take to confirm that a wait was cancelled, where the handle's own timeout is no shorter.
    pub(crate) const CANCEL: Duration = Duration::from_secs(5);
    /// The same where that timeout is shorter: without the answer the connection is lost, and a busy server needs a moment.
    pub(crate) const LEAST_CANCEL: Duration = Duration::from_millis(500);
    /// Keys of a failed wait of which it is asked whether they are there. The others are reported missing too.
    pub(crate) const NAMED_KEYS: usize = 256;
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
    /// How long this rank's own server may take to answer this rank.
    pub(crate) const SERVICE: Duration = Duration::from_secs(30);
    /// How long a server that is no longer needed waits for its last clients.
    pub(crate) const LINGER: Duration = Duration::from_secs(1);
}
