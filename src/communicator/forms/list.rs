//! Collectives to and from lists of buffers, one buffer for each rank, in all their forms.
//!
//! Each rank decides for itself whether its blocks lie in one buffer, or each in a buffer of its own. So ranks compare
//! a call on a list as the call with a count for each rank (`gather_v`, `scatter_v`, `all_to_all_v`). A rank that
//! passes a list thus makes the same call as a rank that passes one buffer. The buffers of a list are not copied into
//! one buffer. Plans name places by offsets, and `job::List` returns the address of an offset.

use std::marker::PhantomData;

use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::element::{Data, TypeTag};
use crate::call::job::{Address, List, Lists, Operands};
use crate::call::{BlockLayout, Call, Collective};
use crate::communicator::Communicator;
use crate::communicator::forms::group::Group;
#[cfg(feature = "cuda")]
use crate::communicator::prepare::device_call::{DeviceCall, DeviceLists};
use crate::communicator::prepare::prepared::{Prepared, described, element, held};
use crate::communicator::work::{OwnedBuffer, OwnedSource, Work};
#[cfg(feature = "cuda")]
use crate::device;
use crate::error::{Error, Result};
use crate::host::backend::Job;

/// # Lists of buffers
///
/// These calls gather into, or scatter from, a list with one buffer for each rank, in rank order. So the blocks need
/// not be in one long buffer, and are not copied into one. The buffers of a list may differ in length and may be empty.
/// They must all be on the host, or all on a device.
///
/// Before anything is written, the ranks compare the lengths at the two ends of each transfer, as in
/// [`gather_v_into`](Self::gather_v_into). If any differ, every rank gets the same `Mismatch`. This also applies to
/// background calls and to calls in a group.
///
/// A rank that has its blocks in one buffer can make the matching `_v_into` call while others pass lists. In errors and
/// records, the calls on lists therefore have the names `gather_v`, `scatter_v` and `all_to_all_v`. Only
/// `all_gather_list` is a call of its own, which matches no `_v_into` call.
impl Communicator {
    /// Gathers every rank's source on the root, and writes each source into a separate destination. The root passes
    /// `Some` with a list that has one destination for each rank. The other ranks pass `None`. Cost: the root receives
    /// n−1 blocks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut all = [vec![0u8; 1], vec![0; 2]];
    ///     let mine = vec![comm.rank() as u8 + 1; comm.rank() + 1];
    ///     comm.gather_list(&mine, (comm.rank() == 0).then_some(&mut all), 0)?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got[0], [vec![1], vec![2, 2]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and `InvalidArgument`:
    /// - if the list does not have one buffer for each rank,
    /// - if some buffers are on the host and others on a device.
    #[doc(alias = "gather")]
    pub fn gather_list<S, D>(&self, source: &S, destinations: Option<&mut [D]>, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element>,
    {
        self.execute(self.prepare_gather_list(source, destinations, root))
    }

    /// Sends each buffer of the root's list to the rank with the buffer's index. The root passes `Some` with a list
    /// that has one source for each rank. The other ranks pass `None`. Cost: the root sends n−1 blocks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut mine = vec![0u16; comm.rank() + 1];
    ///     let parts = [vec![5u16], vec![6, 7]];
    ///     comm.scatter_list((comm.rank() == 1).then_some(&parts[..]), &mut mine, 1)?;
    ///     Ok(mine)
    /// })?;
    /// assert_eq!(got, [vec![5], vec![6, 7]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`gather_list`](Self::gather_list).
    #[doc(alias = "scatter")]
    pub fn scatter_list<S, D>(&self, sources: Option<&[S]>, destination: &mut D, root: usize) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.execute(self.prepare_scatter_list(sources, destination, root))
    }

