//! Reports a communicator's calls while they happen: to `tracing`, to counters, to a trace file, and to NVIDIA's
//! profilers.
//!
//! Calls are reported only if something listens. Otherwise, each call only loads one flag of the communicator and the
//! `tracing` level. The [flight recorder](crate::flight::Recorder) is separate: it keeps the last calls in case one
//! hangs. It is on by default, and reads no clock when this would slow a call down.
//!
//! # `tracing`
//!
//! | target | level | what |
//! | --- | --- | --- |
//! | `collectives::call` | TRACE | span `call`, around each call |
//! | `collectives::call` | TRACE | event in that span, at the end of the call |
//! | `collectives::call` | WARN | event: a call failed; DEBUG if it was refused because the communicator had ended |
//! | `collectives::life` | INFO | events: a job's communicator is ready, its device backend is ready; abort, shrink; the trace is written |
//! | `collectives::life` | DEBUG | events: split, close, drop |
//! | `collectives::…` | WARN, DEBUG | long waits, broken links, connections to the recovery listener without a proof |
//!
//! | record | fields |
//! | --- | --- |
//! | the span | `communicator` `rank` `world_size` `backend` `kind` `sequence` `op` `dtype` `count` `bytes` `root` `peer` `tag` `algorithm` |
//! | its event | `elapsed_us` `bandwidth` (10⁹ B/s) `result`, and `error` if it failed |
//! | failures | `communicator` `rank` `result` `error` |
//! | ready | `communicator` `rank` `world_size` `wiring`, and times since the start: `met_ms` `linked_ms` `ready_ms` |
//! | other life events | `communicator` `rank`; a split also `child` `world_size` |
//!
//! `kind` is the method's name (`send` and `recv` for all messages), and `backend` is `host` or `device`. `result` is
//! `ok`, `timeout`, `peer_lost`, `mismatch`, `aborted`, `poisoned`, `unsupported` or `error`. [`CallReport`]
//! describes the other fields. Fields that do not apply to a call are left out.
//!
//! `RUST_LOG=collectives::call=trace` shows each call and its outcome. `RUST_LOG=collectives=info` shows failures,
//! stalls and starts.
//!
//! A call that consists of other calls (an object collective, a split, a tagged or monitored barrier) is reported as
//! those calls. The crate's own messages have tags from 2⁶³ on. The span of a background message is created when the
//! message has ended.
//!
//! # Counters
//!
//! [`Config::observer`](crate::Config::observer) is called at the end of every call. An example with plain atomics:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
//! use collectives::{Collective, Communicator, ReduceOp, observe::CallReport};
//!
//! let (calls, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
//! let (count_calls, count_bytes) = (Arc::clone(&calls), Arc::clone(&bytes));
//! let observer = move |call: &CallReport<'_>| {
//!     if call.kind == Collective::AllReduce && call.error.is_none() {
//!         count_calls.fetch_add(1, Relaxed);
//!         count_bytes.fetch_add(call.bytes, Relaxed);
//!     }
//! };
//! let builder = Communicator::builder().configure(|config| config.observer = Some(Arc::new(observer)));
//! builder.run_local(2, |comm| comm.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum))?;
//! assert_eq!((calls.load(Relaxed), bytes.load(Relaxed)), (2, 64));
//! # Ok::<(), collectives::Error>(())
//! ```
//!
//! An example with the crate `metrics`, as a dependency of your program:
//!
//! ```
//! use std::sync::Arc;
//! use collectives::{Communicator, observe::CallReport};
//!
//! fn measure(call: &CallReport<'_>) {
//!     let labels = [("kind", call.kind.name()), ("result", call.result())];
//!     metrics::counter!("collectives_calls_total", &labels).increment(1);
//!     metrics::counter!("collectives_bytes_total", &labels).increment(call.bytes);
//!     metrics::histogram!("collectives_call_seconds", &labels).record(call.elapsed.as_secs_f64());
//! }
//!
//! let builder = Communicator::builder().configure(|config| config.observer = Some(Arc::new(measure)));
//! builder.run_local(2, |comm| comm.barrier())?;
//! # Ok::<(), collectives::Error>(())
//! ```
//!
//! # A trace file
//!
//! With `COLLECTIVES_TRACE=FOLDER` (or [`Config::trace_dir`](crate::Config::trace_dir)), every rank writes the times of
//! its calls to `trace-ID-rankR.json` once its communicators have been dropped.
//! [`Communicator::write_trace`](crate::Communicator::write_trace) writes the trace at any time. A process writes no
//! trace if it crashes, is killed, or calls `std::process::exit` while it has communicators. To examine such a process,
//! call `write_trace` before its end, or read the [flight recorder](crate::flight::Recorder).
//!
//! Perfetto and `chrome://tracing` open these files. `collperf trace FOLDER -o FILE` merges the files of all ranks and
//! aligns them by the hosts' clocks. `collperf COLLECTIVE --trace FILE` writes such a merged file for the calls that it
//! measures. Each rank is a process of the trace, with separate tracks for the collectives, messages and device calls
//! of each communicator.
//!
//! # NVTX
//!
//! Under `nsys profile`, or any other tool that sets `NVTX_INJECTION64_PATH`, calls appear as ranges in the domain
//! `collectives` (feature `cuda`). Without such a tool, nothing is loaded. The range of a device call covers only the
//! time in which it is queued, as in NCCL. Calls in a group, and background messages, have no range.

