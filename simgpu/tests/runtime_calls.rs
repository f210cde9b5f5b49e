//! The simulated CUDA runtime: devices, errors, memory, copies, streams and events.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the runtime is C")]

mod runtime_common;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use cudarc::driver::CudaContext;
use runtime_common::*;
use simgpu::Gate;

const INVALID_VALUE: u32 = 1;
const INVALID_DEVICE: u32 = 101;
const NOT_READY: u32 = 600;

#[test]
fn devices_are_those_of_the_driver() {
    let _alone = simgpu::alone();
    assert_eq!(got(cudaGetDeviceCount), 8);
    assert_eq!((got(cudaDriverGetVersion), got(cudaRuntimeGetVersion)), (13000, 13000));
    assert_eq!((0, 90), (got(|place| cudaDeviceGetAttribute(place, 76, 1)), 10 * got(|place| cudaDeviceGetAttribute(place, 75, 1))));
    let mut ids = Vec::new();
    for device in 0..8 {
        let mut text = [0; 32];
        assert_eq!(cudaDeviceGetPCIBusId(text.as_mut_ptr(), 32, device), 0);
        assert_eq!(got(|place| cudaDeviceGetByPCIBusId(place, text.as_ptr())), device);
        assert!(!ids.contains(&text));
        ids.push(text);
    }
    assert_eq!((got(|place| cudaDeviceCanAccessPeer(place, 0, 1)), got(|place| cudaDeviceCanAccessPeer(place, 1, 1))), (1, 0));
    assert_eq!(cudaSetDevice(4), 0);
    assert_eq!((cudaDeviceEnablePeerAccess(5, 0), cudaDeviceEnablePeerAccess(5, 0)), (0, 704));
    assert_eq!((cudaDeviceEnablePeerAccess(4, 0), cudaDeviceEnablePeerAccess(6, 1)), (INVALID_DEVICE, INVALID_VALUE));
    assert_eq!((cudaDeviceSetLimit(0, 4096), cudaDeviceSetLimit(99, 1)), (0, 215));
    no_reports();
}

#[test]
fn every_thread_has_its_device_and_the_driver_has_the_last_word() {
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(2), 0);
    assert_eq!(got(cudaGetDevice), 2);
    let other = std::thread::spawn(|| {
        let before = got(cudaGetDevice);
        let third = CudaContext::new(3).unwrap();
        third.bind_to_thread().unwrap();
        (before, got(cudaGetDevice))
    });
    assert_eq!(other.join().unwrap(), (0, 3));
    assert_eq!(cudaSetDevice(8), INVALID_DEVICE);
    assert_eq!(got(cudaGetDevice), 2);
    // Both use the same context of the device.
    let start = memory(8, 1);
    let same = CudaContext::new(2).unwrap();
    same.bind_to_thread().unwrap();
    assert_eq!((read(start, 8), cudaFree(start)), (vec![1; 8], 0));
}

#[test]
fn errors_belong_to_a_thread_and_are_told_once() {
    let _alone = simgpu::alone();
    cudaGetLastError();
    assert_eq!(cudaSetDevice(99), INVALID_DEVICE);
    let other = std::thread::spawn(|| (cudaGetLastError(), cudaFree(1), cudaPeekAtLastError(), cudaGetLastError(), cudaGetLastError()));
    assert_eq!(other.join().unwrap(), (0, INVALID_VALUE, INVALID_VALUE, INVALID_VALUE, 0));
    // A successful call changes nothing.
    assert_eq!(cudaSetDevice(0), 0);
    assert_eq!((cudaGetLastError(), cudaGetLastError()), (INVALID_DEVICE, 0));
    let stream = stream();
    let gate = Gate::close(stream as *mut c_void);
    let event = event();
    assert_eq!(cudaEventRecord(event, stream), 0);
    assert_eq!((cudaStreamQuery(stream), cudaEventQuery(event), cudaGetLastError()), (NOT_READY, NOT_READY, 0));
    gate.open();
    assert_eq!((cudaEventSynchronize(event), cudaEventQuery(event), cudaStreamQuery(stream)), (0, 0, 0));
    assert_eq!((cudaEventDestroy(event), cudaStreamDestroy(stream), cudaEventDestroy(event)), (0, 0, 400));
    for code in [0, 1, 9, 98, 700, 12345] {
        // SAFETY: the texts are constants.
        assert!(!unsafe { CStr::from_ptr(cudaGetErrorString(code)) }.is_empty());
    }
    assert_eq!(cudaGetLastError(), 400);
}

