//! The members' part of an membership.

use std::net::SocketAddr;
use std::sync::Arc;

use super::Membership;
use super::requests::{Placement, Requests};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::membership::{ATTEMPTS, CONFIRMED, CONNECTED, CONNECTED_PER_RANK};
use crate::base::tuning::recovery::SERVICE;
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::device::{DeviceChoice, DeviceRequest};
use crate::communicator::life::bootstrap::{Origin, Start, call_off, connect_over_store};
use crate::communicator::recovery::{PeerWatch, Probe, probe};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::host::backend::HostBackend;
use crate::host::health::forked;
use crate::observe::LIFE;
use crate::rendezvous::{PrefixStore, Store};

/// A newcomer that was called.
struct Called {
    number: u64,
    attempt: u64,
    listener: Option<SocketAddr>,
}

/// The newcomers of an attempt and where they meet, agreed by all members.
struct Plan {
    /// Rank 0's recovery listener opened, and the prefix of the keys there.
    prefix: String,
    /// The number of newcomers that each member has called.
    counts: Vec<usize>,
    /// The recovery listeners of all newcomers.
    listeners: Vec<SocketAddr>,
}

impl Communicator {
    /// Admits the processes that wait in [`join`](Self::join), and returns a new communicator of this communicator's
    /// ranks and these newcomers. The old ranks keep their numbers, and the newcomers' numbers follow. Collective:
    /// every rank of this communicator must make this call. If no process waits, returns this communicator, at the cost
    /// of one all-gather of 8 B.
    ///
    /// If an error has ended this communicator, or a rank is lost during this call, `admit` first leaves out the lost
    /// ranks, like [`shrink`](Self::shrink).
    ///
    /// A newcomer whose process has ended is left out at once. A newcomer whose process is stopped delays only one
    /// call: by at most 2 s, or, if it stops while the ranks connect, by at most 30 s plus 20 ms for each rank. If the
    /// ranks cannot connect with a newcomer, it waits for the next call, and is refused after three attempts.
    ///
    /// Once newcomers have been admitted, call `shrink` and `admit` on the new communicator, because a `shrink` of this
    /// one returns `LeftBehind`. The new communicator is a job of its own, with the name "world" and with
    /// [`world_ranks`](Self::world_ranks) that count from 0. It has the same settings as this communicator, and a
    /// device backend if this one has a device backend.
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
        let deadline = Deadline::after(self.timeout());
        let mut comm = self.clone();
        loop {
            if comm.core.shared.health.has_ended() {
                comm = comm.shrink()?;
            }
            match comm.making("admit", || comm.admit_waiting()) {
                Ok(Some(grown)) => return Ok(Membership::new(grown, comm.world_size())),
                Ok(None) => return Ok(Membership { newcomers: comm.world_size()..comm.world_size(), communicator: comm }),
                Err(error) if is_loss(&error) && comm.core.shared.health.has_ended() && !deadline.has_passed() => {
                    event::info!(target: LIFE, rank = self.rank(), %error, "a rank was lost during an admission");
                }
                Err(error) => return Err(error),
            }
        }
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
        Ok(self.requests()?.open()?.len())
    }

    /// Returns the requests at this rank's recovery listener, which is opened if necessary.
    fn requests(&self) -> Result<Requests> {
        Ok(Requests::new(self.core.shared.recovery.listeners.host("admit", SERVICE.min(self.timeout()))?))
    }

    /// Admits the newcomers that wait. Returns `None` if there were none, or if they could not be connected.
    fn admit_waiting(&self) -> Result<Option<Self>> {
        let deadline = Deadline::after(self.timeout());
        let candidates = self.candidates().unwrap_or_else(|error| {
            // The others continue; the newcomers may ask another rank.
            event::warn!(rank = self.rank(), %error, "this rank cannot read requests to join");
            Vec::new()
        });
        let mut counts = vec![0_u64; self.world_size()];
        self.all_gather_into(&(candidates.len() as u64), &mut counts)?;
        if counts.iter().all(|count| *count == 0) {
            return Ok(None);
        }
        let requests = self.requests();
        let called = requests.as_ref().map(|requests| call(requests, candidates, &deadline)).unwrap_or_default();
        let outcome = self.admit_called(requests.as_ref().ok(), &called, &deadline);
        if let Ok(requests) = requests {
            let is_in = matches!(outcome, Ok(Some(_)));
            for Called { number, attempt, .. } in &called {
                if let Err(error) = requests.decide(*number, *attempt, is_in) {
                    event::warn!(rank = self.rank(), %error, "a newcomer does not learn whether it was admitted");
                }
            }
        }
        outcome
    }

    /// Returns the requests that this rank can consider, after it has refused unsuitable ones.
    fn candidates(&self) -> Result<Vec<(u64, Option<SocketAddr>)>> {
        if self.core.shared.recovery.listeners.own().requests_served() == Some(0) {
            return Ok(Vec::new());
        }
        let (requests, settings) = (self.requests()?, self.settings_for_newcomers());
        let mut candidates = Vec::new();
        for (number, attempts, request) in requests.open()? {
            if request.settings != settings {
                let reason = format!("the job has {settings}; and {} has {}", request.from, request.settings);
                requests.refuse(number, attempts + 1, &reason)?;
            } else if request.listener.is_none_or(|listener| probe(&listener) == Probe::Gone) {
                requests.remove(number)?;
            } else if attempts == 0 || requests.is_confirmed(number, attempts)? {
                if attempts >= ATTEMPTS {
                    let reason =
                        format!("the ranks could not connect with {} in {attempts} attempts; their logs have the reason", request.from);
                    requests.refuse(number, attempts + 1, &reason)?;
                } else {
                    candidates.push((number, request.listener));
                }
            }
        }
        Ok(candidates)
    }

    /// Describes the settings that newcomers must share.
    fn settings_for_newcomers(&self) -> String {
        #[cfg(feature = "cuda")]
        let has_device = self.device().is_some();
        #[cfg(not(feature = "cuda"))]
        let has_device = false;
        settings_of(&self.core.shared.config, has_device)
    }

    /// Connects the members with the newcomers that have confirmed. Returns `None` if that failed.
    fn admit_called(&self, requests: Option<&Requests>, called: &[Called], deadline: &Deadline) -> Result<Option<Self>> {
        let plan = self.agree_on_plan(called)?;
        let address = self.core.shared.recovery.address(0);
        let (Some(address), false) = (address, plan.prefix.is_empty()) else {
            return Err(Error::unsupported("admit", "rank 0 has no port to which newcomers could connect; see Config::listen_address"));
        };
        let world_size = self.world_size() + plan.listeners.len();
        let first = self.world_size() + plan.counts[..self.rank()].iter().sum::<usize>();
        if let Some(requests) = requests {
            for (place, Called { number, attempt, .. }) in called.iter().enumerate() {
                let placement =
                    Placement { rank: first + place, world_size, members: self.world_size(), address, prefix: plan.prefix.clone() };
                requests.place(*number, *attempt, Some(&placement))?;
            }
        }
        if plan.listeners.is_empty() {
            return Ok(None);
        }
        let limit = CONNECTED + CONNECTED_PER_RANK * world_size as u32;
        let made = self.connect_with_newcomers(&plan, address, &Deadline::after(limit.min(deadline.remaining())));
        self.vote(made)
    }

    /// Exchanges the newcomers that have confirmed, and the place at which all meet.
    fn agree_on_plan(&self, called: &[Called]) -> Result<Plan> {
        let mut mine: String = called.iter().filter_map(|called| called.listener).map(|listener| format!("{listener}\n")).collect();
        if self.rank() == 0 {
            let prefix = self.new_prefix().inspect_err(|error| event::warn!(%error, "rank 0 cannot serve newcomers")).unwrap_or_default();
            mine = format!("{prefix}\n{mine}");
        }
        let all = self.all_gather_blobs(mine.as_bytes())?;
        let (mut prefix, mut counts, mut listeners) = (String::new(), Vec::new(), Vec::new());
        for (rank, text) in all.iter().enumerate() {
            let text = String::from_utf8_lossy(text);
            let mut lines = text.lines();
            if rank == 0 {
                prefix = lines.next().unwrap_or_default().to_owned();
            }
            let theirs: Vec<SocketAddr> = lines.map_while(|line| line.parse().ok()).collect();
            counts.push(theirs.len());
            listeners.extend(theirs);
        }
        Ok(Plan { prefix, counts, listeners })
    }

    /// Opens this rank's recovery listener for newcomers, and returns a new prefix for the keys there.
    fn new_prefix(&self) -> Result<String> {
        let store = self.core.shared.recovery.listeners.host("admit", self.timeout())?;
        Ok(format!("membership/meeting/{}", store.add("membership/meetings", 1)?))
    }

    /// Connects this member with the others and the newcomers, devices included.
    fn connect_with_newcomers(&self, plan: &Plan, address: SocketAddr, deadline: &Deadline) -> Result<Self> {
        let shared = &self.core.shared;
        let store = shared.recovery.listeners.connect(address, deadline.remaining())?;
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(plan.prefix.clone(), store));
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
        let comm = connect_over_store(Arc::clone(&store), start, watch, deadline).inspect_err(|error| call_off(&*store, error))?;
        comm.keep_store(self.kept_store());
        #[cfg(feature = "cuda")]
        if let Some(device) = self.device() {
            let request = DeviceRequest { choice: DeviceChoice::Context(Arc::clone(device.context())), required: true };
            comm.connect_device(&request, deadline)?;
        }
        Ok(comm)
    }

    /// Returns a function that checks whether a member or a newcomer is gone.
    fn watch_with(&self, newcomers: Vec<SocketAddr>) -> PeerWatch {
        let members = self.core.shared.recovery.watch();
        Box::new(move || {
            members().or_else(|| {
                let gone = newcomers.iter().find(|listener| probe(listener) == Probe::Gone);
                gone.map(|listener| format!("the newcomer behind {listener} is gone"))
            })
        })
    }

    /// Finds out whether every member has connected. Only then the new communicator counts.
    fn vote(&self, made: Result<Self>) -> Result<Option<Self>> {
        if let Err(error) = &made {
            event::warn!(rank = self.rank(), %error, "newcomers could not be connected; they wait for the next admission");
        }
        let mut votes = vec![0_u8; self.world_size()];
        self.all_gather_into(&u8::from(made.is_ok()), &mut votes)?;
        match made {
            Ok(comm) if votes.iter().all(|vote| *vote == 1) => {
                if let Err(error) = self.publish_successor() {
                    event::warn!(rank = self.rank(), %error, "late ranks will not learn from this rank that it has continued");
                }
                event::info!(target: LIFE, rank = self.rank(), members = self.world_size(), world_size = comm.world_size(), "admitted");
                Ok(Some(comm))
            }
            _ => Ok(None),
        }
    }
}

