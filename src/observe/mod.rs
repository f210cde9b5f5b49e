//! What a communicator tells of its calls while they happen: to `tracing`, to counters, to a trace file, to NVIDIA's profilers.
//!
//! All of it is off until somebody listens. What a call then costs is one load of a flag of the communicator's and one of `tracing`'s
//! level. (The [flight recorder](crate::FlightRecorder), which keeps the last calls for when one hangs, is another matter: it is on, and
//! reads no clock where that would cost something.)
//!
//! # `tracing`
//!
//! | target | level | what |
//! | --- | --- | --- |
//! | `collectives::call` | TRACE | span `call`, around each call |
//! | `collectives::call` | TRACE | event in that span, at the end of the call |
//! | `collectives::call` | WARN | event: a call failed; DEBUG where it was refused since the communicator had ended |
//! | `collectives::life` | INFO | events: a job's communicator is ready, its device plane is; abort, shrink; the trace is written |
//! | `collectives::life` | DEBUG | events: split, close, drop |
//! | `collectives::…` | WARN, DEBUG | waits that get long, links that break, unproven connections at the recovery listener |
//!
//! | of | fields |
//! | --- | --- |
//! | the span | `communicator` `rank` `world_size` `plane` `kind` `sequence` `op` `dtype` `count` `bytes` `root` `peer` `tag` `algorithm` |
//! | its event | `elapsed_us` `bandwidth` (10⁹ B/s) `result`, and `error` where it failed |
//! | failures | `communicator` `rank` `result` `error` |
//! | ready | `communicator` `rank` `world_size` `wiring`, and since the beginning `met_ms` `linked_ms` `ready_ms` |
//! | the rest of life | `communicator` `rank`; a split also `child` `world_size` |
//!
//! `kind` is the method's name (`send` and `recv` for messages of every kind), `plane` `host` or `device`, `result` `ok`, `timeout`,
//! `peer_lost`, `mismatch`, `aborted`, `poisoned`, `unsupported` or `error`; the rest is described at [`CallReport`]. Fields that a call
//! does not have are left out. So `RUST_LOG=collectives::call=trace` shows each call and how it ended, and `RUST_LOG=collectives=info`
//! failures, stalls and starts. A call that is made of others (an object collective, a split) shows those. A message in the background has its span
//! when it has ended.
//!
//! # Counters
//!
//! [`Config::observer`](crate::Config::observer) is told of every call when it has ended. With plain atomics:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
//! use collectives::{Communicator, ReduceOp, observe::CallReport};
//!
//! let (calls, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
//! let (count_calls, count_bytes) = (Arc::clone(&calls), Arc::clone(&bytes));
//! let observer = move |call: &CallReport<'_>| {
//!     if call.kind == "all_reduce" && call.error.is_none() {
//!         count_calls.fetch_add(1, Relaxed);
//!         count_bytes.fetch_add(call.bytes, Relaxed);
//!     }
//! };
//! Communicator::builder().observer(observer).run_local(2, |comm| comm.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum))?;
//! assert_eq!((calls.load(Relaxed), bytes.load(Relaxed)), (2, 64));
//! # Ok::<(), collectives::Error>(())
//! ```
//!
//! With the `metrics` crate, which is the program's dependency and not this crate's:
//!
//! ```
//! use collectives::{Communicator, observe::CallReport};
//!
//! fn measure(call: &CallReport<'_>) {
//!     let labels = [("kind", call.kind), ("result", call.result())];
//!     metrics::counter!("collectives_calls_total", &labels).increment(1);
//!     metrics::counter!("collectives_bytes_total", &labels).increment(call.bytes);
//!     metrics::histogram!("collectives_call_seconds", &labels).record(call.elapsed.as_secs_f64());
//! }
//!
//! Communicator::builder().observer(measure).run_local(2, |comm| comm.barrier())?;
//! # Ok::<(), collectives::Error>(())
//! ```
//!
//! # A trace file
//!
//! `COLLECTIVES_TRACE=FOLDER` (or [`Config::trace_dir`](crate::Config::trace_dir)) has every rank write what its calls took as
//! `trace-ID-rankR.json` when its communicators are gone; [`Communicator::write_trace`](crate::Communicator::write_trace) writes it at any
//! time. A process that crashes, is killed, or leaves by `std::process::exit` while it has communicators writes none: where that is what is
//! to be looked into, call `write_trace` beforehand, or read the [flight recorder](crate::FlightRecorder). Perfetto and `chrome://tracing` open these files. `collperf trace FOLDER -o FILE` makes one of those of all ranks, put in line by
//! the hosts' clocks; `collperf COLLECTIVE --trace FILE` does that for what it measures. A process of the trace is a rank, and has a track
//! each for collectives, messages and device calls of each communicator.
//!
//! # NVTX
//!
//! Under `nsys profile`, or any other tool that sets `NVTX_INJECTION64_PATH`, calls are ranges in the domain `collectives` (feature
//! `cuda`). Without such a tool nothing is loaded. Ranges of device calls cover their queueing, as NCCL's own do; calls of a
//! group, and messages in the background, have none.

mod report;
mod trace;
mod watch;

#[cfg(feature = "cuda")]
mod nvtx;

pub use report::{CallReport, Observer};

pub(crate) use trace::TraceLog;
pub(crate) use trace::Track;
pub(crate) use watch::{Moved, Observers, Watch};

/// Where events go that are not of one call.
pub(crate) const LIFE: &str = "collectives::life";
