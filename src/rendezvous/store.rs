//! The interface of every store: keys, values, counters, queues, and waits with a timeout.

use std::time::Duration;

use super::limits;
use crate::base::deadline::Deadline;
use crate::error::{Error, Result};

/// A small key-value store shared by the ranks of a job, with the semantics of `torch.distributed.Store`.
///
/// A key is a text of at most 8 KiB, and a value has at most 8 MiB. A store keeps the numbers of [`add`](Store::add) as
/// decimal text, so [`get`](Store::get) of a counter returns text such as `b"42"`. Any thread can call any method.
///
/// A store is for start-up, and for small agreements between ranks. It is not fast, and its contents are not secret.
///
/// # Errors
///
/// Every call fails with [`Error::InvalidArgument`] if a key or value is too long, and with [`Error::Io`] or
/// [`Error::Protocol`] if the server or the file behind the store fails or returns invalid data. A call that takes a
/// `timeout` fails with [`Error::Timeout`] once this time has passed. The error's field `doing` names the keys that
/// were still missing. With a timeout of zero, a call checks once and does not wait.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collectives::store::{MemoryStore, Store};
///
/// # fn main() -> collectives::Result<()> {
/// let store = MemoryStore::new();
/// store.set("greeting", b"hello")?;
/// assert_eq!(store.get("greeting", Duration::ZERO)?, b"hello");
/// assert_eq!(store.add("counter", 3)?, 3);
/// assert!(store.get("nothing", Duration::ZERO).unwrap_err().is_timeout());
/// # Ok(())
/// # }
/// ```
pub trait Store: Send + Sync {
    /// Sets `key` to `value`, and wakes the callers that wait for `key`.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists, and then returns its value.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the number at `key` (0 if absent) and returns the sum.
    ///
    /// # Errors
    ///
    /// The errors that [`Store`] lists, and an error if the value at `key` is not a decimal number, or if the sum
    /// exceeds the range of `i64`. The server of a TCP store can report this error only by closing the connection,
    /// which makes the [`TcpStore`](crate::store::TcpStore) unusable.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Sets `key` to `desired` if the current value of `key` is `expected`. Returns the value that `key` then has.
    ///
    /// If the key is absent, and `expected` is empty, the method sets the key. If the key is absent, and `expected` is
    /// not empty, the method sets nothing and returns `expected`, as PyTorch's stores do, although the key does not
    /// exist.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until every one of `keys` exists, as a value or as a queue that is not empty.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Returns whether every one of `keys` exists now, as a value or as a queue that is not empty.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Deletes `key`, and returns whether it existed. Does not wake callers that wait for `key`.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// Returns the number of all keys, including keys with other prefixes and the store's own keys, but not queues.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn num_keys(&self) -> Result<i64>;

    /// Appends `value` to the value of `key`. Sets `key` to `value` if `key` is absent.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until every one of `keys` exists, and then returns their values in the order of `keys`.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Sets several keys in one request.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()>;

    /// Appends `value` to the queue `key`.
    ///
    /// # Errors
    ///
    /// The errors that [`Store`] lists, and [`Error::Unsupported`] if the store has no queues.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until the queue `key` is not empty, and then takes and returns its first value.
    ///
    /// # Errors
    ///
    /// The errors that [`Store`] lists, and [`Error::Unsupported`] if the store has no queues.
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Returns the number of values in the queue `key`; 0 if there is no such queue.
    ///
    /// # Errors
    ///
    /// The errors that [`Store`] lists, and [`Error::Unsupported`] if the store has no queues.
    fn queue_len(&self, key: &str) -> Result<i64>;

    /// Returns the keys that were set through this store, without queues, in no particular order.
    ///
    /// # Errors
    ///
    /// See [`Store`].
    fn list_keys(&self) -> Result<Vec<String>>;

    /// Waits until `world_size` callers have reached the barrier `key`.
    ///
    /// The key holds a counter that is never reset, so every barrier needs its own key. A caller that times out stays
    /// counted.
    ///
    /// # Errors
    ///
    /// The errors that [`Store`] lists, and [`Error::InvalidArgument`] if `world_size` is 0.
    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        check_barrier(key, world_size)?;
        let deadline = Deadline::after(timeout);
        let last = format!("{key}:last_worker");
        let arrived = self.add(key, 1)?;
        if usize::try_from(arrived).is_ok_and(|arrived| arrived >= world_size) {
            return self.set(&last, b"1");
        }
        self.wait(&[&last], deadline.remaining()).map_err(|error| match error {
            Error::Timeout { .. } => barrier_timeout(key, world_size, self.add(key, 0).ok(), &deadline),
            other => other,
        })
    }
}

/// Checks the arguments of a barrier.
pub(super) fn check_barrier(key: &str, world_size: usize) -> Result<()> {
    limits::check_key("barrier", key)?;
    if world_size == 0 {
        return Err(Error::argument("barrier", format!("the world size of the barrier {key:?} is 0")));
    }
    Ok(())
}

