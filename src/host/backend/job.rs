//! Jobs of the host backend: calls on ordinary memory, given by pointers and folded by a CPU kernel.

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
    /// Creates a fold by this kernel. `scaled` owns the contribution if it was multiplied beforehand.
    #[inline]
    pub(crate) fn new(kernel: Kernel, scaled: Option<Box<dyn Any + Send>>) -> Self {
        Self { kernel, _scaled: scaled }
    }

    /// Returns the same fold for other contributions, which have already been multiplied if they need to be.
    pub(super) fn again(&self) -> Self {
        Self { kernel: self.kernel.clone(), _scaled: None }
    }
}

impl Job {
    /// Returns the kernel that folds elements, for calls that reduce.
    #[inline]
    pub(super) fn kernel(&self) -> Option<&Kernel> {
        self.reduction.as_ref().map(|reduction| &reduction.kernel)
    }

    /// Whether this folds elements that are too large for shared memory. These travel over links, even inside a host.
    pub(super) fn is_too_large_to_share(&self) -> bool {
        self.reduction.is_some() && self.element_bytes > MAX_ELEMENT_BYTES
    }

    /// Returns a guard that, when dropped, normalises the bools that a run has written to the destination.
    #[inline]
    pub(super) fn normalised(&self) -> NormalisedBools<'_> {
        let Operands { destination, destination_len, .. } = self.memory;
        // `listed_bools` handles those of lists.
        let destination_len = if self.lists.is_none() { destination_len } else { 0 };
        // SAFETY: the destination is initialised and lent to the job alone for as long as the job exists: the job is
        // made from an exclusive borrow, and whatever runs it owns it or borrows it further. The value borrows the job.
        // The engine that runs the job has no thread of its own, so it no longer writes when its caller drops the
        // value.
        unsafe { NormalisedBools::new(self.call.element, destination, destination_len) }
    }

    /// Returns such a guard for each block of the destination, if the job has lists. Such jobs go over links.
    pub(super) fn listed_bools(&self) -> Vec<NormalisedBools<'_>> {
        let Some(_) = &self.lists else { return Vec::new() };
        let whole = (self.memory.destination, self.memory.destination_len);
        let blocks = self.listed_destination().map_or(vec![whole], |list| list.blocks().collect());
        // SAFETY: each block of a destination, or the whole of it, is initialised and lent to the job alone for as long
        // as the job exists, as in `normalised`. The value borrows the job, and what runs it has no thread of its own.
        blocks.into_iter().map(|(start, len)| unsafe { NormalisedBools::new(self.call.element, start, len) }).collect()
    }

    /// Runs the call if there is only one rank: its contribution is the result.
    pub(super) fn run_alone(&self, rank: usize) {
        let Operands { mut source, source_len, mut destination, destination_len } = self.narrowed(rank);
        if self.lists.is_some() {
            // Its only block is the whole.
            (source, destination) = (self.source_at(0), self.destination_at(0));
        }
        let length = source_len.min(destination_len);
        if length != 0 && !std::ptr::eq(source, destination) {
            // SAFETY: both buffers are valid for their lengths: they come from borrows that live until the job has run.
            // In place, the only rank's block is the whole, so the two would be the same, which was excluded; else they
            // are two borrows and do not overlap. A list of one rank has one block, which is as long as the list.
            unsafe { std::ptr::copy_nonoverlapping(source, destination, length) };
        }
    }
}
