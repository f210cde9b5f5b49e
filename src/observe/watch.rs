//! Who listens to one communicator, and how they are told of its calls.
//!
//! # Design
//!
//! `observe/` tells of calls while they happen. What makes calls holds the communicator's `Observers`: a `Watch`, and a flag that says whether it has an
//! observer, a trace or an NVTX tool. A call looks at the flag and at `tracing`'s level, one load each, where it begins (`HostBackend::run`, the progress engine,
//! `Communicator::queue`), and goes a cold way if somebody listens: clock, span, range, the call itself, report. The trace file is not made of
//! the flight recorder's rings, since these read no clock for the shortest calls; it has a log of its own, which communicators hand on to
//! those that are made of them, and which is written when the last is gone. A trace that nobody asked for beforehand is made of the rings
//! all the same, with what they have. Ranks' times are laid side by side by their hosts' clocks. NVTX is a header for C; `observe/nvtx.rs` is the program's
//! side of it: the tool's library is loaded where `NVTX_INJECTION64_PATH` names one, and fills a table of functions.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tracing::Span;
use tracing::level_filters::LevelFilter;

use super::trace::{TraceLog, Track};
use super::{CallReport, Observer};
use crate::base::event::{SUBSCRIBER, caught};
use crate::call::Call;
use crate::call::algorithm::Algorithm;
use crate::error::{Error, Result};
use crate::flight::{self, Message};

/// Where spans and events of single calls go.
const CALL: &str = "collectives::call";

/// Whether `tracing` wants to hear of calls. One load where it wants less.
#[inline]
fn is_traced() -> bool {
    LevelFilter::current() == LevelFilter::TRACE && is_call_traced()
}

#[cold]
fn is_call_traced() -> bool {
    caught(SUBSCRIBER, || tracing::enabled!(target: CALL, tracing::Level::TRACE)).unwrap_or_default()
}

/// What a call moves, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    pub(crate) bytes: usize,
    pub(crate) algorithm: Option<Algorithm>,
}

/// Who listens to one communicator. Everything that makes calls has a copy, with the flag beside it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observers {
    watch: Option<Arc<Watch>>,
    /// Whether somebody listens, apart from `tracing`.
    is_wanted: bool,
}

impl Observers {
    pub(crate) fn new(watch: Watch) -> Self {
        Self { is_wanted: watch.is_wanted(), watch: Some(Arc::new(watch)) }
    }

    /// Who is to be told of a call; `None`, after two loads, where nobody listens.
    #[inline]
    pub(crate) fn watch(&self) -> Option<&Watch> {
        if self.is_wanted || is_traced() { self.watch.as_deref() } else { None }
    }
}

/// One communicator, for those who listen.
#[derive(Debug)]
pub(crate) struct Watch {
    communicator: String,
    rank: usize,
    world_size: usize,
    observer: Option<Arc<dyn Observer>>,
    /// The log, which communicators hold and handles that outlive them do not, and the number by which it knows the communicator.
    trace: Option<(Weak<TraceLog>, u32)>,
    #[cfg(feature = "cuda")]
    nvtx: Option<&'static super::nvtx::Nvtx>,
}

