//! How the ranks of a host come to map one file. Their leader makes it and hands it out, and no rank goes on unless every rank has it.
//!
//! Who gets it is decided by a key that both ends prove to know: the job's secret, or a random key of this file, which the leader tells the
//! ranks by the exchange.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use super::descriptor_server::{self, DescriptorServer};
use crate::authentication::{self, Secret};
use crate::base::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host::exchange::Exchange;

/// Why nobody got anything.
pub(crate) enum ShareError {
    /// This rank failed.
    Here(Error),
    /// Another rank failed; its own words.
    There(usize, String),
    /// The exchange between ranks failed.
    Exchange(Error),
}

/// What every rank got, or why nobody got anything.
pub(crate) type ShareResult<R> = std::result::Result<R, ShareError>;

/// The file: how its leader makes it, and how every rank takes it into use.
pub(super) struct SharedFile<'a, R> {
    /// In words, as "the shared region of 7 bytes".
    pub(super) name: String,
    pub(super) make: &'a dyn Fn() -> io::Result<OwnedFd>,
    pub(super) enter: &'a dyn Fn(OwnedFd) -> Result<R>,
    /// The same by a number, under Miri: it has no such files and cannot pass them on, but there ranks are threads.
    #[cfg(miri)]
    pub(super) enter_numbered: &'a dyn Fn(u64) -> io::Result<R>,
    /// What ranks have to know to get it: the job's secret, where it has one.
    pub(super) secret: Option<&'a Secret>,
}

/// The first byte of the leader's blob before a socket's name, where the job's secret is the key; anything unknown is followed by what went
/// wrong.
const NAME: u8 = 1;
/// The same before a key of [`KEY_BYTES`] and the name.
const KEY_AND_NAME: u8 = 2;
/// Bytes of a key that is made for one file.
const KEY_BYTES: usize = 32;

/// What every rank has said in the last round, in rank order: nothing, or why it has no part in the file.
pub(super) struct Verdicts(Vec<Option<Refusal>>);

/// Why a rank has no part in a file.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    /// Whether sharing memory is what is refused, so that ranks may do without.
    pub(super) can_do_without: bool,
    pub(super) reason: String,
}

impl Refusal {
    fn of(error: &Error) -> Self {
        Self { can_do_without: is_of_sharing(error), reason: error.to_string() }
    }

    /// Whether one can do without, as a byte, and the reason.
    fn to_bytes(&self) -> Vec<u8> {
        [&[u8::from(self.can_do_without)], self.reason.as_bytes()].concat()
    }

    /// The reverse; `None` of nothing.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (first, reason) = bytes.split_first()?;
        Some(Self { can_do_without: *first == 1, reason: String::from_utf8_lossy(reason).into_owned() })
    }
}

/// Whether an error says that memory cannot be shared here, by what the system refuses: another way to reach the ranks may be open. It is not
/// where descriptors ran out, which every way needs, nor where time did, nor where a peer did not prove what it has to.
fn is_of_sharing(error: &Error) -> bool {
    let Error::Io { error, .. } = error else { return error.is_unsupported() };
    let needed_anyway = [libc::EMFILE, libc::ENFILE, libc::ETIMEDOUT];
    match error.raw_os_error() {
        Some(number) => !needed_anyway.contains(&number),
        None => matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::FileTooLarge),
    }
}

impl Verdicts {
    /// The ranks that have no part, and why; in rank order.
    pub(super) fn refusals(&self) -> impl Iterator<Item = (usize, &Refusal)> {
        self.0.iter().enumerate().filter_map(|(rank, refusal)| Some((rank, refusal.as_ref()?)))
    }
}