/// Makes the error of a barrier that timed out; `arrived` is the number of callers that had reached it, if known.
pub(super) fn barrier_timeout(key: &str, world_size: usize, arrived: Option<i64>, deadline: &Deadline) -> Error {
    let arrived = arrived.map_or_else(|| "an unknown number".to_owned(), |arrived| arrived.to_string());
    timeout(format!("waiting at the store's barrier {key:?} (reached by {arrived} of {world_size} ranks)"), deadline)
}

/// The keys that a store lacks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Missing<'a> {
    /// Keys that do not exist, in order.
    pub(crate) absent: Vec<&'a str>,
    /// Keys whose state was not determined, in order.
    pub(crate) unknown: Vec<&'a str>,
}

impl<'a> Missing<'a> {
    /// Returns the absent keys, then the unknown ones, each in order.
    pub(super) fn in_order(self) -> Vec<&'a str> {
        [self.absent, self.unknown].concat()
    }
}

/// Finds which of `keys` are missing by asking whether all keys of a set exist. To find one missing key of `n`, it
/// asks 2 log₂ `n` times. It stops asking once `may_ask` returns `false`.
pub(crate) fn missing<'a>(
    keys: &[&'a str],
    may_ask: &mut dyn FnMut() -> bool,
    all_there: &mut dyn FnMut(&[&str]) -> Result<bool>,
) -> Result<Missing<'a>> {
    let mut missing = Missing::default();
    find_missing(keys, false, &mut missing, may_ask, all_there)?;
    Ok(missing)
}

/// Finds the missing keys like [`missing`], but only among a part of the keys. If `lacks_one` is true, at least one of
/// `keys` is known to be missing.
fn find_missing<'a>(
    keys: &[&'a str],
    lacks_one: bool,
    missing: &mut Missing<'a>,
    may_ask: &mut dyn FnMut() -> bool,
    all_there: &mut dyn FnMut(&[&str]) -> Result<bool>,
) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    if !lacks_one {
        if !may_ask() {
            missing.unknown.extend(keys);
            return Ok(());
        }
        if all_there(keys)? {
            return Ok(());
        }
    }
    if let [key] = keys {
        missing.absent.push(key);
        return Ok(());
    }
    let (left, right) = keys.split_at(keys.len() / 2);
    let before = missing.absent.len() + missing.unknown.len();
    find_missing(left, false, missing, may_ask, all_there)?;
    let is_left_whole = missing.absent.len() + missing.unknown.len() == before;
    find_missing(right, is_left_whole, missing, may_ask, all_there)
}

/// Makes the error of a wait for `keys` keys that timed out; it names the missing ones.
pub(super) fn wait_timeout(missing: &[&str], keys: usize, deadline: &Deadline) -> Error {
    const NAMED: usize = 16;
    let named = missing.iter().take(NAMED).map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ");
    let more = match missing.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let words = if missing.is_empty() {
        // The keys were set between the end of the wait and the check for missing keys.
        format!("waiting for {keys} keys of the store (the last key was set too late)")
    } else {
        format!("waiting for {keys} keys of the store ({} are missing: {named}{more})", missing.len())
    };
    timeout(words, deadline)
}

/// Makes a store's timeout error. A store knows keys, not ranks.
pub(super) fn timeout(doing: String, deadline: &Deadline) -> Error {
    Error::Timeout { doing, elapsed: deadline.elapsed(), missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    /// Returns the absent keys, the unknown keys and the number of questions, for keys of which some exist.
    fn found(there: &[bool], most: usize) -> (Vec<usize>, Vec<usize>, usize) {
        let names: Vec<String> = (0..there.len()).map(|key| key.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (mut left, mut asked) = (most, 0);
        let mut may_ask = || left.checked_sub(1).map(|rest| left = rest).is_some();
        let mut all_there = |keys: &[&str]| {
            asked += 1;
            Ok(keys.iter().all(|key| there[key.parse::<usize>().unwrap()]))
        };
        let Missing { absent, unknown } = missing(&names, &mut may_ask, &mut all_there).unwrap();
        let numbers = |keys: Vec<&str>| keys.into_iter().map(|key| key.parse().unwrap()).collect();
        (numbers(absent), numbers(unknown), asked)
    }

    #[test]
    fn what_is_missing_is_found_by_few_questions() {
        let mut random = Random(7);
        for keys in [0, 1, 2, 3, 64, 1000] {
            for of in [1, 2, 10, 1000] {
                let there: Vec<bool> = (0..keys).map(|_| random.below(of) != 0).collect();
                let expected: Vec<usize> = (0..keys).filter(|key| !there[*key]).collect();
                let (absent, unknown, asked) = found(&there, usize::MAX);
                assert_eq!((&absent, unknown.len()), (&expected, 0), "{keys} keys, one of {of} missing");
                let most = 1 + 2 * expected.len() * (keys.max(1).ilog2() as usize + 1);
                assert!(asked <= most.min(2 * keys + 1), "{asked} questions for {} of {keys} keys", expected.len());
                // If it stops early, its answer is still correct.
                let (absent, unknown, asked) = found(&there, random.below(40));
                assert!(asked < 40 && absent.iter().all(|key| !there[*key]));
                assert!(expected.iter().all(|key| absent.contains(key) || unknown.contains(key)));
            }
        }
    }
}
