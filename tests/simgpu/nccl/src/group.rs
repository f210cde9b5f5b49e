//! Groups: calls between `ncclGroupStart` and `ncclGroupEnd` of one thread happen together, at the end. A call outside of a group is a
//! group of its own.

use crate::abi::Code;
use crate::comm::{Comm, Step};
use crate::control;
use crate::fault::{Fault, Outcome};
use crate::inside::Inside;
use crate::job::{Call, launch};
use crate::operation::Verb;
use crate::report::{lock, report};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// What is left to do, on the caller's thread, when the background work of a task is done.
pub(crate) type Finish = Box<dyn FnOnce() -> Outcome<()> + Send>;

/// Something that waits for peers: making, splitting or ending a communicator.
pub(crate) struct Task {
    /// Which communicator says that it is in progress.
    pub(crate) comm: Arc<Comm>,
    pub(crate) name: &'static str,
    pub(crate) work: Box<dyn FnOnce() -> Outcome<Finish> + Send>,
}

struct Entry {
    comm: Arc<Comm>,
    stream: usize,
    name: &'static str,
    call: Call,
}

#[derive(Default)]
struct Group {
    depth: usize,
    error: Option<Fault>,
    tasks: Vec<Task>,
    entries: Vec<Entry>,
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.depth > 0 {
            report(format!("a thread ended inside a group: {} ncclGroupEnd missing", self.depth));
        }
    }
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn depth() -> usize {
    GROUP.with_borrow(|group| group.depth)
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// An error of a call inside of a group makes the whole group fail.
pub(crate) fn note(fault: &Fault) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.error = Some(fault.clone());
        }
    });
}

/// Adds something that waits for peers.
pub(crate) fn add_task(task: Task) -> Outcome<Code> {
    start();
    GROUP.with_borrow_mut(|group| group.tasks.push(task));
    end("")
}

/// Adds communication.
pub(crate) fn add_call(comm: &Arc<Comm>, stream: usize, name: &'static str, call: Call) -> Outcome<Code> {
    start();
    GROUP.with_borrow_mut(|group| group.entries.push(Entry { comm: comm.clone(), stream, name, call }));
    end("")
}

/// The time that `ncclGroupSimulateEnd` makes up: bytes at 100 GB/s and 5 µs, or none where there is nothing to do.
pub(crate) fn simulate_end() -> Outcome<f32> {
    let group = close("ncclGroupSimulateEnd")?;
    let bytes: usize = group.entries.iter().map(|entry| entry.call.operation.input.bytes + entry.call.operation.output.bytes).sum();
    Ok(if group.entries.is_empty() { -1.0 } else { 5.0 + bytes as f32 / 1e5 })
}

/// Ends a group; the outermost end does the work. `name` is empty at the end of a call that is a group of its own.
pub(crate) fn end(name: &'static str) -> Outcome<Code> {
    if depth() > 1 {
        GROUP.with_borrow_mut(|group| group.depth -= 1);
        return Ok(Code::SUCCESS);
    }
    let group = close(name)?;
    let comms = || group.tasks.iter().map(|task| &task.comm).chain(group.entries.iter().map(|entry| &entry.comm));
    let Some(blocking) = comms().next().map(|comm| comm.is_blocking()) else { return Ok(Code::SUCCESS) };
    if comms().any(|comm| comm.is_blocking() != blocking) {
        return Err(Fault::argument("Blocking and nonblocking communicators are not allowed in the same group."));
    }
    let polls = group.entries.iter().map(|entry| entry.name).chain([name]).map(control::polls).max().unwrap_or(0);
    let mut group = group;
    let (tasks, entries) = (std::mem::take(&mut group.tasks), std::mem::take(&mut group.entries));
    if blocking { finish_now(tasks, entries) } else { finish_later(tasks, entries, polls) }
}

/// Takes the group of this thread and leaves an empty one.
fn close(name: &str) -> Outcome<Group> {
    let group = GROUP.with_borrow_mut(|group| {
        let closed = (group.depth > 0).then(|| std::mem::take(group));
        closed.map(|mut group| {
            group.depth = 0;
            group
        })
    });
    let mut group = group.ok_or_else(|| Fault::usage(format!("{name}: not in a group call.")))?;
    match group.error.take() {
        Some(fault) => {
            let comms = group.tasks.iter().map(|task| &task.comm).chain(group.entries.iter().map(|entry| &entry.comm));
            comms.filter(|comm| !comm.is_blocking()).for_each(|comm| comm.fail(&fault));
            Err(fault)
        }
        None => Ok(group),
    }
}

fn finish_now(tasks: Vec<Task>, entries: Vec<Entry>) -> Outcome<Code> {
    run_here(tasks)?;
    launch_all(entries)?;
    Ok(Code::SUCCESS)
}