/// A server that is being served, until this is dropped.
struct Open<'a>(&'a DescriptorServer);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<R> SharedFile<'_, R> {
    /// Gets the file from rank `leader` of the exchange, which may be this one, in two rounds. Where a rank cannot, none gets anything.
    pub(super) fn share(&self, exchange: &mut dyn Exchange, leads: bool, leader: usize, deadline: &Deadline) -> ShareResult<R> {
        let (outcome, verdicts) = self.attempt(exchange, leads, leader, deadline).map_err(ShareError::Exchange)?;
        settle(outcome, &verdicts)
    }

    /// Gets the file where that is possible, and hears how that went for everyone.
    ///
    /// # Errors
    ///
    /// Those of the exchange alone.
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

    /// The leader gives out a number.
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

    /// The leader's part.
    fn lead(&self, exchange: &mut dyn Exchange, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
        let (file, key, server) = match self.open() {
            Ok(opened) => opened,
            Err(error) => return give_up(exchange, error, deadline),
        };
        thread::scope(|scope| {
            // Closes the server also where the exchange panics, as a store of the program's may: the scope waits for the thread.
            let _open = Open(&server);
            let served = thread::Builder::new().name("collectives-server".to_owned()).spawn_scoped(scope, || server.serve(file.as_fd()));
            match served {
                Ok(_) => self.announce(exchange, &server, &key, &file, deadline),
                Err(error) => give_up(exchange, Error::io(format!("starting the thread that hands out {}", self.name), error), deadline),
            }
        })
    }

    /// The file, the key to it, and who hands it out.
    fn open(&self) -> Result<(OwnedFd, Secret, DescriptorServer)> {
        let failed = |error| Error::io(format!("making {}", self.name), error);
        let file = (self.make)().map_err(failed)?;
        let key = match self.secret {
            Some(secret) => secret.clone(),
            None => Secret::new(authentication::random().map_err(failed)?)?,
        };
        let server = DescriptorServer::open(&key).map_err(failed)?;
        Ok((file, key, server))
    }

    /// The leader's two rounds.
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
        let file = file.try_clone().map_err(|error| Error::io(format!("keeping {}", self.name), error));
        tell(exchange, file.and_then(self.enter).map_err(ShareError::Here), deadline)
    }

    /// Everybody else's part: gets it from rank `leader` of the exchange.
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
                return Err(protocol("a key to its memory that does not go with the job's secret, or the lack of one".to_owned()));
            }
            (Some((_, reason)), _) => return Err(ShareError::There(leader, String::from_utf8_lossy(reason).into_owned())),
            (None, _) => return Err(protocol("an empty message in place of a socket's name".to_owned())),
        };
        let name = std::str::from_utf8(name).map_err(|_| protocol(format!("{name:?} is not a socket's name")))?;
        let fetched = descriptor_server::fetch(name, &key, deadline);
        fetched.map_err(|error| ShareError::Here(Error::io(format!("getting {} from rank {leader} at @{name}", self.name), error)))
    }
}

/// The two rounds of a leader that has nothing to hand out.
fn give_up<R>(exchange: &mut dyn Exchange, error: Error, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
    exchange.all_gather(format!("\0{error}").as_bytes(), deadline)?;
    tell(exchange, Err(ShareError::Here(error)), deadline)
}

/// A number that no other memory has.
#[cfg(miri)]
pub(super) fn number() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// The two rounds of a rank that gets no file.
pub(super) fn exchange_outcome<R>(exchange: &mut dyn Exchange, outcome: Result<R>, deadline: &Deadline) -> ShareResult<R> {
    let (outcome, verdicts) = abstain(exchange, outcome, deadline).map_err(ShareError::Exchange)?;
    settle(outcome, &verdicts)
}

/// The same for one that only listens, or does without.
pub(super) fn abstain<R>(exchange: &mut dyn Exchange, outcome: Result<R>, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
    exchange.all_gather(&[], deadline)?;
    tell(exchange, outcome.map_err(ShareError::Here), deadline)
}

/// The last round: every rank says how it went.
fn tell<R>(exchange: &mut dyn Exchange, outcome: ShareResult<R>, deadline: &Deadline) -> Result<(ShareResult<R>, Verdicts)> {
    let mine = match &outcome {
        // Of another rank's failure that rank speaks itself.
        Ok(_) | Err(ShareError::There(..)) => Vec::new(),
        Err(ShareError::Here(error) | ShareError::Exchange(error)) => Refusal::of(error).to_bytes(),
    };
    let blobs = exchange.all_gather(&mine, deadline)?;
    Ok((outcome, Verdicts(blobs.iter().map(|blob| Refusal::from_bytes(blob)).collect())))
}

/// No rank goes on unless every rank can. Where several cannot, all hear of the same one.
pub(super) fn settle<R>(outcome: ShareResult<R>, verdicts: &Verdicts) -> ShareResult<R> {
    match (outcome, verdicts.refusals().next()) {
        (Err(ShareError::Here(error)), _) => Err(ShareError::Here(error)),
        (_, Some((rank, refusal))) => Err(ShareError::There(rank, refusal.reason.clone())),
        (outcome, None) => outcome,
    }
}
