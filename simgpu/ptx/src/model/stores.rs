//! A store buffer: stores that no thread beyond it sees yet.

use crate::model::random::Random;
use crate::model::window::Window;

/// The thread that stored, and the block and the device on which it ran. Numbers are not used twice in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Origin {
    pub(crate) device: u64,
    pub(crate) block: u64,
    pub(crate) thread: u32,
}

/// A store, and the times at which it reached the threads of its block and those of its device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) window: Window,
    pub(crate) value: u128,
    pub(crate) origin: Origin,
    pub(crate) times: [u64; 2],
}

/// The entries of the filter.
const FILTER: usize = 256;

/// Stores in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Stores {
    entries: Vec<Pending>,
    /// The number of stores by a hash of their line, or nothing in a buffer that is always short.
    filter: Vec<u32>,
}

fn hash(line: u64) -> usize {
    (line >> 4 ^ line >> 12) as usize % FILTER
}

impl Stores {
    /// Makes a buffer for many stores.
    pub(crate) fn large() -> Self {
        Self { entries: Vec::new(), filter: vec![0; FILTER] }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn push(&mut self, pending: Pending) {
        if let Some(count) = self.filter.get_mut(hash(pending.window.line)) {
            *count += 1;
        }
        self.entries.push(pending);
    }

    fn may_hold(&self, line: u64) -> bool {
        !self.entries.is_empty() && self.filter.get(hash(line)).is_none_or(|&count| count > 0)
    }

    /// Returns the stores that reach bytes of a window, the newest first.
    pub(crate) fn newest_first(&self, window: Window) -> impl Iterator<Item = &Pending> {
        let entries = if self.may_hold(window.line) { &self.entries[..] } else { &[] };
        entries.iter().rev().filter(move |pending| pending.window.overlaps(window))
    }

    /// Replaces the bytes of a line that these stores reach within a window. Returns the line, and a mask of those bytes.
    pub(crate) fn overlay(&self, window: Window, line: u128) -> (u128, u128) {
        let entries = if self.may_hold(window.line) { &self.entries[..] } else { &[] };
        let inside = entries.iter().filter(|pending| pending.window.overlaps(window));
        inside.fold((line, 0), |(line, mask), pending| (pending.window.replace(line, pending.value), mask | pending.window.mask()))
    }

    fn remove(&mut self, index: usize) -> Pending {
        let pending = self.entries.remove(index);
        if let Some(count) = self.filter.get_mut(hash(pending.window.line)) {
            *count -= 1;
        }
        pending
    }

    /// Takes any store that may be the next: none before it reaches the same bytes.
    pub(crate) fn take_any(&mut self, random: &mut Random) -> Option<Pending> {
        if self.entries.is_empty() {
            return None;
        }
        let mut index = random.below(self.entries.len());
        while let Some(earlier) = self.entries[..index].iter().position(|other| other.window.overlaps(self.entries[index].window)) {
            index = earlier;
        }
        Some(self.remove(index))
    }

    /// Takes the stores that reach bytes of a window and, before each, those that it has to follow.
    pub(crate) fn take_overlapping(&mut self, window: Window) -> Vec<Pending> {
        let mut taken = Vec::new();
        while self.may_hold(window.line) {
            let Some(mut index) = self.entries.iter().position(|pending| pending.window.overlaps(window)) else { break };
            while let Some(earlier) = self.entries[..index].iter().position(|other| other.window.overlaps(self.entries[index].window)) {
                index = earlier;
            }
            taken.push(self.remove(index));
        }
        taken
    }

    /// Takes all stores, in the order in which they came.
    pub(crate) fn take_all(&mut self) -> Vec<Pending> {
        self.filter.fill(0);
        std::mem::take(&mut self.entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(address: u64, bytes: u32, value: u128) -> Pending {
        let window = Window::new(address, bytes);
        Pending { window, value: window.place(value), origin: Origin::default(), times: [0; 2] }
    }

    fn buffer(large: bool) -> Stores {
        let mut stores = if large { Stores::large() } else { Stores::default() };
        for (at, bytes, value) in [(0, 4, 1), (4, 4, 2), (0, 8, 3), (16, 4, 4), (0, 4, 5)] {
            stores.push(pending(at, bytes, value));
        }
        stores
    }

    #[test]
    fn stores_to_the_same_bytes_keep_their_order() {
        for seed in 0..100 {
            let (mut stores, mut random) = (buffer(seed % 2 == 0), Random::new(seed));
            let (mut memory, mut order) = ([0; 2], Vec::new());
            while let Some(next) = stores.take_any(&mut random) {
                let line = &mut memory[next.window.line as usize / 16];
                *line = next.window.replace(*line, next.value);
                order.push(next.window.take(next.value));
            }
            assert_eq!((memory, order.len()), ([5, 4], 5), "{order:?}");
        }
    }

    #[test]
    fn every_order_of_other_stores_occurs() {
        let firsts: std::collections::BTreeSet<u128> =
            (0..100).filter_map(|seed| buffer(true).take_any(&mut Random::new(seed)).map(|next| next.window.take(next.value))).collect();
        assert_eq!(firsts.into_iter().collect::<Vec<_>>(), [1, 2, 4]);
    }

    #[test]
    fn a_window_takes_what_it_needs() {
        for large in [false, true] {
            let values = |taken: Vec<Pending>| taken.iter().map(|next| next.window.take(next.value)).collect::<Vec<_>>();
            let mut stores = buffer(large);
            assert_eq!(stores.overlay(Window::new(0, 16), 0), (5, u128::from(u64::MAX)));
            assert_eq!(stores.newest_first(Window::new(4, 4)).count(), 2);
            assert_eq!(values(stores.take_overlapping(Window::new(4, 4))), [2, 1, 3]);
            assert_eq!(values(stores.take_overlapping(Window::new(32, 16))), [0_u128; 0]);
            assert_eq!((values(stores.take_all()), stores.len()), (vec![4, 5], 0));
        }
    }
}
