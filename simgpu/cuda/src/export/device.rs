use std::ffi::{c_char, c_int, c_uint};
use std::io::Write;

use crate::call::{driver, put};
use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::memory_model;
use crate::state;

/// Writes a text with its NUL, truncated to `room`.
///
/// # Safety
///
/// `place` is null or has room for `room` bytes.
unsafe fn put_text(place: *mut c_char, room: c_int, text: &str) -> Outcome {
    let room = usize::try_from(room).ok().filter(|&room| room > 0 && !place.is_null()).ok_or(Code::INVALID_VALUE)?;
    let length = text.len().min(room - 1);
    // SAFETY: at most `room` bytes are written.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), length);
        place.add(length).write(0);
    }
    Ok(())
}

driver! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if let Err(why) = memory_model::check() {
            let _ = std::io::stderr().write_all(format!("simulated GPU: {why}\n").as_bytes());
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        let first = !state.initialised;
        state.initialise()?;
        if first {
            let devices = state.devices.len();
            let line = format!("collectives: SIMULATED GPU, not a real one: {devices} devices over host memory\n");
            // Writes directly, because the test harness captures the output of `eprintln`.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, state::lock().configuration.driver_version as c_int)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, state::lock().devices.len() as c_int)
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        state::lock().device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        state::lock().device(device)?;
        put_text(name, length, device::NAME)
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
        let device = state::lock().device(device)?;
        put(uuid, device::uuid(device))
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        let device = state::lock().device(device)?;
        put(uuid, device::uuid(device))
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) {
        let device = state::lock().device(device)?;
        put_text(text, length, &device::pci_bus_id(device))
    }

    fn cuDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char) {
        if text.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let text = std::ffi::CStr::from_ptr(text).to_string_lossy();
        let known = (0..state::lock().devices.len()).find(|&ordinal| device::pci_bus_id(ordinal).eq_ignore_ascii_case(&text));
        put(device, known.ok_or(Code::INVALID_DEVICE)? as c_int)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        let state = state::lock();
        state.device(device)?;
        put(bytes, state.configuration.bytes as usize)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) {
        let state = state::lock();
        let device = state.device(device)?;
        put(value, device::attribute(&state.configuration, device, attribute)?)
    }

    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) {
        let state = state::lock();
        state.device(device)?;
        put(major, (state.configuration.capability / 10) as c_int)?;
        put(minor, (state.configuration.capability % 10) as c_int)
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let state = state::lock();
        put(can, c_int::from(state.device(device)? != state.device(peer)?))
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        if context.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        let device = state.device(device)?;
        put(context, state.retain(device))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let mut state = state::lock();
        let device = state.device(device)?;
        let primary = &mut state.primaries[device];
        let context = primary.context.filter(|_| primary.count > 0).ok_or(Code::INVALID_CONTEXT)?;
        primary.count -= 1;
        if primary.count == 0 {
            primary.context = None;
            context::destroy(state, context);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        let mut state = state::lock();
        let device = state.device(device)?;
        state.primaries[device].count = 0;
        if let Some(context) = state.primaries[device].context.take() {
            context::destroy(state, context);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let state = state::lock();
        let primary = &state.primaries[state.device(device)?];
        put(flags, primary.flags)?;
        put(active, c_int::from(primary.context.is_some()))
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) {
        let mut state = state::lock();
        let device = state.device(device)?;
        state.primaries[device].flags = flags;
        if let Some(context) = state.primaries[device].context {
            state.contexts.entry(context).and_modify(|context| context.flags = flags);
        }
        Ok(())
    }
}
