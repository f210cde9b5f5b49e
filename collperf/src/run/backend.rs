//! The operations of a backend that a run needs: memory, the wait for calls, and their times.

use std::ops::Range;

use collectives::{Buffer, BufferMut, Result};

use crate::failure::Failure;
use crate::inputs::Sample;
use crate::layout::Run;

/// The memory of buffers, and the wait for calls on them.
pub(super) trait Backend {
    /// Elements on this backend.
    type Memory<'p, T: Sample>: Memory<T>
    where
        Self: 'p;
    /// A point in time.
    type Mark;
    /// Calls that are launched together.
    type Graph;

    /// Returns the number of elements after which inputs may repeat, in a row of results for the size `bytes`.
    fn period(bytes: usize) -> usize;

    /// Returns two buffers of `length` elements each. Each buffer begins `unalign` elements after an aligned address. The
    /// buffers that earlier calls returned must not be in use any more.
    fn buffers<T: Sample>(&self, length: usize, unalign: usize) -> std::result::Result<[Self::Memory<'_, T>; 2], Failure>;

    /// Waits until all calls that were made so far have ended.
    fn finish(&self) -> Result<()>;

    /// Records the point in time at which all calls that were made so far have ended.
    fn mark(&self) -> Result<Self::Mark>;

    /// Returns the microseconds between two points in time. Both points must have passed.
    fn between(&self, from: &Self::Mark, to: &Self::Mark) -> Result<f64>;

    /// Returns three amounts of memory on this rank's device, in bytes: in this rank's buffers, in use, and in total. All
    /// three are zero if there is no device.
    fn memory_use(&self) -> Result<[u64; 3]>;

    /// Runs `queue`, and records the calls that this closure queues. [`launch`](Self::launch) queues the recorded
    /// calls.
    fn capture(&self, queue: &mut dyn FnMut() -> Result<()>) -> Result<Self::Graph>;

    /// Queues the recorded calls.
    fn launch(&self, graph: &Self::Graph) -> Result<()>;
}

/// A buffer of a backend.
pub(super) trait Memory<T: Sample> {
    /// The beginning of a buffer, for reading.
    type Part<'a>: Buffer<Element = T>
    where
        Self: 'a;
    /// The beginning of a buffer, for writing.
    type PartMut<'a>: BufferMut<Element = T>
    where
        Self: 'a;

    /// Returns the first `length` elements, for a call that reads them.
    fn part(&self, length: usize) -> Self::Part<'_>;

    /// Returns the first `length` elements, for a call that writes them.
    fn part_mut(&mut self, length: usize) -> Self::PartMut<'_>;

    /// Returns two ranges of the elements, for a call that reads the first range and writes the second. The ranges must
    /// not overlap.
    fn apart(&mut self, read: Range<usize>, written: Range<usize>) -> (Self::Part<'_>, Self::PartMut<'_>);

    /// Whether calls that are recorded together, and run one after the other, may write the same elements.
    const HAS_GROUPS: bool;

    /// Returns `times` views of the first `length` elements, one for each call of a group. A backend without groups
    /// returns only one view.
    fn parts_mut(&mut self, length: usize, times: usize) -> Vec<Self::PartMut<'_>>;

    /// Copies the first `length` elements of `from` to the index `to` of this buffer. The copy runs after earlier calls
    /// and before later calls.
    fn copy_from(&mut self, from: &Self, length: usize, to: usize) -> Result<()>;

    /// Writes zeros into the first `length` elements.
    fn clear(&mut self, length: usize) -> Result<()>;

    /// Fills a run of elements with `values`, which are repeated if the run is longer.
    fn write(&mut self, run: Run, values: &[T]) -> Result<()>;

    /// Compares a run of elements bit by bit with `values`, which are repeated if the run is longer. Calls `wrong` for
    /// every element that differs, with its index, its value as text, and the expected value.
    fn compare(&self, run: Run, values: &[T], wrong: impl FnMut(usize, String, T)) -> Result<()>;
}
