//! A host's side: asks for a place, reports that the host lives, and receives messages.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use collectives::Error;
use collectives::store::{Store as _, TcpStore};

use super::messages::{Arrival, Keys, Message, Report, decode, encode};
use crate::arrivals::{Pace, Place, SILENCE};
use crate::child::host_name;
use crate::event::Event;
use crate::failure::nanoseconds;
use crate::job::{Elastic, Job};
use crate::terminal::say;

/// How long one wait for a message takes. A report precedes each.
const ONE_WAIT: Duration = Duration::from_millis(250);

/// What the thread and the supervisor of the ranks share.
#[derive(Debug, Default)]
struct Shared {
    /// The messages that have come, and in the end why no more can come.
    messages: Mutex<VecDeque<Result<Message, String>>>,
    /// Whether ranks run, or a message waits for the supervisor.
    is_busy: AtomicBool,
    /// Whether the host that serves the store decides for this job.
    has_joined: AtomicBool,
    /// Why the host leaves the job.
    leaves: Mutex<Option<String>>,
    ended: AtomicBool,
}

/// A host of an elastic job, until it is dropped.
#[derive(Debug)]
pub(crate) struct Member {
    id: String,
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Member {
    /// Asks for a place in the job, from a separate thread. Messages arrive as [`Event::Message`].
    pub(crate) fn start(name: &str, place: &Place, job: &Job, elastic: &Elastic, events: &Sender<Event>) -> std::io::Result<Self> {
        let (id, shared) = (new_id(), Arc::new(Shared::default()));
        let mut link = Link {
            name: name.to_owned(),
            place: place.clone(),
            keys: Keys { job: job.run_name() },
            ranks: job.local_world_size,
            patience: job.patience,
            lost_after: elastic.lost_after,
            shared: Arc::clone(&shared),
            id: id.clone(),
            given: 0,
            beat: 0,
            began: Instant::now(),
            pace: Pace::new(job.patience),
        };
        let events = events.clone();
        let thread = thread::Builder::new().name("member".into()).spawn(move || {
            if let Err(error) = link.serve(&events) {
                let words = link.words(&error);
                lock(&link.shared.messages).push_back(Err(words.clone()));
                let _ = events.send(Event::Cut(words));
            }
        })?;
        Ok(Self { id, shared, thread: Some(thread) })
    }

    /// Returns the name of this host's first arrival.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the next message, if one has come, or why no message can come any more.
    pub(crate) fn next(&self) -> Option<Result<Message, String>> {
        lock(&self.shared.messages).pop_front()
    }

    /// Whether this host has reached the job.
    pub(crate) fn has_joined(&self) -> bool {
        self.shared.has_joined.load(Ordering::Acquire)
    }

    /// Reports that the ranks of this host have ended.
    pub(crate) fn is_free(&self) {
        self.shared.is_busy.store(false, Ordering::Release);
    }

    /// Reports that this host leaves the job.
    pub(crate) fn leave(&self, why: &str) {
        *lock(&self.shared.leaves) = Some(why.to_owned());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        let leaves = lock(&self.shared.leaves).is_some();
        // The thread sends a last report. It ends at once if the store answers, and is not waited for otherwise.
        let until = Instant::now() + ONE_WAIT * 4;
        while leaves && self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::park_timeout(ONE_WAIT / 10);
        }
    }
}

/// The thread's state.
struct Link {
    name: String,
    place: Place,
    keys: Keys,
    ranks: usize,
    patience: Duration,
    lost_after: Duration,
    shared: Arc<Shared>,
    id: String,
    /// How many messages have come.
    given: u64,
    beat: u64,
    began: Instant,
    pace: Pace,
}

impl Link {
    /// Serves until the member is dropped, or the store does not answer.
    fn serve(&mut self, events: &Sender<Event>) -> collectives::Result<()> {
        let Some(store) = self.reach()? else { return Ok(()) };
        self.check_job(&store)?;
        self.arrive(&store)?;
        self.shared.has_joined.store(true, Ordering::Release);
        loop {
            let has_ended = self.shared.ended.load(Ordering::Acquire);
            self.report(&store)?;
            if has_ended {
                return Ok(());
            }
            match store.get(&self.keys.message(&self.id, self.given), ONE_WAIT) {
                Ok(bytes) => self.take(&store, &bytes, events)?,
                Err(error) if error.is_timeout() => self.say_waiting(),
                Err(error) => return Err(error),
            }
        }
    }

