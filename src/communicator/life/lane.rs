//! Lanes: communicators for threads that have no common order. Ranks make a lane by exchanging messages that carry the
//! lane's number. So threads may ask for lanes in any order.

use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::call::element::TypeTag;
use crate::communicator::Communicator;
use crate::communicator::life::bootstrap::{connect, measured, split_blobs};
use crate::communicator::work::message::{INTERNAL_TAG, MessageContext};
use crate::error::{Error, Result};
use crate::host::exchange::Exchange;

/// The bits that mark the messages that make a lane; the lane's number is added to them.
const LANE_TAG: u64 = INTERNAL_TAG | 1 << 58;

/// The most bytes that one rank sends in an exchange.
const MAX_BLOB_BYTES: usize = 1 << 20;

impl Communicator {
    /// Returns the lane with this number. A lane is a communicator of the same ranks, for a thread whose calls have no
    /// fixed order relative to other threads' calls. The calls on a lane match only calls on the lane with the same
    /// number.
    ///
    /// The first call with a number waits until every rank has asked for that lane, and then makes it. Later calls with
    /// the same number return the same communicator immediately. Threads may ask for different lanes at the same time,
    /// in any order. [`duplicate`](Self::duplicate) makes such a communicator too, but is a collective.
    ///
    /// Use a lane only for calls on host memory. For device memory, use [`split`](Self::split) or
    /// [`duplicate`](Self::duplicate), which also split the NCCL communicator.
    ///
    /// Cost: as much time and memory, and as many descriptors, as a `duplicate`. The communicator keeps its lanes until
    /// it is closed or dropped.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp, Result};
    /// fn total(comm: &Communicator, mut x: u64) -> Result<u64> {
    ///     comm.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     Ok(x)
    /// }
    /// let sums = Communicator::run_local(2, |comm| {
    ///     std::thread::scope(|scope| {
    ///         let threads = [10, 20].map(|x| scope.spawn(move || total(&comm.lane(x)?, x.into())));
    ///         let sums = threads.map(|thread| thread.join().expect("it does not panic"));
    ///         sums.into_iter().collect::<Result<Vec<_>>>()
    ///     })
    /// })?;
    /// assert_eq!(sums, [[20, 40], [20, 40]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - `Timeout` if a rank does not ask for the lane in time.
    /// - The errors of joining a job (see [`Communicator::from_env`]), and `PeerLost`.
    /// - `InvalidArgument` if a callback asks for the lane on the thread that is making the lane.
    ///
    /// If a lane could not be made, later calls with its number return the same error. This communicator stays usable.
    pub fn lane(&self, number: u32) -> Result<Self> {
        if let Some(refusal) = self.core.shared.health.refusal(|| format!("lane({number})"), self.peers()) {
            return Err(refusal);
        }
        let lane = self.core.lanes.get(number);
        let made = lane.with(self.timeout(), |made| made.get_or_insert_with(|| self.make_lane(number)).clone());
        let mut lane = made.unwrap_or_else(|why| Err(self.no_turn("lane", why)))?;
        lane.timeout = self.timeout;
        Ok(lane)
    }

    fn make_lane(&self, number: u32) -> Result<Self> {
        let deadline = Deadline::after(self.timeout());
        let everyone: Vec<usize> = (0..self.world_size()).collect();
        let name = format!("{}/lane {number}", self.core.shared.recorder.name());
        let mut exchange = LaneExchange { parent: self, number };
        let lane = connect(&mut exchange, self.start_of(self.rank(), &everyone, name), &deadline)?;
        lane.barrier()?;
        lane.keep_store(self.kept_store());
        #[cfg(feature = "cuda")]
        let _ = lane.core.device.set(Err("a lane has none; for device memory, use Communicator::duplicate or split".to_owned()));
        Ok(lane)
    }
}

/// An exchange by messages with the number of a lane: rank 0 collects all blobs and returns them to every rank.
struct LaneExchange<'a> {
    parent: &'a Communicator,
    number: u32,
}

impl LaneExchange<'_> {
    fn tag(&self) -> u64 {
        LANE_TAG | u64::from(self.number)
    }

    /// Sends a blob, after its length.
    fn send(&self, to: usize, blob: &[u8]) -> Result<()> {
        for bytes in [(blob.len() as u64).to_le_bytes().to_vec(), blob.to_vec()] {
            let _sent = self.parent.post_internal_send(to, self.tag(), bytes, Duration::MAX)?;
        }
        Ok(())
    }

    /// Receives a blob of at most `most` bytes.
    fn receive(&self, from: usize, most: usize, deadline: &Deadline) -> Result<Vec<u8>> {
        let context = MessageContext { peer: Some(from), tag: self.tag(), element: TypeTag::of::<u8>(), element_bytes: 1 };
        let progress = &self.parent.core.shared.progress;
        let mut length = [0; 8];
        progress.receive_bytes(&context, &mut length, deadline.remaining())?;
        let length = usize::try_from(u64::from_le_bytes(length)).ok().filter(|length| *length <= most);
        let mut blob = vec![0; length.ok_or_else(|| self.malformed(from))?];
        progress.receive_bytes(&context, &mut blob, deadline.remaining())?;
        Ok(blob)
    }

    fn malformed(&self, from: usize) -> Error {
        let reason = format!("start-up data for lane {} with a wrong length", self.number);
        Error::Protocol { with: self.parent.peers()[from].to_string(), reason }
    }
}

impl Exchange for LaneExchange<'_> {
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        let ranks = self.parent.world_size();
        if self.parent.rank() != 0 {
            self.send(0, mine)?;
            let all = self.receive(0, ranks * (MAX_BLOB_BYTES + size_of::<u32>()), deadline)?;
            return split_blobs(&all, ranks, &self.parent.peers()[0].to_string());
        }
        let mut blobs = vec![mine.to_vec()];
        for rank in 1..ranks {
            blobs.push(self.receive(rank, MAX_BLOB_BYTES, deadline)?);
        }
        let all = blobs.iter().map(|blob| measured(blob)).collect::<Vec<_>>().concat();
        (1..ranks).try_for_each(|rank| self.send(rank, &all))?;
        Ok(blobs)
    }
}