    /// Gathers every rank's source on every rank, and writes each source into a separate destination. Cost: every rank
    /// sends n−1 blocks, because it sends its source to each other rank.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let mut all = [vec![0u32; 1], vec![0; 2]];
    ///     comm.all_gather_list(&vec![comm.rank() as u32; comm.rank() + 1], &mut all)?;
    ///     Ok(all)
    /// })?;
    /// assert_eq!(got[0], [vec![0], vec![1, 1]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`gather_list`](Self::gather_list).
    #[doc(alias = "all_gather")]
    pub fn all_gather_list<S, D>(&self, source: &S, destinations: &mut [D]) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element>,
    {
        self.execute(self.prepare_all_gather_list(source, destinations))
    }

    /// Sends a buffer to each rank and receives a buffer from each rank: source `j` of rank `i` becomes destination `i`
    /// of rank `j`. Cost: each rank sends n−1 blocks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let me = comm.rank() as u8;
    ///     let mut theirs = [[0u8], [0]];
    ///     comm.all_to_all_list(&[[10 * me], [10 * me + 1]], &mut theirs)?;
    ///     Ok(theirs)
    /// })?;
    /// assert_eq!(got, [[[0], [10]], [[1], [11]]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`gather_list`](Self::gather_list).
    #[doc(alias = "all_to_all")]
    pub fn all_to_all_list<S, D>(&self, sources: &[S], destinations: &mut [D]) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        self.execute(self.prepare_all_to_all_list(sources, destinations))
    }

    /// Starts a [`gather_list`](Self::gather_list). Only the root passes `Some` as `destinations`.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_gather_list<S, D>(&self, source: S, destinations: Option<Vec<D>>, root: usize) -> Result<Work<(S, Option<Vec<D>>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destinations), |(source, destinations)| self.prepare_gather_list(source, destinations.as_deref_mut(), root))
    }

    /// Starts a [`scatter_list`](Self::scatter_list). Only the root passes `Some` as `sources`.
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_scatter_list<S, D>(&self, sources: Option<Vec<S>>, destination: D, root: usize) -> Result<Work<(Option<Vec<S>>, D)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((sources, destination), |(sources, destination)| self.prepare_scatter_list(sources.as_deref(), destination, root))
    }

    /// Starts an [`all_gather_list`](Self::all_gather_list).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_gather_list<S, D>(&self, source: S, destinations: Vec<D>) -> Result<Work<(S, Vec<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destinations), |(source, destinations)| self.prepare_all_gather_list(source, destinations))
    }

    /// Starts an [`all_to_all_list`](Self::all_to_all_list).
    ///
    /// # Errors
    ///
    /// The [errors of background collectives](Self#errors-of-background-collectives).
    pub fn start_all_to_all_list<S, D>(&self, sources: Vec<S>, destinations: Vec<D>) -> Result<Work<(Vec<S>, Vec<D>)>>
    where
        S: OwnedSource,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((sources, destinations), |(sources, destinations)| self.prepare_all_to_all_list(sources, destinations))
    }
}

impl<'buffers> Group<'buffers, '_> {
    /// Records a [`gather_list`](Communicator::gather_list).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn gather_list<S, D>(&mut self, source: &'buffers S, destinations: Option<&'buffers mut [D]>, root: usize) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element>,
    {
        self.record(self.comm.prepare_gather_list(source, destinations, root))
    }

    /// Records a [`scatter_list`](Communicator::scatter_list).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn scatter_list<S, D>(&mut self, sources: Option<&'buffers [S]>, destination: &'buffers mut D, root: usize) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        self.record(self.comm.prepare_scatter_list(sources, destination, root))
    }

    /// Records an [`all_gather_list`](Communicator::all_gather_list).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_gather_list<S, D>(&mut self, source: &'buffers S, destinations: &'buffers mut [D]) -> Result<()>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element>,
    {
        self.record(self.comm.prepare_all_gather_list(source, destinations))
    }

    /// Records an [`all_to_all_list`](Communicator::all_to_all_list).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the arguments are invalid on this rank.
    pub fn all_to_all_list<S, D>(&mut self, sources: &'buffers [S], destinations: &'buffers mut [D]) -> Result<()>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        self.record(self.comm.prepare_all_to_all_list(sources, destinations))
    }
}

