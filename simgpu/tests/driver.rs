//! Unmodified cudarc on the simulated driver: devices, memory, copies, streams, events, host functions.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

#[path = "../../src/base/random.rs"]
mod random;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr};
use random::Random;
use simgpu::Gate;

fn gate(stream: &CudaStream) -> Gate {
    Gate::close(stream.cu_stream().cast())
}

#[test]
fn devices_say_what_they_are() {
    let _alone = simgpu::alone();
    assert_eq!(CudaContext::device_count().unwrap(), 8);
    let contexts: Vec<_> = (0..8).map(|ordinal| CudaContext::new(ordinal).unwrap()).collect();
    assert_eq!(contexts[0].name().unwrap(), "Simulated GPU (not real)");
    assert_eq!(contexts[7].compute_capability().unwrap(), (9, 0));
    assert_eq!(contexts[3].total_mem().unwrap(), 1 << 30);
    assert!(contexts[0].has_async_alloc());
    let uuids: Vec<_> = contexts.iter().map(|context| context.uuid().unwrap().bytes).collect();
    assert!((0..8).all(|at| uuids.iter().filter(|uuid| **uuid == uuids[at]).count() == 1));
    assert!(result::device::get(8).is_err());
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn virtual_memory_is_not_there_but_its_granularity_is_told() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let supported = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED).unwrap();
    // SAFETY: plain numbers and pointers, for which 0 is valid.
    let (mut bytes, properties) = (0, unsafe { std::mem::zeroed::<sys::CUmemAllocationProp_v1>() });
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: both variables are on the stack here.
    unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, option) }.result().unwrap();
    assert_eq!((supported, bytes), (0, 2 << 20));
    // SAFETY: a null pointer is refused.
    let refused = unsafe { sys::cuMemGetAllocationGranularity(std::ptr::null_mut(), &raw const properties, option) };
    assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn copies_bring_every_byte() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    for count in [1, 3, 4096, 4097, 1 << 20] {
        let sent = Random(count as u64).bytes(count);
        let first = stream.clone_htod(&sent).unwrap();
        let second = stream.clone_dtod(&first).unwrap();
        assert_eq!(stream.clone_dtoh(&second).unwrap(), sent);
    }
    let zeros = stream.alloc_zeros::<u32>(1000).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [0; 1000]);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn fresh_memory_is_poisoned() {
    let _alone = simgpu::alone();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    // SAFETY: the bytes are only read to compare them.
    let fresh = unsafe { stream.alloc::<u8>(300) }.unwrap();
    assert_eq!(stream.clone_dtoh(&fresh).unwrap(), [0xA5; 300]);
}

#[test]
fn memory_of_one_device_is_copied_to_another() {
    let _alone = simgpu::alone();
    let (one, other) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    let (from, to) = (one.new_stream().unwrap(), other.new_stream().unwrap());
    let sent = Random(1).bytes(5000);
    let source = from.clone_htod(&sent).unwrap();
    let mut target = to.alloc_zeros::<u8>(5000).unwrap();
    to.memcpy_dtod(&source, &mut target).unwrap();
    assert_eq!(to.clone_dtoh(&target).unwrap(), sent);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn the_host_runs_ahead_of_a_stream() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let event = context.new_event(None).unwrap();
    let gate = gate(&stream);
    event.record(&stream).unwrap();
    assert!(!event.try_is_complete().unwrap());
    gate.open();
    event.synchronize().unwrap();
    assert!(event.try_is_complete().unwrap());
}

#[test]
fn what_is_copied_from_plain_memory_may_change_at_once() {
    let _alone = simgpu::alone();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let mut target = stream.alloc_zeros::<u8>(100).unwrap();
    let gate = gate(&stream);
    let mut source = vec![7u8; 100];
    stream.memcpy_htod(&source, &mut target).unwrap();
    source.fill(8);
    gate.open();
    assert_eq!(stream.clone_dtoh(&target).unwrap(), [7; 100]);
}

