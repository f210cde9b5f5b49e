//! One attempt to let newcomers in, from the members' side. It determines which newcomers are called, which are placed,
//! and whether the new communicator counts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::protocol::{Members, Plan, connection_time};
use super::requests::{Placement, Requests};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::membership::{ATTEMPTS, CONFIRMED};
use crate::base::tuning::recovery::ANSWER;
use crate::base::tuning::shrink::GRACE;
use crate::communicator::life::bootstrap::call_off;
use crate::communicator::recovery::Probe;
use crate::error::{Error, Result};
use crate::observe::LIFE;
use crate::rendezvous::{PrefixStore, Store};

/// The result of a vote.
pub(super) enum Vote<C> {
    /// All ranks stay in the old communicator.
    Stay,
    /// All members have connected, so this communicator counts.
    Grown(C),
    /// This rank has connected. It does not know whether another rank has seen the votes of all.
    Unknown(C, Error),
    /// The remaining ranks have a communicator without newcomers, and try again.
    Again,
}

/// One attempt, and the newcomers that this rank has called in it.
pub(super) struct Attempt {
    deadline: Deadline,
    /// The prefix of the keys in rank 0's store.
    prefix: String,
    requests: Option<Requests>,
    called: Vec<Called>,
    /// The number of ranks that all ranks consider members, once they have agreed.
    pub(super) members: Option<usize>,
}

/// A newcomer that was called.
struct Called {
    number: u64,
    attempt: u64,
    listener: SocketAddr,
    is_placed: bool,
}

/// A newcomer that can be called.
pub(super) struct Candidate {
    pub(super) number: u64,
    listener: SocketAddr,
}

impl Attempt {
    pub(super) fn new(timeout: Duration, prefix: String) -> Self {
        Self { deadline: Deadline::after(timeout), prefix, requests: None, called: Vec::new(), members: None }
    }

    /// Lets the newcomers in that wait. This rank considers the first `members` ranks members.
    pub(super) fn run<C: Members>(&mut self, comm: &C, members: usize) -> Result<Vote<C>> {
        let candidates = candidates(comm).unwrap_or_else(|error| {
            // The others continue; the newcomers may ask another rank.
            event::warn!(rank = comm.rank(), %error, "this rank cannot read requests to join");
            Vec::new()
        });
        // If a rank was lost before all had met, some consider a rank a member that others consider a newcomer.
        let all = comm.exchange((members as u64) << 32 | candidates.len() as u64, comm.timeout())?;
        self.members = all.iter().map(|number| (number >> 32) as usize).min();
        if all.iter().all(|number| *number as u32 == 0) {
            return Ok(Vote::Stay);
        }
        // Without its store, a member could not publish that it continues.
        let own = comm.own_store().map(|store| self.call(Requests::new(store), candidates));
        // From here, another rank can give this one up and continue.
        let began = self.deadline.elapsed();
        let plan = match self.agree_on_plan(comm) {
            Ok(Some(plan)) => plan,
            Ok(None) => return Ok(Vote::Stay),
            Err(error) => {
                self.call_off(comm, &error);
                return Err(error);
            }
        };
        let limit = connection_time(comm.world_size() + plan.listeners.len());
        let limit = limit.min(self.deadline.remaining());
        let made = own.and_then(|()| self.connect(comm, &plan, &Deadline::after(limit)));
        self.vote(comm, made, began, 2 * limit)
    }

    /// Connects this rank with the other members and the newcomers.
    fn connect<C: Members>(&self, comm: &C, plan: &Plan, deadline: &Deadline) -> Result<C> {
        let store = self.store(comm, deadline.remaining())?;
        comm.connect(Arc::clone(&store), plan, deadline).inspect_err(|error| call_off(&*store, error))
    }

    /// Lets the ranks that already connect know that this one does not.
    fn call_off<C: Members>(&self, comm: &C, error: &Error) {
        if let Ok(store) = self.store(comm, ANSWER) {
            call_off(&*store, error);
        }
    }

