//! How the ranks of a host come to map one file. Their leader makes it and hands it out, and no rank goes on unless every rank has it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use super::descriptor_server::{self, DescriptorServer};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host::exchange::Exchange;
use crate::proof::Secret;

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
    /// What ranks have to know to get it.
    pub(super) secret: Option<&'a Secret>,
}

/// The first byte of the leader's blob before a socket's name; anything else is followed by what went wrong.
const NAME: u8 = 1;

/// A server that is being served, until this is dropped.
struct Open<'a>(&'a DescriptorServer);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<R> SharedFile<'_, R> {
    /// Gets the file from rank `leader` of the exchange, which may be this one, in two rounds.
    #[cfg(not(miri))]
    pub(super) fn share(&self, exchange: &mut dyn Exchange, leads: bool, leader: usize, deadline: &Deadline) -> ShareResult<R> {
        if leads { self.lead(exchange, deadline) } else { self.follow(exchange, leader, deadline) }
    }

    /// The leader gives out a number.
    #[cfg(miri)]
    pub(super) fn share(&self, exchange: &mut dyn Exchange, _leads: bool, leader: usize, deadline: &Deadline) -> ShareResult<R> {
        let numbers = exchange.all_gather(&number().to_ne_bytes(), deadline).map_err(ShareError::Exchange)?;
        let number = numbers[leader].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let entered = (self.enter_numbered)(number).map_err(|error| Error::io(format!("mapping {}", self.name), error));
        agree(exchange, entered.map_err(ShareError::Here), deadline)
    }

    /// The leader's part.
    fn lead(&self, exchange: &mut dyn Exchange, deadline: &Deadline) -> ShareResult<R> {
        let opened = (self.make)().and_then(|file| Ok((file, DescriptorServer::open(self.secret)?)));
        let (file, server) = match opened.map_err(|error| Error::io(format!("making {}", self.name), error)) {
            Ok(opened) => opened,
            Err(error) => return self.give_up(exchange, error, deadline),
        };
        thread::scope(|scope| {
            // Closes the server also where the exchange panics, as a store of the program's may: the scope waits for the thread.
            let _open = Open(&server);
            let served = thread::Builder::new().name("collectives-server".to_owned()).spawn_scoped(scope, || server.serve(file.as_fd()));
            match served {
                Ok(_) => self.announce(exchange, &server, &file, deadline),
                Err(error) => {
                    self.give_up(exchange, Error::io(format!("starting the thread that hands out {}", self.name), error), deadline)
                }
            }
        })
    }

    /// The leader has nothing to hand out.
    fn give_up(&self, exchange: &mut dyn Exchange, error: Error, deadline: &Deadline) -> ShareResult<R> {
        exchange.all_gather(format!("\0{error}").as_bytes(), deadline).map_err(ShareError::Exchange)?;
        agree(exchange, Err(ShareError::Here(error)), deadline)
    }

    /// The leader's two rounds.
    fn announce(&self, exchange: &mut dyn Exchange, server: &DescriptorServer, file: &OwnedFd, deadline: &Deadline) -> ShareResult<R> {
        exchange.all_gather(&[&[NAME], server.name().as_bytes()].concat(), deadline).map_err(ShareError::Exchange)?;
        let file = file.try_clone().map_err(|error| Error::io(format!("keeping {}", self.name), error));
        agree(exchange, file.and_then(self.enter).map_err(ShareError::Here), deadline)
    }

    /// Everybody else's part: gets it from rank `leader` of the exchange.
    fn follow(&self, exchange: &mut dyn Exchange, leader: usize, deadline: &Deadline) -> ShareResult<R> {
        let blobs = exchange.all_gather(&[], deadline).map_err(ShareError::Exchange)?;
        let received = self.receive(blobs.get(leader).map_or(&[], Vec::as_slice), leader, deadline);
        agree(exchange, received.and_then(|file| (self.enter)(file).map_err(ShareError::Here)), deadline)
    }

    /// Reads the leader's blob and fetches the file.
    fn receive(&self, blob: &[u8], leader: usize, deadline: &Deadline) -> ShareResult<OwnedFd> {
        let protocol = |reason: String| ShareError::Here(Error::Protocol { with: format!("rank {leader}, which leads its host,"), reason });
        match blob.split_first() {
            Some((&NAME, name)) => {
                let name = std::str::from_utf8(name).map_err(|_| protocol(format!("{name:?} is not a socket's name")))?;
                let fetched = descriptor_server::fetch(name, self.secret, deadline);
                fetched.map_err(|error| ShareError::Here(Error::io(format!("getting {} from rank {leader} at @{name}", self.name), error)))
            }
            Some((_, reason)) => Err(ShareError::There(leader, String::from_utf8_lossy(reason).into_owned())),
            None => Err(protocol("an empty message in place of a socket's name".to_owned())),
        }
    }
}

/// A number that no other memory has.
#[cfg(miri)]
pub(super) fn number() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// The two rounds of a rank that gets no file.
pub(super) fn exchange_outcome<R>(exchange: &mut dyn Exchange, outcome: Result<R>, deadline: &Deadline) -> ShareResult<R> {
    exchange.all_gather(&[], deadline).map_err(ShareError::Exchange)?;
    agree(exchange, outcome.map_err(ShareError::Here), deadline)
}

/// The last round: no rank goes on unless every rank can. Where several cannot, all hear of the same one.
fn agree<R>(exchange: &mut dyn Exchange, outcome: ShareResult<R>, deadline: &Deadline) -> ShareResult<R> {
    let reason = match &outcome {
        Ok(_) => String::new(),
        Err(ShareError::Here(error) | ShareError::Exchange(error)) => error.to_string(),
        // Its own words follow in this round.
        Err(ShareError::There(..)) => String::new(),
    };
    let blobs = exchange.all_gather(reason.as_bytes(), deadline).map_err(ShareError::Exchange)?;
    match (outcome, blobs.iter().position(|reason| !reason.is_empty())) {
        (Err(ShareError::Here(error)), _) => Err(ShareError::Here(error)),
        (_, Some(rank)) => Err(ShareError::There(rank, String::from_utf8_lossy(&blobs[rank]).into_owned())),
        (outcome, None) => outcome,
    }
}
