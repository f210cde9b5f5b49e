//! One collective on this rank, checked and ready to run.

#![expect(unsafe_code, reason = "a job points into buffers that its caller or its worker keeps alive")]

use crate::call::{BlockLayout, Call, Kind};
use crate::host::bools::NormalisedBools;
use crate::host::reduce::Kernel;
use crate::host::shm::MAX_ELEMENT_BYTES;

/// The caller's two buffers, in bytes; they may be the same memory. A null source has length 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) source: *const u8,
    pub(crate) source_len: usize,
    pub(crate) destination: *mut u8,
    pub(crate) destination_len: usize,
}

/// A checked collective.
#[derive(Debug)]
pub(crate) struct Job {
    /// What the ranks must agree on; the sequence number is set when it runs.
    pub(crate) call: Call,
    /// The caller's buffers.
    pub(crate) memory: Operands,
    /// How they are shared out.
    pub(crate) layout: BlockLayout,
    /// How elements are folded, for calls that reduce.
    pub(crate) kernel: Option<Kernel>,
    /// The size of one element in bytes.
    pub(crate) element_bytes: usize,
    /// Whether the caller gave one buffer for both. A contribution that was multiplied first lies elsewhere all the same.
    pub(crate) in_place: bool,
    /// This rank's contribution after pre-multiplication; `memory.source` points into it.
    pub(crate) scaled: Option<Box<dyn std::any::Any + Send>>,
}

// SAFETY: the pointers of `memory` are followed by whoever runs the job, while their buffers are borrowed by its caller (a blocking call)
// or kept beside it by the background call (a started one); they hold `Send` elements (`Data: Send`). The rest is `Send`.
unsafe impl Send for Job {}

impl Job {
    /// Whether this folds elements that are too large for shared memory: these travel over links, also inside a host.
    pub(super) fn is_too_large_to_share(&self) -> bool {
        self.kernel.is_some() && self.element_bytes > MAX_ELEMENT_BYTES
    }

    /// The call in words, with this rank's own elements where the call itself has no count, or a digest.
    pub(super) fn in_words(&self, call: &Call) -> String {
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

    /// What makes truth values of whatever a run has written to the destination, once it is dropped.
    #[inline]
    pub(super) fn normalised(&self) -> NormalisedBools<'_> {
        let Operands { destination, destination_len, .. } = self.memory;
        // SAFETY: the destination is initialised and lent to the job alone for as long as there is one (it is made of an exclusive borrow,
        // and owned or borrowed on by whoever runs it), which the value borrows. What runs the job has no thread of its own, so it writes
        // nothing any more when its caller drops the value.
        unsafe { NormalisedBools::new(self.call.element, destination, destination_len) }
    }

    /// The buffers as plans and shared memory want them: where a block of one buffer is the other, that block alone.
    pub(super) fn narrowed(&self, rank: usize) -> Operands {
        let Operands { mut source, mut source_len, mut destination, mut destination_len } = self.memory;
        if !self.in_place {
            return self.memory;
        }
        let (offset, length) = self.layout.block(rank);
        match self.call.kind {
            Kind::AllGather | Kind::AllGatherV | Kind::Gather => {
                source = source.wrapping_add(offset);
                source_len = length;
            }
            Kind::ReduceScatter | Kind::ReduceScatterV | Kind::Scatter => {
                destination = destination.wrapping_add(offset);
                destination_len = length;
            }
            _ => {}
        }
        Operands { source, source_len, destination, destination_len }
    }

    /// The only rank's call: its contribution is the result.
    pub(super) fn run_alone(&self, rank: usize) {
        let Operands { source, source_len, destination, destination_len } = self.narrowed(rank);
        let length = source_len.min(destination_len);
        if length != 0 && !std::ptr::eq(source, destination) {
            // SAFETY: both buffers are valid for their lengths (they are made of borrows that live until the job has run). In place the only
            // rank's block is the whole, so they are the same, which was excluded; else they are two borrows, and apart.
            unsafe { std::ptr::copy_nonoverlapping(source, destination, length) };
        }
    }
}
