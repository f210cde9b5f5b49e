//! A copy of a short write on the writer's own line, beside its cursor.
//!
//! A reader that has read everything before it gets it with the line that tells it to come, and leaves the ring's own lines in the
//! writer's cache. The copy is a sequence lock whose number says which bytes it holds; where it does not hold, the ring does.

use super::sync::{AtomicU64, Ordering, fence};

/// The number of the copy, and its words.
#[repr(C)]
pub(super) struct InlineCopy<const WORDS: usize = 6> {
    number: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl InlineCopy {
    /// How long a write may be that is copied here.
    pub(super) const BYTES: usize = 8 * 6;
}

impl<const WORDS: usize> InlineCopy<WORDS> {
    /// The number of a copy of the `bytes` that end at a cursor.
    #[inline]
    fn number(cursor: u64, bytes: usize) -> u64 {
        cursor << 6 | bytes as u64
    }

    /// Puts the `bytes` here that end at `cursor`, which the writer stores next, to be acquired. `copy` fills the words.
    #[inline]
    pub(super) fn put(&self, cursor: u64, bytes: usize, copy: &[u8]) {
        self.number.store(Self::number(cursor, bytes), Ordering::Relaxed);
        // Whoever sees one of the new words sees the new number as well.
        fence(Ordering::Release);
        for (word, bytes) in self.words.iter().zip(copy.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Copies the bytes out that end at `cursor`, which the reader has acquired; whether they, and no others, were here.
    #[inline]
    pub(super) fn take(&self, cursor: u64, into: &mut [u8]) -> bool {
        if into.len() > 8 * WORDS || self.number.load(Ordering::Relaxed) != Self::number(cursor, into.len()) {
            return false;
        }
        let mut copy = [[0; 8]; WORDS];
        for (word, bytes) in self.words.iter().zip(&mut copy) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        // If one of the words was newer, so is the number now.
        fence(Ordering::Acquire);
        if self.number.load(Ordering::Relaxed) != Self::number(cursor, into.len()) {
            return false;
        }
        into.copy_from_slice(&copy.as_flattened()[..into.len()]);
        true
    }
}

#[cfg(all(test, loom))]
mod models {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib shm::inline_copy`.

    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use std::sync::atomic::AtomicUsize;

    /// Bytes of each write, and what they are.
    const BYTES: usize = 16;

    fn written(write: u64) -> [u8; BYTES] {
        [write as u8; BYTES]
    }

    struct Line {
        cursor: AtomicU64,
        inline_copy: InlineCopy<2>,
    }

    impl Line {
        /// Takes the write that ends at the cursor, if it is here; which one that was, or 3.
        fn look(&self) -> usize {
            let cursor = self.cursor.load(Ordering::Acquire);
            let write = cursor / BYTES as u64;
            let mut into = [0; BYTES];
            if write == 0 || !self.inline_copy.take(cursor, &mut into) {
                return 3;
            }
            assert_eq!(into, written(write));
            write as usize - 1
        }
    }

    /// The reader is the thread that begins later, so that loom lets each of its looks find all that is not ruled out.
    #[test]
    fn what_is_taken_is_the_write_that_ends_at_the_cursor() {
        // In how many executions which write was taken, and in how many none.
        let counts = std::sync::Arc::new(<[AtomicUsize; 4]>::default());
        let seen = std::sync::Arc::clone(&counts);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let words = std::array::from_fn(|_| AtomicU64::new(0));
            let line = Arc::new(Line { cursor: AtomicU64::new(0), inline_copy: InlineCopy { number: AtomicU64::new(0), words } });
            let (read, seen) = (Arc::clone(&line), std::sync::Arc::clone(&seen));
            let reader = thread::spawn(move || {
                seen[read.look()].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            });
            for write in 1..=3 {
                let cursor = write * BYTES as u64;
                line.inline_copy.put(cursor, BYTES, &written(write));
                line.cursor.store(cursor, Ordering::Release);
            }
            reader.join().unwrap();
        });
        assert!(counts.iter().all(|count| count.load(std::sync::atomic::Ordering::Relaxed) > 0), "{counts:?}");
    }
}
