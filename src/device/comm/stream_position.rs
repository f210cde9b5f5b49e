//! Waits for what a stream was given so far, in which a rank learns that its own calls there are over.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::NcclComm;
use super::lock::BackOff;
use super::stream_tracker::StreamTracker;
use crate::deadline::Deadline;
use crate::device::driver::{self, cuda_error};
use crate::error::Result;

/// A place in a stream, behind some of the communicator's calls.
#[derive(Debug)]
pub(crate) struct StreamPosition {
    event: CudaEvent,
    /// Who follows the stream, where it has calls, and how many it had been given.
    calls: Option<(Arc<StreamTracker>, u64)>,
    /// How many calls were on record.
    noted: u64,
}

impl StreamPosition {
    /// Whether the stream has come there.
    pub(crate) fn is_complete(&self) -> std::result::Result<bool, DriverError> {
        let complete = driver::is_complete(&self.event)?;
        if let Some((tracker, calls)) = self.calls.as_ref().filter(|_| complete) {
            tracker.settle(*calls);
        }
        Ok(complete)
    }
}

impl NcclComm {
    /// The end of what a stream has been given.
    pub(crate) fn position(&self, stream: &CudaStream) -> std::result::Result<StreamPosition, DriverError> {
        let calls = self.inner.tracker_of(stream).map(|tracker| (Arc::clone(&tracker), tracker.issued()));
        let noted = self.inner.flight().map_or(0, |flight| flight.device_calls_noted());
        // Behind what was counted.
        Ok(StreamPosition { event: stream.record_event(None)?, calls, noted })
    }

    /// How the wait for a position has ended; `None` where it goes on. A deadline that passes ends the communicator, so that the stream comes free.
    ///
    /// What is done is well only if no rank had been cut off before: so others' ends are asked for afterwards.
    pub(crate) fn look(&self, position: &StreamPosition, doing: &dyn Fn() -> String, deadline: &Deadline) -> Option<Result<()>> {
        let complete = position.is_complete();
        if let Some(error) = self.inner.cut_off(doing, deadline.elapsed()) {
            return Some(Err(error));
        }
        match complete {
            Ok(true) => {
                if let (Some(flight), Some((tracker, _))) = (self.inner.flight(), &position.calls) {
                    flight.device_has_done(tracker.number, position.noted);
                }
                Some(Ok(()))
            }
            Ok(false) => deadline.has_passed().then(|| Err(self.inner.expire(doing, deadline.elapsed()))),
            Err(error) => Some(Err(cuda_error(doing(), error))),
        }
    }

    /// Waits until a stream has done what it was given so far.
    ///
    /// # Errors
    ///
    /// `Timeout` when the deadline passes; `Poisoned` when the communicator has ended, or what another rank says that ends it; `Cuda`.
    pub(crate) fn wait_for(&self, stream: &CudaStream, deadline: &Deadline) -> Result<()> {
        let doing = || format!("waiting on the device for {}", self.inner.last_call());
        let position = self.position(stream).map_err(|error| cuda_error(doing(), error))?;
        self.wait(&position, deadline)
    }

    /// Waits for a position; as [`NcclComm::wait_for`].
    pub(crate) fn wait(&self, position: &StreamPosition, deadline: &Deadline) -> Result<()> {
        let doing = || format!("waiting on the device for {}", self.inner.last_call());
        let mut back_off = BackOff::default();
        loop {
            match self.look(position, &doing, deadline) {
                Some(ended) => return ended,
                None => back_off.rest(),
            }
        }
    }
}
