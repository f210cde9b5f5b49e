//! A link to one peer over TCP, plain or encrypted, as the two ends agreed when they authenticated.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::hello::Channel;
use super::striped::StripedLink;
use super::tcp::TcpLink;
use crate::authentication::{Cipher, Secret};
use crate::config::PortRange;
use crate::host::encrypted::EncryptedLink;
use crate::host::link::ByteLink;

/// The settings that all connections of a rank to its peers share.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    /// The secret that peers must know.
    pub(crate) secret: Option<Secret>,
    /// How long a peer's host may leave data unanswered; zero: forever.
    pub(crate) silence_timeout: Duration,
    /// The connections of each link for collectives: at least 1.
    pub(crate) connections: u8,
    /// The ports on which this rank may listen; `None` for all.
    pub(crate) ports: Option<PortRange>,
}

impl Terms {
    /// Returns how many connections a link of a kind has. Messages need no more than one, and neither does encryption,
    /// for which the processor is the limit.
    pub(super) fn connections_of(&self, channel: Channel) -> u8 {
        let is_encrypted = self.secret.as_ref().is_some_and(Secret::encrypts);
        if channel == Channel::Collective && !is_encrypted { self.connections.max(1) } else { 1 }
    }
}

/// A link to a peer. It never blocks.
#[derive(Debug)]
pub(crate) enum Link {
    Plain(TcpLink),
    Striped(StripedLink),
    Encrypted(Box<EncryptedLink<TcpLink>>),
}

impl Link {
    /// Takes over a nonblocking connection that was prepared ([`super::tcp::prepare`]). It is encrypted if there are
    /// keys.
    pub(super) fn new(stream: TcpStream, cipher: Option<Cipher>, terms: &Terms) -> Self {
        let link = TcpLink::new(stream, terms.silence_timeout);
        match cipher {
            None => Self::Plain(link),
            Some(cipher) => Self::Encrypted(Box::new(EncryptedLink::new(link, cipher))),
        }
    }

    /// Makes one link of one or more connections, which are plain if there are several.
    pub(super) fn joined(links: impl Iterator<Item = Self>) -> Self {
        let (mut plain, mut other) = (Vec::new(), None);
        for link in links {
            match link {
                Self::Plain(link) => plain.push(link),
                link => other = Some(link),
            }
        }
        match (plain.len(), other) {
            (_, Some(link)) => link,
            (1, None) => Self::Plain(plain.swap_remove(0)),
            (_, None) => Self::Striped(StripedLink::new(plain)),
        }
    }

    /// Sends a short message, which fits because the send buffer is almost empty. Fails if not all of it could be sent.
    pub(super) fn say(&mut self, words: &[u8]) -> io::Result<()> {
        match self.try_write(&[IoSlice::new(words)])? {
            written if written == words.len() => Ok(()),
            written => Err(io::Error::other(format!("only {written} of {} bytes could be sent", words.len()))),
        }
    }
}

impl AsFd for Link {
    /// Returns the connection, whether or not something was read ahead.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(link) => link.as_fd(),
            Self::Striped(link) => link.as_fd(),
            Self::Encrypted(link) => link.below().as_fd(),
        }
    }
}

impl ByteLink for Link {
    #[inline]
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(link) => link.try_write(parts),
            Self::Striped(link) => link.try_write(parts),
            Self::Encrypted(link) => link.try_write(parts),
        }
    }

    #[inline]
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(link) => link.try_read(into),
            Self::Striped(link) => link.try_read(into),
            Self::Encrypted(link) => link.try_read(into),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(link) => link.descriptor(),
            Self::Striped(link) => link.descriptor(),
            Self::Encrypted(link) => link.descriptor(),
        }
    }

    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Striped(link) => link.write_descriptor(),
            link => link.descriptor(),
        }
    }

    fn has_unsent(&self) -> bool {
        match self {
            Self::Plain(link) => link.has_unsent(),
            Self::Striped(link) => link.has_unsent(),
            Self::Encrypted(link) => link.has_unsent(),
        }
    }
}
