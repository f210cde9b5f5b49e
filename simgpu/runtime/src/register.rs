//! What the compiler of CUDA puts into a library: it announces its kernels when it is opened, and launches them by their stubs.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};

use simgpu_driver::Error;

use crate::call::{put, runtime};
use crate::function::{Shape, launch};
use crate::kernels;

thread_local! {
    /// The launches that this thread has begun to write down.
    static CONFIGURATIONS: RefCell<Vec<(Shape, Shape, usize, usize)>> = const { RefCell::new(Vec::new()) };
}

/// A library announces its machine code, which is not looked at. The handle is a number.
#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(_image: *const c_void) -> usize {
    kernels::add_binary()
}

/// All kernels and variables of a binary have been announced.
#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinaryEnd(_binary: usize) {}

/// A library is closed.
#[unsafe(no_mangle)]
extern "C" fn __cudaUnregisterFatBinary(binary: usize) {
    kernels::remove_binary(binary);
}

/// A library announces a kernel. The limits that it states are in the PTX, too.
///
/// # Safety
///
/// The name is null or ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaRegisterFunction(
    binary: usize,
    stub: usize,
    _device_stub: *const c_char,
    name: *const c_char,
    _thread_limit: c_int,
    _thread: *const c_void,
    _block: *const c_void,
    _block_shape: *const c_void,
    _grid_shape: *const c_void,
    _warp: *const c_int,
) {
    if !name.is_null() {
        // SAFETY: it is not null, and ends with a NUL then.
        kernels::add_kernel(binary, stub, unsafe { CStr::from_ptr(name) }.to_owned());
    }
}

/// A library announces a variable. Kernels find it in the PTX; no function of this runtime reads or writes one for the host.
#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterVar(
    _binary: usize,
    _host: *const c_void,
    _device: *const c_char,
    _name: *const c_char,
    _external: c_int,
    _bytes: usize,
    _constant: c_int,
    _global: c_int,
) {
}

/// A library that loads its kernels late asks for it.
#[unsafe(no_mangle)]
extern "C" fn __cudaInitModule(_binary: usize) -> c_char {
    1
}

/// Notes the shape of a launch; 0 where that went well.
#[unsafe(no_mangle)]
extern "C" fn __cudaPushCallConfiguration(grid: Shape, block: Shape, shared: usize, stream: usize) -> u32 {
    CONFIGURATIONS.with_borrow_mut(|all| all.push((grid, block, shared, stream)));
    0
}

runtime! {
    fn __cudaPopCallConfiguration(grid: *mut Shape, block: *mut Shape, shared: *mut usize, stream: *mut usize) {
        let noted = CONFIGURATIONS.with_borrow_mut(Vec::pop).ok_or(Error::MISSING_CONFIGURATION)?;
        put(grid, noted.0)?;
        put(block, noted.1)?;
        put(shared, noted.2)?;
        put(stream, noted.3)
    }

    /// A kernel's handle is the address of its stub.
    fn __cudaGetKernel(place: *mut usize, stub: usize) {
        kernels::known(stub)?;
        put(place, stub)
    }

    fn __cudaLaunchKernel(kernel: usize, grid: Shape, block: Shape, arguments: *const *const c_void, shared: usize, stream: usize) {
        launch(kernel, (grid, block), shared, stream, arguments)
    }
}
