//! Notifies the ranks of one host, by a word in the memory that they share, that device work is about to be aborted.
//! Ranks that share no memory are not notified in this way: between hosts, NCCL's proxies stop when the abort flags are
//! set.

use std::sync::Arc;
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::tuning::ticket_lock::ABORTING;
use crate::communicator::Communicator;
use crate::device::{EndNotice, Notice};
use crate::error::{Error, Peer};
use crate::host::abort_reason::AbortReason;
use crate::host::health::Health;
use crate::host::shm::DeviceEnd;

/// The shared word of one communicator.
#[derive(Debug)]
struct SharedNotice {
    rank: u32,
    peers: Arc<[Peer]>,
    /// Detects that this process is a forked child of the communicator's process. Such a child must not end anything.
    health: Arc<Health>,
    word: DeviceEnd,
}

impl Communicator {
    /// Returns the word by which this communicator's ranks announce that they abort their device work. Returns
    /// `None` if this rank shares memory with no other.
    pub(super) fn end_notice(&self) -> Option<Arc<dyn EndNotice>> {
        let shared = &self.core.shared;
        let word = shared.backend.with(ABORTING, |backend| backend.device_end()).ok()??;
        let (peers, health) = (Arc::clone(&shared.peers), Arc::clone(&shared.health));
        Some(Arc::new(SharedNotice { rank: shared.rank as u32, peers, health, word }))
    }
}

impl EndNotice for SharedNotice {
    fn post(&self, error: Option<&Error>) {
        if !self.health.is_foreign() {
            self.word.post(error.map_or(AbortReason::Left { rank: self.rank }, |error| reason_of(error, self.rank, &self.peers)));
        }
    }

    #[inline]
    fn read(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Notice> {
        // A forked child does not end its parent's device work.
        let abort_reason = self.word.read().filter(|_| !self.health.is_foreign())?;
        Some(match abort_reason {
            AbortReason::Left { rank } => {
                Notice::Revoked(error_of(AbortReason::Aborted { by: rank }, &doing(), waited, self.rank, &self.peers))
            }
            abort_reason => Notice::Ended(error_of(abort_reason, &doing(), waited, self.rank, &self.peers)),
        })
    }
}

/// Returns the reason that a rank sends to the others for its error.
fn reason_of(error: &Error, rank: u32, peers: &[Peer]) -> AbortReason {
    let number = |peer: &Peer| peers.iter().position(|known| known == peer).unwrap_or(peer.rank) as u32;
    match error {
        Error::Poisoned { cause, .. } => reason_of(cause, rank, peers),
        Error::PeerLost { peer, .. } => AbortReason::Lost { rank: number(peer), by: rank },
        Error::Aborted { by, .. } => AbortReason::Aborted { by: number(by) },
        // The error may not name a missing rank.
        Error::Timeout { missing, .. } => AbortReason::TimedOut { waiting: rank, missing: missing.first().map_or(rank, number) },
        _ => AbortReason::Failed { rank },
    }
}

/// Returns rank `me`'s error for a reason that another rank has sent.
fn error_of(abort_reason: AbortReason, doing: &str, waited: Duration, me: u32, peers: &[Peer]) -> Error {
    let mut error = abort_reason.to_error(doing, &Deadline::after(Duration::ZERO), me as usize, peers);
    if let Error::PeerLost { elapsed, .. } | Error::Timeout { elapsed, .. } = &mut error {
        *elapsed = waited;
    }
    if let (AbortReason::TimedOut { waiting, missing: late }, Error::Timeout { missing, .. }) = (abort_reason, &mut error)
        && waiting == late
    {
        missing.clear();
    }
    error
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn an_error_is_told_as_what_it_is_about() {
        let peers: Vec<Peer> = (0..4).map(Peer::unknown).collect();
        let doing = || "waiting".to_owned();
        let heard = |error: &Error| error_of(reason_of(error, 1, &peers), "waiting", Duration::ZERO, 0, &peers).to_string();
        let lost = Error::PeerLost { doing: doing(), peer: peers[2].clone(), elapsed: Duration::ZERO, reason: String::new() };
        assert!(matches!(reason_of(&lost, 1, &peers), AbortReason::Lost { rank: 2, by: 1 }));
        let poisoned = Error::Poisoned { call: doing(), cause: Arc::new(lost) };
        assert!(matches!(reason_of(&poisoned, 1, &peers), AbortReason::Lost { rank: 2, by: 1 }));
        let late = |missing: Vec<Peer>| {
            let elapsed = Duration::from_secs(1);
            Error::Timeout { doing: doing(), elapsed, missing, arrived: Vec::new(), meanwhile: Vec::new() }
        };
        let Error::Timeout { missing, arrived, .. } =
            error_of(reason_of(&late(vec![peers[3].clone()]), 1, &peers), "waiting", Duration::ZERO, 0, &peers)
        else {
            panic!("a deadline stays one")
        };
        assert_eq!((&missing[..], &arrived[..]), (&peers[3..], &peers[1..2]));
        let unknown = error_of(reason_of(&late(Vec::new()), 1, &peers), "waiting", Duration::ZERO, 0, &peers);
        assert!(matches!(&unknown, Error::Timeout { missing, arrived, .. } if missing.is_empty() && arrived[..] == peers[1..2]));
        assert!(heard(&Error::argument("reduce", "no")).contains("rank 1"), "{}", heard(&Error::argument("reduce", "no")));
    }
}
