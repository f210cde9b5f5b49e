//! Holds up functions of the driver for tests, as another thread's call that has the driver's locks would: calls of
//! them wait.

use std::ffi::{CStr, c_char};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::call::control;
use crate::code::Code;

struct Held {
    function: String,
    /// The thread whose calls are let through.
    exempt: ThreadId,
}

struct HoldUp {
    held: Vec<Held>,
    /// The number of threads that are held up.
    callers: u64,
}

static HOLD_UP: Mutex<HoldUp> = Mutex::new(HoldUp { held: Vec::new(), callers: 0 });
static LET_GO: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, HoldUp> {
    HOLD_UP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits, before a call of a function, as long as that function is held up.
pub(crate) fn pass(function: &str) {
    let thread = std::thread::current().id();
    let is_held = |hold_up: &HoldUp| hold_up.held.iter().any(|held| held.function == function && held.exempt != thread);
    let mut hold_up = lock();
    if !is_held(&hold_up) {
        return;
    }
    hold_up.callers += 1;
    while is_held(&hold_up) {
        hold_up = LET_GO.wait(hold_up).unwrap_or_else(PoisonError::into_inner);
    }
    hold_up.callers -= 1;
}

/// Makes calls of `function` by other threads wait from now on.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_hold_up_others(function: *const c_char) -> u32 {
    control(|| {
        if function.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null; the caller guarantees a text with a NUL at its end.
        let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
        lock().held.push(Held { function, exempt: std::thread::current().id() });
        Ok(())
    })
}

/// Releases all threads that are held up.
#[unsafe(no_mangle)]
extern "C" fn simgpu_let_go() -> u32 {
    control(|| {
        lock().held.clear();
        LET_GO.notify_all();
        Ok(())
    })
}

/// Returns the number of threads that are held up.
#[unsafe(no_mangle)]
extern "C" fn simgpu_held_up() -> u64 {
    lock().callers
}
