//! The members' calls, and an admission over a real communicator.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Membership;
use super::admission::Admission;
use super::protocol::{Members, Plan};
use super::requests::Requests;
use crate::base::deadline::Deadline;
use crate::base::tuning::recovery::SERVICE;
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::device::DeviceChoice;
use crate::communicator::life::bootstrap::{Origin, Start, connect_over_store};
use crate::communicator::life::shrink::protocol::{Shrunk, Unmet};
use crate::communicator::recovery::{PeerWatch, Probe, probe_all};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::host::backend::HostBackend;
use crate::host::health::forked;
use crate::rendezvous::Store;

impl Communicator {
    /// Admits the processes that wait in [`join`](Self::join), and returns a new communicator of this communicator's
    /// ranks and these newcomers. The old ranks keep their numbers, and the newcomers' numbers follow. Collective:
    /// every rank of this communicator must make this call. If no process waits, returns this communicator, at the cost
    /// of one all-gather of 8 B.
    ///
    /// If an error has ended this communicator, or a rank is lost during this call, `admit` first leaves out the lost
    /// ranks, like [`shrink`](Self::shrink).
    ///
    /// A newcomer whose process has ended is left out at once. A newcomer whose process is stopped delays only one call
    /// of `admit`: by at most 2 s, or, if the process is stopped while the ranks connect, by at most 30 s plus 20 ms
    /// for each rank (with devices, up to 5 s longer). If the ranks cannot connect with a newcomer, the newcomer waits for the next call of `admit`.
    /// After three attempts, it is refused.
    ///
    /// After newcomers have been admitted, make all later calls of `shrink` and `admit` on the new communicator,
    /// because a `shrink` of this one returns `LeftBehind`. The new communicator is a job of its own, with the name
    /// "world", in which the [`world_ranks`](Self::world_ranks) begin again at 0. It has the same settings as this
    /// communicator, and a device backend if this one has a device backend.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # std::thread::scope(|scope| {
    /// let member = Communicator::local(1)?.remove(0);
    /// let address = member.join_address()?;
    /// let newcomer = scope.spawn(move || {
    ///     let comm = Communicator::join(address)?.communicator;
    ///     let mut x = [1];
    ///     comm.all_reduce(&mut x, ReduceOp::Sum).map(|()| x)
    /// });
    /// while member.waiting_newcomers()? == 0 {
    ///     std::thread::yield_now(); // in practice: the next training step
    /// }
    /// let membership = member.admit()?;
    /// assert_eq!(membership.newcomers, 1..2);
    /// let mut x = [1];
    /// membership.communicator.all_reduce(&mut x, ReduceOp::Sum)?;
    /// assert_eq!([x, newcomer.join().unwrap()?], [[2], [2]]);
    /// # Ok::<(), collectives::Error>(())
    /// # })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - The errors common to all collectives.
    /// - `Unsupported` if rank 0 could not listen when the job began.
    /// - The errors of [`shrink`](Self::shrink) if a rank is lost.
    #[doc(alias("ncclCommGrow", "reconfigure", "MPI_Comm_accept"))]
    pub fn admit(&self) -> Result<Membership> {
        if self.core.shared.health.is_foreign() {
            return Err(forked("admit".to_owned()));
        }
        Admission::new(self.clone()).run().map(Membership::from)
    }

    /// Returns this rank's address for [`join`](Self::join). From the first call on, this rank serves requests there on
    /// a separate thread. No other rank takes part in this call.
    ///
    /// # Errors
    ///
    /// `Unsupported` if this rank could not listen when the job began, and errors of the operating system.
    pub fn join_address(&self) -> Result<SocketAddr> {
        let recovery = &self.core.shared.recovery;
        recovery.listeners.host("join_address", SERVICE)?;
        recovery
            .address(self.rank())
            .ok_or_else(|| Error::unsupported("join_address", "this rank has no port to which others could connect"))
    }

    /// Returns how many processes wait at this rank's [`join_address`](Self::join_address) to be admitted. More
    /// processes may wait at other ranks. No other rank takes part in this call. Cost: a few requests to this rank's
    /// own store.
    ///
    /// # Errors
    ///
    /// `Io` if this rank's own store does not answer.
    pub fn waiting_newcomers(&self) -> Result<usize> {
        let served = self.core.shared.recovery.listeners.own().requests_served();
        if served.unwrap_or_default() == 0 {
            return Ok(0);
        }
        Ok(Requests::new(self.own_store()?).open()?.len())
    }

