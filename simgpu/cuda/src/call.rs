//! The common part of every function of the driver: checks before its own work, and the conversion of its outcome to a
//! number.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::calls;
use crate::code::{Code, Outcome};
use crate::context_lock;
use crate::hold_up;
use crate::state;

thread_local! {
    /// Set while a host function of a stream runs on this thread: it must not call the driver.
    static INSIDE_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host function, during which calls of the driver fail.
pub(crate) fn host_function(function: impl FnOnce()) {
    INSIDE_HOST_FUNCTION.set(true);
    function();
    INSIDE_HOST_FUNCTION.set(false);
}

const WITHOUT_INIT: [&str; 6] = ["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuGetExportTable", "simgpu"];

fn admit(function: &'static str) -> Outcome {
    calls::count(function);
    hold_up::pass(function);
    let mut state = state::lock();
    if INSIDE_HOST_FUNCTION.get() {
        state.reports.add(format!("{function} was called from a host function, which must not call the driver"));
        return Err(Code::NOT_PERMITTED);
    }
    state.faults.call(function)?;
    if !state.initialised && !WITHOUT_INIT.contains(&function) {
        return Err(Code::NOT_INITIALIZED);
    }
    Ok(())
}

/// Runs a call of a function of the driver.
pub(crate) fn enter(function: &'static str, body: impl FnOnce() -> Outcome) -> u32 {
    let call = || {
        admit(function)?;
        let _lock = context_lock::of_call(function);
        body()
    };
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => {
            state::lock().reports.add(format!("{function} of the simulated driver panicked: a bug of the simulation"));
            Code::UNKNOWN.0
        }
    }
}

/// Runs a call of one of the functions with which tests control the simulation. No faults are planted for those, and
/// they work at any time.
pub(crate) fn control(body: impl FnOnce() -> Outcome) -> u32 {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Code::UNKNOWN)).err().map_or(0, |code| code.0)
}

/// Writes a result to the caller's pointer.
///
/// # Safety
///
/// `place` is null or valid for writes.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: it is not null, so the caller guarantees that it is valid for writes.
    unsafe { place.write(value) };
    Ok(())
}

/// Does the same as [`put`], but ignores a null pointer.
///
/// # Safety
///
/// As for [`put`].
pub(crate) unsafe fn offer<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: as above.
        unsafe { place.write(value) };
    }
}

/// Makes C functions of the driver from bodies that return an [`Outcome`].
macro_rules! driver {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            crate::call::enter(stringify!($name), || {
                // SAFETY: as for the real driver, the caller guarantees its pointers; each is checked for null.
                #[allow(unused_unsafe, reason = "some take no pointers")]
                unsafe { $body }
            })
        }
    )*};
}
pub(crate) use driver;
