//! Calls on a stream of the caller's.

#![expect(unsafe_code, reason = "streams that other crates own")]

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::guards;
use crate::buffer::device::Ordered;
use crate::communicator::Communicator;
use crate::device;
use crate::error::{Error, Result};
use crate::interchange::AsStream;

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

    /// Makes calls in the order of a stream of another crate's, or of a raw `CUstream` or `cudaStream_t` (see
    /// [`RawStream`](crate::RawStream)): what is queued inside comes after what had been queued on `stream` before, and before what is
    /// queued on it afterwards.
    ///
    /// ```no_run
    /// # use collectives::{Communicator, RawStream, ReduceOp};
    /// # fn example(comm: &Communicator, grad: &mut cudarc::driver::CudaSlice<f32>, handle: *mut std::ffi::c_void) -> collectives::Result<()> {
    /// // SAFETY: a stream of device 0, which its engine destroys later.
    /// let stream = unsafe { RawStream::new(handle, 0) };
    /// comm.in_order_of(&stream, |comm| comm.all_reduce(grad, ReduceOp::Avg))
    /// # }
    /// ```
    ///
    /// The calls themselves run on the communicator's stream, with an event before and one behind them: a communicator keeps the
    /// streams that it has used, and nobody's borrow lasts so long. [`Communicator::on`] does without the events, for streams of cudarc's.
    ///
    /// # Errors
    ///
    /// `NoDevice` where there is no device plane, `InvalidArgument` for a stream of another device, `Unsupported` for one that is being
    /// captured, what the driver refuses, and what `calls` returns.
    pub fn in_order_of<R>(&self, stream: &(impl AsStream + ?Sized), calls: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        const CALL: &str = "in_order_of";
        let plane = self.plane(CALL)?;
        self.refuse_forked(CALL)?;
        let context = &plane.gpu().context;
        self.check_stream(plane, CALL)?;
        if stream.device() != context.ordinal() {
            let reason = format!("the stream belongs to device {}, and this communicator to device {}", stream.device(), context.ordinal());
            return Err(Error::argument(CALL, reason));
        }
        // SAFETY: a stream of that device's primary context, alive as long as it is borrowed (the trait's contract), and so until the
        // handle made here is dropped: it does not leave this function.
        let foreign = unsafe { context.wrap_borrowed_stream(stream.as_raw_stream().cast()) };
        if device::is_capturing(&foreign) {
            return Err(Error::unsupported(CALL, "the stream is being captured into a graph; capture calls made with Communicator::on"));
        }
        let own = self.device_stream(plane);
        let refusal = |error| device::cuda_error(format!("{CALL}: ordering the streams"), error);
        let ordered = Ordered::after(&foreign, own);
        guards::check(context, own).map_err(refusal)?;
        let result = calls(self);
        drop(ordered);
        let parked = guards::check(context, own).map_err(refusal);
        result.and_then(|result| parked.map(|()| result))
    }
}
