//! What the ways of the data through shared memory are called, where one has to be told.

use super::chunking::{Area, Chunking, in_shares};
use super::group::Group;
use crate::call::Kind;

impl Group {
    /// The way of a call on `bytes` in all, on ordinary memory; `None` for calls that go over links.
    pub(crate) fn way(&self, kind: Kind, bytes: usize, element_bytes: usize) -> Option<&'static str> {
        let (ranks, block, step_sizes) = (self.ranks, bytes / self.ranks, &self.step_sizes);
        let area = match kind {
            Kind::Barrier => return Some("flags"),
            Kind::AllReduce if Area::for_fold(bytes, 1, element_bytes) == Area::Slot && in_shares(bytes) => return Some("shares"),
            Kind::Reduce if in_shares(bytes) => return Some("shares"),
            Kind::AllReduce | Kind::Reduce => Chunking::folds(bytes, 1, element_bytes, step_sizes.fold).area,
            Kind::ReduceScatter | Kind::ReduceScatterV => Chunking::folds(block, ranks, element_bytes, step_sizes.reduce_scatter).area,
            Kind::Broadcast => Chunking::moves(bytes, 1, step_sizes.broadcast(bytes)).area,
            Kind::AllGather | Kind::AllGatherV | Kind::Gather => Chunking::moves(block, 1, step_sizes.gather(block)).area,
            Kind::AllToAll | Kind::Scatter => Chunking::moves(block, ranks, step_sizes.scatter).area,
            Kind::GatherV | Kind::ScatterV | Kind::AllToAllV => return None,
        };
        Some(match area {
            Area::Head | Area::Lines => "mailboxes",
            Area::Slot => "slots",
        })
    }
}
