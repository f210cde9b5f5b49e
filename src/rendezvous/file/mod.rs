//! A store in a file, for ranks that share a file system.

mod log;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::log::Opened;
pub(super) use self::log::{Access, Log};
use super::limits::{VALUE_BYTES, check_key, check_keys, check_pair};
use super::store::{self, Store};
use super::table::{Refusal, parse_number};
use super::tcp::Backoff;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::file_store::{CLOSING, KEY_PAUSES};
use crate::error::{Error, Result};

/// The prefix of users' keys.
const USER: &str = "/";
/// The key that counts the stores open on the file.
const OPENED: &[u8] = b"refcount/";
/// The key that counts the stores that have been closed.
const CLOSED: &[u8] = b"cleanup/";

/// A store in a file that all ranks can reach, in the format of PyTorch's `FileStore`.
///
/// The file is a log, to which every change is appended under a lock (`flock`). So the file system must support such
/// locks. A wait polls the file, with pauses of up to 20 ms.
///
/// If a world size is given, the file is removed when the last of that many stores is dropped. A store and its clones
/// are one store in this respect. A run that crashes leaves its file behind. Remove this file before the next run with
/// the same path, or use a new path for each run.
///
/// There are no queues. For queues, use a [`TcpStore`](crate::store::TcpStore) or a
/// [`MemoryStore`](crate::store::MemoryStore). [`num_keys`](Store::num_keys) also counts the store's own keys, in which
/// it records how many stores are open.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collectives::store::{FileStore, Store};
///
/// # fn main() -> collectives::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("store");
/// let store = FileStore::open(&path, Some(1), Duration::from_secs(10))?;
/// store.set("key", b"value")?;
/// assert_eq!(store.get("key", Duration::ZERO)?, b"value");
/// drop(store);
/// assert!(!path.exists());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct FileStore {
    shared: Arc<Shared>,
}

/// Keys and values to append to the file.
type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// State shared by clones.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    world_size: Option<usize>,
    timeout: Duration,
    log: Mutex<Log>,
}

impl FileStore {
    /// Opens the file at `path`, and creates it if it is absent.
    ///
    /// `world_size` is the total number of stores that will be opened on the file. The file is removed when the last of
    /// these stores is dropped. With `None`, the file is kept. `timeout` limits the wait for the file's lock.
    ///
    /// # Errors
    ///
    /// - [`Error::Config`]: an earlier run left the file behind. The store concludes this if a store on the file has
    ///   already been closed, or if more than `world_size` stores are open on it.
    /// - [`Error::Protocol`]: the file is not a store.
    /// - [`Error::Io`], [`Error::Timeout`]: the file cannot be opened or locked.
    pub fn open(path: impl Into<PathBuf>, world_size: Option<usize>, timeout: Duration) -> Result<Self> {
        let path = path.into();
        let mut log = Log::default();
        let deadline = Deadline::after(timeout);
        let mut file = log.open(&path, Access::Write, &deadline)?.present(&path)?;
        let opened = own_counter(&log, OPENED, &path)?.saturating_add(1);
        if let Some(size) = world_size {
            let closed = own_counter(&log, CLOSED, &path)?;
            if closed > 0 || usize::try_from(opened).is_ok_and(|opened| opened > size) {
                let reason = format!(
                    "an earlier run left this file behind ({opened} stores are open on it, but at most {size} are expected, and {closed} \
                     have been closed); remove it, or use a new path for each run"
                );
                return Err(Error::config(format!("store file {path:?}"), reason));
            }
        }
        log.append(&mut file, &path, &[(OPENED, opened.to_string().as_bytes())])?;
        drop(file);
        Ok(Self { shared: Arc::new(Shared { path, world_size, timeout, log: Mutex::new(log) }) })
    }
}

