//! The crate's one error type.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The result of every fallible function of the crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A peer's rank, host and process. The host and the process can be unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The peer's rank in the communicator.
    pub rank: usize,
    /// The name of the peer's host; empty if unknown.
    pub host: String,
    /// The peer's process id on its host; 0 if unknown.
    pub pid: u32,
}

impl Peer {
    /// Creates a peer of which only the rank is known.
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

/// Lists peers in words: "rank 1 (host a, pid 7), rank 2". A long list is cut.
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

/// Lists in words which peers are missing and which have arrived. Leaves out an empty list: devices do not say who has
/// arrived.
fn list_arrivals(missing: &[Peer], arrived: &[Peer]) -> String {
    let mut words = String::new();
    if !missing.is_empty() {
        words.push_str(&format!("; still missing: {}", list_peers(missing)));
    }
    if !arrived.is_empty() {
        words.push_str(&format!("; arrived: {}", list_peers(arrived)));
    }
    words
}

/// Describes in words the limit that a system error reports, and how to raise it. Empty if the error reports no limit.
fn limit(error: &io::Error) -> String {
    let current = |resource| match rustix::process::getrlimit(resource).current {
        Some(limit) => limit.to_string(),
        None => "no limit".to_owned(),
    };
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            format!(
                " (RLIMIT_NOFILE, the limit of this process, is {}; raise it with `ulimit -n`)",
                current(rustix::process::Resource::Nofile)
            )
        }
        Some(libc::ENFILE) => " (the system has reached its limit, fs.file-max)".to_owned(),
        Some(libc::EFBIG) => {
            format!(
                " (RLIMIT_FSIZE, the limit on the size of a file, is {} B; raise it with `ulimit -f`)",
                current(rustix::process::Resource::Fsize)
            )
        }
        _ => String::new(),
    }
}

/// Lists in words the other calls that were waiting. Empty if there were none.
fn list_meanwhile(meanwhile: &[String]) -> String {
    if meanwhile.is_empty() {
        return String::new();
    }
    format!("; meanwhile this process waited in {}: are two communicators used in opposite orders?", meanwhile.join(", and in "))
}

