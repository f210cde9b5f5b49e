//! Waits for what a stream was given so far, in which a rank learns that its own calls there are over.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use super::NcclComm;
use super::lock::BackOff;
use super::stream_tracker::StreamTracker;
use crate::base::deadline::Deadline;
use crate::base::tuning::device::BACKEND_DROP_WAIT;
use crate::device::driver::{self, Event, cuda_error};
use crate::error::Result;

/// A place in a stream, behind some of the communicator's calls.
#[derive(Debug)]
pub(crate) struct StreamPosition {
    /// What marks it; nothing where the driver would not have it marked: then the place is wherever the stream has done all that it has.
    event: Option<Event>,
    stream: Arc<CudaStream>,
    /// Who follows the stream, where it has calls, and how many it had been given.
    calls: Option<(Arc<StreamTracker>, u64)>,
    /// How many calls were on record.
    noted: u64,
}

impl StreamPosition {
    /// Whether the stream has come there.
    pub(crate) fn is_complete(&self) -> std::result::Result<bool, DriverError> {
        // Whoever asks may have used no device before.
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

    /// Whether nothing before it uses memory any more: the stream has come there, or the device runs nothing now. A driver that does not say so
    /// may say so later.
    pub(crate) fn is_passed(&self) -> bool {
        self.is_complete().unwrap_or_else(driver::is_final)
    }

    /// As [`StreamPosition::is_passed`], or becomes so in time.
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
    /// The end of what a stream has been given. Nothing here can fail: what is on the stream is followed, whatever the driver says.
    pub(crate) fn position(&self, stream: &Arc<CudaStream>) -> StreamPosition {
        let calls = self.inner.tracker_of(stream).map(|tracker| (Arc::clone(&tracker), tracker.issued()));
        let noted = self.inner.flight().map_or(0, |flight| flight.device_calls_noted());
        // Behind what was counted.
        let event = Event::new(stream.context()).and_then(|event| event.record(stream).map(|()| event));
        if let Err(error) = &event {
            crate::base::event::warn!(?error, "the driver marks no place in a stream: the whole stream is waited for");
        }
        StreamPosition { event: event.ok(), stream: Arc::clone(stream), calls, noted }
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
    pub(crate) fn wait_for(&self, stream: &Arc<CudaStream>, deadline: &Deadline) -> Result<()> {
        self.wait(&self.position(stream), deadline)
    }

    /// As [`NcclComm::wait_for`], and stays where that fails until the stream has come there all the same: the end of a communicator frees it. For
    /// memory that its owner takes back when this returns.
    pub(crate) fn outlast(&self, stream: &Arc<CudaStream>, deadline: &Deadline) -> Result<()> {
        let position = self.position(stream);
        let waited = self.wait(&position, deadline);
        if waited.is_err() && !position.is_passed_within(&Deadline::after(BACKEND_DROP_WAIT)) {
            crate::base::event::error!(
                rank = self.rank(),
                "a stream has not come free, and may still use the buffers of a call that has failed"
            );
        }
        waited
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
