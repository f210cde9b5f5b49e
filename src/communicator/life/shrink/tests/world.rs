//! A simulated world for shrinks and admissions: recovery listeners, exchanges over a communicator, deaths, sleeps and
//! network cuts, a simulated clock, and a scheduler that draws which process runs.
//!
//! Each process is a coroutine. It yields at each request to the world, so one seed is one order of events.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::super::protocol::{GroupSetup, Visited, World, read};
use crate::base::deadline::{Deadline, simulated};
use crate::base::random::Random;
use crate::base::tuning::recovery::ANSWER;
use crate::communicator::life::bootstrap::StoreExchange;
use crate::communicator::recovery::PeerWatch;
use crate::communicator::recovery::Probe;
use crate::error::{Error, Peer, Result};
use crate::host::exchange::Exchange;
use crate::rendezvous::{MemoryStore, Store};

/// The times of the real recovery listeners.
const SILENCE: Duration = Duration::from_millis(500);
const CANCEL: Duration = Duration::from_secs(5);
/// How long a host may acknowledge nothing before its ranks count as lost.
const UNACKNOWLEDGED: Duration = Duration::from_secs(3);
/// The time between two checks by a simulated rank for what it waits for.
const LOOK: Duration = Duration::from_millis(5);
/// The size of a coroutine's stack in bytes.
const STACK: usize = 256 << 10;

impl Random {
    /// Returns `true` once in `times` times on average.
    pub(in crate::communicator::life) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(in crate::communicator::life) fn time(&mut self, end: Duration) -> Duration {
        Duration::from_micros(self.below(end.as_micros() as usize + 1) as u64)
    }
}

/// The fate of a rank after a given number of requests to the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::communicator::life) enum Fate {
    Dies,
    SleepsFor(Duration),
}

/// Ranks that the network separates for a while, as a bit mask.
#[derive(Debug, Clone, Copy)]
pub(in crate::communicator::life) struct Partition {
    pub(in crate::communicator::life) from: Duration,
    pub(in crate::communicator::life) until: Duration,
    pub(in crate::communicator::life) side: u32,
}

/// The events of one run.
#[derive(Debug, Clone)]
pub(in crate::communicator::life) struct Scenario {
    pub(in crate::communicator::life) ranks: Vec<Plan>,
    pub(in crate::communicator::life) cut: Option<Partition>,
    pub(in crate::communicator::life) limit: Duration,
}

/// The events of one rank.
#[derive(Debug, Clone, Default)]
pub(in crate::communicator::life) struct Plan {
    /// The rank is gone before any rank shrinks.
    pub(in crate::communicator::life) is_dead: bool,
    /// The rank never shrinks, though it lives.
    pub(in crate::communicator::life) is_absent: bool,
    pub(in crate::communicator::life) begins: Duration,
    pub(in crate::communicator::life) fates: Vec<(usize, Fate)>,
    pub(in crate::communicator::life) doubts: BTreeSet<usize>,
    pub(in crate::communicator::life) left: BTreeSet<usize>,
    /// The processes that this one asks to be admitted. Empty for a member of the first communicator.
    pub(in crate::communicator::life) asks: Vec<usize>,
    /// The number of members of the first communicator.
    pub(in crate::communicator::life) members: usize,
    /// Whether the process has other settings than the job.
    pub(in crate::communicator::life) differs: bool,
}

/// The processes that are members, and the name of their setup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::communicator::life) struct Connected {
    pub(in crate::communicator::life) members: Vec<usize>,
    pub(in crate::communicator::life) setup: String,
}

/// One rank's state in the world.
struct Rank {
    plan: Plan,
    lives: bool,
    asleep_until: Duration,
    ready: Duration,
    asked: usize,
    recovery_listener: Option<MemoryStore>,
    /// The communicators of which the process has been a member.
    history: Vec<Connected>,
    outcome: Option<(Duration, Result<Connected>)>,
}

