//! New communicators from the ranks of an old one.

use super::Communicator;
use super::progress::ProgressEngine;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host::bootstrap::Exchange;
use crate::host::plane::{HostPlane, PlaneSetup};
use crate::observe::LIFE;

/// What a rank says in a split: that it takes no part, or its colour and key.
const NO_COLOR: u64 = u64::MAX;

/// The most that one rank may say in one round of an exchange.
const MAX_BLOB_BYTES: u64 = 1 << 20;

/// Exchanges blobs over the parent, and hands on those of the members, in the order of their new ranks.
pub(super) struct ParentExchange<'a> {
    parent: &'a Communicator,
    members: &'a [usize],
    rounds: usize,
}

impl<'a> ParentExchange<'a> {
    /// Among these ranks of a communicator.
    pub(super) fn new(parent: &'a Communicator, members: &'a [usize]) -> Self {
        Self { parent, members, rounds: 0 }
    }

    /// Takes part in the rounds that are left, with nothing to say: other groups exchange over the same parent at the same time,
    /// whatever becomes of this one.
    fn finish(&mut self, deadline: &Deadline) -> Result<()> {
        while self.rounds < HostPlane::EXCHANGES {
            self.all_gather(&[], deadline)?;
        }
        Ok(())
    }
}

impl Exchange for ParentExchange<'_> {
    fn all_gather(&mut self, mine: &[u8], _deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        self.rounds += 1;
        let mut blobs = self.parent.all_gather_blobs(mine)?;
        Ok(self.members.iter().map(|member| std::mem::take(&mut blobs[*member])).collect())
    }
}

impl Communicator {
    /// What every rank has to say, in rank order.
    pub(super) fn all_gather_blobs(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lengths = vec![0_u64; self.world_size()];
        self.all_gather_into(&(mine.len() as u64), &mut lengths)?;
        if let Some(rank) = lengths.iter().position(|length| *length > MAX_BLOB_BYTES) {
            let reason = format!("{} B about itself for a new communicator, and {MAX_BLOB_BYTES} B are the most", lengths[rank]);
            return Err(Error::Protocol { with: self.peers()[rank].to_string(), reason });
        }
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut bytes = vec![0_u8; counts.iter().sum()];
        self.all_gather_v_into(mine, &mut bytes, &counts)?;
        let mut rest = &bytes[..];
        let mut next = |count: &usize| {
            let (blob, tail) = rest.split_at(*count);
            rest = tail;
            blob.to_vec()
        };
        Ok(counts.iter().map(&mut next).collect())
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
        self.composite("split", || self.split_by(color, key))
    }

    fn split_by(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let mine = [color.map_or(NO_COLOR, u64::from), key as u64];
        let mut all = vec![[0_u64; 2]; self.world_size()];
        self.all_gather_into(&[mine], &mut all)?;
        let mut members: Vec<usize> = (0..all.len()).filter(|rank| color.is_some() && all[*rank][0] == mine[0]).collect();
        members.sort_by_key(|rank| (all[*rank][1] as i64, *rank));
        self.form(&members)
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
        self.composite("subgroup", || {
            self.same_list(ranks)?;
            self.form(ranks)
        })
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

    /// Establishes the communicator of `members`; everyone takes part in the exchanges.
    fn form(&self, members: &[usize]) -> Result<Option<Self>> {
        let deadline = Deadline::after(self.timeout());
        let name = self.name_child(members);
        let mut exchange = ParentExchange::new(self, members);
        let Some(rank) = members.iter().position(|member| *member == self.rank()) else {
            exchange.finish(&deadline)?;
            #[cfg(feature = "cuda")]
            self.split_device(None, &deadline)?;
            return Ok(None);
        };
        let shared = &self.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.timeout();
        let setup = PlaneSetup { rank, world_size: members.len(), config: &config, listen: shared.listen, recovery_listener: None };
        let established = HostPlane::establish(&mut exchange, &setup, &deadline);
        exchange.finish(&deadline)?;
        let made = established.and_then(|(plane, connector)| {
            let progress = ProgressEngine::new(&plane, connector);
            let comm = Self::new(plane, progress, config, shared.listen, shared.recovery.of(members), name, shared.trace.clone());
            comm.barrier().map(|()| comm)
        });
        // NCCL's split wants every rank of the parent, whatever became of one child.
        #[cfg(feature = "cuda")]
        self.split_device(made.as_ref().ok().map(|comm| (comm, members[0] as u32)), &deadline)?;
        let flight = shared.health.flight();
        made.inspect(|comm| {
            let child = comm.core.shared.health.flight().name();
            crate::event::debug!(target: LIFE, communicator = flight.name(), rank = self.rank(), child, world_size = members.len(), "split");
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
        let comm = self.composite("duplicate", || self.form(&everyone))?;
        comm.ok_or_else(|| Error::Conflict { reason: format!("rank {} is not in its own communicator", self.rank()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_fails_holds_up_no_other() {
        let blobs = Communicator::run_local(3, |comm| {
            let deadline = Deadline::after(comm.timeout());
            let members: &[usize] = if comm.rank() == 1 { &[1] } else { &[2, 0] };
            let mut exchange = ParentExchange::new(comm, members);
            let mine = vec![comm.rank() as u8; comm.rank()];
            let all = exchange.all_gather(&mine, &deadline)?;
            if comm.rank() == 1 {
                for _ in 1..HostPlane::EXCHANGES {
                    exchange.all_gather(&mine, &deadline)?;
                }
            }
            exchange.finish(&deadline)?;
            comm.barrier()?;
            Ok(all)
        });
        assert_eq!(blobs.unwrap(), [vec![vec![2, 2], vec![]], vec![vec![1]], vec![vec![2, 2], vec![]]]);
    }

    #[test]
    fn too_much_said_is_refused_by_everyone() {
        let errors = Communicator::run_local(2, |comm| {
            let mut exchange = ParentExchange::new(comm, &[0, 1]);
            let mine = vec![0; if comm.rank() == 1 { MAX_BLOB_BYTES as usize + 1 } else { 0 }];
            let error = exchange.all_gather(&mine, &Deadline::after(comm.timeout())).unwrap_err();
            comm.barrier()?;
            Ok(error.to_string())
        });
        assert!(errors.unwrap().iter().all(|error| error.contains("rank 1") && error.contains("1048577 B")));
    }
}
