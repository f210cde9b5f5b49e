//! A view of a store through a prefix, so that several users of one store do not collide.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::store::Store;
use crate::error::Result;

/// A store that adds a prefix and a slash to every key of another store.
///
/// If one `PrefixStore` wraps another, their prefixes are joined, and the prefix of the inner one comes first.
/// [`num_keys`](Store::num_keys) counts the keys of the whole store. [`list_keys`](Store::list_keys) lists only the
/// keys with the prefix.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use collectives::store::{MemoryStore, PrefixStore, Store};
///
/// # fn main() -> collectives::Result<()> {
/// let whole = Arc::new(MemoryStore::new());
/// let part = PrefixStore::new("job", whole.clone());
/// part.set("key", b"value")?;
/// assert_eq!(whole.get("job/key", Duration::ZERO)?, b"value");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PrefixStore {
    /// The prefix with its slash.
    prefix: String,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// Creates a view of `inner` through `prefix`.
    pub fn new(prefix: impl Into<String>, inner: Arc<dyn Store>) -> Self {
        Self { prefix: prefix.into() + "/", inner }
    }

    /// Returns the key in the inner store.
    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Returns several keys of the inner store.
    fn keys(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.key(key)).collect()
    }
}

impl fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// Borrows a list of keys in the form that [`Store`] takes.
fn borrow(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.get(&self.key(key), timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(&self.key(key), delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner.compare_set(&self.key(key), expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.inner.wait(&borrow(&self.keys(keys)), timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.inner.check(&borrow(&self.keys(keys)))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.inner.delete_key(&self.key(key))
    }

    fn num_keys(&self) -> Result<i64> {
        self.inner.num_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.append(&self.key(key), value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.inner.multi_get(&borrow(&self.keys(keys)), timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let pairs: Vec<(String, &[u8])> = pairs.iter().map(|(key, value)| (self.key(key), *value)).collect();
        self.inner.multi_set(&pairs.iter().map(|(key, value)| (key.as_str(), *value)).collect::<Vec<_>>())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.queue_push(&self.key(key), value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.queue_pop(&self.key(key), timeout)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.inner.queue_len(&self.key(key))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let keys = self.inner.list_keys()?;
        Ok(keys.iter().filter_map(|key| key.strip_prefix(&self.prefix)).map(str::to_owned).collect())
    }

    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        self.inner.barrier(&self.key(key), world_size, timeout)
    }
}
