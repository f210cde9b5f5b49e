//! Groups: calls between `ncclGroupStart` and `ncclGroupEnd` of one thread are executed together, at the end. A call
//! outside of a group forms its own group.
//!
//! As in 2.28.9, the group of a blocking communicator, and any call that destroys or aborts, runs on the calling
//! thread. Groups of other communicators run on their own thread (`progress`): from 2.23.4 on all of them, before that
//! only those that make, end or connect communicators. Work for several communicators that waits for peers runs on as
//! many threads.

use crate::abi::Code;
use crate::comm::Comm;
use crate::connection::{connection, needs_connection};
use crate::control;
use crate::fault::{Fault, Outcome};
use crate::inside::Inside;
use crate::job::{Call, launch};
use crate::operation::{Signature, Verb};
use crate::progress::{Progress, occupy_local_storage};
use crate::report::{lock, report};
use crate::threads;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// From this version on, every group of a communicator that does not block has a thread.
const THREAD_FOR_EVERY_GROUP: i32 = 22304;
/// From this version on, destroying begins a group, which a failure leaves open.
const GROUPS_OF_DESTROY: i32 = 22403;
/// From this version on, a background group has its own memory.
const GROUPS_ON_THE_HEAP: i32 = 22703;

/// Work that waits for peers or for the device: making, splitting or ending a communicator.
pub(crate) struct Task {
    /// The communicator that reports that it is in progress.
    pub(crate) comm: Arc<Comm>,
    pub(crate) name: &'static str,
    /// Whether it destroys or aborts the communicator, and so is done when the call returns, whatever the
    /// configuration.
    pub(crate) ends: bool,
    pub(crate) work: Box<dyn FnOnce() -> Outcome<()> + Send>,
}

pub(crate) struct Entry {
    comm: Arc<Comm>,
    stream: usize,
    pub(crate) name: &'static str,
    call: Call,
}

impl Entry {
    pub(crate) fn signature(&self) -> &Signature {
        &self.call.operation.signature
    }

    pub(crate) fn verb(&self) -> Verb {
        self.signature().verb
    }
}

#[derive(Default)]
struct Group {
    depth: usize,
    /// How many of these a failed destroy has left open.
    left_open: usize,
    error: Option<Fault>,
    tasks: Vec<Task>,
    entries: Vec<Entry>,
}

impl Group {
    fn comms(&self) -> impl Iterator<Item = &Arc<Comm>> {
        self.tasks.iter().map(|task| &task.comm).chain(self.entries.iter().map(|entry| &entry.comm))
    }

    /// Whether the group runs on the calling thread; `None` if there is nothing to run.
    fn blocks(&self) -> Outcome<Option<bool>> {
        let lasting = self.tasks.iter().filter(|task| !task.ends).map(|task| &task.comm);
        let mut modes = lasting.chain(self.entries.iter().map(|entry| &entry.comm)).map(|comm| comm.is_blocking());
        let first = modes.next();
        if modes.any(|mode| Some(mode) != first) {
            return Err(Fault::argument("Blocking and nonblocking communicators are not allowed in the same group."));
        }
        Ok(if self.tasks.iter().any(|task| task.ends) { Some(true) } else { first })
    }

    /// Fails every communicator that does not block.
    fn fail(comms: &[Arc<Comm>], fault: &Fault) {
        comms.iter().for_each(|comm| comm.fail_unless_blocking(fault));
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let missing = self.depth.saturating_sub(self.left_open);
        let queued = self.tasks.len() + self.entries.len();
        if missing > 0 {
            report(format!("a thread ended inside a group: {missing} ncclGroupEnd missing"));
        } else if queued > 0 && self.depth > 0 {
            report(format!("a thread ended with {queued} calls that waited in the group that a failed ncclCommDestroy had left open"));
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

/// Records a failed destroy: the group that it began stays open, and later calls of its thread are silently queued in
/// it.
pub(crate) fn leave_open() {
    if control::version() < GROUPS_OF_DESTROY {
        return;
    }
    GROUP.with_borrow_mut(|group| {
        group.depth += 1;
        group.left_open += 1;
    });
}

/// Records an error of a call inside a group, which makes the whole group fail.
pub(crate) fn note(fault: &Fault) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.error = Some(fault.clone());
        }
    });
}

/// Adds work that waits for peers.
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

/// Returns the time that `ncclGroupSimulateEnd` invents: bytes at 100 GB/s plus 5 µs, or nothing if there is no work.
pub(crate) fn simulate_end() -> Outcome<f32> {
    let group = close("ncclGroupSimulateEnd")?;
    let bytes: usize = group.entries.iter().map(|entry| entry.call.operation.input.bytes + entry.call.operation.output.bytes).sum();
    Ok(if group.entries.is_empty() { -1.0 } else { 5.0 + bytes as f32 / 1e5 })
}

