//! Collectives on several buffers in one call, in all their forms.

use std::marker::PhantomData;

use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::element::Data;
use crate::call::op::Reduction;
use crate::call::{BlockLayout, Collective};
use crate::communicator::Communicator;
use crate::communicator::forms::group::Group;
use crate::communicator::prepare::prepared::{Prepared, Source};
use crate::communicator::work::{OwnedBuffer, OwnedSource, Work};
use crate::error::{Error, Result};
use crate::host::backend::Jobs;

/// # Several buffers in one call
///
/// Each call takes a list of any number of buffers (`[Vec<T>]`, `[&mut [T]]`, `[CudaSlice<T>]` and so on), all on the
/// host or all on a device. It does what one call for each buffer would do, in list order. On every rank, the list must
/// have the same number of buffers, of the same lengths, in the same order. The ranks compare this before anything is
/// written. The list, and any buffer in it, may be empty.
///
/// On the host, small buffers are copied together, so that all of them cost one call and two copies of their bytes.
/// Larger buffers (above 4 KiB if all ranks share a host, above 64 KiB between hosts) are handled one after the other,
/// without a copy. No other thread's call runs in between, and the timeout covers the whole call. On devices, all
/// buffers are queued as one group, with one launch.
impl Communicator {
    /// Reduces each buffer like [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let (mut weights, mut bias) = (vec![1.0f32; 3], vec![comm.rank() as f32]);
    ///     comm.all_reduce_many(&mut [&mut weights, &mut bias], ReduceOp::Sum)?;
    ///     Ok((weights, bias))
    /// })?;
    /// assert_eq!(got[1], (vec![2.0; 3], vec![1.0]));
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and `InvalidArgument`:
    /// - if some buffers are on the host and others on a device,
    /// - if the buffers are [`TypedBytes`](crate::TypedBytes) of different element types.
    #[doc(alias("all_reduce_coalesced", "ncclGroupStart"))]
    pub fn all_reduce_many<B: BufferMut>(&self, buffers: &mut [B], op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.execute(self.prepare_all_reduce_many(buffers, &op.into()))
    }

    /// Broadcasts each buffer like [`broadcast`](Self::broadcast).
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(3, |comm| {
    ///     let mut layers = if comm.rank() == 1 { [vec![1.5f32], vec![2.5; 2]] } else { [vec![0.0], vec![0.0; 2]] };
    ///     comm.broadcast_many(&mut layers, 1)?;
    ///     Ok(layers)
    /// })?;
    /// assert_eq!(got[2], [vec![1.5], vec![2.5, 2.5]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`all_reduce_many`](Self::all_reduce_many).
    #[doc(alias("_broadcast_coalesced", "sync_module_states"))]
    pub fn broadcast_many<B: BufferMut>(&self, buffers: &mut [B], root: usize) -> Result<()> {
        self.execute(self.prepare_broadcast_many(buffers, root))
    }

    /// Gathers each source into its destination, like [`all_gather_into`](Self::all_gather_into). The length of each
    /// destination must be the length of its source times the world size.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mine = [vec![comm.rank() as u32], vec![7; 2]];
    ///     let mut all = [vec![0; 2], vec![0; 4]];
    ///     comm.all_gather_many_into(&mine, &mut all)?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got, [[vec![0, 1], vec![7; 4]], [vec![0, 1], vec![7; 4]]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`all_reduce_many`](Self::all_reduce_many), and `InvalidArgument` if the numbers of sources and
    /// destinations differ.
    #[doc(alias("all_gather_into_tensor_coalesced", "all_gather_coalesced"))]
    pub fn all_gather_many_into<S, D>(&self, sources: &[S], destinations: &mut [D]) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        self.execute(self.prepare_all_gather_many(sources, destinations))
    }

    /// Reduces each source into its destination, like [`reduce_scatter_into`](Self::reduce_scatter_into). The length of
    /// each source must be the length of its destination times the world size.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut mine = [[0i64], [0]];
    ///     comm.reduce_scatter_many_into(&[[1i64, 2], [3, 4]], &mut mine, ReduceOp::Sum)?;
    ///     Ok(mine)
    /// })?;
    /// assert_eq!(got, [[[2], [6]], [[4], [8]]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`all_gather_many_into`](Self::all_gather_many_into).
    #[doc(alias = "reduce_scatter_tensor_coalesced")]
    pub fn reduce_scatter_many_into<S, D>(&self, sources: &[S], destinations: &mut [D], op: impl Into<Reduction<S::Element>>) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        self.execute(self.prepare_reduce_scatter_many(sources, destinations, &op.into()))
    }

