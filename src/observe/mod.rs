//! What a communicator tells of its calls while they happen: to `tracing`, to counters, to a trace file, to NVIDIA's profilers.
//!
//! All of it is off until somebody listens. What a call then costs is one load of a flag of the communicator's and one of `tracing`'s
//! level. (The [flight recorder](crate::flight::Recorder), which keeps the last calls for when one hangs, is another matter: it is on, and
//! reads no clock where that would cost something.)
//!
//! # `tracing`
//!
//! | target | level | what |
//! | --- | --- | --- |
//! | `collectives::call` | TRACE | span `call`, around each call |
//! | `collectives::call` | TRACE | event in that span, at the end of the call |
//! | `collectives::call` | WARN | event: a call failed; DEBUG where it was refused since the communicator had ended |
//! | `collectives::life` | INFO | events: a job's communicator is ready, its device backend is; abort, shrink; the trace is written |
//! | `collectives::life` | DEBUG | events: split, close, drop |
//! | `collectives::…` | WARN, DEBUG | waits that get long, links that break, unproven connections at the recovery listener |
//!
//! | of | fields |
//! | --- | --- |
//! | the span | `communicator` `rank` `world_size` `backend` `kind` `sequence` `op` `dtype` `count` `bytes` `root` `peer` `tag` `algorithm` |
//! | its event | `elapsed_us` `bandwidth` (10⁹ B/s) `result`, and `error` where it failed |
//! | failures | `communicator` `rank` `result` `error` |
//! | ready | `communicator` `rank` `world_size` `wiring`, and since the beginning `met_ms` `linked_ms` `ready_ms` |
//! | the rest of life | `communicator` `rank`; a split also `child` `world_size` |
//!
//! `kind` is the method's name (`send` and `recv` for messages of every kind), `backend` `host` or `device`, `result` `ok`, `timeout`,
//! `peer_lost`, `mismatch`, `aborted`, `poisoned`, `unsupported` or `error`; the rest is described at [`CallReport`]. Fields that a call
//! does not have are left out. So `RUST_LOG=collectives::call=trace` shows each call and how it ended, and `RUST_LOG=collectives=info`
//! failures, stalls and starts. A call that is made of others (an object collective, a split, a tagged or monitored barrier) shows those; the crate's own messages have tags from 2⁶³ on. A message in the background has its span
//! when it has ended.
//!
//! # Counters
//!
//! [`Config::observer`](crate::Config::observer) is told of every call when it has ended. With plain atomics:
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
//! With the `metrics` crate, which is the program's dependency and not this crate's:
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
//! `COLLECTIVES_TRACE=FOLDER` (or [`Config::trace_dir`](crate::Config::trace_dir)) has every rank write what its calls took as
//! `trace-ID-rankR.json` when its communicators are gone; [`Communicator::write_trace`](crate::Communicator::write_trace) writes it at any
//! time. A process that crashes, is killed, or leaves by `std::process::exit` while it has communicators writes none: where that is what is
//! to be looked into, call `write_trace` beforehand, or read the [flight recorder](crate::flight::Recorder). Perfetto and `chrome://tracing` open these files. `collperf trace FOLDER -o FILE` makes one of those of all ranks, put in line by
//! the hosts' clocks; `collperf COLLECTIVE --trace FILE` does that for what it measures. A process of the trace is a rank, and has a track
//! each for collectives, messages and device calls of each communicator.
//!
//! # NVTX
//!
//! Under `nsys profile`, or any other tool that sets `NVTX_INJECTION64_PATH`, calls are ranges in the domain `collectives` (feature
//! `cuda`). Without such a tool nothing is loaded. Ranges of device calls cover their queueing, as NCCL's own do; calls of a
//! group, and messages in the background, have none.

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

/// Where events go that are not of one call.
pub(crate) const LIFE: &str = "collectives::life";

