//! The end of a backend: its memory and kernels are freed when nothing uses them any longer.

#![expect(unsafe_code, reason = "device memory is freed by hand")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::DeviceBackend;
use super::scratch::ScratchMemory;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::device::{ANSWER_WAIT, BACKEND_DROP_WAIT, ROUNDS};
use crate::device::comm::{BackOff, Inner};
use crate::device::custom_kernels::CustomKernels;
use crate::device::driver;
use crate::device::kernels::Kernels;

/// The parts of a backend that may be in use after the backend is gone.
#[derive(Debug)]
struct Leftover {
    scratch: ScratchMemory,
    /// This crate's kernels, and the custom ones.
    _kernels: (Arc<Kernels>, CustomKernels),
}

impl Leftover {
    /// Frees these parts once the graphs that hold captured calls are gone, on a thread that no other thread waits for.
    fn free_behind(self, comm: Arc<Inner>) {
        let bytes = self.scratch.allocated();
        // If the thread does not start, its closure is dropped. That would not free device memory, but would unload
        // kernels.
        let left = std::mem::ManuallyDrop::new(self);
        let free = move || {
            while comm.live_graphs() > 0 {
                // The graphs may live for long.
                std::thread::sleep(ROUNDS.1);
            }
            // SAFETY: the streams were at rest when the backend ended. The last launch of the last graph is over: the
            // driver reports a graph's end after it. Nothing is queued without the backend, and this runs once.
            unsafe { left.scratch.free() };
            drop(std::mem::ManuallyDrop::into_inner(left));
        };
        if let Err(error) = std::thread::Builder::new().name("collectives-free".to_owned()).spawn(free) {
            crate::base::event::error!(
                %error,
                bytes,
                "no thread could be started to free the memory that graphs of a dropped communicator use: the memory is leaked"
            );
        }
    }
}

impl Drop for DeviceBackend {
    fn drop(&mut self) {
        let is_free = self.comes_to_rest();
        // Launches of graphs use the same memory, also after the communicator has ended.
        let has_graphs = is_free && self.comm.inner().live_graphs_within(&Deadline::after(ANSWER_WAIT)) > 0;
        if is_free && !has_graphs {
            // SAFETY: queued work with its addresses has completed (`is_free`), no graph holds any of it, nothing can
            // be queued any longer, since that takes the backend, and a backend is dropped once.
            return unsafe { self.scratch.free() };
        }
        let custom_kernels = std::mem::replace(&mut *event::lock(&self.custom_kernels), CustomKernels::new(&self.gpu));
        let left = Leftover { scratch: self.scratch.take_all(), _kernels: (Arc::clone(&self.kernels), custom_kernels) };
        if has_graphs {
            return left.free_behind(Arc::clone(self.comm.inner()));
        }
        // Kernels that may still run read the memory, and these modules are their code: leaking both is better than
        // freeing them.
        let (device, bytes) = (self.gpu.ordinal, left.scratch.allocated());
        std::mem::forget(left);
        crate::base::event::error!(
            device,
            bytes,
            "the device did not become idle in time: the communicator's memory and kernels there are leaked"
        );
    }
}

impl DeviceBackend {
    /// Waits until nothing of the backend runs any longer; returns `false` if that takes too long. After a while, work
    /// that waits for other ranks is aborted.
    fn comes_to_rest(&self) -> bool {
        let own = [&self.stream, &self.side, &self.exchange].map(|stream| {
            // Captured work does not run.
            (!driver::is_capturing(stream)).then(|| self.comm.position(stream))
        });
        let ends = || own.iter().flatten();
        let deadline = Deadline::after(BACKEND_DROP_WAIT);
        let has_ended = ends().all(|end| self.comm.wait(end, &deadline).is_ok());
        if has_ended && self.is_room_free_within(&deadline) {
            return true;
        }
        // Kernels may run for a while after the abort has returned.
        self.comm.abort();
        let deadline = Deadline::after(BACKEND_DROP_WAIT);
        ends().all(|end| end.is_passed_within(&deadline)) && self.is_room_free_within(&deadline)
    }

    /// Waits until the caller's streams have finished with the backend's memory. Returns `false` if they do not finish
    /// in time, or if that is unknown.
    fn is_room_free_within(&self, deadline: &Deadline) -> bool {
        let mut back_off = BackOff::default();
        while !driver::is_complete(&self.free).unwrap_or_else(driver::is_final) {
            if deadline.has_passed() {
                return false;
            }
            back_off.rest();
        }
        !self.is_room_lost.load(Ordering::Acquire)
    }
}
