//! The functions that CUDA's compiler calls in a library: the library registers its kernels when it is opened, and
//! launches them by their stubs.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};

use simgpu_driver::Error;

use crate::call::{put, runtime};
use crate::function::{Shape, launch};
use crate::kernels;

thread_local! {
    /// The configurations of launches that this thread has begun.
    static CONFIGURATIONS: RefCell<Vec<(Shape, Shape, usize, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Registers the machine code of a library, which is not read. The handle is a number.
#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(_image: *const c_void) -> usize {
    kernels::add_binary()
}

/// Ends the registration of a binary's kernels and variables.
#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinaryEnd(_binary: usize) {}

/// Removes the kernels of a library that is closed.
#[unsafe(no_mangle)]
extern "C" fn __cudaUnregisterFatBinary(binary: usize) {
    kernels::remove_binary(binary);
}

/// Registers a kernel. The limits that the library states are in the PTX, too.
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
        // SAFETY: it is not null, so it ends with a NUL.
        kernels::add_kernel(binary, stub, unsafe { CStr::from_ptr(name) }.to_owned());
    }
}

/// Registers a variable. Kernels find it in the PTX; no function of this runtime reads or writes one for the host.
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

/// Called by a library that loads its kernels late.
#[unsafe(no_mangle)]
extern "C" fn __cudaInitModule(_binary: usize) -> c_char {
    1
}

/// Records the shape of a launch; returns 0 on success.
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

    /// Returns a kernel's handle, the address of its stub.
    fn __cudaGetKernel(place: *mut usize, stub: usize) {
        kernels::known(stub)?;
        put(place, stub)
    }

    fn __cudaLaunchKernel(kernel: usize, grid: Shape, block: Shape, arguments: *const *const c_void, shared: usize, stream: usize) {
        launch(kernel, (grid, block), shared, stream, arguments)
    }
}
