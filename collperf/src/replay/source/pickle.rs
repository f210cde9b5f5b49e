//! Reads the data in a Python pickle, without executing anything.
//!
//! A pickle is a program for a small stack machine. This module knows only the instructions that make numbers, strings,
//! lists, tuples and dictionaries. It refuses those that look up or call Python functions. The library serde-pickle is
//! not used: it copies a value each time that the pickle refers to it, so a short file can demand memory without bound.
//! Here, the values that a file makes are counted before they are copied.

use std::collections::HashMap;
use std::rc::Rc;

use serde_json::{Map, Number, Value};

/// The most values that a file may make.
const MOST_VALUES: usize = 4 << 20;
/// The most instructions of a file. Each puts at most one value on the stack.
const MOST_INSTRUCTIONS: usize = 8 << 20;
/// The most bytes of all strings together, counted each time that the pickle refers to one.
const MOST_TEXT: usize = 256 << 20;
/// The deepest nesting of lists and dictionaries.
const MOST_DEPTH: usize = 32;
/// Keys whose values are not read: stack traces, which are most of a file.
const SKIPPED: [&str; 2] = ["frames", "stack"];

/// Whether a file is a pickle. It begins with the version of its protocol.
pub(super) fn is_pickle(text: &[u8]) -> bool {
    text.first() == Some(&0x80)
}

/// A value on the machine's stack. Those with content are shared, because a pickle may refer to a value several times.
#[derive(Debug, Clone)]
enum Item {
    Plain(Value),
    Text(Rc<str>),
    /// The numbers of the list's or dictionary's entry in [`Machine::made`].
    List(usize),
    Dictionary(usize),
}

struct Machine<'a> {
    bytes: &'a [u8],
    stack: Vec<Item>,
    /// The heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u64, Item>,
    made: Vec<Vec<Item>>,
}

/// Returns the value in a pickle as JSON.
pub(super) fn parse(text: &[u8]) -> Result<Value, String> {
    let mut machine = Machine { bytes: text, stack: Vec::new(), marks: Vec::new(), memo: HashMap::new(), made: Vec::new() };
    let root = machine.run()?;
    let mut left = Budget { values: MOST_VALUES, text: MOST_TEXT };
    machine.to_json(&root, 0, &mut left)
}

struct Budget {
    values: usize,
    text: usize,
}

impl Budget {
    fn spend(&mut self, text: usize) -> Result<(), String> {
        let left = self.values.checked_sub(1).zip(self.text.checked_sub(text));
        (self.values, self.text) = left.ok_or_else(|| format!("the pickle has more than {MOST_VALUES} values, or too much text"))?;
        Ok(())
    }
}

