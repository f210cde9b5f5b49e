//! The events that the supervisor of a host's ranks waits for.

use serde::{Deserialize, Serialize};

use super::exit::ExitReason;
use super::failure::Failure;

/// The value in the store once all ranks of all hosts have succeeded.
pub(super) const DONE: &[u8] = b"done";

/// An event that the supervisor waits for.
pub(super) enum Event {
    /// The rank at this index of the supervisor's list has ended.
    Ended(usize, ExitReason),
    /// This signal arrived.
    Signal(i32),
    /// The launcher that started this launcher is gone.
    Orphaned,
    /// This program's standard output has no reader any more.
    Unread,
    /// The attempt with this number has ended for all hosts.
    Settled(u32, Settled),
    /// This host got a message about its place in an elastic job.
    Message,
    /// This host of an elastic job has lost the host that serves the store. The text is the reason.
    Cut(String),
}

/// How an attempt ended for the whole job.
#[derive(Debug)]
pub(super) enum Settled {
    /// All ranks of all hosts succeeded.
    Done,
    /// A rank failed. This failure was the first one on any host.
    Failed(Box<Failure>),
    /// The hosts of an elastic job changed.
    Changed(Change),
    /// This host could not read from the store how the attempt ended. The text is the reason. Usually the store is gone,
    /// and so is the launcher that served it.
    Lost(String),
}

/// A change of an elastic job's hosts that ends an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Change {
    /// The hosts that are lost, or that have come.
    pub(super) why: String,
    /// Whether a host was lost, which counts as a failure.
    pub(super) is_loss: bool,
    /// Whether the job ends.
    pub(super) is_last: bool,
}

impl Settled {
    /// Reads the value in the store.
    pub(super) fn read(value: &[u8]) -> Self {
        if value == DONE {
            return Self::Done;
        }
        if let Ok(change) = serde_json::from_slice(value) {
            return Self::Changed(change);
        }
        let failure = serde_json::from_slice(value).map(Self::Failed);
        failure.unwrap_or_else(|error| Self::Lost(format!("another host sent an invalid report of a failure: {error}")))
    }
}
