//! What every function of the runtime has in common.

use std::panic::{AssertUnwindSafe, catch_unwind};

use simgpu_driver::{Error, Outcome};

use crate::error;

/// Makes a call of a function of the runtime: its outcome becomes a number, and an error that of the thread.
pub fn enter(body: impl FnOnce() -> Outcome) -> u32 {
    error::remember(catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Error::UNKNOWN)))
}

/// Writes a result where the caller wants it.
///
/// # Errors
///
/// If there is no place.
///
/// # Safety
///
/// `place` is null or may be written.
pub unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: it is not null, and the caller vouches that it may be written then.
    unsafe { place.write(value) };
    Ok(())
}

/// Makes C functions of the runtime out of bodies that give an [`Outcome`].
#[macro_export]
macro_rules! runtime {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::enter(|| {
                // SAFETY: as for the real runtime, the caller vouches for the pointers it hands over; who uses one checks it for null.
                #[allow(unused_unsafe, reason = "some take no pointers")]
                unsafe { $body }
            })
        }
    )*};
}
pub(crate) use runtime;
