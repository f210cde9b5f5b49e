//! The public face: checks every argument once, then hands a job to the plane where its buffer lives.

#![expect(unsafe_code, reason = "the caller's side of the hand-off")]

mod barrier;
mod bootstrap;
mod builder;
mod collectives;
#[cfg(feature = "cuda")]
mod device;
mod flight;
#[cfg(all(feature = "internals", feature = "serde"))]
pub(crate) mod fuzz;
mod group;
mod hand_off;
mod message;
mod messages;
#[cfg(feature = "serde")]
mod object;
mod pinned;
mod prepare;
mod progress;
mod recovery;
mod shared;
mod shrink;
mod split;
mod started;
mod sync;
#[cfg(test)]
mod tests;
mod trace;
mod variable;
mod work;

use std::cell::{Cell, OnceCell};
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::call::Kind;
use crate::config::Config;
use crate::deadline::Deadline;
#[cfg(feature = "cuda")]
use crate::device::{NcclComm, NcclCommunicator};
use crate::element::DType;
use crate::error::{Error, Peer, Result};
use crate::host::abort_reason::AbortReason;
use crate::host::health::{Health, forked};
use crate::host::plane::{HostPlane, Job};
use crate::observe::{LIFE, TraceLog};

#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;

use hand_off::{CallerSide, HandOff};
use prepare::Prepared;
use progress::ProgressEngine;
use recovery::RecoveryGroup;
use started::Worker;

pub use builder::Builder;
#[cfg(feature = "cuda")]
pub use device::{Device, DeviceChoice, OnStream, device_count};
pub use flight::FlightRecorder;
pub use group::Group;
pub use message::Received;
pub use shared::SharedBuffer;
pub use work::{OwnedBuffer, Work};

/// One rank of a group of processes or threads that call collectives together.
///
/// Every rank makes the same calls in the same order; ranks that do not are told so by an error that names both calls.
/// Blocking calls run on the calling thread; `start_*` calls run in the background, in the order in which they were
/// started, and blocking collectives wait for them. Messages ([`send`](Self::send), [`recv`](Self::recv) …) are independent
/// of collectives.
///
/// A communicator can be moved to another thread and not be shared: give each thread its own with [`split`](Self::split), or
/// put it behind a mutex.
///
/// After a lost peer, a mismatch, an abort or a deadline that passed inside a collective the communicator is ended: further
/// calls are refused with an error that carries the first one; [`shrink`](Self::shrink) makes a new one of the ranks that are left.
///
/// Dropping it waits a short while for started calls, tells the peers and closes its connections; see also
/// [`close`](Self::close).
pub struct Communicator {
    core: Rc<Core>,
    /// Where device calls are queued; `None` for the device plane's own stream.
    #[cfg(feature = "cuda")]
    stream: Option<Arc<CudaStream>>,
}

// SAFETY: the counter of `core` is not atomic, but everything else in it may be sent. The only other handles to it are those of
// `OnStream`, which cannot be sent themselves and borrow this one, so while it is moved none is in use; one that was leaked is never
// used again.
unsafe impl Send for Communicator {}

/// What a communicator is, whatever stream its calls are queued on. Dropped by the thread that drops the communicator.
struct Core {
    shared: Arc<Shared>,
    caller: CallerSide,
    worker: OnceCell<Worker>,
    timeout: Cell<Duration>,
    /// The how-manieth monitored barrier is next.
    monitored: Cell<u64>,
    /// How many communicators were made from this one.
    children: Cell<u64>,
    /// The device plane, once it was asked for, or why there is none.
    #[cfg(feature = "cuda")]
    device: OnceCell<std::result::Result<NcclCommunicator, String>>,
}

/// Everything in a core may be sent to another thread.
const _: () = {
    const fn sendable<T: Send>() {}
    sendable::<Core>();
};

