//! Calls on a stream of the caller's.

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::Communicator;

/// A communicator whose device calls are queued on a stream of the caller's; see [`Communicator::on`].
///
/// It borrows the communicator as long as it lives:
///
/// ```compile_fail,E0505
/// # use collectives::Communicator;
/// # fn example(comm: Communicator, stream: std::sync::Arc<cudarc::driver::CudaStream>) {
/// let on = comm.on(&stream);
/// std::thread::spawn(move || drop(comm)); // would be used on two threads
/// drop(on);
/// # }
/// ```
pub struct OnStream<'a> {
    comm: Communicator,
    /// While this lives the communicator stays where it is, on this thread.
    _borrowed: &'a Communicator,
}

impl Drop for OnStream<'_> {
    /// Nothing to do; but because there is a `drop`, the borrow lasts until it, and the communicator cannot be moved before.
    fn drop(&mut self) {}
}

impl Deref for OnStream<'_> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl fmt::Debug for OnStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnStream").field("comm", &self.comm).finish_non_exhaustive()
    }
}

impl Communicator {
    /// The same communicator, with its calls on device buffers queued on `stream` in place of its own. Calls on host buffers do not
    /// change.
    ///
    /// NCCL wants the calls of one communicator in one order: where several streams are used, order them by events.
    ///
    /// ```no_run
    /// # use collectives::{Communicator, ReduceOp};
    /// # fn example(comm: &Communicator, grad: &mut cudarc::driver::CudaSlice<f32>) -> collectives::Result<()> {
    /// let stream = comm.device().expect("a device was asked for").context().new_stream().expect("a stream");
    /// comm.on(&stream).all_reduce(grad, ReduceOp::Avg)
    /// # }
    /// ```
    ///
    /// Where there is no device plane, or the stream belongs to another device, calls on device buffers say so.
    #[must_use]
    pub fn on(&self, stream: &Arc<CudaStream>) -> OnStream<'_> {
        OnStream { comm: Communicator { core: Rc::clone(&self.core), stream: Some(Arc::clone(stream)) }, _borrowed: self }
    }
}
