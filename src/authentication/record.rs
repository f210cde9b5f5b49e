//! An encrypted stream is cut into records: two bytes with the length of what follows, and a message of the [`Cipher`]. Pure bytes.
//!
//! The length is not encrypted, and need not be protected: a message of another length is not opened. A record without content is never sent,
//! and refused.

use std::io;

use super::noise::{Cipher, MESSAGE_BYTES, TAG_BYTES};

/// The most content of one record.
pub(crate) const CONTENT_BYTES: usize = MESSAGE_BYTES - TAG_BYTES;
/// The length of a record of that size.
pub(crate) const RECORD_BYTES: usize = LENGTH_BYTES + MESSAGE_BYTES;
const LENGTH_BYTES: usize = 2;

/// Appends `plain` in as few records as hold it.
pub(crate) fn seal(cipher: &mut Cipher, plain: &[u8], into: &mut Vec<u8>) -> io::Result<()> {
    for content in plain.chunks(CONTENT_BYTES) {
        let message = content.len() + TAG_BYTES;
        into.extend((message as u16).to_be_bytes());
        let at = into.len();
        into.resize(at + message, 0);
        cipher.seal(content, &mut into[at..])?;
    }
    Ok(())
}

/// The message of the record that `bytes` begin with, and the record's length; `None` where it is not whole yet.
pub(crate) fn front(bytes: &[u8]) -> io::Result<Option<(&[u8], usize)>> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes(*length));
    if length <= TAG_BYTES {
        return Err(forged());
    }
    Ok(rest.get(..length).map(|message| (message, LENGTH_BYTES + length)))
}

/// What a stream fails with whose bytes are not those that the other end sent.
pub(crate) fn forged() -> io::Error {
    let words = "what came is not what was sent: bytes were changed, lost, repeated or added on their way, or are not the other end's";
    io::Error::new(io::ErrorKind::InvalidData, words)
}

/// Both directions of an encrypted stream, for bytes that come and go in buffers of their own.
#[derive(Debug)]
pub(crate) struct Records {
    cipher: Cipher,
    /// The beginning of a record; never more than one.
    begun: Vec<u8>,
}

impl Records {
    pub(crate) fn new(cipher: Cipher) -> Self {
        Self { cipher, begun: Vec::new() }
    }

    /// How much has come of a record that is not whole.
    #[cfg(all(feature = "__internals", feature = "encryption"))]
    pub(crate) fn begun(&self) -> usize {
        self.begun.len()
    }

    /// Appends `plain`, sealed.
    pub(crate) fn seal(&mut self, plain: &[u8], into: &mut Vec<u8>) -> io::Result<()> {
        seal(&mut self.cipher, plain, into)
    }

    /// Takes in what came, and appends the content of whole records. After an error nothing more is opened.
    pub(crate) fn open(&mut self, bytes: &[u8], plain: &mut Vec<u8>) -> io::Result<()> {
        self.begun.extend_from_slice(bytes);
        let mut used = 0;
        while let Some((message, length)) = front(&self.begun[used..])? {
            let at = plain.len();
            plain.resize(at + message.len(), 0);
            let opened = self.cipher.open(message, &mut plain[at..]);
            plain.truncate(at + opened.unwrap_or(0));
            opened.ok_or_else(forged)?;
            used += length;
        }
        self.begun.drain(..used);
        if self.begun.is_empty() {
            self.begun = Vec::new();
        }
        Ok(())
    }
}
