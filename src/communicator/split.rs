//! New communicators from the ranks of an old one.

use super::Communicator;
use super::bootstrap::{Origin, ParentExchange, Start, connect};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::observe::LIFE;

/// The colour that a rank says in a split in which it takes no part.
const NO_COLOR: u64 = u64::MAX;

impl Communicator {
    /// Splits the ranks into new communicators: those that pass the same colour form one, ordered by key and, among equal keys, by
    /// their rank here. `None` takes no part. Collective: every rank of this communicator calls it.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let sums = Communicator::run_local(4, |comm| {
    ///     let half = comm.split(Some(comm.rank() as u32 / 2), 0)?.expect("every rank has a colour");
    ///     let mut x = comm.rank() as i32;
    ///     half.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(sums, [1, 1, 5, 5]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of collectives, and of a start.
    #[doc(alias("ncclCommSplit", "MPI_Comm_split", "split_group"))]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        self.making("split", || self.split_by(color, key))
    }

    fn split_by(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let mine = [color.map_or(NO_COLOR, u64::from), key as u64];
        let mut all = vec![[0_u64; 2]; self.world_size()];
        self.all_gather_into(&[mine], &mut all)?;
        let mut members: Vec<usize> = (0..all.len()).filter(|rank| color.is_some() && all[*rank][0] == mine[0]).collect();
        members.sort_by_key(|rank| (all[*rank][1] as i64, *rank));
        self.connect_members(&members)
    }

    /// A new communicator of the listed ranks, numbered as listed. Collective: every rank of this communicator calls it with the
    /// same list; those that are not in it get `None`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(3, |comm| {
    ///     let pair = comm.subgroup(&[2, 0])?; // every rank calls it
    ///     Ok(pair.map(|pair| pair.rank()))
    /// })?;
    /// assert_eq!(got, [Some(1), None, Some(0)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank that does not exist or stands twice, `Conflict` where ranks pass different lists, and as
    /// [`split`](Self::split).
    #[doc(alias = "new_group")]
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>> {
        let mut seen = vec![false; self.world_size()];
        for rank in ranks {
            match seen.get_mut(*rank) {
                None => return Err(Error::argument("subgroup", format!("rank {rank} does not exist: the list is {ranks:?}"))),
                Some(true) => return Err(Error::argument("subgroup", format!("rank {rank} stands twice: the list is {ranks:?}"))),
                Some(seen) => *seen = true,
            }
        }
        self.making("subgroup", || {
            self.same_list(ranks)?;
            self.connect_members(ranks)
        })
    }

    /// Makes a communicator while no other thread's call runs: on devices NCCL splits between calls, at the same place on every rank.
    fn making<R>(&self, call: &'static str, make: impl FnOnce() -> Result<R>) -> Result<R> {
        #[cfg(feature = "cuda")]
        let _turn = self.device_turn(call)?;
        self.composite(call, make)
    }

    /// Refuses lists that differ between ranks.
    fn same_list(&self, ranks: &[usize]) -> Result<()> {
        let mut places = vec![0_u32; self.world_size()];
        for (place, rank) in ranks.iter().enumerate() {
            places[*rank] = place as u32 + 1;
        }
        let mut first = places.clone();
        self.broadcast(&mut first, 0)?;
        let mut differs = vec![false; self.world_size()];
        self.all_gather_into(&(first != places), &mut differs)?;
        let Some(other) = differs.iter().position(|differs| *differs) else { return Ok(()) };
        self.broadcast(&mut places, other)?;
        let list = |places: &[u32]| {
            let mut list: Vec<usize> = (0..places.len()).filter(|rank| places[*rank] != 0).collect();
            list.sort_by_key(|rank| places[*rank]);
            list
        };
        let [zero, other] = [0, other].map(|rank| &self.peers()[rank]);
        let reason = format!("{zero} passed {:?} to subgroup, and {other} passed {:?}", list(&first), list(&places));
        Err(Error::Conflict { reason })
    }

    /// Connects `members` as a new communicator; everyone takes part in the exchanges.
    fn connect_members(&self, members: &[usize]) -> Result<Option<Self>> {
        let deadline = Deadline::after(self.timeout());
        let name = self.name_child(members);
        let mut exchange = ParentExchange::new(self, members);
        let Some(rank) = members.iter().position(|member| *member == self.rank()) else {
            exchange.finish(&deadline)?;
            #[cfg(feature = "cuda")]
            self.connect_split_device(None, &deadline)?;
            return Ok(None);
        };
        let shared = &self.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.timeout();
        let origin = Origin::Communicator {
            recovery: shared.recovery.of(members),
            world_ranks: shared.world_ranks_of(members),
            name,
            trace: shared.trace.clone(),
        };
        let start = Start { rank, world_size: members.len(), config, listen: shared.listen, origin };
        let connected = connect(&mut exchange, start, &deadline);
        exchange.finish(&deadline)?;
        let made = connected.and_then(|comm| comm.barrier().map(|()| comm));
        // NCCL's split wants every rank of the parent, whatever became of one child.
        #[cfg(feature = "cuda")]
        self.connect_split_device(made.as_ref().ok().map(|comm| (comm, members[0] as u32)), &deadline)?;
        made.inspect(|comm| {
            let (name, child) = (shared.recorder.name(), comm.core.shared.recorder.name());
            crate::event::debug!(target: LIFE, communicator = name, rank = self.rank(), child, world_size = members.len(), "split");
        })
        .map(Some)
    }

    /// A communicator of the same ranks with an order of calls of its own.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| {
    ///     let other = comm.duplicate()?;
    ///     other.barrier()?;
    ///     Ok(other.rank() == comm.rank())
    /// })?;
    /// assert_eq!(got, [true, true]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&self) -> Result<Self> {
        let everyone: Vec<usize> = (0..self.world_size()).collect();
        let comm = self.making("duplicate", || self.connect_members(&everyone))?;
        comm.ok_or_else(|| Error::Conflict { reason: format!("rank {} is not in its own communicator", self.rank()) })
    }
}
