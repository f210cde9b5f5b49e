//! A store inside one process, for ranks that are threads.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::limits::{check_key, check_keys, check_pair};
use super::store::{self, Store};
use super::table::{Refusal, Table};
use crate::base::deadline::Deadline;
use crate::error::{Error, Result};

/// A store in the memory of this process. Clones share their content.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collectives::store::{MemoryStore, Store};
///
/// # fn main() -> collectives::Result<()> {
/// let store = MemoryStore::new();
/// let other = store.clone();
/// let reader = std::thread::spawn(move || other.get("answer", Duration::from_secs(10)));
/// store.set("answer", b"42")?;
/// assert_eq!(reader.join().unwrap()?, b"42");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

/// State shared by clones: the table, and a condition variable that is notified of changes.
#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
}

impl MemoryStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Locks the table. A panic cannot leave it half changed, so a poisoned lock can be used.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table and wakes all waiting callers.
    fn change<T>(&self, call: &'static str, change: impl FnOnce(&mut Table) -> std::result::Result<T, Refusal>) -> Result<T> {
        let result = change(&mut self.table());
        self.shared.changed.notify_all();
        result.map_err(|Refusal(reason)| Error::argument(call, reason))
    }

    /// Waits until `ready` returns something. Returns `None` once the deadline has passed.
    fn wait_until<T>(&self, deadline: &Deadline, mut ready: impl FnMut(&mut Table) -> Option<T>) -> Option<T> {
        let mut table = self.table();
        loop {
            if let Some(found) = ready(&mut table) {
                return Some(found);
            }
            if deadline.has_passed() {
                return None;
            }
            let waited = self.shared.changed.wait_timeout(table, deadline.remaining());
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes the error for keys that had not been set when the deadline passed.
    fn missing(&self, keys: &[&str], deadline: &Deadline) -> Error {
        let table = self.table();
        let missing: Vec<&str> = keys.iter().copied().filter(|key| !table.has(key.as_bytes())).collect();
        store::wait_timeout(&missing, keys.len(), deadline)
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("set", key, value)?;
        self.change("set", |table| table.set(key.as_bytes(), value.to_vec()))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key("get", key)?;
        let deadline = Deadline::after(timeout);
        let value = self.wait_until(&deadline, |table| table.value(key.as_bytes()).map(<[u8]>::to_vec));
        value.ok_or_else(|| self.missing(&[key], &deadline))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_key("add", key)?;
        self.change("add", |table| table.add(key.as_bytes(), delta))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        check_pair("compare_set", key, expected)?;
        check_pair("compare_set", key, desired)?;
        self.change("compare_set", |table| table.compare_set(key.as_bytes(), expected.to_vec(), desired.to_vec()))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        check_keys("wait", keys)?;
        let deadline = Deadline::after(timeout);
        let came = self.wait_until(&deadline, |table| keys.iter().all(|key| table.has(key.as_bytes())).then_some(()));
        came.ok_or_else(|| self.missing(keys, &deadline))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys("check", keys)?;
        let table = self.table();
        Ok(keys.iter().all(|key| table.has(key.as_bytes())))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        check_key("delete_key", key)?;
        Ok(self.table().delete(key.as_bytes()))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(i64::try_from(self.table().len()).unwrap_or(i64::MAX))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("append", key, value)?;
        self.change("append", |table| table.append(key.as_bytes(), value))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        check_keys("multi_get", keys)?;
        let deadline = Deadline::after(timeout);
        let values = self.wait_until(&deadline, |table| keys.iter().map(|key| table.value(key.as_bytes()).map(<[u8]>::to_vec)).collect());
        values.ok_or_else(|| self.missing(keys, &deadline))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| check_pair("multi_set", key, value))?;
        self.change("multi_set", |table| pairs.iter().try_for_each(|(key, value)| table.set(key.as_bytes(), value.to_vec())))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("queue_push", key, value)?;
        self.change("queue_push", |table| table.push(key.as_bytes(), value.to_vec()))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key("queue_pop", key)?;
        let deadline = Deadline::after(timeout);
        self.wait_until(&deadline, |table| table.pop(key.as_bytes())).ok_or_else(|| self.missing(&[key], &deadline))
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        check_key("queue_len", key)?;
        Ok(i64::try_from(self.table().queue_len(key.as_bytes())).unwrap_or(i64::MAX))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(self.table().keys().map(|key| String::from_utf8_lossy(key).into_owned()).collect())
    }
}
