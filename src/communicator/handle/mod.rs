//! The communicator handle: its parts, and the properties that it reports. Each of its other methods is in the module
//! named after what the method does.

mod caller;
pub(in crate::communicator) mod dissemination;
pub(in crate::communicator) mod kept_store;
mod lanes;
mod records;
pub(in crate::communicator) mod state;
pub(in crate::communicator) mod worker;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;

use crate::base::deadline::{packed, unpacked};
use crate::base::ticket_lock::{NoTurn, TicketLock, Turn};
use crate::call::Collective;
use crate::call::algorithm::Algorithm;
use crate::call::element::DType;
use crate::communicator::handle::caller::{Caller, Crossed, InCollective};
use crate::communicator::handle::dissemination::Unfinished;
use crate::communicator::handle::lanes::Lanes;
use crate::communicator::handle::state::Shared;
use crate::communicator::handle::worker::Worker;
use crate::config::Config;
#[cfg(feature = "cuda")]
use crate::device::NcclCommunicator;
use crate::error::{Error, Peer, Result};
use crate::host::abort_reason::AbortReason;
use crate::host::backend::HostBackend;
use crate::host::health::forked;
use crate::observe::LIFE;

/// One rank's handle to a set of ranks that make calls together. A rank is a process or a thread.
///
/// Every rank must make the same collectives in the same order. If the ranks' collectives differ, the ranks get an
/// error that names two of the calls. Blocking calls run on the calling thread. Methods whose names begin with `start_`
/// start *background calls*. Background collectives run in the order in which they were started, and a blocking
/// collective waits for those that were started before it. Messages ([`send`](Self::send), [`recv`](Self::recv) …) do
/// not wait for collectives.
///
/// A clone is a further handle to the same communicator, for another thread or another owner. The collectives of
/// several threads run one after the other, in the order in which they are called. The program must make sure that this
/// order is the same on all ranks, or else give each thread its own [`lane`](Self::lane). If a call has to wait for its
/// turn behind another thread's call, it waits for at most its own timeout. If the timeout passes during this wait, the
/// call has not begun, and the communicator stays usable.
///
/// If two ranks, or two threads, use two communicators in different orders, they wait for each other until a deadline
/// passes. The resulting [`Error::Timeout`] names the call, the ranks that it waited for, and the other calls in which
/// this process waited at the same time. If each rank is a process, each rank's error names only the calls of its own
/// process. `collperf --explain-hang` compares the calls of all processes.
///
/// A lost peer, a mismatch, an abort or a timeout inside a collective ends the communicator, except in the cases that the
/// variants of [`Error`] list. Later calls return an error that contains the first error. [`shrink`](Self::shrink) makes a
/// new communicator of the remaining ranks.
///
/// A communicator stays alive as long as a clone exists. A [`Device`](crate::Device) and a `DataParallel` of
/// `collectives-train` contain a clone, and so does a closure that captures one. An object that the communicator itself
/// keeps, such as an observer in its settings, must not contain a clone: the communicator would then stay alive
/// forever. Give such an object an [`abort_handle`](Self::abort_handle) instead of a clone.
///
/// When the last clone is dropped, the communicator waits up to five seconds for background calls, notifies the peers,
/// and closes the connections. See also [`close`](Self::close).
#[derive(Clone)]
pub struct Communicator {
    pub(in crate::communicator) core: Arc<Core>,
    /// The timeout of this handle, if it has its own.
    pub(in crate::communicator) timeout: Option<Duration>,
    /// The stream on which device calls are queued; `None` for the device backend's own stream.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) stream: Option<Arc<CudaStream>>,
}

/// The state that all clones of a communicator share. Dropped with the last of them.
pub(in crate::communicator) struct Core {
    pub(in crate::communicator) shared: Arc<Shared>,
    pub(in crate::communicator) worker: OnceLock<Worker>,
    /// Encoded by [`packed`].
    timeout: AtomicU64,
    /// The number of the next monitored barrier.
    pub(in crate::communicator) monitored: AtomicU64,
    /// Tagged barriers whose deadline has passed.
    pub(in crate::communicator) unfinished: Unfinished,
    /// How many communicators were made from this one.
    pub(in crate::communicator) children: AtomicU64,
    pub(in crate::communicator) lanes: Lanes<Communicator>,
    caller: Caller,
    /// Held by a thread that runs a shrink: a rank takes part once.
    pub(in crate::communicator) shrinking: TicketLock<()>,
    /// The number of attempts to admit newcomers.
    pub(in crate::communicator) admissions: AtomicU64,
    /// The device backend, or the reason why there is none; set once a device was requested.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) device: OnceLock<std::result::Result<NcclCommunicator, String>>,
}

/// A communicator can be stored anywhere, and used from any thread.
const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<Communicator>();
};

