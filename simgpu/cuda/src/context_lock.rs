//! The lock of a context. The real driver takes one for whatever puts something on the device or changes what is there, and some calls keep it
//! until the device has come to rest. Whoever launches, records or asks an event, allocates or frees in that context waits for them meanwhile,
//! and with a kernel that waits for other ranks they wait for ever.
//!
//! - A free, the loading and unloading of a module and a synchronisation of the context keep it until all streams of the context have run empty.
//! - A launch keeps it until there is room in its stream's queue ([`crate::stream::with_room`]).
//! - What makes, ends or asks streams and events, and what allocates, takes it for a moment.
//!
//! Without it goes what sets or asks the current context, what waits for one stream or event, and what begins, ends or asks captures. Which calls
//! keep it on a real driver NVIDIA does not say: these are the ones that others were seen to wait for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::context;
use crate::state::Handle;

/// The contexts whose lock is taken, and whether it is kept until the device has done something.
static LOCKED: LazyLock<Mutex<HashMap<Handle, bool>>> = LazyLock::new(Mutex::default);
static FREED: Condvar = Condvar::new();
/// How many calls came to a lock that was kept.
static WAITS: AtomicU64 = AtomicU64::new(0);

/// A thread has the lock of a context until this is dropped.
pub(crate) struct ContextLock(Handle);

fn locked() -> MutexGuard<'static, HashMap<Handle, bool>> {
    LOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock of this thread's current context; nothing where there is none.
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
    /// From now on it is kept until the device has done something.
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

/// Takes the lock as long as a function of the driver does: what comes back is for the whole call.
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

/// How many calls have waited for the lock of a context that was kept.
#[unsafe(no_mangle)]
extern "C" fn simgpu_waits_for_context() -> u64 {
    WAITS.load(Ordering::SeqCst)
}
