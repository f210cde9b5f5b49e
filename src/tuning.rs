//! The sizes at which behaviour switches, and how long and how often things are tried: all in one place. What formats and protocols bound
//! stands with them.

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
    use std::time::Duration;

    /// Bytes of messages that no receive wants yet, over all peers. Both ends count with it, so it must be the same on every rank.
    pub(crate) const UNEXPECTED_BYTES: usize = 64 << 20;
    /// Bytes of that for each peer at least, however many there are.
    pub(crate) const UNEXPECTED_LEAST_BYTES: usize = 1 << 20;
    /// For how long a rank keeps the core while nothing moves: about a round trip over loopback.
    pub(crate) const SPIN_FOR: Duration = Duration::from_micros(8);
    /// For how long it stays awake in all: a sleeper takes some tens of microseconds to wake up.
    pub(crate) const AWAKE_FOR: Duration = Duration::from_micros(200);
    /// Fruitless rounds between two looks at the clock, which costs about as much as a round.
    pub(crate) const LOOK_EVERY: u32 = 32;
    /// Fruitless rounds before a sleep where ranks outnumber cores: others need the core.
    pub(crate) const CROWDED_ROUNDS: u32 = 64;
    /// The first sleep on descriptors at most; each further one takes twice as long, up to 16 times.
    pub(crate) const SLEEP: Duration = Duration::from_millis(1);
    /// Rounds between two looks for newly opened links: a look is a system call.
    pub(crate) const ACCEPT_EVERY: u64 = 64;
    /// Looks of a receive at its source's stream before it becomes a request.
    pub(crate) const LOOKS: u32 = 256;
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
}

/// Who moves messages on, and for how long (`communicator/progress/`).
pub(crate) mod progress {
    use std::time::Duration;

    /// How long a thread stays away from the lock between two turns where others wait for it: a sleeper needs about as long to wake up.
    pub(crate) const HAND_OVER: Duration = Duration::from_micros(50);
    /// How long one turn of a waiter may hold the lock, so that others can post and wait too.
    pub(crate) const TURN: Duration = Duration::from_micros(200);
    /// Messages of which the last does not try the short way, so that everything else is moved on.
    pub(crate) const DIRECT: u32 = 16;
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

/// The flight recorder (`flight/`).
pub(crate) mod flight {
    use std::time::Duration;

    /// Calls that are over at once, of which one has a time: a look at the clock costs a part of such a call.
    pub(crate) const LOOK_EVERY: u64 = 16;
    /// Errors that are kept.
    pub(crate) const ERRORS: usize = 32;
    /// Between two times that a waiter says whom it waits for.
    pub(crate) const TELL_EVERY: Duration = Duration::from_millis(50);
}