impl Communicator {
    /// Makes a communicator of the state that its threads share.
    pub(in crate::communicator) fn new(shared: Shared) -> Self {
        let timeout = shared.config.timeout;
        let core = Core {
            shared: Arc::new(shared),
            worker: OnceLock::new(),
            timeout: AtomicU64::new(packed(timeout)),
            monitored: AtomicU64::new(0),
            unfinished: Unfinished::default(),
            children: AtomicU64::new(0),
            lanes: Lanes::default(),
            caller: Caller::default(),
            shrinking: TicketLock::new(()),
            admissions: AtomicU64::new(0),
            #[cfg(feature = "cuda")]
            device: OnceLock::new(),
        };
        Self {
            core: Arc::new(core),
            timeout: None,
            #[cfg(feature = "cuda")]
            stream: None,
        }
    }

    /// Returns this rank's number in the communicator, from 0.
    #[must_use]
    #[doc(alias = "ncclCommUserRank")]
    pub fn rank(&self) -> usize {
        self.core.shared.rank
    }

    /// Returns whether this rank is rank 0. Use it for work that only one rank should do, such as printing.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let lines = Communicator::run_local(3, |comm| Ok(comm.is_main().then(|| "epoch 1 is done")))?;
    /// assert_eq!(lines, [Some("epoch 1 is done"), None, None]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// Make no collectives inside `if comm.is_main()`: only rank 0 would make them, and would wait for the other ranks.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the number of ranks in the communicator.
    #[must_use]
    #[doc(alias = "ncclCommCount")]
    pub fn world_size(&self) -> usize {
        self.core.shared.peers.len()
    }

