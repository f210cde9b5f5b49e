//! Watches the other ranks while a device waits for them. NCCL notices a dead peer only if it communicates with this
//! peer over a network. On one host, NCCL waits forever.
//!
//! A rank looks up the processes of its own host in `/proc`. If a process is missing there, the rank probes the
//! recovery listener of that process to find out whether it is alive (see `recovery`). Ranks of other hosts are not
//! probed, because each probe occupies a place in the queue of a recovery listener, and a job waits often. NCCL watches
//! these ranks.

use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::setup::NO_START_TAG;
use crate::base::deadline::Deadline;
use crate::base::tuning::liveness::{ANSWERS, GRACE, LAST_LOOK, PATIENCE, PAUSE, SEARCH};
use crate::communicator::Communicator;
use crate::communicator::progress::ProgressEngine;
use crate::communicator::recovery::{Probe, RecoveryListeners};
use crate::device::LivenessProbe;
use crate::error::{Error, Peer, Result};
use crate::host::abort_reason::AbortReason;
use crate::host::health::Health;

/// How another rank is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Observation {
    /// This rank itself.
    Own,
    /// Another rank, which this rank watches by looking up that rank's process. `pid` is the id of the process. `since`
    /// is the start time of the process, in the kernel's ticks.
    Process { pid: u32, since: u64 },
    /// A rank with a process that this rank cannot look up.
    Unseen,
}

/// The state that is kept between two looks.
#[derive(Debug)]
struct Looks {
    observations: Vec<Observation>,
    /// For each rank: how often its recovery listener has answered although its process is gone, and when to probe
    /// again.
    answers: Vec<(u32, Instant)>,
    /// The time of the last look.
    last: Instant,
    /// The rank that was found to be gone, and when.
    gone: Option<(AbortReason, Instant)>,
}

/// One communicator's liveness probe.
#[derive(Debug)]
pub(super) struct PeerLiveness {
    rank: usize,
    peers: Arc<[Peer]>,
    health: Arc<Health>,
    /// Weak, so that the listeners close with the communicator: a recovery listener that this reference kept open would
    /// show the rank as alive.
    listeners: Weak<RecoveryListeners>,
    places: Arc<[usize]>,
    /// Receives the peers' notifications that the communicator has ended; while a thread waits for a device, no other
    /// thread may be receiving.
    progress: Weak<ProgressEngine>,
    looks: Mutex<Looks>,
}

impl Communicator {
    /// Returns the liveness probe of the device backend. All ranks are alive at this point.
    pub(super) fn liveness_probe(&self) -> Arc<dyn LivenessProbe> {
        let shared = &self.core.shared;
        let me = &shared.peers[shared.rank];
        // A process number from another namespace can be that of any process here.
        let same_numbers = self.with_backend(|backend| backend.same_numbers().to_vec()).unwrap_or_default();
        let observation = |peer: &Peer| match peer {
            peer if peer.rank == me.rank => Observation::Own,
            peer if peer.pid != me.pid && same_numbers.get(peer.rank) == Some(&true) => match state_of(peer.pid) {
                Some((_, since)) => Observation::Process { pid: peer.pid, since },
                None => Observation::Unseen,
            },
            _ => Observation::Unseen,
        };
        let answers = vec![(0, Instant::now()); shared.peers.len()];
        let looks = Looks { observations: shared.peers.iter().map(observation).collect(), answers, last: Instant::now(), gone: None };
        Arc::new(PeerLiveness {
            rank: shared.rank,
            peers: Arc::clone(&shared.peers),
            health: Arc::clone(&shared.health),
            listeners: Arc::downgrade(&shared.recovery.listeners),
            places: Arc::clone(&shared.recovery.places),
            progress: Arc::downgrade(&shared.progress),
            looks: Mutex::new(looks),
        })
    }
}

/// Returns the state of a process as one letter, and its start time; `None` if no process has this number.
fn state_of(pid: u32) -> Option<(char, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name before it may contain anything.
    let mut words = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = words.next()?.chars().next()?;
    // The 22nd field of all; the state is the third.
    Some((state, words.nth(18)?.parse().ok()?))
}

impl Observation {
    /// Whether the process is gone, or dead and not yet waited for; `false` if that is not known.
    fn has_vanished(self) -> bool {
        let Self::Process { pid, since } = self else { return false };
        state_of(pid).is_none_or(|(state, began)| began != since || matches!(state, 'Z' | 'X'))
    }

    fn is_stopped(self) -> bool {
        let Self::Process { pid, since } = self else { return false };
        state_of(pid).is_some_and(|(state, began)| began == since && matches!(state, 'T' | 't'))
    }
}

impl PeerLiveness {
    /// Returns the reason why the host backend has ended, if that also ends the device backend.
    fn told(&self) -> Option<AbortReason> {
        let ends = |abort_reason: &&AbortReason| {
            matches!(
                abort_reason,
                AbortReason::Lost { .. }
                    | AbortReason::Silent { .. }
                    | AbortReason::Left { .. }
                    | AbortReason::Aborted { .. }
                    | AbortReason::Failed { .. }
            )
        };
        self.health.abort_reason().filter(ends).copied()
    }

    /// Makes the background thread read the peers' notifications, for a later look. Without that thread no
    /// notification of a peer's end would be received.
    fn listen(&self) -> Result<()> {
        self.progress.upgrade().map_or(Ok(()), |progress| progress.wake_background())
    }

