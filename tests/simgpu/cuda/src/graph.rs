//! Graphs: captured once, launched many times.

use std::sync::Arc;

use crate::clock::Clock;
use crate::code::{Code, Outcome};
use crate::job::{Task, Ticket};
use crate::state::{Handle, State};
use crate::submit;

const AUTO_FREE_ON_LAUNCH: u64 = 1;
const DEVICE_LAUNCH: u64 = 4;
const ALL_FLAGS: u64 = 15;

pub(crate) struct Node {
    pub(crate) task: Task,
    /// The nodes before it, by their places.
    pub(crate) after: Vec<usize>,
    /// Which of the captured streams it comes from.
    pub(crate) lane: usize,
}

pub(crate) struct Graph {
    /// Each after all those it depends on.
    pub(crate) nodes: Arc<[Node]>,
    pub(crate) lanes: usize,
}

pub(crate) struct Executable {
    nodes: Arc<[Node]>,
    /// One component for each lane, so that branches that do not wait for each other are seen as such.
    components: Vec<usize>,
    /// The launch before: the next one comes after it, on whatever stream.
    last: Option<(Ticket, Clock)>,
}

pub(crate) fn instantiate(state: &mut State, graph: Handle, flags: u64) -> Outcome<Handle> {
    if flags & !ALL_FLAGS != 0 || flags & AUTO_FREE_ON_LAUNCH != 0 && flags & DEVICE_LAUNCH != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let graph = state.graphs.get(&graph).ok_or(Code::INVALID_HANDLE)?;
    let (nodes, lanes) = (graph.nodes.clone(), graph.lanes);
    let components = (0..lanes).map(|_| state.components.take(&state.host)).collect();
    let handle = state.handle();
    state.executables.insert(handle, Executable { nodes, components, last: None });
    Ok(handle)
}

/// Launches a graph in a stream; while that stream captures, its nodes become nodes of the capture.
pub(crate) fn launch(state: &mut State, executable: Handle, stream: Handle) -> Outcome {
    let stream = state.stream(stream)?;
    let of = state.executables.get(&executable).ok_or(Code::INVALID_HANDLE)?;
    let (nodes, components, last) = (of.nodes.clone(), of.components.clone(), of.last.clone());
    if state.streams[&stream].capture.is_some() {
        return nodes.iter().try_for_each(|node| submit::submit(state, stream, node.task.clone()).map(drop));
    }
    let planned = nodes.iter().map(|node| submit::Node { task: &node.task, after: &node.after, component: components[node.lane] });
    let last = submit::submit_graph(state, stream, planned, last)?;
    state.executables.entry(executable).and_modify(|executable| executable.last = Some(last));
    Ok(())
}

pub(crate) fn destroy_executable(state: &mut State, executable: Handle) -> Outcome {
    let gone = state.executables.remove(&executable).ok_or(Code::INVALID_HANDLE)?;
    gone.components.into_iter().for_each(|component| state.components.give_back(component));
    Ok(())
}