/// Any error of the crate, with the operation that failed.
///
/// Call predicates such as [`Error::is_timeout`] instead of matching on variants, because predicates keep working when
/// variants are added. The documentation of each variant says whether the communicator stays usable. If the
/// communicator has ended, later calls return [`Poisoned`](Self::Poisoned), and [`shrink`](crate::Communicator::shrink)
/// can make a new communicator of the remaining ranks.
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
/// Both `{}` and `{:?}` print an error as a sentence, so that `fn main() -> collectives::Result<()>` and `unwrap` give
/// readable output. The sentence includes the cause, which is also in the error's fields. An error has no
/// [`source`](std::error::Error::source), so code that prints a chain of errors does not print the cause twice.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of a call is invalid on this rank. Nothing was sent and no buffer was touched. The communicator stays
    /// usable.
    #[error("{call}: {reason}")]
    InvalidArgument {
        /// The name of the method that was called.
        call: &'static str,
        /// What is wrong, with the offending values.
        reason: String,
    },
    /// A [custom op](crate::CustomOp) panicked on this rank. The communicator has ended, and the other ranks see this
    /// rank as lost.
    #[error("{call}: a custom op panicked, so the communicator has ended; the message of the panic is on standard error")]
    OpPanicked {
        /// The name of the method that was called.
        call: &'static str,
    },
    /// Two threads of this rank made collectives on one communicator at the same time, so the order of the two calls
    /// was a matter of chance. The communicator has ended, and the other ranks see this rank as lost. Give each thread
    /// its own [lane](crate::Communicator::lane), or order the calls. See
    /// [`Config::check_threads`](crate::Config::check_threads).
    #[error(
        "{call}: another thread of this rank is in a collective on the same communicator, so the order of the two calls is a matter of \
         chance and may differ on other ranks: give each thread its own lane (Communicator::lane), or order the calls"
    )]
    Unordered {
        /// The name of the method that was called.
        call: &'static str,
    },
    /// A URL, variable, option or flag is invalid, or does not fit this host. If the start of a communicator fails with
    /// this error, no communicator is made.
    #[error("{what}: {reason}")]
    Config {
        /// The offending part, quoted.
        what: String,
        /// What is wrong with it and what is expected.
        reason: String,
    },
    /// The call is valid, but not supported. The communicator stays usable, except in a forked child process.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The operation that was asked for.
        what: String,
        /// Why it cannot be done, and what to use instead.
        reason: String,
    },
    /// Two ranks made different calls, or the two ends of a message on devices do not match. If the calls were
    /// collectives, no buffer was touched.
    ///
    /// A mismatch of calls on host memory ends the communicator, except in [`alloc`](crate::Communicator::alloc). On
    /// devices, a mismatch of collectives leaves the communicator usable. A mismatch of device messages ends the
    /// communicator. A mismatch in a group with calls of several communicators ends these communicators.
    #[error("rank {} called {first_call}, but rank {} called {second_call}", first.rank, second.rank)]
    Mismatch {
        /// One of the two ranks.
        first: Peer,
        /// Its call in words.
        first_call: String,
        /// The other rank.
        second: Peer,
        /// Its call in words.
        second_call: String,
    },
    /// The two ends of a message do not match, or the other end gave up. Only this message is affected. The
    /// communicator stays usable.
    #[error("{doing}: {reason}")]
    Message {
        /// The message.
        doing: String,
        /// What does not match, or which end gave up.
        reason: String,
    },
    /// The call's timeout passed.
    ///
    /// In a collective, a timeout ends the communicator. The communicator stays usable if the call was one of these:
    /// - a message in host memory,
    /// - a `monitored_barrier` or `tagged_barrier`,
    /// - a `barrier` among ranks that all share a host,
    /// - a call that was still waiting for its turn behind another thread's call.
    #[error("{doing}: timed out after {:.3} s{}{}", elapsed.as_secs_f64(), list_arrivals(missing, arrived), list_meanwhile(meanwhile))]
    Timeout {
        /// The call with its sequence number.
        doing: String,
        /// How long the call had been running.
        elapsed: Duration,
        /// The peers that had not arrived, as far as this rank can tell.
        missing: Vec<Peer>,
        /// The peers that had arrived.
        arrived: Vec<Peer>,
        /// The calls on other communicators, in words, in which this process waited at the same time. Such a call is a
        /// hint that two ranks use two communicators in different orders, and so wait for each other.
        meanwhile: Vec<String>,
    },
    /// A peer is lost. The field `reason` says which of these is the case:
    /// - the peer closed or dropped its communicator early,
    /// - the peer's process ended,
    /// - the connection to the peer broke,
    /// - the peer's host no longer answers.
    ///
    /// If a collective, or a message on devices, fails with this error, the communicator has ended. If a message in
    /// host memory, a `monitored_barrier` or a `tagged_barrier` fails with this error, messages between the other ranks
    /// still work, but collectives fail.
    #[error("{doing}: lost {peer} after {:.3} s: {reason}", elapsed.as_secs_f64())]
    PeerLost {
        /// The call or operation.
        doing: String,
        /// The peer that is gone.
        peer: Peer,
        /// How long the call had been running.
        elapsed: Duration,
        /// How the loss was noticed.
        reason: String,
    },
    /// The communicator was closed before this call. It stays closed.
    #[error("{call}: this communicator has been closed; make another communicator, or close this one after its last call")]
    Closed {
        /// The call that was refused.
        call: String,
    },
    /// The job's ranks contradict each other in one of these ways:
    /// - two processes have the same rank,
    /// - ranks have different world sizes or settings,
    /// - ranks pass different lists to [`subgroup`](crate::Communicator::subgroup).
    ///
    /// If the start of a communicator fails with this error, no communicator is made. If the error occurs after the
    /// start, the communicator stays usable.
    #[error("the ranks of this job cannot form a communicator: {reason}")]
    Conflict {
        /// Which ranks contradict each other, and how.
        reason: String,
    },
    /// The remaining ranks agreed on a new communicator without this rank. The old communicator has ended.
    #[error("{doing}: the other ranks continued without rank {rank}: {reason}; end this process, or join a new job")]
    LeftBehind {
        /// The call or operation.
        doing: String,
        /// This rank.
        rank: usize,
        /// Why this rank is not included.
        reason: String,
    },
    /// An earlier error ended this communicator. You can still call `shrink`, `admit`, `abort` and `close`, and drop
    /// the communicator.
    #[error("{call}: this communicator was ended by an earlier error: {}", cause.root())]
    Poisoned {
        /// The call that was refused.
        call: String,
        /// The error that ended the communicator.
        cause: Arc<Error>,
    },
    /// The communicator was aborted by this rank or by a peer. It has ended.
    #[error("{doing}: aborted by {by}")]
    Aborted {
        /// The call or operation.
        doing: String,
        /// The rank that aborted.
        by: Peer,
    },
    /// Bytes from a peer, a store or a file cannot be decoded. If the bytes are an object of an unexpected type, the
    /// communicator stays usable. Otherwise, it has ended. If the start of a communicator fails with this error, no
    /// communicator is made.
    #[error("{with} sent data that cannot be understood: {reason}")]
    Protocol {
        /// The sender.
        with: String,
        /// What was wrong, with the offending value.
        reason: String,
    },
    /// One end of a connection has the job's secret, and the other end has no secret or a different one. If the start
    /// of a communicator fails with this error, no communicator is made.
    #[error("{with}: no proof of the job's secret: {reason}")]
    Unauthorized {
        /// The other end.
        with: String,
        /// Which end lacks the secret, and what to do about it.
        reason: String,
    },
    /// The communicator has no device backend, and the call needs one. The communicator stays usable.
    #[error("{call}: there is no device backend: {reason}")]
    NoDevice {
        /// The name of the method that was called.
        call: String,
        /// Why there is no device backend, and what to do about it.
        reason: String,
    },
    /// NCCL refused an operation, or the operation failed. If this error ended the communicator, the next call returns
    /// `Poisoned`.
    #[error("{doing}: NCCL returned {code} ({name}): {text}")]
    Nccl {
        /// The operation.
        doing: String,
        /// NCCL's result code.
        code: u32,
        /// The code's name, such as `ncclInvalidUsage`.
        name: &'static str,
        /// The text that NCCL gives for the code.
        text: String,
    },
    /// The CUDA driver refused an operation, or the operation failed. If this error ended the communicator, the next
    /// call returns `Poisoned`.
    #[error("{doing}: the CUDA driver returned {code}: {text}")]
    Cuda {
        /// The operation.
        doing: String,
        /// The driver's result code.
        code: u32,
        /// The text that the driver gives for the code.
        text: String,
    },
    /// The operating system refused an operation. If this error ended the communicator, the next call returns
    /// `Poisoned`.
    #[error("{doing}: {error}{}", limit(error))]
    Io {
        /// The operation and its object.
        doing: String,
        /// The system's own error. Its text is part of the printed sentence, so it is not also the
        /// [`source`](std::error::Error::source).
        error: Arc<io::Error>,
    },
}

