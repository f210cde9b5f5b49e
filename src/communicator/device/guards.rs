//! What is held from the moment a call's buffers are ordered until the call has been queued.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, SyncOnDrop};

use crate::buffer::device::{DeviceRead, DeviceWrite, Ordered};
use crate::device;

/// The guards of a call's buffers. They are let go once the call has been queued, and tell later users of the buffers to wait for it.
pub(super) struct Guards<'s> {
    hold: Hold,
    guards: Vec2<Ordered<'s>>,
    readings: Vec2<Reading<'s>>,
}

/// Who can reach a call's buffers while it is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Hold {
    /// Whoever lent them.
    Borrowed,
    /// Nobody: the call's work owns them.
    Owned,
}

/// Two of something, as most calls have, or more, without allocating for two.
struct Vec2<T> {
    few: [Option<T>; 2],
    more: Vec<T>,
}

impl<T> Default for Vec2<T> {
    fn default() -> Self {
        Self { few: [None, None], more: Vec::new() }
    }
}

impl<T> Vec2<T> {
    fn push(&mut self, item: T) {
        match self.few.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(item),
            None => self.more.push(item),
        }
    }
}

/// A buffer that is read on another stream than the one it will be freed on.
struct Reading<'s> {
    owner: &'s Arc<CudaStream>,
    event: &'s CudaEvent,
}

impl<'s> Guards<'s> {
    pub(super) fn new(hold: Hold) -> Self {
        Self { hold, guards: Vec2::default(), readings: Vec2::default() }
    }

    /// Has `stream` wait for the last write of a buffer; its address.
    pub(super) fn read(&mut self, buffer: &'s dyn DeviceRead, stream: &'s CudaStream) -> u64 {
        let (address, guard) = buffer.read(stream);
        if let (Ordered::Tracked(SyncOnDrop::Record(Some((event, _)))), Some(owner)) = (&guard, buffer.owner())
            && (owner.cu_stream() != stream.cu_stream() || device::is_per_thread(stream))
        {
            if owner.context().is_managing_stream_synchronization() {
                // The event is about to forget the reader before this one: whoever waits for this one waits for both.
                owner.context().record_err(stream.wait(event));
            }
            if self.hold == Hold::Borrowed {
                self.readings.push(Reading { owner, event });
            }
        }
        self.guards.push(guard);
        address
    }

    /// Has `stream` wait for the last reads and writes of a buffer; its address.
    pub(super) fn write(&mut self, buffer: &'s mut (dyn DeviceWrite + '_), stream: &'s CudaStream) -> u64 {
        let (address, guard) = buffer.write(stream);
        self.guards.push(guard);
        address
    }

    /// Lets go, after the call has been queued on `stream`.
    ///
    /// A slice of cudarc's remembers its last reader only: once somebody else has read it, whoever frees it would no longer wait for this
    /// call. So the stream on which it will be freed waits for the call now. Calls that own their buffers do without. What remains is
    /// cudarc's own: a writer on a third stream, after a reader that is not ours, waits for that reader alone.
    pub(super) fn release(self, context: &CudaContext, stream: &CudaStream) -> Result<(), DriverError> {
        let Self { guards, readings, .. } = self;
        drop(guards);
        let mut readings = readings.few.into_iter().flatten().chain(readings.more).peekable();
        // Inside a graph the other stream would be drawn into it.
        if readings.peek().is_some() && context.is_managing_stream_synchronization() && !device::is_capturing(stream) {
            readings.try_for_each(|reading| reading.owner.wait(reading.event))?;
        }
        // What cudarc met while it ordered buffers has no other way out.
        context.check_err()
    }
}
