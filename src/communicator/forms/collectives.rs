//! The blocking collectives with equal counts. `prepare/arguments.rs` checks their arguments and those of the
//! background forms.

use crate::call::buffer::{Buffer, BufferMut};
use crate::call::op::{ReduceOp, Reduction};
use crate::communicator::Communicator;
use crate::communicator::prepare::prepared::Source;
use crate::error::Result;

/// # Collectives
///
/// All collectives synchronise: no rank returns before every rank has entered. Every rank must make the same call. If
/// the ranks' calls differ in kind, op, element type, count or root, every rank gets an error that names two of the
/// calls, and no buffer is touched.
///
/// A call on device buffers is queued after all ranks have entered and their calls have been compared
/// ([`Config::check_device_calls`](crate::Config::check_device_calls)). The method returns without waiting for any
/// device to finish the call.
///
/// Errors common to all collectives:
/// - `InvalidArgument` if the arguments are invalid on this rank. Nothing was sent then, and the communicator stays
///   usable.
/// - `Unsupported` if the op does not support the element type.
/// - `Mismatch`, `PeerLost`, `Timeout` and `Aborted`; and `Poisoned` after one of these has ended the communicator.
///
/// The costs below are the bytes that each rank sends between hosts, for `n` ranks and `N` bytes per rank.
impl Communicator {
    /// Reduces the buffers of all ranks element by element, in place. Every rank gets the same result.
    ///
    /// Every rank must pass the same number of elements. Cost: for large buffers, each rank sends 2(n−1)/n·N bytes. For
    /// small buffers, the data makes log₂ n hops, each with N bytes.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let results = Communicator::run_local(4, |comm| {
    ///     let mut x = [comm.rank() as f32, 1.0];
    ///     comm.all_reduce(&mut x, ReduceOp::Avg)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(results, [[1.5, 1.0]; 4]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    #[inline]
    pub fn all_reduce<B: BufferMut + ?Sized>(&self, buffer: &mut B, op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.execute(self.prepare_all_reduce(Source::InPlace, buffer.memory_mut(), &op.into()))
    }

