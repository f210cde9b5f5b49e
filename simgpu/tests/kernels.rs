//! Kernels: loading, launching, and accesses that are not allowed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUjit_option, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use simgpu::Gate;

/// `out[i] = in[i] + add` for `i < count`, one element for each thread.
const ADD: &str = "
.version 8.0
.target sm_70
.address_size 64

.visible .entry add(.param .u64 out, .param .u64 in, .param .u32 add, .param .u32 count)
.maxntid 256, 1, 1
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [in];
    ld.param.u32 %r1, [add];
    ld.param.u32 %r2, [count];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r6, 4;
    add.s64 %rd6, %rd4, %rd5;
    ld.global.u32 %r7, [%rd6];
    add.s32 %r7, %r7, %r1;
    add.s64 %rd6, %rd3, %rd5;
    st.global.u32 [%rd6], %r7;
DONE:
    ret;
}
";

fn add(context: &Arc<CudaContext>) -> CudaFunction {
    context.load_module(Ptx::from_src(ADD)).unwrap().load_function("add").unwrap()
}

fn untracked(device: usize) -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(device).unwrap();
    // SAFETY: the tests order their streams themselves, or omit that on purpose.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    (context, stream)
}

fn launch(stream: &CudaStream, function: &CudaFunction, out: &mut CudaSlice<u32>, from: &CudaSlice<u32>, count: u32) {
    let config = LaunchConfig { grid_dim: (count.div_ceil(128), 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the tests are about wrong arguments.
    unsafe { stream.launch_builder(function).arg(out).arg(from).arg(&7u32).arg(&count).launch(config) }.unwrap();
}

fn failed<T>(outcome: Result<T, cudarc::driver::DriverError>) -> Option<CUresult> {
    outcome.err().map(|error| error.0)
}

#[test]
fn a_kernel_computes_what_it_says() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let function = add(&context);
    let sent: Vec<u32> = (0..1000u32).map(|at| at.wrapping_mul(2_654_435_761)).collect();
    let from = stream.clone_htod(&sent).unwrap();
    let mut out = stream.alloc_zeros::<u32>(1000).unwrap();
    launch(&stream, &function, &mut out, &from, 999);
    let mut expected: Vec<u32> = sent.iter().map(|value| value.wrapping_add(7)).collect();
    expected[999] = 0;
    assert_eq!(stream.clone_dtoh(&out).unwrap(), expected);
    drop((from, out, function));
    context.synchronize().unwrap();
    assert_eq!(simgpu::counts().modules, 0);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn parameters_come_in_a_buffer_too() {
    let _alone = simgpu::alone();
    let (context, stream) = untracked(0);
    let function = add(&context);
    let from = stream.clone_htod(&[1u32, 2, 3]).unwrap();
    let out = stream.alloc_zeros::<u32>(3).unwrap();
    let mut buffer = Vec::new();
    buffer.extend(out.device_ptr(&stream).0.to_ne_bytes());
    buffer.extend(from.device_ptr(&stream).0.to_ne_bytes());
    buffer.extend(10u32.to_ne_bytes());
    buffer.extend(3u32.to_ne_bytes());
    let mut size = buffer.len();
    let key = std::ptr::without_provenance_mut;
    let mut extra = [key(1), buffer.as_mut_ptr().cast(), key(2), (&raw mut size).cast(), key(0)];
    let none = std::ptr::null_mut();
    // SAFETY: the buffer has the four parameters.
    let code = unsafe { sys::cuLaunchKernel(function.cu_function(), 1, 1, 1, 3, 1, 1, 0, stream.cu_stream(), none, extra.as_mut_ptr()) };
    assert_eq!(code, CUresult::CUDA_SUCCESS);
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [11, 12, 13]);
}

#[test]
fn a_kernel_that_leaves_its_buffer_breaks_the_context() {
    let _alone = simgpu::alone();
    let (context, stream) = untracked(1);
    let function = add(&context);
    let from = stream.clone_htod(&[1u32; 100]).unwrap();
    let mut out = stream.alloc_zeros::<u32>(99).unwrap();
    stream.synchronize().unwrap();
    launch(&stream, &function, &mut out, &from, 100);
    assert_eq!(failed(stream.synchronize()), Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(failed(context.synchronize()), Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let reports = simgpu::reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    assert!(reports[0].contains("kernel add on stream") && reports[0].contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{reports:#?}");
}

#[test]
fn a_kernel_does_not_reach_another_device_without_peer_access() {
    let _alone = simgpu::alone();
    let (there, elsewhere) = untracked(3);
    let from = elsewhere.clone_htod(&[1u32; 4]).unwrap();
    elsewhere.synchronize().unwrap();
    for allowed in [true, false] {
        let (context, stream) = untracked(2);
        let function = add(&context);
        let mut out = stream.alloc_zeros::<u32>(4).unwrap();
        if allowed {
            // SAFETY: both contexts live.
            unsafe { sys::cuCtxEnablePeerAccess(there.cu_ctx(), 0) }.result().unwrap();
        }
        launch(&stream, &function, &mut out, &from, 4);
        let outcome = failed(stream.synchronize());
        assert_eq!(outcome, (!allowed).then_some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    }
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("device 3), to which no peer access was enabled"), "{reports:#?}");
}

#[test]
fn a_kernel_that_nobody_waits_for_is_found() {
    let _alone = simgpu::alone();
    let (context, stream) = untracked(0);
    let other = context.new_stream().unwrap();
    let function = add(&context);
    let from = stream.clone_htod(&[1u32; 100]).unwrap();
    let mut out = stream.alloc_zeros::<u32>(200).unwrap();
    let copy = stream.alloc_zeros::<u32>(100).unwrap();
    context.synchronize().unwrap();
    launch(&stream, &function, &mut out, &from, 100);
    // The half that the kernel does not use.
    let mut copy = copy;
    other.memcpy_dtod(&out.slice(100..), &mut copy).unwrap();
    context.synchronize().unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
    let gate = Gate::close(stream.cu_stream().cast());
    launch(&stream, &function, &mut out, &from, 100);
    other.memcpy_dtod(&out.slice(..100), &mut copy).unwrap();
    gate.open();
    context.synchronize().unwrap();
    let reports = simgpu::reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    assert!(reports[0].contains("written by kernel add on stream") && reports[0].contains("read by cuMemcpyDtoDAsync"), "{reports:#?}");
}

#[test]
fn a_buffer_freed_while_a_kernel_uses_it_is_found() {
    let _alone = simgpu::alone();
    let (context, stream) = untracked(0);
    let other = context.new_stream().unwrap();
    let function = add(&context);
    let from = stream.clone_htod(&[1u32; 100]).unwrap();
    let mut out = other.alloc_zeros::<u32>(100).unwrap();
    context.synchronize().unwrap();
    let gate = Gate::close(stream.cu_stream().cast());
    launch(&stream, &function, &mut out, &from, 100);
    drop(out);
    other.synchronize().unwrap();
    gate.open();
    context.synchronize().unwrap();
    let reports = simgpu::reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    assert!(reports[0].contains("freed while in use: written by kernel add on stream"), "{reports:#?}");
}

#[test]
fn kernels_are_captured_with_their_arguments() {
    let _alone = simgpu::alone();
    let (context, stream) = untracked(0);
    let other = context.new_stream().unwrap();
    let function = add(&context);
    let from = stream.clone_htod(&[1u32; 4]).unwrap();
    let mut middle = stream.alloc_zeros::<u32>(4).unwrap();
    let mut out = stream.alloc_zeros::<u32>(4).unwrap();
    context.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    launch(&stream, &function, &mut middle, &from, 4);
    launch(&stream, &function, &mut out, &middle, 4);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [0; 4]);
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [15; 4]);
    assert_eq!(simgpu::reports(), [""; 0]);
    graph.launch().unwrap();
    other.memset_zeros(&mut out).unwrap();
    context.synchronize().unwrap();
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("written by kernel add of a graph on stream"), "{reports:#?}");
}

#[test]
fn launches_that_cannot_be_are_refused() {
    let _alone = simgpu::alone();
    let (context, stream) = untracked(0);
    let (other, elsewhere) = untracked(1);
    context.bind_to_thread().unwrap();
    let function = add(&context);
    let slice = stream.alloc_zeros::<u32>(4).unwrap();
    let mut value = slice.device_ptr(&stream).0;
    let mut pointers = [(&raw mut value).cast(); 4];
    let mut launch = |grid: u32, block: u32, shared: u32, stream: &CudaStream| {
        let (function, none) = (function.cu_function(), std::ptr::null_mut());
        // SAFETY: each pointer is to 8 bytes, the size of the largest parameter; the kernel would access only its own
        // memory.
        unsafe { sys::cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream.cu_stream(), pointers.as_mut_ptr(), none) }
    };
    assert_eq!(launch(0, 1, 0, &stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(1, 1025, 0, &stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(1, 257, 0, &stream), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    assert_eq!(launch(1, 1, 48 * 1024 + 1, &stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(1, 1, 0, &elsewhere), CUresult::CUDA_ERROR_INVALID_HANDLE);
    other.bind_to_thread().unwrap();
    assert_eq!(launch(1, 1, 0, &elsewhere), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(function.occupancy_max_active_blocks_per_multiprocessor(256, 0, None).unwrap(), 8);
    context.synchronize().unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn modules_that_cannot_run_are_refused() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let load = |text: &str| failed(context.load_module(Ptx::from_src(text)));
    assert_eq!(load(&ADD.replace("sm_70", "sm_100")), Some(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    assert_eq!(load(&ADD.replace(".version 8.0", ".version 9.1")), Some(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    assert_eq!(load("\u{7f}ELF"), Some(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    assert_eq!(load(&ADD.replace("mad.lo.s32", "mid.lo.s32")), Some(CUresult::CUDA_ERROR_INVALID_PTX));
    assert_eq!(simgpu::reports().len(), 4);
    let module = context.load_module(Ptx::from_src(ADD)).unwrap();
    assert_eq!(failed(module.load_function("subtract")), Some(CUresult::CUDA_ERROR_NOT_FOUND));
}

#[test]
fn what_is_wrong_with_ptx_is_written_into_the_log() {
    let _alone = simgpu::alone();
    let _context = CudaContext::new(0).unwrap();
    let text = std::ffi::CString::new(ADD.replace("mad.lo.s32", "mid.lo.s32")).unwrap();
    let mut log = [b'x'; 200];
    let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast(), log.len() as *mut std::ffi::c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: two options with their values; the log has the stated size.
    let code = unsafe { sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr()) };
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_PTX);
    let length = values[1] as usize;
    let said = std::str::from_utf8(&log[..length]).unwrap();
    let line = ADD.lines().position(|line| line.contains("mad.lo.s32")).unwrap() + 1;
    assert!(said.contains(&format!("line {line}:")) && said.contains("mid.lo.s32"), "{said:?}");
    assert_eq!(log[length], 0);
    assert_eq!(simgpu::reports(), [""; 0]);
}
