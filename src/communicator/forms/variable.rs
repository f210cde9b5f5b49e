//! Collectives with a separate count for each rank.

use crate::call::buffer::{Buffer, BufferMut};
use crate::call::op::Reduction;
use crate::communicator::Communicator;
use crate::error::Result;

/// # Collectives with unequal counts
///
/// In a buffer with the blocks of all ranks, the blocks lie side by side in rank order. Counts are in elements, and may
/// be 0.
///
/// In calls in which every rank passes all counts, the counts must be the same on every rank. In calls in which a rank
/// knows only some of the counts (`gather_v_into`, `scatter_v_into`, `all_to_all_v_into`), the two ends of each
/// transfer must agree on its count. All ranks compare the counts before anything is written. If any differ, every rank
/// gets the same `Mismatch`.
///
/// Errors common to all collectives with unequal counts:
/// - The errors common to all collectives.
/// - `InvalidArgument` if the number of counts is not the world size.
/// - `InvalidArgument` if the sum of the counts is not the length of the buffer with the blocks of all ranks.
/// - `InvalidArgument` if this rank passes a separate buffer for its own block, and the buffer's length is not this
///   rank's count.
impl Communicator {
    /// Gathers in place like [`all_gather`](Self::all_gather), with a count for each rank.
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts.
    #[doc(alias = "MPI_Allgatherv")]
    pub fn all_gather_v<B: BufferMut + ?Sized>(&self, buffer: &mut B, counts: &[usize]) -> Result<()> {
        self.execute(self.prepare_all_gather_v(None, buffer.memory_mut(), counts))
    }

    /// Gathers like [`all_gather_v`](Self::all_gather_v), from this rank's block into a destination for all blocks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut all = [0u32; 3];
    ///     comm.all_gather_v_into(&vec![comm.rank() as u32 + 1; comm.rank() + 1], &mut all, &[1, 2])?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got, [[1, 2, 2]; 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts.
    pub fn all_gather_v_into<S, D>(&self, source: &S, destination: &mut D, counts: &[usize]) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_all_gather_v(Some(source.memory()), destination.memory_mut(), counts))
    }

    /// Reduces in place like [`reduce_scatter`](Self::reduce_scatter), with a count for each rank.
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts.
    #[doc(alias = "MPI_Reduce_scatter")]
    pub fn reduce_scatter_v<B: BufferMut + ?Sized>(
        &self,
        buffer: &mut B,
        counts: &[usize],
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<()> {
        self.execute(self.prepare_reduce_scatter_v(None, buffer.memory_mut(), counts, &op.into()))
    }

    /// Reduces like [`reduce_scatter_v`](Self::reduce_scatter_v), from a source with all blocks into a destination for
    /// this rank's block.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut mine = vec![0u32; comm.rank() + 1];
    ///     comm.reduce_scatter_v_into(&[1u32, 2, 3], &mut mine, &[1, 2], ReduceOp::Sum)?;
    ///     Ok(mine)
    /// })?;
    /// assert_eq!(got, [vec![2], vec![4, 6]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts.
    pub fn reduce_scatter_v_into<S, D>(
        &self,
        source: &S,
        destination: &mut D,
        counts: &[usize],
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_reduce_scatter_v(Some(source.memory()), destination.memory_mut(), counts, &op.into()))
    }

    /// Gathers like [`gather_into`](Self::gather_into), with a count for each rank. Only the root needs the counts: it
    /// passes `Some((destination, counts))`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut all = [0u8; 3];
    ///     let destination = (comm.rank() == 0).then_some((&mut all, &[1, 2][..]));
    ///     comm.gather_v_into(&vec![comm.rank() as u8 + 1; comm.rank() + 1], destination, 0)?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got[0], [1, 2, 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts.
    #[doc(alias = "MPI_Gatherv")]
    pub fn gather_v_into<S, D>(&self, source: &S, destination: Option<(&mut D, &[usize])>, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let destination = destination.map(|(destination, counts)| (destination.memory_mut(), counts));
        self.execute(self.prepare_gather_v(source.memory(), destination, root))
    }

    /// Scatters like [`scatter_into`](Self::scatter_into), with a count for each rank. Only the root needs the counts:
    /// it passes `Some((source, counts))`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut mine = vec![0u8; comm.rank() + 1];
    ///     let source = (comm.rank() == 0).then_some((&[1u8, 2, 3], &[1, 2][..]));
    ///     comm.scatter_v_into(source, &mut mine, 0)?;
    ///     Ok(mine)
    /// })?;
    /// assert_eq!(got, [vec![1], vec![2, 3]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts.
    #[doc(alias = "MPI_Scatterv")]
    pub fn scatter_v_into<S, D>(&self, source: Option<(&S, &[usize])>, destination: &mut D, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let source = source.map(|(source, counts)| (source.memory(), counts));
        self.execute(self.prepare_scatter_v(source, destination.memory_mut(), root))
    }

    /// Exchanges blocks like [`all_to_all_into`](Self::all_to_all_into), with two counts for each rank: `send_counts`
    /// lists how many elements this rank sends to each rank, and `receive_counts` how many it receives from each rank.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// // Rank 0 keeps one element and sends two; rank 1 sends three and keeps none.
    /// let got = Communicator::run_local(2, |comm| {
    ///     let (send, receive) = [([1, 2], [1, 3]), ([3, 0], [2, 0])][comm.rank()];
    ///     let mut got = vec![0u8; receive.iter().sum()];
    ///     comm.all_to_all_v_into(&[comm.rank() as u8 + 1; 3], &send, &mut got, &receive)?;
    ///     Ok(got)
    /// })?;
    /// assert_eq!(got, [vec![1, 2, 2, 2], vec![1, 1]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives with unequal counts, and `InvalidArgument` if this rank's two counts for
    /// itself differ.
    #[doc(alias = "MPI_Alltoallv")]
    pub fn all_to_all_v_into<S, D>(&self, source: &S, send_counts: &[usize], destination: &mut D, receive_counts: &[usize]) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_all_to_all_v(source.memory(), send_counts, destination.memory_mut(), receive_counts))
    }
}
