//! What streams do.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::checker::{Record, Verb};
use crate::clock::Stamp;
use crate::code::Code;
use crate::module::Launch;
use crate::state::Handle;

/// A point in a stream: so many of its jobs are over.
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

/// A function of the caller's, with what it is given.
#[derive(Clone, Copy)]
pub(crate) struct HostFunction {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    pub(crate) data: *mut c_void,
}

// SAFETY: that both may be used on a thread of the driver is what the caller of `cuLaunchHostFunc` promises.
unsafe impl Send for HostFunction {}
// SAFETY: as above.
unsafe impl Sync for HostFunction {}

#[derive(Clone)]
pub(crate) enum Work {
    /// To wait, or to be waited for.
    Nothing,
    /// Takes the time of an event.
    Clock(Arc<OnceLock<Instant>>),
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// From memory that the caller may have changed since.
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
    /// A node of a graph that records an event whenever the graph is launched.
    Record(Handle),
    /// A node of a graph that waits for what an event recorded last.
    Await(Handle),
    Free {
        start: u64,
    },
    /// As planted by a test.
    Fail(Code),
}

/// Bytes that a job uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) verb: Verb,
    /// Whether the driver has to know this memory; else it may be plain memory of the host.
    pub(crate) known: bool,
}

impl Span {
    pub(crate) fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// What is asked of a stream: one node of a graph, or a job of its own.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) work: Work,
    /// The function of the driver or the kernel it comes from.
    pub(crate) what: Arc<str>,
    /// What it uses, as far as that is known beforehand.
    pub(crate) spans: Vec<Span>,
}

/// A task with its place in the order of all.
pub(crate) struct Step {
    pub(crate) work: Work,
    pub(crate) stamp: Stamp,
    /// Task and stream.
    pub(crate) what: Arc<str>,
    pub(crate) spans: Vec<Span>,
}

impl Step {
    pub(crate) fn record(&self, span: &Span) -> Record {
        let (stamp, what) = (self.stamp.clone(), self.what.clone());
        Record { start: span.start, end: span.end(), verb: span.verb, stamp, what, library: None, beside: Arc::default() }
    }
}

/// What a stream runs before it goes on: one step, or those of a graph.
pub(crate) struct Job {
    pub(crate) number: u64,
    pub(crate) waits: Vec<Ticket>,
    pub(crate) steps: Vec<Step>,
    /// User objects that live until the job is over.
    pub(crate) holds: Vec<Handle>,
}