/// The ranks that have opened all links of a setup, and whether one gave it up.
#[derive(Default)]
struct Links {
    arrived: BTreeSet<usize>,
    failed: bool,
}

struct State {
    now: Duration,
    random: Random,
    ranks: Vec<Rank>,
    cut: Option<Partition>,
    links: BTreeMap<String, Links>,
    /// What the ranks have contributed to the exchanges of each communicator, by its name and the exchange's number.
    exchanges: BTreeMap<(String, u64), BTreeMap<usize, Vec<u8>>>,
    /// The communicators that a rank has ended.
    ended: BTreeSet<String>,
    /// The communicators that a process has closed.
    left: BTreeSet<(String, usize)>,
    log: Vec<String>,
}

impl State {
    fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cut.is_some_and(|cut| (cut.from..cut.until).contains(&self.now) && (cut.side >> one ^ cut.side >> other) & 1 == 1)
    }

    fn sleeps(&self, rank: usize) -> bool {
        self.ranks[rank].asleep_until > self.now
    }
}

/// The outcome of a simulated shrink.
pub(in crate::communicator::life) struct Report {
    /// For each rank that lives at the end: when it finished, and with which result.
    pub(in crate::communicator::life) outcomes: Vec<Option<(Duration, Result<Connected>)>>,
    pub(in crate::communicator::life) lives: Vec<bool>,
    /// For each process, whether it asked to be admitted.
    pub(in crate::communicator::life) asked: Vec<bool>,
    /// For each process, the communicators of which it has been a member.
    pub(in crate::communicator::life) histories: Vec<Vec<Connected>>,
    /// All messages and their effects.
    pub(in crate::communicator::life) log: Vec<String>,
}

/// The world as one process sees it.
#[derive(Clone)]
pub(in crate::communicator::life) struct Place {
    pub(in crate::communicator::life) me: usize,
    /// The process of each rank of the communicator that shrinks.
    processes: Arc<[usize]>,
    peers: Arc<[Peer]>,
    patience: Duration,
    state: Arc<Mutex<State>>,
}

