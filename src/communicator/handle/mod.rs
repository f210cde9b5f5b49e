//! A communicator: what it is made of, and what it tells of itself. All else that it does is in the files that name it.

pub(in crate::communicator) mod dissemination;
pub(in crate::communicator) mod kept_store;
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
use crate::base::ticket_lock::{NoTurn, TicketLock};
use crate::call::Collective;
use crate::call::algorithm::Algorithm;
use crate::call::element::DType;
use crate::communicator::handle::dissemination::Unfinished;
use crate::communicator::handle::state::Shared;
use crate::communicator::handle::worker::Worker;
use crate::config::Config;
#[cfg(feature = "cuda")]
use crate::device::NcclCommunicator;
use crate::error::{Error, Peer, Result};
use crate::host::backend::HostBackend;
use crate::host::health::forked;
use crate::observe::LIFE;

/// One rank of a group of processes or threads that call collectives together.
///
/// Every rank makes the same calls in the same order; ranks that do not are told so by an error that names both calls.
/// Blocking calls run on the calling thread; `start_*` calls run in the background, in the order in which they were
/// started, and blocking collectives wait for them. Messages ([`send`](Self::send), [`recv`](Self::recv) …) are independent
/// of collectives.
///
/// A clone is the same communicator, for another thread or another owner. Collectives of several threads run one after the other, in
/// the order in which they are called; that all ranks call them in one order is the program's affair, and what differs is told as a
/// mismatch. Threads that need no common order take a communicator each, by [`split`](Self::split). Messages wait for nobody's
/// collectives. A call that waits for its turn behind another thread's does so for at most its timeout; it has not begun then, and the
/// communicator lives on.
///
/// Two communicators that two ranks, or two threads, use in opposite orders wait for each other until a deadline passes. The error then
/// names the call, whom it waited for, and what else this process has waited in meanwhile ([`Error::Timeout`]); where the ranks are processes, each
/// names its own call, and `collperf --explain-hang` puts them side by side.
///
/// After a lost peer, a mismatch, an abort or a deadline that passed inside a collective the communicator is ended: further
/// calls are refused with an error that carries the first one; [`shrink`](Self::shrink) makes a new one of the ranks that are left.
///
/// [`Device`](crate::Device)s, the `DataParallel` of `collectives-train` and what captures a clone keep a communicator alive; what it keeps
/// itself, an observer in its settings, should hold an [`abort_handle`](Self::abort_handle) instead.
///
/// Dropping the last clone waits a short while for started calls, tells the peers and closes its connections; see also
/// [`close`](Self::close).
#[derive(Clone)]
pub struct Communicator {
    pub(in crate::communicator) core: Arc<Core>,
    /// This handle's own, where it has one.
    pub(in crate::communicator) timeout: Option<Duration>,
    /// Where device calls are queued; `None` for the device backend's own stream.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) stream: Option<Arc<CudaStream>>,
}

/// What all clones of a communicator share. Dropped with the last of them.
pub(in crate::communicator) struct Core {
    pub(in crate::communicator) shared: Arc<Shared>,
    pub(in crate::communicator) worker: OnceLock<Worker>,
    /// Packed, as by [`packed`].
    timeout: AtomicU64,
    /// The number of the next monitored barrier.
    pub(in crate::communicator) monitored: AtomicU64,
    /// Tagged barriers whose deadline has passed.
    pub(in crate::communicator) unfinished: Unfinished,
    /// How many communicators were made from this one.
    pub(in crate::communicator) children: AtomicU64,
    /// Held by a thread that looks for the survivors of a failure: a rank takes part once.
    pub(in crate::communicator) shrinking: TicketLock<()>,
    /// The device backend, once it was asked for, or why there is none.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) device: OnceLock<std::result::Result<NcclCommunicator, String>>,
}

/// A communicator may be kept anywhere, and used from any thread.
const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<Communicator>();
};

