//! Requests to join, and the answers: the keys at a member's recovery listener. Newcomers number their requests there.
//! A member calls a newcomer once for each *attempt* to admit it.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::base::deadline::Deadline;
use crate::base::tuning::membership::SLICE;
use crate::error::{Error, Result};
use crate::rendezvous::Store;

/// The number of requests so far.
const COUNT: &str = "membership/requests";
/// The size of a request that is not read. Answers quote requests.
const MOST_BYTES: usize = 16 << 10;
/// The most requests that are read at a time, from the oldest one that is open.
const MOST_AT_ONCE: u64 = 1024;
/// The value of a request that is decided.
const DECIDED: &[u8] = b"decided";

/// A request's number, how often its newcomer was called, and the request.
type Open = (u64, u64, Request);

/// The requests at one member's recovery listener.
pub(super) struct Requests {
    store: Arc<dyn Store>,
}

/// A newcomer's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// The settings that all ranks must share.
    pub(super) settings: String,
    /// The newcomer's recovery listener.
    pub(super) listener: Option<SocketAddr>,
    /// Its host and process.
    pub(super) from: String,
}

/// A member's answer to a request, for one attempt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The newcomer shall confirm that it is there.
    Confirm,
    /// The newcomer is not admitted, for this reason.
    Refused(String),
}

/// Where a newcomer connects.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// The number of ranks that admit. They have the first ranks.
    pub(super) admitting: usize,
    /// The number of these that all consider members.
    pub(super) members: usize,
    /// The recovery listener of rank 0.
    pub(super) address: SocketAddr,
    /// The prefix of the keys there.
    pub(super) prefix: String,
}

impl Requests {
    pub(super) fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Adds a request, and returns its number.
    pub(super) fn add(&self, request: &Request) -> Result<u64> {
        let number = self.store.add(COUNT, 1)?.unsigned_abs();
        self.store.set(&key(number, "request"), request.to_string().as_bytes())?;
        Ok(number)
    }

    /// Marks a request as decided or given up.
    pub(super) fn remove(&self, number: u64) -> Result<()> {
        self.store.set(&key(number, "request"), DECIDED)
    }

    /// Returns the requests that are still open, in the order of their numbers.
    pub(super) fn open(&self) -> Result<Vec<Open>> {
        self.scan().map(|(open, _)| open)
    }

    /// Does the same as [`open`](Self::open), and later reads only what is after the decided requests. Only one thread at a
    /// time may call it.
    pub(super) fn open_and_forget_decided(&self) -> Result<Vec<Open>> {
        let (open, newly_decided) = self.scan()?;
        self.store.add("membership/decided", newly_decided)?;
        Ok(open)
    }

    /// Returns the open requests, and by how much the number of the requests that are decided without a gap has grown.
    fn scan(&self) -> Result<(Vec<Open>, i64)> {
        let count = self.store.add(COUNT, 0)?.unsigned_abs();
        // All requests up to this number are decided.
        let decided = self.store.add("membership/decided", 0)?.unsigned_abs();
        // Anything that reaches the port may have counted requests that do not exist.
        let last = count.min(decided.saturating_add(MOST_AT_ONCE));
        let (mut open, mut first_open) = (Vec::new(), last + 1);
        for number in decided + 1..=last {
            let request = key(number, "request");
            if !self.store.check(&[&request])? {
                // A newcomer takes its number before it writes its request.
                first_open = first_open.min(number);
                continue;
            }
            let text = self.store.get(&request, SLICE)?;
            if text == DECIDED {
                continue;
            }
            let attempts = self.store.add(&key(number, "attempts"), 0)?.unsigned_abs();
            match Request::parse(&String::from_utf8_lossy(&text)) {
                Some(request) => {
                    first_open = first_open.min(number);
                    open.push((number, attempts, request));
                }
                None => self.refuse(number, attempts + 1, "its request cannot be read; use the same release of the crate for all ranks")?,
            }
        }
        // Another thread may have counted more of them meanwhile.
        Ok((open, (first_open - 1).saturating_sub(decided) as i64))
    }

    /// Calls a newcomer, and returns the number of the attempt.
    pub(super) fn call(&self, number: u64) -> Result<u64> {
        let attempt = self.store.add(&key(number, "attempts"), 1)?.unsigned_abs();
        self.store.set(&attempt_key(number, attempt, "answer"), Answer::Confirm.to_string().as_bytes())?;
        Ok(attempt)
    }

    /// Refuses a newcomer at its attempt, with a reason that its error contains.
    pub(super) fn refuse(&self, number: u64, attempt: u64, reason: &str) -> Result<()> {
        self.store.set(&attempt_key(number, attempt, "answer"), Answer::Refused(reason.to_owned()).to_string().as_bytes())?;
        self.remove(number)
    }

    /// Returns the answer to a request; `None` once the deadline has passed.
    pub(super) fn answer(&self, number: u64, attempt: u64, deadline: &Deadline) -> Result<Option<Answer>> {
        Ok(self.read(&attempt_key(number, attempt, "answer"), deadline)?.map(|text| Answer::parse(&text)))
    }

