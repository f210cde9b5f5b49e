//! Barriers: a fast one, a tagged one that runs alongside collectives, and a monitored one that names the missing
//! ranks.

use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::tuning::barrier::VERDICT_PATIENCE;
use crate::call::element::TypeTag;
use crate::call::{BlockLayout, Collective};
use crate::communicator::Communicator;
use crate::communicator::handle::dissemination::Standing;
use crate::communicator::prepare::prepared::{Prepared, Source};
use crate::communicator::work::message::{BARRIER_TAG, INTERNAL_TAG, MessageContext};
use crate::error::{Error, Peer, Result};

/// The bits that mark a monitored barrier's tag; the barrier's number is added to them.
const MONITORED_TAG: u64 = INTERNAL_TAG | 1 << 62;

/// Returns the name of a tagged barrier in errors.
fn tagged(tag: u32) -> String {
    format!("tagged_barrier({tag})")
}

impl Communicator {
    pub(in crate::communicator) fn prepare_barrier<'a>(&self) -> Result<Prepared<'a>> {
        self.moving::<u8>(Collective::Barrier, None, 0, Source::Nothing, None, BlockLayout::Equal(0))
    }

    /// Waits until every rank has entered the barrier. Cost: log₂ n hops.
    ///
    /// # Errors
    ///
    /// The errors common to all collectives. If all ranks share a host, the communicator stays usable after a timeout,
    /// and the next barrier resumes the barrier that timed out. If the ranks are on several hosts, a timeout ends the
    /// communicator, as in every collective. If ranks may be late, use [`monitored_barrier`](Self::monitored_barrier).
    #[doc(alias = "MPI_Barrier")]
    #[inline]
    pub fn barrier(&self) -> Result<()> {
        self.execute(self.prepare_barrier())
    }

    /// Waits for at most `limit` until every rank has entered the barrier. If `limit` passes, every rank that has
    /// entered gets an error that names all missing ranks. When the late ranks enter, they get the same error. The
    /// communicator stays usable on all ranks.
    ///
    /// Cost: each of the other ranks sends one message to rank 0 and receives one message from rank 0.
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
    /// - `Timeout`, which names the missing ranks, including lost ranks.
    /// - `PeerLost` if rank 0 is lost.
    ///
    /// The communicator stays usable after either error.
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

    /// Waits until every rank has entered a barrier with this tag. A tagged barrier is not a collective: barriers with
    /// other tags, and other threads' collectives, can run at the same time. Ranks may enter barriers with different
    /// tags in different orders. The program's own messages do not disturb a barrier. Several threads of a rank may
    /// enter barriers with the same tag. When the k-th of these threads leaves its barrier, every rank has entered a
    /// barrier with this tag at least k times.
    ///
    /// Cost: log₂ n rounds. In each round, every rank sends one message of 4 bytes and receives one such message.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// Communicator::run_local(3, |comm| {
    ///     let saver = comm.clone();
    ///     let saving = std::thread::spawn(move || saver.tagged_barrier(1)); // everyone's files are written
    ///     comm.all_reduce(&mut [1_u32], ReduceOp::Sum)?; // meanwhile
    ///     saving.join().unwrap()
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - `Timeout`: all ranks that the error names as arrived have entered. At least one of the ranks that it names as
    ///   missing has not entered. Any other rank may have entered or not.
    ///   ([`monitored_barrier`](Self::monitored_barrier) finds out exactly which ranks are missing.) The communicator
    ///   stays usable, and this rank's next barrier with the same tag resumes the one that timed out.
    /// - `PeerLost` on every rank, if a rank is lost before it has entered. Messages between the other ranks still
    ///   work.
    pub fn tagged_barrier(&self, tag: u32) -> Result<()> {
        let shared = &self.core.shared;
        if let Some(refusal) = shared.health.refusal(|| tagged(tag), self.peers()) {
            return Err(refusal);
        }
        let deadline = Deadline::after(self.timeout());
        let mut standing = self.core.unfinished.take(tag);
        while standing.distance < self.world_size() {
            match self.next_round(tag, &mut standing, &deadline) {
                Ok(()) => {}
                Err(error) => {
                    self.core.unfinished.keep(tag, standing);
                    return Err(if matches!(error, Error::Timeout { .. }) { self.late_at(tag, &standing, &deadline) } else { error });
                }
            }
        }
        let Some(lost) = standing.lost else { return Ok(()) };
        let peer = self.peers().get(lost as usize).cloned().unwrap_or_else(|| Peer::unknown(lost as usize));
        let reason = "it ended, or closed its communicator, before it reached the barrier".to_owned();
        Err(Error::PeerLost { doing: tagged(tag), peer, elapsed: deadline.elapsed(), reason })
    }

