//! Planted errors, exhausted memory, sticky errors, misuse.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, DevicePtr};

const INVALID_VALUE: DriverError = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);
const OUT_OF_MEMORY: DriverError = DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
const ECC: CUresult = CUresult::CUDA_ERROR_ECC_UNCORRECTABLE;

#[test]
fn the_nth_call_fails_and_no_other() {
    let _alone = simgpu::alone();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    simgpu::fail_call("cuMemAllocAsync", 3, 2);
    let outcomes: Vec<bool> = (0..5).map(|_| stream.alloc_zeros::<u8>(1).is_ok()).collect();
    assert_eq!(outcomes, [true, true, false, true, true]);
}

#[test]
fn errors_are_planted_for_one_thread() {
    let _alone = simgpu::alone();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    simgpu::fail_call_of_this_thread("cuMemAllocAsync", 1, ECC as u32);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(stream.alloc_zeros::<u8>(1).is_ok()));
    });
    assert_eq!(stream.alloc_zeros::<u8>(1).err(), Some(DriverError(ECC)));
    simgpu::fail_call("cuStreamSynchronize", 1, ECC as u32);
    simgpu::clear_faults();
    stream.synchronize().unwrap();
}

#[test]
fn memory_runs_out() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(1).unwrap();
    let stream = context.new_stream().unwrap();
    assert_eq!(stream.alloc_zeros::<u8>((1 << 30) + 1).err(), Some(OUT_OF_MEMORY));
    simgpu::limit_memory(1, 1000);
    let first = stream.alloc_zeros::<u8>(600).unwrap();
    assert_eq!(stream.alloc_zeros::<u8>(401).err(), Some(OUT_OF_MEMORY));
    let second = stream.alloc_zeros::<u8>(400).unwrap();
    assert_eq!(context.mem_get_info().unwrap().0, 0);
    drop((first, second));
    stream.synchronize().unwrap();
    assert_eq!(context.mem_get_info().unwrap().0, 1000);
    stream.alloc_zeros::<u8>(1000).unwrap();
}

#[test]
fn a_job_that_fails_breaks_its_context_and_no_other() {
    let _alone = simgpu::alone();
    let (broken, whole) = (CudaContext::new(2).unwrap(), CudaContext::new(3).unwrap());
    let (stream, beside) = (broken.new_stream().unwrap(), broken.new_stream().unwrap());
    let elsewhere = whole.new_stream().unwrap();
    simgpu::fail_stream(stream.cu_stream().cast(), ECC as u32);
    assert_eq!(stream.synchronize(), Err(DriverError(ECC)));
    assert_eq!(beside.synchronize(), Err(DriverError(ECC)));
    assert_eq!(beside.alloc_zeros::<u8>(1).err(), Some(DriverError(ECC)));
    assert_eq!(broken.synchronize(), Err(DriverError(ECC)));
    elsewhere.alloc_zeros::<u8>(1).unwrap();
    elsewhere.synchronize().unwrap();
    let reports = simgpu::reports();
    assert!(reports[0].contains("failed with CUDA_ERROR_ECC_UNCORRECTABLE: planted by a test"), "{reports:#?}");
    // Streams end although they are broken, and the next context works.
    drop((stream, beside, broken));
    let fresh = CudaContext::new(2).unwrap();
    fresh.new_stream().unwrap().alloc_zeros::<u8>(1).unwrap();
}

#[test]
fn wrong_arguments_are_errors() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let slice = stream.alloc_zeros::<u8>(100).unwrap();
    let start = slice.device_ptr(&stream).0;
    let invalid_handle = Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE));
    // SAFETY: all of these are refused, which is what is tested.
    unsafe {
        assert_eq!(result::memset_d8_async(start, 0, 101, stream.cu_stream()), Err(INVALID_VALUE));
        assert_eq!(result::memset_d8_async(start + 100, 0, 1, stream.cu_stream()), Err(INVALID_VALUE));
        assert_eq!(result::memset_d8_async(0x1234, 0, 1, stream.cu_stream()), Err(INVALID_VALUE));
        assert_eq!(sys::cuMemsetD32Async(start + 1, 0, 1, stream.cu_stream()).result(), Err(INVALID_VALUE));
        assert_eq!(result::malloc_sync(0), Err(INVALID_VALUE));
        assert_eq!(result::free_sync(start + 1), Err(INVALID_VALUE));
        assert_eq!(result::stream::synchronize(0x1230 as sys::CUstream), invalid_handle);
        assert_eq!(result::stream::synchronize(context.new_event(None).unwrap().cu_event().cast()), invalid_handle);
        assert_eq!(sys::cuMemAlloc_v2(std::ptr::null_mut(), 1).result(), Err(INVALID_VALUE));
        assert_eq!(result::ctx::set_current(stream.cu_stream().cast()), Err(DriverError(CUresult::CUDA_ERROR_INVALID_CONTEXT)));
    }
    stream.synchronize().unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn a_thread_without_a_context_can_do_nothing() {
    let _alone = simgpu::alone();
    let _context = CudaContext::new(0).unwrap();
    std::thread::scope(|scope| {
        // SAFETY: it is refused.
        scope.spawn(|| assert_eq!(unsafe { result::malloc_sync(1) }, Err(DriverError(CUresult::CUDA_ERROR_INVALID_CONTEXT))));
    });
}