impl Place {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("one thread")
    }

    /// Yields for this time, and in rare cases for much longer.
    fn pass(&self, time: Duration) {
        let mut state = self.state();
        let random = &mut state.random;
        let jitter = if random.once_in(50) { random.time(Duration::from_millis(300)) } else { random.time(Duration::from_millis(1)) };
        drop(state);
        self.pass_in_time(time + jitter);
    }

    /// Yields for this time, in which this rank may die or fall asleep.
    fn pass_in_time(&self, time: Duration) {
        let mut state = self.state();
        let now = state.now;
        let rank = &mut state.ranks[self.me];
        rank.asked += 1;
        rank.ready = now + time;
        for (_, fate) in rank.plan.fates.iter().filter(|(at, _)| *at == rank.asked) {
            match fate {
                Fate::Dies => (rank.lives, rank.ready) = (false, now),
                Fate::SleepsFor(time) => {
                    rank.asleep_until = now + *time;
                    rank.ready = rank.ready.max(now + *time);
                }
            }
        }
        drop(state);
        #[expect(deprecated, reason = "the newer way is a handle that no store could hold, since stores are used from any thread")]
        generator::yield_with(());
        if !self.state().ranks[self.me].lives {
            resume_unwind(Box::new(Died));
        }
    }

    fn log(&self, what: String) {
        let mut state = self.state();
        let line = format!("{:9.3} rank {}: {what}", state.now.as_secs_f64(), self.me);
        state.log.push(line);
    }

    /// Waits until `other` answers, that is, until it lives, is awake and reachable.
    fn reach(&self, other: usize, patience: Duration) -> Result<()> {
        self.pass(Duration::ZERO);
        let until = self.state().now + patience;
        loop {
            if let Some(reached) = self.reaches(other, until) {
                return reached;
            }
            self.pass_in_time(LOOK);
        }
    }

    /// Whether `other` answers at this moment. Returns `None` if this is not known before `until`.
    fn reaches(&self, other: usize, until: Duration) -> Option<Result<()>> {
        let state = self.state();
        let lost = |kind| Some(Err(Error::io(format!("asking rank {other}"), io::Error::from(kind))));
        let (is_dead, is_cut_off) = (!state.ranks[other].lives, state.is_cut(self.me, other));
        match () {
            () if other == self.me => Some(Ok(())),
            () if is_dead && !is_cut_off => lost(io::ErrorKind::UnexpectedEof),
            () if !is_cut_off && !state.sleeps(other) => Some(Ok(())),
            () if state.now >= until => lost(io::ErrorKind::TimedOut),
            () => None,
        }
    }

    /// Opens the links to the other members and meets them at a barrier.
    fn link(&self, key: &str, members: &[usize], deadline: &Deadline) -> Result<()> {
        self.state().links.entry(key.to_owned()).or_default().arrived.insert(self.me);
        loop {
            self.pass(LOOK);
            let mut state = self.state();
            let troubled = |state: &State, rank: &usize| state.is_cut(self.me, *rank) || state.sleeps(*rank);
            let is_held_up = members.iter().any(|rank| troubled(&state, rank));
            let links = &state.links[key];
            let is_lost = links.failed || members.iter().any(|rank| !state.ranks[*rank].lives);
            let is_complete = members.iter().all(|rank| links.arrived.contains(rank));
            // It is random whose messages got through before the trouble began.
            if is_complete && (!is_held_up && !is_lost || state.random.once_in(2)) {
                return Ok(());
            }
            if is_lost && !is_held_up {
                return Err(Error::io("linking", io::Error::from(io::ErrorKind::ConnectionReset)));
            }
            drop(state);
            if deadline.has_passed() {
                let elapsed = deadline.elapsed();
                return Err(Error::Timeout { doing: "linking".to_owned(), elapsed, missing: vec![], arrived: vec![], meanwhile: vec![] });
            }
        }
    }

    /// Exchanges facts with the other members at a store. Returns the members, and the name of the setup.
    fn exchange_facts(
        &self,
        store: &Arc<dyn Store>,
        rank: usize,
        size: usize,
        watch: Option<PeerWatch>,
        deadline: &Deadline,
    ) -> Result<Connected> {
        let name = format!("process {} at {:?}", self.me, self.state().now);
        let name = store.compare_set("name of the setup", b"", name.as_bytes())?;
        let mut exchange = StoreExchange::new(Arc::clone(store), rank, size, watch, deadline)?;
        let facts = exchange.all_gather(self.me.to_string().as_bytes(), deadline)?;
        exchange.all_gather(b"addresses", deadline)?;
        let members = facts.iter().map(|fact| String::from_utf8_lossy(fact).parse().expect("the number of a process")).collect();
        Ok(Connected { members, setup: String::from_utf8_lossy(&name).into_owned() })
    }

    /// Connects this process, as `rank` of a new communicator of `size` ranks. The ranks meet at a store. If `watched` is
    /// given, this rank watches whether one of these processes dies.
    pub(in crate::communicator::life) fn connect_at(
        &self,
        store: &Arc<dyn Store>,
        (rank, size): (usize, usize),
        watched: Option<Vec<usize>>,
        deadline: &Deadline,
    ) -> Result<Connected> {
        let place = self.clone();
        let watch = watched.map(|watched| {
            let gone = move || place.probe_processes(&watched).into_iter().position(|probe| probe == Probe::Gone);
            Box::new(move || gone().map(|rank| format!("the process of rank {rank} is gone"))) as PeerWatch
        });
        let met = self.exchange_facts(store, rank, size, watch, deadline)?;
        let key = format!("{} {:?}", met.setup, met.members);
        let linked = self.link(&key, &met.members, deadline);
        if linked.is_err() {
            self.state().links.entry(key.clone()).or_default().failed = true;
        }
        self.log(format!("has connected: {linked:?}"));
        linked.map(|()| Connected { setup: key, ..met })
    }

    /// Gathers a value from every process of a communicator. This is its exchange with the given number.
    pub(in crate::communicator::life) fn gather(
        &self,
        name: &str,
        number: u64,
        processes: &[usize],
        value: Vec<u8>,
        limit: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        self.pass(Duration::ZERO);
        let (key, deadline) = ((name.to_owned(), number), Deadline::after(limit));
        self.state().exchanges.entry(key.clone()).or_default().insert(self.me, value);
        loop {
            self.pass(LOOK);
            let mut state = self.state();
            let is_cut = processes.iter().any(|process| state.is_cut(self.me, *process));
            let values = &state.exchanges[&key];
            let has_left = |process: usize| !values.contains_key(&process) && state.left.contains(&(name.to_owned(), process));
            let lost = processes.iter().position(|process| !state.ranks[*process].lives || has_left(*process));
            let is_complete = values.len() == processes.len();
            let is_ended = state.ended.contains(name);
            // It is random whose messages got through before the trouble began.
            if is_complete && (!is_cut && lost.is_none() && !is_ended || state.random.once_in(2)) {
                let values = &state.exchanges[&key];
                return Ok(processes.iter().map(|process| values[process].clone()).collect());
            }
            let missing: Vec<Peer> =
                (0..processes.len()).filter(|rank| !state.exchanges[&key].contains_key(&processes[*rank])).map(Peer::unknown).collect();
            let error = match lost {
                _ if is_cut && deadline.elapsed() >= UNACKNOWLEDGED => {
                    processes.iter().position(|process| state.is_cut(self.me, *process)).map(lost_rank)
                }
                _ if is_cut && !deadline.has_passed() => None,
                _ if is_ended => Some(Error::Aborted { doing: format!("exchange {number}"), by: Peer::unknown(0) }),
                Some(rank) => Some(lost_rank(rank)),
                None if deadline.has_passed() => {
                    let elapsed = deadline.elapsed();
                    Some(Error::Timeout { doing: format!("exchange {number}"), elapsed, missing, arrived: vec![], meanwhile: vec![] })
                }
                None => None,
            };
            if let Some(error) = error {
                state.ended.insert(name.to_owned());
                return Err(error);
            }
        }
    }

    /// Closes a communicator on this process.
    pub(in crate::communicator::life) fn leave(&self, name: &str) {
        self.state().left.insert((name.to_owned(), self.me));
    }

    /// Remembers that this process is a member of a communicator.
    pub(in crate::communicator::life) fn remember(&self, connected: &Connected) {
        self.log(format!("continues with {:?}", connected.members));
        let mut state = self.state();
        let history = &mut state.ranks[self.me].history;
        if history.last() != Some(connected) {
            history.push(connected.clone());
        }
    }

    /// Waits for a random time.
    pub(in crate::communicator::life) fn work(&self, limit: Duration) {
        let time = self.state().random.time(limit);
        self.pass(time);
    }

    /// Ends a communicator on all ranks.
    pub(in crate::communicator::life) fn end(&self, name: &str) {
        self.state().ended.insert(name.to_owned());
    }

    /// Returns this process's view of the ranks of a communicator.
    pub(in crate::communicator::life) fn among(&self, processes: &Arc<[usize]>) -> Self {
        let peers = (0..processes.len()).map(Peer::unknown).collect();
        Self { processes: Arc::clone(processes), peers, ..self.clone() }
    }

    /// Finds out whether these processes live, of all at the same time.
    pub(in crate::communicator::life) fn probe_processes(&self, processes: &[usize]) -> Vec<Probe> {
        let answer = |process: usize| {
            let state = self.state();
            let life = if state.ranks[process].lives { Probe::Alive } else { Probe::Gone };
            if state.is_cut(self.me, process) { Probe::NoAnswer } else { life }
        };
        self.pass(Duration::ZERO);
        let mut probes: Vec<Probe> = processes.iter().copied().map(answer).collect();
        if probes.contains(&Probe::NoAnswer) {
            self.pass(SILENCE);
        }
        let silent = probes.iter_mut().zip(processes).filter(|(probe, _)| **probe == Probe::NoAnswer);
        silent.for_each(|(probe, process)| *probe = answer(*process));
        probes
    }

    /// Returns the store behind a process's recovery listener.
    pub(in crate::communicator::life) fn store_of(&self, process: usize) -> Result<Arc<dyn Store>> {
        self.stores_of(&[process]).remove(0)
    }

    /// Visits the recovery listeners of these processes, all at the same time.
    fn stores_of(&self, processes: &[usize]) -> Vec<Result<Arc<dyn Store>>> {
        self.pass(Duration::ZERO);
        let until = self.state().now + ANSWER;
        let mut visits: Vec<Visit> = processes.iter().map(|_| Visit::Connects(until)).collect();
        while visits.iter().any(|visit| !matches!(visit, Visit::Ended(_))) {
            let mut proceeds = false;
            for (process, visit) in processes.iter().zip(&mut visits) {
                if let Some(next) = self.proceed(*process, visit) {
                    (*visit, proceeds) = (next, true);
                }
            }
            if proceeds { self.pass(Duration::ZERO) } else { self.pass_in_time(LOOK) }
        }
        let ended = processes.iter().zip(visits).map(|(process, visit)| match visit {
            Visit::Ended(table) => table.map(|table| self.behind(*process, table)),
            Visit::Connects(_) | Visit::FindsNoStore(_) | Visit::Asks(_) => unreachable!("all have ended"),
        });
        ended.collect()
    }

    /// Returns what comes next in a visit; `None` if it must wait.
    fn proceed(&self, process: usize, visit: &Visit) -> Option<Visit> {
        let table = || self.state().ranks[process].recovery_listener.clone();
        let now = self.state().now;
        match visit {
            Visit::Connects(until) => Some(match self.reaches(process, *until)? {
                Ok(()) if table().is_none() => Visit::FindsNoStore(now + ANSWER),
                Ok(()) => Visit::Asks(now + self.patience),
                Err(error) => Visit::Ended(Err(error)),
            }),
            Visit::FindsNoStore(until) => (now >= *until).then(|| Visit::Asks(now + self.patience)),
            Visit::Asks(until) => {
                let silent = || Error::io(format!("asking process {process}"), io::Error::from(io::ErrorKind::TimedOut));
                Some(Visit::Ended(self.reaches(process, *until)?.and_then(|()| table().ok_or_else(silent))))
            }
            Visit::Ended(_) => None,
        }
    }

    /// Returns the store behind the recovery listener of a process.
    fn behind(&self, owner: usize, table: MemoryStore) -> Arc<dyn Store> {
        Arc::new(Behind { place: self.clone(), owner, table, is_lost: AtomicBool::new(false), patience: self.patience })
    }
}

