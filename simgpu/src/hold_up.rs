//! Holds up functions of the simulated driver, and counts calls that the driver itself has held up.

use std::ffi::CString;

use crate::library;

/// Finds the control function of this name. These functions take no arguments, or only a text.
fn function<T: Copy>(name: &str) -> T {
    // SAFETY: the driver belongs to this workspace, and the callers below name each function with its signature.
    let found = unsafe { library::cuda().get::<T>(name.as_bytes()) };
    *found.unwrap_or_else(|error| panic!("the simulated driver has no {name}: {error}"))
}

/// Counts the calls of this process that have waited for the lock of a context while another call held the lock and the
/// device worked.
pub fn waits_for_context() -> u64 {
    // SAFETY: the function takes no arguments.
    unsafe { function::<unsafe extern "C" fn() -> u64>("simgpu_waits_for_context")() }
}

/// Counts the calls of this process that have waited for a free place in the queue of a stream.
pub fn waits_for_room() -> u64 {
    // SAFETY: the function takes no arguments.
    unsafe { function::<unsafe extern "C" fn() -> u64>("simgpu_waits_for_room")() }
}

/// A guard that blocks other threads inside some functions of the driver.
#[derive(Debug)]
pub struct HeldUp(());

impl HeldUp {
    /// Holds up these functions, except for calls of this thread.
    ///
    /// # Panics
    ///
    /// If a name has a NUL inside.
    pub fn others(functions: &[&str]) -> Self {
        for name in functions {
            let name = CString::new(*name).unwrap_or_else(|_| panic!("{name:?} has a NUL inside"));
            let hold_up = function::<unsafe extern "C" fn(*const std::ffi::c_char) -> u32>("simgpu_hold_up_others");
            // SAFETY: the text ends with a NUL and is copied.
            unsafe { hold_up(name.as_ptr()) };
        }
        Self(())
    }

    /// Returns the number of threads that are held up now.
    pub fn callers(&self) -> u64 {
        // SAFETY: the function takes no arguments.
        unsafe { function::<unsafe extern "C" fn() -> u64>("simgpu_held_up")() }
    }
}

impl Drop for HeldUp {
    fn drop(&mut self) {
        // SAFETY: the function takes no arguments.
        unsafe { function::<unsafe extern "C" fn() -> u32>("simgpu_let_go")() };
    }
}
