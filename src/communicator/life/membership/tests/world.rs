//! Communicators and newcomers in the simulated world of shrinks.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::communicator::life::bootstrap::call_off;
use crate::communicator::life::membership::newcomer::Newcomer;
use crate::communicator::life::membership::protocol::{Members, Plan};
use crate::communicator::life::membership::requests::{Placement, Request};
use crate::communicator::life::shrink::protocol::{Given, Shrinking, Shrunk, Unmet, World};
use crate::communicator::life::shrink::tests::world::{Connected, Place};
use crate::communicator::recovery::Probe;
use crate::error::{Error, Result};
use crate::rendezvous::{PrefixStore, Store};

/// The port of process 0's recovery listener.
const FIRST_PORT: u16 = 1000;

/// Returns the address of a process's recovery listener.
pub(super) fn address_of(process: usize) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], FIRST_PORT + process as u16))
}

/// Returns the process behind a recovery listener.
fn process_at(address: &SocketAddr) -> usize {
    usize::from(address.port() - FIRST_PORT)
}

/// A communicator of simulated processes.
#[derive(Clone)]
pub(super) struct Group {
    place: Place,
    pub(super) connected: Connected,
    job_ranks: Vec<usize>,
    timeout: Duration,
    /// The state that all clones on this process share.
    state: Rc<GroupState>,
}

struct GroupState {
    place: Place,
    name: String,
    exchanges: Cell<u64>,
    attempts: Cell<u64>,
    has_ended: Cell<bool>,
    /// Ranks that were late when the communicator ended.
    late: RefCell<BTreeSet<usize>>,
}

/// The last clone closes the communicator.
impl Drop for GroupState {
    fn drop(&mut self) {
        self.place.leave(&self.name);
    }
}

impl Group {
    /// Makes the communicator that has connected these processes.
    pub(super) fn new(place: &Place, connected: Connected, job_ranks: Vec<usize>, timeout: Duration) -> Self {
        let place = place.among(&connected.members.iter().copied().collect());
        let state = GroupState {
            place: place.clone(),
            name: connected.setup.clone(),
            exchanges: Cell::new(0),
            attempts: Cell::new(0),
            has_ended: Cell::new(false),
            late: RefCell::default(),
        };
        Self { place, connected, job_ranks, timeout, state: Rc::new(state) }
    }

    fn gather(&self, value: Vec<u8>, limit: Duration) -> Result<Vec<Vec<u8>>> {
        let number = self.state.exchanges.replace(self.state.exchanges.get() + 1);
        let Connected { members, setup } = &self.connected;
        self.place.gather(setup, number, members, value, limit).inspect_err(|error| {
            self.state.has_ended.set(true);
            if let Error::Timeout { missing, .. } = error {
                self.state.late.borrow_mut().extend(missing.iter().map(|peer| peer.rank));
            }
        })
    }

    fn shrinking(&self, given: Given) -> Shrinking<'_, Place> {
        Shrinking::new(&self.place, self.rank(), self.shrink_prefix(), self.timeout, given)
    }
}

impl Members for Group {
    fn rank(&self) -> usize {
        self.connected.members.iter().position(|process| *process == self.place.me).expect("a member")
    }

    fn world_size(&self) -> usize {
        self.connected.members.len()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn job_ranks(&self) -> &[usize] {
        &self.job_ranks
    }

    fn has_ended(&self) -> bool {
        self.state.has_ended.get()
    }

    fn was_asked(&self) -> bool {
        true
    }

    fn own_store(&self) -> Result<Arc<dyn Store>> {
        self.place.host()
    }

    fn settings(&self) -> String {
        "the settings".to_owned()
    }

    fn address(&self, rank: usize) -> Option<SocketAddr> {
        Some(address_of(self.connected.members[rank]))
    }

    fn probe_all(&self, listeners: &[SocketAddr]) -> Vec<Probe> {
        self.place.probe_processes(&listeners.iter().map(process_at).collect::<Vec<_>>())
    }

    fn in_one_turn<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        work()
    }