/// The state of a visit at a recovery listener, with the time at which it ends.
enum Visit {
    Connects(Duration),
    /// The process accepts the connection, and serves no store.
    FindsNoStore(Duration),
    Asks(Duration),
    Ended(Result<MemoryStore>),
}

impl World for Place {
    type Connected = Connected;

    fn peers(&self) -> &[Peer] {
        &self.peers
    }

    fn probe_all(&self, ranks: &[usize]) -> Vec<Probe> {
        self.probe_processes(&ranks.iter().map(|rank| self.processes[*rank]).collect::<Vec<_>>())
    }

    fn visit_all(&self, ranks: &[usize], key: &str) -> Vec<Option<Visited>> {
        let processes: Vec<usize> = ranks.iter().map(|rank| self.processes[*rank]).collect();
        let stores = self.stores_of(&processes).into_iter();
        let visited = stores.map(|store| {
            let store = store.ok()?;
            Some((read(&*store, key).ok()??, store))
        });
        visited.collect()
    }

    fn host(&self) -> Result<Arc<dyn Store>> {
        self.pass(Duration::ZERO);
        let table = self.state().ranks[self.me].recovery_listener.get_or_insert_default().clone();
        Ok(self.behind(self.me, table))
    }

    fn pause(&self, limit: Duration) {
        self.pass(limit);
    }