    /// Returns this rank's number, from 0, among the communicator's ranks on the same host ([`Config::host_identity`]).
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.core.shared.local.0
    }

    /// Returns how many of the communicator's ranks share this host.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.core.shared.local.1
    }

    /// Returns every rank's host and process, indexed by rank.
    #[must_use]
    pub fn peers(&self) -> &[Peer] {
        &self.core.shared.peers
    }

    /// Returns each rank's number in the job's first communicator, indexed by rank. After a split, a subgroup or a
    /// shrink, a rank can have a new number, but its number in the first communicator stays the same.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(4, |comm| {
    ///     let odd = comm.split(Some(comm.rank() as u32 % 2), 0)?.filter(|_| comm.rank() % 2 == 1);
    ///     let reversed = odd.map(|odd| odd.subgroup(&[1, 0])).transpose()?.flatten();
    ///     Ok(reversed.map(|reversed| reversed.world_ranks().to_vec()))
    /// })?;
    /// assert_eq!(got, [None, Some(vec![3, 1]), None, Some(vec![3, 1])]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    #[doc(alias = "get_process_group_ranks")]
    pub fn world_ranks(&self) -> &[usize] {
        &self.core.shared.world_ranks
    }

    /// Returns the settings that this communicator was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core.shared.config
    }

    /// Describes how this communicator makes its calls: over shared memory or over TCP, and with which algorithm
    /// between hosts. For each collective, the text lists the algorithms by size, in the format of
    /// [`AlgorithmRanges`](crate::AlgorithmRanges). The text is for people and may change.
    #[must_use]
    pub fn explain(&self) -> String {
        if self.core.shared.health.is_foreign() {
            return forked("explain".to_owned()).to_string();
        }
        let said = self.with_backend(|backend| backend.explain());
        said.unwrap_or_else(|_| "this communicator is in use by a call that is under way".to_owned())
    }

    /// Returns the algorithm that this rank uses for a collective on ordinary host memory with a built-in op. `bytes`
    /// is the size of the whole vector, or of all blocks together.
    ///
    /// Returns `None` in each of these cases:
    /// - the caller is inside a reduction of this communicator, for example in a custom op,
    /// - the communicator was closed,
    /// - this process is a forked child.
    ///
    /// ```
    /// # use collectives::{Algorithm, Collective, Communicator, DType};
    /// let ways = Communicator::run_local(2, |comm| Ok(comm.algorithm(Collective::AllReduce, 1 << 20, DType::F32)))?;
    /// assert_eq!(ways, [Some(Algorithm::Shares); 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn algorithm(&self, collective: Collective, bytes: usize, dtype: DType) -> Option<Algorithm> {
        if self.core.shared.health.is_foreign() || self.core.shared.health.is_closed() {
            return None;
        }
        self.with_backend(|backend| backend.algorithm(collective, bytes, dtype.size_bytes())).ok()
    }

    /// Returns how long a call may wait for its peers.
    #[inline]
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or_else(|| unpacked(self.core.timeout.load(Ordering::Relaxed)))
    }

    /// Returns a new handle to this communicator, with a timeout that applies only to calls through the new handle. You
    /// can use the new handle for one call, or keep it.
    ///
    /// For a call on devices, the timeout limits the time that the device may take. The timeout begins when the call is
    /// queued, with an accuracy of a tenth of a second. If earlier calls with other timeouts are still running at that
    /// moment, the timeout begins when those calls end, because NCCL runs a communicator's calls in order. So the
    /// timeout of one call neither shortens nor lengthens the timeout of another call. If the timeout of a call on
    /// devices passes, the communicator ends. A call whose timeout differs from that of the previous call costs one
    /// more event on each stream in use.
    ///
    /// The timeout also limits:
    /// - the wait for a background call, counted from the start of the background call,
    /// - [`Device::synchronize`](crate::Device::synchronize), counted from the beginning of `synchronize`.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # use std::time::Duration;
    /// Communicator::run_local(2, |comm| {
    ///     comm.with_timeout(Duration::from_secs(5)).all_reduce(&mut [1.0_f32], ReduceOp::Sum)
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        self.core.shared.allow_timeout(timeout);
        Self { timeout: Some(timeout), ..self.clone() }
    }

    /// Sets how long later calls may wait for their peers. The new timeout applies to all clones on this rank that have
    /// no timeout of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.core.shared.allow_timeout(timeout);
        self.core.timeout.store(packed(timeout), Ordering::Relaxed);
    }

    /// Returns the error of a call that did not get its turn.
    #[cold]
    pub(in crate::communicator) fn no_turn(&self, call: &'static str, why: NoTurn) -> Error {
        self.no_turn_behind(call, why, || self.core.shared.under_way())
    }

    /// Returns the error of a call that did not get its turn behind the call that `under_way` finds.
    #[cold]
    pub(in crate::communicator) fn no_turn_behind(
        &self,
        call: &'static str,
        why: NoTurn,
        under_way: impl FnOnce() -> Option<String>,
    ) -> Error {
        self.core.shared.no_turn(call, why, self.timeout(), under_way)
    }

    /// Runs `work` with the host backend on this thread, after all earlier calls, including background calls and those
    /// of other threads.
    #[inline]
    pub(in crate::communicator) fn with_backend<R>(&self, work: impl FnOnce(&mut HostBackend) -> R) -> std::result::Result<R, NoTurn> {
        self.core.shared.backend.with(self.timeout(), work)
    }

    /// Records that this thread is in a collective, if that is checked. If another thread is in one, ends the
    /// communicator: this call cannot be left out, because other ranks may already wait for it.
    #[inline]
    pub(in crate::communicator) fn in_collective(&self, call: impl FnOnce() -> &'static str) -> Result<Option<InCollective<'_>>> {
        let shared = &self.core.shared;
        if !shared.config.check_threads || shared.peers.len() == 1 {
            return Ok(None);
        }
        self.core.caller.enter().map_err(|Crossed| self.end_unordered(call()))
    }

    #[cold]
    fn end_unordered(&self, call: &'static str) -> Error {
        let shared = &self.core.shared;
        if let Some(refusal) = shared.health.refusal(|| call.to_owned(), &shared.peers) {
            return refusal;
        }
        let error = Error::Unordered { call };
        shared.health.keep_cause(&error);
        shared.health.end(AbortReason::Failed { rank: shared.rank as u32 });
        shared.after_failure(&error);
        error
    }

    /// Waits for the turn of this thread, and holds it as long as the returned value lives.
    pub(in crate::communicator) fn turn(&self, call: &'static str) -> Result<Turn<'_, HostBackend>> {
        self.core.shared.backend.enter(self.timeout()).map_err(|why| self.no_turn(call, why))
    }

    /// Runs several collectives in one turn: no other thread's call comes in between. A nested composite belongs to
    /// the outer one.
    pub(in crate::communicator) fn composite<R>(&self, call: &'static str, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let backend = &self.core.shared.backend;
        if backend.is_inside() && !backend.is_used_here() {
            return work();
        }
        let in_collective = self.in_collective(|| call)?;
        let _turn = self.turn(call)?;
        // Ends before the turn passes on: the next thread is not in a collective at the same time.
        let _in_collective = in_collective;
        work()
    }
}

impl Core {
    /// Waits a short while for background calls and sent messages, and ends the threads.
    pub(in crate::communicator) fn finish(&self) {
        if let Some(worker) = self.worker.get() {
            worker.stop(&self.shared);
        }
        self.shared.write_unwritten();
        self.shared.progress.close();
        self.shared.progress.join_background();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.shared.health.is_foreign() {
            // The worker's thread, and what the device backend has of the driver and NCCL, belong to the parent.
            #[cfg(feature = "cuda")]
            std::mem::forget(self.device.take());
            return std::mem::forget(self.worker.take());
        }
        crate::base::event::debug!(target: LIFE, communicator = self.shared.recorder.name(), rank = self.shared.rank, "dropped");
        self.finish();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("rank", &self.rank()).field("world_size", &self.world_size()).finish_non_exhaustive()
    }
}
