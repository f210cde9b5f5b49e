//! Invariants for any bytes that arrive on an encrypted link.

use std::io::{ErrorKind, IoSlice};

use super::EncryptedLink;
use crate::authentication::fuzz::connected;
use crate::host::link::{ByteLink, script::Script};

/// Delivers any bytes on an encrypted link, a few at a time: none of them is read, and what this end writes is still
/// sent.
pub fn encrypted_link(data: &[u8]) {
    let [near, _] = connected();
    let jitter = data.first().map_or(0, |byte| u64::from(*byte));
    let mut link = EncryptedLink::new(Script::new(data, None, jitter), near);
    let mut into = [0; 300];
    let words = IoSlice::new(b"what this end says");
    for _ in 0..2 {
        let error = link.try_read(&mut into).expect_err("bytes were read that no peer sent");
        assert!(matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof), "{error}");
    }
    let mut written = 0;
    while written < words.len() {
        match link.try_write(&[IoSlice::new(&words[written..])]) {
            Ok(count) => written += count,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
    assert!(link.below.taken.len() == words.len() + 18, "a record, whole");
    assert!(into == [0; 300], "bytes that no peer sent");
}

/// Returns seed inputs.
pub(in crate::host) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    vec![("encrypted_link", [&[0, 19][..], &[0; 19]].concat()), ("encrypted_link", [&[9, 0xff][..], &[1; 4000]].concat())]
}
