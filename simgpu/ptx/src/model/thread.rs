//! The part of the memory order that each thread has.

use crate::model::stores::{Origin, Stores};
use crate::order::Scope;

/// The lines for which a thread knows exactly what it has seen. For the others it has to see what it may have seen.
const LINES: usize = 32;

/// The stores of a thread that no other thread sees yet, and what the thread has to see.
#[derive(Debug, Default)]
pub(crate) struct ThreadModel {
    pub(crate) origin: Origin,
    pub(crate) global: Stores,
    /// Stores to shared memory, by their offsets.
    pub(crate) shared: Stores,
    /// Whether it acquires when it goes on.
    pub(crate) met: bool,
    /// The times up to which it has to see the stores of its block, of its device, and of others.
    pub(crate) acquired: [u64; 3],
    /// Lines, each with the time up to which it has to see stores there.
    seen: Vec<(u64, u64)>,
    next: usize,
}

impl ThreadModel {
    pub(crate) fn begin(&mut self, origin: Origin, now: u64) {
        (self.origin, self.met, self.acquired, self.next) = (origin, false, [now; 3], 0);
        self.seen.clear();
        self.global.take_all();
        self.shared.take_all();
    }

    /// Whether no store waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.global.len() + self.shared.len() == 0
    }

    pub(crate) fn seen(&self, line: u64) -> u64 {
        self.seen.iter().find(|(other, _)| *other == line).map_or(0, |&(_, time)| time)
    }

    /// Remembers that the thread has seen the stores to a line up to a time.
    pub(crate) fn see(&mut self, line: u64, time: u64) {
        if let Some((_, known)) = self.seen.iter_mut().find(|(other, _)| *other == line) {
            *known = time.max(*known);
        } else if self.seen.len() < LINES {
            self.seen.push((line, time));
        } else {
            let (_, forgotten) = std::mem::replace(&mut self.seen[self.next], (line, time));
            self.acquired = self.acquired.map(|known| known.max(forgotten));
            self.next = (self.next + 1) % LINES;
        }
    }

    /// Returns the time at which a store reached this thread, of those at which it reached its block, its device and
    /// memory; and the time up to which the thread has to see such stores. A thread always sees its own stores.
    pub(crate) fn reached(&self, origin: Origin, times: [u64; 3]) -> Option<(u64, u64)> {
        let own = self.origin;
        let distance = match origin {
            _ if origin == own => return None,
            _ if origin.block == own.block => Scope::Block,
            _ if origin.device == own.device => Scope::Device,
            _ => Scope::System,
        };
        Some((times[distance as usize], self.acquired[distance as usize]))
    }
}

/// Decides, from the newest store on, which stores to the bytes of a load the load misses.
pub(crate) struct Missing<'t> {
    thread: &'t ThreadModel,
    seen: u64,
    /// The stores that it may still miss.
    left: usize,
    /// The time of the last missed store, and the latest time of those that were not missed.
    missed: Option<u64>,
    latest: u64,
}

impl<'t> Missing<'t> {
    pub(crate) fn new(thread: &'t ThreadModel, line: u64, most: usize) -> Self {
        Self { thread, seen: thread.seen(line), left: most, missed: None, latest: 0 }
    }

    /// Whether the load misses the next store.
    pub(crate) fn misses(&mut self, origin: Origin, times: [u64; 3]) -> bool {
        let Some((time, acquired)) = self.thread.reached(origin, times) else {
            self.left = 0;
            return false;
        };
        if self.left == 0 || time <= acquired.max(self.seen) {
            (self.left, self.latest) = (0, self.latest.max(time));
            return false;
        }
        self.left -= 1;
        self.missed = Some(time);
        true
    }

    /// Returns the time up to which the thread has seen the stores, if it has missed any.
    pub(crate) fn time(&self) -> Option<u64> {
        self.missed.map(|time| self.latest.max(time - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: [u64; 3] = [15, 20, 25];

    fn place(device: u64, block: u64, thread: u32) -> Origin {
        Origin { device, block, thread }
    }

    fn thread() -> ThreadModel {
        let mut thread = ThreadModel::default();
        thread.begin(place(1, 1, 1), 10);
        thread.acquired = [30, 20, 10];
        thread
    }

    fn misses(thread: &ThreadModel, line: u64, origin: Origin) -> Option<u64> {
        let mut missing = Missing::new(thread, line, 1);
        assert_eq!(missing.misses(origin, TIMES), missing.time().is_some());
        missing.time()
    }

    #[test]
    fn a_thread_need_not_see_what_it_has_neither_acquired_nor_seen() {
        let mut thread = thread();
        assert_eq!(misses(&thread, 0, place(1, 1, 1)), None, "its own store");
        assert_eq!(misses(&thread, 0, place(1, 1, 2)), None, "acquired from the block");
        assert_eq!(misses(&thread, 0, place(1, 2, 1)), None, "acquired from the device");
        assert_eq!(misses(&thread, 0, place(2, 3, 1)), Some(24));
        thread.see(0, 24);
        assert_eq!(misses(&thread, 0, place(2, 3, 1)), Some(24));
        thread.see(0, 25);
        thread.see(0, 3);
        assert_eq!(misses(&thread, 0, place(2, 3, 1)), None, "seen");
        assert_eq!(misses(&thread, 16, place(2, 3, 1)), Some(24), "seen on another line");
        (1..=LINES as u64).for_each(|line| thread.see(16 * line, 5));
        assert_eq!(misses(&thread, 0, place(2, 3, 1)), None, "seen, and forgotten where");
    }

    #[test]
    fn older_stores_are_missed_only_after_newer_ones() {
        let thread = thread();
        let mut missing = Missing::new(&thread, 0, 3);
        let found = [(2, 40), (2, 38), (1, 50), (2, 35), (2, 60)]
            .map(|(device, time)| missing.misses(place(device, 3, 1), [0, time.min(15), time]));
        assert_eq!(found, [true, true, false, false, false]);
        assert_eq!(missing.time(), Some(60), "what it sees is never missed later");
    }
}
