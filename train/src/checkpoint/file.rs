//! Files of a checkpoint: opened without blocking, read within limits, and written durably.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::CWD;
use sha2::{Digest, Sha256};

use super::contents::FileEntry;
use super::header::{self, Header, LENGTH_BYTES};
use super::{index, regular_file};
use collectives::{Error, Result};

/// Returns the error for a file with invalid contents.
pub(super) fn malformed(path: &Path, reason: impl Into<String>) -> Error {
    Error::io(format!("reading {path:?}"), io::Error::new(ErrorKind::InvalidData, reason.into()))
}

/// Returns the error of the system, with the operation and its path.
pub(super) fn failed(doing: &str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| Error::io(format!("{doing} {path:?}"), error)
}

/// A handle to a folder, which stays valid if the folder is renamed. That happens when a step is saved again.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    handle: File,
}

impl Folder {
    /// Opens a folder.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let handle = File::open(path).map_err(failed("opening", path))?;
        Ok(Self { path: path.to_owned(), handle })
    }

    /// Returns its name at the time it was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a file in it, for errors.
    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file in it for reading, and returns its length in bytes.
    pub(super) fn file(&self, name: &str) -> Result<(File, u64)> {
        let (file, facts) = regular_file::open_in(&self.handle, name).map_err(failed("opening", &self.join(name)))?;
        Ok((file, facts.len()))
    }

    /// Returns the bytes of a file in it, if there are at most `longest`.
    pub(super) fn read_all(&self, name: &str, longest: u64) -> Result<Vec<u8>> {
        let opened = regular_file::open_in(&self.handle, name);
        opened.and_then(|opened| regular_file::whole(opened, longest)).map_err(failed("reading", &self.join(name)))
    }
}

/// Returns the bytes of a file, if there are at most `longest`.
pub(super) fn read_all(path: &Path, longest: u64) -> Result<Vec<u8>> {
    let opened = regular_file::open_in(CWD, path);
    opened.and_then(|opened| regular_file::whole(opened, longest)).map_err(failed("reading", path))
}

/// The most bytes of headers that one checkpoint keeps, for all files together. The index has the same limit, and a
/// tensor takes more bytes in the index than in a header.
const HEADS_TOGETHER: u64 = index::LONGEST;

/// The number of header bytes that a checkpoint has read.
#[derive(Debug, Default)]
pub(super) struct HeadBytes(AtomicU64);

impl HeadBytes {
    /// Counts one more header, if the limit allows it.
    fn add(&self, bytes: u64) -> std::result::Result<(), String> {
        let sum = |had: u64| had.checked_add(bytes).filter(|sum| *sum <= HEADS_TOGETHER);
        let added = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
        added.map(drop).map_err(|had| {
            format!(
                "the file's header has {bytes} bytes, and the other files' headers have {had}: \
                 the limit for all headers together is {HEADS_TOGETHER}"
            )
        })
    }
}

/// Returns the header of a safetensors file, and the offset of the data after it.
pub(super) fn read_header(folder: &Folder, entry: &FileEntry, read_before: &HeadBytes) -> Result<(u64, Header)> {
    let path = &*folder.join(&entry.name);
    let (mut file, length) = folder.file(&entry.name)?;
    if let Some((expected, _)) = entry.expected.filter(|(expected, _)| *expected != length) {
        return Err(malformed(path, format!("the file has {length} bytes, but the index lists {expected} bytes for it")));
    }
    let mut head = vec![0; LENGTH_BYTES];
    file.read_exact(&mut head).map_err(failed("reading", path))?;
    let first = head.first_chunk().copied().unwrap_or_default();
    let json = header::length(first, length).map_err(|reason| malformed(path, reason))?;
    read_before.add(json as u64).map_err(|reason| malformed(path, reason))?;
    let read = file.take(json as u64).read_to_end(&mut head).map_err(failed("reading", path))?;
    if read != json {
        return Err(malformed(path, "the file became shorter while it was read"));
    }
    if entry.expected.is_some_and(|(_, digest)| digest != *Sha256::digest(&head)) {
        return Err(malformed(path, "the file's header does not match the SHA-256 in the index"));
    }
    let data = length - head.len() as u64;
    let header = header::parse(&head[LENGTH_BYTES..], data).map_err(|reason| malformed(path, reason))?;
    Ok((head.len() as u64, header))
}

/// Writes a new file of a beginning and further parts, and returns when it is on the disk. Fails if a part is an error.
pub(super) fn write_new<B: AsRef<[u8]>>(path: &Path, head: &[u8], parts: impl IntoIterator<Item = Result<B>>) -> Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path).map_err(failed("creating", path))?;
    file.write_all(head).map_err(failed("writing", path))?;
    parts.into_iter().try_for_each(|part| file.write_all(part?.as_ref()).map_err(failed("writing", path)))?;
    file.sync_all().map_err(failed("syncing", path))
}

/// Returns when the names in a folder are on the disk.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed("syncing", path))
}
