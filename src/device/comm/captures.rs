//! Calls that become part of graphs. A check at the beginning of a call and a check at its end determine whether the
//! call becomes part of a graph.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaStream, DriverError};

use super::live_graphs::{Captured, CapturedCall};
use super::lock::BackOff;
use super::state::{Inner, NO_TRACKER};
use super::stream_tracker::StreamTracker;
use crate::base::deadline::Deadline;
use crate::device::driver;
use crate::device::nccl::Refusal;
use crate::error::Result;

impl Inner {
    /// Begins a call on a stream, for which the device may take `limit`. Returns a value if the call becomes part of a
    /// graph. Such a call runs only if the graph's owner launches the graph, and its time counts from each launch.
    #[inline]
    pub(super) fn begin(&self, stream: &CudaStream, limit: Duration) -> std::result::Result<Option<Captured>, Refusal> {
        let is_captured = driver::is_capturing(stream);
        self.announced.check(is_captured)?;
        if !is_captured {
            return self.allow(limit).map(|()| None);
        }
        self.begin_captured(stream, limit).map_err(|error| Refusal::driver("cuGraphRetainUserObject", error))
    }

    #[cold]
    fn begin_captured(&self, stream: &CudaStream, limit: Duration) -> std::result::Result<Option<Captured>, DriverError> {
        self.graphs.begin(&self.context, stream, CapturedCall { label: self.last_label(), limit })
    }

    /// Ends the call that [`Inner::begin`] began: records it if it is on the stream, or puts its end into its graph.
    #[inline]
    pub(super) fn conclude(
        self: &Arc<Self>,
        captured: Option<Captured>,
        last: &mut Option<Arc<StreamTracker>>,
        stream: &Arc<CudaStream>,
        doing: &dyn Fn() -> String,
    ) -> Result<()> {
        match captured {
            None => {
                self.note(last, stream);
                Ok(())
            }
            Some(captured) => {
                self.end_captured(captured, last, stream).map_err(|error| self.end(driver::cuda_error(doing(), error), doing))
            }
        }
    }

    #[cold]
    fn end_captured(
        &self,
        captured: Captured,
        last: &mut Option<Arc<StreamTracker>>,
        stream: &CudaStream,
    ) -> std::result::Result<(), DriverError> {
        // Calls that are recorded without a tracker count as ended when nothing is under way.
        *last = None;
        self.last_tracker.store(NO_TRACKER, Ordering::Relaxed);
        driver::bind(&self.context)?;
        captured.end(stream)
    }

    /// Returns the number of captures of this communicator's calls that still have a graph, something made from it, or
    /// a launch.
    pub(in crate::device) fn live_graphs(&self) -> usize {
        self.graphs.count()
    }

    /// Returns the number of [`Inner::live_graphs`], after waiting for the driver to report the end of dropped graphs,
    /// until the deadline at most.
    pub(in crate::device) fn live_graphs_within(&self, deadline: &Deadline) -> usize {
        let mut back_off = BackOff::default();
        loop {
            match self.live_graphs() {
                left if left == 0 || deadline.has_passed() => return left,
                _ => back_off.rest(),
            }
        }
    }
}
