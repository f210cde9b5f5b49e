//! Graphs: captured once, launched many times.

use std::sync::Arc;

use crate::clock::Clock;
use crate::code::{Code, Outcome};
use crate::job::{Task, Ticket};
use crate::state::{Handle, State};
use crate::submit;
use crate::user_object;

const AUTO_FREE_ON_LAUNCH: u64 = 1;
const DEVICE_LAUNCH: u64 = 4;
const ALL_FLAGS: u64 = 15;

#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) task: Task,
    /// The positions of the nodes before it.
    pub(crate) after: Vec<usize>,
    /// Its branch: nodes on different branches may run at the same time.
    pub(crate) lane: usize,
    /// Whether it was added explicitly, not captured from a stream.
    pub(crate) added: bool,
}

/// The contents of a graph, finished or still being captured.
#[derive(Clone, Default)]
pub(crate) struct Body {
    pub(crate) nodes: Vec<Node>,
    pub(crate) lanes: usize,
    /// User objects, one entry for each reference.
    pub(crate) objects: Vec<Handle>,
}

impl Body {
    /// Adds a branch without nodes.
    pub(crate) fn new_lane(&mut self) -> usize {
        self.lanes += 1;
        self.lanes - 1
    }

    /// Whether `node` comes before one of `after`, or is one of them.
    pub(crate) fn reaches(&self, after: &[usize], node: usize) -> bool {
        let mut seen = vec![false; self.nodes.len()];
        let mut open = after.to_vec();
        while let Some(next) = open.pop() {
            if next == node {
                return true;
            }
            if !std::mem::replace(&mut seen[next], true) {
                open.extend(&self.nodes[next].after);
            }
        }
        false
    }

    /// Returns the nodes, each after all those it depends on.
    fn sorted(&self) -> Vec<Node> {
        let mut places: Vec<Option<usize>> = vec![None; self.nodes.len()];
        let mut sorted: Vec<Node> = Vec::new();
        // Dependencies have no cycle, so every round finds one more.
        while sorted.len() < self.nodes.len() {
            let before = sorted.len();
            for (at, node) in self.nodes.iter().enumerate() {
                let known: Option<Vec<usize>> = node.after.iter().map(|&before| places[before]).collect();
                if let (None, Some(after)) = (places[at], known) {
                    places[at] = Some(sorted.len());
                    sorted.push(Node { after, ..node.clone() });
                }
            }
            if sorted.len() == before {
                break;
            }
        }
        sorted
    }
}

pub(crate) struct Executable {
    nodes: Arc<[Node]>,
    /// One component for each lane, so that branches that do not wait for each other are recognised.
    components: Vec<usize>,
    objects: Vec<Handle>,
    /// The previous launch: the next one comes after it, on any stream.
    last: Option<(Ticket, Clock)>,
}

/// Returns the contents of a graph, also during its capture.
pub(crate) fn body(state: &mut State, graph: Handle) -> Outcome<&mut Body> {
    if let Some(capture) = state.captures.get_mut(&graph) {
        return if capture.invalid { Err(Code::STREAM_CAPTURE_INVALIDATED) } else { Ok(&mut capture.body) };
    }
    state.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)
}

/// Adds a node explicitly, after the given ones. Returns its position.
pub(crate) fn add(state: &mut State, graph: Handle, task: Task, after: Vec<usize>) -> Outcome<usize> {
    let body = body(state, graph)?;
    if after.iter().any(|&before| before >= body.nodes.len()) {
        return Err(Code::INVALID_VALUE);
    }
    let lane = body.new_lane();
    body.nodes.push(Node { task, after, lane, added: true });
    Ok(body.nodes.len() - 1)
}

/// Adds dependencies: the second node of each pair comes after the first. Adds either all or none.
pub(crate) fn depend(state: &mut State, graph: Handle, pairs: &[(usize, usize)]) -> Outcome {
    let body = body(state, graph)?;
    let mut changed = body.clone();
    for &(from, to) in pairs {
        let circle = from >= changed.nodes.len() || to >= changed.nodes.len() || changed.reaches(&[from], to);
        if circle || changed.nodes[to].after.contains(&from) {
            return Err(Code::INVALID_VALUE);
        }
        changed.nodes[to].after.push(from);
    }
    *body = changed;
    Ok(())
}

/// Releases what a graph holds.
pub(crate) fn destroy(state: &mut State, graph: Handle) -> Outcome {
    let gone = state.graphs.remove(&graph).ok_or(Code::INVALID_HANDLE)?;
    gone.objects.into_iter().for_each(|object| user_object::release(state, object, 1));
    Ok(())
}

/// Takes one more reference of each object.
fn hold(state: &mut State, objects: &[Handle]) -> Outcome {
    objects.iter().try_for_each(|&object| user_object::retain(state, object, 1))
}

pub(crate) fn instantiate(state: &mut State, graph: Handle, flags: u64) -> Outcome<Handle> {
    if flags & !ALL_FLAGS != 0 || flags & AUTO_FREE_ON_LAUNCH != 0 && flags & DEVICE_LAUNCH != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let graph = state.graphs.get(&graph).ok_or(Code::INVALID_HANDLE)?;
    let (nodes, lanes, objects) = (graph.sorted().into(), graph.lanes, graph.objects.clone());
    hold(state, &objects)?;
    let components = (0..lanes).map(|_| state.components.take(&state.host)).collect();
    let handle = state.handle();
    state.executables.insert(handle, Executable { nodes, components, objects, last: None });
    Ok(handle)
}

/// Launches a graph in a stream; while that stream captures, its nodes become nodes of the capture.
pub(crate) fn launch(state: &mut State, executable: Handle, stream: Handle) -> Outcome {
    let stream = state.stream(stream)?;
    let of = state.executables.get(&executable).ok_or(Code::INVALID_HANDLE)?;
    let (nodes, components, last, objects) = (of.nodes.clone(), of.components.clone(), of.last.clone(), of.objects.clone());
    if state.streams[&stream].capture.is_some() {
        return nodes.iter().try_for_each(|node| submit::submit(state, stream, node.task.clone()).map(drop));
    }
    let planned = nodes.iter().map(|node| submit::Node { task: &node.task, after: &node.after, component: components[node.lane] });
    let last = submit::submit_graph(state, stream, planned, last, objects.clone())?;
    hold(state, &objects)?;
    state.executables.entry(executable).and_modify(|executable| executable.last = Some(last));
    Ok(())
}

/// Forgets an executable graph. Its pending launches are finished, and hold its objects until then.
pub(crate) fn destroy_executable(state: &mut State, executable: Handle) -> Outcome {
    let gone = state.executables.remove(&executable).ok_or(Code::INVALID_HANDLE)?;
    gone.components.into_iter().for_each(|component| state.components.give_back(component));
    gone.objects.into_iter().for_each(|object| user_object::release(state, object, 1));
    Ok(())
}
