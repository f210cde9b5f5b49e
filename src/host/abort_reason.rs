//! Why a communicator ended, in a form that travels to every peer.

use crate::base::deadline::Deadline;
use crate::call::Call;
use crate::error::{Error, Peer};
use crate::host::link::Silence;

/// Why a communicator ended, as one rank reports it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AbortReason {
    /// Two ranks made different calls.
    Mismatch {
        /// One rank and its call. If the calls differ only in how much one rank sends to the other, this is the sender.
        first: (u32, Call),
        /// The other rank and its call.
        second: (u32, Call),
    },
    /// A rank died, or its connection broke.
    Lost {
        /// The rank that was lost.
        rank: u32,
        /// The rank that has lost it.
        by: u32,
    },
    /// A rank's host has stopped answering.
    Silent {
        /// The rank on that host.
        rank: u32,
        /// The rank that has received nothing from it.
        by: u32,
        /// For how many seconds nothing has been received from that host; 0 if unknown.
        seconds: u32,
    },
    /// A rank closed its communicator while others were still in a call.
    Left {
        /// The rank that left.
        rank: u32,
    },
    /// A rank's deadline passed while it waited for another rank.
    TimedOut {
        /// The rank whose deadline passed.
        waiting: u32,
        /// The rank that it waited for; the waiting rank itself if all had arrived, but the work of the call took too
        /// long.
        missing: u32,
    },
    /// A rank called `abort`.
    Aborted {
        /// The rank that called it.
        by: u32,
    },
    /// A rank cannot continue because of a local failure, such as an I/O error or a lack of memory.
    Failed {
        /// The rank that failed.
        rank: u32,
    },
    /// A rank sent bytes that cannot be decoded.
    Garbled {
        /// The rank that sent them.
        rank: u32,
        /// The first eight of these bytes, in big-endian order.
        header: u64,
    },
}

/// Why a wait on the host backend ended without success, and what this rank knows about the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interrupted {
    /// The reason, as it is sent to peers.
    pub(crate) abort_reason: AbortReason,
    /// If a deadline passed: the ranks that this rank still waited for (global ranks).
    pub(crate) missing: Vec<u32>,
    /// If a deadline passed: the ranks that had arrived, as far as this rank knows, including itself.
    pub(crate) arrived: Vec<u32>,
}

impl From<AbortReason> for Interrupted {
    fn from(abort_reason: AbortReason) -> Self {
        Self { abort_reason, missing: Vec::new(), arrived: Vec::new() }
    }
}

impl Interrupted {
    /// Adds what `rank` knows to a timeout that another rank reported. The missing rank may be `rank` itself, which is
    /// held up in turn by the ranks that it waits for (`awaited`).
    pub(crate) fn seen_by(mut self, rank: u32, awaited: impl IntoIterator<Item = u32>) -> Self {
        if let AbortReason::TimedOut { waiting, missing } = self.abort_reason
            && waiting != rank
            && self.arrived.is_empty()
        {
            self.missing = awaited.into_iter().chain([missing]).filter(|other| ![waiting, rank].contains(other)).collect();
            self.missing.sort_unstable();
            self.missing.dedup();
            self.arrived = vec![waiting.min(rank), waiting.max(rank)];
        }
        self
    }

    /// Returns the error for a call on rank `me`. `peers` is indexed by rank.
    pub(crate) fn to_error(&self, doing: &str, deadline: &Deadline, me: usize, peers: &[Peer]) -> Error {
        let mut error = self.abort_reason.to_error(doing, deadline, me, peers);
        if let (Error::Timeout { doing, missing, arrived, .. }, AbortReason::TimedOut { waiting, missing: first }) =
            (&mut error, self.abort_reason)
            && !self.arrived.is_empty()
        {
            let name = |rank: &u32| peers.get(*rank as usize).cloned().unwrap_or_else(|| Peer::unknown(*rank as usize));
            *missing = self.missing.iter().map(name).collect();
            *arrived = self.arrived.iter().map(name).collect();
            if missing.is_empty() && waiting != first {
                *doing = format!("{doing}, in which {} has stopped waiting for this rank", name(&waiting));
            }
        }
        error
    }
}