#[cfg(feature = "cuda")]
mod nvtx;
mod trace;
mod watch;

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::call::algorithm::Algorithm;
use crate::call::element::TypeTag;
use crate::call::op::ReduceOp;
use crate::call::{Call, Collective};
use crate::error::Error;
use crate::flight::{self, Message};

pub use crate::call::CallKind;
pub(crate) use trace::{TraceLog, Track};
pub(crate) use watch::{Moved, Observers, Watch};

/// The target of events that do not belong to one call.
pub(crate) const LIFE: &str = "collectives::life";

/// A call that has ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CallReport<'a> {
    /// The communicator's name, which is the same on all its ranks: `world`, or the name of its parent and a
    /// description of the split.
    pub communicator: &'a str,
    /// This rank.
    pub rank: usize,
    /// The number of ranks of the communicator.
    pub world_size: usize,
    /// The backend that ran the call.
    pub backend: flight::Backend,
    /// The collective, or `send` or `recv` for a message.
    pub kind: CallKind,
    /// The number by which ranks compare their collectives on the host; `None` for other calls.
    pub sequence: Option<u64>,
    /// The reduction op: `sum`, `avg`, `custom op #5d3f21`.
    pub op: Option<Cow<'static, str>>,
    /// The element type: `f32`, `[u8; 16]`, `plain data of 12 B`.
    pub element: Cow<'static, str>,
    /// The number of elements in each block, in the whole vector, or in the message, depending on the kind of call. It
    /// is 0 if the number may differ between ranks.
    pub count: u64,
    /// The number of bytes of the larger of this rank's two buffers.
    pub bytes: u64,
    /// The root, if the call has one.
    pub root: Option<usize>,
    /// The other end of a message; `None` for a receive from any rank.
    pub peer: Option<usize>,
    /// The tag of a message. The crate's own messages have tags from 2⁶³ on.
    pub tag: Option<u64>,
    /// The algorithm of a collective on the host, as [`Communicator::algorithm`](crate::Communicator::algorithm)
    /// returns it. `None` for messages and for device calls.
    pub algorithm: Option<Algorithm>,
    /// The time from the start of the call to its return. For a background message, the time until the message was
    /// complete. For a device call, the time until the call was queued.
    pub elapsed: Duration,
    /// The error, if the call failed.
    pub error: Option<&'a Error>,
}

