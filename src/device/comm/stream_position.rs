//! Waits until a stream has done its work so far. After such a wait, a rank knows that its own calls on the stream have
//! ended.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use super::NcclComm;
use super::lock::BackOff;
use super::stream_tracker::StreamTracker;
use crate::base::deadline::Deadline;
use crate::base::tuning::device::BACKEND_DROP_WAIT;
use crate::device::driver::{self, Event, cuda_error};
use crate::error::Result;

/// A position in a stream, behind some of the communicator's calls.
#[derive(Debug)]
pub(crate) struct StreamPosition {
    /// The event that marks the position. `None` if the driver refused an event: the position is then reached when the
    /// stream is idle.
    event: Option<Event>,
    stream: Arc<CudaStream>,
    /// The tracker of the stream, if it has calls, and the number of calls that it had been given.
    calls: Option<(Arc<StreamTracker>, u64)>,
    /// The number of calls that were on record.
    noted: u64,
}

impl StreamPosition {
    /// Whether the stream has reached the position.
    pub(crate) fn is_complete(&self) -> std::result::Result<bool, DriverError> {
        // The calling thread may not have used a device before.
        driver::bind_once(self.stream.context())?;
        let complete = match &self.event {
            Some(event) => event.is_complete()?,
            None if driver::is_per_thread(&self.stream) => return Ok(false),
            None => driver::is_idle(&self.stream)?,
        };
        if let Some((tracker, calls)) = self.calls.as_ref().filter(|_| complete) {
            tracker.settle(*calls);
        }
        Ok(complete)
    }

    /// Whether no work before the position uses memory any longer: the stream has reached the position, or the device
    /// runs nothing now. If the driver does not report that yet, it may do so later.
    pub(crate) fn is_passed(&self) -> bool {
        self.is_complete().unwrap_or_else(driver::is_final)
    }

    /// Whether the position [is passed](StreamPosition::is_passed); waits for that until the deadline.
    pub(crate) fn is_passed_within(&self, deadline: &Deadline) -> bool {
        let mut back_off = BackOff::default();
        while !self.is_passed() {
            if deadline.has_passed() {
                return false;
            }
            back_off.rest();
        }
        true
    }
}

impl NcclComm {
    /// Returns the end of a stream's work so far. This cannot fail: work on the stream is followed, whatever the driver
    /// reports.
    pub(crate) fn position(&self, stream: &Arc<CudaStream>) -> StreamPosition {
        let calls = self.inner.tracker_of(stream).map(|tracker| (Arc::clone(&tracker), tracker.issued()));
        let noted = self.inner.flight().map_or(0, |flight| flight.device_calls_noted());
        // The event comes after the calls that were counted.
        let event = Event::new(stream.context()).and_then(|event| event.record(stream).map(|()| event));
        if let Err(error) = &event {
            crate::base::event::warn!(
                ?error,
                "the driver could not record an event in a stream, so this thread waits for the whole stream"
            );
        }
        StreamPosition { event: event.ok(), stream: Arc::clone(stream), calls, noted }
    }

    /// Returns the outcome of the wait for a position; `None` if the wait continues. A deadline that passes ends the
    /// communicator, so that the stream is released.
    ///
    /// Completed work is valid only if no rank had been cut off before. So other ranks' ends are queried afterwards.
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

    /// Waits until a stream has done its work so far.
    ///
    /// # Errors
    ///
    /// `Timeout` if the deadline passes; `Poisoned` if the communicator has ended, or the end that another rank
    /// reported; `Cuda`.
    pub(crate) fn wait_for(&self, stream: &Arc<CudaStream>, deadline: &Deadline) -> Result<()> {
        self.wait(&self.position(stream), deadline)
    }

    /// Waits like [`NcclComm::wait_for`], but even after a failure waits until the stream has reached the position: the
    /// end of a communicator releases the stream. Used for memory that its owner takes back when this returns.
    pub(crate) fn outlast(&self, stream: &Arc<CudaStream>, deadline: &Deadline) -> Result<()> {
        let position = self.position(stream);
        let waited = self.wait(&position, deadline);
        if waited.is_err() && !position.is_passed_within(&Deadline::after(BACKEND_DROP_WAIT)) {
            crate::base::event::error!(
                rank = self.rank(),
                "a stream has not become idle, and may still use the buffers of a call that has failed"
            );
        }
        waited
    }

    /// Waits for a position like [`NcclComm::wait_for`].
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
