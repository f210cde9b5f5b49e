//! Graphs, captures and user objects. Their handles are the driver's.

use std::ffi::{c_uint, c_void};

use simgpu_driver::{self as driver, HostFunction, Outcome};

use crate::call::runtime;
use crate::device::ready;

/// The pointers that receive the state of a stream's capture. All but the first may be null.
#[derive(Debug)]
#[allow(missing_docs, reason = "they are the parameters of cudaStreamGetCaptureInfo")]
pub struct CaptureInfo {
    pub status: *mut u32,
    pub id: *mut u64,
    pub graph: *mut usize,
    pub nodes: *mut *const usize,
    pub edges: *mut *const c_void,
    pub count: *mut usize,
}

impl CaptureInfo {
    /// Queries the driver. Edges never have annotations, so none are returned.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// Each pointer is null or valid for writes.
    pub unsafe fn ask(self, stream: usize) -> Outcome {
        ready()?;
        // SAFETY: guaranteed by the caller.
        unsafe {
            driver::cuStreamGetCaptureInfo_v2(stream, self.status, self.id, self.graph, self.nodes, self.count)?;
            if !self.edges.is_null() {
                self.edges.write(std::ptr::null());
            }
        }
        Ok(())
    }
}

runtime! {
    fn cudaGraphAddEventRecordNode(place: *mut usize, graph: usize, after: *const usize, count: usize, event: usize) {
        ready()?;
        driver::cuGraphAddEventRecordNode(place, graph, after, count, event)
    }

    fn cudaGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint) {
        ready()?;
        driver::cuGraphRetainUserObject(graph, object, count, flags)
    }

    fn cudaUserObjectCreate(place: *mut usize, data: *mut c_void, destructor: HostFunction, references: c_uint, flags: c_uint) {
        ready()?;
        driver::cuUserObjectCreate(place, data, destructor, references, flags)
    }
}
