//! New communicators from the ranks of an old one.

use sha2::{Digest, Sha256};

use crate::base::deadline::Deadline;
use crate::communicator::Communicator;
use crate::communicator::life::bootstrap::{Origin, ParentExchange, Start, connect};
use crate::error::{Error, Result};
use crate::observe::LIFE;

/// The colour of a rank that takes no part in a split.
const NO_COLOR: u64 = u64::MAX;

/// The most bytes of a call's description that an error quotes.
const MOST_WORDS: usize = 400;

impl Communicator {
    /// Splits the ranks into new communicators. Ranks that pass the same colour form one communicator, in which they
    /// are numbered in the order of their keys. Ranks with equal keys keep the order that they have in this
    /// communicator. A rank that passes `None` joins no new communicator. Collective: every rank of this communicator
    /// must make this call.
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
    /// The errors common to all collectives, and the errors of joining a job (see [`Communicator::from_env`]).
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

    /// Makes a new communicator of the listed ranks, numbered in the order of the list. Collective: every rank of this
    /// communicator must make this call with the same list. Ranks that are not listed get `None`.
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
    /// Every rank gets the same error for wrong lists:
    /// - `InvalidArgument` if a listed rank does not exist or is listed twice.
    /// - `Conflict` if ranks pass different lists.
    ///
    /// In addition, the errors of [`split`](Self::split).
    #[doc(alias = "new_group")]
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>> {
        self.making("subgroup", || {
            self.agree(&format!("subgroup({ranks:?})"))?;
            self.check_list("subgroup", ranks)?;
            self.connect_members(ranks)
        })
    }

    /// Makes a new communicator for each list of ranks. In each new communicator, the ranks are numbered in the order
    /// of the list. Returns `Some` for each list that contains this rank, and `None` for the other lists. Collective:
    /// every rank of this communicator must make this call with the same lists.
    ///
    /// A rank may be in several lists. Communicators of lists without a common rank are made together in one round, at
    /// the cost of one [`split`](Self::split). Lists with a common rank need several rounds. In the order of `lists`,
    /// each list is put into the first round whose lists so far have no rank in common with this list.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(4, |comm| {
    ///     let groups = comm.subgroups(&[vec![0, 1], vec![3, 2], vec![0, 3]])?; // the first two together, then the third
    ///     Ok(groups.iter().map(|group| group.as_ref().map(Communicator::rank)).collect::<Vec<_>>())
    /// })?;
    /// assert_eq!(got[0], [Some(0), None, Some(0)]);
    /// assert_eq!(got[3], [None, Some(0), Some(1)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`subgroup`](Self::subgroup). If the communicator of one list cannot be made, the ranks in that
    /// list get the error, and they do not get the communicators of their other lists either. Ranks that are not in
    /// that list still get their communicators.
    #[doc(alias = "new_subgroups_by_enumeration")]
    pub fn subgroups<L: AsRef<[usize]>>(&self, lists: &[L]) -> Result<Vec<Option<Self>>> {
        let lists: Vec<&[usize]> = lists.iter().map(AsRef::as_ref).collect();
        self.making("subgroups", || {
            self.agree(&format!("subgroups({lists:?})"))?;
            lists.iter().try_for_each(|list| self.check_list("subgroups", list))?;
            let rounds = rounds(&lists, self.world_size());
            let (mut made, mut failure): (Vec<Option<Self>>, _) = (lists.iter().map(|_| None).collect(), None);
            for round in 0..rounds.iter().max().map_or(0, |last| last + 1) {
                let own = (0..lists.len()).find(|list| rounds[*list] == round && lists[*list].contains(&self.rank()));
                // Even after a failure, this rank takes part in making the other communicators.
                match (own, self.connect_members(own.map_or(&[], |list| lists[list]))) {
                    (Some(list), Ok(comm)) => made[list] = comm,
                    (None, Ok(_)) => {}
                    (_, Err(error)) => failure = failure.or(Some(error)),
                }
            }
            failure.map_or(Ok(made), Err)
        })
    }

    /// Splits the ranks into communicators of `size` neighbouring ranks each, and returns the communicator that
    /// contains this rank. Collective: every rank of this communicator must make this call with the same size.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(4, |comm| {
    ///     let pair = comm.subgroup_of_size(2)?;
    ///     Ok((pair.rank(), pair.world_ranks().to_vec()))
    /// })?;
    /// assert_eq!(got, [(0, vec![0, 1]), (1, vec![0, 1]), (0, vec![2, 3]), (1, vec![2, 3])]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Every rank gets the same error for wrong sizes:
    /// - `InvalidArgument` if the size is 0, or if the world size is not a multiple of the size.
    /// - `Conflict` if ranks pass different sizes.
    ///
    /// In addition, the errors of [`split`](Self::split).
    #[doc(alias = "new_subgroups")]
    pub fn subgroup_of_size(&self, size: usize) -> Result<Self> {
        self.making("subgroup_of_size", || {
            self.agree(&format!("subgroup_of_size({size})"))?;
            if size == 0 || !self.world_size().is_multiple_of(size) {
                let reason = format!("the world size {} is not a multiple of {size}", self.world_size());
                return Err(Error::argument("subgroup_of_size", reason));
            }
            let first = self.rank() / size * size;
            self.member_of(&(first..first + size).collect::<Vec<_>>())
        })
    }

