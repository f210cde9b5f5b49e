//! The observers of one communicator, and the reports of calls to them.
//!
//! # Design
//!
//! `observe/` reports calls while they happen. Everything that makes calls holds the communicator's `Observers`: a
//! `Watch`, and a flag that is set if there is an observer, a trace or an NVTX tool. When a call begins
//! (`HostBackend::run`, the progress engine, `Communicator::queue`), it checks the flag and the `tracing` level, one
//! load each. If something listens, the call takes a cold path: clock, span, range, the call itself, report.
//!
//! The trace file has its own log. It does not come from the rings of the flight recorder, because the rings have no
//! times for the shortest calls. A communicator passes its log on to the communicators that are made from it. The log
//! is written when the last of these communicators is dropped. If a trace was not requested beforehand, it is made from
//! the rings, with the times that the rings contain. The times of several ranks are aligned by their hosts' clocks.
//!
//! `observe/nvtx.rs` does for this crate what the header NVTX does for C programs: it loads the tool's library if
//! `NVTX_INJECTION64_PATH` names one, and the tool fills a table of functions.

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

/// The target of spans and events of single calls.
const CALL: &str = "collectives::call";

/// Whether a `tracing` subscriber wants reports of calls. Costs one load if the level excludes them.
#[inline]
fn is_traced() -> bool {
    LevelFilter::current() == LevelFilter::TRACE && is_call_traced()
}

#[cold]
fn is_call_traced() -> bool {
    caught(SUBSCRIBER, || tracing::enabled!(target: CALL, tracing::Level::TRACE)).unwrap_or_default()
}

/// The bytes that a call moves, and the algorithm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    pub(crate) bytes: usize,
    pub(crate) algorithm: Option<Algorithm>,
}

/// The observers of one communicator. Everything that makes calls has a copy, with the flag next to it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observers {
    watch: Option<Arc<Watch>>,
    /// Whether anything other than `tracing` listens.
    is_wanted: bool,
}

impl Observers {
    pub(crate) fn new(watch: Watch) -> Self {
        Self { is_wanted: watch.is_wanted(), watch: Some(Arc::new(watch)) }
    }

    /// Returns the watch to report a call to; `None`, after two loads, if nothing listens.
    #[inline]
    pub(crate) fn watch(&self) -> Option<&Watch> {
        if self.is_wanted || is_traced() { self.watch.as_deref() } else { None }
    }
}

/// One communicator as its observers see it.
#[derive(Debug)]
pub(crate) struct Watch {
    communicator: String,
    rank: usize,
    world_size: usize,
    observer: Option<Arc<dyn Observer>>,
    /// The log, and the communicator's number in it. Weak, because the log belongs to the communicators, not to handles
    /// that outlive them.
    trace: Option<(Weak<TraceLog>, u32)>,
    #[cfg(feature = "cuda")]
    nvtx: Option<&'static super::nvtx::Nvtx>,
}

impl Watch {
    /// Creates the watch of a communicator. `log` is the trace, with the communicator's number in it. `injection` is the library of a tool that wants NVTX ranges.
    pub(crate) fn new(
        communicator: &str,
        (rank, world_size): (usize, usize),
        observer: Option<Arc<dyn Observer>>,
        log: Option<(&Arc<TraceLog>, u32)>,
        injection: Option<&Path>,
    ) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = injection;
        Self {
            communicator: communicator.to_owned(),
            rank,
            world_size,
            observer,
            trace: log.map(|(log, number)| (Arc::downgrade(log), number)),
            #[cfg(feature = "cuda")]
            nvtx: injection.and_then(super::nvtx::Nvtx::get),
        }
    }

    /// Whether anything other than `tracing` listens.
    fn is_wanted(&self) -> bool {
        #[cfg(feature = "cuda")]
        if self.nvtx.is_some() {
            return true;
        }
        self.observer.is_some() || self.trace.is_some()
    }

    /// Describes a collective on the host or on the device.
    pub(crate) fn call(&self, call: &Call, backend: flight::Backend, moved: Moved) -> CallReport<'_> {
        let report = CallReport::of_call(&self.communicator, (self.rank, self.world_size), call);
        // On a device, this number is not the one by which ranks compare calls.
        let sequence = report.sequence.filter(|_| backend == flight::Backend::Host);
        CallReport { backend, sequence, bytes: moved.bytes as u64, algorithm: moved.algorithm, ..report }
    }

    /// Describes a message.
    pub(crate) fn message(&self, message: &Message, backend: flight::Backend, bytes: usize) -> CallReport<'_> {
        let report = CallReport::of_message(&self.communicator, (self.rank, self.world_size), message);
        CallReport { backend, bytes: bytes as u64, ..report }
    }

    /// Runs a call inside a span and a range, and reports its outcome, even if it panics.
    pub(crate) fn around<R>(&self, report: CallReport<'_>, track: Track, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let _entered = Entered::new(&report);
        #[cfg(feature = "cuda")]
        let _range = self.nvtx.map(|nvtx| nvtx.range(&report));
        let began = Instant::now();
        let ended = catch_unwind(AssertUnwindSafe(run));
        let elapsed = began.elapsed();
        let panic = ended.as_ref().err().map(|_| Error::OpPanicked { call: report.kind.name() });
        let error = panic.as_ref().or_else(|| ended.as_ref().ok().and_then(|result| result.as_ref().err()));
        self.tell(&CallReport { elapsed, error, ..report.clone() }, began, track);
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Reports a call that ran outside [`Watch::around`] and has now ended.
    pub(crate) fn ended(&self, report: CallReport<'_>, elapsed: Duration, error: Option<&Error>, track: Track) {
        let report = CallReport { elapsed, error, ..report };
        let now = Instant::now();
        let _entered = Entered::new(&report);
        self.tell(&report, now.checked_sub(elapsed).unwrap_or(now), track);
    }

    /// Reports a call to all observers; a panic in one does not affect the others.
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

/// A call's span, which this thread has entered. A panic in a subscriber is caught here.
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

/// Creates the span of a call.
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
