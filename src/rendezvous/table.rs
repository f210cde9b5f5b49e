//! Keys, values and queues in memory, with PyTorch's rules, shared by the server and the in-process store. No call
//! here waits.

use std::collections::{HashMap, VecDeque};

use super::limits::{TABLE_BYTES, VALUE_BYTES};

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal(pub(super) String);

/// A key as it was sent, of arbitrary bytes.
pub(super) type Key = Vec<u8>;

/// Bytes that are counted for an entry in addition to its key and value, so that empty entries are not free. An entry
/// takes about this much more memory.
const ENTRY_BYTES: usize = 96;

/// Returns the bytes that are counted for an entry.
fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY_BYTES
}

/// The content of a store.
#[derive(Debug, Default)]
pub(super) struct Table {
    values: HashMap<Key, Vec<u8>>,
    queues: HashMap<Key, VecDeque<Vec<u8>>>,
    /// The total cost of all entries, limited so that no client can fill the memory.
    bytes: usize,
}

impl Table {
    /// Adds `more` bytes to the total, or refuses.
    fn reserve(&mut self, more: usize) -> Result<(), Refusal> {
        let bytes = self.bytes.saturating_add(more);
        if bytes > TABLE_BYTES {
            return Err(Refusal(format!(
                "the store is full: it holds {} bytes and cannot take {more} more, because the limit is {TABLE_BYTES}",
                self.bytes
            )));
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Sets a key.
    pub(super) fn set(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Refusal> {
        let old = self.values.get(key).map_or(0, |old| cost(key, old));
        self.bytes -= old;
        if let Err(refusal) = self.reserve(cost(key, &value)) {
            self.bytes += old;
            return Err(refusal);
        }
        match self.values.get_mut(key) {
            Some(slot) => *slot = value,
            None => drop(self.values.insert(key.to_vec(), value)),
        }
        Ok(())
    }

    /// Returns the value of a key.
    pub(super) fn value(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Adds to the decimal number at a key and returns the sum.
    pub(super) fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, Refusal> {
        let old = self.value(key).map_or(Ok(0), |value| parse_number(key, value))?;
        let sum = old
            .checked_add(delta)
            .ok_or_else(|| Refusal(format!("{old} + {delta} at key {:?} does not fit in 64 bits", String::from_utf8_lossy(key))))?;
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// Sets a key if it has the expected value. Returns the value that the key then has.
    pub(super) fn compare_set(&mut self, key: &[u8], expected: Vec<u8>, desired: Vec<u8>) -> Result<Vec<u8>, Refusal> {
        match self.value(key) {
            // An absent key counts as empty. If another value is expected, that value is returned, as in PyTorch.
            None if !expected.is_empty() => return Ok(expected),
            Some(value) if value != expected => return Ok(value.to_vec()),
            _ => {}
        }
        self.set(key, desired.clone())?;
        Ok(desired)
    }

    /// Appends to the value of a key.
    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let Some(old) = self.values.get(key) else { return self.set(key, value.to_vec()) };
        if old.len() + value.len() > VALUE_BYTES {
            let words =
                format!("appending {} bytes to the value of {} bytes at key {:?}", value.len(), old.len(), String::from_utf8_lossy(key));
            return Err(Refusal(format!("{words} would exceed the limit of {VALUE_BYTES}")));
        }
        self.reserve(value.len())?;
        if let Some(slot) = self.values.get_mut(key) {
            slot.extend_from_slice(value);
        }
        Ok(())
    }

    /// Whether a key exists, as a value or as a queue that is not empty.
    pub(super) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queue_len(key) > 0
    }

    /// Deletes a key and returns whether it existed.
    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.values.remove(key) else { return false };
        self.bytes -= cost(key, &value);
        true
    }

    /// Returns the number of keys, without queues.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns all keys, without queues.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.values.keys()
    }

    /// Appends a value to a queue.
    pub(super) fn push(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Refusal> {
        self.reserve(cost(key, &value))?;
        self.queues.entry(key.to_vec()).or_default().push_back(value);
        Ok(())
    }

    /// Takes the first value of a queue.
    pub(super) fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(key);
        }
        self.bytes -= cost(key, &value);
        Some(value)
    }

