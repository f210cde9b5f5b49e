//! The records that the launchers of an elastic job exchange through the job's store, as JSON, and their keys.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A host that wants to take part. It puts this record into the queue of arrivals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrival {
    /// Names this arrival. A host that is left out and comes back gets a new one.
    pub(super) id: String,
    /// The host's name, for messages.
    pub(super) name: String,
    /// The number of ranks that the host starts.
    pub(super) ranks: usize,
}

/// What a host reports of itself, several times each second.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// A counter. A host whose counter stands still does not run, or cannot be reached.
    pub(super) beat: u64,
    /// How many messages the host has dealt with. A host that runs ranks has not dealt with its last message.
    pub(super) ready: u64,
    /// Why the host leaves, if it does.
    pub(super) leaves: Option<String>,
}

/// A message from the host that serves the store to one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The next attempt begins.
    Start(Start),
    /// The host was given up, and the others go on without it. It may come back.
    LeftOut(String),
    /// The job is over for this host.
    Over {
        /// The exit code of a launcher whose ranks have not failed.
        code: u8,
        /// The reason, if the host may not know it yet.
        why: Option<String>,
    },
}

/// An attempt, as one of its hosts sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// The attempt's number, from 0.
    pub(crate) attempt: u32,
    /// This host's number.
    pub(crate) node: usize,
    /// The names of all hosts, by their numbers.
    pub(crate) names: Vec<String>,
    /// How many failures have led to a restart so far.
    pub(crate) failures: u32,
    /// Why the attempt before ended, if there was one.
    pub(crate) why: Option<String>,
}

/// The keys of one job. Jobs at the same address have different names.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    pub(super) job: String,
}

impl Keys {
    /// Returns the key of the queue of arrivals.
    pub(super) fn arrivals(&self) -> String {
        format!("collrun/elastic/{}/arrivals", self.job)
    }

    /// Returns the key that exists if a host decides for this job.
    pub(super) fn coordinator(&self) -> String {
        format!("collrun/elastic/{}/coordinator", self.job)
    }

    /// Returns the key of a host's report.
    pub(super) fn report(&self, id: &str) -> String {
        format!("collrun/elastic/{}/reports/{id}", self.job)
    }

    /// Returns the key of a message to a host.
    pub(super) fn message(&self, id: &str, number: u64) -> String {
        format!("collrun/elastic/{}/messages/{id}/{number}", self.job)
    }
}

/// Encodes a record.
pub(super) fn encode(record: &impl Serialize) -> Vec<u8> {
    // Text and numbers can always be serialized.
    serde_json::to_vec(record).unwrap_or_default()
}

/// Decodes a record; returns `None` for anything else.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}
