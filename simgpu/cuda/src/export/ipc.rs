use std::ffi::c_uint;

use crate::call::{driver, put};
use crate::capture;
use crate::code::Code;
use crate::mapping::Identity;
use crate::memory::{Freed, Kind};
use crate::state;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag there is, and mandatory.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
const MAGIC: u64 = u64::from_be_bytes(*b"simgpu\x00\x01");

/// A `CUipcMemHandle`.
#[repr(C)]
struct MemoryHandle([u8; 64]);

/// The content of a handle.
#[repr(C)]
#[derive(Clone, Copy)]
struct Content {
    magic: u64,
    identity: Identity,
    bytes: u64,
    device: u64,
    unused: [u64; 2],
}

impl Content {
    fn of(handle: &MemoryHandle) -> Content {
        // SAFETY: both have 64 bytes, which the compiler checks, and any bytes are numbers.
        unsafe { std::mem::transmute(handle.0) }
    }

    fn handle(self) -> MemoryHandle {
        // SAFETY: as in `of`; there is no padding between numbers of these sizes.
        MemoryHandle(unsafe { std::mem::transmute::<Content, [u8; 64]>(self) })
    }
}

driver! {
    fn cuIpcGetMemHandle(place: *mut MemoryHandle, start: u64) {
        let state = state::lock();
        state.current()?;
        let (identity, bytes, device) = state.memory.export(start).ok_or(Code::INVALID_VALUE)?;
        put(place, Content { magic: MAGIC, identity, bytes, device: device as u64, unused: [0; 2] }.handle())
    }

    fn cuIpcOpenMemHandle_v2(place: *mut u64, handle: MemoryHandle, flags: c_uint) {
        let handle = Content::of(&handle);
        if place.is_null() || flags != LAZY_ENABLE_PEER_ACCESS || handle.magic != MAGIC {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        let context = state.current()?;
        capture::unsafe_call(&mut state)?;
        // A process cannot open its own memory.
        if handle.identity.process == std::process::id() {
            return Err(Code::INVALID_CONTEXT);
        }
        let lies = i32::try_from(handle.device).map_err(|_| Code::INVALID_VALUE).and_then(|device| state.device(device))?;
        let by = (state.contexts[&context].device, context);
        put(place, state.memory.open(handle.identity, handle.bytes, lies, by)?)
    }

    fn cuIpcCloseMemHandle(start: u64) {
        let mut state = state::lock();
        let context = state.current_at_all()?;
        capture::unsafe_call(&mut state)?;
        if state.memory.at(start).is_none_or(|found| found.kind != Kind::Opened) {
            return Err(Code::INVALID_VALUE);
        }
        if state.memory.close(start).ok_or(Code::INVALID_VALUE)? {
            let (stamp, number) = (state.host_stamp(), state.next_number());
            state.free(start, Freed { stamp, what: "cuIpcCloseMemHandle of the host".into(), number });
            state.release(start);
        }
        state.healthy(context)
    }
}
