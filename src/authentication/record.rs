//! The records of an encrypted stream: each consists of the length of a message, in two bytes, and the message, as the
//! [`Cipher`] sealed it. Bytes in, bytes out.
//!
//! The length is not encrypted and needs no protection: a message of a different length does not decrypt. An empty
//! record is never sent, and is refused.

use std::io;

use super::noise::{Cipher, MESSAGE_BYTES, TAG_BYTES};

/// The largest content of one record, in bytes.
pub(crate) const CONTENT_BYTES: usize = MESSAGE_BYTES - TAG_BYTES;
/// The length of a record with that content.
pub(crate) const RECORD_BYTES: usize = LENGTH_BYTES + MESSAGE_BYTES;
const LENGTH_BYTES: usize = 2;

/// Appends `plain` in as few records as possible.
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

/// Returns the message of the first record in `bytes`, and the record's length; `None` if it is incomplete.
pub(crate) fn front(bytes: &[u8]) -> io::Result<Option<(&[u8], usize)>> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes(*length));
    if length <= TAG_BYTES {
        return Err(forged());
    }
    Ok(rest.get(..length).map(|message| (message, LENGTH_BYTES + length)))
}

/// Makes the error of a stream whose bytes are not those that the other end sent.
pub(crate) fn forged() -> io::Error {
    let words =
        "the data received is not the data sent: bytes were changed, lost, repeated or added on the way, or come from another sender";
    io::Error::new(io::ErrorKind::InvalidData, words)
}

/// Both directions of an encrypted stream, for callers with their own buffers.
#[derive(Debug)]
pub(crate) struct Records {
    cipher: Cipher,
    /// The beginning of an incomplete record; never more than one.
    begun: Vec<u8>,
}

impl Records {
    pub(crate) fn new(cipher: Cipher) -> Self {
        Self { cipher, begun: Vec::new() }
    }

    /// Returns how many bytes of an incomplete record have arrived.
    #[cfg(all(feature = "__internals", feature = "encryption"))]
    pub(crate) fn begun(&self) -> usize {
        self.begun.len()
    }

    /// Appends `plain` as records.
    pub(crate) fn seal(&mut self, plain: &[u8], into: &mut Vec<u8>) -> io::Result<()> {
        seal(&mut self.cipher, plain, into)
    }

    /// Takes in received bytes, and appends the content of complete records. After an error nothing more is opened.
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