    fn connect(&self, store: Arc<dyn Store>, setup: &GroupSetup<'_>) -> Result<Connected> {
        let members: Vec<usize> = setup.members.iter().map(|rank| self.processes[*rank]).collect();
        self.log(format!("connects with {members:?}"));
        let rank = (setup.place, members.len());
        self.connect_at(&store, rank, setup.leads.then_some(members), setup.deadline)
    }
}

/// The store behind a recovery listener.
struct Behind {
    place: Place,
    owner: usize,
    table: MemoryStore,
    is_lost: AtomicBool,
    patience: Duration,
}

impl Behind {
    fn ask<T>(&self, patience: Duration, ask: impl Fn(&MemoryStore) -> Result<T>) -> Result<T> {
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(Error::io("asking", io::Error::from(io::ErrorKind::NotConnected)));
        }
        self.place.reach(self.owner, patience).inspect_err(|_| self.is_lost.store(true, Ordering::Relaxed))?;
        ask(&self.table)
    }

    fn wait_for<T>(&self, timeout: Duration, ask: impl Fn(&MemoryStore) -> Result<T>) -> Result<T> {
        let until = self.place.state().now + timeout;
        loop {
            let left = until.saturating_sub(self.place.state().now);
            match self.ask(left + CANCEL.min(self.patience), &ask) {
                Err(error) if error.is_timeout() && self.place.state().now < until => self.place.pass(LOOK),
                outcome => return outcome,
            }
        }
    }
}

