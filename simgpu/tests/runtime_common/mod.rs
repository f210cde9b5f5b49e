//! The C functions of the simulated runtime, by their signatures in release 13.

#![allow(dead_code, unused_imports, reason = "each file of tests uses some")]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Declares functions of a library, which are looked up when they are called.
macro_rules! functions {
    ($library:expr; $(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty;)*) => {$(
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "so they are in C")]
        pub(crate) fn $name($($argument: $kind),*) -> $result {
            // SAFETY: the function has this signature, and the tests pass the pointers that it requires.
            unsafe {
                let name = concat!(stringify!($name), "\0");
                let function = $library.get::<unsafe extern "C" fn($($kind),*) -> $result>(name.as_bytes()).unwrap();
                function($($argument),*)
            }
        }
    )*};
}
pub(crate) use functions;

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Shape(pub u32, pub(crate) u32, pub(crate) u32);

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryHandle(pub [u8; 64]);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PointerAttributes {
    pub(crate) kind: u32,
    pub(crate) device: c_int,
    pub(crate) device_pointer: u64,
    pub(crate) host_pointer: u64,
    pub(crate) reserved: [u64; 8],
}

#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: Shape,
    pub(crate) block: Shape,
    pub(crate) shared: usize,
    pub(crate) stream: usize,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) count: u32,
}

#[repr(C)]
pub(crate) struct LaunchAttribute {
    pub(crate) id: u32,
    pub(crate) padding: u32,
    pub(crate) value: [u64; 8],
}