    /// Reduces like [`all_reduce`](Self::all_reduce), from one buffer into another of the same length.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(3, |comm| {
    ///     let (mine, mut product) = ([comm.rank() as i32 + 1; 2], [0; 2]);
    ///     comm.all_reduce_into(&mine, &mut product, ReduceOp::Prod)?;
    ///     Ok(product)
    /// })?;
    /// assert_eq!(got, [[6, 6]; 3]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    #[inline]
    pub fn all_reduce_into<S, D>(&self, source: &S, destination: &mut D, op: impl Into<Reduction<S::Element>>) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_all_reduce(Source::Separate(source.memory()), destination.memory_mut(), &op.into()))
    }

    /// Returns the mean of one number over all ranks, such as the mean loss of a step. Cost: one all-reduce of 8 B.
    ///
    /// The mean is computed in `f64`. Every rank gets the same bits. If a rank passes NaN, the mean is NaN.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let means = Communicator::run_local(4, |comm| {
    ///     let loss = comm.rank() as f32; // what this rank's batch gives
    ///     comm.mean(loss)
    /// })?;
    /// assert_eq!(means, [1.5; 4]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn mean(&self, value: impl Into<f64>) -> Result<f64> {
        let mut mean = value.into();
        self.all_reduce(&mut mean, ReduceOp::Avg)?;
        Ok(mean)
    }

    /// Reduces the buffers of all ranks, and writes the result into the root's buffer. The other ranks' buffers do not
    /// change.
    ///
    /// Cost: for large buffers, each rank sends (n−1)/n·N bytes to reduce, and the root then receives as many bytes to
    /// collect the result. For small buffers, the data makes log₂ n hops, each with N bytes.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(3, |comm| {
    ///     let mut x = [comm.rank() as u32 + 1];
    ///     comm.reduce(&mut x, 2, ReduceOp::Sum)?;
    ///     Ok(x[0])
    /// })?;
    /// assert_eq!(got, [1, 2, 6]); // the others keep theirs
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    pub fn reduce<B: BufferMut + ?Sized>(&self, buffer: &mut B, root: usize, op: impl Into<Reduction<B::Element>>) -> Result<()> {
        let buffer = buffer.memory_mut();
        let count = buffer.len();
        self.execute(self.prepare_reduce(Source::InPlace, Some(buffer), count, root, &op.into()))
    }

    /// Reduces like [`reduce`](Self::reduce), from one buffer into another. The root passes `Some(destination)`, which
    /// must be as long as the source. The other ranks pass `None`.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut sum = [0u8; 2];
    ///     comm.reduce_into(&[1u8, 2], (comm.rank() == 0).then_some(&mut sum), 0, ReduceOp::Sum)?;
    ///     Ok(sum)
    /// })?;
    /// assert_eq!(got, [[2, 4], [0, 0]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn reduce_into<S, D>(
        &self,
        source: &S,
        destination: Option<&mut D>,
        root: usize,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let destination = destination.map(|destination| destination.memory_mut());
        self.execute(self.prepare_reduce_into(source.memory(), destination, root, &op.into()))
    }

    /// Copies the root's buffer to every rank. Cost: the root's N bytes pass through a pipeline or a tree of the ranks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(3, |comm| {
    ///     let mut seed = if comm.rank() == 0 { 42u64 } else { 0 };
    ///     comm.broadcast(&mut seed, 0)?;
    ///     Ok(seed)
    /// })?;
    /// assert_eq!(got, [42; 3]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    #[doc(alias("ncclBroadcast", "ncclBcast", "MPI_Bcast"))]
    pub fn broadcast<B: BufferMut + ?Sized>(&self, buffer: &mut B, root: usize) -> Result<()> {
        let buffer = buffer.memory_mut();
        let source = if self.rank() == root { Source::InPlace } else { Source::Nothing };
        self.execute(self.prepare_broadcast(source, buffer, root))
    }

    /// Broadcasts like [`broadcast`](Self::broadcast), from the root's source into the destination of every rank,
    /// including the root. The root passes `Some(source)`. The other ranks pass `None`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut copy = [0i16; 2];
    ///     comm.broadcast_into((comm.rank() == 1).then_some(&[5i16, 6]), &mut copy, 1)?;
    ///     Ok(copy)
    /// })?;
    /// assert_eq!(got, [[5, 6]; 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn broadcast_into<S, D>(&self, source: Option<&S>, destination: &mut D, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_broadcast_into(source.map(Buffer::memory), destination.memory_mut(), root))
    }

    /// Gathers every rank's block on every rank, in place. The buffer has one block for each rank, in rank order. Each
    /// rank contributes its own block. Cost: each rank sends (n−1)/n of the bytes of the whole buffer.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut x = [0i32; 4]; // two blocks of two
    ///     x[comm.rank() * 2] = comm.rank() as i32 + 7;
    ///     comm.all_gather(&mut x)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(got, [[7, 0, 8, 0]; 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and `InvalidArgument` if the buffer's length is not a multiple of the
    /// world size.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    pub fn all_gather<B: BufferMut + ?Sized>(&self, buffer: &mut B) -> Result<()> {
        self.execute(self.prepare_all_gather(None, buffer.memory_mut()))
    }

    /// Gathers like [`all_gather`](Self::all_gather), from this rank's block into a separate destination, which must be
    /// as long as the blocks of all ranks together.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(3, |comm| {
    ///     let mut all = [0u64; 3];
    ///     comm.all_gather_into(&(comm.rank() as u64), &mut all)?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got, [[0, 1, 2]; 3]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn all_gather_into<S, D>(&self, source: &S, destination: &mut D) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_all_gather(Some(source.memory()), destination.memory_mut()))
    }

    /// Reduces buffers that have one block for each rank, and gives each rank the result for its own block. The result
    /// replaces this block in the rank's buffer. The other blocks do not change. Cost: each rank sends (n−1)/n of the
    /// bytes of the whole buffer.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut x = [1.0f64, 2.0, 3.0, 4.0]; // two blocks of two
    ///     comm.reduce_scatter(&mut x, ReduceOp::Sum)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(got, [[2.0, 4.0, 3.0, 4.0], [1.0, 2.0, 6.0, 8.0]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and `InvalidArgument` if the buffer's length is not a multiple of the
    /// world size.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    pub fn reduce_scatter<B: BufferMut + ?Sized>(&self, buffer: &mut B, op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.execute(self.prepare_reduce_scatter(None, buffer.memory_mut(), &op.into()))
    }

    /// Reduces like [`reduce_scatter`](Self::reduce_scatter), from one buffer into another. The length of the source
    /// must be the length of the destination times the world size.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut mine = [0i64; 2];
    ///     comm.reduce_scatter_into(&[1i64, 2, 3, 4], &mut mine, ReduceOp::Max)?;
    ///     Ok(mine)
    /// })?;
    /// assert_eq!(got, [[1, 2], [3, 4]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn reduce_scatter_into<S, D>(&self, source: &S, destination: &mut D, op: impl Into<Reduction<S::Element>>) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_reduce_scatter(Some(source.memory()), destination.memory_mut(), &op.into()))
    }

    /// Gathers every rank's block on the root. The root passes `Some(destination)`. The length of the destination must
    /// be the length of the source times the world size. The other ranks pass `None`. Cost: the root receives n−1
    /// blocks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut all = [0u32; 4]; // wanted at the root alone
    ///     comm.gather_into(&[comm.rank() as u32; 2], (comm.rank() == 0).then_some(&mut all), 0)?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got, [[0, 0, 1, 1], [0; 4]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    #[doc(alias("ncclGather", "MPI_Gather"))]
    pub fn gather_into<S, D>(&self, source: &S, destination: Option<&mut D>, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let destination = destination.map(|destination| destination.memory_mut());
        self.execute(self.prepare_gather_into(source.memory(), destination, root))
    }

    /// Gathers like [`gather_into`](Self::gather_into), in place at the root. The root passes the whole buffer, which
    /// already contains the root's own block. Each of the other ranks passes only its block.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut x = if comm.rank() == 0 { vec![5u8, 0] } else { vec![6] };
    ///     comm.gather(&mut x, 0)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(got, [vec![5, 6], vec![6]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn gather<B: BufferMut + ?Sized>(&self, buffer: &mut B, root: usize) -> Result<()> {
        self.execute(self.prepare_gather_in_place(buffer, root))
    }

    /// Sends each rank its block of the root's source. The root passes `Some(source)`. The length of the source must be
    /// the length of the destination times the world size. The other ranks pass `None`. Cost: the root sends n−1
    /// blocks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut mine = [0u16; 2];
    ///     comm.scatter_into((comm.rank() == 0).then_some(&[1u16, 2, 3, 4]), &mut mine, 0)?;
    ///     Ok(mine)
    /// })?;
    /// assert_eq!(got, [[1, 2], [3, 4]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    #[doc(alias("ncclScatter", "MPI_Scatter"))]
    pub fn scatter_into<S, D>(&self, source: Option<&S>, destination: &mut D, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_scatter_into(source.map(Buffer::memory), destination.memory_mut(), root))
    }

    /// Scatters like [`scatter_into`](Self::scatter_into), in place at the root. The root passes the whole buffer, and
    /// keeps its own block where it is. Every other rank passes a buffer for its block.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut x = if comm.rank() == 0 { vec![5u8, 6] } else { vec![0] };
    ///     comm.scatter(&mut x, 0)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(got, [vec![5, 6], vec![6]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn scatter<B: BufferMut + ?Sized>(&self, buffer: &mut B, root: usize) -> Result<()> {
        self.execute(self.prepare_scatter_in_place(buffer.memory_mut(), root))
    }

    /// Sends block `j` of this rank's buffer to rank `j`, and replaces block `j` with the block that rank `j` sends to
    /// this rank. Cost: each rank sends (n−1)/n of the bytes of the buffer.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut x = [comm.rank() as u8 * 10, comm.rank() as u8 * 10 + 1];
    ///     comm.all_to_all(&mut x)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(got, [[0, 10], [1, 11]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and `InvalidArgument` if the buffer's length is not a multiple of the
    /// world size.
    #[doc(alias("ncclAlltoAll", "MPI_Alltoall"))]
    pub fn all_to_all<B: BufferMut + ?Sized>(&self, buffer: &mut B) -> Result<()> {
        self.execute(self.prepare_all_to_all(Source::InPlace, buffer.memory_mut()))
    }

    /// Exchanges blocks like [`all_to_all`](Self::all_to_all), from one buffer into another of the same length.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let (sent, mut got) = ([comm.rank() as i32 + 1, -1], [0; 2]);
    ///     comm.all_to_all_into(&sent, &mut got)?;
    ///     Ok(got)
    /// })?;
    /// assert_eq!(got, [[1, 2], [-1, -1]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives.
    pub fn all_to_all_into<S, D>(&self, source: &S, destination: &mut D) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_all_to_all(Source::Separate(source.memory()), destination.memory_mut()))
    }
}
