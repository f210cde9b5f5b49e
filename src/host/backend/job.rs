//! Jobs of the host backend: a call on ordinary memory, named by pointers and folded by a kernel of the processor's.

#![expect(unsafe_code, reason = "a job points into buffers that its caller or its worker keeps alive")]

use std::any::Any;

use crate::call::job;
use crate::host::bools::NormalisedBools;
use crate::host::reduce::Kernel;
use crate::host::shm::MAX_ELEMENT_BYTES;

/// The caller's two buffers.
pub(crate) type Operands = job::Operands<*const u8, *mut u8>;

/// A checked collective on ordinary memory.
pub(crate) type Job = job::Job<*const u8, *mut u8, Reduction>;

/// How elements are folded.
#[derive(Debug)]
pub(crate) struct Reduction {
    kernel: Kernel,
    /// This rank's contribution after pre-multiplication; the job's source points into it.
    _scaled: Option<Box<dyn Any + Send>>,
}

impl Reduction {
    /// A fold by this kernel, of a contribution that may have been multiplied first.
    #[inline]
    pub(crate) fn new(kernel: Kernel, scaled: Option<Box<dyn Any + Send>>) -> Self {
        Self { kernel, _scaled: scaled }
    }

    /// The same fold, of other contributions, which have been multiplied where they are to be.
    pub(super) fn again(&self) -> Self {
        Self { kernel: self.kernel.clone(), _scaled: None }
    }
}

impl Job {
    /// What folds elements, for calls that reduce.
    #[inline]
    pub(super) fn kernel(&self) -> Option<&Kernel> {
        self.reduction.as_ref().map(|reduction| &reduction.kernel)
    }

    /// Whether this folds elements that are too large for shared memory: these travel over links, also inside a host.
    pub(super) fn is_too_large_to_share(&self) -> bool {
        self.reduction.is_some() && self.element_bytes > MAX_ELEMENT_BYTES
    }

    /// What makes truth values of whatever a run has written to the destination, once it is dropped.
    #[inline]
    pub(super) fn normalised(&self) -> NormalisedBools<'_> {
        let Operands { destination, destination_len, .. } = self.memory;
        // Those of lists are another's affair: `listed_bools`.
        let destination_len = if self.lists.is_none() { destination_len } else { 0 };
        // SAFETY: the destination is initialised and lent to the job alone for as long as there is one (it is made of an exclusive borrow,
        // and owned or borrowed on by whoever runs it), which the value borrows. What runs the job has no thread of its own, so it writes
        // nothing any more when its caller drops the value.
        unsafe { NormalisedBools::new(self.call.element, destination, destination_len) }
    }

    /// The same for a job with lists, which goes over links.
    pub(super) fn listed_bools(&self) -> Vec<NormalisedBools<'_>> {
        let Some(_) = &self.lists else { return Vec::new() };
        let whole = (self.memory.destination, self.memory.destination_len);
        let blocks = self.listed_destination().map_or(vec![whole], |list| list.blocks().collect());
        // SAFETY: each block of a destination, or the whole of it, is initialised and lent to the job alone for as long as there is one, as in
        // `normalised`; the value borrows the job, and what runs it has no thread of its own.
        blocks.into_iter().map(|(start, len)| unsafe { NormalisedBools::new(self.call.element, start, len) }).collect()
    }

    /// The only rank's call: its contribution is the result.
    pub(super) fn run_alone(&self, rank: usize) {
        let Operands { mut source, source_len, mut destination, destination_len } = self.narrowed(rank);
        if self.lists.is_some() {
            // Its only block is the whole.
            (source, destination) = (self.source_at(0), self.destination_at(0));
        }
        let length = source_len.min(destination_len);
        if length != 0 && !std::ptr::eq(source, destination) {
            // SAFETY: both buffers are valid for their lengths (they are made of borrows that live until the job has run). In place the only
            // rank's block is the whole, so they are the same, which was excluded; else they are two borrows, and apart. A list of one rank has one
            // block, which is as long as the list.
            unsafe { std::ptr::copy_nonoverlapping(source, destination, length) };
        }
    }
}