fn attributes(pointer: u64) -> (u32, c_int, u64, u64) {
    let mut all = PointerAttributes { kind: 9, device: 9, device_pointer: 9, host_pointer: 9, reserved: [9; 8] };
    assert_eq!(cudaPointerGetAttributes(&raw mut all, pointer), 0);
    assert_eq!(all.reserved, [0; 8]);
    (all.kind, all.device, all.device_pointer, all.host_pointer)
}

#[test]
fn memory_is_told_apart_by_its_address() {
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(1), 0);
    assert_eq!(got::<u64>(|place| cudaMalloc(place, 0)), 0);
    assert_eq!((cudaFree(0), cudaFreeHost(0)), (0, 0));
    let device = memory(100, 3);
    let host: u64 = got(|place| cudaHostAlloc(place, 100, 0));
    let mut own = vec![0u8; 100];
    let plain = own.as_mut_ptr() as u64;
    assert_eq!(attributes(device + 99), (2, 1, device + 99, 0));
    assert_eq!(attributes(host), (1, 1, host, host));
    assert_eq!(attributes(plain), (0, -2, 0, 0));
    assert_eq!(cudaHostRegister(plain, 100, 3), 0);
    assert_eq!(attributes(plain), (1, 1, plain, plain));
    assert_eq!(got::<u64>(|place| cudaHostGetDevicePointer(place, plain, 0)), plain);
    assert_eq!((cudaHostRegister(plain, 1, 0), cudaHostUnregister(plain), cudaHostUnregister(plain)), (712, 0, 713));
    assert_eq!((cudaFree(host), cudaFreeHost(device), cudaFree(device + 1)), (1, 1, 1));
    assert_eq!((cudaFree(device), cudaFreeHost(host)), (0, 0));
    assert_eq!(attributes(device), (0, -2, 0, 0));
    assert_eq!(cudaMalloc(null_mut(), 1), INVALID_VALUE);
    no_reports();
}

#[test]
fn copies_and_fills_do_what_they_say() {
    let _alone = simgpu::alone();
    let (a, b) = (memory(64, 1), memory(64, 2));
    let mut bytes: Vec<u8> = (0..64).collect();
    let place = bytes.as_mut_ptr() as u64;
    assert_eq!((cudaMemcpy(a, place, 64, 1), cudaMemcpy(b, a + 32, 32, 3), cudaMemset(b, 7, 4)), (0, 0, 0));
    let expected: Vec<u8> = (0..64)
        .map(|at| {
            if at < 4 {
                7
            } else if at < 32 {
                at + 32
            } else {
                2
            }
        })
        .collect();
    assert_eq!(read(b, 64), expected);
    assert_eq!((cudaMemcpy(place, b, 64, 4), bytes == expected), (0, true));
    assert_eq!(cudaMemcpy(a, b, 64, 5), 21);
    let stream = stream();
    let (to, from, sizes) = ([a, a + 8, a + 16], [b, b + 1, b + 2], [8, 8, 8]);
    assert_eq!(cudaMemcpyBatchAsync(to.as_ptr(), from.as_ptr(), sizes.as_ptr(), 3, null(), null(), 0, stream), 0);
    assert_eq!(cudaMemcpyBatchAsync(to.as_ptr(), from.as_ptr(), sizes.as_ptr(), 3, null(), null(), 0, 0), INVALID_VALUE);
    assert_eq!((cudaMemcpyAsync(a + 24, place, 8, 1, stream), cudaMemsetAsync(a + 24, 0, 4, stream)), (0, 0));
    assert_eq!(cudaStreamSynchronize(stream), 0);
    let moved: Vec<u8> = [&expected[..8], &expected[1..9], &expected[2..10], &[0; 4], &expected[4..8]].concat();
    assert_eq!(read(a, 32), moved);
    assert_eq!((cudaFree(a), cudaFree(b), cudaStreamDestroy(stream)), (0, 0, 0));
    no_reports();
}

/// The signal that a host function waits for, and its action afterwards.
struct Delay {
    go: mpsc::Receiver<()>,
    done: AtomicBool,
}

