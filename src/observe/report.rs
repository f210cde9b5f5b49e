//! One call that has ended, as it is told to those who count.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::call::{Call, Kind};
use crate::element::TypeTag;
use crate::error::Error;
use crate::flight::{FlightPlane, Message};
use crate::op::ReduceOp;

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
    pub plane: FlightPlane,
    /// The call, as the method is named; `send` and `recv` for messages of every kind.
    pub kind: &'static str,
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
    /// For messages the tag.
    pub tag: Option<u64>,
    /// How it was done. On the host, as [`Communicator::algorithm`](crate::Communicator::algorithm) has it, or `message`; on devices `nccl`, with what this crate adds to it.
    pub algorithm: &'static str,
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
    pub(super) fn of_call<'a>(communicator: &'a str, (rank, world_size): (usize, usize), call: &Call) -> CallReport<'a> {
        CallReport {
            communicator,
            rank,
            world_size,
            plane: FlightPlane::Host,
            kind: call.kind.name(),
            sequence: Some(call.sequence),
            op: op(call),
            element: element(&call.element),
            count: if call.kind == Kind::Barrier { 0 } else { call.count },
            bytes: 0,
            root: call.root.map(|root| root as usize),
            peer: None,
            tag: None,
            algorithm: "",
            elapsed: Duration::ZERO,
            error: None,
        }
    }

    /// A message of `communicator`, which has not begun.
    pub(super) fn of_message<'a>(communicator: &'a str, (rank, world_size): (usize, usize), message: &Message) -> CallReport<'a> {
        CallReport {
            communicator,
            rank,
            world_size,
            plane: FlightPlane::Host,
            kind: if message.sends { "send" } else { "recv" },
            sequence: None,
            op: None,
            element: element(&message.element),
            count: message.count,
            bytes: 0,
            root: None,
            peer: message.peer,
            tag: Some(message.tag),
            algorithm: "message",
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
    /// [`FlightRecorder`](crate::FlightRecorder), other communicators; of the one that it is told of no calls, since one is under way. No
    /// lock of this crate's is held meanwhile.
    ///
    /// It should be short: as long as it takes, the call has not returned, or, where it was told in the background, the calls behind it
    /// wait, and messages go on only as far as others wait for them. One that never returns holds up its thread for good, and with it the
    /// drop of the communicator. A panic in it is caught, and told to `tracing`.
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
