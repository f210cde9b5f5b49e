//! What the ways of the data through shared memory are called, where one has to be told.

use super::cut::{Cut, in_shares};
use super::group::Group;
use super::lane::Area;
use crate::call::Kind;

impl Group {
    /// The way of a call on `bytes` in all, on ordinary memory; `None` for calls that go over links.
    pub(crate) fn way(&self, kind: Kind, bytes: usize, element_bytes: usize) -> Option<&'static str> {
        let (ranks, block, pace) = (self.ranks, bytes / self.ranks, &self.pace);
        let area = match kind {
            Kind::Barrier => return Some("flags"),
            Kind::AllReduce if Area::for_fold(bytes, 1, element_bytes) == Area::Slot && in_shares(bytes) => return Some("shares"),
            Kind::Reduce if in_shares(bytes) => return Some("shares"),
            Kind::AllReduce | Kind::Reduce => Cut::folds(bytes, 1, element_bytes, pace.fold).area,
            Kind::ReduceScatter | Kind::ReduceScatterV => Cut::folds(block, ranks, element_bytes, pace.reduce_scatter).area,
            Kind::Broadcast => Cut::moves(bytes, 1, pace.broadcast(bytes)).area,
            Kind::AllGather | Kind::AllGatherV | Kind::Gather => Cut::moves(block, 1, pace.gather(block)).area,
            Kind::AllToAll | Kind::Scatter => Cut::moves(block, ranks, pace.scatter).area,
            Kind::GatherV | Kind::ScatterV | Kind::AllToAllV => return None,
        };
        Some(match area {
            Area::Head | Area::Lines => "lanes",
            Area::Slot => "slots",
        })
    }
}
