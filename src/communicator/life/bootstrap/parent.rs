//! Exchanges over a communicator. All its ranks take part, including those outside the new communicator.

use crate::base::deadline::Deadline;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::host::backend::HostBackend;
use crate::host::exchange::Exchange;

/// The most bytes that one rank may send in one exchange.
const MAX_BLOB_BYTES: u64 = 1 << 20;

impl Communicator {
    /// Gathers what every rank sends, in rank order.
    pub(in crate::communicator) fn all_gather_blobs(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lengths = vec![0_u64; self.world_size()];
        self.all_gather_into(&(mine.len() as u64), &mut lengths)?;
        if let Some(rank) = lengths.iter().position(|length| *length > MAX_BLOB_BYTES) {
            let reason = format!("{} B of start-up data for a new communicator; the limit is {MAX_BLOB_BYTES} B", lengths[rank]);
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

/// Exchanges among all ranks. Each wait may take as long as in any call of the communicator.
impl Exchange for &Communicator {
    fn all_gather(&mut self, mine: &[u8], _deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        self.all_gather_blobs(mine)
    }
}

/// An exchange among some ranks of a communicator, in the order of their new numbers.
pub(in crate::communicator) struct ParentExchange<'a> {
    parent: &'a Communicator,
    members: &'a [usize],
    rounds: usize,
}

impl<'a> ParentExchange<'a> {
    pub(in crate::communicator) fn new(parent: &'a Communicator, members: &'a [usize]) -> Self {
        Self { parent, members, rounds: 0 }
    }

    /// Takes part in the remaining exchanges with empty blobs: other groups exchange over the same parent at the same
    /// time, even if this one has failed.
    pub(in crate::communicator) fn finish(&mut self, deadline: &Deadline) -> Result<()> {
        while self.rounds < HostBackend::EXCHANGES {
            self.all_gather(&[], deadline)?;
        }
        Ok(())
    }
}

impl Exchange for ParentExchange<'_> {
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        self.rounds += 1;
        let mut blobs = Exchange::all_gather(&mut self.parent, mine, deadline)?;
        Ok(self.members.iter().map(|member| std::mem::take(&mut blobs[*member])).collect())
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
                for _ in 1..HostBackend::EXCHANGES {
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