impl Store for Behind {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        assert!(!value.is_empty(), "{key} is set to nothing, which some servers take long to answer");
        self.ask(self.patience, |table| table.set(key, value))?;
        if key.ends_with("status") {
            self.place.log(format!("says {}", String::from_utf8_lossy(value)));
        }
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait_for(timeout, |table| table.get(key, Duration::ZERO))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.ask(self.patience, |table| table.add(key, delta))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.ask(self.patience, |table| table.compare_set(key, expected, desired))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_for(timeout, |table| table.wait(keys, Duration::ZERO))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.ask(self.patience, |table| table.check(keys))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.ask(self.patience, |table| table.delete_key(key))
    }

    fn num_keys(&self) -> Result<i64> {
        self.ask(self.patience, MemoryStore::num_keys)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(self.patience, |table| table.append(key, value))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait_for(timeout, |table| table.multi_get(keys, Duration::ZERO))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.ask(self.patience, |table| table.multi_set(pairs))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(self.patience, |table| table.queue_push(key, value))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait_for(timeout, |table| table.queue_pop(key, Duration::ZERO))
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.ask(self.patience, |table| table.queue_len(key))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.ask(self.patience, MemoryStore::list_keys)
    }
}

/// Returns the error of a rank that is gone.
fn lost_rank(rank: usize) -> Error {
    let (doing, reason) = ("an exchange".to_owned(), "its process is gone".to_owned());
    Error::PeerLost { doing, peer: Peer::unknown(rank), elapsed: Duration::ZERO, reason }
}

/// The panic that unwinds a dead rank's stack.
struct Died;

/// The function that a simulated process runs.
pub(in crate::communicator::life) type Program = fn(&Place, usize, &Plan, Duration) -> Result<Connected>;