    pub(super) fn confirm(&self, number: u64, attempt: u64) -> Result<()> {
        self.store.set(&attempt_key(number, attempt, "confirmed"), b"yes")
    }

    /// Whether the newcomer has confirmed this attempt.
    pub(super) fn is_confirmed(&self, number: u64, attempt: u64) -> Result<bool> {
        self.store.check(&[&attempt_key(number, attempt, "confirmed")])
    }

    /// Waits until the newcomers of these attempts have confirmed, or until the deadline.
    pub(super) fn wait_for_confirmations(&self, called: impl Iterator<Item = (u64, u64)>, deadline: &Deadline) -> Result<()> {
        let keys: Vec<String> = called.map(|(number, attempt)| attempt_key(number, attempt, "confirmed")).collect();
        match self.store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), deadline.remaining()) {
            Err(error) if !error.is_timeout() => Err(error),
            _ => Ok(()),
        }
    }

    /// Places a newcomer, or lets it wait for the next attempt.
    pub(super) fn place(&self, number: u64, attempt: u64, placement: Option<&Placement>) -> Result<()> {
        let text = placement.map_or_else(|| "again".to_owned(), Placement::to_string);
        self.store.set(&attempt_key(number, attempt, "placement"), text.as_bytes())
    }

    /// Returns the placement of an attempt; `None` if there will be another attempt, or once the deadline has passed.
    pub(super) fn placement(&self, number: u64, attempt: u64, deadline: &Deadline) -> Result<Option<Placement>> {
        let text = self.read(&attempt_key(number, attempt, "placement"), deadline)?;
        Ok(text.and_then(|text| Placement::parse(&text)))
    }

    /// Lets a placed newcomer in, or lets it wait for the next attempt.
    pub(super) fn decide(&self, number: u64, attempt: u64, is_in: bool) -> Result<()> {
        self.store.set(&attempt_key(number, attempt, "decision"), if is_in { b"in" } else { b"again" })?;
        if is_in { self.remove(number) } else { Ok(()) }
    }

    /// Whether the newcomer of an attempt is in. `false` once the deadline has passed.
    pub(super) fn decision(&self, number: u64, attempt: u64, deadline: &Deadline) -> Result<bool> {
        Ok(self.read(&attempt_key(number, attempt, "decision"), deadline)?.as_deref() == Some("in"))
    }

    /// Waits for a key, and returns its text; `None` once the deadline has passed.
    fn read(&self, key: &str, deadline: &Deadline) -> Result<Option<String>> {
        loop {
            match self.store.get(key, SLICE.min(deadline.remaining())) {
                Ok(text) => return Ok(Some(String::from_utf8_lossy(&text).into_owned())),
                Err(error) if !error.is_timeout() => return Err(error),
                Err(_) if deadline.has_passed() => return Ok(None),
                Err(_) => {}
            }
        }
    }
}

fn key(number: u64, name: &str) -> String {
    format!("membership/{number}/{name}")
}

fn attempt_key(number: u64, attempt: u64, name: &str) -> String {
    format!("membership/{number}/{attempt}/{name}")
}

impl Request {
    /// Parses the written form; `None` for anything else.
    fn parse(text: &str) -> Option<Self> {
        if text.len() > MOST_BYTES {
            return None;
        }
        let mut lines = text.split('\n');
        let (settings, listener, from) = (lines.next()?, lines.next()?, lines.next()?);
        let listener = if listener.is_empty() { None } else { Some(listener.parse().ok()?) };
        Some(Self { settings: settings.to_owned(), listener, from: from.to_owned() })
    }
}

/// One line for each field.
impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let listener = self.listener.map_or_else(String::new, |listener| listener.to_string());
        write!(f, "{}\n{listener}\n{}", self.settings, self.from)
    }
}

impl Answer {
    fn parse(text: &str) -> Self {
        match text.strip_prefix("refused ") {
            Some(reason) => Self::Refused(reason.to_owned()),
            None => Self::Confirm,
        }
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Confirm => f.write_str("confirm"),
            Self::Refused(reason) => write!(f, "refused {reason}"),
        }
    }
}

impl Placement {
    /// Parses the written form; `None` for anything else.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let mut number = || words.next()?.parse().ok();
        let (rank, world_size, admitting, members) = (number()?, number()?, number()?, number()?);
        Some(Self { rank, world_size, admitting, members, address: words.next()?.parse().ok()?, prefix: words.next()?.to_owned() })
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, world_size, admitting, members, address, prefix } = self;
        write!(f, "{rank} {world_size} {admitting} {members} {address} {prefix}")
    }
}

