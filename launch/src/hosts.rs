//! What the launchers of a job's hosts tell each other through its store: that an attempt has failed, and why, or that all ranks are done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use collectives::Secret;
use collectives::store::{Store as _, TcpStore};

use super::failure::Failure;
use super::supervisor::Event;

/// How long one wait for news takes; then it is asked again, or left.
const ONE_WAIT: Duration = Duration::from_millis(500);
/// How long the store may take to answer once it has been reached.
const ANSWER: Duration = Duration::from_secs(10);
/// What stands where all ranks of all hosts are done.
const DONE: &[u8] = b"done";

/// How an attempt ended for the whole job.
#[derive(Debug)]
pub(super) enum Settled {
    /// All ranks of all hosts succeeded.
    Done,
    /// A rank of some host failed first.
    Failed(Box<Failure>),
    /// The store is gone, and with it the launcher of its host.
    Lost(String),
}

/// Where the hosts of a job meet.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) secret: Option<Secret>,
    pub(super) count: usize,
    /// How long the store's host may take to come.
    pub(super) patience: Duration,
}

impl Hosts {
    fn connect(&self, timeout: Duration) -> collectives::Result<Arc<TcpStore>> {
        match &self.secret {
            Some(secret) => TcpStore::connect_with_secret(&self.address, self.port, timeout, secret),
            None => TcpStore::connect(&self.address, self.port, timeout),
        }
    }

    /// Tells all hosts that a rank has failed in this attempt; the first failure of all is what counts.
    pub(super) fn fail(&self, attempt: u32, failure: &Failure) {
        // Who cannot be told finds out by what its ranks lose.
        let _ = self.connect(ANSWER).and_then(|store| store.compare_set(&end(attempt), b"", &failure.to_json()));
    }

    /// Tells all hosts that this one's ranks have succeeded.
    pub(super) fn succeed(&self, attempt: u32) -> collectives::Result<()> {
        let store = self.connect(ANSWER)?;
        if store.add(&format!("collrun/{attempt}/succeeded"), 1)? as usize == self.count {
            store.compare_set(&end(attempt), b"", DONE)?;
        }
        Ok(())
    }

    /// Sends how the attempt ends to `events`, from a thread of its own, as soon as it is known.
    pub(super) fn watch(&self, attempt: u32, events: &Sender<Event>) -> std::io::Result<Watch> {
        let (hosts, events, watch) = (self.clone(), events.clone(), Watch::default());
        let left = Arc::clone(&watch.left);
        thread::Builder::new().name("hosts".into()).spawn(move || {
            if let Some(settled) = hosts.settled(attempt, &left) {
                let _ = events.send(Event::Settled(attempt, settled));
            }
        })?;
        Ok(watch)
    }

    /// Waits until an attempt is settled; `None` when nobody wants to know any more.
    fn settled(&self, attempt: u32, left: &AtomicBool) -> Option<Settled> {
        let began = Instant::now();
        let mut store = None;
        while !left.load(Ordering::Acquire) {
            let connection = match &store {
                Some(connection) => connection,
                None => match self.connect(ONE_WAIT) {
                    Ok(connection) => store.insert(connection),
                    Err(error) if error.is_timeout() && began.elapsed() < self.patience => continue,
                    Err(error) => return Some(Settled::Lost(error.to_string())),
                },
            };
            match connection.get(&end(attempt), ONE_WAIT) {
                Ok(value) if value == DONE => return Some(Settled::Done),
                Ok(value) => {
                    let failure = serde_json::from_slice(&value).map(Settled::Failed);
                    return Some(failure.unwrap_or_else(|error| Settled::Lost(format!("what another host said is no failure: {error}"))));
                }
                Err(error) if error.is_timeout() => {}
                Err(error) => return Some(Settled::Lost(error.to_string())),
            }
        }
        None
    }
}

/// Where it is written how an attempt ended.
fn end(attempt: u32) -> String {
    format!("collrun/{attempt}/end")
}

/// A watch of an attempt, which ends with it.
#[derive(Debug, Default)]
pub(super) struct Watch {
    left: Arc<AtomicBool>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.left.store(true, Ordering::Release);
    }
}
