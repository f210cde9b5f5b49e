//! What listeners are told of messages: by `event`, which does so when the lock was let go, since they may want it themselves.

use std::sync::Arc;
use std::time::Duration;

use super::engine::ProgressEngine;
use super::pending::PendingMessage;
use crate::communicator::pinned::ErasedBuffer;
use crate::communicator::work::State;
use crate::error::Error;
use crate::event;
use crate::flight::FlightPlane;
use crate::observe::Track;

impl ProgressEngine {
    /// Tells those who listen that a background message is over. Its buffer is freed with this where the message failed, or nobody holds
    /// its `Work` any more: how a buffer is freed is the program's as well.
    pub(super) fn tell_over(
        &self,
        request: PendingMessage,
        elapsed: Duration,
        failed: Option<(Error, Box<dyn ErasedBuffer>)>,
        state: Arc<State>,
    ) {
        let (recorder, observers) = (Arc::clone(&self.recorder), self.observers.clone());
        let (error, buffer) = failed.unzip();
        event::tell("a listener", move || {
            if let Some(watch) = observers.watch() {
                let report = watch.message(&request.message(), FlightPlane::Host, request.bytes);
                watch.ended(report, elapsed, error.as_ref(), Track::Background);
            }
            if let Some(error) = &error {
                recorder.after_error(error);
            }
        });
        event::tell("the drop of a buffer", move || drop(buffer));
        event::tell("the drop of a buffer", move || drop(state));
    }

    /// Warns of a message that does not end.
    #[cold]
    pub(super) fn warn(&self, request: &PendingMessage) {
        let missing: Vec<u32> = match request.context.peer {
            Some(peer) => vec![peer as u32],
            None => (0..self.peers.len()).filter(|peer| *peer != self.rank).map(|peer| peer as u32).collect(),
        };
        self.recorder.warn(&request.doing(), request.deadline.elapsed(), request.deadline.limit(), &missing);
    }
}
