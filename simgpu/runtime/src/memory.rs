//! Memory. A request for zero bytes allocates and frees nothing.

use std::ffi::{c_int, c_uint, c_void};

use simgpu_driver::{self as driver, Error, MemoryHandle, Outcome};

use crate::call::{put, runtime};
use crate::device::{initialise, ready};

/// The beginning of a `cudaPointerAttributes`, which is all of it in CUDA 12.
#[repr(C)]
#[derive(Clone, Copy)]
struct PointerAttributes {
    kind: u32,
    device: c_int,
    device_pointer: u64,
    host_pointer: u64,
}

/// `cudaMemoryTypeManaged`; host memory is 1, device memory 2, and unknown memory 0, as for the driver.
const MANAGED: u32 = 3;

/// Writes the attributes of a pointer, and zeros up to the end of a structure of `bytes` bytes.
///
/// # Errors
///
/// If `place` is null.
///
/// # Safety
///
/// `place` is null or valid for writes of `bytes` bytes, which are at least 24.
pub unsafe fn pointer_attributes(place: *mut u8, bytes: usize, pointer: u64) -> Outcome {
    initialise()?;
    let mut found = PointerAttributes { kind: 0, device: -2, device_pointer: 0, host_pointer: 0 };
    let mut managed = 0u32;
    let which: [c_uint; 5] = [2, 9, 3, 4, 8];
    let places: [*mut c_void; 5] = [
        (&raw mut found.kind).cast(),
        (&raw mut found.device).cast(),
        (&raw mut found.device_pointer).cast(),
        (&raw mut found.host_pointer).cast(),
        (&raw mut managed).cast(),
    ];
    // SAFETY: there is a variable on the stack for each attribute, of its size.
    unsafe { driver::cuPointerGetAttributes(5, which.as_ptr(), places.as_ptr(), pointer)? };
    if managed != 0 {
        found.kind = MANAGED;
    }
    if place.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the caller guarantees `bytes` bytes.
    unsafe {
        place.write_bytes(0, bytes);
        place.cast::<PointerAttributes>().write_unaligned(found);
    }
    Ok(())
}

/// Runs `call` to allocate; for zero bytes, returns no address and no error instead.
///
/// # Safety
///
/// `place` is null or valid for writes.
unsafe fn allocate(place: *mut u64, bytes: usize, call: impl FnOnce() -> Outcome) -> Outcome {
    ready()?;
    // SAFETY: guaranteed by the caller.
    if bytes == 0 { unsafe { put(place, 0) } } else { call() }
}

runtime! {
    fn cudaMalloc(place: *mut u64, bytes: usize) {
        allocate(place, bytes, || driver::cuMemAlloc_v2(place, bytes))
    }

    fn cudaFree(start: u64) {
        ready()?;
        driver::cuMemFree_v2(start)
    }

    fn cudaMallocAsync(place: *mut u64, bytes: usize, stream: usize) {
        allocate(place, bytes, || driver::cuMemAllocAsync(place, bytes, stream))
    }

    fn cudaMallocFromPoolAsync(place: *mut u64, bytes: usize, pool: usize, stream: usize) {
        allocate(place, bytes, || driver::cuMemAllocFromPoolAsync(place, bytes, pool, stream))
    }

    fn cudaFreeAsync(start: u64, stream: usize) {
        ready()?;
        driver::cuMemFreeAsync(start, stream)
    }

    fn cudaMemPoolCreate(place: *mut usize, properties: *const c_void) {
        ready()?;
        driver::cuMemPoolCreate(place, properties)
    }

    fn cudaMemPoolDestroy(pool: usize) {
        ready()?;
        driver::cuMemPoolDestroy(pool)
    }

    fn cudaMemPoolSetAttribute(pool: usize, attribute: c_uint, value: *const u8) {
        ready()?;
        driver::cuMemPoolSetAttribute(pool, attribute, value)
    }

    fn cudaHostAlloc(place: *mut u64, bytes: usize, flags: c_uint) {
        allocate(place, bytes, || driver::cuMemHostAlloc(place, bytes, flags))
    }

    fn cudaFreeHost(start: u64) {
        ready()?;
        driver::cuMemFreeHost(start)
    }

    fn cudaHostRegister(start: u64, bytes: usize, flags: c_uint) {
        ready()?;
        driver::cuMemHostRegister_v2(start, bytes, flags)
    }

    fn cudaHostUnregister(start: u64) {
        ready()?;
        driver::cuMemHostUnregister(start)
    }

    fn cudaHostGetDevicePointer(place: *mut u64, pointer: u64, flags: c_uint) {
        ready()?;
        driver::cuMemHostGetDevicePointer_v2(place, pointer, flags)
    }

    fn cudaIpcGetMemHandle(place: *mut MemoryHandle, start: u64) {
        ready()?;
        driver::cuIpcGetMemHandle(place, start)
    }

    fn cudaIpcOpenMemHandle(place: *mut u64, handle: MemoryHandle, flags: c_uint) {
        ready()?;
        driver::cuIpcOpenMemHandle_v2(place, handle, flags)
    }

    fn cudaIpcCloseMemHandle(start: u64) {
        ready()?;
        driver::cuIpcCloseMemHandle(start)
    }
}
