//! Each fault that the checker looks for, planted; and its correct counterpart, which it must not report.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};
use simgpu::{Access, Gate};

/// Returns two streams of one device, without the events that cudarc would put between them.
fn two_streams(device: usize) -> (Arc<CudaContext>, Arc<CudaStream>, Arc<CudaStream>) {
    let context = CudaContext::new(device).unwrap();
    // SAFETY: these tests order the streams themselves, or omit that on purpose.
    unsafe { context.disable_event_tracking() };
    let (a, b) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    (context, a, b)
}

fn address(slice: &CudaSlice<u8>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

fn none() {
    assert_eq!(simgpu::reports(), [""; 0]);
}

fn one(parts: &[&str]) {
    let reports = simgpu::reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    for part in parts {
        assert!(reports[0].contains(part), "{:?} is not in {:?}", part, reports[0]);
    }
}

#[test]
fn a_missing_wait_between_two_streams_is_found_however_they_run() {
    let _alone = simgpu::alone();
    let (_context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    let mut copy = b.alloc_zeros::<u8>(100).unwrap();
    a.synchronize().unwrap();
    b.synchronize().unwrap();
    a.memset_zeros(&mut slice).unwrap();
    // It may be over long ago, but no call has waited for it.
    b.memcpy_dtod(&slice, &mut copy).unwrap();
    a.synchronize().unwrap();
    b.synchronize().unwrap();
    let name = format!("buffer {:#x} (100 bytes, device 0)", address(&slice));
    one(&[&name, "written by cuMemsetD8Async on stream", "read by cuMemcpyDtoDAsync on stream", "without a wait between"]);
}

#[test]
fn a_wait_for_an_event_is_enough() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    let event = a.record_event(None).unwrap();
    b.wait(&event).unwrap();
    b.memset_zeros(&mut slice).unwrap();
    a.wait(&b.record_event(None).unwrap()).unwrap();
    a.memset_zeros(&mut slice).unwrap();
    drop(slice);
    context.synchronize().unwrap();
    none();
}

#[test]
fn an_event_orders_what_came_before_its_record_and_not_what_came_after() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    let event = a.record_event(None).unwrap();
    a.memset_zeros(&mut slice).unwrap();
    b.wait(&event).unwrap();
    b.memset_zeros(&mut slice).unwrap();
    context.synchronize().unwrap();
    one(&["written by cuMemsetD8Async on stream", "and written by cuMemsetD8Async on stream"]);
}

#[test]
fn the_host_orders_streams_when_it_waits() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    a.synchronize().unwrap();
    b.memset_zeros(&mut slice).unwrap();
    let event = b.record_event(None).unwrap();
    while !event.try_is_complete().unwrap() {
        std::thread::yield_now();
    }
    a.memset_zeros(&mut slice).unwrap();
    context.synchronize().unwrap();
    b.memset_zeros(&mut slice).unwrap();
    b.synchronize().unwrap();
    none();
}

#[test]
fn reads_and_disjoint_writes_need_no_wait() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    let (mut x, mut y) = (a.alloc_zeros::<u8>(100).unwrap(), b.alloc_zeros::<u8>(100).unwrap());
    context.synchronize().unwrap();
    a.memcpy_dtod(&slice, &mut x).unwrap();
    b.memcpy_dtod(&slice, &mut y).unwrap();
    context.synchronize().unwrap();
    let (mut low, mut high) = slice.split_at_mut(50);
    a.memset_zeros(&mut low).unwrap();
    b.memset_zeros(&mut high).unwrap();
    context.synchronize().unwrap();
    none();
}

#[test]
fn memory_must_not_be_used_on_a_stream_that_did_not_wait_for_its_allocation() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    // SAFETY: it is only overwritten.
    let mut slice = unsafe { a.alloc::<u8>(100) }.unwrap();
    b.memset_zeros(&mut slice).unwrap();
    context.synchronize().unwrap();
    one(&["allocated by cuMemAllocAsync on stream", "written by cuMemsetD8Async on stream"]);
}

#[test]
fn freeing_on_one_stream_while_another_uses_it_is_found() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    b.wait(&a.record_event(None).unwrap()).unwrap();
    let gate = Gate::close(b.cu_stream().cast());
    b.memset_zeros(&mut slice).unwrap();
    drop(slice);
    one(&["freed while in use", "written by cuMemsetD8Async on stream", "freed by cuMemFreeAsync on stream"]);
    gate.open();
    context.synchronize().unwrap();
    none();
}

#[test]
fn freeing_at_once_while_a_stream_uses_it_is_found() {
    let _alone = simgpu::alone();
    let (context, a, _) = two_streams(0);
    // SAFETY: the address is used within its length, and freed once.
    unsafe {
        let start = result::malloc_sync(64).unwrap();
        result::memset_d8_async(start, 1, 64, a.cu_stream()).unwrap();
        // It waits for the stream; it would not have waited for a stream of another device.
        result::free_sync(start).unwrap();
        one(&["freed while in use", "written by cuMemsetD8Async on stream", "freed by cuMemFree of the host"]);
    }
    context.synchronize().unwrap();
    none();
}

/// Waits until the threads of destroyed streams have ended.
fn until_no_stream_runs() {
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    while std::fs::read_dir("/proc/self/task").unwrap().any(|task| name(task.unwrap()).starts_with("stream ")) {
        std::thread::yield_now();
    }
}

