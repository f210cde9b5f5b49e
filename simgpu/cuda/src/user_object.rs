//! User objects: a graph keeps them alive for their owner, and calls a destructor when the last reference is released.

use std::sync::{LazyLock, mpsc};

use crate::call;
use crate::code::{Code, Outcome};
use crate::job::HostFunction;
use crate::state::{Handle, State};

pub(crate) struct UserObject {
    destructor: HostFunction,
    references: u64,
}

pub(crate) fn create(state: &mut State, destructor: HostFunction, references: u32) -> Handle {
    let handle = state.handle();
    state.user_objects.insert(handle, UserObject { destructor, references: references.into() });
    handle
}

pub(crate) fn retain(state: &mut State, object: Handle, count: u32) -> Outcome {
    state.user_objects.get_mut(&object).ok_or(Code::INVALID_VALUE)?.references += u64::from(count);
    Ok(())
}

/// Releases references. With the last one the destructor is called, on another thread.
pub(crate) fn release(state: &mut State, object: Handle, count: u32) {
    let Some(found) = state.user_objects.get_mut(&object) else { return };
    found.references = found.references.saturating_sub(count.into());
    if found.references == 0
        && let Some(gone) = state.user_objects.remove(&object)
    {
        destroy(gone.destructor);
    }
}

/// Passes a destructor to the one thread that runs them all, as the real driver does: the call that releases the last
/// reference does not wait.
fn destroy(destructor: HostFunction) {
    static QUEUE: LazyLock<mpsc::Sender<HostFunction>> = LazyLock::new(|| {
        let (sender, receiver) = mpsc::channel::<HostFunction>();
        let run = move || {
            for destructor in receiver {
                // SAFETY: the caller of `cuUserObjectCreate` guarantees that it may be called on another thread, once.
                call::host_function(|| unsafe { (destructor.function)(destructor.data) });
            }
        };
        // Without the thread the channel is closed, and the object is never destroyed.
        let _ = std::thread::Builder::new().name("destructors of user objects".into()).spawn(run);
        sender
    });
    let _ = QUEUE.send(destructor);
}
