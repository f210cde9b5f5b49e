//! A newcomer's part of an admission.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use super::Membership;
use super::admission::{Admission, Admitted};
use super::join_file;
use super::members::settings_of;
use super::protocol::{Members, connection_time};
use super::requests::{Answer, Placement, Request, Requests, refused};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::membership::PAUSE;
use crate::base::tuning::recovery::{ANSWER, SERVICE};
use crate::communicator::Communicator;
use crate::communicator::life::bootstrap::{Builder, Origin, Start, call_off, connect_over_store};
use crate::communicator::recovery::{self, RecoveryListener};
use crate::config::{join_address_file, join_addresses};
use crate::error::{Error, Result};
use crate::host::net::identity::host_name;
use crate::host::net::interfaces::listen_address;
use crate::observe::LIFE;
use crate::rendezvous::{PrefixStore, Store, TcpStore};

impl Communicator {
    /// Joins a running job. Waits at the [`join_address`](Self::join_address) of one of its ranks until the ranks
    /// [`admit`](Self::admit) this process. If there is no answer at an address, this call tries the next address
    /// (after the last address, the first one again), until [`Config::timeout`](crate::Config::timeout) has passed.
    ///
    /// Returns what [`admit`](Self::admit) returns on the other ranks: the new communicator, in which this process has
    /// one of the highest ranks, and the ranks of all newcomers. The program itself must pass its state on to the
    /// newcomers: for example, rank 0 can broadcast it.
    ///
    /// ```no_run
    /// # use collectives::Communicator;
    /// let membership = Communicator::join("10.0.0.1:40123")?;
    /// let comm = membership.communicator;
    /// println!("rank {}; newcomers: {:?}", comm.rank(), membership.newcomers);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no address, or if a name cannot be resolved.
    /// - `Timeout` if the ranks do not admit this process in time.
    /// - `NoDevice` if the builder requires a device that this process does not have.
    /// - `Conflict` if the job refuses this process, for example because its settings differ.
    /// - `Unauthorized` if this process does not know the job's secret.
    #[doc(alias("MPI_Comm_connect"))]
    pub fn join(addresses: impl ToSocketAddrs) -> Result<Membership> {
        Self::builder().join(addresses)
    }
}

impl Builder {
    /// Joins a job with these settings, like [`Communicator::from_env`].
    ///
    /// # Errors
    ///
    /// - The errors of [`Communicator::from_env`].
    /// - If `COLLECTIVES_JOIN` is set, the errors of [`Communicator::join`].
    /// - If `COLLECTIVES_JOIN_FILE` is set, the errors of [`Communicator::join_address`], and `Io` if the file cannot be
    ///   written.
    pub fn from_env(self) -> Result<Communicator> {
        let comm = match join_addresses()? {
            Some(addresses) => self.join(&addresses[..])?.communicator,
            None => self.from_url("env://")?,
        };
        if let Some(path) = join_address_file() {
            join_file::write(&path, comm.join_address()?)?;
        }
        Ok(comm)
    }

