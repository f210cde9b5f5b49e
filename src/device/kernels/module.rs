//! Images that are loaded on one device, and the kernels in them.

#![expect(unsafe_code, reason = "the CUDA driver is C")]

use std::ffi::{CStr, CString, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::result::{function, module};
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUjit_option, CUmodule};
use cudarc::driver::{CudaContext, DriverError};

use super::names::Family;
use crate::device::driver::{Gpu, bind, cuda_error, has};
use crate::error::Error;
use crate::error::Result;

/// The number of bytes that are kept of the driver's text about an image.
const LOG_BYTES: usize = 4096;

/// An image that the driver has compiled for a device.
#[derive(Debug)]
pub(crate) struct Module {
    module: CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: calls of the driver on a module may come from any thread with its context bound, which we do before each.
unsafe impl Send for Module {}
// SAFETY: a shared reference looks functions up, which the driver permits from several threads at once: it locks
// itself.
unsafe impl Sync for Module {}

/// A kernel of a loaded module; valid while the module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Function(CUfunction);

// SAFETY: a handle, which the driver accepts from any thread.
unsafe impl Send for Function {}
// SAFETY: a shared reference exposes only the handle.
unsafe impl Sync for Function {}

impl Function {
    /// Stands for no kernel.
    pub(super) const NONE: Function = Function(null_mut());

    /// Returns the driver's handle; `None` if there is no kernel.
    pub(super) fn handle(self) -> Option<CUfunction> {
        (!self.0.is_null()).then_some(self.0)
    }
}

/// The code of a module.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Image<'a> {
    /// PTX, which the driver compiles.
    Ptx(&'a CStr),
    /// Machine code from a compiler.
    MachineCode(&'a [u8]),
}

impl Image<'_> {
    fn address(self) -> *const c_void {
        match self {
            Self::Ptx(text) => text.as_ptr().cast(),
            Self::MachineCode(code) => code.as_ptr().cast(),
        }
    }
}

impl Module {
    /// Loads an image. `what` names the image in errors.
    ///
    /// # Errors
    ///
    /// `Cuda`, with the text of the driver's compiler, if the driver refuses the image.
    pub(crate) fn load(context: &Arc<CudaContext>, image: Image<'_>, what: &str) -> Result<Self> {
        let doing = || format!("loading {what} on device {}", context.ordinal());
        bind(context).map_err(|error| cuda_error(doing(), error))?;
        // SAFETY: PTX ends with a NUL, machine code says how long it is, and the driver copies either. The contents are
        // ours, a compiler's, or trusted by the caller's contract.
        let module = unsafe { module::load_data(image.address()) };
        let module = module.map_err(|error| refused(doing(), error, image))?;
        Ok(Self { module, context: Arc::clone(context) })
    }

    /// Returns a kernel by its name, ready to run.
    ///
    /// # Errors
    ///
    /// `Cuda` if there is no kernel with this name.
    pub(crate) fn function(&self, name: &str) -> Result<Function> {
        let doing = || format!("looking up the kernel {name:?}");
        bind(&self.context).map_err(|error| cuda_error(doing(), error))?;
        let c_name = CString::new(name).map_err(|_| Error::config(format!("kernel {name:?}"), "the name contains a NUL"))?;
        // SAFETY: the module is loaded until `self` is dropped, and the name ends with a NUL.
        let function = unsafe { module::get_function(self.module, c_name) }.map_err(|error| cuda_error(doing(), error))?;
        // The driver may postpone loading until the first launch, which could then wait for a kernel that in turn waits
        // for this rank. A query for an attribute makes the driver load the function now.
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        // SAFETY: the function is one of the module's.
        unsafe { function::get_function_attribute(function, attribute) }.map_err(|error| cuda_error(doing(), error))?;
        Ok(Function(function))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, and unloaded only here. The code that launches a function of it holds it until the
        // kernel has run, or leaks it if that is unknown (`DeviceBackend::drop`). Errors are those of kernels that ran
        // before, and were reported where they were waited for.
        let _ = bind(&self.context).and_then(|()| unsafe { module::unload(self.module) });
    }
}

/// Returns the error for an image that the driver has refused, with the text of the driver's compiler. To get the text,
/// the driver is called a second time.
fn refused(doing: String, error: DriverError, image: Image<'_>) -> Error {
    let mut failure = cuda_error(doing, error);
    if let (Error::Cuda { text, .. }, Some(log)) = (&mut failure, compiler_log(image)) {
        text.push_str("; its compiler's log: ");
        text.push_str(&log);
    }
    failure
}

/// Returns what the driver's compiler reports about an image, if anything.
fn compiler_log(image: Image<'_>) -> Option<String> {
    if !has("cuModuleLoadDataEx") {
        return None;
    }
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
    let mut module = null_mut();
    // SAFETY: the image ends as `Module::load` says; each option has its value: a buffer, and its size, which is passed
    // as a pointer's bits.
    let result = unsafe {
        sys::cuModuleLoadDataEx(&mut module, image.address(), options.len() as c_uint, options.as_mut_ptr(), values.as_mut_ptr())
    };
    if result.result().is_ok() {
        // SAFETY: loaded this time, and not used.
        let _ = unsafe { module::unload(module) };
    }
    let text = CStr::from_bytes_until_nul(&log).ok()?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

impl Family {
    /// Loads the image for a device.
    pub(super) fn load(&self, gpu: &Gpu) -> Result<Module> {
        let image = CStr::from_bytes_with_nul(self.image(gpu.capability).as_bytes())
            .map_err(|_| Error::config(format!("image {}", self.name), "it must contain exactly one NUL, at its end"))?;
        Module::load(&gpu.context, Image::Ptx(image), &format!("kernels of the family {:?}", self.name))
    }
}
