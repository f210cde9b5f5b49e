//! The crate's one error type.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// What every fallible function of the crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Who a peer is, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its rank in the communicator.
    pub rank: usize,
    /// The name of its host; empty where it is not known.
    pub host: String,
    /// Its process id on that host; 0 where it is not known.
    pub pid: u32,
}

impl Peer {
    /// A peer of which only the rank is known.
    pub(crate) fn unknown(rank: usize) -> Self {
        Self { rank, host: String::new(), pid: 0 }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if self.host.is_empty() { Ok(()) } else { write!(f, " (host {}, pid {})", self.host, self.pid) }
    }
}

/// A list of peers in words: "rank 1 (host a, pid 7), rank 2". Of very many the first.
pub(crate) fn list_peers(peers: &[Peer]) -> String {
    if peers.is_empty() {
        return "none".to_owned();
    }
    const NAMED: usize = 32;
    let named = peers.iter().take(NAMED).map(Peer::to_string).collect::<Vec<_>>().join(", ");
    match peers.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Who is missing and who has arrived, in words; nothing where the wait was not for ranks.
fn list_arrivals(missing: &[Peer], arrived: &[Peer]) -> String {
    let mut words = String::new();
    if !missing.is_empty() {
        words.push_str(&format!("; still missing: {}", list_peers(missing)));
    }
    if !(missing.is_empty() && arrived.is_empty()) {
        words.push_str(&format!("; arrived: {}", list_peers(arrived)));
    }
    words
}

/// The limit that an error of the system is about, and how to raise it, in words; nothing where it is about none.
fn limit(error: &io::Error) -> String {
    let current = |resource| match rustix::process::getrlimit(resource).current {
        Some(limit) => limit.to_string(),
        None => "no limit".to_owned(),
    };
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            format!(" (this process may have {}: RLIMIT_NOFILE; raise it, `ulimit -n`)", current(rustix::process::Resource::Nofile))
        }
        Some(libc::ENFILE) => " (the system's limit, fs.file-max)".to_owned(),
        Some(libc::EFBIG) => {
            format!(" (files may have {} B: RLIMIT_FSIZE; raise it, `ulimit -f`)", current(rustix::process::Resource::Fsize))
        }
        _ => String::new(),
    }
}

/// What else was waited in, in words; nothing where there was none.
fn list_meanwhile(meanwhile: &[String]) -> String {
    if meanwhile.is_empty() {
        return String::new();
    }
    format!("; meanwhile this process waited in {}: are two communicators used in opposite orders?", meanwhile.join(", and in "))
}

