//! Launches: what a stream calls, and what that call runs. A captured launch is held by its graph, through a user
//! object, as of 2.11.

#![expect(unsafe_code, reason = "device memory is read and written by its address")]

use crate::abi::{Kind, Stream};
use crate::comm::Comm;
use crate::control;
use crate::driver::{self, Access, Event};
use crate::exchange::bytes;
use crate::fault::Outcome;
use crate::operation::{Fold, Operation, Region};
use crate::report::{lock, report};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// An operation whose scalar may be unknown until it runs.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) operation: Operation,
    /// The address of the scalar of `PreMulSum`, if it is on the device.
    pub(crate) scalar_at: Option<usize>,
    /// Whether the buffers are not device memory. Such a kernel does nothing and never meets its peers.
    pub(crate) faults: bool,
}

struct Job {
    comm: Arc<Comm>,
    calls: Vec<Call>,
    /// Whether it is part of a graph: it runs at each launch of the graph, and is kept as long as the graph lives.
    captured: bool,
}

static JOBS: Mutex<Option<HashMap<usize, Arc<Job>>>> = Mutex::new(None);
static ISSUED: Mutex<usize> = Mutex::new(0);

/// Enqueues the calls of one communicator on a stream, as one launch. If the group used more streams, they wait for it
/// and it waits for them.
pub(crate) fn launch(comm: &Arc<Comm>, streams: &[usize], calls: Vec<Call>) -> Outcome<()> {
    let _there = comm.device.enter()?;
    let stream = streams[0] as Stream;
    let graph = driver::captured_by(stream)?;
    let captured = graph.is_some();
    for &other in &streams[1..] {
        Event::new()?.order(other as Stream, stream)?;
    }
    follow(comm, stream, captured)?;
    let accesses: Vec<Access> = calls.iter().filter(|call| !call.faults).flat_map(accesses).collect();
    let number = remember(Job { comm: comm.clone(), calls, captured });
    match graph {
        Some(graph) => {
            comm.hold();
            graph.on_destruction(release, number).inspect_err(|_| release(number as *mut c_void))?;
        }
        None => comm.enqueued(),
    }
    if let Err(fault) = driver::launch(stream, execute, number, &accesses) {
        if !captured {
            forget(number);
            comm.withdrawn();
        }
        return Err(fault);
    }
    for &other in &streams[1..] {
        Event::new()?.order(stream, other as Stream)?;
    }
    mark(comm, stream, captured)
}

/// Orders the launches of one communicator like their calls, on any streams.
fn follow(comm: &Comm, stream: Stream, captured: bool) -> Outcome<()> {
    match &lock(&comm.resources).order {
        Some((last, event)) if *last != stream as usize && !captured => event.await_on(stream),
        _ => Ok(()),
    }
}

fn mark(comm: &Comm, stream: Stream, captured: bool) -> Outcome<()> {
    if captured {
        return Ok(());
    }
    let mut resources = lock(&comm.resources);
    let (last, event) = match resources.order.take() {
        Some((_, event)) => (stream as usize, event),
        None => (stream as usize, Event::new()?),
    };
    event.record(stream)?;
    resources.order = Some((last, event));
    Ok(())
}

fn accesses(call: &Call) -> impl Iterator<Item = Access> + use<> {
    let Operation { input, output, signature, .. } = call.operation;
    let scalar = call.scalar_at.map(|address| Region { address, bytes: signature.kind.size() }).unwrap_or_default();
    let all = [(input, 0), (scalar, 0), (output, 1)];
    all.into_iter().filter(|(region, _)| region.bytes > 0).map(|(region, write)| Access {
        address: region.address as u64,
        bytes: region.bytes as u64,
        write,
    })
}

fn remember(job: Job) -> usize {
    let mut issued = lock(&ISSUED);
    *issued += 1;
    lock(&JOBS).get_or_insert_default().insert(*issued, Arc::new(job));
    *issued
}

fn forget(number: usize) -> Option<Arc<Job>> {
    lock(&JOBS).get_or_insert_default().remove(&number)
}

/// Forgets a captured launch whose graph is destroyed: its communicator may end too.
extern "C" fn release(data: *mut c_void) {
    if let Some(job) = forget(data as usize) {
        job.comm.release();
    }
}

extern "C" fn execute(data: *mut c_void) {
    let number = data as usize;
    let job = lock(&JOBS).get_or_insert_default().get(&number).cloned();
    let Some(job) = job else { return report("a stream ran a launch a second time that was not captured") };
    if !job.captured {
        forget(number);
    }
    let run = std::panic::AssertUnwindSafe(|| job.run());
    if std::panic::catch_unwind(run).is_err() {
        report("the simulated NCCL failed: a launch panicked");
    }
}

impl Job {
    fn run(&self) {
        let Ok(member) = self.comm.member() else { return };
        if !self.comm.begin(self.captured, control::hangs(member.rank)) {
            return;
        }
        let operations: Vec<_> = self.calls.iter().filter(|call| !call.faults).map(Call::resolve).collect();
        let faults = self.calls.iter().any(|call| call.faults);
        // SAFETY: the regions were checked when the calls were made; their owner may free them only when the stream is past this launch.
        if !faults && unsafe { member.link.run(&operations) }.is_ok() {
            for Operation { signature, .. } in &operations {
                let moved = signature.count * signature.kind.size();
                control::count_sent(signature.verb, member.rank, signature.verb.sends(member.rank, signature.root, member.size, moved));
            }
        }
        self.comm.end(self.captured);
    }
}

impl Call {
    fn resolve(&self) -> Operation {
        let Some(address) = self.scalar_at else { return self.operation };
        let kind = self.operation.signature.kind;
        // SAFETY: the user promised a scalar of this type at this address, for as long as collectives that use it run.
        Operation { scalar: scalar_bits(kind, unsafe { bytes(Region { address, bytes: kind.size() }) }), ..self.operation }
    }
}

/// Returns the bits of a scalar, at the beginning of the word as in memory.
pub(crate) fn scalar_bits(kind: Kind, value: &[u8]) -> u64 {
    let mut bits = [0; 8];
    bits[..kind.size()].copy_from_slice(&value[..kind.size()]);
    u64::from_ne_bytes(bits)
}

/// Returns the operation that NCCL before 2.29.7 runs if a single rank averages: it drops the end of the output.
pub(crate) fn with_lost_tail(operation: Operation, size: usize) -> Operation {
    let affected = size == 1 && operation.signature.fold == Fold::Avg && operation.signature.verb.reduces();
    if !affected || !(22705..22907).contains(&control::version()) {
        return operation;
    }
    let output = Region { bytes: operation.output.bytes / 16 * 16, ..operation.output };
    Operation { output, ..operation }
}