/// Describes the settings that all ranks of a job must share.
pub(super) fn settings_of(config: &Config, has_device: bool) -> String {
    let settings = HostBackend::shared_settings(config);
    format!("{settings}, {}", if has_device { "a device backend" } else { "no device backend" })
}

/// Whether an error is about a lost rank, so that the others can continue without it.
fn is_loss(error: &Error) -> bool {
    error.is_peer_lost() || error.is_timeout() || matches!(error.root(), Error::Aborted { .. })
}

/// Calls newcomers, and returns those that confirm in time. The others are called again once they have confirmed.
fn call(requests: &Requests, candidates: Vec<(u64, Option<SocketAddr>)>, deadline: &Deadline) -> Vec<Called> {
    let calls = || -> Result<Vec<Called>> {
        let limit = Deadline::after(CONFIRMED.min(deadline.remaining() / 4));
        let mut called = Vec::new();
        for (number, listener) in candidates {
            called.push(Called { number, attempt: requests.call(number)?, listener });
        }
        requests.wait_for_confirmations(called.iter().map(|called| (called.number, called.attempt)), &limit)?;
        let mut confirmed = Vec::new();
        for newcomer in called {
            if requests.is_confirmed(newcomer.number, newcomer.attempt)? {
                confirmed.push(newcomer);
            } else {
                requests.place(newcomer.number, newcomer.attempt, None)?;
            }
        }
        Ok(confirmed)
    };
    calls().unwrap_or_else(|error| {
        event::warn!(%error, "newcomers could not be called");
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::super::requests::Request;
    use super::*;

    #[test]
    fn a_newcomer_that_confirms_and_never_connects_leaves_the_members_as_they_were() {
        let builder = Communicator::builder().configure(|config| config.timeout = Duration::from_secs(4));
        let comm = builder.local(1).unwrap().remove(0);
        // It lives: its listener accepts connections.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (requests, settings) = (comm.requests().unwrap(), comm.settings_for_newcomers());
        let request = Request { settings, listener: listener.local_addr().ok(), from: "a test".to_owned() };
        let number = requests.add(&request).unwrap();
        // The confirmation may come first.
        requests.confirm(number, 1).unwrap();
        let membership = comm.admit().unwrap();
        assert!(membership.newcomers.is_empty());
        membership.communicator.barrier().unwrap();
        assert_eq!(requests.open().unwrap(), [(number, 1, request)]);
        assert!(!requests.decision(number, 1, &Deadline::after(Duration::ZERO)).unwrap());
    }

    #[test]
    fn a_huge_request_holds_up_no_other() {
        let comm = Communicator::local(1).unwrap().remove(0);
        let (requests, settings) = (comm.requests().unwrap(), comm.settings_for_newcomers());
        let huge = Request { settings: "x".repeat(1 << 20), listener: None, from: String::new() };
        let number = requests.add(&huge).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let second = requests.add(&Request { settings, listener: listener.local_addr().ok(), from: "a test".to_owned() }).unwrap();
        assert_eq!(comm.candidates().unwrap(), [(second, listener.local_addr().ok())]);
        assert!(requests.answer(number, 1, &Deadline::after(Duration::ZERO)).unwrap().is_some());
    }
}