/// Everything that can go wrong, with what was being done when it did.
///
/// Use the predicates ([`Error::is_timeout`] and the like) where you can: they stay true when variants are added.
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// let errors = Communicator::run_local(2, |comm| {
///     let mut x = [1u8; 4];
///     let error = comm.all_reduce(&mut x[..comm.rank() + 1], ReduceOp::Sum).unwrap_err(); // another length on each rank
///     assert_eq!(x, [1; 4]);
///     Ok(error)
/// })?;
/// assert!(errors.iter().all(|error| error.is_mismatch()));
/// println!("{}", errors[0]);
/// # Ok::<(), collectives::Error>(())
/// ```
/// Both `{}` and `{:?}` print the sentence, so that `fn main() -> collectives::Result<()>` and `unwrap` read well. The sentence is whole: an
/// error has no [`source`](std::error::Error::source), so what prints chains of errors prints nothing twice. What lies behind it is in its
/// fields.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of a call cannot be right on this rank; nothing was sent and no buffer was touched.
    #[error("{call}: {reason}")]
    InvalidArgument {
        /// The call, as the method is named.
        call: &'static str,
        /// What is wrong, with the offending values.
        reason: String,
    },
    /// A URL, variable, option or flag cannot be understood.
    #[error("{what}: {reason}")]
    Config {
        /// The offending part, quoted.
        what: String,
        /// What is wrong with it and what is expected.
        reason: String,
    },
    /// The call is understood and cannot be done.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why it cannot be done, and what to use instead.
        reason: String,
    },
    /// Two ranks called different things. No rank's buffer was touched.
    #[error("rank {} called {first_call}, but rank {} called {second_call}", first.rank, second.rank)]
    Mismatch {
        /// One of the two ranks.
        first: Peer,
        /// Its call in words.
        first_call: String,
        /// The other.
        second: Peer,
        /// Its call in words.
        second_call: String,
    },
    /// The two ends of a message do not fit together, or the other end gave it up. Only this message is affected.
    #[error("{doing}: {reason}")]
    Message {
        /// Which message.
        doing: String,
        /// What does not fit, or who gave up.
        reason: String,
    },
    /// The deadline passed.
    #[error("{doing}: timed out after {:.3} s{}{}", elapsed.as_secs_f64(), list_arrivals(missing, arrived), list_meanwhile(meanwhile))]
    Timeout {
        /// What was being done: the call with its sequence number.
        doing: String,
        /// How long it was tried.
        elapsed: Duration,
        /// Who had not arrived, as far as this rank can tell.
        missing: Vec<Peer>,
        /// Who had.
        arrived: Vec<Peer>,
        /// What else this process has waited in meanwhile, on other communicators, in words: two that are used in opposite orders wait for
        /// each other.
        meanwhile: Vec<String>,
    },
    /// A peer closed or dropped its communicator early, its process ended, or its connection broke; the reason says which.
    #[error("{doing}: lost {peer} after {:.3} s: {reason}", elapsed.as_secs_f64())]
    PeerLost {
        /// What was being done.
        doing: String,
        /// Who is gone.
        peer: Peer,
        /// How long the call had been running.
        elapsed: Duration,
        /// How it was noticed.
        reason: String,
    },
    /// The communicator was closed before.
    #[error("{call}: this communicator has been closed; make another one, or close it after its last call")]
    Closed {
        /// The call that was refused.
        call: String,
    },
    /// The job's ranks contradict each other: two processes with one rank, or different world sizes.
    #[error("the ranks of this job contradict each other: {reason}")]
    Conflict {
        /// Who says what.
        reason: String,
    },
    /// The ranks that were left agreed on a new communicator without this one.
    #[error("{doing}: the others went on without rank {rank}: {reason}; end this process, or join a new job")]
    LeftBehind {
        /// What was being done.
        doing: String,
        /// This rank.
        rank: usize,
        /// How that came about.
        reason: String,
    },
    /// An earlier error ended this communicator; only `shrink`, `abort`, `close` and drop remain.
    #[error("{call}: this communicator was ended by an earlier error: {}", cause.root())]
    Poisoned {
        /// The call that was refused.
        call: String,
        /// The error that ended it.
        cause: Arc<Error>,
    },
    /// The communicator was aborted, here or by a peer.
    #[error("{doing}: aborted by {by}")]
    Aborted {
        /// What was being done.
        doing: String,
        /// Who aborted.
        by: Peer,
    },
    /// A peer or server sent bytes that cannot be understood.
    #[error("{with} sent what cannot be understood: {reason}")]
    Protocol {
        /// Who sent it.
        with: String,
        /// What was wrong, with the offending value.
        reason: String,
    },
    /// One end of a connection has the job's secret and the other has none, or has another one.
    #[error("{with}: no proof of the job's secret: {reason}")]
    Unauthorized {
        /// The other end.
        with: String,
        /// Which end lacks what, and what to do about it.
        reason: String,
    },
    /// The communicator has no device backend, and the call needs one.
    #[error("{call}: there is no device backend: {reason}")]
    NoDevice {
        /// The call, as the method is named.
        call: String,
        /// Why there is none, and what to do about it.
        reason: String,
    },
    /// NCCL refused or failed.
    #[error("{doing}: NCCL says {code} ({name}): {text}")]
    Nccl {
        /// What was being done.
        doing: String,
        /// NCCL's result code.
        code: u32,
        /// The code's name, as `ncclInvalidUsage`.
        name: &'static str,
        /// The library's own words.
        text: String,
    },
    /// The CUDA driver refused or failed.
    #[error("{doing}: the CUDA driver says {code}: {text}")]
    Cuda {
        /// What was being done.
        doing: String,
        /// The driver's result code.
        code: u32,
        /// The driver's own words.
        text: String,
    },
    /// The operating system refused.
    #[error("{doing}: {error}{}", limit(error))]
    Io {
        /// What was being done, to what.
        doing: String,
        /// The system's own error. The sentence has its words, so it is not [`source`](std::error::Error::source) as well.
        error: Arc<io::Error>,
    },
}

impl Error {
    /// Wraps an error of the operating system with what was being done.
    pub fn io(doing: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::Io { doing: doing.into(), error: Arc::new(error.into()) }
    }

    /// Names a part of the configuration that cannot be understood, and says why.
    pub fn config(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Config { what: what.into(), reason: reason.into() }
    }

