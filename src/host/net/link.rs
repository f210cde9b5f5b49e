//! A link to one peer over TCP, plain or encrypted, as the two ends agreed when they authenticated.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

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
    /// The ports on which this rank may listen; `None` for all.
    pub(crate) ports: Option<PortRange>,
}

/// A connection to a peer. It never blocks.
#[derive(Debug)]
pub(crate) enum Link {
    Plain(TcpLink),
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
            Self::Encrypted(link) => link.below().as_fd(),
        }
    }
}

impl ByteLink for Link {
    #[inline]
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(link) => link.try_write(parts),
            Self::Encrypted(link) => link.try_write(parts),
        }
    }

    #[inline]
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(link) => link.try_read(into),
            Self::Encrypted(link) => link.try_read(into),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(link) => link.descriptor(),
            Self::Encrypted(link) => link.descriptor(),
        }
    }

    fn has_unsent(&self) -> bool {
        match self {
            Self::Plain(link) => link.has_unsent(),
            Self::Encrypted(link) => link.has_unsent(),
        }
    }
}