    /// Starts an [`all_reduce_many`](Self::all_reduce_many).
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let gradients = vec![vec![1.0f32; 3], vec![0.5; 2]];
    ///     comm.start_all_reduce_many(gradients, ReduceOp::Sum)?.wait()
    /// })?;
    /// assert_eq!(got[0], [vec![2.0; 3], vec![1.0; 2]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_reduce_many<B: OwnedBuffer>(&self, buffers: Vec<B>, op: impl Into<Reduction<B::Element>>) -> Result<Work<Vec<B>>> {
        self.start(buffers, |buffers| self.prepare_all_reduce_many(buffers, &op.into()))
    }

    /// Starts a [`broadcast_many`](Self::broadcast_many).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_broadcast_many<B: OwnedBuffer>(&self, buffers: Vec<B>, root: usize) -> Result<Work<Vec<B>>> {
        self.start(buffers, |buffers| self.prepare_broadcast_many(buffers, root))
    }

    /// Starts an [`all_gather_many_into`](Self::all_gather_many_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_gather_many_into<S, D>(&self, sources: Vec<S>, destinations: Vec<D>) -> Result<Work<(Vec<S>, Vec<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((sources, destinations), |(sources, destinations)| self.prepare_all_gather_many(sources, destinations))
    }

    /// Starts a [`reduce_scatter_many_into`](Self::reduce_scatter_many_into).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_reduce_scatter_many_into<S, D>(
        &self,
        sources: Vec<S>,
        destinations: Vec<D>,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<(Vec<S>, Vec<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((sources, destinations), |(sources, destinations)| self.prepare_reduce_scatter_many(sources, destinations, &op.into()))
    }
}

impl<'buffers> Group<'buffers, '_> {
    /// Records an [`all_reduce_many`](Communicator::all_reduce_many).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn all_reduce_many<B: BufferMut>(&mut self, buffers: &'buffers mut [B], op: impl Into<Reduction<B::Element>>) -> Result<()> {
        self.record(self.comm.prepare_all_reduce_many(buffers, &op.into()))
    }

    /// Records a [`broadcast_many`](Communicator::broadcast_many).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn broadcast_many<B: BufferMut>(&mut self, buffers: &'buffers mut [B], root: usize) -> Result<()> {
        self.record(self.comm.prepare_broadcast_many(buffers, root))
    }

    /// Records an [`all_gather_many_into`](Communicator::all_gather_many_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_gather_many_into<S, D>(&mut self, sources: &'buffers [S], destinations: &'buffers mut [D]) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        self.record(self.comm.prepare_all_gather_many(sources, destinations))
    }

    /// Records a [`reduce_scatter_many_into`](Communicator::reduce_scatter_many_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank, and `Unsupported` if the op does not support the
    /// element type.
    pub fn reduce_scatter_many_into<S, D>(
        &mut self,
        sources: &'buffers [S],
        destinations: &'buffers mut [D],
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        self.record(self.comm.prepare_reduce_scatter_many(sources, destinations, &op.into()))
    }
}