impl AbortReason {
    /// Returns the abort reason for a link of rank `by` that failed without delivering one; `rank` is the peer.
    pub(crate) fn of_link(rank: u32, by: u32, silence: Option<Silence>) -> Self {
        match silence {
            Some(Silence(time)) => Self::Silent { rank, by, seconds: u32::try_from(time.as_secs()).unwrap_or(u32::MAX) },
            None => Self::Lost { rank, by },
        }
    }

    /// Length of the encoded form in bytes.
    pub(crate) const BYTES: usize = 80;

    /// Encodes the reason as its kind, padding, two ranks and two fingerprints. The seconds of a silence and a garbled header
    /// take the place of the first fingerprint. Unused fields are zero.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (kind, first, second) = match self {
            AbortReason::Mismatch { first, second } => {
                bytes[16..48].copy_from_slice(&first.1.to_bytes());
                bytes[48..80].copy_from_slice(&second.1.to_bytes());
                (1, first.0, second.0)
            }
            AbortReason::Lost { rank, by } => (2, rank, by),
            AbortReason::Left { rank } => (3, rank, 0),
            AbortReason::TimedOut { waiting, missing } => (4, waiting, missing),
            AbortReason::Aborted { by } => (5, by, 0),
            AbortReason::Failed { rank } => (6, rank, 0),
            AbortReason::Garbled { rank, header } => {
                bytes[16..24].copy_from_slice(&header.to_le_bytes());
                (7, rank, 0)
            }
            AbortReason::Silent { rank, by, seconds } => {
                bytes[16..20].copy_from_slice(&seconds.to_le_bytes());
                (8, rank, by)
            }
        };
        bytes[0] = kind;
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(first));
        bytes[12..16].copy_from_slice(&u32::to_le_bytes(second));
        bytes
    }

    /// Decodes [`AbortReason::to_bytes`]. Returns `None` for bytes that encode no abort reason, including bytes with a
    /// value in a field that the kind does not use.
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..].first_chunk().map(|chunk| u32::from_le_bytes(*chunk));
        let call = |at: usize| bytes[at..].first_chunk().and_then(Call::from_bytes);
        let (first, second) = (word(8)?, word(12)?);
        let abort_reason = match bytes[0] {
            1 => AbortReason::Mismatch { first: (first, call(16)?), second: (second, call(48)?) },
            2 => AbortReason::Lost { rank: first, by: second },
            3 => AbortReason::Left { rank: first },
            4 => AbortReason::TimedOut { waiting: first, missing: second },
            5 => AbortReason::Aborted { by: first },
            6 => AbortReason::Failed { rank: first },
            7 => AbortReason::Garbled { rank: first, header: bytes[16..].first_chunk().map(|chunk| u64::from_le_bytes(*chunk))? },
            8 => AbortReason::Silent { rank: first, by: second, seconds: word(16)? },
            _ => return None,
        };
        (abort_reason.to_bytes() == *bytes).then_some(abort_reason)
    }

    /// Returns the error for a call on rank `me`. `peers` is indexed by rank.
    pub(crate) fn to_error(self, doing: &str, deadline: &Deadline, me: usize, peers: &[Peer]) -> Error {
        let me = u32::try_from(me).unwrap_or(u32::MAX);
        let peer = |rank: u32| peers.get(rank as usize).cloned().unwrap_or_else(|| Peer::unknown(rank as usize));
        let doing = doing.to_owned();
        let elapsed = deadline.elapsed();
        match self {
            AbortReason::Mismatch { first, second } => {
                let [first_call, second_call] = in_words(first, second);
                Error::Mismatch { first: peer(first.0), first_call, second: peer(second.0), second_call }
            }
            AbortReason::Lost { rank, by } => {
                let (lost, reason) = loss(rank, by, me);
                Error::PeerLost { doing, peer: peer(lost), elapsed, reason }
            }
            AbortReason::Silent { rank, by, seconds } => {
                let (lost, reason) = silence(rank, by, seconds, me);
                Error::PeerLost { doing, peer: peer(lost), elapsed, reason }
            }
            AbortReason::Left { rank } => Error::PeerLost {
                doing,
                peer: peer(rank),
                elapsed,
                reason: "it closed or dropped its communicator before it made this call: its program returned, panicked, or called close"
                    .to_owned(),
            },
            AbortReason::TimedOut { waiting, missing } if waiting == missing => Error::Timeout {
                doing: format!(
                    "{doing}, which {} could not finish within its timeout (no rank was missing; raise the timeout)",
                    peer(waiting)
                ),
                elapsed,
                missing: Vec::new(),
                arrived: vec![peer(waiting)],
                meanwhile: Vec::new(),
            },
            AbortReason::TimedOut { waiting, missing } => {
                Error::Timeout { doing, elapsed, missing: vec![peer(missing)], arrived: vec![peer(waiting)], meanwhile: Vec::new() }
            }
            AbortReason::Aborted { by } => Error::Aborted { doing, by: peer(by) },
            AbortReason::Failed { rank } => {
                Error::PeerLost { doing, peer: peer(rank), elapsed, reason: "it ended its communicator after a local error".to_owned() }
            }
            AbortReason::Garbled { rank, header } => {
                let header = header.to_be_bytes();
                let (with, expected) = match rank == me {
                    true => ("another rank".to_owned(), "it expected a message header of this call from this rank, and"),
                    false => (peer(rank).to_string(), "expected a message header of this call,"),
                };
                let reason = format!("{doing}: {expected} got {header:02x?}; check that all ranks run the same release");
                Error::Protocol { with, reason }
            }
        }
    }
}

