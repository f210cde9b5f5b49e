//! The side of the host that serves the store: hears all hosts, and sends them what `membership` decides.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use collectives::store::{Store as _, TcpStore};

use super::membership::{Action, Membership, Rules};
use super::messages::{Arrival, Keys, decode, encode};
use crate::arrivals::{Pace, Place};
use crate::event::{Event, Settled};
use crate::hosts::{end_of, succeeded_of};
use crate::job::{Elastic, Job};
use crate::terminal::say;

/// The time between two looks at the hosts.
const ONE_LOOK: Duration = Duration::from_millis(100);
/// How long the last messages may take.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// The most arrivals that one look takes up.
const MOST_ARRIVALS: usize = 256;

/// The coordinator of an elastic job, until it is finished or dropped.
#[derive(Debug)]
pub(crate) struct Coordinator {
    finish: Sender<String>,
    finished: Receiver<()>,
}

impl Coordinator {
    /// Starts to hear the hosts, from a separate thread. `leader` names the arrival of this host.
    pub(crate) fn start(
        name: &str,
        place: &Place,
        job: &Job,
        elastic: &Elastic,
        leader: &str,
        events: &Sender<Event>,
    ) -> std::io::Result<Self> {
        let rules = Rules {
            least: elastic.least,
            most: elastic.most,
            last_call: elastic.last_call,
            lost_after: elastic.lost_after,
            join: job.patience,
            restarts: job.most_restarts,
        };
        let (finish, asked) = channel();
        let (done, finished) = channel();
        let (name, place, keys, events) = (name.to_owned(), place.clone(), Keys { job: job.run_name() }, events.clone());
        let (leader, patience) = (leader.to_owned(), job.patience);
        thread::Builder::new().name("coordinator".into()).spawn(move || {
            let began = Instant::now();
            let membership = Membership::new(rules, leader);
            let serve = |store| Hearing { name, keys, store, membership, began, patience, awaiting: None }.serve(&asked);
            if let Err(error) = place.connect(rules.lost_after).and_then(serve) {
                let _ = events.send(Event::Cut(error.to_string()));
            }
            let _ = done.send(());
        })?;
        Ok(Self { finish, finished })
    }

    /// Ends the job for the other hosts because this host leaves it, unless it has ended for them already.
    pub(crate) fn finish(&self, why: &str) {
        let _ = self.finish.send(why.to_owned());
        let _ = self.finished.recv_timeout(LAST_WORDS);
    }
}

/// The thread's state.
struct Hearing {
    name: String,
    keys: Keys,
    store: Arc<TcpStore>,
    membership: Membership,
    began: Instant,
    patience: Duration,
    /// When the wait for hosts began, and when lines about it are due.
    awaiting: Option<(Duration, Pace)>,
}

impl Hearing {
    fn serve(mut self, asked: &Receiver<String>) -> collectives::Result<()> {
        self.store.set(&self.keys.coordinator(), b"")?;
        loop {
            let asked = asked.recv_timeout(ONE_LOOK);
            self.look()?;
            let why = match asked {
                Err(RecvTimeoutError::Timeout) => continue,
                Ok(why) => why,
                Err(RecvTimeoutError::Disconnected) => "the launcher that serves the store has ended".to_owned(),
            };
            let actions = self.membership.close(&why);
            return self.perform(actions);
        }
    }

    /// Hears all hosts, and does what follows.
    fn look(&mut self) -> collectives::Result<()> {
        self.take_arrivals()?;
        let keys: Vec<String> = self.membership.ids().map(|id| self.keys.report(id)).collect();
        let ids: Vec<String> = self.membership.ids().map(str::to_owned).collect();
        let reports = if keys.is_empty() { vec![] } else { self.read(&keys)? };
        let now = self.began.elapsed();
        for (id, report) in ids.iter().zip(reports) {
            if let Some(report) = decode(&report) {
                self.membership.hear(now, id, report);
            }
        }
        let (end, succeeded) = if self.membership.is_running() { self.progress()? } else { (None, false) };
        let actions = self.membership.step(now, end.as_ref(), succeeded);
        self.perform(actions)?;
        self.say_awaited(now);
        Ok(())
    }

    /// Prints from time to time that the job waits for hosts.
    fn say_awaited(&mut self, now: Duration) {
        let Some(awaited) = self.membership.awaited() else { return self.awaiting = None };
        let (since, pace) = self.awaiting.get_or_insert_with(|| (now, Pace::new(self.patience)));
        if pace.is_due(now.saturating_sub(*since)) {
            say(&self.name, &awaited);
        }
    }

    fn take_arrivals(&mut self) -> collectives::Result<()> {
        let key = self.keys.arrivals();
        let count = usize::try_from(self.store.queue_len(&key)?).unwrap_or(0).min(MOST_ARRIVALS);
        for _ in 0..count {
            let bytes = match self.store.queue_pop(&key, Duration::ZERO) {
                Ok(bytes) => bytes,
                Err(error) if error.is_timeout() => return Ok(()),
                Err(error) => return Err(error),
            };
            // A host writes its report before it arrives. An arrival without a report is no host.
            match decode::<Arrival>(&bytes) {
                Some(arrival) if self.store.check(&[&self.keys.report(&arrival.id)])? => {
                    self.membership.arrive(self.began.elapsed(), arrival);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads several keys that exist.
    fn read(&self, keys: &[String]) -> collectives::Result<Vec<Vec<u8>>> {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.multi_get(&keys, Duration::from_secs(1))
    }

    /// Returns how the attempt has ended, if it has, and whether all ranks of a host have succeeded.
    fn progress(&self) -> collectives::Result<(Option<Settled>, bool)> {
        let (end, succeeded) = (end_of(self.membership.attempt()), succeeded_of(self.membership.attempt()));
        let has_succeeded = self.store.check(&[&succeeded])?;
        let end = if self.store.check(&[&end])? { self.read(&[end])?.first().map(|value| Settled::read(value)) } else { None };
        Ok((end, has_succeeded))
    }

    fn perform(&mut self, actions: Vec<Action>) -> collectives::Result<()> {
        for action in actions {
            match action {
                Action::Tell { id, number, message } => self.store.set(&self.keys.message(&id, number), &encode(&message))?,
                Action::Settle { attempt, change } => drop(self.store.compare_set(&end_of(attempt), b"", &encode(&change))?),
                Action::Say(text) => say(&self.name, &text),
            }
        }
        Ok(())
    }
}
