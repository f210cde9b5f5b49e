//! The simulated CUDA runtime: kernels that a library registers, and their launches.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the runtime is C")]

mod runtime_common;

use std::ffi::{CStr, c_void};
use std::ptr::null;
use std::sync::Once;

use runtime_common::*;

const INVALID_DEVICE_FUNCTION: u32 = 98;

/// `out[i] += add` for each thread.
const ADD: &str = "
.version 8.0
.target sm_70
.address_size 64

.visible .entry add(.param .u64 out, .param .u32 add)
.maxntid 64, 1, 1
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [add];
    mov.u32 %r2, %tid.x;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r3, [%rd2];
    add.s32 %r3, %r3, %r1;
    st.global.u32 [%rd2], %r3;
    ret;
}
";

/// The stubs of the kernels on the host, of which only the addresses matter.
static STUBS: [u8; 3] = [0; 3];

fn stub(number: usize) -> usize {
    &raw const STUBS[number] as usize
}

/// Names the file with the kernels, before the first look-up.
fn kernels() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let path = std::env::temp_dir().join(format!("simgpu-kernels-{}.ptx", std::process::id()));
        std::fs::write(&path, ADD).unwrap();
        // SAFETY: the tests of this file take turns, and each calls this first.
        unsafe { std::env::set_var("SIMGPU_KERNELS", &path) };
        // Each device reads it once.
        for device in 0..8 {
            assert_eq!(cudaSetDevice(device), 0);
            let binary = register(0, c"add");
            got::<usize>(|place| cudaGetFuncBySymbol(place, stub(0)));
            __cudaUnregisterFatBinary(binary);
        }
        std::fs::remove_file(&path).unwrap();
    });
    assert_eq!(cudaSetDevice(0), 0);
}

/// Registers a kernel, as a library does when it is opened.
fn register(number: usize, name: &CStr) -> usize {
    let binary = __cudaRegisterFatBinary(null());
    let none = null::<c_void>();
    __cudaRegisterFunction(binary, stub(number), name.as_ptr(), name.as_ptr(), -1, none, none, none, none, null());
    __cudaRegisterVar(binary, none, c"table".as_ptr(), c"table".as_ptr(), 0, 8, 0, 0);
    __cudaRegisterFatBinaryEnd(binary);
    binary
}

/// The parameters of a launch.
struct Arguments {
    out: u64,
    add: u32,
}

impl Arguments {
    fn pointers(&self) -> [*const c_void; 2] {
        [(&raw const self.out).cast(), (&raw const self.add).cast()]
    }
}

const ONE: Shape = Shape(1, 1, 1);