/// Returns the rank that rank `me` has lost, and how, after rank `by` has lost `rank`. If `rank` is `me`, its process
/// lives, and it has lost `by`.
fn loss(rank: u32, by: u32, me: u32) -> (u32, String) {
    if rank == me && by != me {
        return (by, "it reports that its connection to this rank broke".to_owned());
    }
    let reported = if [me, rank].contains(&by) { String::new() } else { format!(", as rank {by} reports") };
    (rank, format!("its process ended or its connection broke{reported}"))
}

/// Does the same as [`loss`], after rank `by` has received nothing from the host of `rank` for this time.
fn silence(rank: u32, by: u32, seconds: u32, me: u32) -> (u32, String) {
    const ADVICE: &str = "if the network may be down for longer, raise silence_timeout (COLLECTIVES_SILENCE_TIMEOUT)";
    let time = if seconds == 0 { String::new() } else { format!(" for {seconds} s") };
    if rank == me && by != me {
        return (
            by,
            format!("it reports that it has received nothing from this rank's host{time}. The network between them was down; {ADVICE}"),
        );
    }
    let reported = if [me, rank].contains(&by) { String::new() } else { format!(", as rank {by} reports") };
    match seconds {
        // The kernel reported it, without a duration.
        0 => (rank, format!("its host has stopped answering{reported}")),
        _ => {
            let reason = "its host has stopped answering: nothing was received";
            (rank, format!("{reason}{time}{reported}. The host or the network to it is down; {ADVICE}"))
        }
    }
}