#[test]
fn a_stream_waits_for_an_event_of_another_device() {
    let _alone = simgpu::alone();
    let (one, other) = (CudaContext::new(2).unwrap(), CudaContext::new(3).unwrap());
    let (writer, reader) = (one.new_stream().unwrap(), other.new_stream().unwrap());
    let mut source = writer.alloc_zeros::<u8>(64).unwrap();
    let mut target = reader.alloc_zeros::<u8>(64).unwrap();
    writer.synchronize().unwrap();
    let gate = gate(&writer);
    writer.memcpy_htod(&[9u8; 64], &mut source).unwrap();
    reader.memcpy_dtod(&source, &mut target).unwrap();
    gate.open();
    assert_eq!(reader.clone_dtoh(&target).unwrap(), [9; 64]);
    assert_eq!(simgpu::reports(), [""; 0]);
}

extern "C" fn append(place: *mut c_void) {
    // SAFETY: the test passes a leaked pair and takes it back after waiting for the stream.
    let (seen, step) = unsafe { &*place.cast::<(Arc<AtomicU32>, u32)>() };
    let _ = seen.compare_exchange(*step, step + 1, Ordering::Relaxed, Ordering::Relaxed);
}

#[test]
fn host_functions_run_in_stream_order() {
    let _alone = simgpu::alone();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let seen = Arc::new(AtomicU32::new(0));
    let mut steps: Vec<(Arc<AtomicU32>, u32)> = (0..100).map(|step| (seen.clone(), step)).collect();
    for step in &mut steps {
        // SAFETY: the steps outlive the wait below.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), append, std::ptr::from_mut(step).cast()) }.unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 100);
}

extern "C" fn meet(place: *mut c_void) {
    // SAFETY: the test keeps the barrier until it has waited for all streams.
    unsafe { &*place.cast::<Barrier>() }.wait();
}

#[test]
fn streams_run_beside_each_other() {
    let _alone = simgpu::alone();
    let barrier = Barrier::new(8);
    let streams: Vec<_> = (0..8).map(|at| CudaContext::new(at % 4).unwrap().new_stream().unwrap()).collect();
    for stream in streams.iter().chain(streams.iter().rev()) {
        stream.context().bind_to_thread().unwrap();
        let place = (&raw const barrier).cast_mut().cast();
        // SAFETY: the barrier outlives the waits below.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), meet, place) }.unwrap();
    }
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
}

#[test]
fn a_stream_that_is_destroyed_does_its_work_first() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let event = context.new_event(None).unwrap();
    let gate = gate(&stream);
    event.record(&stream).unwrap();
    drop(stream);
    assert!(!event.try_is_complete().unwrap());
    gate.open();
    event.synchronize().unwrap();
}

extern "C" fn call_the_driver(code: *mut c_void) {
    let mut free = 0;
    let mut total = 0;
    // SAFETY: both variables are on the stack here, and `code` comes from the test.
    unsafe { code.cast::<CUresult>().write(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
}

#[test]
fn a_host_function_must_not_call_the_driver() {
    let _alone = simgpu::alone();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let mut code = CUresult::CUDA_SUCCESS;
    // SAFETY: `code` outlives the call, because the test waits for the stream.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), call_the_driver, (&raw mut code).cast()) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_PERMITTED);
    assert!(simgpu::reports()[0].contains("cuMemGetInfo_v2 was called from a host function"));
}

#[test]
fn events_measure_time() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let timing = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let (start, end) = (context.new_event(timing).unwrap(), context.new_event(timing).unwrap());
    start.record(&stream).unwrap();
    let _some_work = stream.alloc_zeros::<u8>(1 << 20).unwrap();
    end.record(&stream).unwrap();
    assert!(start.elapsed_ms(&end).unwrap() > 0.0);
    assert!(end.elapsed_ms(&start).unwrap() < 0.0);
    let silent = context.new_event(None).unwrap();
    silent.record(&stream).unwrap();
    assert_eq!(silent.elapsed_ms(&end), Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE)));
}

