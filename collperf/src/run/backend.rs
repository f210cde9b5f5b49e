//! What a run needs of a backend: memory, and the ends and times of calls on it.

use std::ops::Range;

use collectives::{Buffer, BufferMut, Result};

use crate::failure::Failure;
use crate::inputs::Sample;
use crate::layout::Run;

/// Where buffers lie, and how calls on them are waited for.
pub(super) trait Backend {
    /// Elements on this backend.
    type Memory<'p, T: Sample>: Memory<T>
    where
        Self: 'p;
    /// A point in time.
    type Mark;
    /// Calls that are launched together.
    type Graph;

    /// After how many elements inputs of a row of so many bytes may repeat themselves.
    fn period(bytes: usize) -> usize;

    /// Two buffers of this many elements each, which begin this many elements after an aligned address. Those that were had before
    /// are no longer in use.
    fn buffers<T: Sample>(&self, length: usize, unalign: usize) -> std::result::Result<[Self::Memory<'_, T>; 2], Failure>;

    /// Waits until the calls so far have ended.
    fn finish(&self) -> Result<()>;

    /// The time when the calls so far have ended.
    fn mark(&self) -> Result<Self::Mark>;

    /// Microseconds between two points in time, both of which have passed.
    fn between(&self, from: &Self::Mark, to: &Self::Mark) -> Result<f64>;

    /// What this rank's buffers take of its device, what is in use there by all, and how much there is, in bytes. Zeros where there is
    /// no device.
    fn memory_use(&self) -> Result<[u64; 3]>;

    /// Records what `queue` queues.
    fn capture(&self, queue: &mut dyn FnMut() -> Result<()>) -> Result<Self::Graph>;

    /// Queues what was recorded.
    fn launch(&self, graph: &Self::Graph) -> Result<()>;
}

/// A buffer of a backend.
pub(super) trait Memory<T: Sample> {
    /// The beginning of it, to be read.
    type Part<'a>: Buffer<Element = T>
    where
        Self: 'a;
    /// The beginning of it, to be written.
    type PartMut<'a>: BufferMut<Element = T>
    where
        Self: 'a;

    /// The first elements, to be read by a call.
    fn part(&self, length: usize) -> Self::Part<'_>;

    /// The first elements, to be written by a call.
    fn part_mut(&mut self, length: usize) -> Self::PartMut<'_>;

    /// Two ranges that lie apart: one to be read by a call, one to be written.
    fn apart(&mut self, read: Range<usize>, written: Range<usize>) -> (Self::Part<'_>, Self::PartMut<'_>);

    /// Whether calls that are recorded together, and run one after the other, may write the same elements.
    const HAS_GROUPS: bool;

    /// The first elements so many times, for such calls; once where there are none.
    fn parts_mut(&mut self, length: usize, times: usize) -> Vec<Self::PartMut<'_>>;

    /// Copies the first elements of another buffer to a place in this one, in the order of calls.
    fn copy_from(&mut self, from: &Self, length: usize, to: usize) -> Result<()>;

    /// Writes zeros into the first elements.
    fn clear(&mut self, length: usize) -> Result<()>;

    /// Fills a run with `values`, again and again where it is longer than they are.
    fn write(&mut self, run: Run, values: &[T]) -> Result<()>;

    /// Compares a run with such values, bit by bit, and tells of every element that differs: its index, what it is, and what it should
    /// be.
    fn compare(&self, run: Run, values: &[T], wrong: impl FnMut(usize, String, T)) -> Result<()>;
}