/// Describes two calls that differ.
fn in_words(first: (u32, Call), second: (u32, Call)) -> [String; 2] {
    let differs_in_count_alone = Call { count: second.1.count, ..first.1 } == second.1;
    if !(first.1.kind.is_pairwise() && differs_in_count_alone) {
        return [first.1, second.1].map(|call| call.to_string());
    }
    let sent = first.1.with_amount(format_args!("count {} to rank {}", first.1.count, second.0));
    [sent, second.1.with_amount(format_args!("count {} from rank {}", second.1.count, first.0))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Collective;
    use crate::call::element::{DType, TypeTag};

    #[test]
    fn a_deadline_of_a_rank_that_waited_for_this_one_is_seen_through() {
        let seen = |rank, awaited: &[u32]| {
            let stop = Interrupted::from(AbortReason::TimedOut { waiting: 1, missing: 0 }).seen_by(rank, awaited.iter().copied());
            (stop.missing, stop.arrived)
        };
        assert_eq!(seen(0, &[2, 1]), (vec![2], vec![0, 1]));
        assert_eq!(seen(3, &[4, 0]), (vec![0, 4], vec![1, 3]));
        assert_eq!(seen(0, &[]), (vec![], vec![0, 1]));
        assert_eq!(seen(1, &[2]), (vec![], vec![]), "its own deadline");
    }

    #[test]
    fn no_rank_is_told_that_it_is_missing_itself() {
        let peers: Vec<Peer> = (0..3).map(Peer::unknown).collect();
        for waiting in 0..3 {
            for missing in 0..3 {
                for me in 0..3 {
                    let stop = Interrupted::from(AbortReason::TimedOut { waiting, missing }).seen_by(me, [me, waiting]);
                    let error = stop.to_error("a call", &Deadline::after(std::time::Duration::ZERO), me as usize, &peers);
                    let Error::Timeout { missing: named, .. } = &error else { panic!("{error}") };
                    let expected = if [me, waiting].contains(&missing) { vec![] } else { vec![peers[missing as usize].clone()] };
                    assert_eq!(*named, expected, "rank {me}: {error}");
                    assert!(!error.to_string().contains("missing: none"), "{error}");
                }
            }
        }
    }

    #[test]
    fn no_rank_is_told_that_it_has_lost_itself() {
        let peers: Vec<Peer> = (0..3).map(Peer::unknown).collect();
        let told = |abort_reason: AbortReason, me: usize| {
            let error = abort_reason.to_error("a call", &Deadline::after(std::time::Duration::ZERO), me, &peers);
            let text = error.to_string();
            (error.peer().map(|peer| peer.rank), text.split(" s: ").nth(1).unwrap_or(&text).to_owned())
        };
        let lost = AbortReason::Lost { rank: 0, by: 1 };
        assert_eq!(told(lost, 0), (Some(1), "it reports that its connection to this rank broke".to_owned()));
        assert_eq!(told(lost, 1), (Some(0), "its process ended or its connection broke".to_owned()));
        assert_eq!(told(lost, 2), (Some(0), "its process ended or its connection broke, as rank 1 reports".to_owned()));
        for seconds in [0, 60] {
            let silent = AbortReason::Silent { rank: 0, by: 1, seconds };
            let [(lost, theirs), (by, mine), (third, reported)] = [0, 1, 2].map(|me| told(silent, me));
            assert_eq!((lost, by, third), (Some(1), Some(0), Some(0)));
            assert!(theirs.starts_with("it reports that it has received nothing from this rank's host"), "{theirs}");
            assert!(mine.starts_with("its host has stopped answering") && !mine.contains("rank 1"), "{mine}");
            assert!(reported.starts_with("its host has stopped answering") && reported.contains("as rank 1 reports"), "{reported}");
            assert_eq!([theirs, mine, reported].map(|text| text.contains("for 60 s")), [seconds == 60; 3]);
        }
        let garbled = AbortReason::Garbled { rank: 0, header: 7 };
        let [(_, mine), (_, theirs)] = [0, 1].map(|me| told(garbled, me));
        assert!(mine.contains("from this rank") && !mine.contains("rank 0"), "{mine}");
        assert!(theirs.contains("rank 0"), "{theirs}");
        // From a rank of another release, or from an attacker.
        for rank in [0, 9, u32::MAX] {
            assert!(!told(AbortReason::Lost { rank, by: rank }, 0).1.is_empty());
        }
    }

    #[test]
    fn abort_reasons_survive_the_wire() {
        let call = |kind| Call { kind, op: 0, element: TypeTag::Scalar(DType::F32), count: 4, root: None, counts_hash: 0, sequence: 1 };
        for abort_reason in [
            AbortReason::Mismatch { first: (1, call(Collective::Barrier)), second: (2, call(Collective::AllReduce)) },
            AbortReason::Lost { rank: 7, by: 9 },
            AbortReason::Left { rank: 8 },
            AbortReason::TimedOut { waiting: 1, missing: 2 },
            AbortReason::Aborted { by: 3 },
            AbortReason::Failed { rank: 4 },
            AbortReason::Garbled { rank: 5, header: 0x0102_0304_0506_0708 },
            AbortReason::Silent { rank: 6, by: 7, seconds: 61 },
        ] {
            let bytes = abort_reason.to_bytes();
            assert_eq!(AbortReason::from_bytes(&bytes), Some(abort_reason));
            let padded = AbortReason::from_bytes(&std::array::from_fn(|at| if at == 7 { 1 } else { bytes[at] }));
            assert_eq!(padded, None, "{abort_reason:?} with a byte set that it does not use");
        }
        assert_eq!(AbortReason::from_bytes(&[0; AbortReason::BYTES]), None);
    }
}
