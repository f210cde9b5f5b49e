//! Live metrics as OpenMetrics text: in a file for each process, which a collector such as Prometheus's node exporter reads,
//! or at a port of each process, which Prometheus itself asks.
//!
//! With [`Config::metrics_dir`](crate::Config::metrics_dir) or [`Config::metrics_address`](crate::Config::metrics_address),
//! each communicator gets an observer that counts its calls (`counters.rs`), in addition to the program's own. A thread of
//! the process writes the file every few seconds. The last communicator that ends writes it once more (`output.rs`), so
//! that the file of a short job is complete. For a port, the thread answers requests instead (`port.rs`, `request.rs`).
//!
//! Communicators of the same name and rank share their counters, because a metric must not occur twice. That also bounds
//! the counters of a program that makes communicators again and again.

mod counters;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod output;
mod port;
mod request;
mod text;

use std::fmt;
use std::sync::Arc;

use crate::base::event;
use crate::flight::Flight;
use crate::observe::{CallReport, Observer};

use counters::Counters;
use output::Output;
pub(crate) use output::Sink;
pub(crate) use port::Place;
pub(crate) use text::Group;

/// The observer of one communicator: counts each call, and passes it on to the program's observer.
pub(crate) struct Metered {
    counters: Arc<Counters>,
    output: Arc<Output>,
    /// The program's observer.
    next: Option<Arc<dyn Observer>>,
}

impl Metered {
    /// Begins to keep metrics of a communicator.
    pub(crate) fn new((sink, place): (Sink, Place), group: Group, flight: &Arc<Flight>, next: Option<Arc<dyn Observer>>) -> Self {
        let output = Output::of_process(sink, place);
        let counters = output.admit(group, Arc::downgrade(flight));
        Self { counters, output, next }
    }
}

impl Observer for Metered {
    fn call_ended(&self, call: &CallReport<'_>) {
        self.counters.count(call);
        if let Some(next) = &self.next {
            next.call_ended(call);
        }
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.output.leave();
        // The drop of the program's observer is the program's code.
        if let Some(next) = self.next.take() {
            event::caught("the destructor of an observer", move || drop(next));
        }
    }
}

impl fmt::Debug for Metered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metered").finish_non_exhaustive()
    }
}