    /// Describes why the store is lost.
    fn words(&self, error: &collectives::Error) -> String {
        match error.is_timeout() && self.shared.has_joined.load(Ordering::Acquire) {
            true => format!("its collrun has not answered at {} for {} s", self.place, self.lost_after.as_secs_f64()),
            false => error.to_string(),
        }
    }

    /// Connects to the store; returns `None` if the member is dropped meanwhile. The connection waits for answers as long
    /// as a host may be silent.
    fn reach(&self) -> collectives::Result<Option<Arc<TcpStore>>> {
        let is_wanted = || !self.shared.ended.load(Ordering::Acquire);
        let next = || if is_wanted() { ControlFlow::Continue(SILENCE) } else { ControlFlow::Break(()) };
        match self.place.reach(&self.name, self.patience, next)? {
            ControlFlow::Continue(_) => self.place.connect(self.lost_after).map(Some),
            ControlFlow::Break(()) => Ok(None),
        }
    }

    /// Checks that the store serves this job. Otherwise this host would wait for a message that no host sends.
    fn check_job(&self, store: &TcpStore) -> collectives::Result<()> {
        store.wait(&[&self.keys.coordinator()], self.lost_after).map_err(|error| match error {
            Error::Timeout { .. } => Error::Config {
                what: format!("--rdzv-id {}", self.keys.job),
                reason: format!(
                    "the store at {} serves another job, or a job with a fixed number of hosts; give the same --rdzv-id and --nnodes on all \
                     hosts, or another port",
                    self.place
                ),
            },
            other => other,
        })
    }

    fn arrive(&mut self, store: &TcpStore) -> collectives::Result<()> {
        self.report(store)?;
        let arrival = Arrival { id: self.id.clone(), name: host_name(), ranks: self.ranks };
        store.queue_push(&self.keys.arrivals(), &encode(&arrival))
    }

    fn report(&mut self, store: &TcpStore) -> collectives::Result<()> {
        self.beat += 1;
        let is_busy = self.shared.is_busy.load(Ordering::Acquire);
        let leaves = lock(&self.shared.leaves).clone();
        let report = Report { beat: self.beat, ready: self.given - u64::from(is_busy), leaves };
        store.set(&self.keys.report(&self.id), &encode(&report))
    }

    fn take(&mut self, store: &TcpStore, bytes: &[u8], events: &Sender<Event>) -> collectives::Result<()> {
        self.given += 1;
        let invalid = || Message::Over { code: 1, why: Some("the host that serves the store sent an invalid message".to_owned()) };
        match decode(bytes).unwrap_or_else(invalid) {
            Message::LeftOut(why) => self.come_back(store, &why),
            message => {
                self.shared.is_busy.store(true, Ordering::Release);
                lock(&self.shared.messages).push_back(Ok(message));
                let _ = events.send(Event::Message);
                Ok(())
            }
        }
    }

    /// Asks for a place again, after this host was given up. Its ranks end first: the attempt that they belong to is over.
    fn come_back(&mut self, store: &TcpStore, why: &str) -> collectives::Result<()> {
        if lock(&self.shared.leaves).is_some() {
            return Ok(());
        }
        say(&self.name, &format!("the job goes on without this host ({why}); asking for a place again"));
        let is_wanted = || !self.shared.ended.load(Ordering::Acquire);
        while is_wanted() && self.shared.is_busy.load(Ordering::Acquire) {
            thread::park_timeout(ONE_WAIT);
        }
        (self.id, self.given, self.began, self.pace) = (new_id(), 0, Instant::now(), Pace::new(self.patience));
        self.arrive(store)
    }

    /// Prints from time to time that this host waits for a place.
    fn say_waiting(&mut self) {
        if self.shared.is_busy.load(Ordering::Acquire) {
            (self.began, self.pace) = (Instant::now(), Pace::new(self.patience));
        }
        let waited = self.began.elapsed();
        if self.pace.is_due(waited) {
            say(&self.name, &format!("this host has waited {:.0} s for a place in the job at {}", waited.as_secs_f64(), self.place));
        }
    }
}

/// Returns a name that no other arrival has.
fn new_id() -> String {
    format!("{}-{}-{}", host_name(), std::process::id(), nanoseconds(SystemTime::now()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are replaced whole, so a panic leaves them valid.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