    /// Returns a function that checks whether a member or a newcomer is gone.
    fn watch_with(&self, newcomers: Vec<SocketAddr>) -> PeerWatch {
        let members = self.core.shared.recovery.watch();
        Box::new(move || {
            members().or_else(|| {
                let gone = probe_all(&newcomers).into_iter().position(|probe| probe == Probe::Gone);
                gone.map(|newcomer| format!("the newcomer at {} is gone", newcomers[newcomer]))
            })
        })
    }
}

impl Members for Communicator {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn timeout(&self) -> Duration {
        self.timeout()
    }

    fn job_ranks(&self) -> &[usize] {
        self.world_ranks()
    }

    fn has_ended(&self) -> bool {
        self.core.shared.health.has_ended()
    }

    fn was_asked(&self) -> bool {
        self.core.shared.recovery.listeners.own().requests_served() != Some(0)
    }

    fn own_store(&self) -> Result<Arc<dyn Store>> {
        self.core.shared.recovery.listeners.host("admit", SERVICE.min(self.timeout()))
    }

    fn settings(&self) -> String {
        #[cfg(feature = "cuda")]
        let has_device = self.device().is_some();
        #[cfg(not(feature = "cuda"))]
        let has_device = false;
        settings_of(&self.core.shared.config, has_device)
    }

    fn address(&self, rank: usize) -> Option<SocketAddr> {
        self.core.shared.recovery.address(rank)
    }

    fn probe_all(&self, listeners: &[SocketAddr]) -> Vec<Probe> {
        probe_all(listeners)
    }

    fn in_one_turn<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.making("admit", work)
    }

    fn exchange(&self, number: u64, limit: Duration) -> Result<Vec<u64>> {
        let mut all = vec![0; self.world_size()];
        self.with_timeout(limit).all_gather_into(&number, &mut all).map(|()| all)
    }

    fn exchange_texts(&self, text: &str) -> Result<Vec<Vec<u8>>> {
        self.all_gather_blobs(text.as_bytes())
    }

    fn first_store(&self, patience: Duration) -> Result<Arc<dyn Store>> {
        let recovery = &self.core.shared.recovery;
        let missing = || Error::unsupported("admit", "rank 0 has no port to which others could connect");
        Ok(recovery.listeners.connect(recovery.address(0).ok_or_else(missing)?, patience)?)
    }

    fn next_prefix(&self) -> String {
        let number = self.core.admissions.fetch_add(1, Ordering::Relaxed);
        let id = self.core.shared.id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("membership/meeting/{id}/{number}")
    }

    fn connect(&self, store: Arc<dyn Store>, plan: &Plan, deadline: &Deadline) -> Result<Self> {
        let shared = &self.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.timeout();
        let watch = (self.rank() == 0).then(|| self.watch_with(plan.listeners.clone()));
        let start = Start {
            rank: self.rank(),
            world_size: self.world_size() + plan.listeners.len(),
            config,
            listen: shared.listen,
            origin: Origin::Job(shared.recovery.listeners.own().clone()),
        };
        let comm = connect_over_store(store, start, watch, deadline)?;
        comm.keep_store(self.kept_store());
        #[cfg(feature = "cuda")]
        if let Some(device) = self.device() {
            comm.connect_device_of_grown(&DeviceChoice::Context(Arc::clone(device.context())), deadline)?;
        }
        Ok(comm)
    }

    fn publish_commit(&self) -> Result<()> {
        self.publish_grown()
    }

    fn look_for_others(&self) -> Result<()> {
        self.look_after_grown()
    }

    fn abort(&self) {
        self.abort();
    }

    fn meet(&self, limit: Duration) -> Result<()> {
        // A barrier that is late can leave the communicator usable.
        self.with_timeout(limit).barrier().inspect_err(|_| self.abort())
    }

    fn shrink_prefix(&self) -> String {
        self.shrink_prefix()
    }

    fn shrink(&self, unmet: Option<Unmet>) -> Result<Shrunk<Self>> {
        self.shrink_during_admission(unmet)
    }
}

/// Describes the settings that all ranks of a job must share.
pub(super) fn settings_of(config: &Config, has_device: bool) -> String {
    let settings = HostBackend::shared_settings(config);
    format!("{settings}, {}", if has_device { "a device backend" } else { "no device backend" })
}
