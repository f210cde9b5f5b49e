//! What the launchers of a job's hosts tell each other through its store: that an attempt has failed, and why, or that all ranks are done.

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

/// How long one wait for news takes; then it is asked again, or left.
const ONE_WAIT: Duration = Duration::from_millis(500);

/// Where the hosts of a job meet.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    /// The program's name, before what is said.
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) count: usize,
    /// This host's number.
    pub(super) node: usize,
    /// How long the store's host may take to come.
    pub(super) patience: Duration,
}

impl Hosts {
    /// Tells all hosts that a rank has failed in this attempt; the first failure of all is what counts.
    pub(super) fn fail(&self, attempt: u32, failure: &Failure) {
        // Who cannot be told finds out by what its ranks lose.
        let _ = self.place.connect(TELLING).and_then(|store| store.compare_set(&end(attempt), b"", &failure.to_json()));
    }

    /// Tells all hosts that this one's ranks have succeeded.
    pub(super) fn succeed(&self, attempt: u32) -> collectives::Result<()> {
        let store = self.place.connect(answer())?;
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

    /// Waits until an attempt is settled; `None` when nobody wants to know any more. Meanwhile the first host says who has not come, and the
    /// others why they do not reach it.
    fn settled(&self, attempt: u32, left: &AtomicBool) -> Option<Settled> {
        let began = Instant::now();
        let is_wanted = || !left.load(Ordering::Acquire);
        let next = || if is_wanted() { ControlFlow::Continue(SILENCE) } else { ControlFlow::Break(()) };
        let store = match self.place.reach(&self.name, self.patience, next) {
            Ok(ControlFlow::Continue(store)) => store,
            Ok(ControlFlow::Break(())) => return None,
            Err(error) => return Some(Settled::Lost(error.to_string())),
        };
        // Of later attempts all hosts are there.
        let mut arrivals = (self.node == 0 && attempt == 0).then(|| Arrivals::new(self.count, self.place.to_string(), self.patience));
        if let Err(error) = Arrivals::announce(&*store, self.node) {
            return Some(Settled::Lost(error.to_string()));
        }
        while is_wanted() {
            let one_wait = arrivals.as_ref().map_or(ONE_WAIT, |arrivals| arrivals.wait(began.elapsed(), ONE_WAIT));
            match store.get(&end(attempt), one_wait) {
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