/// Runs what waits for peers on this thread where there is one thing, else each on a thread of its own.
fn run_here(mut tasks: Vec<Task>) -> Outcome<()> {
    if tasks.len() == 1 {
        return tasks.pop().map_or(Ok(()), |task| (task.work)()?());
    }
    let slots: Vec<_> = tasks.into_iter().map(begin).collect();
    slots.into_iter().try_for_each(|(_, _, slot)| slot.wait()?())
}

fn finish_later(tasks: Vec<Task>, entries: Vec<Entry>, polls: u32) -> Outcome<Code> {
    let in_progress = !tasks.is_empty() || polls > 0;
    for (comm, name, slot) in tasks.into_iter().map(begin) {
        let waiting = slot.clone();
        let ready = Box::new(move || waiting.is_filled());
        comm.postpone(control::polls(name), Step { ready, finish: Box::new(move || slot.wait()?()) });
    }
    if !in_progress {
        launch_all(entries)?;
        return Ok(Code::SUCCESS);
    }
    for (comm, entries) in by_comm(entries) {
        comm.postpone(polls, Step { ready: Box::new(|| true), finish: Box::new(move || launch_all(entries)) });
    }
    Ok(Code::IN_PROGRESS)
}

/// Where a task leaves its result.
struct Slot {
    result: Mutex<Option<Outcome<Finish>>>,
    filled: Condvar,
}

impl Slot {
    fn is_filled(&self) -> bool {
        lock(&self.result).is_some()
    }

    fn wait(&self) -> Outcome<Finish> {
        let mut result = lock(&self.result);
        loop {
            match result.take() {
                Some(result) => return result,
                None => result = self.filled.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

fn begin(task: Task) -> (Arc<Comm>, &'static str, Arc<Slot>) {
    let Task { comm, name, work } = task;
    let slot = Arc::new(Slot { result: Mutex::new(None), filled: Condvar::new() });
    let filled = slot.clone();
    std::thread::spawn(move || {
        let result = work();
        *lock(&filled.result) = Some(result);
        filled.filled.notify_all();
    });
    (comm, name, slot)
}

/// Splits entries by communicator, in the order of its first call.
fn by_comm(entries: Vec<Entry>) -> Vec<(Arc<Comm>, Vec<Entry>)> {
    let mut split: Vec<(Arc<Comm>, Vec<Entry>)> = Vec::new();
    for entry in entries {
        match split.iter_mut().find(|(comm, _)| Arc::ptr_eq(comm, &entry.comm)) {
            Some((_, entries)) => entries.push(entry),
            None => split.push((entry.comm.clone(), vec![entry])),
        }
    }
    split
}

fn launch_all(entries: Vec<Entry>) -> Outcome<()> {
    let split = by_comm(entries);
    split.iter().try_for_each(|(comm, entries)| check_self(comm, entries))?;
    run_here(split.iter().filter_map(|(comm, entries)| connection(comm, entries)).collect())?;
    for (comm, entries) in split {
        let _inside = Inside::acting(&comm, entries[0].name);
        let mut streams: Vec<usize> = Vec::new();
        for entry in &entries {
            if !streams.contains(&entry.stream) {
                streams.push(entry.stream);
            }
        }
        launch(&comm, &streams, entries.into_iter().map(|entry| entry.call).collect()).inspect_err(|fault| comm.fail(fault))?;
    }
    Ok(())
}

/// What connects a communicator before its first collective. It waits for all ranks.
fn connection(comm: &Arc<Comm>, entries: &[Entry]) -> Option<Task> {
    let collective = entries.iter().any(|entry| !entry.call.operation.signature.verb.is_point_to_point());
    if !collective || !control::connects_lazily() || lock(&comm.resources).connected {
        return None;
    }
    let connecting = comm.clone();
    let work = move || {
        let member = connecting.member()?;
        let everyone: Vec<usize> = (0..member.size).collect();
        member.link.confer(&everyone, "connection", Vec::new())?;
        lock(&connecting.resources).connected = true;
        Ok(Box::new(|| Ok(())) as Finish)
    };
    Some(Task { comm: comm.clone(), name: entries[0].name, work: Box::new(work) })
}

/// A rank that sends to itself has to receive as much in the same group.
fn check_self(comm: &Comm, entries: &[Entry]) -> Outcome<()> {
    let rank = comm.member()?.rank;
    let mut balance: HashMap<Verb, usize> = HashMap::new();
    let point_to_point = entries.iter().map(|entry| entry.call.operation.signature).filter(|signature| signature.verb.is_point_to_point());
    for signature in point_to_point.filter(|signature| signature.root == rank) {
        *balance.entry(signature.verb).or_default() += 1;
    }
    let count = |verb| balance.get(&verb).copied().unwrap_or(0);
    match count(Verb::Send).cmp(&count(Verb::Recv)) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(Fault::usage("Trying to send to self without a matching recv")),
        std::cmp::Ordering::Less => Err(Fault::usage("Trying to recv to self without a matching send")),
    }
}