impl Machine<'_> {
    fn take(&mut self, count: usize) -> Result<&[u8], String> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or("the pickle ends early: the file was cut short")?;
        self.bytes = rest;
        Ok(taken)
    }

    /// Reads an unsigned little-endian number of up to eight bytes.
    fn number(&mut self, size: usize) -> Result<u64, String> {
        Ok(self.take(size)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Reads a string whose length has `size` bytes.
    fn text(&mut self, size: usize) -> Result<(), String> {
        let length = usize::try_from(self.number(size)?).unwrap_or(usize::MAX);
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "a string of the pickle is not UTF-8")?;
        let text = Rc::from(text);
        self.stack.push(Item::Text(text));
        Ok(())
    }

    fn pop(&mut self) -> Result<Item, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.pop().filter(|_| self.stack.len() >= floor).ok_or_else(malformed)
    }

    /// Removes and returns what lies above the last mark.
    fn since_mark(&mut self) -> Result<Vec<Item>, String> {
        let height = self.marks.pop().filter(|height| *height <= self.stack.len()).ok_or_else(malformed)?;
        Ok(self.stack.split_off(height))
    }

    fn top(&self) -> Result<&Item, String> {
        self.stack.last().ok_or_else(malformed)
    }

    fn push_list(&mut self, items: Vec<Item>) {
        self.stack.push(Item::List(self.made.len()));
        self.made.push(items);
    }

    fn push_dictionary(&mut self, items: Vec<Item>) {
        self.stack.push(Item::Dictionary(self.made.len()));
        self.made.push(items);
    }

    /// Adds items to the list or dictionary on top of the stack.
    fn extend(&mut self, items: Vec<Item>) -> Result<(), String> {
        match *self.top()? {
            Item::List(number) => self.made[number].extend(items),
            Item::Dictionary(number) if items.len().is_multiple_of(2) => self.made[number].extend(items),
            _ => return Err(malformed()),
        }
        Ok(())
    }

    fn push(&mut self, value: impl Into<Value>) {
        self.stack.push(Item::Plain(value.into()));
    }

    fn remember(&mut self, key: u64) -> Result<(), String> {
        let item = self.top()?.clone();
        self.memo.insert(key, item);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Result<(), String> {
        let item = self.memo.get(&key).cloned().ok_or_else(malformed)?;
        self.stack.push(item);
        Ok(())
    }

    fn run(&mut self) -> Result<Item, String> {
        for _ in 0..MOST_INSTRUCTIONS {
            let code = self.number(1)? as u8;
            if code == b'.' {
                return self.pop();
            }
            let is_known = self.scalar(code)? || self.container(code)? || self.memory(code)?;
            if !is_known {
                return Err(format!("the pickle has instruction {:?}, which does more than make data", char::from(code)));
            }
        }
        Err(format!("the pickle has more than {MOST_INSTRUCTIONS} instructions"))
    }

    /// Executes an instruction that makes a number or a string; returns whether it is one.
    fn scalar(&mut self, code: u8) -> Result<bool, String> {
        match code {
            b'N' => self.push(Value::Null),
            0x88 => self.push(true),
            0x89 => self.push(false),
            b'K' | b'M' => {
                let number = self.number(if code == b'K' { 1 } else { 2 })?;
                self.push(number);
            }
            b'J' => {
                let number = self.number(4)? as u32 as i32;
                self.push(number);
            }
            0x8a => {
                let size = self.number(1)? as usize;
                let number = signed(self.take(size)?)?;
                self.push(number);
            }
            b'G' => {
                let number = f64::from_bits(self.number(8)?.swap_bytes());
                self.stack.push(Item::Plain(Number::from_f64(number).map_or(Value::Null, Value::Number)));
            }
            b'X' | b'T' => self.text(4)?,
            0x8c | b'U' => self.text(1)?,
            0x8d => self.text(8)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Executes an instruction about lists, tuples and dictionaries; returns whether it is one.
    fn container(&mut self, code: u8) -> Result<bool, String> {
        match code {
            b'(' => self.marks.push(self.stack.len()),
            b']' | b')' => self.push_list(Vec::new()),
            b'}' => self.push_dictionary(Vec::new()),
            b't' | b'l' => {
                let items = self.since_mark()?;
                self.push_list(items);
            }
            0x85..=0x87 => {
                let mut items = (0..code - 0x84).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
                items.reverse();
                self.push_list(items);
            }
            b'd' => {
                let items = self.since_mark()?;
                self.push_dictionary(Vec::new());
                self.extend(items)?;
            }
            b'e' | b'u' => {
                let items = self.since_mark()?;
                self.extend(items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend(vec![key, value])?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Executes an instruction about the format, the stack or the memo; returns whether it is one.
    fn memory(&mut self, code: u8) -> Result<bool, String> {
        match code {
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'0' => drop(self.pop()?),
            0x94 => self.remember(self.memo.len() as u64)?,
            b'q' | b'r' => {
                let key = self.number(if code == b'q' { 1 } else { 4 })?;
                self.remember(key)?;
            }
            b'h' | b'j' => {
                let key = self.number(if code == b'h' { 1 } else { 4 })?;
                self.recall(key)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn to_json(&self, item: &Item, depth: usize, left: &mut Budget) -> Result<Value, String> {
        left.spend(if let Item::Text(text) = item { text.len() } else { 0 })?;
        // A list may contain itself.
        if depth > MOST_DEPTH {
            return Err(format!("the pickle's lists are nested more than {MOST_DEPTH} deep"));
        }
        match item {
            Item::Plain(value) => Ok(value.clone()),
            Item::Text(text) => Ok(Value::String(text.to_string())),
            Item::List(number) => {
                let items = self.made[*number].iter();
                items.map(|item| self.to_json(item, depth + 1, left)).collect::<Result<_, _>>().map(Value::Array)
            }
            Item::Dictionary(number) => {
                let mut map = Map::new();
                for pair in self.made[*number].chunks_exact(2) {
                    let key = match &pair[0] {
                        Item::Text(text) => text.to_string(),
                        Item::Plain(value) => value.to_string(),
                        _ => return Err("a key of the pickle's dictionaries is neither a string nor a number".to_owned()),
                    };
                    if !SKIPPED.contains(&&*key) {
                        left.spend(key.len())?;
                        map.insert(key, self.to_json(&pair[1], depth + 1, left)?);
                    }
                }
                Ok(Value::Object(map))
            }
        }
    }
}

/// Converts a signed little-endian number.
fn signed(bytes: &[u8]) -> Result<i64, String> {
    let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
    if bytes.len() > 8 && bytes[8..].iter().any(|byte| *byte != fill) {
        return Err("a number of the pickle has more than 64 bits".to_owned());
    }
    let mut all = [fill; 8];
    let length = bytes.len().min(8);
    all[..length].copy_from_slice(&bytes[..length]);
    Ok(i64::from_le_bytes(all))
}

fn malformed() -> String {
    "the pickle is malformed: an instruction lacks its operands".to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn data_of_both_protocols_is_read() {
        // {"a": [1, -2, 300, 2**40, 0.5, None, True, ("x", "x")], 7: "é"}, as Python 3 writes it.
        let two: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01\x8a\x06\x00\x00\x00\x00\x00\x01G?\xe0\x00\x00\x00\x00\x00\x00N\x88X\x01\x00\x00\x00xq\x03h\x03\x86q\x04eK\x07X\x02\x00\x00\x00\xc3\xa9q\x05u.";
        let four: &[u8] = b"\x80\x04\x959\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffM,\x01\x8a\x06\x00\x00\x00\x00\x00\x01G?\xe0\x00\x00\x00\x00\x00\x00N\x88\x8c\x01x\x94h\x03\x86\x94eK\x07\x8c\x02\xc3\xa9\x94u.";
        let expected = json!({"a": [1, -2, 300, 1_u64 << 40, 0.5, null, true, ["x", "x"]], "7": "é"});
        for text in [two, four] {
            assert_eq!(parse(text).unwrap(), expected);
            for length in 0..text.len() {
                assert!(parse(&text[..length]).is_err(), "cut to {length} bytes");
            }
        }
    }

    #[test]
    fn programs_are_refused() {
        // os.system("true"), in both ways to name the function.
        for text in [&b"cos\nsystem\n(X\x04\x00\x00\x00truetR."[..], b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."] {
            assert!(parse(text).unwrap_err().contains("does more than make data"));
        }
    }

    #[test]
    fn short_files_cannot_demand_much() {
        // Each list contains the one before it twice; the last one would have 2^30 elements.
        let mut text = b"]q\x00".to_vec();
        for _ in 0..30 {
            text.extend(b"0](h\x00h\x00eq\x00");
        }
        text.push(b'.');
        assert!(parse(&text).unwrap_err().contains("more than"));
        // A list that contains itself.
        assert!(parse(b"]q\x00h\x00a.").unwrap_err().contains("nested"));
        // Strings and lists that claim more than the file has.
        for text in [
            &b"X\xff\xff\xff\xff"[..],
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
            b"e.",
            b"(e.",
            b"a.",
            b"s.",
            b"(0.",
            b"h\x07.",
            b"\x87.",
            b"K\x01e.",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn bytes_at_random_are_no_danger() {
        let mut state = 7_u64;
        for _ in 0..20_000 {
            let text: Vec<u8> = (0..24)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let known = b"N\x88KMJ\x8aGX\x8c(])}tld\x85\x86\x87euas\x80q\x94hj0.";
                    known[(state >> 33) as usize % known.len()]
                })
                .collect();
            let _ = parse(&text);
        }
    }
}
