//! What is done with a full bucket, and the plain way: an all-reduce.

use super::flat::Flat;
use super::float::Float;
use super::pending::Pending;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::op::ReduceOp;

/// How one bucket's gradients are averaged. Each bucket has a hook of its own, so what a hook remembers from step to step is its bucket's.
///
/// Every rank makes the same calls on `comm` in the same order. What keeps that order, and lets calls go on in the background:
/// [`start`](Hook::start) is called in the order of the buckets, as they are filled; then, once every bucket has been started,
/// [`advance`](Hook::advance) in the order of the buckets, again and again in turn, until each is done. So a hook of several calls
/// starts one of them each time and waits for the one before. Neither is called for a bucket without elements.
///
/// Where buckets are on a device, calls on `comm` are queued on its stream. What a hook does itself goes on the stream of the slice
/// ([`Flat::device_mut`]), the caller's; cudarc's events order the two, so that neither function need wait for the device.
pub trait Hook<T: Float>: Send {
    /// Takes this rank's gradients and starts what there is to be done.
    ///
    /// # Errors
    ///
    /// The step fails, and no other can follow.
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()>;

    /// Waits for what was started last; starts what comes next, or gives the averaged gradients back: in the buffer that was taken, or
    /// one as long.
    ///
    /// # Errors
    ///
    /// As for [`start`](Hook::start).
    fn advance(&mut self, comm: &Communicator) -> Result<Progress<T>>;
}

/// How far a bucket is.
#[derive(Debug)]
pub enum Progress<T: Float> {
    /// Another call was started.
    Started,
    /// The averaged gradients.
    Done(Flat<T>),
}

/// By what each rank's gradients are multiplied before they are added up. `Unsupported` for ops that do not add up: what they give is no
/// gradient.
pub(super) fn weight(op: ReduceOp, world_size: usize) -> Result<f64> {
    match op {
        ReduceOp::Avg => Ok(1.0 / world_size as f64),
        ReduceOp::Sum => Ok(1.0),
        ReduceOp::PreMulSum(weight) => Ok(weight),
        other => {
            let reason = "gradients are added up: use ReduceOp::Avg, ReduceOp::Sum or ReduceOp::PreMulSum with a weight for each rank";
            Err(Error::unsupported(format!("averaging gradients by {other}"), reason))
        }
    }
}

/// The plain hook: one all-reduce of the bucket.
#[derive(Debug)]
pub struct AllReduce<T: Float> {
    op: ReduceOp,
    pending: Pending<Flat<T>>,
}

impl<T: Float> AllReduce<T> {
    /// Reduces with `op`.
    #[must_use]
    pub fn new(op: ReduceOp) -> Self {
        Self { op, pending: Pending::Idle }
    }
}

impl<T: Float> Hook<T> for AllReduce<T> {
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()> {
        self.pending = gradients.all_reduce(comm, self.op)?;
        Ok(())
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<T>> {
        self.pending.wait().map(Progress::Done)
    }
}