/// The buffers that a call reads, or writes.
enum Given<M> {
    Nothing,
    Whole(M),
    /// A buffer for each rank.
    List(Vec<M>),
}

impl<M> Given<M> {
    /// Returns each buffer.
    fn all(&self) -> &[M] {
        match self {
            Self::Nothing => &[],
            Self::Whole(one) => std::slice::from_ref(one),
            Self::List(list) => list,
        }
    }
}

/// The properties of a call on lists that all ranks must agree on.
struct Agreed {
    kind: Collective,
    root: Option<u32>,
    op: u64,
    /// The call's name in errors.
    name: &'static str,
}

impl Agreed {
    fn rooted(kind: Collective, root: Option<u32>) -> Self {
        Self { kind, root, op: 0, name: kind.name() }
    }
}

impl Communicator {
    fn prepare_gather_list<'a, S, D>(&self, source: &'a S, destinations: Option<&'a mut [D]>, root: usize) -> Result<Prepared<'a>>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element>,
    {
        let kind = Collective::GatherV;
        let agreed = Agreed::rooted(kind, self.checked_root(kind, root)?);
        self.only_at_root(kind, "a list of destinations", destinations.is_some(), root)?;
        let source = source.memory();
        let Some(destinations) = destinations else {
            let layout = BlockLayout::Own(source.len());
            return lists(&agreed, Given::Whole(source), Given::Nothing, layout);
        };
        let destinations = self.written(kind.name(), destinations)?;
        Self::equal(kind, "the source", source.len(), destinations[self.rank()].len(), "as many as this rank's buffer in the list has")?;
        let layout = BlockLayout::Blocks(destinations.iter().map(MemoryMut::len).collect());
        lists(&agreed, Given::Whole(source), Given::List(destinations), layout)
    }

    fn prepare_scatter_list<'a, S, D>(&self, sources: Option<&'a [S]>, destination: &'a mut D, root: usize) -> Result<Prepared<'a>>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let kind = Collective::ScatterV;
        let agreed = Agreed::rooted(kind, self.checked_root(kind, root)?);
        self.only_at_root(kind, "a list of sources", sources.is_some(), root)?;
        let destination = destination.memory_mut();
        let Some(sources) = sources else {
            let layout = BlockLayout::Own(destination.len());
            return lists(&agreed, Given::Nothing, Given::Whole(destination), layout);
        };
        let sources = self.read(kind.name(), sources)?;
        Self::equal(
            kind,
            "the destination",
            destination.len(),
            sources[self.rank()].len(),
            "as many as this rank's buffer in the list has",
        )?;
        let layout = BlockLayout::Blocks(sources.iter().map(Memory::len).collect());
        lists(&agreed, Given::List(sources), Given::Whole(destination), layout)
    }

    pub(in crate::communicator) fn prepare_all_gather_list<'a, S, D>(
        &self,
        source: &'a S,
        destinations: &'a mut [D],
    ) -> Result<Prepared<'a>>
    where
        S: Buffer + ?Sized,
        D: BufferMut<Element = S::Element>,
    {
        // Every rank gets the same block.
        let sources = vec![source.memory(); self.world_size()];
        let destinations = self.written("all_gather_list", destinations)?;
        self.exchange_lists("all_gather_list", Call::SAME_FOR_ALL, sources, destinations)
    }

    fn prepare_all_to_all_list<'a, S, D>(&self, sources: &'a [S], destinations: &'a mut [D]) -> Result<Prepared<'a>>
    where
        S: Buffer,
        D: BufferMut<Element = S::Element>,
    {
        let call = Collective::AllToAllV.name();
        let (sources, destinations) = (self.read(call, sources)?, self.written(call, destinations)?);
        self.exchange_lists(call, 0, sources, destinations)
    }

    /// Makes a call that sends a block to each rank and receives one from each.
    fn exchange_lists<'a, T: Data>(
        &self,
        name: &'static str,
        op: u64,
        sources: Vec<Memory<'a, T>>,
        destinations: Vec<MemoryMut<'a, T>>,
    ) -> Result<Prepared<'a>> {
        let (send, receive) = (sources[self.rank()].len(), destinations[self.rank()].len());
        if send != receive {
            let reason = format!("this rank sends {send} elements to itself, but has room for {receive}: the two lengths must be equal");
            return Err(Error::argument(name, reason));
        }
        let layout = BlockLayout::Pairs {
            send: sources.iter().map(Memory::len).collect(),
            receive: destinations.iter().map(MemoryMut::len).collect(),
        };
        let agreed = Agreed { kind: Collective::AllToAllV, root: None, op, name };
        lists(&agreed, Given::List(sources), Given::List(destinations), layout)
    }

    /// Checks that there is one source for each rank, and returns their memory.
    fn read<'a, S: Buffer>(&self, call: &'static str, list: &'a [S]) -> Result<Vec<Memory<'a, S::Element>>> {
        self.one_for_each(call, "sources", list.len())?;
        Ok(list.iter().map(Buffer::memory).collect())
    }

    /// Checks that there is one destination for each rank, and returns their memory.
    fn written<'a, D: BufferMut>(&self, call: &'static str, list: &'a mut [D]) -> Result<Vec<MemoryMut<'a, D::Element>>> {
        self.one_for_each(call, "destinations", list.len())?;
        Ok(list.iter_mut().map(BufferMut::memory_mut).collect())
    }

    fn one_for_each(&self, call: &'static str, what: &str, given: usize) -> Result<()> {
        if given == self.world_size() {
            return Ok(());
        }
        Err(Error::argument(call, format!("{given} {what} were given, but {} are needed: one for each rank", self.world_size())))
    }
}

