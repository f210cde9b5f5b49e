//! The environment of an admission, from the members' side: a trait, which the tests simulate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::tuning::membership::{CONNECTED, CONNECTED_PER_RANK};
use crate::communicator::life::shrink::protocol::{Shrunk, Unmet};
use crate::communicator::recovery::Probe;
use crate::error::Result;
use crate::rendezvous::Store;

/// The communicator of the members, and the environment of an admission.
pub(super) trait Members: Sized {
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;
    fn timeout(&self) -> Duration;

    /// Returns the ranks' numbers in the last communicator that an admission made.
    fn job_ranks(&self) -> &[usize];

    /// Whether the communicator has ended.
    fn has_ended(&self) -> bool;

    /// Whether a process may have asked at this rank's recovery listener.
    fn was_asked(&self) -> bool;

    /// Returns the store behind this rank's recovery listener, which is opened if necessary.
    fn own_store(&self) -> Result<Arc<dyn Store>>;

    /// Describes the settings that newcomers must share.
    fn settings(&self) -> String;

    /// Returns the address of a rank's recovery listener.
    fn address(&self, rank: usize) -> Option<SocketAddr>;

    /// Finds out whether the processes behind these recovery listeners live. The ones that do not answer hold up no other.
    fn probe_all(&self, listeners: &[SocketAddr]) -> Vec<Probe>;

    /// Runs several exchanges in one turn of the communicator.
    fn in_one_turn<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R>;

    /// Gathers a number from every rank, within this time.
    fn exchange(&self, number: u64, limit: Duration) -> Result<Vec<u64>>;

    /// Gathers a text from every rank.
    fn exchange_texts(&self, text: &str) -> Result<Vec<Vec<u8>>>;

    /// Returns the store behind rank 0's recovery listener; `patience` limits the wait for an answer.
    fn first_store(&self, patience: Duration) -> Result<Arc<dyn Store>>;

    /// Returns the prefix of the keys of the next attempt in rank 0's store. It is the same on all ranks.
    fn next_prefix(&self) -> String;

    /// Connects this rank with the other members and the newcomers of a plan, over a store.
    fn connect(&self, store: Arc<dyn Store>, plan: &Plan, deadline: &Deadline) -> Result<Self>;

    /// Publishes that this rank continues in the communicator that an admission made.
    fn publish_commit(&self) -> Result<()>;

    /// Finds out whether the others have given up this rank before it published that. Returns `LeftBehind` if they have
    /// continued without it.
    fn look_for_others(&self) -> Result<()>;

    /// Ends the communicator on all ranks.
    fn abort(&self);

    /// Waits for all ranks of a new communicator.
    fn meet(&self, limit: Duration) -> Result<()>;

    /// Returns the prefix of the keys of a shrink of this communicator.
    fn shrink_prefix(&self) -> String;

    /// Makes a communicator of the remaining ranks. If `unmet` is given, this communicator has grown, and its ranks have not
    /// met yet.
    fn shrink(&self, unmet: Option<Unmet>) -> Result<Shrunk<Self>>;
}

/// The newcomers of an attempt and where they meet, agreed by all members.
pub(super) struct Plan {
    /// Rank 0's recovery listener.
    pub(super) address: SocketAddr,
    /// The number of newcomers that each member has called.
    pub(super) counts: Vec<usize>,
    /// The recovery listeners of all newcomers.
    pub(super) listeners: Vec<SocketAddr>,
}

/// Returns how long a number of ranks may take to connect, and to meet for the first time.
pub(super) fn connection_time(world_size: usize) -> Duration {
    CONNECTED + CONNECTED_PER_RANK * u32::try_from(world_size).unwrap_or(u32::MAX)
}
