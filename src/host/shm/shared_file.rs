//! Lets the ranks of a host map one file. Their leader creates it and hands it out, and no rank continues unless every
//! rank has it.
//!
//! A rank gets the file if both ends prove that they know a key: the job's secret, or a random key of this file, which
//! the leader sends to the ranks through the exchange.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use super::descriptor_server::{self, DescriptorServer};
use crate::authentication::{self, Secret};
use crate::base::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host::exchange::Exchange;

/// The reason why no rank got the file.
pub(crate) enum ShareError {
    /// This rank failed.
    Here(Error),
    /// Another rank failed, and gave this reason.
    There(usize, String),
    /// The exchange between ranks failed.
    Exchange(Error),
}

/// What every rank got, or why no rank got anything.
pub(crate) type ShareResult<R> = std::result::Result<R, ShareError>;

/// The file: how its leader creates it, and how every rank maps it.
pub(super) struct SharedFile<'a, R> {
    /// A description, such as "the shared region of 7 bytes".
    pub(super) name: String,
    pub(super) make: &'a dyn Fn() -> io::Result<OwnedFd>,
    pub(super) enter: &'a dyn Fn(OwnedFd) -> Result<R>,
    /// Enters by a number. This is for Miri, which has no such files and cannot pass them on; its ranks are threads of
    /// one process.
    #[cfg(miri)]
    pub(super) enter_numbered: &'a dyn Fn(u64) -> io::Result<R>,
    /// The secret that ranks have to know to get the file, if the job has one.
    pub(super) secret: Option<&'a Secret>,
}

/// The first byte of the leader's blob if a socket's name follows, and the job's secret is the key. If the first byte
/// is none of these constants, a description of what went wrong follows.
const NAME: u8 = 1;
/// The first byte of the leader's blob if a key of [`KEY_BYTES`] and the name follow.
const KEY_AND_NAME: u8 = 2;
/// Bytes of a key that is made for one file.
const KEY_BYTES: usize = 32;

/// What every rank has reported in the last round, in rank order: nothing, or why it has no part in the file.
pub(super) struct Verdicts(Vec<Option<Refusal>>);

/// Why a rank has no part in a file.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    /// Whether the system refused to share memory, so that ranks may do without it.
    pub(super) can_do_without: bool,
    pub(super) reason: String,
}

impl Refusal {
    fn of(error: &Error) -> Self {
        Self { can_do_without: is_of_sharing(error), reason: error.to_string() }
    }

    /// Encodes whether ranks can do without the file, as a byte, and the reason.
    fn to_bytes(&self) -> Vec<u8> {
        [&[u8::from(self.can_do_without)], self.reason.as_bytes()].concat()
    }

    /// Decodes [`Refusal::to_bytes`]. Returns `None` for no bytes.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (first, reason) = bytes.split_first()?;
        Some(Self { can_do_without: *first == 1, reason: String::from_utf8_lossy(reason).into_owned() })
    }
}

/// Whether an error means that the system does not let memory be shared here, so that another route to the ranks may
/// work. That is not so if descriptors ran out, which every route needs, if time ran out, or if a peer failed its
/// proof.
fn is_of_sharing(error: &Error) -> bool {
    let Error::Io { error, .. } = error else { return error.is_unsupported() };
    let needed_anyway = [libc::EMFILE, libc::ENFILE, libc::ETIMEDOUT];
    match error.raw_os_error() {
        Some(number) => !needed_anyway.contains(&number),
        None => matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::FileTooLarge),
    }
}

impl Verdicts {
    /// Returns the ranks that have no part, and why, in rank order.
    pub(super) fn refusals(&self) -> impl Iterator<Item = (usize, &Refusal)> {
        self.0.iter().enumerate().filter_map(|(rank, refusal)| Some((rank, refusal.as_ref()?)))
    }
}

