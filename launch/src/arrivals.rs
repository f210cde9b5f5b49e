//! Prints messages while a launcher waits for other hosts. The first host prints which hosts are missing, and the
//! others print why they cannot reach the first.

use std::fmt;
use std::net::ToSocketAddrs as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collectives::store::{Store, TcpStore};
use collectives::{Config, Error, Result, Secret};

use super::store::{Found, Store as JobStore};
use super::terminal::say;

/// How long the store may take to record a failure. A host that is not notified notices that its ranks lose peers.
pub(super) const TELLING: Duration = Duration::from_secs(10);
/// The shortest limit of one connection attempt.
const LEAST_LIMIT: Duration = Duration::from_millis(500);

/// How long nothing is printed, and the longest connection attempt; shorter if `patience` is short.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// The longest time between two lines about the same wait. Each interval is twice as long as the one before.
const LONGEST_SILENCE: Duration = Duration::from_secs(300);
/// How many missing hosts are named; the others are counted.
const NAMED: usize = 8;

/// Returns how long a connected store may take to answer: the ranks' silence timeout, which may be unlimited.
pub(super) fn answer() -> Duration {
    // The ranks refuse a variable that cannot be read.
    let borne = Config::silence_timeout_from_env().unwrap_or(Config::default().silence_timeout);
    if borne.is_zero() { Duration::MAX } else { borne }
}

/// The times at which lines are due.
#[derive(Debug)]
pub(super) struct Pace {
    next: Duration,
    silence: Duration,
}

impl Pace {
    /// Creates the schedule for hosts that may take `patience` to arrive.
    pub(super) fn new(patience: Duration) -> Self {
        let silence = SILENCE.min(patience / 4);
        Self { next: silence, silence }
    }

    /// Returns when the next line is due, counted from the beginning.
    pub(super) fn next(&self) -> Duration {
        self.next
    }

    /// Whether a line is due `elapsed` after the beginning. If so, schedules the next one.
    pub(super) fn is_due(&mut self, elapsed: Duration) -> bool {
        let is_due = elapsed >= self.next;
        if is_due {
            self.silence = (self.silence * 2).min(LONGEST_SILENCE);
            self.next = elapsed + self.silence;
        }
        is_due
    }
}

/// The hosts of a job as the first one sees them: each writes its number into the store.
#[derive(Debug)]
pub(super) struct Arrivals {
    nodes: usize,
    /// The address at which they are expected.
    place: String,
    pace: Pace,
    said: bool,
    complete: bool,
}

impl Arrivals {
    pub(super) fn new(nodes: usize, place: String, patience: Duration) -> Self {
        Self { nodes, place, pace: Pace::new(patience), said: false, complete: false }
    }

    /// Records in the store that this host's launcher has arrived.
    pub(super) fn announce(store: &dyn Store, node: usize) -> Result<()> {
        store.set(&key(node), b"")
    }

    /// Returns how long to wait until the next look: at most `most`, and not past the next line.
    pub(super) fn wait(&self, elapsed: Duration, most: Duration) -> Duration {
        if self.complete { most } else { self.pace.next().saturating_sub(elapsed).min(most) }
    }

    /// Returns the line to print `elapsed` after the beginning, if any: the missing hosts, or that all missing ones
    /// have arrived.
    pub(super) fn look(&mut self, store: &dyn Store, elapsed: Duration) -> Result<Option<String>> {
        if self.complete {
            return Ok(None);
        }
        if self.pace.is_due(elapsed) {
            let missing = self.missing(store)?;
            let was_said = std::mem::replace(&mut self.said, true);
            self.complete = missing.is_empty();
            return Ok(if self.complete { was_said.then(|| self.all()) } else { Some(self.line(&missing, elapsed)) });
        }
        // If no line was printed about them, none is needed when they arrive.
        let keys: Vec<String> = if self.said { (0..self.nodes).map(key).collect() } else { return Ok(None) };
        self.complete = store.check(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(self.complete.then(|| self.all()))
    }

    fn missing(&self, store: &dyn Store) -> Result<Vec<usize>> {
        let has_come = |node: usize| store.check(&[&key(node)]).map(|there| (!there).then_some(node));
        (0..self.nodes).map(has_come).filter_map(Result::transpose).collect()
    }

    fn all(&self) -> String {
        format!("all {} nodes have connected", self.nodes)
    }

    fn line(&self, missing: &[usize], elapsed: Duration) -> String {
        let mut names = missing.iter().take(NAMED).map(usize::to_string).collect::<Vec<_>>().join(", ");
        if missing.len() > NAMED {
            names += &format!(" and {} more", missing.len() - NAMED);
        }
        let (nodes, whose) = if missing.len() == 1 { ("node", "its launcher has") } else { ("nodes", "their launchers have") };
        let (count, place, seconds) = (self.nodes, &self.place, elapsed.as_secs_f64());
        format!("waiting for {nodes} {names} of {count} (numbered from 0): {whose} not connected to {place} in {seconds:.0} s")
    }
}

/// Returns the key under which a host's launcher records its arrival.
fn key(node: usize) -> String {
    format!("collrun/nodes/{node}")
}

/// The store of a job.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) secret: Option<Secret>,
}