/// Returns the tag of the element type of all buffers of a call on lists, and the size of an element.
fn held_by_all<T: Data>(
    call: &'static str,
    source: &Given<Memory<'_, T>>,
    destination: &Given<MemoryMut<'_, T>>,
) -> Result<(TypeTag, usize)> {
    if !T::KNOWN_AT_RUN_TIME {
        return element::<T>(call);
    }
    let sources = source.all().iter().map(|memory| ("a source", memory.element(), memory.misplaced()));
    let destinations = destination.all().iter().map(|memory| ("a destination", memory.element(), memory.misplaced()));
    let mut known: Option<(TypeTag, usize)> = None;
    for (what, element, misplaced) in sources.chain(destinations) {
        let (tag, bytes) = held::<T>(call, what, element, misplaced)?;
        let (first, _) = *known.get_or_insert((tag, bytes));
        if first != tag {
            return Err(Error::argument(call, format!("one buffer holds {first} and another holds {tag}: pass buffers of one type")));
        }
    }
    known.map_or_else(|| element::<T>(call), Ok)
}

/// Returns the error of a call with buffers both on the host and on a device.
#[cfg(feature = "cuda")]
fn two_sides(call: &Call) -> Error {
    Error::argument(call.name(), "some buffers are on the host and others on a device: pass all on the host, or all on a device")
}