/// A server that serves until this is dropped.
struct Open<'a>(&'a DescriptorServer);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<R> SharedFile<'_, R> {
    /// Gets the file from rank `leader` of the exchange, which may be this one, in two rounds. If any rank cannot get
    /// it, no rank gets anything.
    pub(super) fn share(&self, exchange: &mut dyn Exchange, leads: bool, leader: usize, deadline: &Deadline) -> ShareResult<R> {
        let (outcome, verdicts) = self.attempt(exchange, leads, leader, deadline).map_err(ShareError::Exchange)?;
        settle(outcome, &verdicts)
    }

    /// Gets the file if that is possible, and receives the outcome of every rank.
    ///
    /// # Errors
    ///
    /// Only the errors of the exchange.
    #[cfg(not(miri))]
    pub(super) fn attempt(
        &self,
        exchange: &mut dyn Exchange,
        leads: bool,
        leader: usize,
        deadline: &Deadline,
    ) -> Result<(ShareResult<R>, Verdicts)> {
        if leads { self.lead(exchange, deadline) } else { self.follow(exchange, leader, deadline) }
    }

    /// Gets the memory by a number that the leader gives out.
    #[cfg(miri)]
    pub(super) fn attempt(
        &self,
        exchange: &mut dyn Exchange,
        _leads: bool,
        leader: usize,
        deadline: &Deadline,
    ) -> Result<(ShareResult<R>, Verdicts)> {
        let numbers = exchange.all_gather(&number().to_ne_bytes(), deadline)?;
        let number = numbers[leader].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let entered = (self.enter_numbered)(number).map_err(|error| Error::io(format!("mapping {}", self.name), error));
        tell(exchange, entered.map_err(ShareError::Here), deadline)
    }

    /// Runs the leader's part.
    fn lead(&self, exchange: &mut dyn Exchange, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
        let (file, key, server) = match self.open() {
            Ok(opened) => opened,
            Err(error) => return give_up(exchange, error, deadline),
        };
        thread::scope(|scope| {
            // Closes the server even if the exchange panics, as a program's own store may: the scope waits for the
            // thread.
            let _open = Open(&server);
            let served = thread::Builder::new().name("collectives-server".to_owned()).spawn_scoped(scope, || server.serve(file.as_fd()));
            match served {
                Ok(_) => self.announce(exchange, &server, &key, &file, deadline),
                Err(error) => give_up(exchange, Error::io(format!("starting the thread that hands out {}", self.name), error), deadline),
            }
        })
    }

    /// Creates the file, the key to it, and the server that hands it out.
    fn open(&self) -> Result<(OwnedFd, Secret, DescriptorServer)> {
        let failed = |error| Error::io(format!("creating {}", self.name), error);
        let file = (self.make)().map_err(failed)?;
        let key = match self.secret {
            Some(secret) => secret.clone(),
            None => Secret::new(authentication::random().map_err(failed)?)?,
        };
        let server = DescriptorServer::open(&key).map_err(failed)?;
        Ok((file, key, server))
    }

    /// Runs the leader's two rounds.
    fn announce(
        &self,
        exchange: &mut dyn Exchange,
        server: &DescriptorServer,
        key: &Secret,
        file: &OwnedFd,
        deadline: &Deadline,
    ) -> Result<(ShareResult<R>, Verdicts)> {
        let head = if self.secret.is_some() { vec![NAME] } else { [&[KEY_AND_NAME], key.expose()].concat() };
        exchange.all_gather(&[&head, server.name().as_bytes()].concat(), deadline)?;
        let file = file.try_clone().map_err(|error| Error::io(format!("duplicating the descriptor of {}", self.name), error));
        tell(exchange, file.and_then(self.enter).map_err(ShareError::Here), deadline)
    }

    /// Runs the part of every other rank: gets the file from rank `leader` of the exchange.
    fn follow(&self, exchange: &mut dyn Exchange, leader: usize, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
        let blobs = exchange.all_gather(&[], deadline)?;
        let received = self.receive(blobs.get(leader).map_or(&[], Vec::as_slice), leader, deadline);
        tell(exchange, received.and_then(|file| (self.enter)(file).map_err(ShareError::Here)), deadline)
    }

    /// Reads the leader's blob and fetches the file.
    fn receive(&self, blob: &[u8], leader: usize, deadline: &Deadline) -> ShareResult<OwnedFd> {
        let protocol = |reason: String| ShareError::Here(Error::Protocol { with: format!("rank {leader}, which leads its host,"), reason });
        let (key, name) = match (blob.split_first(), self.secret) {
            (Some((&NAME, name)), Some(secret)) => (secret.clone(), name),
            (Some((&KEY_AND_NAME, rest)), None) => {
                let (key, name) = rest.split_at_checked(KEY_BYTES).ok_or_else(|| protocol(format!("a key of {} B", rest.len())))?;
                (Secret::new(key).map_err(ShareError::Here)?, name)
            }
            (Some((&(NAME | KEY_AND_NAME), _)), _) => {
                let reason = "a key to its memory although the job has a secret, or no key although the job has no secret";
                return Err(protocol(reason.to_owned()));
            }
            (Some((_, reason)), _) => return Err(ShareError::There(leader, String::from_utf8_lossy(reason).into_owned())),
            (None, _) => return Err(protocol("an empty message instead of the name of a socket".to_owned())),
        };
        let name = std::str::from_utf8(name).map_err(|_| protocol(format!("{name:?} is not a socket's name")))?;
        let fetched = descriptor_server::fetch(name, &key, deadline);
        fetched.map_err(|error| ShareError::Here(Error::io(format!("getting {} from rank {leader} at @{name}", self.name), error)))
    }
}

