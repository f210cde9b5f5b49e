//! The GPUs of this host, as the driver counts them.

/// Returns the number of GPUs, or why none can be used.
#[cfg(feature = "cuda")]
pub(crate) fn count() -> Result<usize, String> {
    match collectives::device_count() {
        Ok(0) => Err("the driver finds no device".to_owned()),
        Ok(count) => Ok(count),
        Err(collectives::Error::NoDevice { reason, .. }) => Err(reason),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the number of GPUs, or why none can be used.
#[cfg(not(feature = "cuda"))]
pub(crate) fn count() -> Result<usize, String> {
    Err("this build of collperf has no device backend (the feature `cuda` is off)".to_owned())
}
