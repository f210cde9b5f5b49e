//! The lock of a context. The real driver takes one for calls that put something on the device or change what is
//! there, and some calls hold it until the device is idle. Meanwhile, calls in that context that launch, record or
//! query an event, allocate or free wait for them. If a kernel waits for other ranks, they may wait for ever.
//!
//! - A free, the loading and unloading of a module and a synchronisation of the context hold it until all streams of
//!   the context are empty.
//! - A launch holds it until its stream's queue has a free place ([`crate::stream::with_room`]).
//! - Calls that make, end or query streams and events, and calls that allocate, take it for a moment.
//!
//! Calls that set or query the current context, wait for one stream or event, or begin, end or query captures do not
//! take it. NVIDIA does not document which calls hold it on a real driver: these are the ones for which others were
//! seen to wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::context;
use crate::state::Handle;

/// The contexts whose lock is taken, and whether it is held until the device has done something.
static LOCKED: LazyLock<Mutex<HashMap<Handle, bool>>> = LazyLock::new(Mutex::default);
static FREED: Condvar = Condvar::new();
/// The number of calls that found a lock held.
static WAITS: AtomicU64 = AtomicU64::new(0);

/// A guard that holds the lock of a context.
pub(crate) struct ContextLock(Handle);

fn locked() -> MutexGuard<'static, HashMap<Handle, bool>> {
    LOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock of this thread's current context, or nothing if there is none.
pub(crate) fn take() -> Option<ContextLock> {
    let context = Some(context::raw_current()).filter(|context| *context != 0)?;
    let mut all = locked();
    if all.get(&context) == Some(&true) {
        WAITS.fetch_add(1, Ordering::SeqCst);
    }
    while all.contains_key(&context) {
        all = FREED.wait(all).unwrap_or_else(PoisonError::into_inner);
    }
    all.insert(context, false);
    Some(ContextLock(context))
}

impl ContextLock {
    /// Marks the lock as held until the device has done something.
    pub(crate) fn keep(&self) {
        locked().insert(self.0, true);
    }
}

impl Drop for ContextLock {
    fn drop(&mut self) {
        locked().remove(&self.0);
        FREED.notify_all();
    }
}

/// Takes the lock if this function of the driver needs it; the returned guard lasts for the whole call.
pub(crate) fn of_call(function: &str) -> Option<ContextLock> {
    match function {
        "cuMemFree_v2"
        | "cuMemFreeHost"
        | "cuMemHostUnregister"
        | "cuCtxSynchronize"
        | "cuModuleLoad"
        | "cuModuleLoadData"
        | "cuModuleLoadDataEx"
        | "cuModuleUnload" => take().inspect(ContextLock::keep),
        "cuMemAlloc_v2"
        | "cuMemAllocManaged"
        | "cuMemAllocHost_v2"
        | "cuMemHostAlloc"
        | "cuEventCreate"
        | "cuEventDestroy_v2"
        | "cuEventQuery"
        | "cuStreamCreate"
        | "cuStreamCreateWithPriority"
        | "cuStreamDestroy_v2"
        | "cuStreamQuery" => {
            drop(take());
            None
        }
        _ => None,
    }
}

/// Returns the number of calls that have waited for the held lock of a context.
#[unsafe(no_mangle)]
extern "C" fn simgpu_waits_for_context() -> u64 {
    WAITS.load(Ordering::SeqCst)
}
