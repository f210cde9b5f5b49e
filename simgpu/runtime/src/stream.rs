//! Streams. Their handles are the driver's, including those of the default streams: 0 and 1 for the legacy one, 2 for
//! that of the thread.

use std::ffi::{c_uint, c_void};

use simgpu_driver::{self as driver, HostFunction};

use crate::call::runtime;
use crate::device::ready;

runtime! {
    fn cudaStreamCreate(place: *mut usize) {
        ready()?;
        driver::cuStreamCreate(place, 0)
    }

    fn cudaStreamCreateWithFlags(place: *mut usize, flags: c_uint) {
        ready()?;
        driver::cuStreamCreate(place, flags)
    }

    fn cudaStreamDestroy(stream: usize) {
        ready()?;
        driver::cuStreamDestroy_v2(stream)
    }

    fn cudaStreamSynchronize(stream: usize) {
        ready()?;
        driver::cuStreamSynchronize(stream)
    }

    fn cudaStreamQuery(stream: usize) {
        ready()?;
        driver::cuStreamQuery(stream)
    }

    fn cudaStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
        ready()?;
        driver::cuStreamWaitEvent(stream, event, flags)
    }

    fn cudaStreamGetId(stream: usize, id: *mut u64) {
        ready()?;
        driver::cuStreamGetId(stream, id)
    }

    fn cudaStreamIsCapturing(stream: usize, status: *mut u32) {
        ready()?;
        driver::cuStreamIsCapturing(stream, status)
    }

    fn cudaThreadExchangeStreamCaptureMode(mode: *mut u32) {
        driver::cuThreadExchangeStreamCaptureMode(mode)
    }

    fn cudaLaunchHostFunc(stream: usize, function: HostFunction, data: *mut c_void) {
        ready()?;
        driver::cuLaunchHostFunc(stream, function, data)
    }
}
