//! Replaces `noise.rs` in a build that cannot encrypt, with types that have no values. A request for encryption fails
//! before a value is needed ([`super::Secret::encrypting`]).

use std::io;

use super::frame::Word;

pub(super) const IS_HERE: bool = false;
pub(super) const HANDSHAKE_BYTES: usize = 48;
pub(crate) const TAG_BYTES: usize = 16;
pub(crate) const MESSAGE_BYTES: usize = 65_535;

pub(super) type HandshakeMessage = [u8; HANDSHAKE_BYTES];

/// A handshake, which cannot begin.
pub(super) enum Handshake {}

impl Handshake {
    pub(super) fn begin(_: &Word, _: &[u8]) -> io::Result<(Self, HandshakeMessage)> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this build cannot encrypt"))
    }

    pub(super) fn finish(self, _: &HandshakeMessage) -> Option<Cipher> {
        match self {}
    }

    pub(super) fn answer(_: &Word, _: &[u8], _: &HandshakeMessage) -> Option<(Cipher, HandshakeMessage)> {
        None
    }
}

/// Keys, which cannot exist.
#[derive(Debug)]
pub(crate) enum Cipher {}

impl Cipher {
    pub(crate) fn seal(&mut self, _: &[u8], _: &mut [u8]) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn open(&mut self, _: &[u8], _: &mut [u8]) -> Option<usize> {
        match *self {}
    }
}
