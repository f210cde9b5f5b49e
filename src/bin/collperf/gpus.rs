//! The GPUs of this host, as the driver counts them.

/// How many there are; where none can be used, why.
#[cfg(feature = "cuda")]
pub(crate) fn count() -> Result<usize, String> {
    #![expect(unsafe_code, reason = "cudarc asks for care when it looks for the driver")]
    use cudarc::driver::CudaContext;

    // cudarc panics where the library is missing, so that is asked first.
    // SAFETY: looking for a library of the driver's name runs nothing but its own initialisers, which are trusted.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err("libcuda.so.1 was not found: there is no NVIDIA driver".to_owned());
    }
    match CudaContext::device_count() {
        Ok(count) if count > 0 => Ok(count as usize),
        Ok(_) => Err("the driver finds no device".to_owned()),
        Err(error) => Err(format!("the CUDA driver does not count its devices: {error}")),
    }
}

/// How many there are; where none can be used, why.
#[cfg(not(feature = "cuda"))]
pub(crate) fn count() -> Result<usize, String> {
    Err("this build of collperf has no device plane (the feature `cuda` is off)".to_owned())
}
