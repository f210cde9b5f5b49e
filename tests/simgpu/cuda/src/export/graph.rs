use std::ffi::{c_char, c_uint, c_ulonglong, c_void};

use crate::call::{driver, offer, put};
use crate::code::Code;
use crate::graph;
use crate::state::{self, Handle};

/// A node is named by its graph and its place there.
pub(super) fn node_handle(graph: Handle, node: usize) -> Handle {
    graph << 16 | (node + 1)
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
struct InstantiateParameters {
    flags: u64,
    upload_stream: usize,
    error_node: usize,
    result: u32,
}

driver! {
    fn cuGraphCreate(place: *mut usize, flags: c_uint) {
        if place.is_null() || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        let handle = state.handle();
        state.graphs.insert(handle, graph::Graph { nodes: [].into(), lanes: 0 });
        put(place, handle)
    }

    fn cuGraphDestroy(handle: usize) {
        state::lock().graphs.remove(&handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    fn cuGraphGetNodes(handle: usize, nodes: *mut usize, count: *mut usize) {
        let state = state::lock();
        let known = state.graphs.get(&handle).ok_or(Code::INVALID_HANDLE)?.nodes.len();
        if count.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if nodes.is_null() {
            return put(count, known);
        }
        let room = *count;
        for at in 0..room {
            nodes.add(at).write(if at < known { node_handle(handle, at) } else { 0 });
        }
        put(count, known.min(room))
    }

    fn cuGraphInstantiateWithFlags(place: *mut usize, handle: usize, flags: c_ulonglong) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, graph::instantiate(&mut state::lock(), handle, flags)?)
    }

    fn cuGraphInstantiate_v2(place: *mut usize, handle: usize, node: *mut usize, _log: *mut c_char, _bytes: usize) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        offer(node, 0);
        put(place, graph::instantiate(&mut state::lock(), handle, 0)?)
    }

    fn cuGraphInstantiateWithParams(place: *mut usize, handle: usize, parameters: *mut c_void) {
        let parameters: *mut InstantiateParameters = parameters.cast();
        if place.is_null() || parameters.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let made = graph::instantiate(&mut state::lock(), handle, (*parameters).flags);
        (*parameters).error_node = 0;
        // `CUDA_GRAPH_INSTANTIATE_SUCCESS` and `…_ERROR`.
        (*parameters).result = u32::from(made.is_err());
        put(place, made?)
    }

    fn cuGraphUpload(handle: usize, stream: usize) {
        let mut state = state::lock();
        state.stream(stream)?;
        state.executables.get(&handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    fn cuGraphLaunch(handle: usize, stream: usize) {
        graph::launch(&mut state::lock(), handle, stream)
    }

    fn cuGraphExecDestroy(handle: usize) {
        graph::destroy_executable(&mut state::lock(), handle)
    }
}
