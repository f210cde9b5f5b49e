//! The runtime's error codes. Those that the driver has too have the same numbers.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::call::runtime;

/// The codes that only the runtime has.
const TEXTS: [(u32, &CStr); 5] = [
    (9, c"a launch was given a shape that no device can run"),
    (21, c"the direction of the copy is none"),
    (35, c"there is no simulated driver in this process, or it is too old"),
    (52, c"no launch was begun on this thread"),
    (98, c"the function is no kernel that was registered and has PTX"),
];

thread_local! {
    /// The last error of this thread that was not yet read.
    static LAST: Cell<u32> = const { Cell::new(0) };
}

/// Records the error of a call for this thread. "Not ready" is not recorded.
pub(crate) fn remember(outcome: Outcome) -> u32 {
    match outcome {
        Ok(()) => 0,
        Err(Error::NOT_READY) => Error::NOT_READY.0,
        Err(Error(code)) => {
            LAST.set(code);
            code
        }
    }
}

/// Returns the last error of this thread and clears it.
#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> u32 {
    LAST.replace(0)
}

/// Returns the last error of this thread without clearing it.
#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> u32 {
    LAST.get()
}

/// Returns the description of an error.
#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(error: u32) -> *const c_char {
    if let Some((_, text)) = TEXTS.iter().find(|(known, _)| *known == error) {
        return text.as_ptr();
    }
    let mut text = std::ptr::null();
    // SAFETY: the variable is on the stack here.
    match unsafe { driver::cuGetErrorString(error, &raw mut text) } {
        Ok(()) if !text.is_null() => text,
        _ => c"unrecognised error code".as_ptr(),
    }
}

runtime! {
    fn cudaDriverGetVersion(version: *mut i32) {
        driver::cuDriverGetVersion(version)
    }
}
