//! Lets NCCL reach from the other devices of this process into memory that cudarc takes from a device's pool.
//!
//! Ranks that are threads of one process are given each other's addresses by NCCL, which reads and writes through them. Memory of a
//! pool can be reached from other devices only where the pool says so, unlike memory of `cuMemAlloc`.

#![expect(unsafe_code, reason = "the driver is C")]

use std::ffi::c_int;

use cudarc::driver::{DriverError, sys};

use super::driver::{self, Gpu};

/// What `cuMemPoolSetAccess` reads, in the form that all releases of CUDA share; cudarc's has one form for each.
#[repr(C)]
struct Access {
    /// 1: the number is a device's.
    location: u32,
    device: c_int,
    /// 3: reading and writing.
    flags: u32,
}

const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

/// Opens the pool of a device to others of this process, as far as they can reach it at all.
pub(crate) fn share(gpu: &Gpu, others: &[usize]) -> Result<(), DriverError> {
    let functions = ["cuDeviceGetDefaultMemPool", "cuMemPoolSetAccess", "cuDeviceCanAccessPeer"];
    if others.is_empty() || !functions.into_iter().all(driver::has) {
        return Ok(());
    }
    driver::bind(&gpu.context)?;
    let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
    // SAFETY: the function is there (checked), and answers into a variable of ours.
    match unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, gpu.context.cu_device()) }.result() {
        // Without pools cudarc allocates in the old way, and NCCL can reach it.
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => return Ok(()),
        answer => answer?,
    }
    for other in others {
        let (device, mut can) = (*other as c_int, 0);
        // SAFETY: the function is there (checked), takes numbers of devices, and answers into a variable of ours.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, gpu.context.cu_device()) }.result()?;
        if can != 0 {
            let access = Access { location: 1, device, flags: 3 };
            // SAFETY: the pool is the device's own, and the description is as large as the driver reads.
            unsafe { sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1) }.result()?;
        }
    }
    Ok(())
}
