//! Files of a checkpoint: opened without waiting, read within bounds, written so that they stay.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::contents::FileEntry;
use super::header::{self, Header, LENGTH_BYTES};
use crate::error::{Error, Result};

/// A file whose bytes are not what they should be.
pub(super) fn malformed(path: &Path, reason: impl Into<String>) -> Error {
    Error::io(format!("reading {path:?}"), io::Error::new(ErrorKind::InvalidData, reason.into()))
}

/// An error of the system, with what was being done to what.
pub(super) fn failed(doing: &str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| Error::io(format!("{doing} {path:?}"), error)
}

/// Opens a file to read, and says how many bytes it has.
pub(super) fn open(path: &Path) -> Result<(File, u64)> {
    // A pipe of that name would have us wait for who writes to it.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed("opening", path))?;
    let metadata = file.metadata().map_err(failed("reading", path))?;
    if !metadata.is_file() {
        return Err(malformed(path, "it is not a regular file"));
    }
    Ok((file, metadata.len()))
}

/// The bytes of a file that has no more than `longest`.
pub(super) fn read_all(path: &Path, longest: u64) -> Result<Vec<u8>> {
    let (file, length) = open(path)?;
    if length > longest {
        return Err(malformed(path, format!("it has {length} bytes, {longest} are the most")));
    }
    let mut bytes = Vec::new();
    file.take(longest).read_to_end(&mut bytes).map_err(failed("reading", path))?;
    Ok(bytes)
}

/// The head of a safetensors file, and where the data begin behind it.
pub(super) fn read_header(path: &Path, entry: &FileEntry) -> Result<(u64, Header)> {
    let (mut file, length) = open(path)?;
    if let Some((expected, _)) = entry.expected.filter(|(expected, _)| *expected != length) {
        return Err(malformed(path, format!("it has {length} bytes, and the index says {expected}")));
    }
    let mut head = vec![0; LENGTH_BYTES];
    file.read_exact(&mut head).map_err(failed("reading", path))?;
    let first = head.first_chunk().copied().unwrap_or_default();
    let json = header::length(first, length).map_err(|reason| malformed(path, reason))?;
    let read = file.take(json as u64).read_to_end(&mut head).map_err(failed("reading", path))?;
    if read != json {
        return Err(malformed(path, "it became shorter while it was read"));
    }
    if entry.expected.is_some_and(|(_, digest)| digest != *Sha256::digest(&head)) {
        return Err(malformed(path, "its head is not the one that the index has the SHA-256 of"));
    }
    let data = length - head.len() as u64;
    let header = header::parse(&head[LENGTH_BYTES..], data).map_err(|reason| malformed(path, reason))?;
    Ok((head.len() as u64, header))
}

/// Writes a file that is not there yet, and returns when it is on the disk.
pub(super) fn write_new<'a>(path: &Path, parts: impl IntoIterator<Item = &'a [u8]>) -> Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path).map_err(failed("creating", path))?;
    parts.into_iter().try_for_each(|part| file.write_all(part)).map_err(failed("writing", path))?;
    file.sync_all().map_err(failed("syncing", path))
}

/// Returns when the names in a folder are on the disk.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed("syncing", path))
}
