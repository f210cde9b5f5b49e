//! Copies and fills.

use std::ffi::{c_int, c_uint};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::call::runtime;
use crate::device::ready;

/// `cudaMemcpyKind`: the direction of a copy. From host to host, and if the direction is left open, the driver
/// determines it itself.
const TO_DEVICE: c_uint = 1;
const FROM_DEVICE: c_uint = 2;
const ON_DEVICE: c_uint = 3;
const DEFAULT: c_uint = 4;

/// Makes many copies, one after the other in a stream. The hints on their order and locations are ignored.
///
/// # Errors
///
/// The error of the first copy that cannot be submitted; its index is then in `failed`.
///
/// # Safety
///
/// The three lists have `count` entries; `failed` is null or valid for writes.
pub unsafe fn batch(to: *const u64, from: *const u64, bytes: *const usize, count: usize, stream: usize, failed: *mut usize) -> Outcome {
    ready()?;
    // The default streams are refused.
    if to.is_null() || from.is_null() || bytes.is_null() || count == 0 || stream <= 2 {
        return Err(Error::INVALID_VALUE);
    }
    for at in 0..count {
        // SAFETY: the caller guarantees the lists, and each copy as if it were a single one.
        let copied = unsafe { driver::cuMemcpyAsync(*to.add(at), *from.add(at), *bytes.add(at), stream) };
        if let (Err(_), false) = (copied, failed.is_null()) {
            // SAFETY: it is not null, so it is valid for writes.
            unsafe { failed.write(at) };
        }
        copied?;
    }
    Ok(())
}

runtime! {
    fn cudaMemcpy(to: u64, from: u64, bytes: usize, kind: c_uint) {
        ready()?;
        match kind {
            TO_DEVICE => driver::cuMemcpyHtoD_v2(to, from, bytes),
            FROM_DEVICE => driver::cuMemcpyDtoH_v2(to, from, bytes),
            ON_DEVICE => driver::cuMemcpyDtoD_v2(to, from, bytes),
            0 | DEFAULT => driver::cuMemcpy(to, from, bytes),
            _ => Err(Error::INVALID_MEMCPY_DIRECTION),
        }
    }

    fn cudaMemcpyAsync(to: u64, from: u64, bytes: usize, kind: c_uint, stream: usize) {
        ready()?;
        match kind {
            TO_DEVICE => driver::cuMemcpyHtoDAsync_v2(to, from, bytes, stream),
            FROM_DEVICE => driver::cuMemcpyDtoHAsync_v2(to, from, bytes, stream),
            ON_DEVICE => driver::cuMemcpyDtoDAsync_v2(to, from, bytes, stream),
            0 | DEFAULT => driver::cuMemcpyAsync(to, from, bytes, stream),
            _ => Err(Error::INVALID_MEMCPY_DIRECTION),
        }
    }

    fn cudaMemset(to: u64, value: c_int, bytes: usize) {
        ready()?;
        driver::cuMemsetD8_v2(to, value as u8, bytes)
    }

    fn cudaMemsetAsync(to: u64, value: c_int, bytes: usize, stream: usize) {
        ready()?;
        driver::cuMemsetD8Async(to, value as u8, bytes, stream)
    }
}