/// What the caller, the background threads and abort handles share.
pub(crate) struct Shared {
    rank: usize,
    peers: Arc<[Peer]>,
    /// This rank's number among the ranks of its host, and how many they are.
    local: (usize, usize),
    config: Config,
    health: Arc<Health>,
    plane: HandOff<HostPlane>,
    progress: Arc<ProgressEngine>,
    /// The address on which communicators split from this one listen.
    listen: IpAddr,
    /// A random number that no other communicator has.
    id: [u8; 16],
    /// Where its ranks find each other should it fail.
    recovery: RecoveryGroup,
    /// The log of this rank, which communicators hand on to those that are made of them. Written with the last of them; so nothing that
    /// may outlive them, as handles do, holds it.
    trace: Option<Arc<TraceLog>>,
}

impl Shared {
    /// After a collective that failed: where that ended the communicator, peers that wait for messages hear of it too.
    #[cold]
    fn announce_end(&self) {
        if self.health.abort_reason().is_some() {
            self.progress.announce_end();
        }
    }

    /// After a call that failed: the peers hear of it, and the records are written where that was asked for.
    #[cold]
    fn after_failure(&self, error: &Error) {
        self.announce_end();
        self.health.flight().after_error(error);
    }
}

/// Ends a communicator from any thread; see [`Communicator::abort_handle`].
#[derive(Debug, Clone)]
pub struct AbortHandle {
    rank: usize,
    /// Not held: an observer that has this handle is itself held by what it leads to.
    health: Weak<Health>,
    progress: Weak<ProgressEngine>,
    #[cfg(feature = "cuda")]
    device: Weak<NcclComm>,
}

impl AbortHandle {
    /// Ends the communicator: a call that is under way here returns `Aborted` soon, as do those of its peers that wait for this
    /// rank, and later calls are refused. Where none is under way here, the peers hear of it when this rank makes its next call or
    /// drops the communicator. Idempotent; does nothing once the communicator is gone, nor in a forked child.
    pub fn abort(&self) {
        let Some(health) = self.health.upgrade().filter(|health| !health.is_foreign()) else { return };
        if health.abort_reason().is_none() {
            crate::event::info!(target: LIFE, communicator = health.flight().name(), rank = self.rank, "aborted");
        }
        health.end(AbortReason::Aborted { by: self.rank as u32 });
        if let Some(progress) = self.progress.upgrade() {
            progress.announce_end();
        }
        #[cfg(feature = "cuda")]
        if let Some(device) = self.device.upgrade() {
            device.abort();
        }
    }
}

impl Communicator {
    /// Wraps an established plane.
    fn new(
        plane: HostPlane,
        progress: ProgressEngine,
        config: Config,
        listen: IpAddr,
        recovery: RecoveryGroup,
        name: String,
        trace: Option<Arc<TraceLog>>,
    ) -> Self {
        let timeout = config.timeout;
        let trace = trace.or_else(|| trace::begun(&plane, &config));
        plane.health().watched_by(trace::watch(&plane, &name, &config, trace.as_ref()));
        plane.health().flight().introduce(flight::about(&plane, name, timeout));
        let shared = Shared {
            rank: plane.rank(),
            peers: plane.peers(),
            local: plane.local(),
            health: plane.health(),
            config,
            id: plane.id(),
            plane: HandOff::new(plane),
            progress: Arc::new(progress),
            listen,
            recovery,
            trace,
        };
        let core = Core {
            shared: Arc::new(shared),
            caller: CallerSide::default(),
            worker: OnceCell::new(),
            timeout: Cell::new(timeout),
            monitored: Cell::new(0),
            children: Cell::new(0),
            #[cfg(feature = "cuda")]
            device: OnceCell::new(),
        };
        Self {
            core: Rc::new(core),
            #[cfg(feature = "cuda")]
            stream: None,
        }
    }

    /// Starts to describe a communicator.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use std::time::Duration;
    /// let builder = Communicator::builder().timeout(Duration::from_secs(60)).reproducible(true);
    /// let timeouts = builder.run_local(2, |comm| Ok(comm.timeout()))?;
    /// assert_eq!(timeouts, [Duration::from_secs(60); 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Joins the job that the environment describes: torchrun's or collrun's variables, Slurm's, Open MPI's, PMI's or a Kubernetes
    /// indexed job's. Waits until every rank has come.
    ///
    /// ```no_run
    /// # use collectives::Communicator;
    /// # fn main() -> collectives::Result<()> {
    /// let comm = Communicator::from_env()?;
    /// println!("rank {} of {}", comm.rank(), comm.world_size());
    /// comm.close()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `Config` where variables are missing or malformed, `Conflict` where ranks contradict each other, `Timeout` naming who has
    /// not come.
    #[doc(alias = "init_process_group")]
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// Joins the job at a URL: `env://`, `tcp://host:port?rank=R&world_size=N` or `file:///path?rank=R&world_size=N`.
    ///
    /// ```no_run
    /// # use collectives::Communicator;
    /// # fn main() -> collectives::Result<()> {
    /// let comm = Communicator::from_url("tcp://10.0.0.1:29500?rank=1&world_size=4&timeout=60")?;
    /// # comm.close()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::from_env`].
    pub fn from_url(url: &str) -> Result<Self> {
        Self::builder().from_url(url)
    }