#[test]
fn pointers_tell_what_they_point_to() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(5).unwrap();
    let stream = context.new_stream().unwrap();
    let slice = stream.alloc_zeros::<u8>(1000).unwrap();
    let pointer = slice.device_ptr(&stream).0;
    let (mut kind, mut ordinal, mut start, mut size) = (0u32, 0i32, 0u64, 0usize);
    use sys::CUpointer_attribute as Attribute;
    let mut which = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let mut places: [*mut c_void; 4] = [(&raw mut kind).cast(), (&raw mut ordinal).cast(), (&raw mut start).cast(), (&raw mut size).cast()];
    // SAFETY: four attributes, four variables of their types.
    unsafe { sys::cuPointerGetAttributes(4, which.as_mut_ptr(), places.as_mut_ptr(), pointer + 10) }.result().unwrap();
    assert_eq!((kind, ordinal, start, size), (2, 5, pointer, 1000));
    let plain = [0u8; 4];
    // SAFETY: as above.
    unsafe { sys::cuPointerGetAttributes(4, which.as_mut_ptr(), places.as_mut_ptr(), plain.as_ptr() as u64) }.result().unwrap();
    assert_eq!((kind, ordinal, start, size), (0, -2, 0, 0));
}

#[test]
fn pinned_memory_is_not_staged() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    // SAFETY: it is written before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<u8>(256) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(3);
    let mut target = stream.alloc_zeros::<u8>(256).unwrap();
    stream.memcpy_htod(&pinned, &mut target).unwrap();
    assert_eq!(stream.clone_dtoh(&target).unwrap(), [3; 256]);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn the_default_stream_and_blocking_streams_wait_for_each_other() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(6).unwrap();
    let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
    let event = context.new_event(None).unwrap();
    let gate = Gate::close(blocking.cast());
    // SAFETY: stream and event exist.
    unsafe { sys::cuEventRecord(event.cu_event(), blocking) }.result().unwrap();
    let on_default = context.new_event(None).unwrap();
    on_default.record(&context.default_stream()).unwrap();
    assert!(!on_default.try_is_complete().unwrap());
    gate.open();
    on_default.synchronize().unwrap();
    assert!(event.try_is_complete().unwrap());
    // SAFETY: it is no longer used.
    unsafe { result::stream::destroy(blocking) }.unwrap();
}

#[test]
fn nothing_is_left_when_all_is_dropped() {
    let _alone = simgpu::alone();
    let before = simgpu::counts();
    let context = CudaContext::new(4).unwrap();
    let stream = context.new_stream().unwrap();
    let slice = stream.alloc_zeros::<f32>(1000).unwrap();
    let event = stream.record_event(None).unwrap();
    let during = simgpu::counts();
    assert_eq!(during.streams, before.streams + 1);
    assert_eq!((during.device_allocations, during.device_bytes), (before.device_allocations + 1, before.device_bytes + 4000));
    assert!(during.events > before.events);
    drop((slice, event));
    drop((stream, context));
    assert_eq!(simgpu::counts(), before);
}

#[test]
fn errors_have_the_names_of_the_real_driver() {
    let _alone = simgpu::alone();
    for code in [
        CUresult::CUDA_SUCCESS,
        CUresult::CUDA_ERROR_INVALID_VALUE,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_INVALID_PTX,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUresult::CUDA_ERROR_NOT_READY,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
        CUresult::CUDA_ERROR_NOT_PERMITTED,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        CUresult::CUDA_ERROR_CAPTURED_EVENT,
        CUresult::CUDA_ERROR_UNKNOWN,
    ] {
        let error = DriverError(code);
        let name = error.error_name().unwrap();
        assert_eq!(name.to_str().unwrap(), format!("{code:?}"));
        assert!(!error.error_string().unwrap().is_empty());
    }
}

#[test]
fn private_tables_of_the_driver_are_refused() {
    let _alone = simgpu::alone();
    let (id, mut table) = (sys::CUuuid { bytes: [1; 16] }, std::ptr::dangling());
    // SAFETY: both are on the stack here.
    assert_eq!(unsafe { sys::cuGetExportTable(&raw mut table, &raw const id) }, CUresult::CUDA_ERROR_NOT_FOUND);
    assert!(table.is_null());
}
