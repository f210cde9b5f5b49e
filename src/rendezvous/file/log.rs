//! The store file: records appended under a lock, and an in-memory copy of those read so far.
//!
//! A record is a key and a value, each a 32-bit length and that many bytes. The last record of a key is valid. A
//! record whose key begins with `-` deletes the key that follows the `-`.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::FlockOperation;

use crate::base::deadline::Deadline;
use crate::base::regular_file;
use crate::base::tuning::file_store::LOCK_PAUSES;
use crate::error::{Error, Result};
use crate::rendezvous::limits::TABLE_BYTES;
use crate::rendezvous::store;
use crate::rendezvous::tcp::Backoff;

/// The access for which the file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rendezvous) enum Access {
    /// Reading, under a shared lock.
    Read,
    /// Writing, under an exclusive lock. If the file is absent, it is created.
    Write,
    /// Writing, under an exclusive lock, only if the file exists.
    Existing,
}

/// The outcome of opening the file.
#[derive(Debug)]
pub(in crate::rendezvous) enum Opened {
    /// The file exists. If the file was opened for writing, it stays locked until this value is dropped.
    File(File),
    /// The file does not exist.
    Absent,
}

impl Opened {
    /// Returns the file, or an error if it is absent.
    pub(in crate::rendezvous) fn present(self, path: &Path) -> Result<File> {
        match self {
            Self::File(file) => Ok(file),
            Self::Absent => Err(Error::io(format!("opening the store file {path:?}"), std::io::Error::from(ErrorKind::NotFound))),
        }
    }
}

/// The file's content as far as it has been read.
#[derive(Debug, Default)]
pub(in crate::rendezvous) struct Log {
    position: u64,
    values: HashMap<Vec<u8>, Vec<u8>>,
}

impl Log {
    /// Returns the value of a key.
    pub(in crate::rendezvous) fn value(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Returns all keys.
    pub(in crate::rendezvous) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    /// Opens and locks the file, and reads its new records.
    pub(in crate::rendezvous) fn open(&mut self, path: &Path, access: Access, deadline: &Deadline) -> Result<Opened> {
        let write = access != Access::Read;
        // Only this user may read what ranks write there.
        let mut options = OpenOptions::new();
        options.mode(0o600).read(true).write(write).create(access == Access::Write).truncate(false);
        let mut file = match regular_file::opened(path, &mut options) {
            Ok((file, _)) => file,
            Err(error) if error.kind() == ErrorKind::NotFound && access != Access::Write => return Ok(Opened::Absent),
            Err(error) => return Err(Error::io(format!("opening the store file {path:?}"), error)),
        };
        // If there is nothing new and nothing to write, no lock is needed.
        if !write && self.length(&file, path)? == self.position {
            return Ok(Opened::File(file));
        }
        lock(&file, path, write, deadline)?;
        self.refresh(&mut file, path)?;
        Ok(Opened::File(file))
    }

    /// Returns the length of the file.
    fn length(&self, file: &File, path: &Path) -> Result<u64> {
        let length = file.metadata().map_err(|error| Error::io(format!("reading the store file {path:?}"), error))?.len();
        if length < self.position {
            let reason = format!("it has {length} bytes and had {} before: it was replaced, perhaps by another run", self.position);
            return Err(malformed(path, reason));
        }
        Ok(length)
    }

    /// Reads the records added since the last time.
    fn refresh(&mut self, file: &mut File, path: &Path) -> Result<()> {
        let length = self.length(file, path)?;
        let more = length - self.position;
        if more > TABLE_BYTES as u64 {
            return Err(malformed(path, format!("{more} bytes to read, but the limit is {TABLE_BYTES}")));
        }
        let mut bytes = Vec::new();
        let read = file.seek(SeekFrom::Start(self.position)).and_then(|_| file.take(more).read_to_end(&mut bytes));
        read.map_err(|error| Error::io(format!("reading the store file {path:?}"), error))?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let record = text(rest).and_then(|(key, rest)| text(rest).map(|(value, behind)| (key, value, behind)));
            let Some((key, value, behind)) = record else {
                let reason = format!("an incomplete record at byte {} (its writer died, or this is not a store)", self.position);
                return Err(malformed(path, reason));
            };
            match key.strip_prefix(b"-") {
                Some(deleted) => drop(self.values.remove(deleted)),
                None => drop(self.values.insert(key.to_vec(), value.to_vec())),
            }
            self.position += (rest.len() - behind.len()) as u64;
            rest = behind;
        }
        Ok(())
    }

    /// Appends records to a file that was opened for writing.
    pub(in crate::rendezvous) fn append(&mut self, file: &mut File, path: &Path, records: &[(&[u8], &[u8])]) -> Result<()> {
        let mut bytes = Vec::new();
        for part in records.iter().flat_map(|(key, value)| [*key, *value]) {
            // The lengths of keys and values were checked against limits far below 32 bits.
            let length = u32::try_from(part.len()).map_err(|_| malformed(path, format!("a value of {} bytes is too long", part.len())))?;
            bytes.extend(length.to_le_bytes());
            bytes.extend_from_slice(part);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let written = file.seek(SeekFrom::Start(self.position)).and_then(|_| file.write_all(&bytes));
        if let Err(error) = written {
            // Half a record would make the file unusable for all ranks.
            let undone = file.set_len(self.position);
            let doing = format!("writing to the store file {path:?}{}", if undone.is_err() { ", which is now unusable" } else { "" });
            return Err(Error::io(doing, error));
        }
        self.refresh(file, path)
    }
}

/// Splits off a length and its bytes.
fn text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

/// Locks the file until it is closed. Polls instead of blocking, so that a process stopped while it holds the lock
/// cannot block the others forever.
fn lock(file: &File, path: &Path, exclusive: bool, deadline: &Deadline) -> Result<()> {
    let operation = if exclusive { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
    let mut backoff = Backoff::new(LOCK_PAUSES.0, LOCK_PAUSES.1);
    loop {
        match rustix::fs::flock(file.as_fd(), operation) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) if deadline.has_passed() => {
                return Err(store::timeout(format!("waiting for the lock on the store file {path:?}"), deadline));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => backoff.pause(deadline),
            Err(error) => return Err(Error::io(format!("locking the store file {path:?}"), error)),
        }
    }
}

/// Makes the error for a file that is not a valid store.
fn malformed(path: &Path, reason: String) -> Error {
    Error::Protocol { with: format!("the store file {path:?}"), reason }
}