/// Runs a scenario in the order of this seed until every rank has finished. Returns an error if that takes longer than
/// `bound`.
pub(super) fn play(scenario: &Scenario, seed: u64, bound: Duration, program: Program) -> std::result::Result<Report, Report> {
    let birth = Instant::now();
    let rank = |plan: &Plan| Rank {
        plan: plan.clone(),
        lives: !plan.is_dead,
        asleep_until: Duration::ZERO,
        ready: plan.begins,
        asked: 0,
        recovery_listener: None,
        history: Vec::new(),
        outcome: None,
    };
    let state = State {
        now: Duration::ZERO,
        random: Random(seed),
        ranks: scenario.ranks.iter().map(rank).collect(),
        cut: scenario.cut,
        links: BTreeMap::new(),
        exchanges: BTreeMap::new(),
        ended: BTreeSet::new(),
        left: BTreeSet::new(),
        log: Vec::new(),
    };
    let state = Arc::new(Mutex::new(state));
    let peers: Arc<[Peer]> = (0..scenario.ranks.len()).map(Peer::unknown).collect();
    let processes: Arc<[usize]> = (0..scenario.ranks.len()).collect();
    let patience = super::super::SERVICE.min(scenario.limit / 4);
    let place = |me| Place { me, processes: Arc::clone(&processes), peers: Arc::clone(&peers), patience, state: Arc::clone(&state) };
    let mut runs: Vec<_> = scenario
        .ranks
        .iter()
        .enumerate()
        .map(|(me, plan)| {
            let (place, plan, limit) = (place(me), plan.clone(), scenario.limit);
            (!plan.is_dead && !plan.is_absent).then(|| {
                generator::Gn::<()>::new_opt(STACK / 8, move || {
                    let run = catch_unwind(AssertUnwindSafe(|| program(&place, me, &plan, limit)));
                    let outcome = match run {
                        Ok(outcome) => outcome,
                        Err(died) if died.is::<Died>() => return,
                        Err(panic) => resume_unwind(panic),
                    };
                    place.log(format!("is through: {outcome:?}"));
                    let mut state = place.state();
                    let now = state.now;
                    state.ranks[me].outcome = Some((now, outcome));
                })
            })
        })
        .collect();
    let in_time = loop {
        let waiting: Vec<usize> = (0..runs.len()).filter(|me| runs[*me].as_ref().is_some_and(|run| !run.is_done())).collect();
        let Some(me) = draw(&mut lock(&state), &waiting) else { break true };
        if lock(&state).now > bound {
            end(&state, &mut runs);
            break false;
        }
        simulated::NOW.set(Some(birth + lock(&state).now));
        if let Some(run) = &mut runs[me] {
            run.resume();
        }
    };
    drop(runs);
    simulated::NOW.set(None);
    let mut state = lock(&state);
    let lives = state.ranks.iter().map(|rank| rank.lives).collect();
    let outcomes = state.ranks.iter_mut().map(|rank| rank.outcome.take().filter(|_| rank.lives)).collect();
    let asked = state.ranks.iter().map(|rank| !rank.plan.asks.is_empty()).collect();
    let histories = state.ranks.iter_mut().map(|rank| std::mem::take(&mut rank.history)).collect();
    let report = Report { outcomes, lives, asked, histories, log: std::mem::take(&mut state.log) };
    if in_time { Ok(report) } else { Err(report) }
}

/// Unwinds the stacks of all ranks.
fn end(state: &Mutex<State>, runs: &mut [Option<generator::Generator<'_, (), ()>>]) {
    lock(state).ranks.iter_mut().for_each(|rank| rank.lives = false);
    for run in runs.iter_mut().flatten().filter(|run| !run.is_done()) {
        run.resume();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("one thread")
}

/// Draws the rank that runs next from those that are ready. Advances the clock if none is ready.
fn draw(state: &mut State, waiting: &[usize]) -> Option<usize> {
    let first = waiting.iter().map(|rank| state.ranks[*rank].ready).min()?;
    state.now = state.now.max(first);
    let ready: Vec<usize> = waiting.iter().copied().filter(|rank| state.ranks[*rank].ready <= state.now).collect();
    Some(ready[state.random.below(ready.len())])
}