impl Shared {
    /// Locks the content known so far. No code that holds the lock panics in the middle of a change.
    fn log(&self) -> event::Locked<'_, Log> {
        event::lock(&self.log)
    }

    /// Runs `change` on the file's content under the exclusive lock, and appends the records that it returns.
    fn change<T>(&self, change: impl FnOnce(&Log) -> Result<(T, Records)>) -> Result<T> {
        let mut log = self.log();
        let mut file = log.open(&self.path, Access::Write, &Deadline::after(self.timeout))?.present(&self.path)?;
        let (result, records) = change(&log)?;
        let records: Vec<(&[u8], &[u8])> = records.iter().map(|(key, value)| (key.as_slice(), value.as_slice())).collect();
        log.append(&mut file, &self.path, &records)?;
        Ok(result)
    }

    /// Runs `look` on the file's current content. A missing file counts as empty.
    fn look<T>(&self, look: impl FnOnce(&Log) -> T) -> Result<T> {
        let mut log = self.log();
        match log.open(&self.path, Access::Read, &Deadline::after(self.timeout))? {
            Opened::File(_) => Ok(look(&log)),
            Opened::Absent => Ok(look(&Log::default())),
        }
    }

    /// Polls until `ready` returns something. Returns `None` once the deadline has passed.
    fn poll<T>(&self, deadline: &Deadline, ready: impl Fn(&Log) -> Option<T>) -> Result<Option<T>> {
        let mut backoff = Backoff::new(KEY_PAUSES.0, KEY_PAUSES.1);
        loop {
            let found = self.look(&ready)?;
            if found.is_some() || deadline.has_passed() {
                return Ok(found);
            }
            backoff.pause(deadline);
        }
    }

    /// Makes the error for keys that had not been set when the deadline passed.
    fn missing(&self, keys: &[&str], deadline: &Deadline) -> Error {
        let missing: Result<Vec<&str>> = self.look(|log| keys.iter().copied().filter(|key| log.value(&user(key)).is_none()).collect());
        missing.map_or_else(|error| error, |missing| store::wait_timeout(&missing, keys.len(), deadline))
    }

    /// Counts this store as closed, and removes the file if it was the last.
    fn leave(&self) -> Result<()> {
        let mut log = self.log();
        let Opened::File(mut file) = log.open(&self.path, Access::Existing, &Deadline::after(CLOSING))? else { return Ok(()) };
        let closed = own_counter(&log, CLOSED, &self.path)?.saturating_add(1);
        let opened = own_counter(&log, OPENED, &self.path)?.saturating_sub(1);
        let counts = [(CLOSED, closed.to_string()), (OPENED, opened.to_string())];
        log.append(&mut file, &self.path, &[(counts[0].0, counts[0].1.as_bytes()), (counts[1].0, counts[1].1.as_bytes())])?;
        let all = self.world_size.is_some_and(|size| usize::try_from(closed).is_ok_and(|closed| closed >= size));
        if all && opened <= 0 {
            std::fs::remove_file(&self.path).map_err(|error| Error::io(format!("removing the store file {:?}", self.path), error))?;
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            event::warn!(path = %self.path.display(), %error, "could not close the store file cleanly");
        }
    }
}

/// Returns a user's key as it is written in the file.
fn user(key: &str) -> Vec<u8> {
    [USER.as_bytes(), key.as_bytes()].concat()
}

/// Returns the value of a counter; 0 if it is absent or empty.
fn counter(log: &Log, key: &[u8]) -> std::result::Result<i64, Refusal> {
    let value = log.value(key).filter(|value| !value.is_empty());
    value.map_or(Ok(0), |value| parse_number(key, value))
}

/// Returns a counter of the store itself.
fn own_counter(log: &Log, key: &[u8], path: &Path) -> Result<i64> {
    counter(log, key).map_err(|Refusal(reason)| Error::Protocol { with: format!("the store file {path:?}"), reason })
}

