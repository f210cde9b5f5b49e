use std::ffi::c_uint;

use crate::call::{driver, put};
use crate::code::Code;
use crate::event::{self, Event, Recorded};
use crate::state;
use crate::stream;

driver! {
    fn cuEventCreate(place: *mut usize, flags: c_uint) {
        if place.is_null() || flags & !7 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        let (context, handle) = (state.current()?, state.handle());
        state.events.insert(handle, Event { context, flags, recorded: Recorded::Never });
        put(place, handle)
    }

    fn cuEventDestroy_v2(handle: usize) {
        let mut state = state::lock();
        let event = state.events.remove(&handle).ok_or(Code::INVALID_HANDLE)?;
        state.healthy(event.context)
    }

    fn cuEventRecord(handle: usize, stream: usize) {
        event::record(&mut stream::with_room(stream), handle, stream, false)
    }

    fn cuEventRecordWithFlags(handle: usize, stream: usize, flags: c_uint) {
        if flags & !event::EXTERNAL != 0 {
            return Err(Code::INVALID_VALUE);
        }
        event::record(&mut stream::with_room(stream), handle, stream, flags == event::EXTERNAL)
    }

    fn cuEventSynchronize(handle: usize) {
        event::synchronise(state::lock(), handle)
    }

    fn cuEventQuery(handle: usize) {
        event::query(&mut state::lock(), handle)
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        put(milliseconds, event::elapsed(start, end)?)
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) {
        put(milliseconds, event::elapsed(start, end)?)
    }
}