/// Runs the two rounds of a leader that has nothing to hand out.
fn give_up<R>(exchange: &mut dyn Exchange, error: Error, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
    exchange.all_gather(format!("\0{error}").as_bytes(), deadline)?;
    tell(exchange, Err(ShareError::Here(error)), deadline)
}

/// Returns a number that no other memory has.
#[cfg(miri)]
pub(super) fn number() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Runs the two rounds of a rank that gets no file.
pub(super) fn exchange_outcome<R>(exchange: &mut dyn Exchange, outcome: Result<R>, deadline: &Deadline) -> ShareResult<R> {
    let (outcome, verdicts) = abstain(exchange, outcome, deadline).map_err(ShareError::Exchange)?;
    settle(outcome, &verdicts)
}

/// Runs the two rounds for a rank that only listens, or does without the file.
pub(super) fn abstain<R>(exchange: &mut dyn Exchange, outcome: Result<R>, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
    exchange.all_gather(&[], deadline)?;
    tell(exchange, outcome.map_err(ShareError::Here), deadline)
}

/// Runs the last round: every rank reports its outcome.
fn tell<R>(exchange: &mut dyn Exchange, outcome: ShareResult<R>, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
    let mine = match &outcome {
        // Another rank's failure is reported by that rank itself.
        Ok(_) | Err(ShareError::There(..)) => Vec::new(),
        Err(ShareError::Here(error) | ShareError::Exchange(error)) => Refusal::of(error).to_bytes(),
    };
    let blobs = exchange.all_gather(&mine, deadline)?;
    Ok((outcome, Verdicts(blobs.iter().map(|blob| Refusal::from_bytes(blob)).collect())))
}

/// Lets a rank continue only if every rank can. If several cannot, every rank reports the same one of them.
pub(super) fn settle<R>(outcome: ShareResult<R>, verdicts: &Verdicts) -> ShareResult<R> {
    match (outcome, verdicts.refusals().next()) {
        (Err(ShareError::Here(error)), _) => Err(ShareError::Here(error)),
        (_, Some((rank, refusal))) => Err(ShareError::There(rank, refusal.reason.clone())),
        (outcome, None) => outcome,
    }
}