impl Error {
    /// Wraps an error of the operating system with a description of the operation that failed.
    pub fn io(doing: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::Io { doing: doing.into(), error: Arc::new(error.into()) }
    }

    /// Creates an error for an invalid part of the configuration, with the reason.
    pub fn config(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Config { what: what.into(), reason: reason.into() }
    }

    /// Creates an error for an operation that is not supported, with the reason and an alternative.
    pub fn unsupported(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), reason: reason.into() }
    }

    /// Creates an error for an invalid argument of the method `call`, with the reason.
    pub fn argument(call: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { call, reason: reason.into() }
    }

    /// Marks the call of rank `own` as a part of another call: `barrier() number 4 (of close)`.
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

    /// Returns the error behind a poisoned communicator, or this error itself.
    pub(crate) fn root(&self) -> &Error {
        match self {
            Self::Poisoned { cause, .. } => cause.root(),
            other => other,
        }
    }

    /// Returns a one-word label for counters. The label of a `Poisoned` error is `poisoned`, whatever its cause.
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

    /// Returns the call or operation that failed or was refused, in words. For a [`Poisoned`](Self::Poisoned) error,
    /// this is the call that was refused, not the call that ended the communicator. Returns `None` for `Config`,
    /// `Conflict`, `Mismatch`, `Protocol` and `Unauthorized`. The fields of a `Mismatch` contain its two calls.
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
            Self::InvalidArgument { call, .. } | Self::OpPanicked { call } | Self::Unordered { call } => Some(call),
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

    /// Returns the rank that the error is about:
    /// - for `PeerLost`, the rank that is gone,
    /// - for `Aborted`, the rank that aborted,
    /// - for `Timeout`, the first of the missing ranks,
    /// - for `Mismatch`, the second of the two ranks that made different calls.
    ///
    /// For `Aborted` and `Mismatch`, the result can be this rank itself. For a [`Poisoned`](Self::Poisoned) error,
    /// returns the rank that the cause is about. For all other errors, and for a `Timeout` without missing ranks,
    /// returns `None`.
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

    /// Returns how long the call had been running when it failed, if known. For a [`Poisoned`](Self::Poisoned) error,
    /// this is the running time of the call that ended the communicator.
    #[must_use]
    pub fn elapsed(&self) -> Option<Duration> {
        match self.root() {
            Self::Timeout { elapsed, .. } | Self::PeerLost { elapsed, .. } => Some(*elapsed),
            _ => None,
        }
    }

    /// Returns whether a deadline passed. A [`Poisoned`](Self::Poisoned) error is judged by its cause.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self.root(), Self::Timeout { .. })
    }

    /// Returns whether a peer is lost. A [`Poisoned`](Self::Poisoned) error is judged by its cause.
    #[must_use]
    pub fn is_peer_lost(&self) -> bool {
        matches!(self.root(), Self::PeerLost { .. })
    }

    /// Returns whether two ranks made different calls, or the two ends of a message do not match. A
    /// [`Poisoned`](Self::Poisoned) error is judged by its cause.
    #[must_use]
    pub fn is_mismatch(&self) -> bool {
        matches!(self.root(), Self::Mismatch { .. } | Self::Message { .. })
    }

    /// Returns whether one end of a connection could not prove that it knows the job's secret. A
    /// [`Poisoned`](Self::Poisoned) error is judged by its cause.
    #[must_use]
    pub fn is_unauthorized(&self) -> bool {
        matches!(self.root(), Self::Unauthorized { .. })
    }

    /// Returns whether the call was refused because it is not supported.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported { .. })
    }

    /// Returns whether the call was refused because it was made after
    /// [`Communicator::close`](crate::Communicator::close).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// Returns whether the call was refused because an earlier error ended the communicator.
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
