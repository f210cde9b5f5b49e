use std::ffi::{c_int, c_uint, c_void};

use crate::call::{driver, offer, put};
use crate::capture;
use crate::checker::Verb;
use crate::code::{Code, Outcome};
use crate::job::{Task, Work};
use crate::memory::{Freed, Kind};
use crate::pool::Pool;
use crate::state::{self, Handle};
use crate::stream;
use crate::submit;

const ATTRIBUTE_CONTEXT: u32 = 1;
const ATTRIBUTE_MEMORY_TYPE: u32 = 2;
const ATTRIBUTE_DEVICE_POINTER: u32 = 3;
const ATTRIBUTE_HOST_POINTER: u32 = 4;
const ATTRIBUTE_IS_MANAGED: u32 = 8;
const ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;
const ATTRIBUTE_RANGE_START: u32 = 11;
const ATTRIBUTE_RANGE_SIZE: u32 = 12;
const ATTRIBUTE_MAPPED: u32 = 13;

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_LOCATION_TYPE_DEVICE`.
const ALLOCATION_PINNED: u32 = 1;
const LOCATION_DEVICE: u32 = 1;

/// The beginning of `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PoolProperties {
    allocation: u32,
    handles: u32,
    location: u32,
    ordinal: c_int,
}

fn allocate(bytes: usize, kind: Kind) -> Outcome<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    capture::unsafe_call(&mut state)?;
    state.allocate(bytes, kind, context)
}

/// Frees the allocation at `start`, if its kind allows this call. Like the real driver, waits for pending work of the
/// context. That work is still reported if it uses the memory, because other devices and other contexts are not waited
/// for.
fn free(start: u64, function: &str, may: impl Fn(Kind) -> bool, wrong: Code) -> Outcome {
    let mut state = state::lock();
    let context = state.current_at_all()?;
    capture::unsafe_call(&mut state)?;
    let Some(found) = state.memory.at(start).filter(|found| found.start == start && may(found.kind)) else { return Err(wrong) };
    if let Some(freed) = &found.freed {
        let text = format!("{}: freed by {function} after it was freed by {}", found.name(), freed.what);
        state.reports.add(text);
        return Err(wrong);
    }
    let (owner, waits) = (found.context, found.kind != Kind::Registered);
    let (stamp, number) = (state.host_stamp(), state.next_number());
    state.free(start, Freed { stamp, what: format!("{function} of the host").into(), number });
    if waits {
        state = stream::drain_all(state, owner);
    }
    state.release(start);
    state.healthy(context)
}

