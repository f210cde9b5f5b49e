//! How calls are done, in a word: for those who watch them.

use super::HostPlane;
use super::job::Job;
use crate::call::{BlockLayout, Kind};

impl HostPlane {
    /// How a call on `bytes` in all is done, on ordinary memory with a built-in op.
    pub(crate) fn algorithm(&self, kind: Kind, bytes: usize, element_bytes: usize) -> &'static str {
        match &self.group {
            _ if self.peers.len() == 1 => "copy",
            Some(group) if self.topology.is_one_host() => group.way(kind, bytes, element_bytes).unwrap_or("links"),
            _ if self.topology.is_scattered() => self.chooser.name(kind, bytes, element_bytes, self.peers.len()),
            _ => "hierarchical",
        }
    }

    /// How a job is done.
    pub(super) fn algorithm_of(&self, job: &Job) -> &'static str {
        let bytes = match (job.call.kind, &job.layout) {
            // Only the root has the whole vector.
            (Kind::Gather | Kind::Scatter, BlockLayout::Equal(block)) => block * self.peers.len(),
            _ => job.memory.source_len.max(job.memory.destination_len),
        };
        if self.peers.len() > 1 && self.topology.is_one_host() && job.is_too_large_to_share() {
            return "links";
        }
        self.algorithm(job.call.kind, bytes, job.element_bytes)
    }
}