/// Makes the error for queue calls.
fn no_queues(what: &str, path: &Path) -> Error {
    Error::Unsupported {
        what: format!("{what} on the store file {path:?}"),
        reason: "a file store has no queues, as in PyTorch; use a TcpStore or a MemoryStore".to_owned(),
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("set", key, value)?;
        self.shared.change(|_| Ok(((), vec![(user(key), value.to_vec())])))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key("get", key)?;
        let deadline = Deadline::after(timeout);
        let value = self.shared.poll(&deadline, |log| log.value(&user(key)).map(<[u8]>::to_vec))?;
        value.ok_or_else(|| self.shared.missing(&[key], &deadline))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_key("add", key)?;
        let key = user(key);
        self.shared.change(|log| {
            let old = counter(log, &key).map_err(|Refusal(reason)| Error::argument("add", reason))?;
            let sum = old.checked_add(delta).ok_or_else(|| Error::argument("add", format!("{old} + {delta} does not fit in 64 bits")))?;
            Ok((sum, vec![(key.clone(), sum.to_string().into_bytes())]))
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        check_pair("compare_set", key, expected)?;
        check_pair("compare_set", key, desired)?;
        let key = user(key);
        self.shared.change(|log| match log.value(&key) {
            None if !expected.is_empty() => Ok((expected.to_vec(), Vec::new())),
            Some(value) if value != expected => Ok((value.to_vec(), Vec::new())),
            _ => Ok((desired.to_vec(), vec![(key.clone(), desired.to_vec())])),
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        check_keys("wait", keys)?;
        let deadline = Deadline::after(timeout);
        let all = |log: &Log| keys.iter().all(|key| log.value(&user(key)).is_some()).then_some(());
        self.shared.poll(&deadline, all)?.ok_or_else(|| self.shared.missing(keys, &deadline))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys("check", keys)?;
        self.shared.look(|log| keys.iter().all(|key| log.value(&user(key)).is_some()))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        check_key("delete_key", key)?;
        let key = user(key);
        self.shared.change(|log| match log.value(&key) {
            Some(_) => Ok((true, vec![([b"-", key.as_slice()].concat(), Vec::new())])),
            None => Ok((false, Vec::new())),
        })
    }

    fn num_keys(&self) -> Result<i64> {
        self.shared.look(|log| i64::try_from(log.keys().count()).unwrap_or(i64::MAX))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("append", key, value)?;
        let name = user(key);
        self.shared.change(|log| {
            let joined = [log.value(&name).unwrap_or_default(), value].concat();
            if joined.len() > VALUE_BYTES {
                let reason = format!("the value for {key:?} would have {} bytes, but the limit is {VALUE_BYTES}", joined.len());
                return Err(Error::argument("append", reason));
            }
            Ok(((), vec![(name.clone(), joined)]))
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        check_keys("multi_get", keys)?;
        let deadline = Deadline::after(timeout);
        let all = |log: &Log| keys.iter().map(|key| log.value(&user(key)).map(<[u8]>::to_vec)).collect();
        self.shared.poll(&deadline, all)?.ok_or_else(|| self.shared.missing(keys, &deadline))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| check_pair("multi_set", key, value))?;
        self.shared.change(|_| Ok(((), pairs.iter().map(|(key, value)| (user(key), value.to_vec())).collect())))
    }

    fn queue_push(&self, _key: &str, _value: &[u8]) -> Result<()> {
        Err(no_queues("queue_push", &self.shared.path))
    }

    fn queue_pop(&self, _key: &str, _timeout: Duration) -> Result<Vec<u8>> {
        Err(no_queues("queue_pop", &self.shared.path))
    }

    fn queue_len(&self, _key: &str) -> Result<i64> {
        Err(no_queues("queue_len", &self.shared.path))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.shared.look(|log| {
            log.keys().filter_map(|key| key.strip_prefix(USER.as_bytes())).map(|key| String::from_utf8_lossy(key).into_owned()).collect()
        })
    }
}
