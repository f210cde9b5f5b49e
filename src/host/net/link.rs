//! A link to one peer over TCP, in plain or encrypted: what the two ends agreed on when they proved themselves.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::tcp::TcpLink;
use crate::authentication::{Cipher, Secret};
use crate::host::encrypted::EncryptedLink;
use crate::host::link::ByteLink;

/// What all connections of a rank to its peers keep to.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    /// What peers have to know.
    pub(crate) secret: Option<Secret>,
    /// How long a peer's host may leave what it is sent unanswered; zero: for ever.
    pub(crate) silence_timeout: Duration,
}

/// A connection to a peer. It never blocks.
#[derive(Debug)]
pub(crate) enum Link {
    Plain(TcpLink),
    Encrypted(Box<EncryptedLink<TcpLink>>),
}

impl Link {
    /// Takes over a connection that was prepared ([`super::tcp::prepare`]) and does not block, encrypted where there are keys.
    pub(super) fn new(stream: TcpStream, cipher: Option<Cipher>, terms: &Terms) -> Self {
        let link = TcpLink::new(stream, terms.silence_timeout);
        match cipher {
            None => Self::Plain(link),
            Some(cipher) => Self::Encrypted(Box::new(EncryptedLink::new(link, cipher))),
        }
    }

    /// Whether all of a few words could be sent, which fit into a send buffer that is as good as empty.
    pub(super) fn say(&mut self, words: &[u8]) -> io::Result<()> {
        match self.try_write(&[IoSlice::new(words)])? {
            written if written == words.len() => Ok(()),
            written => Err(io::Error::other(format!("only {written} of {} bytes could be sent", words.len()))),
        }
    }
}

impl AsFd for Link {
    /// The connection, whether or not something was read ahead.
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
}
