//! Holds up functions of the simulated driver, and tells of calls that it has held up itself.

use std::ffi::CString;

use crate::library;

/// The control function of this name. They have no arguments but for a text.
fn function<T: Copy>(name: &str) -> T {
    // SAFETY: the driver is of this workspace, and the callers below name each function with its signature.
    let found = unsafe { library::cuda().get::<T>(name.as_bytes()) };
    *found.unwrap_or_else(|error| panic!("the simulated driver has no {name}: {error}"))
}

/// How many calls of this process have waited for the lock of a context, which another one kept while the device worked.
pub fn waits_for_context() -> u64 {
    // SAFETY: the function asks for nothing.
    unsafe { function::<unsafe extern "C" fn() -> u64>("simgpu_waits_for_context")() }
}

/// How many calls of this process have waited for room in the queue of a stream.
pub fn waits_for_room() -> u64 {
    // SAFETY: the function asks for nothing.
    unsafe { function::<unsafe extern "C" fn() -> u64>("simgpu_waits_for_room")() }
}

/// While it lives, other threads that call some functions of the driver stay there.
#[derive(Debug)]
pub struct HeldUp(());

impl HeldUp {
    /// Holds up these functions, but for calls of this thread.
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

    /// How many threads are there now.
    pub fn callers(&self) -> u64 {
        // SAFETY: the function asks for nothing.
        unsafe { function::<unsafe extern "C" fn() -> u64>("simgpu_held_up")() }
    }
}

impl Drop for HeldUp {
    fn drop(&mut self) {
        // SAFETY: the function asks for nothing.
        unsafe { function::<unsafe extern "C" fn() -> u32>("simgpu_let_go")() };
    }
}