    /// Sends to the rank ahead, and receives from the one behind. A message that was sent is not taken back: the rank
    /// ahead will count it.
    fn next_round(&self, tag: u32, standing: &mut Standing, deadline: &Deadline) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let [ahead, behind] = [standing.distance, world_size - standing.distance].map(|distance| (rank + distance) % world_size);
        let tag = BARRIER_TAG | u64::from(tag);
        if !standing.has_told {
            match self.post_internal_send(ahead, tag, standing.told().to_vec(), Duration::MAX) {
                // A lost rank cannot get the message. The ranks that wait for it find out themselves.
                Ok(_) | Err(Error::PeerLost { .. }) => standing.has_told = true,
                Err(error) => return Err(error),
            }
        }
        let context = MessageContext { peer: Some(behind), tag, element: TypeTag::of::<u8>(), element_bytes: 1 };
        let mut told = [0; 4];
        match self.core.shared.progress.receive_bytes(&context, &mut told, deadline.remaining()) {
            Ok(_) => standing.hear(told),
            Err(Error::PeerLost { peer, .. }) => standing.lose(peer.rank),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns the error of a tagged barrier whose deadline has passed.
    #[cold]
    fn late_at(&self, tag: u32, standing: &Standing, deadline: &Deadline) -> Error {
        let (arrived, missing) = standing.known(self.rank(), self.world_size());
        let peers = |ranks: Vec<usize>| ranks.into_iter().map(|rank| self.peers()[rank].clone()).collect();
        let (missing, arrived) = (peers(missing), peers(arrived));
        let late = Error::Timeout { doing: tagged(tag), elapsed: deadline.elapsed(), missing, arrived, meanwhile: Vec::new() };
        self.core.shared.recorder.with_meanwhile(late)
    }

    /// Runs rank 0's part: waits for every rank until the deadline, then sends the missing ranks to all ranks,
    /// including the missing ones.
    fn supervise(&self, tag: u64, deadline: &Deadline, keep: Duration) -> Result<Vec<u32>> {
        let expect = |rank| (rank, self.post_internal_receive(rank, tag, vec![0_u8; 1], keep));
        let arrivals: Vec<_> = (1..self.world_size()).map(expect).collect();
        let mut missing = Vec::new();
        for (rank, arrival) in arrivals {
            match arrival.and_then(|mut arrival| arrival.wait_timeout(deadline.remaining())) {
                Ok(Some(_)) => {}
                Ok(None) => missing.push(rank as u32),
                Err(error) if error.is_peer_lost() => missing.push(rank as u32),
                Err(error) => return Err(error),
            }
        }
        let verdict: Vec<u8> = missing.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        for rank in 1..self.world_size() {
            // A lost rank cannot get the list, and is in it.
            let _ = self.post_internal_send(rank, tag, verdict.clone(), keep);
        }
        Ok(missing)
    }

    /// Runs the other ranks' part: reports to rank 0 and waits for its list of missing ranks, a little longer than rank
    /// 0 waits for the others.
    fn report_in(&self, tag: u64, patience: Duration, keep: Duration) -> Result<Vec<u32>> {
        let room = vec![0_u8; 4 * self.world_size()];
        let mut verdict = self.post_internal_receive(0, tag, room, keep)?;
        let _sent = self.post_internal_send(0, tag, vec![1], keep)?;
        let Some((bytes, received)) = verdict.wait_timeout(patience)? else { return Ok(vec![0]) };
        Ok(bytes[..received.count].as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}