impl Place {
    pub(super) fn connect(&self, timeout: Duration) -> Result<Arc<TcpStore>> {
        match &self.secret {
            Some(secret) => TcpStore::connect_with_secret(&self.address, self.port, timeout, secret),
            None => TcpStore::connect(&self.address, self.port, timeout),
        }
    }

    /// Connects within `patience`. `next` returns the limit of the next attempt, or ends the attempts with a value.
    /// Prints from time to time, after `name`, why there is no connection yet.
    pub(super) fn reach<E>(
        &self,
        name: &str,
        patience: Duration,
        next: impl FnMut() -> ControlFlow<E, Duration>,
    ) -> Result<ControlFlow<E, Arc<TcpStore>>> {
        let began = Instant::now();
        let say = |text: &str| say(name, text);
        let reached = retried(patience, say, || began.elapsed(), next, |limit| self.connect(limit.max(LEAST_LIMIT)))?;
        // The attempt's limit may have been short: connect again with the time that the store has to answer.
        Ok(match reached {
            ControlFlow::Continue(_) => ControlFlow::Continue(self.connect(answer())?),
            ControlFlow::Break(end) => ControlFlow::Break(end),
        })
    }

    /// Serves the store if no host serves it yet, else connects to the host that does.
    ///
    /// A host that reaches no server tries to serve again. The last server may just have ended. Or two hosts tried to
    /// listen on one port at the same moment, for which Linux may refuse both.
    pub(super) fn serve_or_reach(&self, name: &str, patience: Duration) -> Result<Found> {
        let mut longest = LEAST_LIMIT;
        let next = || match self.serve() {
            Some(served) => ControlFlow::Break(served),
            None => {
                longest = (longest * 2).min(SILENCE);
                ControlFlow::Continue(longest)
            }
        };
        match self.reach(name, patience, next)? {
            ControlFlow::Continue(store) => Ok(Found::Elsewhere(store)),
            ControlFlow::Break(served) => served.map(Found::Served),
        }
    }

    /// Serves the store here, or returns the error that prevents it. Returns `None` if, as far as is known, another
    /// host serves it.
    fn serve(&self) -> Option<Result<JobStore>> {
        // A name without an address may belong to a host that has yet to start.
        (self.address.as_str(), self.port).to_socket_addrs().ok()?;
        match JobStore::serve(&self.address, self.port, self.secret.as_ref()) {
            // The address is another host's, or another launcher on this host was first.
            Err(Error::Config { .. }) => None,
            ended => Some(ended),
        }
    }
}

/// Formats the address as launchers take it.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, port, .. } = self;
        if address.contains(':') { write!(f, "[{address}]:{port}") } else { write!(f, "{address}:{port}") }
    }
}

/// Calls `connect` with a limit for each attempt, and returns its result or the value that ended the attempts.
fn retried<T, E>(
    patience: Duration,
    say: impl Fn(&str),
    elapsed: impl Fn() -> Duration,
    mut next: impl FnMut() -> ControlFlow<E, Duration>,
    connect: impl Fn(Duration) -> Result<T>,
) -> Result<ControlFlow<E, T>> {
    let mut pace = Pace::new(patience);
    loop {
        let longest = match next() {
            ControlFlow::Continue(longest) => longest,
            ControlFlow::Break(end) => return Ok(ControlFlow::Break(end)),
        };
        let limit = pace.next().min(patience).saturating_sub(elapsed()).min(longest);
        let error: Error = match connect(limit) {
            Ok(connection) => return Ok(ControlFlow::Continue(connection)),
            Err(error) => error,
        };
        let now = elapsed();
        if !error.is_timeout() || now >= patience {
            return Err(error);
        }
        if pace.is_due(now) {
            say(&format!("waiting for node 0: {error}"));
        }
    }
}