    fn exchange(&self, number: u64, limit: Duration) -> Result<Vec<u64>> {
        let all = self.gather(number.to_le_bytes().to_vec(), limit)?;
        Ok(all.into_iter().map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes"))).collect())
    }

    fn exchange_texts(&self, text: &str) -> Result<Vec<Vec<u8>>> {
        self.gather(text.as_bytes().to_vec(), self.timeout)
    }

    fn first_store(&self, _: Duration) -> Result<Arc<dyn Store>> {
        self.place.store_of(self.connected.members[0])
    }

    fn next_prefix(&self) -> String {
        let number = self.state.attempts.replace(self.state.attempts.get() + 1);
        format!("membership/meeting/{}/{number}", self.connected.setup.replace(' ', "_"))
    }

    fn connect(&self, store: Arc<dyn Store>, plan: &Plan, deadline: &Deadline) -> Result<Self> {
        let size = self.world_size() + plan.listeners.len();
        let newcomers = plan.listeners.iter().map(process_at);
        let watched = (self.rank() == 0).then(|| self.connected.members.iter().copied().chain(newcomers).collect());
        let connected = self.place.connect_at(&store, (self.rank(), size), watched, deadline)?;
        Ok(Self::new(&self.place, connected, (0..size).collect(), self.timeout))
    }

    fn publish_commit(&self) -> Result<()> {
        self.shrinking(Given::default()).publish_grown()
    }

    fn look_for_others(&self) -> Result<()> {
        self.shrinking(Given::default()).look_after_grown()
    }

    fn abort(&self) {
        self.place.end(&self.connected.setup);
    }

    fn meet(&self, limit: Duration) -> Result<()> {
        self.gather(Vec::new(), limit).map(drop)
    }

    fn shrink_prefix(&self) -> String {
        format!("shrink/{}", self.connected.setup)
    }

    fn shrink(&self, unmet: Option<Unmet>) -> Result<Shrunk<Self>> {
        self.place.end(&self.connected.setup);
        let given = Given { doubts: self.state.late.borrow().clone(), unmet, ..Given::default() };
        Ok(match self.shrinking(given).run()? {
            Shrunk::Into(connected) => {
                let old_rank = |process: &usize| self.connected.members.iter().position(|member| member == process).expect("a member");
                let job_ranks = connected.members.iter().map(|process| self.job_ranks[old_rank(process)]).collect();
                Shrunk::Into(Self::new(&self.place, connected, job_ranks, self.timeout))
            }
            Shrunk::Grown(error) => Shrunk::Grown(error),
        })
    }
}

/// A simulated process that asks to be admitted.
pub(super) struct Asking<'a> {
    pub(super) place: &'a Place,
    pub(super) timeout: Duration,
    pub(super) settings: &'static str,
}

impl Newcomer for Asking<'_> {
    type Comm = Group;
    type Visit = Arc<dyn Store>;

    fn visit(&self, address: SocketAddr, _: &Deadline) -> Result<Arc<dyn Store>> {
        self.place.store_of(process_at(&address))
    }

    fn store(visit: &Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::clone(visit)
    }

    fn request(&self, _: &Arc<dyn Store>) -> Request {
        let from = format!("process {}", self.place.me);
        Request { settings: self.settings.to_owned(), listener: Some(address_of(self.place.me)), from }
    }

    fn connect(&self, _: &Arc<dyn Store>, placement: &Placement, deadline: &Deadline) -> Result<Group> {
        let store = self.place.store_of(process_at(&placement.address))?;
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(placement.prefix.clone(), store));
        let rank = (placement.rank, placement.world_size);
        let connected = self.place.connect_at(&store, rank, None, deadline).inspect_err(|error| call_off(&*store, error))?;
        Ok(Group::new(self.place, connected, (0..placement.world_size).collect(), self.timeout))
    }

    fn pause(&self, limit: Duration) {
        self.place.pause(limit);
    }
}