impl CallReport<'_> {
    /// Returns the outcome as a word that can serve as a label: `ok`, `timeout`, `peer_lost`, `mismatch`, `aborted`,
    /// `poisoned`, `unsupported`, or `error` for any other error.
    #[must_use]
    pub fn result(&self) -> &'static str {
        self.error.map_or("ok", Error::label)
    }

    /// Returns [`bytes`](Self::bytes) divided by [`elapsed`](Self::elapsed), in 10⁹ bytes per second.
    #[must_use]
    pub fn bandwidth(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds == 0.0 { 0.0 } else { self.bytes as f64 / seconds / 1e9 }
    }

    /// Describes a collective of `communicator` that has not begun.
    fn of_call<'a>(communicator: &'a str, (rank, world_size): (usize, usize), call: &Call) -> CallReport<'a> {
        CallReport {
            communicator,
            rank,
            world_size,
            backend: flight::Backend::Host,
            kind: call.call_kind(),
            sequence: Some(call.sequence),
            op: op(call),
            element: element(&call.element),
            count: if call.kind == Collective::Barrier { 0 } else { call.count },
            bytes: 0,
            root: call.root.map(|root| root as usize),
            peer: None,
            tag: None,
            algorithm: None,
            elapsed: Duration::ZERO,
            error: None,
        }
    }

    /// Describes a message of `communicator` that has not begun.
    fn of_message<'a>(communicator: &'a str, (rank, world_size): (usize, usize), message: &Message) -> CallReport<'a> {
        CallReport {
            communicator,
            rank,
            world_size,
            backend: flight::Backend::Host,
            kind: if message.sends { CallKind::Send } else { CallKind::Recv },
            sequence: None,
            op: None,
            element: element(&message.element),
            count: message.count,
            bytes: 0,
            root: None,
            peer: message.peer,
            tag: Some(message.tag),
            algorithm: None,
            elapsed: Duration::ZERO,
            error: None,
        }
    }
}

/// Returns the name of the reduction op, without an allocation for built-in ops.
fn op(call: &Call) -> Option<Cow<'static, str>> {
    match ReduceOp::ALL.iter().find(|op| u64::from(op.code()) == call.op) {
        Some(op) => Some(Cow::Borrowed(op.name())),
        None => call.op_name().map(Cow::Owned),
    }
}

/// Returns a type's name, without an allocation for scalars.
fn element(element: &TypeTag) -> Cow<'static, str> {
    match element {
        TypeTag::Scalar(dtype) => Cow::Borrowed(dtype.name()),
        other => Cow::Owned(other.to_string()),
    }
}

/// A callback that receives every call that has ended; see [`Config::observer`](crate::Config::observer). Every
/// `Fn(&CallReport<'_>)` implements this trait.
pub trait Observer: Send + Sync {
    /// Receives a call that has ended, with or without an error.
    ///
    /// This method runs on the thread that made the call, or that ran it in the background, before that thread
    /// continues. A background message can be reported on any thread that advances the communicator's messages. Its
    /// [`Work::wait`](crate::Work::wait) may already have returned by then. Once the communicator has been dropped, all
    /// its calls have been reported.
    ///
    /// The observer may use [`AbortHandle::abort`](crate::AbortHandle::abort), [`flight::Recorder`] and other
    /// communicators. It must not make calls on the communicator of the reported call, because that communicator is
    /// still inside the call. This crate holds no lock while the observer runs.
    ///
    /// Keep the observer short, because the call does not return before the observer returns. While an observer runs
    /// for a background call, all later calls of the communicator wait, and messages advance only while other threads
    /// wait for messages. An observer that never returns blocks its thread permanently. A drop of the communicator
    /// waits a few seconds for the observer. A panic in an observer is caught, and reported to `tracing`.
    ///
    /// These rules also apply to subscribers of `tracing`.
    fn call_ended(&self, call: &CallReport<'_>);
}

impl<F: Fn(&CallReport<'_>) + Send + Sync> Observer for F {
    fn call_ended(&self, call: &CallReport<'_>) {
        self(call);
    }
}

impl fmt::Debug for dyn Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
