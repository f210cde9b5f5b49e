//! A machine other than the default. One test, because a process has one driver.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, result};
use cudarc::nvrtc::Ptx;
use simgpu::Configuration;

fn empty(version: &str, target: &str) -> Ptx {
    Ptx::from_src(format!(".version {version}\n.target {target}\n.address_size 64\n.visible .entry nothing()\n{{\n    ret;\n}}\n"))
}

#[test]
fn an_old_machine_is_simulated() {
    // The first thread to come opens the library, and it is opened once.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(simgpu::install_cuda_only);
        }
    });
    let machine = Configuration { devices: 2, capability: 70, bytes: 1 << 20, multiprocessors: 3, driver_version: 12000, memory_pools: 0 };
    simgpu::configure(machine);
    // SAFETY: the call only returns an error.
    assert_eq!(unsafe { sys::cuMemGetInfo_v2(&mut 0, &mut 0) }, CUresult::CUDA_ERROR_NOT_INITIALIZED);
    assert_eq!(CudaContext::device_count().unwrap(), 2);
    let context = CudaContext::new(1).unwrap();
    assert_eq!((context.compute_capability().unwrap(), context.total_mem().unwrap()), ((7, 0), 1 << 20));
    let multiprocessors = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    assert_eq!(context.attribute(multiprocessors).unwrap(), 3);
    let mut version = 0;
    // SAFETY: the variable is on the stack here.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().unwrap();
    assert_eq!(version, 12000);

    assert!(!context.has_async_alloc());
    let stream = context.new_stream().unwrap();
    // SAFETY: it is refused.
    let outcome = unsafe { result::malloc_async(stream.cu_stream(), 1) };
    assert_eq!(outcome.err().map(|error| error.0), Some(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    let slice = stream.clone_htod(&[1u8, 2, 3]).unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1, 2, 3]);
    drop(slice);
    assert_eq!(simgpu::counts().device_allocations, 0);
    assert_eq!(simgpu::reports(), [""; 0]);

    context.load_module(empty("8.0", "sm_70")).unwrap();
    let refused = |ptx| context.load_module(ptx).err().map(|error| error.0);
    assert_eq!(refused(empty("8.1", "sm_70")), Some(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    assert_eq!(refused(empty("8.0", "sm_80")), Some(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
}