    /// Refuses lists with ranks that do not exist or are listed twice.
    fn check_list(&self, call: &'static str, ranks: &[usize]) -> Result<()> {
        let mut seen = vec![false; self.world_size()];
        for rank in ranks {
            match seen.get_mut(*rank) {
                None => return Err(Error::argument(call, format!("rank {rank} does not exist: the list is {ranks:?}"))),
                Some(true) => return Err(Error::argument(call, format!("rank {rank} is listed twice: the list is {ranks:?}"))),
                Some(seen) => *seen = true,
            }
        }
        Ok(())
    }

    /// Makes a communicator while no other thread's call runs: on devices NCCL splits between calls, at the same point
    /// on every rank.
    pub(super) fn making<R>(&self, call: &'static str, make: impl FnOnce() -> Result<R>) -> Result<R> {
        #[cfg(feature = "cuda")]
        let _turn = self.device_turn(call)?;
        self.composite(call, make)
    }

    /// Refuses calls whose descriptions differ between ranks.
    fn agree(&self, call: &str) -> Result<()> {
        let mine: [u8; 32] = Sha256::digest(call).into();
        let mut all = vec![[0_u8; 32]; self.world_size()];
        self.all_gather_into(&[mine], &mut all)?;
        let Some(other) = all.iter().position(|digest| *digest != all[0]) else { return Ok(()) };
        let cut = call.get(..MOST_WORDS).map_or_else(|| call.to_owned(), |head| format!("{head}…"));
        let said = self.all_gather_blobs(cut.as_bytes())?;
        let called = |rank: usize| format!("{} called {}", self.peers()[rank], String::from_utf8_lossy(&said[rank]));
        Err(Error::Conflict { reason: format!("{}, and {}", called(0), called(other)) })
    }

    /// Connects `members` as a new communicator. All ranks take part in the exchanges.
    fn connect_members(&self, members: &[usize]) -> Result<Option<Self>> {
        let deadline = Deadline::after(self.timeout());
        let name = self.name_child(members);
        let mut exchange = ParentExchange::new(self, members);
        let Some(rank) = members.iter().position(|member| *member == self.rank()) else {
            exchange.finish(&deadline)?;
            return Ok(None);
        };
        let connected = connect(&mut exchange, self.start_of(rank, members, name), &deadline);
        exchange.finish(&deadline)?;
        let made = connected.and_then(|comm| comm.barrier().map(|()| comm));
        #[cfg(feature = "cuda")]
        if let Ok(comm) = &made {
            self.connect_split_device(comm, &deadline)?;
        }
        made.inspect(|comm| {
            comm.keep_store(self.kept_store());
            let (name, child) = (self.core.shared.recorder.name(), comm.core.shared.recorder.name());
            crate::base::event::debug!(target: LIFE, communicator = name, rank = self.rank(), child, world_size = members.len(), "split");
        })
        .map(Some)
    }

    /// Returns what this rank knows at the start of a new communicator of `members`, in which it has number `rank`.
    pub(super) fn start_of(&self, rank: usize, members: &[usize], name: String) -> Start {
        let shared = &self.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.timeout();
        let origin = Origin::Communicator {
            recovery: shared.recovery.of(members),
            world_ranks: shared.world_ranks_of(members),
            name,
            trace: shared.trace.clone(),
        };
        Start { rank, world_size: members.len(), config, listen: shared.listen, origin }
    }

    /// Makes another communicator of the same ranks. Calls on the two communicators have no common order: each matches
    /// only calls on the same communicator. Collective: every rank of this communicator must make this call.
    /// [`lane`](Self::lane) makes such a communicator too, but is not a collective.
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
    /// The errors of [`split`](Self::split).
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&self) -> Result<Self> {
        let everyone: Vec<usize> = (0..self.world_size()).collect();
        self.making("duplicate", || self.member_of(&everyone))
    }

    /// Connects `members`, which include this rank.
    fn member_of(&self, members: &[usize]) -> Result<Self> {
        let comm = self.connect_members(members)?;
        comm.ok_or_else(|| Error::Conflict { reason: format!("rank {} is not a member of the communicator that it makes", self.rank()) })
    }
}

/// Returns the round in which each list is made: the first one in which no earlier list has one of its ranks.
fn rounds(lists: &[&[usize]], world_size: usize) -> Vec<usize> {
    let mut taken: Vec<Vec<bool>> = Vec::new();
    let first = |list: &&[usize]| {
        let is_free = |taken: &Vec<bool>| list.iter().all(|rank| !taken[*rank]);
        let round = taken.iter().position(is_free).unwrap_or(taken.len());
        if round == taken.len() {
            taken.push(vec![false; world_size]);
        }
        list.iter().for_each(|rank| taken[round][*rank] = true);
        round
    };
    lists.iter().map(first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_without_a_common_rank_are_made_together() {
        assert!(rounds(&[], 4).is_empty());
        assert_eq!(rounds(&[&[0, 1], &[2], &[], &[3]], 4), [0, 0, 0, 0]);
        assert_eq!(rounds(&[&[0, 1], &[1, 2], &[2, 3], &[0, 1, 2, 3], &[3]], 4), [0, 1, 0, 2, 1]);
    }
}