    /// Returns the store over which the ranks connect.
    fn store<C: Members>(&self, comm: &C, patience: Duration) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(PrefixStore::new(self.prefix.clone(), comm.first_store(patience)?)))
    }

    /// Calls newcomers, and keeps those that confirm in time. The others are called again once they have confirmed.
    fn call(&mut self, requests: Requests, candidates: Vec<Candidate>) {
        let limit = Deadline::after(CONFIRMED.min(self.deadline.remaining() / 4));
        let call = || -> Result<Vec<Called>> {
            let mut called = Vec::new();
            for Candidate { number, listener } in candidates {
                called.push(Called { number, attempt: requests.call(number)?, listener, is_placed: false });
            }
            requests.wait_for_confirmations(called.iter().map(|called| (called.number, called.attempt)), &limit)?;
            let mut confirmed = Vec::new();
            for newcomer in called {
                if requests.is_confirmed(newcomer.number, newcomer.attempt)? {
                    confirmed.push(newcomer);
                } else {
                    requests.place(newcomer.number, newcomer.attempt, None)?;
                }
            }
            Ok(confirmed)
        };
        match call() {
            Ok(called) => self.called = called,
            Err(error) => event::warn!(%error, "newcomers could not be called"),
        }
        self.requests = Some(requests);
    }

    /// Exchanges the newcomers that have confirmed. Places this rank's newcomers. Returns `None` if no newcomer has
    /// confirmed.
    fn agree_on_plan<C: Members>(&mut self, comm: &C) -> Result<Option<Plan>> {
        let mine: String = self.called.iter().map(|called| format!("{}\n", called.listener)).collect();
        let (counts, listeners) = read_listeners(&comm.exchange_texts(&mine)?);
        let missing = || Error::unsupported("admit", "rank 0 has no port to which newcomers could connect; see Config::listen_address");
        let plan = Plan { address: comm.address(0).ok_or_else(missing)?, counts, listeners };
        self.place(comm, &plan)?;
        Ok((!plan.listeners.is_empty()).then_some(plan))
    }

    /// Gives this rank's newcomers their ranks.
    fn place<C: Members>(&mut self, comm: &C, plan: &Plan) -> Result<()> {
        let Some(requests) = &self.requests else { return Ok(()) };
        let admitting = comm.world_size();
        let first = admitting + plan.counts[..comm.rank()].iter().sum::<usize>();
        for (place, called) in self.called.iter_mut().enumerate() {
            let placement = Placement {
                rank: first + place,
                world_size: admitting + plan.listeners.len(),
                admitting,
                members: self.members.unwrap_or(admitting),
                address: plan.address,
                prefix: self.prefix.clone(),
            };
            requests.place(called.number, called.attempt, Some(&placement))?;
            called.is_placed = true;
        }
        Ok(())
    }

    /// Finds out whether every member has connected. Only then the new communicator counts.
    fn vote<C: Members>(&self, comm: &C, made: Result<C>, began: Duration, limit: Duration) -> Result<Vote<C>> {
        if let Err(error) = &made {
            event::warn!(rank = comm.rank(), %error, "newcomers could not be connected; they wait for the next admission");
        }
        let votes = comm.exchange(u64::from(made.is_ok()), limit.min(comm.timeout()));
        match (made, votes) {
            (Ok(grown), Ok(votes)) if votes.iter().all(|vote| *vote == 1) => {
                comm.publish_commit()?;
                if self.deadline.elapsed().saturating_sub(began) >= GRACE {
                    comm.look_for_others()?;
                }
                event::info!(target: LIFE, rank = comm.rank(), members = comm.world_size(), world_size = grown.world_size(), "admitted");
                Ok(Vote::Grown(grown))
            }
            (_, Ok(_)) => Ok(Vote::Stay),
            (Ok(grown), Err(error)) => Ok(Vote::Unknown(grown, error)),
            (Err(_), Err(error)) => Err(error),
        }
    }

    /// Lets the newcomers in that this rank has called, or lets them wait for the next attempt.
    pub(super) fn decide(&self, is_in: bool) {
        let Some(requests) = &self.requests else { return };
        for Called { number, attempt, is_placed, .. } in &self.called {
            // A newcomer that was not placed waits for its place first.
            let placed = if *is_placed { Ok(()) } else { requests.place(*number, *attempt, None) };
            if let Err(error) = placed.and_then(|()| requests.decide(*number, *attempt, is_in)) {
                event::warn!(%error, "a newcomer does not learn whether it was admitted");
            }
        }
    }
}

/// Returns the requests that this rank can consider, after it has refused unsuitable ones.
pub(super) fn candidates<C: Members>(comm: &C) -> Result<Vec<Candidate>> {
    if !comm.was_asked() {
        return Ok(Vec::new());
    }
    let (requests, settings) = (Requests::new(comm.own_store()?), comm.settings());
    let mut candidates = Vec::new();
    let open = requests.open_and_forget_decided()?;
    let listeners: Vec<SocketAddr> = open.iter().filter_map(|(_, _, request)| request.listener).collect();
    let mut probes = comm.probe_all(&listeners).into_iter();
    for (number, attempts, request) in open {
        let probe = request.listener.and_then(|_| probes.next());
        let listener = request.listener.filter(|_| probe != Some(Probe::Gone));
        if request.settings != settings {
            let reason = format!("the job has {settings}; and {} has {}", request.from, request.settings);
            requests.refuse(number, attempts + 1, &reason)?;
        } else if let Some(listener) = listener {
            if attempts > 0 && !requests.is_confirmed(number, attempts)? {
                // A stopped process still accepts connections. Looking for a host that is gone would take time in every call.
                if probe == Some(Probe::NoAnswer) {
                    let reason = format!("{} did not confirm, and the ranks do not reach it any more; join again", request.from);
                    requests.refuse(number, attempts + 1, &reason)?;
                }
                continue;
            }
            if attempts >= ATTEMPTS {
                let reason =
                    format!("the ranks could not connect with {} in {attempts} attempts; the ranks' logs give the reason", request.from);
                requests.refuse(number, attempts + 1, &reason)?;
            } else {
                candidates.push(Candidate { number, listener });
            }
        } else {
            requests.remove(number)?;
        }
    }
    Ok(candidates)
}

/// Reads the texts that ranks exchange: the recovery listeners of newcomers, a line each. Returns the number of each
/// rank's newcomers, and their listeners.
fn read_listeners(texts: &[Vec<u8>]) -> (Vec<usize>, Vec<SocketAddr>) {
    let (mut counts, mut listeners) = (Vec::new(), Vec::new());
    for text in texts {
        let text = String::from_utf8_lossy(text);
        let theirs: Vec<SocketAddr> = text.lines().map_while(|line| line.parse().ok()).collect();
        counts.push(theirs.len());
        listeners.extend(theirs);
    }
    (counts, listeners)
}