/// A call that has ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CallReport<'a> {
    /// The communicator's name, the same on all of its ranks: `world`, or what it was split from and how.
    pub communicator: &'a str,
    /// This rank.
    pub rank: usize,
    /// How many ranks the communicator has.
    pub world_size: usize,
    /// Where it ran.
    pub backend: flight::Backend,
    /// The collective, or which end of a message.
    pub kind: CallKind,
    /// For collectives of the host, the number by which ranks compare them.
    pub sequence: Option<u64>,
    /// What it reduces with: `sum`, `avg`, `custom op #5d3f21`.
    pub op: Option<Cow<'static, str>>,
    /// The element type: `f32`, `[u8; 16]`, `plain data of 12 B`.
    pub element: Cow<'static, str>,
    /// Elements in each block, of the whole vector, or of the message; 0 where ranks may differ.
    pub count: u64,
    /// Bytes of the larger of this rank's two buffers.
    pub bytes: u64,
    /// The root, where there is one.
    pub root: Option<usize>,
    /// For messages the other end; `None` for a receive from any rank.
    pub peer: Option<usize>,
    /// For messages the tag; from 2⁶³ on in the crate's own.
    pub tag: Option<u64>,
    /// How a collective of the host was done, as [`Communicator::algorithm`](crate::Communicator::algorithm) has it. `None` for messages, and on
    /// devices, where NCCL does it, with what this crate adds to it.
    pub algorithm: Option<Algorithm>,
    /// From the call until it returned; for messages in the background until they were done, and on devices until it was queued.
    pub elapsed: Duration,
    /// Why it failed.
    pub error: Option<&'a Error>,
}

impl CallReport<'_> {
    /// How it ended, in a word that is fit for a label: `ok`, `timeout`, `peer_lost`, `mismatch`, `aborted`, `poisoned`, `unsupported`, or
    /// `error` for anything else.
    #[must_use]
    pub fn result(&self) -> &'static str {
        self.error.map_or("ok", Error::label)
    }

    /// Bytes over time, in 10⁹ bytes per second.
    #[must_use]
    pub fn bandwidth(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds == 0.0 { 0.0 } else { self.bytes as f64 / seconds / 1e9 }
    }

    /// A collective of `communicator`, which has not begun.
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

    /// A message of `communicator`, which has not begun.
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

/// What a call reduces with, without an allocation for the ops that are built in.
fn op(call: &Call) -> Option<Cow<'static, str>> {
    match ReduceOp::ALL.iter().find(|op| u64::from(op.code()) == call.op) {
        Some(op) => Some(Cow::Borrowed(op.name())),
        None => call.op_name().map(Cow::Owned),
    }
}

/// A type's name, without an allocation for scalars.
fn element(element: &TypeTag) -> Cow<'static, str> {
    match element {
        TypeTag::Scalar(dtype) => Cow::Borrowed(dtype.name()),
        other => Cow::Owned(other.to_string()),
    }
}

/// Is told of calls; see [`Config::observer`](crate::Config::observer). Every `Fn(&CallReport<'_>)` is one.
pub trait Observer: Send + Sync {
    /// A call has ended, well or not. Runs on the thread that made the call, or the one that ran it in the background, before that thread
    /// goes on. A background message may be told of by any thread that moves messages on, of its communicator, and its
    /// [`Work`](crate::Work) may have been given back by then; all have been told when the communicator is dropped.
    ///
    /// It may call what any thread may: [`AbortHandle::abort`](crate::AbortHandle::abort),
    /// [`flight::Recorder`], other communicators; of the one that it is told of no calls, since one is under way. No
    /// lock of this crate's is held meanwhile.
    ///
    /// It should be short: as long as it takes, the call has not returned, or, where it was told in the background, the calls behind it
    /// wait, and messages go on only as far as others wait for them. One that never returns holds up its thread for good; the drop of the
    /// communicator waits for it for some seconds. A panic in it is caught, and told to `tracing`.
    /// All of this holds for subscribers of `tracing` too.
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
