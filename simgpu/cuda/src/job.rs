//! The work of streams.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::checker::{Record, Verb};
use crate::clock::Stamp;
use crate::code::Code;
use crate::module::Launch;
use crate::state::Handle;

/// A point in a stream: the number of its jobs that are over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) stream: Handle,
    pub(crate) position: u64,
}

impl Ticket {
    pub(crate) fn same(self, other: Ticket) -> bool {
        (self.stream, self.position) == (other.stream, other.position)
    }
}

/// A function of the caller, with its argument.
#[derive(Clone, Copy)]
pub(crate) struct HostFunction {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    pub(crate) data: *mut c_void,
}

// SAFETY: the caller of `cuLaunchHostFunc` promises that both may be used on a thread of the driver.
unsafe impl Send for HostFunction {}
// SAFETY: as above.
unsafe impl Sync for HostFunction {}

#[derive(Clone)]
pub(crate) enum Work {
    /// Does nothing; serves only to wait or to be waited for.
    Nothing,
    /// Stores the time of an event.
    Clock(Arc<OnceLock<Instant>>),
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// From a copy of memory that the caller may have changed since.
    Upload {
        to: u64,
        from: Arc<[u8]>,
    },
    /// `count` elements of `width` bytes.
    Fill {
        to: u64,
        element: [u8; 4],
        width: usize,
        count: usize,
    },
    Call(HostFunction),
    Kernel(Arc<Launch>),
    /// A node of a graph that records an event at each launch of the graph.
    Record(Handle),
    /// A node of a graph that waits for the last record of an event.
    Await(Handle),
    Free {
        start: u64,
    },
    /// As planted by a test.
    Fail(Code),
}

/// A range of bytes that a job uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) verb: Verb,
    /// Whether the driver has to know this memory; otherwise it may be plain host memory.
    pub(crate) known: bool,
}

impl Span {
    pub(crate) fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// A request to a stream: one node of a graph, or a separate job.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) work: Work,
    /// The function of the driver or the kernel that it comes from.
    pub(crate) what: Arc<str>,
    /// The memory that it uses, as far as it is known in advance.
    pub(crate) spans: Vec<Span>,
}

/// A task with its position in the order of all.
pub(crate) struct Step {
    pub(crate) work: Work,
    pub(crate) stamp: Stamp,
    /// The task and the stream.
    pub(crate) what: Arc<str>,
    pub(crate) spans: Vec<Span>,
}

impl Step {
    pub(crate) fn record(&self, span: &Span) -> Record {
        let (stamp, what) = (self.stamp.clone(), self.what.clone());
        Record { start: span.start, end: span.end(), verb: span.verb, stamp, what, library: None, beside: Arc::default() }
    }
}

/// The work that a stream runs before it goes on: one step, or those of a graph.
pub(crate) struct Job {
    pub(crate) number: u64,
    pub(crate) waits: Vec<Ticket>,
    pub(crate) steps: Vec<Step>,
    /// User objects that live until the job is over.
    pub(crate) holds: Vec<Handle>,
}