fn numbers(start: u64, count: usize) -> Vec<u32> {
    read(start, 4 * count).chunks(4).map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn a_registered_kernel_is_launched_in_every_way_there_is() {
    let _alone = simgpu::alone();
    kernels();
    let binary = register(0, c"add");
    let (start, stream, event) = (memory(4 * 32, 0), stream(), event());
    let arguments = Arguments { out: start, add: 3 };
    let pointers = arguments.pointers();
    assert_eq!(cudaLaunchKernel(stub(0), ONE, Shape(32, 1, 1), pointers.as_ptr(), 0, stream), 0);
    // `cudaLaunchAttributeLaunchCompletionEvent`, and one that is ignored.
    let attributes = [
        LaunchAttribute { id: 3, padding: 0, value: [0; 8] },
        LaunchAttribute { id: 12, padding: 0, value: [event as u64, 0, 0, 0, 0, 0, 0, 0] },
    ];
    let config = LaunchConfig { grid: ONE, block: Shape(16, 1, 1), shared: 0, stream, attributes: attributes.as_ptr(), count: 2 };
    assert_eq!(cudaLaunchKernelExC(&raw const config, stub(0), pointers.as_ptr()), 0);
    assert_eq!(cudaEventSynchronize(event), 0);
    // Like a stub: takes the recorded configuration and launches it.
    assert_eq!(__cudaPushCallConfiguration(ONE, Shape(8, 1, 1), 0, stream), 0);
    let (mut grid, mut block, mut shared, mut noted) = (ONE, ONE, 9, 0);
    assert_eq!(__cudaPopCallConfiguration(&raw mut grid, &raw mut block, &raw mut shared, &raw mut noted), 0);
    assert_eq!((block.0, shared, noted), (8, 0, stream));
    let kernel: usize = got(|place| __cudaGetKernel(place, stub(0)));
    assert_eq!(__cudaLaunchKernel(kernel, grid, block, pointers.as_ptr(), shared, noted), 0);
    assert_eq!(cudaStreamSynchronize(stream), 0);
    let expected: Vec<u32> = (0..32)
        .map(|at| {
            if at < 8 {
                9
            } else if at < 16 {
                6
            } else {
                3
            }
        })
        .collect();
    assert_eq!(numbers(start, 32), expected);
    assert_eq!(__cudaPopCallConfiguration(&raw mut grid, &raw mut block, &raw mut shared, &raw mut noted), 52);
    assert_eq!((cudaFree(start), cudaStreamDestroy(stream), cudaEventDestroy(event)), (0, 0, 0));
    __cudaUnregisterFatBinary(binary);
    no_reports();
}

#[test]
fn a_kernel_is_known_on_every_device_and_until_its_library_is_closed() {
    let _alone = simgpu::alone();
    kernels();
    let binary = register(0, c"add");
    for device in [0, 1] {
        assert_eq!(cudaSetDevice(device), 0);
        let start = memory(4 * 4, 0);
        let arguments = Arguments { out: start, add: 5 };
        assert_eq!(cudaLaunchKernel(stub(0), ONE, Shape(4, 1, 1), arguments.pointers().as_ptr(), 0, 0), 0);
        assert_eq!((numbers(start, 4), cudaFree(start)), (vec![5; 4], 0));
    }
    let mut about = [0; 36];
    assert_eq!(cudaFuncGetAttributes(&raw mut about, stub(0)), 0);
    // Threads, registers, versions.
    assert_eq!(about[6..10], [64, 32, 70, 70]);
    assert_eq!(cudaFuncSetAttribute(stub(0), 8, 100 << 10), 0);
    assert_eq!((cudaFuncGetAttributes(&raw mut about, stub(0)), about[11]), (0, 100 << 10));
    assert_eq!(cudaFuncSetAttribute(stub(0), 8, 1 << 20), 1);
    let other = register(1, c"no_such_kernel");
    let mut place = 0;
    assert_eq!(cudaGetFuncBySymbol(&raw mut place, stub(1)), INVALID_DEVICE_FUNCTION);
    assert!(simgpu::reports().iter().any(|report| report.contains("no_such_kernel")));
    assert_eq!(cudaGetFuncBySymbol(&raw mut place, stub(2)), INVALID_DEVICE_FUNCTION);
    let arguments = Arguments { out: 0, add: 0 };
    assert_eq!(cudaLaunchKernel(stub(0), ONE, Shape(0, 1, 1), arguments.pointers().as_ptr(), 0, 0), 9);
    __cudaUnregisterFatBinary(binary);
    __cudaUnregisterFatBinary(other);
    assert_eq!(cudaGetFuncBySymbol(&raw mut place, stub(0)), INVALID_DEVICE_FUNCTION);
    assert_eq!(__cudaGetKernel(&raw mut place, stub(0)), INVALID_DEVICE_FUNCTION);
    no_reports();
}

#[test]
fn a_kernel_that_leaves_its_buffer_breaks_the_context() {
    let _alone = simgpu::alone();
    kernels();
    // A separate device, because the fault is permanent.
    assert_eq!(cudaSetDevice(7), 0);
    let binary = register(0, c"add");
    let start = memory(4 * 4, 0);
    let arguments = Arguments { out: start, add: 5 };
    assert_eq!(cudaLaunchKernel(stub(0), ONE, Shape(5, 1, 1), arguments.pointers().as_ptr(), 0, 0), 0);
    assert_eq!(cudaDeviceSynchronize(), 700);
    assert_eq!((cudaGetLastError(), cudaMemset(start, 0, 1)), (700, 700));
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("kernel add"), "{reports:#?}");
    __cudaUnregisterFatBinary(binary);
}