/// Ends a group; the outermost end does the work. `name` is empty at the end of a call that forms its own group.
pub(crate) fn end(name: &'static str) -> Outcome<Code> {
    if depth() > 1 {
        GROUP.with_borrow_mut(|group| group.depth -= 1);
        return Ok(Code::SUCCESS);
    }
    let mut group = close(name)?;
    let comms: Vec<_> = group.comms().cloned().collect();
    let blocks = group.blocks();
    let (tasks, entries) = (std::mem::take(&mut group.tasks), std::mem::take(&mut group.entries));
    let outcome = match blocks {
        Err(fault) => Err(fault),
        Ok(None) => return Ok(Code::SUCCESS),
        Ok(Some(true)) => finish_here(tasks, entries).map(|()| Code::SUCCESS),
        Ok(Some(false)) => finish_beside(tasks, entries, name),
    };
    outcome.inspect_err(|fault| Group::fail(&comms, fault))
}

/// Takes the group of this thread and leaves an empty one.
fn close(name: &str) -> Outcome<Group> {
    let group = GROUP.with_borrow_mut(|group| {
        let closed = (group.depth > 0).then(|| std::mem::take(group));
        closed.map(|mut group| {
            (group.depth, group.left_open) = (0, 0);
            group
        })
    });
    let mut group = group.ok_or_else(|| Fault::usage(format!("{name}: not in a group call.")))?;
    match group.error.take() {
        Some(fault) => {
            Group::fail(&group.comms().cloned().collect::<Vec<_>>(), &fault);
            Err(fault)
        }
        None => Ok(group),
    }
}

/// Runs a group on this thread.
fn finish_here(tasks: Vec<Task>, entries: Vec<Entry>) -> Outcome<()> {
    if control::version() < GROUPS_ON_THE_HEAP {
        occupy_local_storage(None);
    }
    run_tasks(tasks)?;
    launch_all(entries, Inside::acting)
}

/// Runs a group on its own thread, if NCCL does so.
fn finish_beside(tasks: Vec<Task>, entries: Vec<Entry>, name: &'static str) -> Outcome<Code> {
    let polls_to_launch = entries.iter().map(|entry| entry.name).chain([name]).map(control::polls).max().unwrap_or(0);
    let polls = tasks.iter().map(|task| control::polls(task.name)).max().unwrap_or(0).max(polls_to_launch);
    let connects = entries.iter().any(|entry| needs_connection(&entry.comm, entry.signature()));
    if control::version() < THREAD_FOR_EVERY_GROUP && tasks.is_empty() && !connects && polls == 0 {
        return finish_here(tasks, entries).map(|()| Code::SUCCESS);
    }
    let comms: Vec<_> = tasks.iter().map(|task| &task.comm).chain(entries.iter().map(|entry| &entry.comm)).cloned().collect();
    let work = move |progress: &Progress| {
        run_tasks(tasks)?;
        if !entries.is_empty() {
            progress.await_polls()?;
        }
        launch_all(entries, Inside::launching)
    };
    let progress = Progress::start(polls, work)?;
    if control::version() < GROUPS_ON_THE_HEAP {
        occupy_local_storage(Some(&progress));
    }
    comms.iter().for_each(|comm| comm.follow(&progress));
    Ok(Code::IN_PROGRESS)
}

/// Runs a single task that waits for peers on this thread, and several tasks each on their own thread.
fn run_tasks(mut tasks: Vec<Task>) -> Outcome<()> {
    if tasks.len() <= 1 {
        return tasks.pop().map_or(Ok(()), |task| (task.work)());
    }
    let outcomes: Arc<Mutex<Vec<Outcome<()>>>> = Arc::default();
    let begin = |task: Task| {
        let outcomes = outcomes.clone();
        threads::start(move || {
            let outcome = (task.work)();
            lock(&outcomes).push(outcome);
        })
    };
    let begun: Vec<_> = tasks.into_iter().map(begin).collect();
    let refused = begun.into_iter().filter_map(|thread| thread.map(threads::Thread::join).err());
    let refused: Vec<_> = refused.collect();
    let ended = std::mem::take(&mut *lock(&outcomes));
    refused.into_iter().map(Err).chain(ended).collect()
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

/// Launches the calls. `enter` marks the launching thread as inside the library, and inside the communicator too if it
/// is the calling thread.
fn launch_all(entries: Vec<Entry>, enter: fn(&Comm, &'static str) -> Inside) -> Outcome<()> {
    let split = by_comm(entries);
    split.iter().try_for_each(|(comm, entries)| check_self(comm, entries))?;
    run_tasks(split.iter().filter_map(|(comm, entries)| connection(comm, entries)).collect())?;
    for (comm, entries) in split {
        let _inside = enter(&comm, entries[0].name);
        let mut streams: Vec<usize> = Vec::new();
        for entry in &entries {
            if !streams.contains(&entry.stream) {
                streams.push(entry.stream);
            }
        }
        launch(&comm, &streams, entries.into_iter().map(|entry| entry.call).collect())?;
    }
    Ok(())
}

/// Checks that a rank that sends to itself receives as much in the same group.
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
