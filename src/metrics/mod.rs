//! Live metrics: a file of OpenMetrics text for each process, which a collector such as Prometheus's node exporter reads.
//!
//! With [`Config::metrics_dir`](crate::Config::metrics_dir), each communicator gets an observer that counts its calls
//! (`counters.rs`), in addition to the program's own. A thread of the process writes the file every few seconds, and
//! the last communicator that ends writes it once more (`file.rs`), so that the file of a short job is complete.
//!
//! Communicators of the same name and rank share their counters, because a metric must not occur twice. That also bounds
//! the counters of a program that makes communicators again and again.

mod counters;
mod file;
mod text;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::base::event;
use crate::flight::Flight;
use crate::observe::{CallReport, Observer};

use counters::Counters;
use file::Output;
pub(crate) use text::Group;

/// The observer of one communicator: counts each call, and passes it on to the program's observer.
pub(crate) struct Metered {
    counters: Arc<Counters>,
    output: Arc<Output>,
    /// The program's observer.
    next: Option<Arc<dyn Observer>>,
}

impl Metered {
    /// Begins to keep metrics of a communicator in a file in `folder`.
    pub(crate) fn new(folder: PathBuf, group: Group, flight: &Arc<Flight>, next: Option<Arc<dyn Observer>>) -> Self {
        let output = Output::of_process(folder);
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
