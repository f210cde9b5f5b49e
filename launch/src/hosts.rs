//! Exchanges the results of attempts between the launchers of a job's hosts, through its store: that an attempt has
//! failed, and why, or that all ranks have succeeded.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use collectives::store::Store as _;

use super::arrivals::{Arrivals, Place, SILENCE, TELLING, answer};
use super::event::{DONE, Event, Settled};
use super::failure::Failure;
use super::terminal::say;

/// How long one wait for the end of an attempt takes before the launcher checks whether it still has to wait.
const ONE_WAIT: Duration = Duration::from_millis(500);

/// The hosts of a job and the store at which they meet.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    /// The program's name, before each message.
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) count: usize,
    /// This host's number.
    pub(super) node: usize,
    /// How long the store's host may take to start.
    pub(super) patience: Duration,
    /// The launcher that serves the store, as messages name it.
    pub(super) server: String,
    /// Whether the first host names missing hosts.
    pub(super) names_missing: bool,
}

impl Hosts {
    /// Notifies all hosts that a rank has failed in this attempt. The first failure of the job counts.
    pub(super) fn fail(&self, attempt: u32, failure: &Failure) {
        // A host that is not notified notices that its ranks lose peers.
        let _ = self.place.connect(TELLING).and_then(|store| store.compare_set(&end_of(attempt), b"", &failure.to_json()));
    }

    /// Records that this host's ranks have succeeded. The last host to do so notifies all.
    pub(super) fn succeed(&self, attempt: u32) -> collectives::Result<()> {
        let store = self.place.connect(answer())?;
        if store.add(&succeeded_of(attempt), 1)? as usize == self.count {
            store.compare_set(&end_of(attempt), b"", DONE)?;
        }
        Ok(())
    }

    /// Sends the end of the attempt to `events` as soon as it is known, from a separate thread.
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

    /// Waits until an attempt is settled; returns `None` if `left` is set first. Meanwhile the first host prints which
    /// hosts are missing, and the others why they cannot reach it.
    fn settled(&self, attempt: u32, left: &AtomicBool) -> Option<Settled> {
        let began = Instant::now();
        let is_wanted = || !left.load(Ordering::Acquire);
        let next = || if is_wanted() { ControlFlow::Continue(SILENCE) } else { ControlFlow::Break(()) };
        let store = match self.place.reach(&self.name, self.patience, next) {
            Ok(ControlFlow::Continue(store)) => store,
            Ok(ControlFlow::Break(())) => return None,
            Err(error) => return Some(Settled::Lost(error.to_string())),
        };
        // In later attempts all hosts are present.
        let names_missing = self.names_missing && self.node == 0 && attempt == 0;
        let mut arrivals = names_missing.then(|| Arrivals::new(self.count, self.place.to_string(), self.patience));
        if let Err(error) = Arrivals::announce(&*store, self.node) {
            return Some(Settled::Lost(error.to_string()));
        }
        while is_wanted() {
            let one_wait = arrivals.as_ref().map_or(ONE_WAIT, |arrivals| arrivals.wait(began.elapsed(), ONE_WAIT));
            match store.get(&end_of(attempt), one_wait) {
                Ok(value) => return Some(Settled::read(&value)),
                Err(error) if error.is_timeout() => {}
                Err(error) => return Some(Settled::Lost(error.to_string())),
            }
            let text = arrivals.as_mut().map_or(Ok(None), |arrivals| arrivals.look(&*store, began.elapsed()));
            match text {
                Ok(text) => text.iter().for_each(|text| say(&self.name, text)),
                Err(error) => return Some(Settled::Lost(error.to_string())),
            }
        }
        None
    }
}

/// Returns the key of an attempt's end.
pub(super) fn end_of(attempt: u32) -> String {
    format!("collrun/{attempt}/end")
}

/// Returns the key of the number of hosts whose ranks have all succeeded in an attempt.
pub(super) fn succeeded_of(attempt: u32) -> String {
    format!("collrun/{attempt}/succeeded")
}

/// The watch of an attempt; ends when dropped.
#[derive(Debug, Default)]
pub(super) struct Watch {
    left: Arc<AtomicBool>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.left.store(true, Ordering::Release);
    }
}
