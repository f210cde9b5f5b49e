//! One call on device memory, checked and ready to be queued.

use crate::call::{BlockLayout, Call};
use crate::element::TypeTag;
use crate::op::{DeviceCode, ReduceOp};

/// A checked collective on device memory.
#[derive(Debug)]
pub(crate) struct Job {
    /// What the ranks must agree on; the sequence number is [`DevicePlane::number`](crate::device::DevicePlane::number)'s.
    pub(crate) call: Call,
    /// Device address of what is read, 0 where nothing is.
    pub(crate) source: u64,
    /// How much of it, in bytes.
    pub(crate) source_len: usize,
    /// Device address of what is written, 0 where nothing is.
    pub(crate) destination: u64,
    /// How much of it, in bytes.
    pub(crate) destination_len: usize,
    /// How the bytes are shared out between ranks.
    pub(crate) layout: BlockLayout,
    /// The size of one element in bytes.
    pub(crate) element_bytes: usize,
    /// How elements are folded, for calls that reduce.
    pub(crate) reduction: Option<Reduction>,
    /// Whether the caller gave one buffer for both: then `source` and `destination` are that whole buffer.
    pub(crate) in_place: bool,
}

/// How elements are folded on a device.
#[derive(Debug, Clone)]
pub(crate) enum Reduction {
    /// By NCCL or one of our kernels. The element type is the call's.
    Builtin(ReduceOp),
    /// By a kernel of the caller's.
    User(DeviceCode),
}

/// One message to or from a peer, checked. NCCL knows no tags and no shorter messages: both ends name the same length, and one type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message {
    /// The other end.
    pub(crate) peer: usize,
    /// Whether this rank sends.
    pub(crate) sends: bool,
    /// Device address.
    pub(crate) address: u64,
    /// Length in bytes.
    pub(crate) bytes: usize,
    /// What it is made of.
    pub(crate) element: TypeTag,
}
