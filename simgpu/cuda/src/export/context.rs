use std::ffi::{c_int, c_uint, c_void};

use crate::call::{driver, offer, put};
use crate::capture;
use crate::code::{Code, Outcome};
use crate::context;
use crate::state::{self, Handle};
use crate::stream;

/// Makes a new context and makes it current.
///
/// # Safety
///
/// `place` is null or valid for writes.
unsafe fn create(place: *mut usize, flags: c_uint, device: c_int) -> Outcome {
    let mut state = state::lock();
    let device = state.device(device)?;
    let context = state.new_context(device, flags);
    context::push(context);
    // SAFETY: guaranteed by the caller.
    unsafe { put(place, context) }
}

fn peer_access(peer: Handle, enable: bool) -> Outcome {
    let mut state = state::lock();
    let current = state.current()?;
    let device = state.contexts.get(&peer).ok_or(Code::INVALID_CONTEXT)?.device;
    let Some(context) = state.contexts.get_mut(&current).filter(|context| context.device != device) else {
        return Err(Code::INVALID_DEVICE);
    };
    let known = context.peers.iter().position(|&known| known == device);
    match (known, enable) {
        (None, true) => context.peers.push(device),
        (Some(at), false) => drop(context.peers.swap_remove(at)),
        (Some(_), true) => return Err(Code::PEER_ACCESS_ALREADY_ENABLED),
        (None, false) => return Err(Code::PEER_ACCESS_NOT_ENABLED),
    }
    Ok(())
}

driver! {
    fn cuCtxCreate_v2(place: *mut usize, flags: c_uint, device: c_int) {
        create(place, flags, device)
    }

    fn cuCtxCreate_v3(place: *mut usize, _parameters: *const c_void, _count: c_int, flags: c_uint, device: c_int) {
        create(place, flags, device)
    }

    fn cuCtxCreate_v4(place: *mut usize, _parameters: *const c_void, flags: c_uint, device: c_int) {
        create(place, flags, device)
    }

    fn cuCtxDestroy_v2(handle: usize) {
        let state = state::lock();
        let primary = state.primaries.iter().any(|primary| primary.context == Some(handle));
        if primary || !state.contexts.contains_key(&handle) {
            return Err(Code::INVALID_CONTEXT);
        }
        context::destroy(state, handle);
        if context::raw_current() == handle {
            context::pop();
        }
        Ok(())
    }

    fn cuCtxGetCurrent(place: *mut usize) {
        put(place, context::raw_current())
    }

    fn cuCtxSetCurrent(handle: usize) {
        if handle != 0 && !state::lock().contexts.contains_key(&handle) {
            return Err(Code::INVALID_CONTEXT);
        }
        context::set_current(handle);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(handle: usize) {
        if !state::lock().contexts.contains_key(&handle) {
            return Err(Code::INVALID_CONTEXT);
        }
        context::push(handle);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(place: *mut usize) {
        let handle = context::pop().ok_or(Code::INVALID_CONTEXT)?;
        offer(place, handle);
        Ok(())
    }

    fn cuCtxGetDevice(place: *mut c_int) {
        let state = state::lock();
        put(place, state.contexts[&state.current_at_all()?].device as c_int)
    }

    fn cuCtxGetFlags(place: *mut c_uint) {
        let state = state::lock();
        put(place, state.contexts[&state.current_at_all()?].flags)
    }

    fn cuCtxSetFlags(flags: c_uint) {
        let mut state = state::lock();
        let current = state.current()?;
        state.contexts.entry(current).and_modify(|context| context.flags = flags);
        Ok(())
    }

    fn cuCtxGetApiVersion(handle: usize, place: *mut c_uint) {
        let state = state::lock();
        if handle != 0 && !state.contexts.contains_key(&handle) {
            return Err(Code::INVALID_CONTEXT);
        }
        put(place, 3020)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        state::lock().current()?;
        offer(least, stream::PRIORITIES.0);
        offer(greatest, stream::PRIORITIES.1);
        Ok(())
    }

    fn cuCtxSynchronize() {
        let mut state = state::lock();
        let current = state.current()?;
        capture::refuse_context(&mut state, current)?;
        stream::synchronise_all(state, current)
    }

    fn cuCtxSetLimit(limit: c_uint, _value: usize) {
        state::lock().current()?;
        // Stacks, the buffer of printf, heap, depths, fetches and caches: settings without effect on the simulation.
        if limit > 6 { Err(Code::UNSUPPORTED_LIMIT) } else { Ok(()) }
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        peer_access(peer, true)
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        peer_access(peer, false)
    }
}
