//! Counts calls of the driver's functions: by name, per thread and in total, and separately those made inside NCCL.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::call::control;
use crate::code::Code;

/// The number of calls of each function, outside of NCCL and inside.
type Counts = BTreeMap<&'static str, [u64; 2]>;

/// Whether calls are counted: counting begins with the first query.
static COUNTED: AtomicBool = AtomicBool::new(false);
static BY_ANYONE: Mutex<Counts> = Mutex::new(Counts::new());

thread_local! {
    static BY_THIS_THREAD: RefCell<Counts> = const { RefCell::new(Counts::new()) };
    /// The depth of NCCL calls that this thread is inside of.
    static INSIDE_NCCL: Cell<usize> = const { Cell::new(0) };
}

/// Counts a call.
pub(crate) fn count(function: &'static str) {
    if !COUNTED.load(Ordering::Relaxed) || function.starts_with("simgpu") {
        return;
    }
    let inside = usize::from(INSIDE_NCCL.get() > 0);
    BY_THIS_THREAD.with_borrow_mut(|counts| counts.entry(function).or_default()[inside] += 1);
    BY_ANYONE.lock().unwrap_or_else(PoisonError::into_inner).entry(function).or_default()[inside] += 1;
}

/// Marks that this thread enters a function of NCCL (1) or leaves it (-1). NCCL's calls of the driver are counted
/// separately.
#[unsafe(no_mangle)]
extern "C" fn simgpu_inside_nccl(change: c_int) {
    INSIDE_NCCL.set(INSIDE_NCCL.get().saturating_add_signed(change as isize));
}

/// A function that takes a name, its length, and the calls of that function outside of NCCL and inside.
type Sink = unsafe extern "C" fn(*mut c_void, *const u8, usize, u64, u64);

/// Passes the calls of this thread, or of all, to `sink`, function by function. The first query begins the counting.
#[unsafe(no_mangle)]
unsafe extern "C" fn simgpu_calls(this_thread: u8, sink: Option<Sink>, data: *mut c_void) -> u32 {
    control(|| {
        COUNTED.store(true, Ordering::Relaxed);
        let sink = sink.ok_or(Code::INVALID_VALUE)?;
        let counts = match this_thread {
            0 => BY_ANYONE.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            _ => BY_THIS_THREAD.with_borrow(Clone::clone),
        };
        for (name, [outside, inside]) in counts {
            // SAFETY: the caller guarantees the function, which gets its own argument and a text that lives while it
            // runs.
            unsafe { sink(data, name.as_ptr(), name.len(), outside, inside) };
        }
        Ok(())
    })
}