impl Watch {
    /// The watch of a communicator. `injection` is the library of a tool that wants NVTX ranges.
    pub(crate) fn new(
        communicator: &str,
        (rank, world_size): (usize, usize),
        observer: Option<Arc<dyn Observer>>,
        log: Option<&Arc<TraceLog>>,
        injection: Option<&Path>,
    ) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = injection;
        Self {
            communicator: communicator.to_owned(),
            rank,
            world_size,
            observer,
            trace: log.map(|log| (Arc::downgrade(log), log.admit(communicator))),
            #[cfg(feature = "cuda")]
            nvtx: injection.and_then(super::nvtx::Nvtx::get),
        }
    }

    /// Whether anybody listens, apart from `tracing`.
    fn is_wanted(&self) -> bool {
        #[cfg(feature = "cuda")]
        if self.nvtx.is_some() {
            return true;
        }
        self.observer.is_some() || self.trace.is_some()
    }

    /// A collective of the host, or of the device.
    pub(crate) fn call(&self, call: &Call, backend: flight::Backend, moved: Moved) -> CallReport<'_> {
        let report = CallReport::of_call(&self.communicator, (self.rank, self.world_size), call);
        // On a device the number is not the one by which ranks compare calls.
        let sequence = report.sequence.filter(|_| backend == flight::Backend::Host);
        CallReport { backend, sequence, bytes: moved.bytes as u64, algorithm: moved.algorithm, ..report }
    }

    /// A message.
    pub(crate) fn message(&self, message: &Message, backend: flight::Backend, bytes: usize) -> CallReport<'_> {
        let report = CallReport::of_message(&self.communicator, (self.rank, self.world_size), message);
        CallReport { backend, bytes: bytes as u64, ..report }
    }

    /// Runs a call, inside a span and a range, and tells how it ended; also where it panics.
    pub(crate) fn around<R>(&self, report: CallReport<'_>, track: Track, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let _entered = Entered::new(&report);
        #[cfg(feature = "cuda")]
        let _range = self.nvtx.map(|nvtx| nvtx.range(&report));
        let began = Instant::now();
        let ended = catch_unwind(AssertUnwindSafe(run));
        let elapsed = began.elapsed();
        let panicked = || Error::argument(report.kind.name(), "it panicked: a custom op did");
        let panic = ended.as_ref().err().map(|_| panicked());
        let error = panic.as_ref().or_else(|| ended.as_ref().ok().and_then(|result| result.as_ref().err()));
        self.tell(&CallReport { elapsed, error, ..report.clone() }, began, track);
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Tells of a call that went on without anybody around it, and is over now.
    pub(crate) fn ended(&self, report: CallReport<'_>, elapsed: Duration, error: Option<&Error>, track: Track) {
        let report = CallReport { elapsed, error, ..report };
        let now = Instant::now();
        let _entered = Entered::new(&report);
        self.tell(&report, now.checked_sub(elapsed).unwrap_or(now), track);
    }

    /// Tells everyone, whatever the others do.
    fn tell(&self, report: &CallReport<'_>, began: Instant, track: Track) {
        let (elapsed_us, bandwidth, result) = (report.elapsed.as_secs_f64() * 1e6, report.bandwidth(), report.result());
        caught(SUBSCRIBER, || match report.error {
            None => tracing::trace!(target: CALL, elapsed_us, bandwidth, result, "ended"),
            Some(error) => tracing::trace!(target: CALL, elapsed_us, bandwidth, result, %error, "failed"),
        });
        if let Some((log, communicator)) = &self.trace
            && let Some(log) = log.upgrade()
        {
            log.add(*communicator, track, began, report);
        }
        if let Some(observer) = &self.observer {
            caught("the observer", || observer.call_ended(report));
        }
    }
}

/// A call's span, which this thread is in. What a subscriber does when it hears of any of it ends nothing.
struct Entered(Span);

impl Entered {
    fn new(report: &CallReport<'_>) -> Self {
        let span = caught(SUBSCRIBER, || span(report)).unwrap_or_else(Span::none);
        caught(SUBSCRIBER, || span.with_subscriber(|(id, subscriber)| subscriber.enter(id)));
        Self(span)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        caught(SUBSCRIBER, || self.0.with_subscriber(|(id, subscriber)| subscriber.exit(id)));
        let span = std::mem::replace(&mut self.0, Span::none());
        caught(SUBSCRIBER, || drop(span));
    }
}

/// The span of a call.
fn span(report: &CallReport<'_>) -> Span {
    tracing::trace_span!(
        target: CALL,
        "call",
        communicator = report.communicator,
        rank = report.rank,
        world_size = report.world_size,
        backend = if report.backend == flight::Backend::Device { "device" } else { "host" },
        kind = report.kind.name(),
        sequence = report.sequence,
        op = report.op.as_deref(),
        dtype = &*report.element,
        count = report.count,
        bytes = report.bytes,
        root = report.root,
        peer = report.peer,
        tag = report.tag,
        algorithm = report.algorithm.map(Algorithm::name)
    )
}
