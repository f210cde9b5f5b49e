//! What is held from the moment a call's buffers are ordered until the call has been queued.

use cudarc::driver::{CudaContext, CudaStream, DriverError};

use crate::buffer::device::{DeviceRead, DeviceWrite, Ordered, Reading};
use crate::device;
use crate::error::Result;

type Outcome = std::result::Result<(), DriverError>;

/// The guards of a call's buffers. They are let go once the call has been queued, and tell later users of the buffers to wait for it.
pub(super) struct Guards<'s> {
    hold: Hold,
    guards: Vec2<Ordered<'s>>,
    readings: Vec2<Reading<'s>>,
}

/// Who can reach a call's buffers while it is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::communicator) enum Hold {
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

impl<'s> Guards<'s> {
    pub(super) fn new(hold: Hold) -> Self {
        Self { hold, guards: Vec2::default(), readings: Vec2::default() }
    }

    /// Has `stream` wait for the last write of a buffer; its address.
    pub(super) fn read(&mut self, buffer: &'s dyn DeviceRead, stream: &'s CudaStream) -> u64 {
        let (address, guard) = buffer.read(stream);
        // Calls that own their buffers need no owner to wait: their work does.
        if let (Some(reading), Hold::Borrowed) = (Reading::of(buffer, &guard, stream), self.hold) {
            self.readings.push(reading);
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

    /// Refuses a call that could not be ordered, before it is queued.
    pub(super) fn check(&self, plane: &CudaContext, stream: &CudaStream, call: &str) -> Result<()> {
        check(plane, stream).map_err(|error| device::cuda_error(format!("{call}: ordering its buffers"), error))
    }

    /// Lets go, after the call has been queued on `stream`.
    pub(super) fn release(self, plane: &CudaContext, stream: &CudaStream) -> Outcome {
        let Self { guards, readings, .. } = self;
        drop(guards);
        readings.few.into_iter().flatten().chain(readings.more).try_for_each(|reading| reading.hold_owner(stream))?;
        check(plane, stream)
    }
}

/// What cudarc met while it ordered buffers for `stream`: it has no other way out. The stream may be of another `CudaContext` than the
/// device plane's.
pub(super) fn check(plane: &CudaContext, stream: &CudaStream) -> Outcome {
    stream.context().check_err().and(plane.check_err())
}
