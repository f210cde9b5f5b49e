//! The driver's functions for programs that request them from the runtime. Functions that the simulation lacks are not
//! found: memory that is reserved and mapped explicitly, multicast, and operations on memory in streams.

use std::ffi::{CStr, CString, c_char, c_uint, c_void};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::device::initialise;

/// `cudaDriverEntryPointSuccess` and `cudaDriverEntryPointSymbolNotFound`.
const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;

/// Functions whose name in the library differs from that in the header: the release from which on it has which other
/// name. The last entry that is old enough applies.
const NAMES: [(&str, u32, &str); 43] = [
    ("cuCtxCreate", 3020, "cuCtxCreate_v2"),
    ("cuCtxCreate", 11040, "cuCtxCreate_v3"),
    ("cuCtxCreate", 12050, "cuCtxCreate_v4"),
    ("cuCtxDestroy", 4000, "cuCtxDestroy_v2"),
    ("cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"),
    ("cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"),
    ("cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"),
    ("cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"),
    ("cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2"),
    ("cuDevicePrimaryCtxSetFlags", 11000, "cuDevicePrimaryCtxSetFlags_v2"),
    ("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"),
    ("cuEventDestroy", 4000, "cuEventDestroy_v2"),
    ("cuEventElapsedTime", 12080, "cuEventElapsedTime_v2"),
    ("cuGraphAddDependencies", 12030, "cuGraphAddDependencies_v2"),
    ("cuGraphInstantiate", 11000, "cuGraphInstantiate_v2"),
    ("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),
    ("cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"),
    ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
    ("cuMemAllocHost", 3020, "cuMemAllocHost_v2"),
    ("cuMemFree", 3020, "cuMemFree_v2"),
    ("cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"),
    ("cuMemGetInfo", 3020, "cuMemGetInfo_v2"),
    ("cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2"),
    ("cuMemHostRegister", 6050, "cuMemHostRegister_v2"),
    ("cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2"),
    ("cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"),
    ("cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2"),
    ("cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"),
    ("cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"),
    ("cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"),
    ("cuModuleGetGlobal", 3020, "cuModuleGetGlobal_v2"),
    ("cuMemsetD16", 3020, "cuMemsetD16_v2"),
    ("cuMemsetD32", 3020, "cuMemsetD32_v2"),
    ("cuMemsetD8", 3020, "cuMemsetD8_v2"),
    ("cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"),
    ("cuStreamDestroy", 4000, "cuStreamDestroy_v2"),
    ("cuStreamGetCaptureInfo", 10010, "cuStreamGetCaptureInfo"),
    ("cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"),
    ("cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"),
    ("cuStreamUpdateCaptureDependencies", 11030, "cuStreamUpdateCaptureDependencies"),
    ("cuStreamUpdateCaptureDependencies", 12030, "cuStreamUpdateCaptureDependencies_v2"),
    ("cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode"),
    ("cuLaunchKernelEx", 11060, "cuLaunchKernelEx"),
];

/// Returns the name in the library of the function that a release calls `name`; `None` if that release had no such
/// function.
fn name_in_library(name: &str, release: u32) -> Option<&str> {
    let known = NAMES.iter().filter(|(known, _, _)| *known == name);
    match known.clone().rfind(|(_, since, _)| *since <= release) {
        Some((_, _, exact)) => Some(exact),
        None if known.count() > 0 => None,
        None => Some(name),
    }
}

fn find(name: &CStr, release: u32) -> Option<*mut c_void> {
    let name = name.to_str().ok().filter(|name| name.starts_with("cu"))?;
    driver::symbol(&CString::new(name_in_library(name, release)?).ok()?)
}

/// Returns a function of the driver, in the form of this release: 12090 is 12.9.
///
/// # Errors
///
/// If the pointers are missing. A missing function is no error; the status reports it.
///
/// # Safety
///
/// `name` is null or ends with a NUL; `place` and `status` are null or valid for writes.
pub unsafe fn entry_point(name: *const c_char, place: *mut *mut c_void, release: c_uint, status: *mut u32) -> Outcome {
    initialise()?;
    if name.is_null() || place.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: it is not null, so it ends with a NUL.
    let found = find(unsafe { CStr::from_ptr(name) }, release);
    // SAFETY: it is not null, so it is valid for writes.
    unsafe { place.write(found.unwrap_or(std::ptr::null_mut())) };
    if !status.is_null() {
        // SAFETY: it is not null, so the caller guarantees that it is valid for writes.
        unsafe { status.write(if found.is_some() { FOUND } else { NOT_FOUND }) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::name_in_library;

    #[test]
    fn a_release_gets_the_function_that_it_knew() {
        assert_eq!(name_in_library("cuStreamGetCaptureInfo", 11000), Some("cuStreamGetCaptureInfo"));
        assert_eq!(name_in_library("cuStreamGetCaptureInfo", 12000), Some("cuStreamGetCaptureInfo_v2"));
        assert_eq!(name_in_library("cuStreamGetCaptureInfo", 13000), Some("cuStreamGetCaptureInfo_v3"));
        assert_eq!(name_in_library("cuLaunchKernelEx", 11050), None);
        assert_eq!(name_in_library("cuLaunchKernel", 1000), Some("cuLaunchKernel"));
    }
}