    /// Returns a rank that has reported that it cannot start. In this case no rank gets a device backend, and there is
    /// nothing else to wait for.
    fn failed_to_start(&self) -> Option<usize> {
        self.progress.upgrade().and_then(|progress| progress.has_arrived(NO_START_TAG))
    }

    fn probe(&self, rank: usize) -> Probe {
        self.listeners.upgrade().map_or(Probe::NoAnswer, |listeners| listeners.probe(self.places[rank]))
    }

    /// Returns the reason that the first rank that is gone counts as lost.
    fn missing(&self, looks: &mut Looks) -> Option<AbortReason> {
        for (rank, (observation, (answers, again))) in looks.observations.iter_mut().zip(&mut looks.answers).enumerate() {
            if !observation.has_vanished() || Instant::now() < *again {
                continue;
            }
            match self.probe(rank) {
                Probe::Gone => return Some(AbortReason::Lost { rank: rank as u32, by: self.rank as u32 }),
                Probe::Alive => {
                    *answers += 1;
                    *again = Instant::now() + PAUSE * 2_u32.pow(*answers);
                    // The number belongs to another process: the peer is in another namespace.
                    if *answers >= ANSWERS {
                        *observation = Observation::Unseen;
                    }
                }
                // Unknown now; the next look may find out.
                Probe::NoAnswer => {}
            }
        }
        None
    }
}

impl LivenessProbe for PeerLiveness {
    fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        if waited < PATIENCE {
            return None;
        }
        let mut looks = match self.looks.try_lock() {
            Ok(looks) => looks,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if looks.last.elapsed() < PAUSE {
            return None;
        }
        if let Err(error) = self.listen() {
            return Some(error);
        }
        if let Some(rank) = self.failed_to_start() {
            return Some(Error::Aborted { doing: doing(), by: self.peers[rank].clone() });
        }
        let abort_reason = self.told().or_else(|| self.missing(&mut looks));
        looks.last = Instant::now();
        let since = match (looks.gone, abort_reason) {
            (_, None) => None,
            (Some((known, since)), Some(abort_reason)) if known == abort_reason => Some((abort_reason, since)),
            (_, Some(abort_reason)) => Some((abort_reason, looks.last)),
        };
        looks.gone = since;
        let (abort_reason, _) = since.filter(|(_, since)| since.elapsed() >= GRACE)?;
        let mut error = abort_reason.to_error(&doing(), &Deadline::after(waited), self.rank, &self.peers);
        if let Error::PeerLost { elapsed, .. } = &mut error {
            *elapsed = waited;
        }
        Some(error)
    }

    fn culprit(&self, doing: &dyn Fn() -> String) -> Option<Error> {
        let observations = self.looks.lock().unwrap_or_else(PoisonError::into_inner).observations.clone();
        // A probe of a host that is cut off, or of a busy rank, takes a while, and the streams are held meanwhile.
        let gone_of = |search: &Deadline, may_be: &dyn Fn(Observation) -> bool| {
            let asked = |rank: &usize| *rank != self.rank && may_be(observations[*rank]) && !search.has_passed();
            let gone = (0..self.peers.len()).filter(asked).find(|rank| self.probe(*rank) == Probe::Gone);
            self.told().or(gone.map(|rank| AbortReason::Lost { rank: rank as u32, by: self.rank as u32 }))
        };
        let search = Deadline::after(SEARCH);
        let found = loop {
            // Ranks whose process exists are not probed: they would delay finding a rank that is about to be gone.
            let found = gone_of(&search, &Observation::has_vanished).or_else(|| gone_of(&search, &|seen| seen == Observation::Unseen));
            if found.is_some() || search.has_passed() || self.listeners.strong_count() == 0 {
                break found;
            }
            std::thread::sleep(PAUSE * 5);
        };
        // An existing process may be a different one with the same number: the peer's process is then in another
        // namespace.
        let found = found.or_else(|| gone_of(&Deadline::after(LAST_LOOK), &|seen| seen != Observation::Unseen && !seen.has_vanished()));
        found.map(|abort_reason| abort_reason.to_error(&doing(), &search, self.rank, &self.peers))
    }

    fn standing_still(&self) -> Vec<Peer> {
        let looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let stopped = self.peers.iter().zip(&looks.observations).filter(|(_, observation)| observation.is_stopped());
        stopped.map(|(peer, _)| peer.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::process::{Child, Command};

    /// A process that is killed when the test ends, even by a panic.
    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn soon(condition: impl Fn() -> bool) -> bool {
        let limit = Deadline::after(Duration::from_secs(20));
        while !condition() && !limit.has_passed() {
            std::thread::yield_now();
        }
        condition()
    }

    #[test]
    fn a_process_is_seen_to_stop_and_to_end() {
        let mut sleeper = Sleeper(Command::new("sleep").arg("100").spawn().unwrap());
        let pid = sleeper.0.id();
        let (_, since) = state_of(pid).unwrap();
        let observation = Observation::Process { pid, since };
        assert!(!observation.has_vanished() && !observation.is_stopped());
        assert!(Observation::Process { pid, since: since + 1 }.has_vanished(), "another process of this number");
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::STOP).unwrap();
        assert!(soon(|| observation.is_stopped()) && !observation.has_vanished());
        sleeper.0.kill().unwrap();
        assert!(soon(|| observation.has_vanished()), "also before anybody has waited for it");
        sleeper.0.wait().unwrap();
        assert!(observation.has_vanished() && state_of(pid).is_none_or(|(_, began)| began != since));
        assert!(!Observation::Own.has_vanished() && !Observation::Unseen.has_vanished());
    }
}
