//! One checked collective with its buffers, ready for the plane on whose memory they are. The planes name buffers in different ways, and
//! fold in different ways; the rest is the same for both.

#![expect(unsafe_code, reason = "a job is sent to the thread that runs it, with the addresses of its buffers")]

use std::fmt;

use crate::call::{BlockLayout, Call, Collective};

/// How a plane names memory.
pub(crate) trait Address: Copy + fmt::Debug {
    /// The address so many bytes further on.
    fn advanced(self, bytes: usize) -> Self;
}

impl Address for *const u8 {
    fn advanced(self, bytes: usize) -> Self {
        self.wrapping_add(bytes)
    }
}

impl Address for *mut u8 {
    fn advanced(self, bytes: usize) -> Self {
        self.wrapping_add(bytes)
    }
}

/// In the memory of a device.
impl Address for u64 {
    fn advanced(self, bytes: usize) -> Self {
        self.wrapping_add(bytes as u64)
    }
}

/// The caller's two buffers, in bytes; they may be the same memory. One that is not there has length 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<S, D> {
    /// What is read.
    pub(crate) source: S,
    pub(crate) source_len: usize,
    /// What is written.
    pub(crate) destination: D,
    pub(crate) destination_len: usize,
}

// SAFETY: they are addresses, which are not followed here. Whoever runs a job follows them, while its caller borrows the buffers (a blocking
// call) or the call owns them beside the job (a started one); what is in them is `Send` (`Data: Send`).
unsafe impl<S: Address, D: Address> Send for Operands<S, D> {}

/// A checked collective, whose elements are folded by an `R`.
#[derive(Debug)]
pub(crate) struct Job<S, D, R> {
    /// What the ranks must agree on. The plane sets the sequence number.
    pub(crate) call: Call,
    /// The caller's buffers.
    pub(crate) memory: Operands<S, D>,
    /// How they are shared out between the ranks.
    pub(crate) layout: BlockLayout,
    /// How elements are folded, for calls that reduce.
    pub(crate) reduction: Option<R>,
    /// The size of one element in bytes.
    pub(crate) element_bytes: usize,
    /// Whether the caller gave one buffer for both: then `memory` has the whole of it twice, unless the contribution was multiplied first
    /// and so lies elsewhere.
    pub(crate) in_place: bool,
}

impl<S: Address, D: Address, R> Job<S, D, R> {
    /// The buffers as planes want them: where a block of one buffer is the other, that block alone.
    pub(crate) fn narrowed(&self, rank: usize) -> Operands<S, D> {
        let mut memory = self.memory;
        match self.call.kind {
            _ if !self.in_place => {}
            Collective::AllGather | Collective::AllGatherV | Collective::Gather => {
                let (offset, length) = self.layout.block(rank);
                (memory.source, memory.source_len) = (memory.source.advanced(offset), length);
            }
            Collective::ReduceScatter | Collective::ReduceScatterV | Collective::Scatter => {
                let (offset, length) = self.layout.block(rank);
                (memory.destination, memory.destination_len) = (memory.destination.advanced(offset), length);
            }
            _ => {}
        }
        memory
    }

    /// The root, for calls that have one.
    #[cfg(feature = "cuda")]
    pub(crate) fn root(&self) -> usize {
        self.call.root.unwrap_or_default() as usize
    }

    /// How many bytes it moves, as those who listen are told.
    #[cfg(feature = "cuda")]
    pub(crate) fn bytes(&self) -> usize {
        self.memory.source_len.max(self.memory.destination_len)
    }

    /// A call in words, with this rank's own elements where the call itself has no count, or a digest.
    pub(crate) fn in_words(&self, call: &Call) -> String {
        let elements = |bytes: usize| bytes / self.element_bytes.max(1);
        let sum = |blocks: &[usize]| elements(blocks.iter().sum());
        match &self.layout {
            BlockLayout::Equal(_) => call.to_string(),
            BlockLayout::Blocks(blocks) => call.with_amount(format_args!("count {} in {} blocks", sum(blocks), blocks.len())),
            BlockLayout::Own(bytes) => call.with_amount(format_args!("count {} on this rank", elements(*bytes))),
            BlockLayout::Pairs { send, receive } => {
                call.with_amount(format_args!("count {} to send and {} to receive", sum(send), sum(receive)))
            }
        }
    }
}