unsafe extern "C" fn delay(data: *mut c_void) {
    // SAFETY: the test keeps it until the stream is idle.
    let delay = unsafe { &*data.cast::<Delay>() };
    delay.go.recv().unwrap();
    delay.done.store(true, Ordering::SeqCst);
}

#[test]
fn freeing_waits_for_all_streams_of_the_device() {
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(0), 0);
    let starts = [memory(8, 0), got(|place| cudaHostAlloc(place, 8, 0))];
    for (start, free) in starts.into_iter().zip([cudaFree as fn(u64) -> u32, cudaFreeHost]) {
        let (sender, go) = mpsc::channel();
        let delay_data = Delay { go, done: AtomicBool::new(false) };
        let stream = stream();
        assert_eq!(cudaLaunchHostFunc(stream, delay, (&raw const delay_data).cast_mut().cast()), 0);
        let (started, begun) = mpsc::channel();
        let freeing = std::thread::spawn(move || {
            assert_eq!(cudaSetDevice(0), 0);
            started.send(()).unwrap();
            free(start)
        });
        begun.recv().unwrap();
        // A thread that does not wait would finish here, sooner or later.
        (0..1000).for_each(|_| std::thread::yield_now());
        assert!(!freeing.is_finished());
        sender.send(()).unwrap();
        assert_eq!(freeing.join().unwrap(), 0);
        assert!(delay_data.done.load(Ordering::SeqCst));
        assert_eq!(cudaStreamDestroy(stream), 0);
    }
    no_reports();
}

#[test]
fn memory_of_pools_comes_and_goes_in_the_order_of_a_stream() {
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(0), 0);
    let before = simgpu::counts().device_allocations;
    let stream = stream();
    let mut properties = [0u32; 22];
    // Pinned, no handles, on a device, of number 0.
    properties[..4].copy_from_slice(&[1, 0, 1, 0]);
    let pool: usize = got(|place| cudaMemPoolCreate(place, properties.as_ptr().cast()));
    assert_eq!((cudaMemPoolSetAttribute(pool, 4, &u64::MAX), cudaMemPoolSetAttribute(pool, 77, &0)), (0, INVALID_VALUE));
    let a: u64 = got(|place| cudaMallocFromPoolAsync(place, 100, pool, stream));
    let b: u64 = got(|place| cudaMallocAsync(place, 100, stream));
    assert_eq!((cudaMemsetAsync(a, 5, 100, stream), cudaMemcpyAsync(b, a, 100, 3, stream)), (0, 0));
    assert_eq!(cudaStreamSynchronize(stream), 0);
    assert_eq!(read(b, 100), [5; 100]);
    let mut handle = MemoryHandle([0; 64]);
    assert_eq!(cudaIpcGetMemHandle(&raw mut handle, a), INVALID_VALUE);
    assert_eq!((cudaFreeAsync(a, stream), cudaFreeAsync(b, stream), cudaStreamSynchronize(stream)), (0, 0, 0));
    assert_eq!((cudaMemPoolDestroy(pool), cudaMemPoolDestroy(pool)), (0, INVALID_VALUE));
    properties[3] = 99;
    let mut none = 0usize;
    assert_eq!(cudaMemPoolCreate(&raw mut none, properties.as_ptr().cast()), INVALID_DEVICE);
    assert_eq!((cudaStreamDestroy(stream), simgpu::counts().device_allocations), (0, before));
    no_reports();
}

#[test]
fn properties_lie_where_release_13_has_them() {
    let _alone = simgpu::alone();
    let mut all = [0xeeu8; 1024];
    assert_eq!(cudaGetDeviceProperties(all.as_mut_ptr(), 3), 0);
    let number = |at: usize| i32::from_ne_bytes(all[at..at + 4].try_into().unwrap());
    assert!(CStr::from_bytes_until_nul(&all).unwrap().to_str().unwrap().contains("Simulated"));
    assert_eq!((number(360), number(364), number(384), number(568), number(588)), (9, 0, 4, 4, 1));
    assert_eq!(usize::from_ne_bytes(all[288..296].try_into().unwrap()), 1 << 30);
    assert_eq!(all[1008..], [0xee; 16]);
    assert_eq!(cudaGetDeviceProperties(all.as_mut_ptr(), 8), INVALID_DEVICE);
}

