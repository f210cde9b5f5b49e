//! The small shared words of a region: who is there, who sleeps, and why it ended.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::thread::CpuSet;

use crate::host::notice::Notice;

/// A value on cache lines of its own.
#[repr(C, align(128))]
pub(super) struct Line<T>(T);

/// What the whole group shares. All zero at first.
#[repr(C, align(128))]
pub(super) struct Control {
    /// How many ranks sleep, or are about to. Read by everyone after each step, written rarely.
    pub(super) sleepers: Line<AtomicU32>,
    /// What sleepers wait on; it changes with every wake.
    pub(super) bell: Line<AtomicU32>,
    /// Why the group ended.
    pub(super) bulletin: Line<Bulletin>,
}

impl<T> std::ops::Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// A notice that is written once.
#[repr(C)]
pub(super) struct Bulletin {
    state: AtomicU32,
    words: [AtomicU64; Notice::BYTES / 8],
}

impl Bulletin {
    const EMPTY: u32 = 0;
    /// Taken by a writer. One that dies here leaves the bulletin unreadable; its death is then noticed by itself.
    const TAKEN: u32 = 1;
    const WRITTEN: u32 = 2;

    /// Writes the notice, where there is none yet; says whether it did.
    pub(super) fn post(&self, notice: &Notice) -> bool {
        if self.state.compare_exchange(Self::EMPTY, Self::TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        for (word, bytes) in self.words.iter().zip(notice.to_bytes().as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.state.store(Self::WRITTEN, Ordering::Release);
        true
    }

    /// The notice, where one has been written.
    pub(super) fn read(&self) -> Option<Notice> {
        if self.state.load(Ordering::Acquire) != Self::WRITTEN {
            return None;
        }
        let mut bytes = [0; Notice::BYTES];
        for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&self.words) {
            *chunk = word.load(Ordering::Relaxed).to_le_bytes();
        }
        Notice::from_bytes(&bytes)
    }
}

/// What a rank says of itself. All zero at first.
#[repr(C, align(128))]
pub(super) struct Member {
    departed: AtomicU32,
    pid: AtomicU32,
    locked: AtomicU32,
    /// The step that it gave up waiting at though it had published it; 0 for none.
    left_at: AtomicU64,
    /// How many processors the system lets it keep busy, by quota or affinity.
    available: AtomicU32,
    /// The processors that it may run on; all zero where that is not known.
    processors: [AtomicU64; CpuSet::MAX_CPU / 64],
}

impl Member {
    /// Enters this rank, before any other one looks.
    pub(super) fn enter(&self, pid: u32, locked: bool, available: u32, processors: Option<&CpuSet>) {
        self.pid.store(pid, Ordering::Relaxed);
        self.available.store(available, Ordering::Relaxed);
        self.locked.store(locked.into(), Ordering::Relaxed);
        for (index, word) in self.processors.iter().enumerate() {
            let bit = |bit: usize| u64::from(processors.is_some_and(|set| set.is_set(index * 64 + bit))) << bit;
            word.store((0..64).map(bit).sum(), Ordering::Relaxed);
        }
        self.departed.store(0, Ordering::Release);
    }

    /// Says that the rank has left of its own will.
    pub(super) fn depart(&self) {
        self.departed.store(1, Ordering::Release);
    }

    /// Says that the rank leaves a call in whose last step it has nothing more to publish, before its caller goes on.
    pub(super) fn leave_at(&self, step: u64) {
        self.left_at.store(step, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether it has left a call in this step, which ended the group.
    pub(super) fn has_left_at(&self, step: u64) -> bool {
        self.left_at.load(Ordering::Relaxed) == step
    }

    /// Whether the rank has left of its own will.
    pub(super) fn has_departed(&self) -> bool {
        self.departed.load(Ordering::Acquire) != 0
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.pid.load(Ordering::Relaxed)
    }

    /// Whether it holds a lock as long as it lives.
    pub(super) fn is_locked(&self) -> bool {
        self.locked.load(Ordering::Relaxed) != 0
    }

    /// How many processors it may keep busy.
    pub(super) fn available(&self) -> usize {
        self.available.load(Ordering::Relaxed) as usize
    }

    /// The processors that it may run on, 64 a word.
    pub(super) fn processors(&self) -> [u64; CpuSet::MAX_CPU / 64] {
        std::array::from_fn(|index| self.processors[index].load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_notice_stays() {
        let bulletin = Bulletin { state: AtomicU32::new(0), words: Default::default() };
        assert_eq!(bulletin.read(), None);
        assert!(bulletin.post(&Notice::Lost { rank: 7 }));
        assert!(!bulletin.post(&Notice::Left { rank: 8 }));
        assert_eq!(bulletin.read(), Some(Notice::Lost { rank: 7 }));
    }

    #[test]
    fn a_half_written_notice_is_none() {
        let bulletin = Bulletin { state: AtomicU32::new(Bulletin::TAKEN), words: Default::default() };
        assert_eq!(bulletin.read(), None);
        assert!(!bulletin.post(&Notice::Lost { rank: 7 }));
    }
}