    /// Joins a running job with these settings, like [`Communicator::join`].
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::join`].
    pub fn join(mut self, addresses: impl ToSocketAddrs) -> Result<Membership> {
        self.config = self.config.with_environment()?;
        let addresses = addresses.to_socket_addrs().map_err(|error| Error::argument("join", format!("the addresses: {error}")))?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        if addresses.is_empty() {
            return Err(Error::argument("join", "there is no address; pass at least one rank's join_address"));
        }
        let deadline = Deadline::after(self.config.timeout);
        #[cfg(feature = "cuda")]
        let no_device = self.withdraw_missing_device()?;
        #[cfg(not(feature = "cuda"))]
        let no_device: Option<String> = None;
        let joined = join(&Joining(self), &addresses, &deadline).map(Membership::from);
        joined.map_err(|error| match (error, no_device) {
            (Error::Conflict { reason }, Some(why)) => Error::Conflict { reason: format!("{reason} (this process has no device: {why})") },
            (error, _) => error,
        })
    }

    /// Withdraws the request for a device backend if this process cannot have one, and returns why. Like a member
    /// without a device, it can join a job without devices.
    ///
    /// # Errors
    ///
    /// `NoDevice` if a device backend is required.
    #[cfg(feature = "cuda")]
    fn withdraw_missing_device(&mut self) -> Result<Option<String>> {
        let Some(reason) = self.device.as_ref().and_then(|request| request.check(&self.config).err()) else { return Ok(None) };
        match self.device.take() {
            Some(request) if request.required => Err(Error::NoDevice { call: "join".to_owned(), reason }),
            _ => Ok(Some(reason)),
        }
    }
}

/// A process that asks to be admitted, and its environment. The tests simulate it.
pub(super) trait Newcomer {
    type Comm: Members;
    /// A member's store that answers, and what this process has for an admission there.
    type Visit;

    /// Visits a member.
    fn visit(&self, address: SocketAddr, deadline: &Deadline) -> Result<Self::Visit>;

    /// Returns the store of a visit.
    fn store(visit: &Self::Visit) -> Arc<dyn Store>;

    /// Makes this process's request.
    fn request(&self, visit: &Self::Visit) -> Request;

    /// Connects with the members and the other newcomers, devices included.
    fn connect(&self, visit: &Self::Visit, placement: &Placement, deadline: &Deadline) -> Result<Self::Comm>;

    /// Waits for this time.
    fn pause(&self, limit: Duration);
}

/// Asks at one address after another until the deadline.
pub(super) fn join<N: Newcomer>(newcomer: &N, addresses: &[SocketAddr], deadline: &Deadline) -> Result<Admitted<N::Comm>> {
    let mut last = None;
    for address in addresses.iter().cycle() {
        let outcome = newcomer.visit(*address, deadline).and_then(|visit| ask(newcomer, &visit, deadline));
        match outcome {
            Ok(Some(admitted)) => return Ok(admitted),
            // The deadline has passed, or the communicator was not completed.
            Ok(None) => {}
            Err(error) if matches!(error.root(), Error::Conflict { .. } | Error::Unauthorized { .. } | Error::Config { .. }) => {
                return Err(error);
            }
            Err(error) => last = Some(error),
        }
        if deadline.has_passed() {
            break;
        }
        newcomer.pause(PAUSE.min(deadline.remaining()));
    }
    Err(late(addresses, last, deadline))
}

/// Returns the error for a deadline that has passed.
fn late(addresses: &[SocketAddr], last: Option<Error>, deadline: &Deadline) -> Error {
    let at: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let mut doing = format!("join: waiting at {} for the job's ranks to call admit", at.join(", "));
    if let Some(last) = last {
        doing += &format!(" (the last answer: {last})");
    }
    Error::Timeout { doing, elapsed: deadline.elapsed(), missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
}

/// Asks at one store. Returns `None` if the deadline passes, or if a communicator was not completed.
fn ask<N: Newcomer>(newcomer: &N, visit: &N::Visit, deadline: &Deadline) -> Result<Option<Admitted<N::Comm>>> {
    let requests = Requests::new(N::store(visit));
    let number = requests.add(&newcomer.request(visit))?;
    event::info!(target: LIFE, number, "waiting to be admitted");
    let mut failed = None;
    for attempt in 1.. {
        match requests.answer(number, attempt, deadline)? {
            Some(Answer::Refused(reason)) => return Err(refused(&with_cause(reason, failed.as_ref()))),
            Some(Answer::Confirm) => requests.confirm(number, attempt)?,
            None => break,
        }
        let Some(placement) = requests.placement(number, attempt, deadline)? else { continue };
        let comm = newcomer.connect(visit, &placement, deadline);
        // Only the members know whether all of them have connected.
        match (requests.decision(number, attempt, deadline)?, comm) {
            (true, Ok(comm)) => return Admission::complete(comm, placement.members, placement.admitting).map(Some),
            (true, Err(error)) => return Err(error),
            (false, comm) => failed = comm.err(),
        }
    }
    // Otherwise a member would call this process without success.
    requests.remove(number)?;
    Ok(None)
}

/// Adds this process's error in the last attempt to the members' reason for a refusal.
fn with_cause(reason: String, failed: Option<&Error>) -> String {
    match failed {
        Some(error) => format!("{reason}; the last attempt failed here: {error}"),
        None => reason,
    }
}

/// A real process that waits to be admitted, with these settings.
struct Joining(Builder);

/// A member's store, and this process's recovery listener for an admission there.
struct Visit {
    store: Arc<TcpStore>,
    listen: IpAddr,
    listener: RecoveryListener,
}

impl Joining {
    #[cfg(feature = "cuda")]
    fn wants_device(&self) -> bool {
        self.0.device.is_some()
    }

    #[cfg(not(feature = "cuda"))]
    fn wants_device(&self) -> bool {
        false
    }
}

impl Newcomer for Joining {
    type Comm = Communicator;
    type Visit = Visit;

    fn visit(&self, address: SocketAddr, deadline: &Deadline) -> Result<Visit> {
        let secret = self.0.config.secret.as_ref();
        let patience = |limit: Duration| limit.min(deadline.remaining());
        recovery::connect(address, patience(ANSWER), secret)?;
        let store = recovery::connect(address, patience(SERVICE), secret)?;
        let listen = listen_address(&self.0.config, Some(store.local_address()))?;
        Ok(Visit { store, listen, listener: RecoveryListener::new(listen, self.0.config.port_range)? })
    }

    fn store(visit: &Visit) -> Arc<dyn Store> {
        Arc::clone(&visit.store) as Arc<dyn Store>
    }

    fn request(&self, visit: &Visit) -> Request {
        Request {
            settings: settings_of(&self.0.config, self.wants_device()),
            listener: visit.listener.address(),
            from: format!("host {}, pid {}", host_name(), std::process::id()),
        }
    }

    fn connect(&self, visit: &Visit, placement: &Placement, deadline: &Deadline) -> Result<Communicator> {
        // The members wait no longer. A newcomer that was stopped meanwhile does not hear that they have given up.
        let deadline = &Deadline::after(connection_time(placement.world_size).min(deadline.remaining()));
        let config = self.0.config.clone();
        let store = recovery::connect(placement.address, deadline.remaining(), config.secret.as_ref())?;
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(placement.prefix.clone(), store));
        let origin = Origin::Job(visit.listener.clone());
        let start = Start { rank: placement.rank, world_size: placement.world_size, config, listen: visit.listen, origin };
        let comm = connect_over_store(Arc::clone(&store), start, None, deadline).inspect_err(|error| call_off(&*store, error))?;
        #[cfg(feature = "cuda")]
        if let Some(request) = &self.0.device {
            comm.connect_device_of_grown(&request.choice, deadline)?;
        }
        Ok(comm)
    }

    fn pause(&self, limit: Duration) {
        std::thread::sleep(limit);
    }
}
