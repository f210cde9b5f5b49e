//! New inputs derived from known ones, without coverage information.
//!
//! Neither bolero, proptest nor arbtest does this on a stable toolchain. There they generate inputs from scratch, which
//! never produces a message behind a magic number.

#[path = "../../../src/base/random.rs"]
mod random;

use random::Random;

/// Numbers near the bounds that lengths and counts are compared with.
const EXTREMES: [u64; 14] =
    [0, 1, 2, 7, 0x7f, 0x80, 0xff, 0xffff, 1 << 20, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, i64::MAX as u64, u64::MAX];
/// These numbers and others as text.
const WORDS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "+1",
    "1e9",
    "nan",
    "inf",
    "65536",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
];
/// The most changes of one input.
const CHANGES: usize = 6;

/// A source of inputs; the same seed gives the same inputs.
#[derive(Debug)]
pub struct Mutator {
    random: Random,
}

impl Mutator {
    pub fn new(seed: u64) -> Self {
        Self { random: Random(seed) }
    }

    /// Returns the next input, derived from one or two of the known ones.
    pub fn input(&mut self, known: &[Vec<u8>]) -> Vec<u8> {
        let mut input = if known.is_empty() { Vec::new() } else { known[self.random.below(known.len())].clone() };
        for _ in 0..=self.random.below(CHANGES) {
            self.change(&mut input, known);
        }
        input.truncate(crate::LONGEST);
        input
    }

    /// Makes one change.
    fn change(&mut self, input: &mut Vec<u8>, known: &[Vec<u8>]) {
        match self.random.below(11) {
            0 => self.at(input, |random, byte| *byte ^= 1 << random.below(8)),
            1 => self.at(input, |random, byte| *byte = random.next() as u8),
            2 => self.at(input, |random, byte| *byte = byte.wrapping_add(1).wrapping_sub(2 * random.below(2) as u8)),
            3 => input.truncate(self.random.below(input.len() + 1)),
            4 => drop(self.drain(input)),
            5 => self.repeat(input),
            6 | 7 => self.number(input),
            8 => self.splice(input, known),
            9 => self.word(input),
            _ => {
                let count = 1 + self.random.below(16);
                let bytes = self.random.bytes(count);
                self.insert(input, &bytes);
            }
        }
    }

    fn at(&mut self, input: &mut [u8], change: impl FnOnce(&mut Random, &mut u8)) {
        if !input.is_empty() {
            let at = self.random.below(input.len());
            change(&mut self.random, &mut input[at]);
        }
    }

    /// Removes a piece and returns it.
    fn drain(&mut self, input: &mut Vec<u8>) -> Vec<u8> {
        let from = self.random.below(input.len() + 1);
        let most = (input.len() - from).min(32);
        input.drain(from..from + self.random.below(most + 1)).collect()
    }

    /// Inserts a piece.
    fn insert(&mut self, input: &mut Vec<u8>, piece: &[u8]) {
        let at = self.random.below(input.len() + 1);
        input.splice(at..at, piece.iter().copied());
    }

    /// Inserts a piece of the input again, once or many times.
    fn repeat(&mut self, input: &mut Vec<u8>) {
        let piece = self.drain(&mut input.clone());
        let times = [1, 1, 2, 64][self.random.below(4)];
        self.insert(input, &piece.repeat(times));
    }

    /// Overwrites some bytes with a number of some width: an extreme, or about the length of the rest.
    fn number(&mut self, input: &mut [u8]) {
        let width = 1 << self.random.below(4);
        let Some(most) = input.len().checked_sub(width) else { return };
        let at = self.random.below(most + 1);
        let rest = (input.len() - at - width) as u64;
        let number = match self.random.below(3) {
            0 => rest.wrapping_add(self.random.below(3) as u64).wrapping_sub(1),
            1 => (1 << self.random.below(64)) - self.random.below(2) as u64,
            _ => EXTREMES[self.random.below(EXTREMES.len())],
        };
        if self.random.below(4) == 0 {
            input[at..at + width].copy_from_slice(&number.to_be_bytes()[8 - width..]);
        } else {
            input[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
        }
    }

    /// Replaces the end by the end of another input.
    fn splice(&mut self, input: &mut Vec<u8>, known: &[Vec<u8>]) {
        if known.is_empty() {
            return;
        }
        let other = &known[self.random.below(known.len())];
        input.truncate(self.random.below(input.len() + 1));
        input.extend_from_slice(&other[self.random.below(other.len() + 1)..]);
    }

    /// Inserts a word in place of a number, or anywhere.
    fn word(&mut self, input: &mut Vec<u8>) {
        let start = self.random.below(input.len() + 1);
        let from = input[start..].iter().position(u8::is_ascii_digit).map_or(start, |digit| start + digit);
        let digits = input[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let word = WORDS[self.random.below(WORDS.len())];
        input.splice(from..from + digits, word.bytes());
    }
}
