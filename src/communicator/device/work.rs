//! Started calls on devices: an event says when they have ended.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::CudaEvent;

use super::call::DeviceCall;
use super::guards::Hold;
use crate::communicator::Communicator;
use crate::communicator::completion::{Finished, State};
use crate::communicator::message::Received;
use crate::communicator::pinned::{ErasedBuffer, PinnedBuffer};
use crate::communicator::work::{Drive, Work};
use crate::deadline::Deadline;
use crate::device::{self, NcclComm};
use crate::error::{Error, Result};

/// How long a waiter sleeps between two looks at an event, once it has looked often.
const NAP: Duration = Duration::from_micros(20);

/// How often it looks without sleeping.
const LOOKS: u32 = 200;

/// A call that was queued, with an event behind it.
pub(in crate::communicator) struct Queued {
    event: CudaEvent,
    comm: Arc<NcclComm>,
    doing: String,
    deadline: Deadline,
}

/// What moves a started call's handle on: looks at the event.
struct Watcher {
    queued: Queued,
    state: Arc<State>,
    /// What the call works on, until it has ended.
    buffers: Mutex<Option<Box<dyn ErasedBuffer>>>,
    received: Option<Received>,
}

impl Queued {
    /// The handle of the call, which owns its buffers.
    pub(in crate::communicator) fn into_work<B: Send + 'static>(self, buffers: PinnedBuffer<B>) -> Work<B> {
        let (state, watcher) = self.watched(buffers, None);
        Work::new(state, Some(watcher))
    }

    /// The handle of a receive.
    pub(in crate::communicator) fn into_receiving_work<B: Send + 'static>(
        self,
        buffers: PinnedBuffer<B>,
        received: Received,
    ) -> Work<(B, Received)> {
        let (state, watcher) = self.watched(buffers, Some(received));
        Work::<B>::receiving(state, Some(watcher))
    }

    fn watched<B: Send + 'static>(self, buffers: PinnedBuffer<B>, received: Option<Received>) -> (Arc<State>, Arc<dyn Drive>) {
        let state = State::new();
        let watcher = Watcher { queued: self, state: Arc::clone(&state), buffers: Mutex::new(Some(Box::new(buffers))), received };
        (state, Arc::new(watcher))
    }

    /// Whether it has ended; the error with which it did.
    fn look(&self) -> Option<Result<()>> {
        match device::is_complete(&self.event) {
            Ok(true) => return Some(self.comm.failure().map_or(Ok(()), Err)),
            Ok(false) => {}
            Err(error) => return Some(Err(device::cuda_error(self.doing.clone(), error))),
        }
        if let Some(failure) = self.comm.failure() {
            return Some(Err(failure));
        }
        if !self.deadline.has_passed() {
            return None;
        }
        Some(Err(self.comm.time_out(&|| self.doing.clone(), &self.deadline)))
    }
}

impl Drive for Watcher {
    fn drive(&self, limit: Duration) -> bool {
        let until = Deadline::after(limit);
        let mut looks = 0;
        while !self.poll() && !until.has_passed() {
            looks += 1;
            if looks > LOOKS { std::thread::sleep(NAP) } else { std::hint::spin_loop() }
        }
        true
    }

    fn poll(&self) -> bool {
        let Some(ended) = self.queued.look() else { return false };
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(buffers) = buffers {
            self.state.end(ended.map(|()| Finished { buffer: buffers.release(), received: self.received }));
        }
        true
    }
}

impl Communicator {
    /// Queues a call, and an event behind it.
    pub(in crate::communicator) fn queue_and_mark(&self, call: DeviceCall<'_>) -> Result<Queued> {
        let doing = call.job.call.to_string();
        self.and_mark(call.job.call.kind.name(), doing, || self.queue(call, Hold::Owned)).map(|(queued, ())| queued)
    }

    /// Puts an event behind what `queue` queues.
    pub(super) fn and_mark<R>(&self, call: &str, doing: String, queue: impl FnOnce() -> Result<R>) -> Result<(Queued, R)> {
        let plane = self.plane(call)?;
        self.refuse_forked(call)?;
        let stream = self.device_stream(plane);
        if device::is_capturing(stream) {
            let reason = "its end cannot be asked for inside a graph; use the form that returns no Work, which is queued as well";
            return Err(Error::unsupported(format!("a started {doing} while a graph is captured"), reason));
        }
        let deadline = Deadline::after(self.timeout());
        let result = queue()?;
        let event = stream.record_event(None).map_err(|error| device::cuda_error(doing.clone(), error))?;
        Ok((Queued { event, comm: Arc::clone(plane.comm()), doing, deadline }, result))
    }
}
