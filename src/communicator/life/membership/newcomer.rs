//! A newcomer's part of an membership.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use super::Membership;
use super::members::settings_of;
use super::requests::{Answer, Placement, Request, Requests, refused};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::membership::PAUSE;
use crate::base::tuning::recovery::{ANSWER, SERVICE};
use crate::communicator::Communicator;
use crate::communicator::life::bootstrap::{Builder, Origin, Start, call_off, connect_over_store};
use crate::communicator::recovery::{self, RecoveryListener};
use crate::config::join_addresses;
use crate::error::{Error, Result};
use crate::host::net::identity::host_name;
use crate::observe::LIFE;
use crate::rendezvous::{PrefixStore, Store, TcpStore};

impl Communicator {
    /// Joins a running job. Waits at the [`join_address`](Self::join_address) of one of its ranks until the ranks
    /// [`admit`](Self::admit) this process. If there is no answer at an address, this call tries the next one, and
    /// after the last the first again, until the timeout has passed ([`Config::timeout`](crate::Config::timeout)).
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
    /// The errors of [`Communicator::from_env`] and, if `COLLECTIVES_JOIN` is set, of [`Communicator::join`].
    pub fn from_env(self) -> Result<Communicator> {
        match join_addresses()? {
            Some(addresses) => Ok(self.join(&addresses[..])?.communicator),
            None => self.from_url("env://"),
        }
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
        Newcomer { builder: self, deadline }.ask_all(&addresses)
    }
}

/// A process that waits to be admitted.
struct Newcomer {
    builder: Builder,
    deadline: Deadline,
}

impl Newcomer {
    /// Asks at one address after another until the deadline.
    fn ask_all(&self, addresses: &[SocketAddr]) -> Result<Membership> {
        let mut last = None;
        for address in addresses.iter().cycle() {
            let outcome = self.serving(*address).and_then(|store| self.ask(&store));
            match outcome {
                Ok(Some(membership)) => return Ok(membership),
                // The deadline has passed, or the communicator was not completed.
                Ok(None) => {}
                Err(error) if matches!(error.root(), Error::Conflict { .. } | Error::Unauthorized { .. } | Error::Config { .. }) => {
                    return Err(error);
                }
                Err(error) => last = Some(error),
            }
            if self.deadline.has_passed() {
                break;
            }
            std::thread::sleep(PAUSE.min(self.deadline.remaining()));
        }
        Err(self.late(addresses, last))
    }

    /// Returns the error for a deadline that has passed.
    fn late(&self, addresses: &[SocketAddr], last: Option<Error>) -> Error {
        let at: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        let mut doing = format!("join: waiting at {} for the job's ranks to call admit", at.join(", "));
        if let Some(last) = last {
            doing += &format!(" (the last answer: {last})");
        }
        Error::Timeout { doing, elapsed: self.deadline.elapsed(), missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
    }

    /// Returns the store at `address`, if it is served.
    fn serving(&self, address: SocketAddr) -> Result<Arc<TcpStore>> {
        let secret = self.builder.config.secret.as_ref();
        let patience = |limit: Duration| limit.min(self.deadline.remaining());
        recovery::connect(address, patience(ANSWER), secret)?;
        recovery::connect(address, patience(SERVICE), secret)
    }

    /// Asks at one store. Returns `None` if the deadline passes, or if a communicator was not completed.
    fn ask(&self, store: &Arc<TcpStore>) -> Result<Option<Membership>> {
        let listen = self.builder.config.listen_address.unwrap_or_else(|| store.local_address());
        let listener = RecoveryListener::new(listen);
        let requests = Requests::new(Arc::clone(store) as Arc<dyn Store>);
        let from = format!("host {}, pid {}", host_name(), std::process::id());
        let settings = settings_of(&self.builder.config, self.wants_device());
        let number = requests.add(&Request { settings, listener: listener.address(), from })?;
        event::info!(target: LIFE, number, "waiting to be admitted");
        for attempt in 1.. {
            match requests.answer(number, attempt, &self.deadline)? {
                Some(Answer::Refused(reason)) => return Err(refused(&reason)),
                Some(Answer::Confirm) => requests.confirm(number, attempt)?,
                None => break,
            }
            let Some(placement) = requests.placement(number, attempt, &self.deadline)? else { continue };
            let comm = self.connect(&placement, listen, listener.clone());
            // Only the members know whether all of them have connected.
            match (requests.decision(number, attempt, &self.deadline)?, comm) {
                (true, Ok(comm)) => return Ok(Some(Membership::new(comm, placement.members))),
                (true, Err(error)) => return Err(error),
                (false, _) => {}
            }
        }
        // Otherwise a member would call this process without success.
        requests.remove(number)?;
        Ok(None)
    }

    #[cfg(feature = "cuda")]
    fn wants_device(&self) -> bool {
        self.builder.device.is_some()
    }

    #[cfg(not(feature = "cuda"))]
    fn wants_device(&self) -> bool {
        false
    }

    /// Connects with the members and the other newcomers, devices included.
    fn connect(&self, placement: &Placement, listen: IpAddr, listener: RecoveryListener) -> Result<Communicator> {
        let config = self.builder.config.clone();
        let store = recovery::connect(placement.address, self.deadline.remaining(), config.secret.as_ref())?;
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(placement.prefix.clone(), store));
        let start = Start { rank: placement.rank, world_size: placement.world_size, config, listen, origin: Origin::Job(listener) };
        let comm = connect_over_store(Arc::clone(&store), start, None, &self.deadline).inspect_err(|error| call_off(&*store, error))?;
        #[cfg(feature = "cuda")]
        if let Some(request) = &self.builder.device {
            comm.connect_device(request, &self.deadline)?;
        }
        Ok(comm)
    }
}
