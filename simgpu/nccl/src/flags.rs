//! Abort flags, as of 2.28.9: a communicator's own, or those of its parent if it was configured to share
//! (`splitShare`, `shrinkShare`). An abort raises them for all communicators that hold them: kernels end, and calls
//! that wait inside the library fail.

use crate::comm::Comm;
use crate::report::lock;
use std::sync::{Arc, Mutex, Weak};

#[derive(Default)]
pub(crate) struct Flags(Mutex<State>);

#[derive(Default)]
struct State {
    raised: bool,
    holders: Vec<Weak<Comm>>,
}

impl Flags {
    /// Adds a communicator, which halts when the flags are raised, or at once if they are raised already.
    pub(crate) fn hold(&self, comm: &Arc<Comm>) {
        let raised = {
            let mut state = lock(&self.0);
            state.holders.retain(|holder| holder.strong_count() > 0);
            state.holders.push(Arc::downgrade(comm));
            state.raised
        };
        if raised {
            comm.halt();
        }
    }

    /// Halts all communicators that hold the flags now or later.
    pub(crate) fn raise(&self) {
        lock(&self.0).raised = true;
        self.holders().iter().for_each(|comm| comm.halt());
    }

    pub(crate) fn lower(&self) {
        lock(&self.0).raised = false;
        self.holders().iter().for_each(|comm| comm.resume());
    }

    /// Waits until the streams have passed all launches of the communicators that hold the flags, which share one
    /// stream of the device.
    pub(crate) fn await_launches(&self) {
        self.holders().iter().for_each(|comm| comm.await_launches());
    }

    pub(crate) fn holders(&self) -> Vec<Arc<Comm>> {
        lock(&self.0).holders.iter().filter_map(Weak::upgrade).collect()
    }
}