impl Communicator {
    fn prepare_all_reduce_many<'a, B: BufferMut>(&self, buffers: &'a mut [B], op: &Reduction<B::Element>) -> Result<Prepared<'a>> {
        let buffers = buffers.iter_mut().map(BufferMut::memory_mut);
        self.prepare_many(
            "all_reduce_many",
            buffers,
            || self.of_no_buffer(Collective::AllReduce, None, Some(op)),
            |buffer| self.prepare_all_reduce(Source::InPlace, buffer, op),
        )
    }

    fn prepare_broadcast_many<'a, B: BufferMut>(&self, buffers: &'a mut [B], root: usize) -> Result<Prepared<'a>> {
        let buffers = buffers.iter_mut().map(BufferMut::memory_mut);
        let nothing = || self.of_no_buffer::<B::Element>(Collective::Broadcast, self.checked_root(Collective::Broadcast, root)?, None);
        self.prepare_many("broadcast_many", buffers, nothing, |buffer| {
            let source = if self.rank() == root { Source::InPlace } else { Source::Nothing };
            self.prepare_broadcast(source, buffer, root)
        })
    }

    fn prepare_all_gather_many<'a, S, D>(&self, sources: &'a [S], destinations: &'a mut [D]) -> Result<Prepared<'a>>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        const CALL: &str = "all_gather_many_into";
        let pairs = pairs(CALL, sources, destinations)?;
        self.prepare_many(
            CALL,
            pairs,
            || self.of_no_buffer::<S::Element>(Collective::AllGather, None, None),
            |(source, destination)| self.prepare_all_gather(Some(source), destination),
        )
    }

    fn prepare_reduce_scatter_many<'a, S, D>(
        &self,
        sources: &'a [S],
        destinations: &'a mut [D],
        op: &Reduction<S::Element>,
    ) -> Result<Prepared<'a>>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        const CALL: &str = "reduce_scatter_many_into";
        let pairs = pairs(CALL, sources, destinations)?;
        self.prepare_many(
            CALL,
            pairs,
            || self.of_no_buffer(Collective::ReduceScatter, None, Some(op)),
            |(source, destination)| self.prepare_reduce_scatter(Some(source), destination, op),
        )
    }

    /// Joins the calls that `prepare` makes for each buffer of a list into one call. Ranks compare an empty list like
    /// any other, over the host backend, because no buffer shows which backend to use.
    fn prepare_many<'a, M>(
        &self,
        call: &'static str,
        list: impl Iterator<Item = M>,
        nothing: impl FnOnce() -> Result<Prepared<'a>>,
        prepare: impl Fn(M) -> Result<Prepared<'a>>,
    ) -> Result<Prepared<'a>> {
        let mut jobs = Vec::with_capacity(list.size_hint().0);
        #[cfg(feature = "cuda")]
        let mut calls = Vec::new();
        let mut known = None;
        for (place, buffer) in list.enumerate() {
            let prepared = prepare(buffer).map_err(|error| at_place(call, place, error))?;
            if let Some(element) = prepared.element() {
                let first = *known.get_or_insert(element);
                if first != element {
                    let reason =
                        format!("buffer {place} (from 0) holds {element}, but earlier buffers hold {first}: make one call for each type");
                    return Err(Error::argument(call, reason));
                }
            }
            match prepared {
                #[cfg(feature = "cuda")]
                Prepared::Device(device) if jobs.is_empty() => calls.push(device),
                #[cfg(feature = "cuda")]
                Prepared::Host(job, _) if calls.is_empty() => jobs.push(job),
                #[cfg(not(feature = "cuda"))]
                Prepared::Host(job, _) => jobs.push(job),
                _ => {
                    let reason = format!(
                        "buffer {place} (from 0) and earlier buffers are in different kinds of memory: pass all on the host, or all on a \
                         device"
                    );
                    return Err(Error::argument(call, reason));
                }
            }
        }
        #[cfg(feature = "cuda")]
        if !calls.is_empty() {
            return Ok(Prepared::DeviceMany(calls));
        }
        if let Some(jobs) = Jobs::several(jobs) {
            return Ok(Prepared::HostMany(jobs, PhantomData));
        }
        nothing()
    }

    /// Makes a call on an empty list. The ranks compare it, and nothing is reduced, whatever the elements and the op.
    fn of_no_buffer<'a, T: Data>(&self, kind: Collective, root: Option<u32>, op: Option<&Reduction<T>>) -> Result<Prepared<'a>> {
        let nothing = MemoryMut::<T>::from(&mut [][..]);
        Ok(match self.moving(kind, root, 0, Source::InPlace, nothing, BlockLayout::Equal(0))? {
            Prepared::Host(mut job, borrowed) => {
                job.call.op = op.map_or(0, Reduction::code);
                Prepared::HostMany(Jobs::of_no_buffer(job), borrowed)
            }
            other => other,
        })
    }
}

/// A source with its destination.
type Pair<'a, T> = (Memory<'a, T>, MemoryMut<'a, T>);

/// Pairs each source with its destination.
fn pairs<'a, S, D>(call: &'static str, sources: &'a [S], destinations: &'a mut [D]) -> Result<impl Iterator<Item = Pair<'a, S::Element>>>
where
    S: Buffer,
    D: BufferMut<Element = S::Element>,
{
    if sources.len() != destinations.len() {
        let reason =
            format!("{} sources were given, and {} destinations: pass one destination for each source", sources.len(), destinations.len());
        return Err(Error::argument(call, reason));
    }
    Ok(sources.iter().map(Buffer::memory).zip(destinations.iter_mut().map(BufferMut::memory_mut)))
}

/// Adds a buffer's place in the list to an error about that buffer.
fn at_place(call: &'static str, place: usize, error: Error) -> Error {
    match error {
        Error::InvalidArgument { reason, .. } => Error::argument(call, format!("buffer {place} (from 0) of the list: {reason}")),
        other => other,
    }
}