impl Communicator {
    /// Of what its threads share.
    pub(in crate::communicator) fn new(shared: Shared) -> Self {
        let timeout = shared.config.timeout;
        let core = Core {
            shared: Arc::new(shared),
            worker: OnceLock::new(),
            timeout: AtomicU64::new(packed(timeout)),
            monitored: AtomicU64::new(0),
            unfinished: Unfinished::default(),
            children: AtomicU64::new(0),
            shrinking: TicketLock::new(()),
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

    /// This process's number in the group, from 0.
    #[must_use]
    #[doc(alias = "ncclCommUserRank")]
    pub fn rank(&self) -> usize {
        self.core.shared.rank
    }

    /// How many ranks the group has.
    #[must_use]
    #[doc(alias = "ncclCommCount")]
    pub fn world_size(&self) -> usize {
        self.core.shared.peers.len()
    }

    /// This rank's number among the group's ranks on the same host, from 0, as found by host identity.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.core.shared.local.0
    }

    /// How many of the group's ranks share this host.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.core.shared.local.1
    }

    /// Every rank's host and process, indexed by rank.
    #[must_use]
    pub fn peers(&self) -> &[Peer] {
        &self.core.shared.peers
    }

    /// By rank, the number that each has in the communicator of the job, of which this one was made by splits, subgroups and shrinks.
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

    /// The settings this communicator was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core.shared.config
    }

    /// How calls of this communicator are done, in words: over shared memory, over TCP, and between hosts which collective takes which
    /// algorithm at which size (in the form that [`AlgorithmRanges`](crate::AlgorithmRanges) are written in). For people; the text may change.
    #[must_use]
    pub fn explain(&self) -> String {
        if self.core.shared.health.is_foreign() {
            return forked("explain".to_owned()).to_string();
        }
        let said = self.with_backend(|backend| backend.explain());
        said.unwrap_or_else(|_| "in use by a call that is under way".to_owned())
    }

    /// How a collective is done on this rank, on ordinary host memory with a built-in op. `bytes`: the whole vector; where there are blocks, all
    /// of them together.
    ///
    /// `None` while a reduction is under way that calls this, once the communicator is closed, and in a forked child.
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

    /// How long a call may wait for its peers.
    #[inline]
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or_else(|| unpacked(self.core.timeout.load(Ordering::Relaxed)))
    }

    /// The same communicator, with a timeout of its own for the calls made with this handle: for one call, or kept.
    ///
    /// A call on devices is queued, and this is how long the device may take for it. Its time counts from when it is queued (to a tenth of a
    /// second), or from when all is over that this communicator had queued before with other timeouts, if that is later: NCCL runs a
    /// communicator's calls in their order. So no call's timeout shortens or lengthens another's. Where one passes the communicator ends. A
    /// call with another timeout than the one before it costs an event on each stream that is in use. Who waits for a started call, or
    /// in [`Device::synchronize`](crate::Device::synchronize), does so for this long, counted from the call.
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

    /// Sets how long later calls may wait for their peers: those of all clones, on this rank, that have no timeout of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.core.shared.allow_timeout(timeout);
        self.core.timeout.store(packed(timeout), Ordering::Relaxed);
    }

    /// Why a call did not get its turn.
    #[cold]
    pub(in crate::communicator) fn no_turn(&self, call: &'static str, why: NoTurn) -> Error {
        self.no_turn_behind(call, why, || self.core.shared.under_way())
    }

    /// The same, of a turn behind what is found to be under way.
    #[cold]
    pub(in crate::communicator) fn no_turn_behind(
        &self,
        call: &'static str,
        why: NoTurn,
        under_way: impl FnOnce() -> Option<String>,
    ) -> Error {
        self.core.shared.no_turn(call, why, self.timeout(), under_way)
    }

    /// Reaches for the host backend on this thread, after the calls that came before, started ones and other threads' included.
    #[inline]
    pub(in crate::communicator) fn with_backend<R>(&self, work: impl FnOnce(&mut HostBackend) -> R) -> std::result::Result<R, NoTurn> {
        self.core.shared.backend.with(self.timeout(), work)
    }

    /// Runs what consists of several collectives in one turn: no other thread's call comes in between. Within one of its own kind it is part
    /// of that.
    pub(in crate::communicator) fn composite<R>(&self, call: &'static str, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let backend = &self.core.shared.backend;
        if backend.is_inside() && !backend.is_used_here() {
            return work();
        }
        let _turn = backend.enter(self.timeout()).map_err(|why| self.no_turn(call, why))?;
        work()
    }
}

impl Core {
    /// Waits a short while for what was started and sent, and ends the threads.
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
            // Its thread is the parent's, and so is what the device backend has of the driver and NCCL.
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
