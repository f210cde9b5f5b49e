//! Sizes and times at which behaviour switches, by area. Limits of protocols and formats stand beside their formats.

/// Start-up.
pub(crate) mod bootstrap {
    use std::time::Duration;

    /// One look at the store, before the key of contradictions is looked at again, where there are few ranks.
    pub(crate) const SLICE: Duration = Duration::from_millis(100);
    /// The same for each rank where there are many. A look costs the store four requests: all ranks together ask no more often than this.
    pub(crate) const SLICE_PER_RANK: Duration = Duration::from_micros(250);
    /// Ranks that one root of NCCL's bootstrap serves, where the library can have several roots.
    #[cfg(feature = "cuda")]
    pub(crate) const RANKS_PER_ROOT: usize = 256;
}

/// The host plane.
pub(crate) mod plane {
    /// Bytes from which a look at the clock costs nothing beside the call: its end goes on record with its time.
    pub(crate) const LONG_CALL_BYTES: usize = 16 << 10;
}

/// Recovery listeners.
pub(crate) mod recovery {
    use std::time::Duration;

    /// For a rank that is there to accept a connection.
    pub(crate) const PROBE: Duration = Duration::from_millis(500);
    /// For the first answer of a rank that serves. One that does not serve takes all of it.
    pub(crate) const ANSWER: Duration = Duration::from_millis(200);
    /// For any answer of a rank that is known to serve.
    pub(crate) const SERVICE: Duration = Duration::from_secs(30);
    /// For the last clients of a server that is no longer needed.
    pub(crate) const LINGER: Duration = Duration::from_secs(1);
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