impl JobStore {
    /// Serves the job's store like [`serve`](Self::serve), if no host serves the store yet. Otherwise connects to the
    /// server. Gives up after `patience`. If there is a delay, prints its reason to standard error: first after ten
    /// seconds, then at growing intervals. `name` precedes each message.
    ///
    /// # Errors
    ///
    /// The errors of [`TcpStore::connect`]. Also an error if this process cannot listen at the address. Exception: if
    /// the address belongs to another host or is in use, connects to the server instead.
    pub fn serve_or_reach(name: &str, address: &str, port: u16, secret: Option<&Secret>, patience: Duration) -> collectives::Result<Found> {
        Place { address: address.to_owned(), port, secret: secret.cloned() }.serve_or_reach(name, patience)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use collectives::store::MemoryStore;

    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn lines_come_ever_more_seldom() {
        let mut pace = Pace::new(seconds(1800));
        let due: Vec<u64> = (0..1000).filter(|second| pace.is_due(seconds(*second))).collect();
        assert_eq!(due, [10, 30, 70, 150, 310, 610, 910]);
        let mut hasty = Pace::new(seconds(8));
        assert_eq!((0..8).filter(|second| hasty.is_due(seconds(*second))).collect::<Vec<_>>(), [2, 6]);
    }

    #[test]
    fn who_is_missing_is_named_and_that_all_have_come_is_said_once() {
        let store = MemoryStore::new();
        let mut arrivals = Arrivals::new(3, "10.0.0.1:29500".to_owned(), seconds(1800));
        Arrivals::announce(&store, 0).unwrap();
        assert_eq!(arrivals.wait(seconds(9), seconds(5)), seconds(1));
        assert_eq!(arrivals.look(&store, seconds(9)).unwrap(), None);
        let said = arrivals.look(&store, seconds(10)).unwrap().unwrap();
        assert_eq!(said, "waiting for nodes 1, 2 of 3 (numbered from 0): their launchers have not connected to 10.0.0.1:29500 in 10 s");
        Arrivals::announce(&store, 2).unwrap();
        assert_eq!(arrivals.look(&store, seconds(29)).unwrap(), None);
        let said = arrivals.look(&store, seconds(30)).unwrap().unwrap();
        assert!(said.starts_with("waiting for node 1 of 3 (numbered from 0): its launcher has not connected"), "{said}");
        Arrivals::announce(&store, 1).unwrap();
        assert_eq!(arrivals.look(&store, seconds(31)).unwrap().unwrap(), "all 3 nodes have connected");
        assert_eq!((31..2000).find_map(|second| arrivals.look(&store, seconds(second)).unwrap()), None);
    }

    #[test]
    fn hosts_that_come_in_time_are_not_talked_of() {
        let store = MemoryStore::new();
        let mut arrivals = Arrivals::new(2, "a:1".to_owned(), seconds(1800));
        [0, 1].into_iter().try_for_each(|node| Arrivals::announce(&store, node)).unwrap();
        assert_eq!((0..2000).find_map(|second| arrivals.look(&store, seconds(second)).unwrap()), None);
    }

    #[test]
    fn many_that_are_missing_are_counted() {
        let arrivals = Arrivals::new(4096, "a:1".to_owned(), seconds(1800));
        let line = arrivals.line(&(1..4096).collect::<Vec<_>>(), seconds(70));
        assert!(line.starts_with("waiting for nodes 1, 2, 3, 4, 5, 6, 7, 8 and 4087 more of 4096 ") && line.ends_with("in 70 s"), "{line}");
    }

    #[test]
    fn what_keeps_a_host_from_the_first_one_is_said_until_patience_ends() {
        let (now, said) = (Cell::new(Duration::ZERO), RefCell::new(Vec::new()));
        let refused = |limit: Duration| -> Result<()> {
            assert!(limit <= SILENCE, "a caller that gives up is noticed in time");
            now.set(now.get() + limit);
            Err(Error::Timeout { doing: "connecting".to_owned(), elapsed: limit, missing: vec![], arrived: vec![], meanwhile: vec![] })
        };
        let say = |text: &str| said.borrow_mut().push((now.get().as_secs(), text.to_owned()));
        let go_on = || ControlFlow::<(), _>::Continue(SILENCE);
        let error = retried(seconds(100), say, || now.get(), go_on, refused).unwrap_err();
        assert!(error.is_timeout() && now.get() == seconds(100), "{error}");
        assert_eq!(said.borrow().iter().map(|(at, _)| *at).collect::<Vec<_>>(), [10, 30, 70]);
        assert!(said.borrow()[0].1.starts_with("waiting for node 0: "), "{said:?}");
        assert_eq!(retried(seconds(100), |_| {}, || now.get(), || ControlFlow::Break(7), refused).unwrap(), ControlFlow::Break(7));
        let lost = |_: Duration| -> Result<()> { Err(Error::Config { what: "a".to_owned(), reason: "b".to_owned() }) };
        assert!(retried(seconds(100), |_| panic!("nothing to wait for"), || Duration::ZERO, go_on, lost).is_err());
    }
}
