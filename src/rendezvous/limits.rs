//! Limits on keys, values and requests, checked before memory is allocated for them.

use crate::error::{Error, Result};

/// The longest key, in bytes, including the prefixes that stores add. PyTorch's server has the same limit.
pub(super) const KEY_BYTES: usize = 8 << 10;
/// The longest value, in bytes. PyTorch's server has the same limit.
pub(super) const VALUE_BYTES: usize = 8 << 20;
/// The largest number of keys in one request. PyTorch's server has the same limit.
pub(super) const KEYS: usize = 128 << 10;
/// The longest request or reply, in bytes. PyTorch has no such limit. This one keeps a request of many long values
/// from filling the server's memory.
pub(super) const MESSAGE_BYTES: usize = 64 << 20;
/// The largest total size of the keys and values in one table, in bytes.
pub(super) const TABLE_BYTES: usize = 1 << 30;

/// Refuses a key that no server would accept. One byte is reserved for the slash that stores add.
pub(super) fn check_key(call: &'static str, key: &str) -> Result<()> {
    if key.len() < KEY_BYTES {
        return Ok(());
    }
    let begin: String = key.chars().take(40).collect();
    Err(Error::argument(call, format!("the key {begin:?}… has {} bytes, but the limit is {}", key.len(), KEY_BYTES - 1)))
}

/// Refuses a value that no server would accept.
pub(super) fn check_value(call: &'static str, key: &str, value: &[u8]) -> Result<()> {
    if value.len() <= VALUE_BYTES {
        return Ok(());
    }
    Err(Error::argument(call, format!("the value for {key:?} has {} bytes, but the limit is {VALUE_BYTES}", value.len())))
}

/// Checks a key and its value.
pub(super) fn check_pair(call: &'static str, key: &str, value: &[u8]) -> Result<()> {
    check_key(call, key)?;
    check_value(call, key, value)
}

/// Checks several keys and their number.
pub(super) fn check_keys(call: &'static str, keys: &[&str]) -> Result<()> {
    if keys.len() > KEYS {
        return Err(Error::argument(call, format!("{} keys in one call, but the limit is {KEYS}", keys.len())));
    }
    keys.iter().try_for_each(|key| check_key(call, key))
}