    /// Says why what is understood cannot be done, and what to use instead.
    pub fn unsupported(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), reason: reason.into() }
    }

    /// Says why an argument of a call, which is named as its method is, cannot be right.
    pub fn argument(call: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { call, reason: reason.into() }
    }

    /// The same, of a call of rank `own` that is a part of another one: `barrier() number 4 (of close)`.
    #[must_use]
    pub(crate) fn part_of(mut self, whole: &str, own: usize) -> Self {
        let part = |call: &mut String| call.extend([" (of ", whole, ")"]);
        match &mut self {
            Self::Timeout { doing, .. } | Self::PeerLost { doing, .. } | Self::Aborted { doing, .. } | Self::Io { doing, .. } => {
                part(doing)
            }
            Self::Poisoned { call, .. } => part(call),
            Self::Mismatch { first, first_call, .. } if first.rank == own => part(first_call),
            Self::Mismatch { second, second_call, .. } if second.rank == own => part(second_call),
            _ => {}
        }
        self
    }

    /// The error behind a poisoned communicator, or this error itself.
    pub(crate) fn root(&self) -> &Error {
        match self {
            Self::Poisoned { cause, .. } => cause.root(),
            other => other,
        }
    }

    /// What went wrong in a word, as a label of counters. A communicator that had ended is `poisoned`, whatever ended it.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "timeout",
            Self::PeerLost { .. } => "peer_lost",
            Self::Mismatch { .. } | Self::Message { .. } => "mismatch",
            Self::Aborted { .. } => "aborted",
            Self::Poisoned { .. } => "poisoned",
            Self::Unsupported { .. } => "unsupported",
            _ => "error",
        }
    }

    /// The call that failed or was refused, in words, where the error is one of a call.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use std::time::Duration;
    /// let errors = Communicator::run_local(2, |comm| {
    ///     if comm.rank() == 0 {
    ///         return Ok(None); // and leaves
    ///     }
    ///     Ok(comm.with_timeout(Duration::from_secs(10)).barrier().err())
    /// })?;
    /// let error = errors[1].as_ref().expect("rank 0 left");
    /// assert_eq!((error.call(), error.peer().map(|peer| peer.rank)), (Some("barrier() number 1"), Some(0)));
    /// assert!(error.elapsed().is_some_and(|elapsed| elapsed < Duration::from_secs(10)));
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn call(&self) -> Option<&str> {
        match self {
            Self::InvalidArgument { call, .. } => Some(call),
            Self::Closed { call } | Self::Poisoned { call, .. } | Self::NoDevice { call, .. } => Some(call),
            Self::Message { doing, .. }
            | Self::Timeout { doing, .. }
            | Self::PeerLost { doing, .. }
            | Self::LeftBehind { doing, .. }
            | Self::Aborted { doing, .. }
            | Self::Nccl { doing, .. }
            | Self::Cuda { doing, .. }
            | Self::Io { doing, .. } => Some(doing),
            Self::Unsupported { what, .. } => Some(what),
            Self::Mismatch { .. } | Self::Config { .. } | Self::Conflict { .. } | Self::Protocol { .. } | Self::Unauthorized { .. } => None,
        }
    }

    /// The rank that it is about, where it is one: who is gone, who aborted, the first of those that are missing, and of two that called
    /// different things the second (also as the cause of poisoning).
    #[must_use]
    pub fn peer(&self) -> Option<&Peer> {
        match self.root() {
            Self::PeerLost { peer, .. } => Some(peer),
            Self::Aborted { by, .. } => Some(by),
            Self::Timeout { missing, .. } => missing.first(),
            Self::Mismatch { second, .. } => Some(second),
            _ => None,
        }
    }

    /// How long the call had been under way, where that is known (also as the cause of poisoning).
    #[must_use]
    pub fn elapsed(&self) -> Option<Duration> {
        match self.root() {
            Self::Timeout { elapsed, .. } | Self::PeerLost { elapsed, .. } => Some(*elapsed),
            _ => None,
        }
    }

    /// Whether a deadline passed (also as the cause of poisoning).
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self.root(), Self::Timeout { .. })
    }

    /// Whether a peer is gone (also as the cause of poisoning).
    #[must_use]
    pub fn is_peer_lost(&self) -> bool {
        matches!(self.root(), Self::PeerLost { .. })
    }

    /// Whether two ranks called different things, or the ends of a message do not fit (also as the cause of poisoning).
    #[must_use]
    pub fn is_mismatch(&self) -> bool {
        matches!(self.root(), Self::Mismatch { .. } | Self::Message { .. })
    }

    /// Whether one end could not prove to the other that it knows the job's secret (also as the cause of poisoning).
    #[must_use]
    pub fn is_unauthorized(&self) -> bool {
        matches!(self.root(), Self::Unauthorized { .. })
    }

    /// Whether the call is one that cannot be done at all.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported { .. })
    }

    /// Whether the call came after [`Communicator::close`](crate::Communicator::close).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// Whether the call was refused because an earlier error ended the communicator.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        matches!(self, Self::Poisoned { .. })
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
