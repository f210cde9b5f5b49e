//! The driver's functions, looked up in the simulated driver that the process has loaded, or else in the one beside
//! the calling library. This crate is linked into libraries of C functions, so it exports none of its own.

#![allow(unsafe_code, reason = "C functions")]
#![allow(non_snake_case, reason = "the names are CUDA's")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// An error of the driver or of the runtime, which use the same numbers. Success is the absence of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error(pub u32);

#[allow(missing_docs, reason = "the names say it")]
impl Error {
    pub const INVALID_VALUE: Error = Error(1);
    pub const INVALID_CONFIGURATION: Error = Error(9);
    pub const INVALID_MEMCPY_DIRECTION: Error = Error(21);
    pub const INSUFFICIENT_DRIVER: Error = Error(35);
    pub const MISSING_CONFIGURATION: Error = Error(52);
    pub const INVALID_DEVICE_FUNCTION: Error = Error(98);
    pub const NO_KERNEL_IMAGE_FOR_DEVICE: Error = Error(209);
    pub const NOT_READY: Error = Error(600);
    pub const CONTEXT_IS_DESTROYED: Error = Error(709);
    pub const UNKNOWN: Error = Error(999);
}

/// The result of a call.
pub type Outcome<T = ()> = Result<T, Error>;

/// A function that a stream calls.
pub type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

/// A `CUipcMemHandle` and a `cudaIpcMemHandle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "64 bytes that mean something to the driver only")]
pub struct MemoryHandle(pub [u8; 64]);

/// Opens a library that is loaded already.
fn loaded(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a NUL, and nothing is loaded, so no initialiser runs.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    (!library.is_null()).then_some(library)
}

/// Opens the simulated driver that lies in the folder of this library.
fn beside() -> Option<*mut c_void> {
    let mut about = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let here: fn() -> Option<*mut c_void> = beside;
    // SAFETY: both pointers are valid; the text that is found belongs to the loader and stays valid while this library
    // is loaded.
    let own = unsafe {
        if libc::dladdr(here as *const c_void, &raw mut about) == 0 || about.dli_fname.is_null() {
            return None;
        }
        CStr::from_ptr(about.dli_fname)
    };
    let path = Path::new(OsStr::from_bytes(own.to_bytes())).with_file_name("libfakecuda.so");
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: the path ends with a NUL; the simulated driver does nothing when it is opened.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    (!library.is_null()).then_some(library)
}

fn library() -> Option<*mut c_void> {
    static LIBRARY: OnceLock<Option<usize>> = OnceLock::new();
    let found = LIBRARY.get_or_init(|| {
        let library = loaded(c"libcuda.so").or_else(beside)?;
        // A real driver does not serve this runtime.
        // SAFETY: the library is never closed, and the name ends with a NUL.
        let simulated = unsafe { libc::dlsym(library, c"simgpu_counts".as_ptr()) };
        (!simulated.is_null()).then_some(library as usize)
    });
    found.map(|library| library as *mut c_void)
}

/// Finds a function of the driver by its name in the library.
#[must_use]
pub fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the library is never closed, and the name ends with a NUL.
    let found = unsafe { libc::dlsym(library()?, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?);)*) => {$(
        /// Calls the driver's function of this name.
        ///
        /// # Errors
        ///
        /// The driver's error, or "insufficient driver" if it has no such function.
        ///
        /// # Safety
        ///
        /// The driver's own rules apply.
        pub unsafe fn $name($($argument: $kind),*) -> Outcome {
            static FOUND: OnceLock<Option<usize>> = OnceLock::new();
            let name = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).unwrap_or_default();
            let found = FOUND.get_or_init(|| symbol(name).map(|found| found as usize)).ok_or(Error::INSUFFICIENT_DRIVER)?;
            // SAFETY: the driver's function of this name has these parameters and returns a number.
            let function: unsafe extern "C" fn($($kind),*) -> u32 = unsafe { std::mem::transmute(found) };
            // SAFETY: the caller keeps the driver's rules.
            match unsafe { function($($argument),*) } {
                0 => Ok(()),
                code => Err(Error(code)),
            }
        }
    )*};
}