/// Returns the error of a newcomer that the job refuses.
pub(super) fn refused(reason: &str) -> Error {
    Error::Conflict { reason: format!("the job refuses this process: {reason}") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rendezvous::MemoryStore;

    fn request(from: &str) -> Request {
        Request {
            settings: "protocol version 1, transport auto".to_owned(),
            listener: Some("[::1]:80".parse().unwrap()),
            from: from.to_owned(),
        }
    }

    #[test]
    fn requests_that_were_only_counted_end_no_scan_late() {
        let requests = Requests::new(Arc::new(MemoryStore::new()));
        requests.add(&request("a")).unwrap();
        requests.store.add(COUNT, 1 << 60).unwrap();
        assert_eq!(requests.open_and_forget_decided().unwrap().len(), 1);
    }

    #[test]
    fn requests_stay_open_until_they_are_decided() {
        let requests = Requests::new(Arc::new(MemoryStore::new()));
        assert_eq!(requests.open().unwrap(), []);
        let numbers = ["a", "b", "c"].map(|from| requests.add(&request(from)).unwrap());
        assert_eq!(numbers, [1, 2, 3]);
        let open =
            |requests: &Requests| requests.open().unwrap().into_iter().map(|(number, attempts, _)| (number, attempts)).collect::<Vec<_>>();
        assert_eq!(open(&requests), [(1, 0), (2, 0), (3, 0)]);
        let attempt = requests.call(1).unwrap();
        requests.decide(1, attempt, true).unwrap();
        requests.refuse(3, 1, "no").unwrap();
        assert_eq!(requests.call(2).unwrap(), 1);
        assert_eq!(open(&requests), [(2, 1)]);
        requests.remove(2).unwrap();
        assert_eq!(open(&requests), []);
        assert_eq!(requests.add(&request("d")).unwrap(), 4);
        assert_eq!(requests.open().unwrap(), [(4, 0, request("d"))]);
    }

    #[test]
    fn a_request_that_is_written_late_is_still_found() {
        let store = Arc::new(MemoryStore::new());
        let requests = Requests::new(store.clone());
        // The number is taken, and the request is not there yet. A later one is decided before.
        store.add(COUNT, 1).unwrap();
        let second = requests.add(&request("second")).unwrap();
        assert_eq!(requests.open().unwrap(), [(2, 0, request("second"))]);
        requests.remove(second).unwrap();
        assert_eq!(requests.open().unwrap(), []);
        store.set(&key(1, "request"), request("late").to_string().as_bytes()).unwrap();
        assert_eq!(requests.open().unwrap(), [(1, 0, request("late"))]);
    }

    #[test]
    fn each_answer_reaches_its_attempt() {
        let requests = Requests::new(Arc::new(MemoryStore::new()));
        let (soon, long) = (Deadline::after(Duration::ZERO), Deadline::after(Duration::from_secs(60)));
        let number = requests.add(&request("a")).unwrap();
        assert_eq!(requests.answer(number, 1, &soon).unwrap(), None);
        assert_eq!(requests.call(number).unwrap(), 1);
        assert_eq!(requests.answer(number, 1, &long).unwrap(), Some(Answer::Confirm));
        assert!(!requests.is_confirmed(number, 1).unwrap());
        requests.confirm(number, 1).unwrap();
        requests.wait_for_confirmations([(number, 1)].into_iter(), &long).unwrap();
        assert!(requests.is_confirmed(number, 1).unwrap());
        let placement = Placement {
            rank: 4,
            world_size: 5,
            admitting: 4,
            members: 3,
            address: "10.0.0.1:5".parse().unwrap(),
            prefix: "p/1".to_owned(),
        };
        requests.place(number, 1, Some(&placement)).unwrap();
        assert_eq!(requests.placement(number, 1, &long).unwrap(), Some(placement));
        requests.decide(number, 1, false).unwrap();
        assert!(!requests.decision(number, 1, &long).unwrap() && requests.open().unwrap().len() == 1);
        requests.refuse(number, 2, "the settings differ").unwrap();
        assert_eq!(requests.answer(number, 2, &long).unwrap(), Some(Answer::Refused("the settings differ".to_owned())));
    }

    #[test]
    fn a_request_that_cannot_be_read_is_refused() {
        let store = Arc::new(MemoryStore::new());
        let requests = Requests::new(store.clone());
        for nonsense in ["", "one line", "settings\nno address\nhost"] {
            let number = store.add(COUNT, 1).unwrap().unsigned_abs();
            store.set(&key(number, "request"), format!("{nonsense} ").as_bytes()).unwrap();
            assert_eq!(requests.open().unwrap(), [], "{nonsense}");
            let answer = requests.answer(number, 1, &Deadline::after(Duration::ZERO)).unwrap();
            assert!(matches!(answer, Some(Answer::Refused(_))), "{nonsense}: {answer:?}");
        }
        for nonsense in ["", "again", "1 2", "1 2 3 x 10.0.0.1:5 p", "1 2 3 4 10.0.0.1 p", "1 2 3 4 10.0.0.1:5", "1 2 3 10.0.0.1:5 p"] {
            assert_eq!(Placement::parse(nonsense), None, "{nonsense}");
        }
    }
}