/// Makes the job of a checked call in which at least one of the two buffers is a list. The layout is in elements.
fn lists<'a, T: Data>(
    agreed: &Agreed,
    source: Given<Memory<'a, T>>,
    destination: Given<MemoryMut<'a, T>>,
    layout: BlockLayout,
) -> Result<Prepared<'a>> {
    let (element, element_bytes) = held_by_all(agreed.name, &source, &destination)?;
    let layout = layout.in_bytes(element_bytes);
    let call = described(agreed.kind, element, agreed.root, 0, &layout, agreed.op);
    #[cfg(feature = "cuda")]
    if source.all().iter().any(|memory| matches!(memory, Memory::Device(_)))
        || destination.all().iter().any(|memory| matches!(memory, MemoryMut::Device(_)))
    {
        return device_lists(call, element_bytes, source, destination, layout);
    }
    let read = |memory: Memory<'a, T>| match memory {
        Memory::Host(memory) => Ok(memory.parts()),
        #[cfg(feature = "cuda")]
        Memory::Device(_) => Err(two_sides(&call)),
    };
    let written = |memory: MemoryMut<'a, T>| match memory {
        MemoryMut::Host(mut memory) => Ok(memory.parts()),
        #[cfg(feature = "cuda")]
        MemoryMut::Device(_) => Err(two_sides(&call)),
    };
    let (source, source_len, sources) = placed(source, std::ptr::null(), read)?;
    let (destination, destination_len, destinations) = placed(destination, std::ptr::null_mut(), written)?;
    let memory = Operands { source, source_len, destination, destination_len };
    let has_lists = sources.is_some() || destinations.is_some();
    let lists = has_lists.then(|| Box::new(Lists { source: sources, destination: destinations }));
    let job = Job { call, memory, layout, reduction: None, element_bytes, in_place: false, lists };
    Ok(Prepared::Host(job, PhantomData))
}

/// Returns the address of a buffer, its length in bytes, and the list if it is one.
fn placed<M, A: Address>(given: Given<M>, nowhere: A, place: impl Fn(M) -> Result<(A, usize)>) -> Result<(A, usize, Option<List<A>>)> {
    match given {
        Given::Nothing => Ok((nowhere, 0, None)),
        Given::Whole(memory) => place(memory).map(|(address, len)| (address, len, None)),
        Given::List(list) => {
            let places = list.into_iter().map(place).collect::<Result<Vec<_>>>()?;
            let len = places.iter().map(|(_, len)| len).sum();
            Ok((nowhere, len, Some(List::new(places.into_iter()))))
        }
    }
}

/// Makes the same job for a device. Its addresses are filled in once the stream is known.
#[cfg(feature = "cuda")]
fn device_lists<'a, T: Data>(
    call: Call,
    element_bytes: usize,
    source: Given<Memory<'a, T>>,
    destination: Given<MemoryMut<'a, T>>,
    layout: BlockLayout,
) -> Result<Prepared<'a>> {
    let source_len = source.all().iter().map(|memory| memory.len() * element_bytes).sum();
    let destination_len = destination.all().iter().map(|memory| memory.len() * element_bytes).sum();
    let read = |memory: Memory<'a, T>| match memory {
        Memory::Device(memory) => Ok(memory),
        Memory::Host(_) => Err(two_sides(&call)),
    };
    let written = |memory: MemoryMut<'a, T>| match memory {
        MemoryMut::Device(memory) => Ok(memory),
        MemoryMut::Host(_) => Err(two_sides(&call)),
    };
    let mut lists = DeviceLists::default();
    let source = match source {
        Given::Nothing => None,
        Given::Whole(memory) => Some(read(memory)?.inner),
        Given::List(list) => {
            for memory in list {
                let memory = read(memory)?;
                lists.sources.push((memory.inner, memory.bytes()));
            }
            None
        }
    };
    let destination = match destination {
        Given::Nothing => None,
        Given::Whole(memory) => Some(written(memory)?.inner),
        Given::List(list) => {
            for memory in list {
                let memory = written(memory)?;
                let len = memory.bytes();
                lists.destinations.push((memory.inner, len));
            }
            None
        }
    };
    let memory = Operands { source: 0, source_len, destination: 0, destination_len };
    let job = device::Job { call, memory, layout, reduction: None, element_bytes, in_place: false, lists: None };
    let has_lists = !(lists.sources.is_empty() && lists.destinations.is_empty());
    Ok(Prepared::Device(DeviceCall { job, source, destination, lists: has_lists.then(|| Box::new(lists)) }))
}