#[test]
fn the_driver_is_handed_out_by_the_names_of_its_functions() {
    let _alone = simgpu::alone();
    let ask = |name: &CStr| {
        let (mut place, mut status) = (null_mut(), 9);
        assert_eq!(cudaGetDriverEntryPointByVersion(name.as_ptr(), &raw mut place, 12000, 0, &raw mut status), 0);
        (place, status)
    };
    for name in [
        c"cuCtxGetCurrent",
        c"cuCtxGetDevice",
        c"cuCtxSetCurrent",
        c"cuDeviceGet",
        c"cuDeviceGetAttribute",
        c"cuGetErrorName",
        c"cuGetErrorString",
        c"cuLaunchKernel",
        c"cuLaunchKernelEx",
        c"cuMemGetAddressRange",
        c"cuPointerGetAttribute",
    ] {
        let (place, status) = ask(name);
        assert!(!place.is_null() && status == 0, "{name:?}");
    }
    for name in [c"cuMemCreate", c"cuMemMap", c"cuMulticastCreate", c"cuStreamWriteValue32", c"cuStreamBatchMemOp", c"simgpu_counts"] {
        assert_eq!(ask(name), (null_mut(), 1), "{name:?}");
    }
    let start = memory(64, 0);
    let (mut base, mut bytes) = (0u64, 0usize);
    // SAFETY: the function has this signature.
    let range: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> u32 = unsafe { std::mem::transmute(ask(c"cuMemGetAddressRange").0) };
    // SAFETY: the variables are on the stack here.
    assert_eq!(unsafe { range(&raw mut base, &raw mut bytes, start + 9) }, 0);
    assert_eq!((base, bytes, cudaFree(start)), (start, 64, 0));
}

#[test]
fn the_checker_sees_what_comes_through_the_runtime() {
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(0), 0);
    let start = memory(32, 0);
    let (a, b, event) = (stream(), stream(), event());
    assert_eq!((cudaMemsetAsync(start, 1, 32, a), cudaEventRecord(event, a), cudaStreamWaitEvent(b, event, 0)), (0, 0, 0));
    assert_eq!(cudaMemsetAsync(start, 2, 32, b), 0);
    no_reports();
    assert_eq!(cudaMemsetAsync(start, 3, 16, a), 0);
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("without a wait between"), "{reports:#?}");
    assert_eq!((cudaDeviceSynchronize(), cudaMemsetAsync(start + 31, 0, 2, a)), (0, INVALID_VALUE));
    assert_eq!((cudaFree(start), cudaMemsetAsync(start, 0, 1, a)), (0, INVALID_VALUE));
    assert_eq!(simgpu::reports().len(), 1);
    assert_eq!((cudaStreamDestroy(a), cudaStreamDestroy(b), cudaEventDestroy(event)), (0, 0, 0));
}

#[test]
fn streams_have_numbers_and_the_legacy_one_has_one() {
    let _alone = simgpu::alone();
    let (first, second) = (stream(), stream());
    let number = |stream| got::<u64>(|place| cudaStreamGetId(stream, place));
    assert_ne!(number(first), number(second));
    assert_eq!((number(first), number(0)), (number(first), number(1)));
    assert_ne!(number(0), number(first));
    assert_eq!(cudaStreamGetId(first, null_mut()), INVALID_VALUE);
    assert_eq!((cudaStreamDestroy(first), cudaStreamDestroy(second)), (0, 0));
    no_reports();
}

#[test]
fn a_device_that_was_reset_is_used_anew() {
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(6), 0);
    memory(64, 1);
    // SAFETY: nothing of the device is used any more.
    unsafe { cudarc::driver::sys::cuDevicePrimaryCtxReset_v2(6) }.result().unwrap();
    // The thread's context is destroyed: the next call makes a new one, whether it names the device or not.
    let start = memory(64, 2);
    assert_eq!(read(start, 64), [2; 64]);
    assert_eq!((cudaFree(start), cudaSetDevice(6)), (0, 0));
    // SAFETY: as above.
    unsafe { cudarc::driver::sys::cuDevicePrimaryCtxReset_v2(6) }.result().unwrap();
    assert_eq!(cudaSetDevice(6), 0);
    let start = memory(64, 3);
    assert_eq!((read(start, 64), cudaFree(start)), (vec![3; 64], 0));
    no_reports();
}