driver! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorString(error: u32, text: *mut *const c_char);
    fn simgpu_report(text: *const c_char);

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    fn cuDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char);
    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int);
    fn cuDevicePrimaryCtxRelease_v2(device: c_int);

    fn cuCtxGetCurrent(context: *mut usize);
    fn cuCtxSetCurrent(context: usize);
    fn cuCtxGetDevice(device: *mut c_int);
    fn cuCtxSynchronize();
    fn cuCtxSetLimit(limit: c_uint, value: usize);
    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint);

    fn cuMemAlloc_v2(place: *mut u64, bytes: usize);
    fn cuMemFree_v2(start: u64);
    fn cuMemAllocAsync(place: *mut u64, bytes: usize, stream: usize);
    fn cuMemAllocFromPoolAsync(place: *mut u64, bytes: usize, pool: usize, stream: usize);
    fn cuMemFreeAsync(start: u64, stream: usize);
    fn cuMemPoolCreate(place: *mut usize, properties: *const c_void);
    fn cuMemPoolDestroy(pool: usize);
    fn cuMemPoolSetAttribute(pool: usize, attribute: c_uint, value: *const u8);
    fn cuMemHostAlloc(place: *mut u64, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(start: u64);
    fn cuMemHostRegister_v2(start: u64, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(start: u64);
    fn cuMemHostGetDevicePointer_v2(place: *mut u64, pointer: u64, flags: c_uint);
    fn cuPointerGetAttributes(count: c_uint, which: *const c_uint, values: *const *mut c_void, pointer: u64);
    fn cuIpcGetMemHandle(place: *mut MemoryHandle, start: u64);
    fn cuIpcOpenMemHandle_v2(place: *mut u64, handle: MemoryHandle, flags: c_uint);
    fn cuIpcCloseMemHandle(start: u64);

    fn cuMemcpy(to: u64, from: u64, bytes: usize);
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize);
    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize);
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize);
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize);
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize);
    fn cuMemsetD8_v2(to: u64, value: u8, count: usize);
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: usize);

    fn cuStreamCreate(place: *mut usize, flags: c_uint);
    fn cuStreamDestroy_v2(stream: usize);
    fn cuStreamSynchronize(stream: usize);
    fn cuStreamQuery(stream: usize);
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint);
    fn cuStreamGetId(stream: usize, id: *mut u64);
    fn cuStreamIsCapturing(stream: usize, status: *mut u32);
    fn cuStreamGetCaptureInfo_v2(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize,
    );
    fn cuStreamUpdateCaptureDependencies_v2(stream: usize, nodes: *const usize, edges: *const [u8; 8], count: usize, flags: c_uint);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32);
    fn cuLaunchHostFunc(stream: usize, function: HostFunction, data: *mut c_void);

    fn cuEventCreate(place: *mut usize, flags: c_uint);
    fn cuEventDestroy_v2(event: usize);
    fn cuEventRecord(event: usize, stream: usize);
    fn cuEventQuery(event: usize);
    fn cuEventSynchronize(event: usize);

    fn cuGraphAddEventRecordNode(place: *mut usize, graph: usize, after: *const usize, count: usize, event: usize);
    fn cuGraphAddDependencies_v2(graph: usize, from: *const usize, to: *const usize, edges: *const [u8; 8], count: usize);
    fn cuGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint);
    fn cuUserObjectCreate(place: *mut usize, data: *mut c_void, destructor: HostFunction, references: c_uint, flags: c_uint);

    fn simgpu_load_kernels(place: *mut usize, names: *const c_char);
    fn cuModuleGetFunction(place: *mut usize, module: usize, name: *const c_char);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: usize);
    fn cuFuncSetAttribute(function: usize, attribute: c_uint, value: c_int);
    fn cuLaunchKernelEx(config: *const c_void, function: usize, pointers: *const *const c_void, extra: *const usize);
}

/// Adds a report to those of the simulation.
pub fn report(text: &str) {
    if let Ok(text) = CString::new(text) {
        // SAFETY: the driver copies the text.
        let _ = unsafe { simgpu_report(text.as_ptr()) };
    }
}
