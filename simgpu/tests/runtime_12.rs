//! The simulated CUDA runtime of release 12: the differences from release 13, and the versions of the symbols.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the runtime is C")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use cudarc::driver::{CudaContext, sys};

#[path = "runtime_common/mod.rs"]
mod runtime_common;

mod release_12 {
    use super::*;

    runtime_common::functions! {
        simgpu::runtime(12);
        fn cudaRuntimeGetVersion(version: *mut c_int) -> u32;
        fn cudaGetDeviceProperties_v2(place: *mut u8, device: c_int) -> u32;
        fn cudaPointerGetAttributes(place: *mut u8, pointer: u64) -> u32;
        fn cudaStreamGetCaptureInfo(stream: usize, status: *mut u32, id: *mut u64) -> u32;
        fn cudaStreamGetCaptureInfo_v2(
            stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize,
        ) -> u32;
        fn cudaStreamUpdateCaptureDependencies(stream: usize, nodes: *const usize, count: usize, flags: c_uint) -> u32;
        fn cudaGraphAddEventRecordNode(place: *mut usize, graph: usize, after: *const usize, count: usize, event: usize) -> u32;
        fn cudaGraphAddDependencies(graph: usize, from: *const usize, to: *const usize, count: usize) -> u32;
        fn cudaMemcpyBatchAsync(
            to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const c_void, first: *const usize,
            attribute_count: usize, failed: *mut usize, stream: usize,
        ) -> u32;
    }
}
use release_12::*;

#[test]
fn structures_have_the_sizes_of_release_12() {
    let _alone = simgpu::alone();
    let mut version = 0;
    assert_eq!((cudaRuntimeGetVersion(&raw mut version), version), (0, 12090));
    let mut all = [0xeeu8; 1040];
    assert_eq!(cudaGetDeviceProperties_v2(all.as_mut_ptr(), 2), 0);
    let number = |at: usize| i32::from_ne_bytes(all[at..at + 4].try_into().unwrap());
    assert_eq!((number(360), number(364), number(388), number(584), number(604)), (9, 0, 4, 3, 1));
    assert_eq!(all[1032..], [0xee; 8]);
    let mut about = [0xeeu8; 32];
    assert_eq!(cudaPointerGetAttributes(about.as_mut_ptr(), &raw const about as u64), 0);
    assert_eq!(
        (&about[..4], &about[4..8], &about[8..24], &about[24..]),
        (&[0; 4][..], &(-2i32).to_ne_bytes()[..], &[0; 16][..], &[0xee; 8][..])
    );
}

#[test]
fn captures_are_asked_and_changed_without_edges() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the events of cudarc would be recorded outside of the capture.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    let handle = stream.cu_stream() as usize;
    let event = context.new_event(None).unwrap();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let (mut status, mut id, mut graph, mut nodes, mut count) = (0, 0, 0, null(), 9);
    assert_eq!((cudaStreamGetCaptureInfo(handle, &raw mut status, &raw mut id), status), (0, 1));
    assert_eq!(cudaStreamGetCaptureInfo_v2(handle, &raw mut status, null_mut(), &raw mut graph, &raw mut nodes, &raw mut count), 0);
    assert!(graph != 0 && count == 0 && id != 0);
    let (mut first, mut second) = (0, 0);
    assert_eq!(cudaGraphAddEventRecordNode(&raw mut first, graph, null(), 0, event.cu_event() as usize), 0);
    assert_eq!(cudaGraphAddEventRecordNode(&raw mut second, graph, null(), 0, event.cu_event() as usize), 0);
    assert_eq!(cudaGraphAddDependencies(graph, &raw const first, &raw const second, 1), 0);
    assert_eq!(cudaStreamUpdateCaptureDependencies(handle, &raw const second, 1, 1), 0);
    assert_eq!(cudaStreamGetCaptureInfo_v2(handle, &raw mut status, null_mut(), null_mut(), &raw mut nodes, &raw mut count), 0);
    // SAFETY: the list has as many nodes as stated.
    assert_eq!((count, unsafe { *nodes }), (1, second));
    let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    captured.launch().unwrap();
    stream.synchronize().unwrap();
    drop(captured);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn a_copy_that_fails_is_named() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let bytes = [1u8; 8];
    let mut target = [0u8; 8];
    let (to, from, sizes) = ([target.as_mut_ptr() as u64, 0], [bytes.as_ptr() as u64; 2], [8usize, 8]);
    let mut failed = 9;
    let handle = stream.cu_stream() as usize;
    assert_eq!(cudaMemcpyBatchAsync(to.as_ptr(), from.as_ptr(), sizes.as_ptr(), 2, null(), null(), 0, &raw mut failed, handle), 1);
    assert_eq!((failed, target), (1, bytes));
}

#[test]
fn symbols_have_the_version_that_programs_ask_for() {
    let _alone = simgpu::alone();
    simgpu::runtime(12);
    // SAFETY: it is loaded already, and found by its own name, as in a program's look-up.
    let library = unsafe { libc::dlopen(c"libcudart.so.12".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!library.is_null());
    // SAFETY: the names end with a NUL.
    let find = |name: &CStr, version: &CStr| !unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) }.is_null();
    for name in [c"cudaMalloc", c"cudaStreamGetCaptureInfo_v2", c"__cudaRegisterFatBinary", c"cudaGetDeviceProperties_v2"] {
        assert!(find(name, c"libcudart.so.12") && !find(name, c"libcudart.so.13"), "{name:?}");
    }
}
