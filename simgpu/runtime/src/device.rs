//! Devices, and the context of a thread: the driver's current one, or else the primary one of the device that the
//! thread chose.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Mutex, OnceLock, PoisonError};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::call::{put, runtime};

thread_local! {
    /// The device that this thread chose.
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// Initialises the driver, once.
pub(crate) fn initialise() -> Outcome {
    static DONE: OnceLock<Outcome> = OnceLock::new();
    // SAFETY: it may be called at any time.
    *DONE.get_or_init(|| unsafe { driver::cuInit(0) })
}

/// Returns the primary context of a device, which the runtime retains once, and again after a reset.
pub(crate) fn primary(device: c_int) -> Outcome<usize> {
    static PRIMARIES: Mutex<Option<HashMap<c_int, usize>>> = Mutex::new(None);
    let mut primaries = PRIMARIES.lock().unwrap_or_else(PoisonError::into_inner);
    let primaries = primaries.get_or_insert_default();
    let mut context = 0;
    // SAFETY: the variable is on the stack here.
    unsafe { driver::cuDevicePrimaryCtxRetain(&raw mut context, device)? };
    if primaries.insert(device, context) == Some(context) {
        // SAFETY: handles are no pointers; it was retained just now, and once before.
        unsafe { driver::cuDevicePrimaryCtxRelease_v2(device)? };
    }
    Ok(context)
}

/// Returns the handle of the current context; 0 if there is none, or none any more.
pub(crate) fn current() -> Outcome<usize> {
    let (mut context, mut device) = (0, 0);
    // SAFETY: the variables are on the stack here.
    unsafe {
        driver::cuCtxGetCurrent(&raw mut context)?;
        if context != 0 && driver::cuCtxGetDevice(&raw mut device) == Err(Error::CONTEXT_IS_DESTROYED) {
            return Ok(0);
        }
    }
    Ok(context)
}

fn bind(device: c_int) -> Outcome {
    // SAFETY: handles are no pointers.
    unsafe { driver::cuCtxSetCurrent(primary(device)?) }
}

/// Ensures that the thread has a context.
///
/// # Errors
///
/// If there is no driver, or no device.
pub fn ready() -> Outcome {
    initialise()?;
    if current()? == 0 { bind(DEVICE.get()) } else { Ok(()) }
}

/// Returns the device this thread works on.
fn chosen() -> Outcome<c_int> {
    initialise()?;
    let mut device = DEVICE.get();
    if current()? != 0 {
        // SAFETY: the variable is on the stack here.
        unsafe { driver::cuCtxGetDevice(&raw mut device)? };
    }
    Ok(device)
}

runtime! {
    fn cudaGetDeviceCount(count: *mut c_int) {
        initialise()?;
        driver::cuDeviceGetCount(count)
    }

    fn cudaGetDevice(device: *mut c_int) {
        put(device, chosen()?)
    }

    fn cudaSetDevice(device: c_int) {
        initialise()?;
        let mut known = 0;
        driver::cuDeviceGet(&raw mut known, device)?;
        DEVICE.set(device);
        bind(device)
    }

    fn cudaDeviceSynchronize() {
        ready()?;
        driver::cuCtxSynchronize()
    }

    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) {
        initialise()?;
        driver::cuDeviceGetAttribute(value, attribute, device)
    }

    fn cudaDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char) {
        initialise()?;
        driver::cuDeviceGetByPCIBusId(device, text)
    }

    fn cudaDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) {
        initialise()?;
        driver::cuDeviceGetPCIBusId(text, length, device)
    }

    fn cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        initialise()?;
        driver::cuDeviceCanAccessPeer(can, device, peer)
    }

    fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) {
        ready()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        driver::cuCtxEnablePeerAccess(primary(peer)?, 0)
    }

    fn cudaDeviceSetLimit(limit: c_uint, value: usize) {
        ready()?;
        driver::cuCtxSetLimit(limit, value)
    }
}
