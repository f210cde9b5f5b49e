//! Executes jobs, on the thread of their stream.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::call;
use crate::checker::{self, Record, Verb};
use crate::code::{self, Code};
use crate::job::{Job, Span, Step, Work};
use crate::module::{self, Sight};
use crate::state::{self, Guard, Handle, State};
use crate::user_object;

/// The reason why a job failed.
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) text: String,
}

/// Runs one job to its end. A broken context does nothing any more, except free memory.
pub(crate) fn execute(mut state: Guard<'_>, stream: Handle, job: Job) -> Guard<'_> {
    let context = state.streams.get(&stream).map_or(0, |stream| stream.context);
    for step in &job.steps {
        if state.healthy(context).is_ok() {
            state = advance(state, context, job.number, step);
        }
        if let Work::Free { start } = step.work {
            state.release(start);
        }
        settle(&mut state, job.number, step);
    }
    state.pending.remove(&job.number);
    job.holds.iter().for_each(|&object| user_object::release(&mut state, object, 1));
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.finish_job();
    }
    state
}

fn advance<'a>(mut state: Guard<'a>, context: Handle, number: u64, step: &Step) -> Guard<'a> {
    let sight = prepare(&state, context, number, step);
    let run = library_run(&mut state, context, step);
    drop(state);
    let outcome = sight.and_then(|sight| perform(&step.work, sight));
    let mut state = state::lock();
    match outcome {
        Ok(spans) => spans.iter().for_each(|span| {
            let record = attributed(&state, step.record(span), run);
            state.record(record);
            forget(&mut state, number, &step.record(span));
        }),
        Err(failure) => {
            state.reports.add(format!("{} failed with {}: {}", step.what, code::name(failure.code), failure.text));
            state.contexts.entry(context).and_modify(|context| context.poison = Some(failure.code));
        }
    }
    if let Some((run, _)) = run {
        state.companions.end(run);
    }
    state
}

/// Records that a kernel of a library begins. Returns the number of its run and its device.
fn library_run(state: &mut State, context: Handle, step: &Step) -> Option<(u64, usize)> {
    let Work::Kernel(launch) = &step.work else { return None };
    let device = state.contexts.get(&context).filter(|_| launch.library)?.device;
    Some((state.companions.begin(device, step.stamp.clone()), device))
}

/// Adds, to a record of a kernel of a library, the kernel's run.
fn attributed(state: &State, mut record: Record, run: Option<(u64, usize)>) -> Record {
    let Some((run, device)) = run else { return record };
    record.library = Some(device);
    if let Some(owner) = state.memory.at(record.start).map(|found| found.device).filter(|&owner| owner != device) {
        record.beside = state.companions.beside(run, owner);
    }
    record
}

fn settle(state: &mut State, number: u64, step: &Step) {
    if matches!(step.work, Work::Free { .. }) {
        return;
    }
    for span in &step.spans {
        forget(state, number, &step.record(span));
    }
}

fn forget(state: &mut State, number: u64, record: &Record) {
    let idle = state.pending.iter().all(|&pending| pending == number);
    checker::settle(&mut state.memory, record, &state.host, idle);
}

/// Checks that the memory of the job exists, and determines the memory that a kernel can access.
fn prepare(state: &State, context: Handle, number: u64, step: &Step) -> Result<Sight, Failure> {
    let spans = if matches!(step.work, Work::Free { .. }) { &[] } else { &step.spans[..] };
    for span in spans {
        match state.memory.at(span.start) {
            Some(found) if found.usable(number) && span.end() <= found.end() => {}
            None if !span.known => {}
            found => {
                let what = found.map_or("no memory there".to_string(), |found| found.name());
                let text = format!("bytes {:#x}..{:#x}: {what}, freed or too short", span.start, span.end());
                return Err(Failure { code: Code::ILLEGAL_ADDRESS, text });
            }
        }
    }
    Ok(match &step.work {
        Work::Kernel(launch) => Sight::of(state, context, number, launch.library),
        _ => Sight::NOTHING,
    })
}

/// Does the work. Returns the memory it used, if that is known only now.
fn perform(work: &Work, sight: Sight) -> Result<Vec<Span>, Failure> {
    match work {
        // Records and waits of events are resolved when a graph is launched.
        Work::Nothing | Work::Free { .. } | Work::Record(_) | Work::Await(_) => {}
        Work::Clock(time) => drop(time.set(Instant::now())),
        Work::Copy { to, from, bytes } => {
            // SAFETY: `prepare` found both ranges in the map, or one is the caller's own memory, which the caller
            // guarantees. Memory in the map stays mapped while a job that was submitted before its end is not over.
            // The ranges may overlap.
            unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes) };
        }
        Work::Upload { to, from } => {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), *to as *mut u8, from.len()) };
        }
        // SAFETY: as above: `count` times `width` bytes were found in the map.
        Work::Fill { to, element: [byte, ..], width: 1, count } => unsafe { std::ptr::write_bytes(*to as *mut u8, *byte, *count) },
        Work::Fill { to, element, width: 4, count } => {
            for at in 0..*count {
                // SAFETY: as above, and the address is aligned (`fill`). One store, as on a device: the host may read
                // pinned memory meanwhile.
                unsafe { AtomicU32::from_ptr((*to as *mut u32).add(at)) }.store(u32::from_ne_bytes(*element), Ordering::Release);
            }
        }
        Work::Fill { to, element, width, count } => {
            for at in 0..*count {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(element.as_ptr(), (*to as *mut u8).add(at * width), *width) };
            }
        }
        Work::Call(function) => {
            // SAFETY: the caller of `cuLaunchHostFunc` guarantees that the function may be called like this, once for
            // each run.
            call::host_function(|| unsafe { (function.function)(function.data) });
        }
        Work::Kernel(launch) => {
            let outcome = catch_unwind(AssertUnwindSafe(|| module::run(launch, &sight)));
            let text = || "the interpreter panicked: a bug of the simulation".to_string();
            return outcome.unwrap_or_else(|_| Err(Failure { code: Code::LAUNCH_FAILED, text: text() }));
        }
        Work::Fail(code) => return Err(Failure { code: *code, text: "planted by a test".to_string() }),
    }
    Ok(Vec::new())
}

/// Returns a span that a kernel used.
pub(crate) fn touched(start: u64, end: u64, verb: Verb) -> Span {
    Span { start, bytes: end - start, verb, known: true }
}
