use std::ffi::{c_char, c_uint, c_ulonglong, c_void};

use crate::call::{driver, offer, put};
use crate::code::{Code, Outcome};
use crate::event;
use crate::graph;
use crate::job::HostFunction;
use crate::state::{self, Handle};
use crate::stream;
use crate::user_object;

/// `CU_GRAPH_USER_OBJECT_MOVE`.
const USER_OBJECT_MOVE: u32 = 1;

/// Returns the handle of a node, made from its graph and its position there.
pub(super) fn node_handle(graph: Handle, node: usize) -> Handle {
    graph << 16 | (node + 1)
}

/// Returns the graph and the position that a node's handle stands for.
fn node_place(node: Handle) -> Outcome<(Handle, usize)> {
    let place = (node & 0xffff).checked_sub(1).ok_or(Code::INVALID_VALUE)?;
    Ok((node >> 16, place))
}

/// Returns the graphs and the positions of a list of nodes.
///
/// # Safety
///
/// `nodes` has `count` handles or is null.
pub(super) unsafe fn places(nodes: *const usize, count: usize) -> Outcome<Vec<(Handle, usize)>> {
    if nodes.is_null() && count > 0 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    (0..count).map(|at| node_place(unsafe { *nodes.add(at) })).collect()
}

/// Refuses edges with annotations, which are not simulated: an edge may only order two nodes.
///
/// # Safety
///
/// `edges` has `count` entries or is null.
pub(super) unsafe fn plain_edges(edges: *const [u8; 8], count: usize) -> Outcome {
    if edges.is_null() {
        return Ok(());
    }
    // SAFETY: guaranteed by the caller.
    let plain = (0..count).all(|at| unsafe { edges.add(at).read_unaligned() } == [0; 8]);
    if plain { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

/// Makes the nodes of `to` come after those of `from`, pair by pair.
///
/// # Safety
///
/// Both lists have `count` handles; `edges` is null or has as many entries.
unsafe fn add_dependencies(graph: Handle, from: *const usize, to: *const usize, edges: *const [u8; 8], count: usize) -> Outcome {
    // SAFETY: guaranteed by the caller.
    let (from, to) = unsafe {
        plain_edges(edges, count)?;
        (places(from, count)?, places(to, count)?)
    };
    if from.iter().chain(&to).any(|&(of, _)| of != graph) {
        return Err(Code::INVALID_VALUE);
    }
    let pairs: Vec<(usize, usize)> = from.iter().zip(&to).map(|(from, to)| (from.1, to.1)).collect();
    graph::depend(&mut state::lock(), graph, &pairs)
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
        state.graphs.insert(handle, graph::Body::default());
        put(place, handle)
    }

    fn cuGraphDestroy(handle: usize) {
        graph::destroy(&mut state::lock(), handle)
    }

    fn cuGraphAddEventRecordNode(place: *mut usize, handle: usize, after: *const usize, count: usize, event: usize) {
        let after = places(after, count)?;
        if place.is_null() || after.iter().any(|&(of, _)| of != handle) {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        if !state.events.contains_key(&event) {
            return Err(Code::INVALID_HANDLE);
        }
        let after = after.into_iter().map(|(_, node)| node).collect();
        let node = graph::add(&mut state, handle, event::record_task(event), after)?;
        put(place, node_handle(handle, node))
    }

    fn cuGraphAddDependencies(handle: usize, from: *const usize, to: *const usize, count: usize) {
        add_dependencies(handle, from, to, std::ptr::null(), count)
    }

    fn cuGraphAddDependencies_v2(handle: usize, from: *const usize, to: *const usize, edges: *const [u8; 8], count: usize) {
        add_dependencies(handle, from, to, edges, count)
    }

    fn cuUserObjectCreate(
        place: *mut usize, data: *mut c_void, destructor: Option<unsafe extern "C" fn(*mut c_void)>, references: c_uint, flags: c_uint,
    ) {
        // The only flag states that no thread may wait for the destructor; it is required.
        if place.is_null() || flags != 1 || references == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let destructor = HostFunction { function: destructor.ok_or(Code::INVALID_VALUE)?, data };
        put(place, user_object::create(&mut state::lock(), destructor, references))
    }

    fn cuUserObjectRetain(object: usize, count: c_uint) {
        user_object::retain(&mut state::lock(), object, count)
    }

    fn cuUserObjectRelease(object: usize, count: c_uint) {
        let mut state = state::lock();
        state.user_objects.get(&object).ok_or(Code::INVALID_VALUE)?;
        user_object::release(&mut state, object, count);
        Ok(())
    }

    fn cuGraphRetainUserObject(handle: usize, object: usize, count: c_uint, flags: c_uint) {
        if flags & !USER_OBJECT_MOVE != 0 || count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = state::lock();
        state.user_objects.get(&object).ok_or(Code::INVALID_VALUE)?;
        graph::body(&mut state, handle)?.objects.extend((0..count).map(|_| object));
        // A move transfers the caller's own reference.
        if flags == USER_OBJECT_MOVE { Ok(()) } else { user_object::retain(&mut state, object, count) }
    }

    fn cuGraphReleaseUserObject(handle: usize, object: usize, count: c_uint) {
        let mut state = state::lock();
        let objects = &mut graph::body(&mut state, handle)?.objects;
        if objects.iter().filter(|&&held| held == object).count() < count as usize {
            return Err(Code::INVALID_VALUE);
        }
        for _ in 0..count {
            let at = objects.iter().position(|&held| held == object);
            at.map(|at| objects.swap_remove(at));
        }
        user_object::release(&mut state, object, count);
        Ok(())
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
        graph::launch(&mut stream::with_room(stream), handle, stream)
    }

    fn cuGraphExecDestroy(handle: usize) {
        graph::destroy_executable(&mut state::lock(), handle)
    }
}