/// Allocates in the order of a stream, from a pool of the stream's device.
fn allocate_in_stream(bytes: usize, pool: Option<Handle>, named: Handle) -> Outcome<u64> {
    let mut state = stream::with_room(named);
    let stream = state.stream(named)?;
    if state.configuration.memory_pools == 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let of = &state.streams[&stream];
    // Memory nodes of graphs are not simulated.
    if of.capture.is_some() {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let context = of.context;
    let device = state.contexts.get(&context).map(|context| context.device);
    if pool.is_some_and(|pool| state.pools.get(&pool).is_none_or(|pool| Some(pool.device) != device)) {
        return Err(Code::INVALID_VALUE);
    }
    let start = state.allocate(bytes, Kind::Pool, context)?;
    let spans = vec![submit::known(start, bytes, Verb::Allocate)];
    submit::submit(&mut state, stream, Task { work: Work::Nothing, what: "cuMemAllocAsync".into(), spans })?;
    Ok(start)
}

fn host_allocation(bytes: usize) -> Outcome<u64> {
    allocate(bytes, Kind::Pinned)
}

/// Writes one attribute of the memory at `pointer`; returns false if the driver does not know that memory.
///
/// # Safety
///
/// `value` has room for the attribute.
unsafe fn attribute(value: *mut c_void, attribute: c_uint, pointer: u64) -> Outcome<bool> {
    let state = state::lock();
    let Some(found) = state.memory.live(pointer) else { return Ok(false) };
    // SAFETY: guaranteed by the caller; the types are those of the manual.
    unsafe {
        match attribute {
            ATTRIBUTE_CONTEXT => put(value.cast(), found.context)?,
            ATTRIBUTE_MEMORY_TYPE => put(value.cast(), if found.kind.host() { 1u32 } else { 2 })?,
            ATTRIBUTE_DEVICE_POINTER => put(value.cast(), pointer)?,
            ATTRIBUTE_HOST_POINTER if found.kind.host() || found.kind == Kind::Managed => put(value.cast(), pointer)?,
            ATTRIBUTE_HOST_POINTER => put(value.cast(), 0u64)?,
            ATTRIBUTE_IS_MANAGED => put(value.cast(), u32::from(found.kind == Kind::Managed))?,
            ATTRIBUTE_DEVICE_ORDINAL => put(value.cast(), found.device as c_int)?,
            ATTRIBUTE_RANGE_START => put(value.cast(), found.start)?,
            ATTRIBUTE_RANGE_SIZE => put(value.cast(), found.bytes as usize)?,
            ATTRIBUTE_MAPPED => put(value.cast(), 1u32)?,
            _ => return Err(Code::NOT_SUPPORTED),
        }
    }
    Ok(true)
}

driver! {
    fn cuMemAlloc_v2(place: *mut u64, bytes: usize) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, allocate(bytes, Kind::Device)?)
    }

    fn cuMemAllocManaged(place: *mut u64, bytes: usize, flags: c_uint) {
        if place.is_null() || flags == 0 || flags > 2 {
            return Err(Code::INVALID_VALUE);
        }
        put(place, allocate(bytes, Kind::Managed)?)
    }

    fn cuMemFree_v2(start: u64) {
        if start == 0 {
            return Ok(());
        }
        free(start, "cuMemFree", |kind| matches!(kind, Kind::Device | Kind::Pool | Kind::Managed), Code::INVALID_VALUE)
    }

    fn cuMemAllocAsync(place: *mut u64, bytes: usize, stream: usize) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, allocate_in_stream(bytes, None, stream)?)
    }

    fn cuMemAllocFromPoolAsync(place: *mut u64, bytes: usize, pool: usize, stream: usize) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, allocate_in_stream(bytes, Some(pool), stream)?)
    }

    // The only function for virtual memory that exists here, because every driver has it. The devices report that they
    // have no such memory, but NCCL 2.30 calls it anyway.
    fn cuMemGetAllocationGranularity(place: *mut usize, properties: *const c_void, option: c_uint) {
        if place.is_null() || properties.is_null() || option > 1 {
            return Err(Code::INVALID_VALUE);
        }
        put(place, 2 << 20)
    }

    fn cuMemPoolCreate(place: *mut usize, properties: *const PoolProperties) {
        if place.is_null() || properties.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let PoolProperties { allocation, location, ordinal, .. } = *properties;
        let mut state = state::lock();
        if state.configuration.memory_pools == 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        if allocation != ALLOCATION_PINNED || location != LOCATION_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        let device = state.device(ordinal)?;
        let handle = state.handle();
        state.pools.insert(handle, Pool::new(device));
        put(place, handle)
    }

    fn cuMemPoolDestroy(pool: usize) {
        // Allocations from the pool live on.
        state::lock().pools.remove(&pool).map(drop).ok_or(Code::INVALID_VALUE)
    }

    fn cuMemPoolSetAttribute(pool: usize, attribute: c_uint, value: *const u8) {
        state::lock().pools.get_mut(&pool).ok_or(Code::INVALID_VALUE)?.set(attribute, value)
    }

    fn cuMemFreeAsync(start: u64, stream: usize) {
        let mut state = stream::with_room(stream);
        let stream = state.stream(stream)?;
        if state.streams[&stream].capture.is_some() {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if start == 0 {
            return Ok(());
        }
        let found = state.memory.at(start).filter(|found| found.start == start && found.kind == Kind::Pool);
        let bytes = found.ok_or(Code::INVALID_VALUE)?.bytes as usize;
        submit::submit_free(&mut state, stream, start, bytes)
    }

    fn cuMemAllocHost_v2(place: *mut u64, bytes: usize) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, host_allocation(bytes)?)
    }

    fn cuMemHostAlloc(place: *mut u64, bytes: usize, _flags: c_uint) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, host_allocation(bytes)?)
    }

    fn cuMemFreeHost(start: u64) {
        if start == 0 {
            return Ok(());
        }
        free(start, "cuMemFreeHost", |kind| kind == Kind::Pinned, Code::INVALID_VALUE)
    }

    fn cuMemHostRegister_v2(start: u64, bytes: usize, _flags: c_uint) {
        if start == 0 || bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        let context = state.current()?;
        capture::unsafe_call(&mut state)?;
        let device = state.contexts[&context].device;
        state.memory.register(start, bytes as u64, device, context)
    }

    fn cuMemHostUnregister(start: u64) {
        free(start, "cuMemHostUnregister", |kind| kind == Kind::Registered, Code::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(place: *mut u64, pointer: u64, flags: c_uint) {
        let state = state::lock();
        state.current()?;
        if flags != 0 || state.memory.live(pointer).is_none_or(|found| !found.kind.host()) {
            return Err(Code::INVALID_VALUE);
        }
        put(place, pointer)
    }

    fn cuMemHostGetFlags(place: *mut c_uint, pointer: u64) {
        let state = state::lock();
        if state.memory.live(pointer).is_none_or(|found| !found.kind.host()) {
            return Err(Code::INVALID_VALUE);
        }
        put(place, 3)
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let state = state::lock();
        let device = state.contexts[&state.current()?].device;
        put(free, state.total(device).saturating_sub(state.devices[device].used) as usize)?;
        put(total, state.configuration.bytes as usize)
    }

    fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, pointer: u64) {
        let state = state::lock();
        let found = state.memory.live(pointer).ok_or(Code::NOT_FOUND)?;
        offer(start, found.start);
        offer(bytes, found.bytes as usize);
        Ok(())
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) {
        // Only memory of cuMemCreate has handles; the simulation has only the other ways to allocate.
        let _ = (handle, address);
        Err(Code::INVALID_VALUE)
    }

    fn cuMemRelease(handle: u64) {
        let _ = handle;
        Err(Code::INVALID_VALUE)
    }

    fn cuPointerGetAttribute(value: *mut c_void, which: c_uint, pointer: u64) {
        if attribute(value, which, pointer)? { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuPointerGetAttributes(count: c_uint, which: *const c_uint, values: *const *mut c_void, pointer: u64) {
        if which.is_null() || values.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        for at in 0..count as usize {
            let (which, value) = (*which.add(at), *values.add(at));
            if !attribute(value, which, pointer)? {
                // The manual: for unknown memory every attribute is 0, and the ordinal is a device that does not
                // exist.
                match which {
                    ATTRIBUTE_DEVICE_ORDINAL => put(value.cast(), -2 as c_int)?,
                    ATTRIBUTE_MEMORY_TYPE | ATTRIBUTE_IS_MANAGED | ATTRIBUTE_MAPPED => put(value.cast(), 0u32)?,
                    _ => put(value.cast(), 0u64)?,
                }
            }
        }
        Ok(())
    }
}
