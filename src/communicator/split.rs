//! New communicators from the ranks of an old one.

use super::desk::Desk;
use super::{Communicator, HostPlane};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host::bootstrap::Exchange;
use crate::host::plane::Founding;

/// What a rank says in a split: that it takes no part, or its colour and key.
const NO_COLOR: u64 = u64::MAX;

/// Exchanges blobs over the parent, and hands on those of the members, in the order of their new ranks.
struct ParentExchange<'a> {
    parent: &'a Communicator,
    members: &'a [usize],
}

impl Exchange for ParentExchange<'_> {
    fn all_gather(&mut self, mine: &[u8], _deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        let mut lengths = vec![0_u64; self.parent.world_size()];
        self.parent.all_gather_into(&(mine.len() as u64), &mut lengths)?;
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut bytes = vec![0_u8; counts.iter().sum()];
        self.parent.all_gather_v_into(mine, &mut bytes, &counts)?;
        let mut starts = Vec::with_capacity(counts.len());
        let mut start = 0;
        for count in &counts {
            starts.push(start);
            start += count;
        }
        Ok(self.members.iter().map(|member| bytes[starts[*member]..][..counts[*member]].to_vec()).collect())
    }
}

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
    /// Those of collectives, and of establishing a communicator.
    #[doc(alias("ncclCommSplit", "MPI_Comm_split", "split_group"))]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let mine = [color.map_or(NO_COLOR, u64::from), key as u64];
        let mut all = vec![[0_u64; 2]; self.world_size()];
        self.all_gather_into(&[mine], &mut all)?;
        let mut members: Vec<usize> = (0..all.len()).filter(|rank| color.is_some() && all[*rank][0] == mine[0]).collect();
        members.sort_by_key(|rank| (all[*rank][1] as i64, *rank));
        self.found(&members)
    }

    /// A new communicator of the listed ranks, numbered as listed. Collective: every rank of this communicator calls it with the
    /// same list; those that are not in it get `None`.
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
        self.same_list(ranks)?;
        self.found(ranks)
    }

    /// Refuses lists that differ between ranks.
    fn same_list(&self, ranks: &[usize]) -> Result<()> {
        let mut places = vec![0_u32; self.world_size()];
        for (place, rank) in ranks.iter().enumerate() {
            places[*rank] = place as u32 + 1;
        }
        let mut all = vec![0_u32; self.world_size() * self.world_size()];
        self.all_gather_into(&places, &mut all)?;
        let list = |places: &[u32]| {
            let mut list: Vec<usize> = (0..places.len()).filter(|rank| places[*rank] != 0).collect();
            list.sort_by_key(|rank| places[*rank]);
            list
        };
        match all.chunks_exact(self.world_size()).enumerate().find(|(_, theirs)| **theirs != places[..]) {
            None => Ok(()),
            Some((other, theirs)) => Err(Error::Conflict {
                reason: format!("rank {} passed {ranks:?} to subgroup, and {} passed {:?}", self.rank(), self.peers()[other], list(theirs)),
            }),
        }
    }

    /// Establishes the communicator of `members`; everyone takes part in the exchanges.
    fn found(&self, members: &[usize]) -> Result<Option<Self>> {
        let deadline = Deadline::after(self.timeout());
        let mut exchange = ParentExchange { parent: self, members };
        let Some(rank) = members.iter().position(|member| *member == self.rank()) else {
            for _ in 0..HostPlane::EXCHANGES {
                exchange.all_gather(&[], &deadline)?;
            }
            return Ok(None);
        };
        let mut config = self.config().clone();
        config.timeout = self.timeout();
        let founding = Founding { rank, world_size: members.len(), config: &config, listen: self.shared.listen };
        let (plane, connector) = HostPlane::establish(&mut exchange, &founding, &deadline)?;
        let desk = Desk::new(rank, plane.peers(), plane.health(), connector);
        let comm = Self::new(plane, desk, config, self.shared.listen);
        comm.barrier()?;
        Ok(Some(comm))
    }

    /// A communicator of the same ranks with an order of calls of its own.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&self) -> Result<Self> {
        let everyone: Vec<usize> = (0..self.world_size()).collect();
        let comm = self.found(&everyone)?;
        comm.ok_or_else(|| Error::Conflict { reason: format!("rank {} is not in its own communicator", self.rank()) })
    }
}
