//! Kernels: their attributes and their launches.

use std::ffi::{c_int, c_uint, c_void};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::call::{put, runtime};
use crate::kernels;

/// A `dim3`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

/// `cudaFuncAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes {
    shared_bytes: usize,
    constant_bytes: usize,
    local_bytes: usize,
    max_threads: c_int,
    registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    max_dynamic_shared_bytes: c_int,
    carveout: c_int,
    /// Fields for clusters, which are not simulated, and reserved ones.
    others: [c_int; 23],
}

const _: () = assert!(size_of::<Attributes>() == 144);

/// `cudaLaunchConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    grid: Shape,
    block: Shape,
    shared: usize,
    stream: usize,
    attributes: *const c_void,
    count: c_uint,
}

/// `CUlaunchConfig`. The attributes are the same as those of the runtime.
#[repr(C)]
struct DriverConfig {
    grid: Shape,
    block: Shape,
    shared: c_uint,
    stream: usize,
    attributes: *const c_void,
    count: c_uint,
}

/// Launches a kernel by its stub.
///
/// # Safety
///
/// `arguments` has a pointer for each parameter of the kernel; the attributes are as many as stated.
unsafe fn launch_with(stub: usize, config: Config, arguments: *const *const c_void) -> Outcome {
    let function = kernels::find(stub)?;
    let shared = c_uint::try_from(config.shared).map_err(|_| Error::INVALID_VALUE)?;
    let Config { grid, block, stream, attributes, count, .. } = config;
    let sizes = [grid.x, grid.y, grid.z, block.x, block.y, block.z];
    if sizes.contains(&0) {
        return Err(Error::INVALID_CONFIGURATION);
    }
    let config = DriverConfig { grid, block, shared, stream, attributes, count };
    // SAFETY: guaranteed by the caller; the driver copies all it needs.
    unsafe { driver::cuLaunchKernelEx((&raw const config).cast(), function, arguments, std::ptr::null()) }
}

/// Does the same as [`launch_with`], without attributes.
///
/// # Safety
///
/// `arguments` has a pointer for each parameter of the kernel.
pub(crate) unsafe fn launch(
    stub: usize,
    (grid, block): (Shape, Shape),
    shared: usize,
    stream: usize,
    arguments: *const *const c_void,
) -> Outcome {
    let config = Config { grid, block, shared, stream, attributes: std::ptr::null(), count: 0 };
    // SAFETY: guaranteed by the caller.
    unsafe { launch_with(stub, config, arguments) }
}

fn attribute(function: usize, which: c_uint) -> Outcome<c_int> {
    let mut value = 0;
    // SAFETY: the variable is on the stack here.
    unsafe { driver::cuFuncGetAttribute(&raw mut value, which, function)? };
    Ok(value)
}

fn attributes(function: usize) -> Outcome<Attributes> {
    Ok(Attributes {
        shared_bytes: attribute(function, 1)? as usize,
        constant_bytes: attribute(function, 2)? as usize,
        local_bytes: attribute(function, 3)? as usize,
        max_threads: attribute(function, 0)?,
        registers: attribute(function, 4)?,
        ptx_version: attribute(function, 5)?,
        binary_version: attribute(function, 6)?,
        cache_mode: attribute(function, 7)?,
        max_dynamic_shared_bytes: attribute(function, 8)?,
        carveout: attribute(function, 9)?,
        others: [0; 23],
    })
}

runtime! {
    fn cudaGetFuncBySymbol(place: *mut usize, stub: usize) {
        put(place, kernels::find(stub)?)
    }

    fn cudaFuncGetAttributes(place: *mut Attributes, stub: usize) {
        put(place, attributes(kernels::find(stub)?)?)
    }

    fn cudaFuncSetAttribute(stub: usize, which: c_uint, value: c_int) {
        driver::cuFuncSetAttribute(kernels::find(stub)?, which, value)
    }

    fn cudaLaunchKernel(stub: usize, grid: Shape, block: Shape, arguments: *const *const c_void, shared: usize, stream: usize) {
        launch(stub, (grid, block), shared, stream, arguments)
    }

    fn cudaLaunchKernelExC(config: *const Config, stub: usize, arguments: *const *const c_void) {
        if config.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        launch_with(stub, *config, arguments)
    }
}
