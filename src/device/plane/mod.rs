//! The device plane of one communicator: which way each call goes, and what it needs.

#[cfg(test)]
pub(crate) mod cases;
#[cfg(test)]
mod model;
mod step;
mod way;

#[cfg(test)]
pub(crate) use self::model::combine;
pub(crate) use self::step::{Folder, Lane, Moment, Plan, Ranks, Room, Step, Transfer};
pub(crate) use self::way::{FoldOp, NativeOp, Way};
