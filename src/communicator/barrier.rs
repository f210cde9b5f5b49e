//! Barriers: the fast one, and the one that says who is missing and leaves the communicator usable.

use std::time::Duration;

use super::Communicator;
use super::message::INTERNAL_TAG;
use super::prepare::{Prepared, Source};
use crate::call::{BlockLayout, Kind};
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::tuning::barrier::VERDICT_PATIENCE;

/// A monitored barrier's tags: this bit, the internal bit, and the barrier's number.
const MONITORED_TAG: u64 = INTERNAL_TAG | 1 << 62;

impl Communicator {
    pub(super) fn prepare_barrier<'a>(&self) -> Result<Prepared<'a>> {
        self.moving::<u8>(Kind::Barrier, None, 0, Source::Nothing, None, BlockLayout::Equal(0))
    }

    /// Waits until every rank has entered. Cost: log₂ n hops.
    ///
    /// # Errors
    ///
    /// Those common to all collectives. Where all ranks share a host, a deadline that passes leaves the communicator usable: the
    /// next barrier takes this one up again. Between hosts it ends the communicator, as in every collective; use
    /// [`monitored_barrier`](Self::monitored_barrier) where ranks may be late.
    #[doc(alias = "MPI_Barrier")]
    #[inline]
    pub fn barrier(&self) -> Result<()> {
        self.execute(self.prepare_barrier())
    }

    /// Waits until every rank has entered, for at most `limit`. Where the limit passes, every rank that came gets an error
    /// naming all that did not, and so do the late ones when they come; the communicator stays usable on all of them.
    ///
    /// Cost: two messages between rank 0 and every other rank.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use std::time::Duration;
    /// let comms = Communicator::local(2)?;
    /// let error = comms[0].monitored_barrier(Duration::from_millis(20)).unwrap_err(); // rank 1 does not come
    /// assert!(error.is_timeout() && error.to_string().contains("rank 1"), "{error}");
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Timeout` with the missing ranks, those that are gone among them; `PeerLost` where rank 0 is gone. Either leaves the
    /// communicator usable.
    pub fn monitored_barrier(&self, limit: Duration) -> Result<()> {
        let number = self.core.monitored.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let tag = MONITORED_TAG | number & 0xffff_ffff;
        let deadline = Deadline::after(limit);
        // A rank that is late still finds the messages of this barrier.
        let patience = limit.saturating_add(VERDICT_PATIENCE);
        let keep = patience.max(self.timeout());
        let missing = if self.rank() == 0 { self.supervise(tag, &deadline, keep)? } else { self.report_in(tag, patience, keep)? };
        if missing.is_empty() {
            return Ok(());
        }
        let (missing, arrived): (Vec<Peer>, Vec<Peer>) =
            self.peers().iter().cloned().partition(|peer| missing.contains(&(peer.rank as u32)));
        let (doing, elapsed) = (format!("monitored_barrier number {number}"), deadline.elapsed());
        let error = Error::Timeout { doing, elapsed, missing, arrived, meanwhile: Vec::new() };
        Err(self.core.shared.recorder.with_meanwhile(error))
    }

    /// Rank 0: hears from everyone until the deadline, then tells everyone, the missing too, who was missing.
    fn supervise(&self, tag: u64, deadline: &Deadline, keep: Duration) -> Result<Vec<u32>> {
        let expect = |rank| (rank, self.post_internal_receive(rank, tag, vec![0_u8; 1], keep));
        let arrivals: Vec<_> = (1..self.world_size()).map(expect).collect();
        let mut missing = Vec::new();
        for (rank, arrival) in arrivals {
            match arrival.and_then(|mut arrival| arrival.wait_deadline(deadline.remaining())) {
                Ok(Some(_)) => {}
                Ok(None) => missing.push(rank as u32),
                Err(error) if error.is_peer_lost() => missing.push(rank as u32),
                Err(error) => return Err(error),
            }
        }
        let verdict: Vec<u8> = missing.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        for rank in 1..self.world_size() {
            // A rank that is gone cannot be told, and is in the list.
            let _ = self.post_internal_send(rank, tag, verdict.clone(), keep);
        }
        Ok(missing)
    }

    /// The others: report to rank 0 and wait for its verdict, a little longer than it waits for the rest.
    fn report_in(&self, tag: u64, patience: Duration, keep: Duration) -> Result<Vec<u32>> {
        let room = vec![0_u8; 4 * self.world_size()];
        let mut verdict = self.post_internal_receive(0, tag, room, keep)?;
        let _sent = self.post_internal_send(0, tag, vec![1], keep)?;
        let Some((bytes, received)) = verdict.wait_deadline(patience)? else { return Ok(vec![0]) };
        Ok(bytes[..received.count].as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}
