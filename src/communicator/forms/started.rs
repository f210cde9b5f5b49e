//! Background collectives, run by one worker thread of the communicator in the order in which they were started.

use crate::call::buffer::{Buffer, BufferMut};
use crate::call::op::Reduction;
use crate::communicator::Communicator;
use crate::communicator::prepare::prepared::Source;
use crate::communicator::work::{OwnedBuffer, OwnedSource, Work};
use crate::error::Result;

/// # Background collectives
///
/// Each of these methods starts the blocking collective that it names, and returns a [`Work`]. The call runs while the
/// program does other work. All ranks must start the same calls in the same order. On every rank, background
/// collectives run one after another, in the order in which they were started. A blocking collective first waits for
/// the background collectives that were started before it.
///
/// For buffers in host memory, the method returns immediately. For device buffers, the method returns after all ranks
/// have made the call, because the ranks first compare their calls
/// ([`Config::check_device_calls`](crate::Config::check_device_calls)).
///
/// The call owns its buffers until it has ended, and gives them back through the `Work`. A buffer can be any
/// [`OwnedBuffer`]: a `Vec`, a boxed slice, an array, or, on a GPU, cudarc's `CudaSlice`. A buffer that the call only
/// reads can be any [`OwnedSource`], and so also an `Arc` of such a buffer. A slice that is borrowed from a local
/// variable is neither. [`Work`] explains what happens to the buffers if the call fails, and if the `Work` is dropped.
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// let results = Communicator::run_local(2, |comm| {
///     let first = comm.start_all_reduce(vec![1.0f32; 1000], ReduceOp::Sum)?;
///     let second = comm.start_broadcast(vec![comm.rank() as u8], 1)?;
///     // … compute …
///     Ok((first.wait()?[0], second.wait()?[0]))
/// })?;
/// assert_eq!(results, [(2.0, 1); 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// ## Errors of background collectives
///
/// The `start_*` method itself returns these errors. In this case, the call has not begun, and its buffers are freed.
/// The [`Work`] returns all other errors.
///
/// - `InvalidArgument` if the arguments are invalid on this rank.
/// - `Unsupported` if the op does not support the element type, or in a forked child.
/// - `Io` if the worker thread cannot be started, or if there is no memory to prepare the call.
///
/// For device buffers, also:
///
/// - `NoDevice` if the communicator has no device backend.
/// - `InvalidArgument` from within another call of the same communicator, such as in a custom op.
/// - `Unsupported` if the call is captured into a graph, or if not every rank can run it.
/// - `Mismatch`, `PeerLost`, `Timeout`, `Aborted`, `Io` and `Protocol` if the comparison of the calls fails. `Timeout`
///   also if the deadline passes before it is the call's turn.
/// - `Poisoned` and `Closed` if the communicator has ended.
/// - `Cuda` if the driver fails before the call is queued.
impl Communicator {
    /// Starts an [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_reduce<B: OwnedBuffer>(&self, buffer: B, op: impl Into<Reduction<B::Element>>) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_reduce(Source::InPlace, buffer.memory_mut(), &op.into()))
    }

    /// Starts a [`reduce`](Self::reduce).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce<B: OwnedBuffer>(&self, buffer: B, root: usize, op: impl Into<Reduction<B::Element>>) -> Result<Work<B>> {
        let op = op.into();
        self.start(buffer, |buffer| {
            let buffer = buffer.memory_mut();
            let count = buffer.len();
            self.prepare_reduce(Source::InPlace, Some(buffer), count, root, &op)
        })
    }

    /// Starts a [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_broadcast<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        let source = if self.rank() == root { Source::InPlace } else { Source::Nothing };
        self.start(buffer, |buffer| self.prepare_broadcast(source, buffer.memory_mut(), root))
    }

    /// Starts an [`all_gather`](Self::all_gather), in place.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_gather<B: OwnedBuffer>(&self, buffer: B) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_gather(None, buffer.memory_mut()))
    }

    /// Starts an [`all_gather_into`](Self::all_gather_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_gather_into<S, D>(&self, source: S, destination: D) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_all_gather(Some(S::memory(source)), destination.memory_mut())
        })
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter), in place.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce_scatter<B: OwnedBuffer>(&self, buffer: B, op: impl Into<Reduction<B::Element>>) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_reduce_scatter(None, buffer.memory_mut(), &op.into()))
    }

    /// Starts a [`reduce_scatter_into`](Self::reduce_scatter_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce_scatter_into<S, D>(&self, source: S, destination: D, op: impl Into<Reduction<S::Element>>) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_reduce_scatter(Some(S::memory(source)), destination.memory_mut(), &op.into())
        })
    }

    /// Starts an [`all_to_all`](Self::all_to_all), in place.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_to_all<B: OwnedBuffer>(&self, buffer: B) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_to_all(Source::InPlace, buffer.memory_mut()))
    }

    /// Starts a [`gather`](Self::gather).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_gather<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_gather_in_place(buffer, root))
    }

    /// Starts a [`scatter`](Self::scatter).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_scatter<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_scatter_in_place(buffer.memory_mut(), root))
    }

    /// Starts an [`all_reduce_into`](Self::all_reduce_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_reduce_into<S, D>(&self, source: S, destination: D, op: impl Into<Reduction<S::Element>>) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_all_reduce(Source::Separate(S::memory(source)), destination.memory_mut(), &op.into())
        })
    }

    /// Starts a [`reduce_into`](Self::reduce_into). Only the root passes `Some` as `destination`.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce_into<S, D>(
        &self,
        source: S,
        destination: Option<D>,
        root: usize,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<(S, Option<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_reduce_into(S::memory(source), destination.as_mut().map(BufferMut::memory_mut), root, &op.into())
        })
    }

    /// Starts a [`broadcast_into`](Self::broadcast_into). Only the root passes `Some` as `source`.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_broadcast_into<S, D>(&self, source: Option<S>, destination: D, root: usize) -> Result<Work<(Option<S>, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_broadcast_into(source.as_ref().map(Buffer::memory), destination.memory_mut(), root)
        })
    }

    /// Starts a [`gather_into`](Self::gather_into). Only the root passes `Some` as `destination`.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_gather_into<S, D>(&self, source: S, destination: Option<D>, root: usize) -> Result<Work<(S, Option<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_gather_into(S::memory(source), destination.as_mut().map(BufferMut::memory_mut), root)
        })
    }

    /// Starts a [`scatter_into`](Self::scatter_into). Only the root passes `Some` as `source`.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_scatter_into<S, D>(&self, source: Option<S>, destination: D, root: usize) -> Result<Work<(Option<S>, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_scatter_into(source.as_ref().map(Buffer::memory), destination.memory_mut(), root)
        })
    }

    /// Starts an [`all_to_all_into`](Self::all_to_all_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_to_all_into<S, D>(&self, source: S, destination: D) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_all_to_all(Source::Separate(S::memory(source)), destination.memory_mut())
        })
    }

    /// Starts an [`all_gather_v`](Self::all_gather_v).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_gather_v<B: OwnedBuffer>(&self, buffer: B, counts: &[usize]) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_gather_v(None, buffer.memory_mut(), counts))
    }

    /// Starts an [`all_gather_v_into`](Self::all_gather_v_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_gather_v_into<S, D>(&self, source: S, destination: D, counts: &[usize]) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_all_gather_v(Some(S::memory(source)), destination.memory_mut(), counts)
        })
    }

    /// Starts a [`reduce_scatter_v`](Self::reduce_scatter_v).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce_scatter_v<B: OwnedBuffer>(
        &self,
        buffer: B,
        counts: &[usize],
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_reduce_scatter_v(None, buffer.memory_mut(), counts, &op.into()))
    }

    /// Starts a [`reduce_scatter_v_into`](Self::reduce_scatter_v_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce_scatter_v_into<S, D>(
        &self,
        source: S,
        destination: D,
        counts: &[usize],
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_reduce_scatter_v(Some(S::memory(source)), destination.memory_mut(), counts, &op.into())
        })
    }

    /// Starts a [`gather_v_into`](Self::gather_v_into). Only the root passes `Some((destination, counts))`, with one
    /// count for each rank.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mine = vec![comm.rank() as u8 + 1; comm.rank() + 1];
    ///     let destination = (comm.rank() == 0).then_some((vec![0u8; 3], &[1, 2][..]));
    ///     let (_mine, all) = comm.start_gather_v_into(mine, destination, 0)?.wait()?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got, [Some(vec![1, 2, 2]), None]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_gather_v_into<S, D>(&self, source: S, destination: Option<(D, &[usize])>, root: usize) -> Result<Work<(S, Option<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        let (destination, counts) = destination.unzip();
        self.start((source, destination), |(source, destination)| {
            self.prepare_gather_v(S::memory(source), destination.as_mut().map(BufferMut::memory_mut).zip(counts), root)
        })
    }

    /// Starts a [`scatter_v_into`](Self::scatter_v_into). Only the root passes `Some((source, counts))`, with one count
    /// for each rank.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_scatter_v_into<S, D>(&self, source: Option<(S, &[usize])>, destination: D, root: usize) -> Result<Work<(Option<S>, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        let (source, counts) = source.unzip();
        self.start((source, destination), |(source, destination)| {
            self.prepare_scatter_v(source.as_ref().map(Buffer::memory).zip(counts), destination.memory_mut(), root)
        })
    }

    /// Starts an [`all_to_all_v_into`](Self::all_to_all_v_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_to_all_v_into<S, D>(
        &self,
        source: S,
        send_counts: &[usize],
        destination: D,
        receive_counts: &[usize],
    ) -> Result<Work<(S, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_all_to_all_v(S::memory(source), send_counts, destination.memory_mut(), receive_counts)
        })
    }

    /// Starts a [`barrier`](Self::barrier).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_barrier(&self) -> Result<Work<()>> {
        self.start((), |()| self.prepare_barrier())
    }
}