functions! {
    simgpu::runtime(13);
    fn cudaGetDeviceCount(count: *mut c_int) -> u32;
    fn cudaGetDevice(device: *mut c_int) -> u32;
    fn cudaSetDevice(device: c_int) -> u32;
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> u32;
    fn cudaDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> u32;
    fn cudaDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char) -> u32;
    fn cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> u32;
    fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) -> u32;
    fn cudaDeviceSetLimit(limit: c_uint, value: usize) -> u32;
    fn cudaDeviceSynchronize() -> u32;
    fn cudaDriverGetVersion(version: *mut c_int) -> u32;
    fn cudaRuntimeGetVersion(version: *mut c_int) -> u32;
    fn cudaGetDeviceProperties(place: *mut u8, device: c_int) -> u32;
    fn cudaGetLastError() -> u32;
    fn cudaPeekAtLastError() -> u32;
    fn cudaGetErrorString(error: u32) -> *const c_char;
    fn cudaGetDriverEntryPointByVersion(name: *const c_char, place: *mut *mut c_void, release: c_uint, flags: u64, status: *mut u32) -> u32;
    fn cudaMalloc(place: *mut u64, bytes: usize) -> u32;
    fn cudaFree(start: u64) -> u32;
    fn cudaMallocAsync(place: *mut u64, bytes: usize, stream: usize) -> u32;
    fn cudaMallocFromPoolAsync(place: *mut u64, bytes: usize, pool: usize, stream: usize) -> u32;
    fn cudaFreeAsync(start: u64, stream: usize) -> u32;
    fn cudaMemPoolCreate(place: *mut usize, properties: *const c_void) -> u32;
    fn cudaMemPoolDestroy(pool: usize) -> u32;
    fn cudaMemPoolSetAttribute(pool: usize, attribute: c_uint, value: *const u64) -> u32;
    fn cudaHostAlloc(place: *mut u64, bytes: usize, flags: c_uint) -> u32;
    fn cudaFreeHost(start: u64) -> u32;
    fn cudaHostRegister(start: u64, bytes: usize, flags: c_uint) -> u32;
    fn cudaHostUnregister(start: u64) -> u32;
    fn cudaHostGetDevicePointer(place: *mut u64, pointer: u64, flags: c_uint) -> u32;
    fn cudaPointerGetAttributes(place: *mut PointerAttributes, pointer: u64) -> u32;
    fn cudaIpcGetMemHandle(place: *mut MemoryHandle, start: u64) -> u32;
    fn cudaIpcOpenMemHandle(place: *mut u64, handle: MemoryHandle, flags: c_uint) -> u32;
    fn cudaIpcCloseMemHandle(start: u64) -> u32;
    fn cudaMemcpy(to: u64, from: u64, bytes: usize, kind: c_uint) -> u32;
    fn cudaMemcpyAsync(to: u64, from: u64, bytes: usize, kind: c_uint, stream: usize) -> u32;
    fn cudaMemcpyBatchAsync(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const c_void, first: *const usize,
        attribute_count: usize, stream: usize,
    ) -> u32;
    fn cudaMemset(to: u64, value: c_int, bytes: usize) -> u32;
    fn cudaMemsetAsync(to: u64, value: c_int, bytes: usize, stream: usize) -> u32;
    fn cudaStreamCreateWithFlags(place: *mut usize, flags: c_uint) -> u32;
    fn cudaStreamDestroy(stream: usize) -> u32;
    fn cudaStreamSynchronize(stream: usize) -> u32;
    fn cudaStreamQuery(stream: usize) -> u32;
    fn cudaStreamWaitEvent(stream: usize, event: usize, flags: c_uint) -> u32;
    fn cudaStreamGetId(stream: usize, id: *mut u64) -> u32;
    fn cudaStreamIsCapturing(stream: usize, status: *mut u32) -> u32;
    fn cudaStreamGetCaptureInfo(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, edges: *mut *const c_void,
        count: *mut usize,
    ) -> u32;
    fn cudaStreamUpdateCaptureDependencies(
        stream: usize, nodes: *const usize, edges: *const c_void, count: usize, flags: c_uint,
    ) -> u32;
    fn cudaThreadExchangeStreamCaptureMode(mode: *mut u32) -> u32;
    fn cudaLaunchHostFunc(stream: usize, function: HostFunction, data: *mut c_void) -> u32;
    fn cudaEventCreate(place: *mut usize) -> u32;
    fn cudaEventCreateWithFlags(place: *mut usize, flags: c_uint) -> u32;
    fn cudaEventDestroy(event: usize) -> u32;
    fn cudaEventRecord(event: usize, stream: usize) -> u32;
    fn cudaEventQuery(event: usize) -> u32;
    fn cudaEventSynchronize(event: usize) -> u32;
    fn cudaGraphAddEventRecordNode(place: *mut usize, graph: usize, after: *const usize, count: usize, event: usize) -> u32;
    fn cudaGraphAddDependencies(graph: usize, from: *const usize, to: *const usize, edges: *const c_void, count: usize) -> u32;
    fn cudaGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint) -> u32;
    fn cudaUserObjectCreate(
        place: *mut usize, data: *mut c_void, destructor: HostFunction, references: c_uint, flags: c_uint,
    ) -> u32;
    fn cudaGetFuncBySymbol(place: *mut usize, stub: usize) -> u32;
    fn cudaFuncGetAttributes(place: *mut [i32; 36], stub: usize) -> u32;
    fn cudaFuncSetAttribute(stub: usize, which: c_uint, value: c_int) -> u32;
    fn cudaLaunchKernel(
        stub: usize, grid: Shape, block: Shape, arguments: *const *const c_void, shared: usize, stream: usize,
    ) -> u32;
    fn cudaLaunchKernelExC(config: *const LaunchConfig, stub: usize, arguments: *const *const c_void) -> u32;
    fn __cudaRegisterFatBinary(image: *const c_void) -> usize;
    fn __cudaRegisterFatBinaryEnd(binary: usize) -> ();
    fn __cudaUnregisterFatBinary(binary: usize) -> ();
    fn __cudaRegisterFunction(
        binary: usize, stub: usize, device_stub: *const c_char, name: *const c_char, thread_limit: c_int, thread: *const c_void,
        block: *const c_void, block_shape: *const c_void, grid_shape: *const c_void, warp: *const c_int,
    ) -> ();
    fn __cudaRegisterVar(
        binary: usize, host: *const c_void, device: *const c_char, name: *const c_char, external: c_int, bytes: usize,
        constant: c_int, global: c_int,
    ) -> ();
    fn __cudaPushCallConfiguration(grid: Shape, block: Shape, shared: usize, stream: usize) -> u32;
    fn __cudaPopCallConfiguration(grid: *mut Shape, block: *mut Shape, shared: *mut usize, stream: *mut usize) -> u32;
    fn __cudaGetKernel(place: *mut usize, stub: usize) -> u32;
    fn __cudaLaunchKernel(
        kernel: usize, grid: Shape, block: Shape, arguments: *const *const c_void, shared: usize, stream: usize,
    ) -> u32;
}

/// Calls a function that writes a value to a pointer; returns the value.
pub(crate) fn got<T: Default>(call: impl FnOnce(*mut T) -> u32) -> T {
    let mut value = T::default();
    assert_eq!(call(&raw mut value), 0);
    value
}

/// Makes a stream that does not wait for the legacy default one.
pub(crate) fn stream() -> usize {
    got(|place| cudaStreamCreateWithFlags(place, 1))
}

pub(crate) fn event() -> usize {
    got(|place| cudaEventCreateWithFlags(place, 2))
}

/// Allocates device memory, filled with `value`.
pub(crate) fn memory(bytes: usize, value: u8) -> u64 {
    let start = got(|place| cudaMalloc(place, bytes));
    assert_eq!(cudaMemset(start, value.into(), bytes), 0);
    assert_eq!(cudaDeviceSynchronize(), 0);
    start
}

/// Reads device memory.
pub(crate) fn read(start: u64, bytes: usize) -> Vec<u8> {
    let mut all = vec![0u8; bytes];
    assert_eq!(cudaMemcpy(all.as_mut_ptr() as u64, start, bytes, 2), 0);
    all
}

pub(crate) fn no_reports() {
    assert_eq!(simgpu::reports(), [""; 0]);
}