#[test]
fn a_wait_for_a_context_counts_for_streams_that_have_ended() {
    let _alone = simgpu::alone();
    for waits in [false, true] {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        // SAFETY: the address is used within its length, and freed once, here or by the end of the context.
        unsafe {
            let start = result::malloc_sync(64).unwrap();
            result::memset_d8_async(start, 1, 64, stream.cu_stream()).unwrap();
            drop(stream);
            until_no_stream_runs();
            if waits {
                context.synchronize().unwrap();
                result::free_sync(start).unwrap();
            }
        }
        drop(context);
        none();
    }
}

#[test]
fn using_memory_after_it_was_freed_is_an_error_and_a_report() {
    let _alone = simgpu::alone();
    let (context, a, _) = two_streams(0);
    // SAFETY: the second use is tested, and the simulation refuses it.
    unsafe {
        let start = result::malloc_sync(64).unwrap();
        result::free_sync(start).unwrap();
        assert_eq!(result::memset_d8_async(start, 1, 64, a.cu_stream()).unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        one(&["used by cuMemsetD8Async on stream", "after it was freed by cuMemFree"]);
        assert!(result::free_sync(start).is_err());
        one(&["freed by cuMemFree after it was freed"]);
    }
    context.synchronize().unwrap();
}

#[test]
fn an_address_that_comes_back_brings_no_old_stories() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    for _ in 0..2000 {
        let mut slice = a.alloc_zeros::<u8>(10).unwrap();
        a.memset_zeros(&mut slice).unwrap();
        drop(slice);
        let mut other = b.alloc_zeros::<u8>(10).unwrap();
        b.memset_zeros(&mut other).unwrap();
    }
    context.synchronize().unwrap();
    none();
}

unsafe extern "C" fn nothing(_: *mut c_void) {}

fn host_function(stream: &CudaStream, slice: &CudaSlice<u8>, write: bool) -> u32 {
    let accesses = [Access { address: address(slice), bytes: slice.len() as u64, write: u8::from(write) }];
    // SAFETY: the function does nothing.
    unsafe { simgpu::launch_host_function(stream.cu_stream().cast(), nothing, std::ptr::null_mut(), &accesses) }
}

#[test]
fn host_functions_take_part_with_what_they_say_they_use() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(100).unwrap();
    context.synchronize().unwrap();
    assert_eq!(host_function(&b, &slice, false), 0);
    a.memset_zeros(&mut slice).unwrap();
    context.synchronize().unwrap();
    one(&["read by cuLaunchHostFunc on stream", "written by cuMemsetD8Async on stream"]);
    assert_eq!(host_function(&b, &slice, true), 0);
    a.wait(&b.record_event(None).unwrap()).unwrap();
    drop(slice);
    context.synchronize().unwrap();
    none();
}

#[test]
fn pinned_memory_is_watched_too() {
    let _alone = simgpu::alone();
    let (context, a, b) = two_streams(0);
    let slice = a.alloc_zeros::<u8>(64).unwrap();
    context.synchronize().unwrap();
    // SAFETY: the sizes are right; the missing wait is what is tested.
    unsafe {
        let pinned = result::malloc_host(64, 0).unwrap();
        sys::cuMemcpyDtoHAsync_v2(pinned, address(&slice), 64, a.cu_stream()).result().unwrap();
        sys::cuMemcpyHtoDAsync_v2(address(&slice), pinned, 64, b.cu_stream()).result().unwrap();
        context.synchronize().unwrap();
        let reports = simgpu::reports();
        assert!(reports.iter().any(|report| report.contains("(64 bytes, host memory): written by cuMemcpyDtoHAsync")), "{reports:#?}");
        sys::cuMemcpyDtoHAsync_v2(pinned, address(&slice), 64, a.cu_stream()).result().unwrap();
        result::free_host(pinned).unwrap();
        context.synchronize().unwrap();
    }
    one(&["host memory): freed while in use: written by cuMemcpyDtoHAsync", "freed by cuMemFreeHost of the host"]);
}

#[test]
fn the_host_must_wait_before_it_reads() {
    let _alone = simgpu::alone();
    let (context, a, _) = two_streams(0);
    let mut slice = a.alloc_zeros::<u8>(64).unwrap();
    context.synchronize().unwrap();
    let gate = Gate::close(a.cu_stream().cast());
    a.memset_zeros(&mut slice).unwrap();
    let mut read = [0u8; 64];
    // SAFETY: the sizes agree. The default stream does not wait for streams that do not block.
    unsafe { result::memcpy_dtoh_sync(&mut read, address(&slice)) }.unwrap();
    one(&["written by cuMemsetD8Async on stream", "read by cuMemcpyDtoH on the default stream of device 0"]);
    gate.open();
    a.synchronize().unwrap();
    // SAFETY: as above.
    unsafe { result::memcpy_dtoh_sync(&mut read, address(&slice)) }.unwrap();
    none();
}

#[test]
fn a_write_behind_the_end_is_found_when_the_buffer_is_freed() {
    let _alone = simgpu::alone();
    let (context, a, _) = two_streams(0);
    let slice = a.alloc_zeros::<u8>(100).unwrap();
    a.synchronize().unwrap();
    // SAFETY: only the rest of the page lies there.
    unsafe { ((address(&slice) + 100) as *mut u8).write(1) };
    drop(slice);
    context.synchronize().unwrap();
    one(&["a program wrote behind its end"]);
}
