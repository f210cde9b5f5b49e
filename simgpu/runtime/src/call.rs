//! The common part of all functions of the runtime.

use std::panic::{AssertUnwindSafe, catch_unwind};

use simgpu_driver::{Error, Outcome};

use crate::error;

/// Runs a call of a function of the runtime: returns its outcome as a number, and records an error for the thread.
pub fn enter(body: impl FnOnce() -> Outcome) -> u32 {
    error::remember(catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Error::UNKNOWN)))
}

/// Writes a result to the caller's pointer.
///
/// # Errors
///
/// If the pointer is null.
///
/// # Safety
///
/// `place` is null or valid for writes.
pub unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: it is not null, so the caller guarantees that it is valid for writes.
    unsafe { place.write(value) };
    Ok(())
}

/// Makes C functions of the runtime from bodies that return an [`Outcome`].
#[macro_export]
macro_rules! runtime {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::enter(|| {
                // SAFETY: as for the real runtime, the caller guarantees its pointers; code that uses one checks it
                // for null.
                #[allow(unused_unsafe, reason = "some take no pointers")]
                unsafe { $body }
            })
        }
    )*};
}
pub(crate) use runtime;
