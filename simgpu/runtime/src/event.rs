//! Events. Their handles are the driver's.

use std::ffi::c_uint;

use simgpu_driver as driver;

use crate::call::runtime;
use crate::device::ready;

runtime! {
    fn cudaEventCreate(place: *mut usize) {
        ready()?;
        driver::cuEventCreate(place, 0)
    }

    fn cudaEventCreateWithFlags(place: *mut usize, flags: c_uint) {
        ready()?;
        driver::cuEventCreate(place, flags)
    }

    fn cudaEventDestroy(event: usize) {
        ready()?;
        driver::cuEventDestroy_v2(event)
    }

    fn cudaEventRecord(event: usize, stream: usize) {
        ready()?;
        driver::cuEventRecord(event, stream)
    }

    fn cudaEventQuery(event: usize) {
        ready()?;
        driver::cuEventQuery(event)
    }

    fn cudaEventSynchronize(event: usize) {
        ready()?;
        driver::cuEventSynchronize(event)
    }
}
