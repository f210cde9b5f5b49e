//! The files that ranks have written.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::input_file;

/// The newest supported version of the format.
const VERSION: u32 = 1;
const FORMAT: &str = "collectives flight record";

/// One rank's record of one communicator. Names are as in the file.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Record {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) reason: String,
    pub(crate) time_written_ns: u64,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) pg_id: String,
    pub(crate) pg_name: String,
    pub(crate) wiring: String,
    pub(crate) ranks: Vec<Peer>,
    /// The ranks in the job. Records of older versions lack them.
    #[serde(default)]
    pub(crate) world_ranks: Vec<usize>,
    pub(crate) entries: Vec<Entry>,
}

/// A rank, as recorded by every rank.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) host_name: String,
    pub(crate) pid: u32,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (host {}, pid {})", self.rank, self.host_name, self.pid)
    }
}

/// The progress of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Scheduled,
    Started,
    Completed,
    Failed,
}

/// The backend on which a call ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    Host,
    Device,
}

/// One call.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Entry {
    #[serde(default)]
    pub(crate) record_id: u64,
    pub(crate) backend: Backend,
    pub(crate) collective_seq_id: Option<u64>,
    pub(crate) profiling_name: String,
    pub(crate) op: Option<String>,
    pub(crate) dtype: String,
    pub(crate) count: u64,
    pub(crate) counts_hash: Option<u32>,
    pub(crate) root: Option<usize>,
    pub(crate) peer: Option<usize>,
    pub(crate) tag: Option<u64>,
    pub(crate) state: State,
    pub(crate) time_created_ns: Option<u64>,
    pub(crate) time_discovered_completed_ns: Option<u64>,
    pub(crate) waiting_for: Vec<usize>,
    pub(crate) error: Option<String>,
    pub(crate) error_kind: Option<String>,
    pub(crate) error_ranks: Vec<usize>,
}

impl Entry {
    /// Returns the collective as text without its number: what ranks must agree on.
    pub(crate) fn call(&self) -> String {
        if self.profiling_name == "barrier" {
            return "barrier".to_owned();
        }
        let op = self.op.as_ref().map(|op| format!("{op}, ")).unwrap_or_default();
        let hash = self.counts_hash.map(|hash| format!(", counts #{hash:06x}")).unwrap_or_default();
        let root = self.root.map(|root| format!(", root {root}")).unwrap_or_default();
        format!("{}({op}{}, count {}{hash}{root})", self.profiling_name, self.dtype, self.count)
    }

    /// Returns the message as text.
    pub(crate) fn message(&self) -> String {
        let peer = self.peer.map_or_else(|| "any rank".to_owned(), |peer| format!("rank {peer}"));
        let direction = if self.profiling_name == "send" { "send to" } else { "recv from" };
        let tag = self.tag.filter(|tag| *tag != 0).map(|tag| format!(", tag {tag}")).unwrap_or_default();
        format!("{direction} {peer}{tag} ({}, count {})", self.dtype, self.count)
    }

    /// Returns the collective with its number, or the message.
    pub(crate) fn in_words(&self) -> String {
        self.collective_seq_id.map_or_else(|| self.message(), |number| format!("{} number {number}", self.call()))
    }

    /// Whether the call has not ended: it is under way, or queued.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state, State::Started | State::Scheduled)
    }

    /// Whether a peer was missing, or still is.
    pub(crate) fn is_stuck(&self) -> bool {
        let lacked = ["timeout", "peer_lost", "aborted"];
        self.state == State::Started
            || (self.state == State::Failed && self.error_kind.as_deref().is_some_and(|kind| lacked.contains(&kind)))
    }
}

/// A file that is not a record, and why.
type Skipped = (PathBuf, String);

/// Reads all records of a folder, and lists the files that are not records.
pub(super) fn read_all(folder: &Path) -> io::Result<(Vec<Record>, Vec<Skipped>)> {
    let mut paths = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    let is_meant = |path: &PathBuf| {
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        !is_hidden && path.extension().is_some_and(|extension| extension == "json")
    };
    paths.retain(is_meant);
    paths.sort();
    let (mut records, mut skipped) = (Vec::new(), Vec::new());
    for path in paths {
        match read(&path) {
            Ok(record) => records.push(record),
            Err(reason) => skipped.push((path, reason)),
        }
    }
    Ok((records, skipped))
}

fn read(path: &Path) -> Result<Record, String> {
    let text = input_file::read(path).map_err(|error| error.to_string())?;
    let record: Record = serde_json::from_slice(&text).map_err(|error| format!("not a readable flight record: {error}"))?;
    record.checked()
}

impl Record {
    /// Returns the time from the start of a call to the time of the record; `None` if the start is not known.
    pub(crate) fn seconds_in(&self, entry: &Entry) -> Option<f64> {
        Some(self.time_written_ns.saturating_sub(entry.time_created_ns?) as f64 / 1e9)
    }

    /// Returns the record if its format is supported, and its ranks fit together.
    pub(crate) fn checked(self) -> Result<Self, String> {
        let is_of_its_world = self.rank < self.world_size && self.ranks.len() == self.world_size;
        match () {
            () if self.format != FORMAT => Err(format!("its format is {:?}, not {FORMAT:?}", self.format)),
            () if self.version > VERSION => {
                Err(format!("the file's format has version {}, but this collperf reads versions up to {VERSION}", self.version))
            }
            () if !is_of_its_world => {
                Err(format!("the record is from rank {} of {} ranks, but lists {} ranks", self.rank, self.world_size, self.ranks.len()))
            }
            () => Ok(self),
        }
    }
}