    /// `world_size` communicators of one new group, for the threads of this process.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let sums: Vec<i32> = std::thread::scope(|scope| {
    ///     let ranks = Communicator::local(3)?.into_iter().map(|comm| {
    ///         scope.spawn(move || {
    ///             let mut x = [comm.rank() as i32 + 1];
    ///             comm.all_reduce(&mut x, ReduceOp::Sum).map(|()| x[0])
    ///         })
    ///     });
    ///     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<collectives::Result<_>>()
    /// })?;
    /// assert_eq!(sums, [6, 6, 6]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a size of 0, and what the operating system refuses.
    #[doc(alias = "ncclCommInitAll")]
    pub fn local(world_size: usize) -> Result<Vec<Self>> {
        Self::builder().local(world_size)
    }

    /// Runs `program` on `world_size` threads, each a rank of one new group, and returns what they return, in rank order.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let ranks = Communicator::run_local(3, |comm| Ok((comm.rank(), comm.world_size())))?;
    /// assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The error of a rank that failed by itself, if there is one, else the first rank's; a rank that panics is reported as lost.
    pub fn run_local<R: Send>(world_size: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Result<Vec<R>> {
        Self::builder().run_local(world_size, program)
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

    /// The settings this communicator was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core.shared.config
    }

    /// How calls of this communicator are done, in words: over shared memory, over TCP, and between hosts which collective takes which
    /// algorithm at which size (in the form that [`Config::algorithm`] understands). For people; the text may change.
    #[must_use]
    pub fn explain(&self) -> String {
        if self.core.shared.health.is_foreign() {
            return forked("explain".to_owned()).to_string();
        }
        let said = self.with_plane(|plane| plane.explain());
        said.unwrap_or_else(|| "in use by a reduction that is under way".to_owned())
    }

    /// How the collective of this name (`all_reduce`, `barrier` …, as the method without `_into`) is done on this rank, on ordinary host memory
    /// with a built-in op. `bytes`: the whole vector; where there are blocks, all of them together.
    ///
    /// Over TCP the algorithm, by its name in [`Config::algorithm`]. In shared memory the way of the data: `flags` (there is none), `tracks`
    /// (beside the flags), `slots` (through the ranks' areas, in steps), `shares` (the same, each rank folding its share for all), or `links` (as
    /// between hosts). `copy` on one rank, `hierarchical` between several hosts of several ranks each.
    ///
    /// `None` for names that are no collective's, while a reduction is under way that calls this, and in a forked child.
    ///
    /// ```
    /// # use collectives::{Communicator, DType};
    /// let ways = Communicator::run_local(2, |comm| Ok(comm.algorithm("all_reduce", 1 << 20, DType::F32)))?;
    /// assert_eq!(ways, [Some("shares"); 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn algorithm(&self, collective: &str, bytes: usize, dtype: DType) -> Option<&'static str> {
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == collective)?;
        if self.core.shared.health.is_foreign() {
            return None;
        }
        // SAFETY: `caller` is made with the communicator and never leaves it, so it is this hand-off's only caller's side.
        unsafe { self.core.shared.plane.as_caller(&self.core.caller, |plane| plane.algorithm(kind, bytes, dtype.size_bytes())) }
    }

    /// How long a call may wait for its peers.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.core.timeout.get()
    }

    /// Sets how long later calls may wait for their peers. Local to this rank.
    pub fn set_timeout(&self, timeout: Duration) {
        self.core.timeout.set(timeout);
    }

    /// A handle that any thread can use to end this communicator while a call is under way.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let mut comms = Communicator::local(2)?;
    /// let (comm, abort) = (comms.remove(0), comms[0].abort_handle()); // of rank 1, which makes no call
    /// let waiting = std::thread::spawn(move || comm.barrier().unwrap_err());
    /// abort.abort();
    /// drop(comms);
    /// println!("{}", waiting.join().unwrap());
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        let shared = &self.core.shared;
        AbortHandle {
            rank: shared.rank,
            health: Arc::downgrade(&shared.health),
            progress: Arc::downgrade(&shared.progress),
            #[cfg(feature = "cuda")]
            device: self.plane("abort_handle").map_or_else(|_| Weak::new(), |plane| Arc::downgrade(plane.comm())),
        }
    }

    /// Ends the communicator at once, on this rank and on its peers, without waiting for anyone. Idempotent.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) {
        self.abort_handle().abort();
        self.with_plane(HostPlane::propagate);
    }

    /// Waits until every rank has come this far and all started calls have ended, then closes.
    ///
    /// # Errors
    ///
    /// As [`Communicator::barrier`]. The communicator is gone either way.
    #[doc(alias("ncclCommFinalize", "destroy_process_group"))]
    pub fn close(self) -> Result<()> {
        if self.core.shared.health.is_foreign() {
            return Err(forked("close".to_owned()));
        }
        crate::event::debug!(target: LIFE, communicator = self.core.shared.health.flight().name(), rank = self.rank(), "closing");
        #[cfg(feature = "cuda")]
        let device = self.close_device();
        let closed = self.barrier();
        #[cfg(feature = "cuda")]
        let closed = device.and(closed);
        closed
    }

    /// Runs a checked call: on the host at once, on a device by queueing it. The call is taken as it was made, since moving it about would
    /// cost more than a flag between two cores.
    #[inline]
    fn execute(&self, prepared: Result<Prepared<'_>>) -> Result<()> {
        if let Ok(Prepared::Host(job, _)) = &prepared {
            return self.run(job);
        }
        match prepared? {
            Prepared::Host(job, _) => self.run(&job),
            #[cfg(feature = "cuda")]
            Prepared::Device(call) => self.queue(call, device::Hold::Borrowed),
        }
    }

    /// Why the plane could not be had for a call.
    #[cold]
    fn not_entered(&self, call: &'static str) -> Error {
        if self.core.shared.health.is_foreign() {
            return forked(call.to_owned());
        }
        Error::argument(call, "called from within a reduction of the same communicator")
    }

    /// Reaches for the host plane on this thread, after the started calls; `None` where it cannot be had.
    #[inline]
    fn with_plane<R>(&self, work: impl FnOnce(&mut HostPlane) -> R) -> Option<R> {
        // SAFETY: a core has the only caller's side of its plane's hand-off: both are made together in `new`, and neither can be cloned. The
        // handles that share a core (`OnStream`) share that side, and are on its thread: none of them can be sent or shared.
        unsafe { self.core.shared.plane.as_caller(&self.core.caller, work) }
    }

    /// Runs a checked job of the host plane on this thread, after the started ones.
    #[inline]
    fn run(&self, job: &Job) -> Result<()> {
        let timeout = self.core.timeout.get();
        let entered = self.with_plane(|plane| plane.run(job, &Deadline::lazily(timeout)));
        let result = entered.unwrap_or_else(|| Err(self.not_entered(job.call.kind.name())));
        result.inspect_err(|error| self.core.shared.after_failure(error))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let worker = self.worker.take();
        if self.shared.health.is_foreign() {
            // Its thread is the parent's, and so is what the device plane has of the driver and NCCL.
            #[cfg(feature = "cuda")]
            std::mem::forget(self.device.take());
            return std::mem::forget(worker);
        }
        crate::event::debug!(target: LIFE, communicator = self.shared.health.flight().name(), rank = self.shared.rank, "dropped");
        if let Some(worker) = worker {
            worker.stop(&self.shared);
        }
        self.shared.write_unwritten();
        self.shared.progress.close();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("rank", &self.rank()).field("world_size", &self.world_size()).finish_non_exhaustive()
    }
}
