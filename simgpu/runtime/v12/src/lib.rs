//! The CUDA runtime of release 12: the functions that differ from release 13. All others are in the shared package.

#![allow(unsafe_code, reason = "a library of C functions over C functions")]
#![allow(non_snake_case, reason = "the names are CUDA's")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use simgpu_runtime::{CaptureInfo, Release, batch, device_properties, driver, entry_point, pointer_attributes, put, ready, runtime};

/// 12.9.
const RELEASE: c_uint = 12090;
/// Bytes of a `cudaPointerAttributes`.
const POINTER_ATTRIBUTES: usize = 24;

runtime! {
    fn cudaRuntimeGetVersion(version: *mut c_int) {
        put(version, RELEASE as c_int)
    }

    fn cudaPointerGetAttributes(place: *mut u8, pointer: u64) {
        pointer_attributes(place, POINTER_ATTRIBUTES, pointer)
    }

    fn cudaGetDriverEntryPoint(name: *const c_char, place: *mut *mut c_void, _flags: u64, status: *mut u32) {
        entry_point(name, place, RELEASE, status)
    }

    fn cudaGetDriverEntryPointByVersion(
        name: *const c_char, place: *mut *mut c_void, release: c_uint, _flags: u64, status: *mut u32,
    ) {
        entry_point(name, place, release, status)
    }

    fn cudaGetDeviceProperties_v2(place: *mut u8, device: c_int) {
        device_properties(place, device, Release::Cuda12)
    }

    fn cudaMemcpyBatchAsync(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, _attributes: *const c_void, _first: *const usize,
        _attribute_count: usize, failed: *mut usize, stream: usize,
    ) {
        batch(to, from, bytes, count, stream, failed)
    }

    fn cudaStreamGetCaptureInfo(stream: usize, status: *mut u32, id: *mut u64) {
        CaptureInfo { status, id, graph: null_mut(), nodes: null_mut(), edges: null_mut(), count: null_mut() }.ask(stream)
    }

    fn cudaStreamGetCaptureInfo_v2(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize,
    ) {
        CaptureInfo { status, id, graph, nodes, edges: null_mut(), count }.ask(stream)
    }

    fn cudaStreamGetCaptureInfo_v3(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, edges: *mut *const c_void,
        count: *mut usize,
    ) {
        CaptureInfo { status, id, graph, nodes, edges, count }.ask(stream)
    }

    fn cudaStreamUpdateCaptureDependencies(stream: usize, nodes: *const usize, count: usize, flags: c_uint) {
        ready()?;
        driver::cuStreamUpdateCaptureDependencies_v2(stream, nodes, std::ptr::null(), count, flags)
    }

    fn cudaStreamUpdateCaptureDependencies_v2(
        stream: usize, nodes: *const usize, edges: *const [u8; 8], count: usize, flags: c_uint,
    ) {
        ready()?;
        driver::cuStreamUpdateCaptureDependencies_v2(stream, nodes, edges, count, flags)
    }

    fn cudaGraphAddDependencies(graph: usize, from: *const usize, to: *const usize, count: usize) {
        ready()?;
        driver::cuGraphAddDependencies_v2(graph, from, to, std::ptr::null(), count)
    }

    fn cudaGraphAddDependencies_v2(graph: usize, from: *const usize, to: *const usize, edges: *const [u8; 8], count: usize) {
        ready()?;
        driver::cuGraphAddDependencies_v2(graph, from, to, edges, count)
    }
}
