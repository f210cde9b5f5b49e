//! How the ranks of a new communicator exchange data about themselves before they are connected.

use crate::base::deadline::Deadline;
use crate::error::Result;

/// An exchange of small blobs between ranks: over a store, or over a communicator that they already have.
pub(crate) trait Exchange {
    /// Contributes this rank's blob and returns the blobs of all ranks, in rank order. Every rank must call this method
    /// the same number of times.
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>>;
}

#[cfg(any(test, feature = "__internals"))]
pub(crate) mod local {
    //! Exchanges between threads, for tests and benchmarks.

    use std::sync::{Arc, Condvar, Mutex, PoisonError};

    use super::{Deadline, Exchange, Result};

    /// State that all ranks share: one vector of blobs per round, and a condition variable.
    type Rounds = (Mutex<Vec<Vec<Option<Vec<u8>>>>>, Condvar);

    /// One rank's end of an exchange.
    pub(crate) struct LocalExchange {
        rank: usize,
        size: usize,
        round: usize,
        rounds: Arc<Rounds>,
    }

    /// Creates one end for each of `size` ranks.
    pub(crate) fn exchanges(size: usize) -> Vec<LocalExchange> {
        let rounds: Arc<Rounds> = Arc::default();
        (0..size).map(|rank| LocalExchange { rank, size, round: 0, rounds: Arc::clone(&rounds) }).collect()
    }

    impl Exchange for LocalExchange {
        fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
            let (rounds, changed) = &*self.rounds;
            let mut rounds = rounds.lock().unwrap_or_else(PoisonError::into_inner);
            if rounds.len() <= self.round {
                rounds.push(vec![None; self.size]);
            }
            rounds[self.round][self.rank] = Some(mine.to_vec());
            changed.notify_all();
            let missing = |rounds: &mut Vec<Vec<Option<Vec<u8>>>>| rounds[self.round].iter().any(Option::is_none);
            let (rounds, wait) = changed.wait_timeout_while(rounds, deadline.remaining(), missing).unwrap_or_else(PoisonError::into_inner);
            if wait.timed_out() {
                return Err(crate::error::Error::io("waiting for the other ranks' contributions", std::io::ErrorKind::TimedOut));
            }
            let all = rounds[self.round].iter().flatten().cloned().collect();
            self.round += 1;
            Ok(all)
        }
    }
}