    /// Returns the number of values in a queue.
    pub(super) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }
}

/// Parses the decimal number that is a counter's value.
pub(super) fn parse_number(key: &[u8], value: &[u8]) -> Result<i64, Refusal> {
    std::str::from_utf8(value).ok().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
        let begin = &value[..value.len().min(40)];
        Refusal(format!("the value {:?} at key {:?} is not a decimal number", String::from_utf8_lossy(begin), String::from_utf8_lossy(key)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_decimal_text() {
        let mut table = Table::default();
        assert_eq!(table.add(b"n", 5), Ok(5));
        assert_eq!(table.add(b"n", -12), Ok(-7));
        assert_eq!(table.value(b"n"), Some(&b"-7"[..]));
        table.set(b"t", b"12x".to_vec()).unwrap();
        assert!(table.add(b"t", 1).unwrap_err().0.contains("12x"));
        table.set(b"m", i64::MAX.to_string().into_bytes()).unwrap();
        assert!(table.add(b"m", 1).is_err());
        assert_eq!(table.value(b"m"), Some(i64::MAX.to_string().as_bytes()));
    }

    #[test]
    fn compare_set_follows_the_rules_for_absent_keys() {
        let mut table = Table::default();
        let mut compare_set = |expected: &str, desired: &str| {
            let is = table.compare_set(b"k", expected.into(), desired.into()).unwrap();
            (String::from_utf8(is).unwrap(), table.value(b"k").map(<[u8]>::to_vec))
        };
        assert_eq!(compare_set("a", "b"), ("a".to_owned(), None));
        assert_eq!(compare_set("", "b"), ("b".to_owned(), Some(b"b".to_vec())));
        assert_eq!(compare_set("", "c"), ("b".to_owned(), Some(b"b".to_vec())));
        assert_eq!(compare_set("b", "c"), ("c".to_owned(), Some(b"c".to_vec())));
    }

    #[test]
    fn the_bytes_are_counted_exactly() {
        let mut table = Table::default();
        table.set(b"ab", vec![0; 10]).unwrap();
        table.set(b"ab", vec![0; 3]).unwrap();
        table.append(b"ab", &[0; 4]).unwrap();
        assert_eq!(table.bytes, 9 + ENTRY_BYTES);
        table.push(b"q", vec![0; 5]).unwrap();
        table.push(b"q", vec![1; 6]).unwrap();
        assert_eq!((table.bytes, table.queue_len(b"q"), table.len()), (22 + 3 * ENTRY_BYTES, 2, 1));
        assert!(table.has(b"q"));
        assert_eq!(table.pop(b"q"), Some(vec![0; 5]));
        assert_eq!(table.pop(b"q"), Some(vec![1; 6]));
        assert_eq!(table.pop(b"q"), None);
        assert!(!table.has(b"q"));
        assert!(table.delete(b"ab") && !table.delete(b"ab"));
        assert_eq!(table.bytes, 0);
    }

    #[test]
    fn a_full_table_refuses_and_stays_as_it_was() {
        let mut table = Table::default();
        table.set(b"k", vec![7; 8]).unwrap();
        table.bytes = TABLE_BYTES;
        assert!(table.set(b"k", vec![0; 9]).is_err());
        assert!(table.append(b"k", b"x").is_err() && table.push(b"q", Vec::new()).is_err());
        assert_eq!(table.value(b"k"), Some(&[7; 8][..]));
        assert_eq!(table.bytes, TABLE_BYTES);
        table.set(b"k", vec![1; 8]).unwrap();
        assert!(table.append(b"long", &[0; 1]).is_err());
    }
}
