//! Tests of windows: where the ranks' buffers lie in each other's memory, and for how long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{PATIENCE, Random, call};
use crate::base::deadline::Deadline;
use crate::call::Collective;
use crate::host::abort_reason::AbortReason;
use crate::host::exchange::local::{LocalExchange, exchanges};
use crate::host::fold::Fold;
use crate::host::health::Health;
use crate::host::shm::window::{Segment, WindowOffset};
use crate::host::shm::{Blocks, CallContext, Group, Memory, ShareError, Size, Storage};

/// One rank with what it needs to open windows.
struct Rank {
    index: usize,
    group: Group,
    exchange: LocalExchange,
    deadline: Deadline,
}

impl Rank {
    /// Opens a window of `bytes` bytes.
    fn open(&mut self, bytes: usize, align: usize) -> Segment {
        let site = self.group.site().unwrap();
        let opened = site.open(&mut self.exchange, Size { bytes, align }, &self.deadline);
        let segment = opened.unwrap_or_else(|_| panic!("a window of {bytes} B was refused"));
        self.group.admit(&segment);
        segment
    }

    /// Waits for the others.
    fn meet(&mut self) {
        use crate::host::exchange::Exchange;
        self.exchange.all_gather(&[], &self.deadline).unwrap();
    }
}

/// Runs `body` on `size` ranks, each a thread.
fn on_threads(size: usize, body: impl Fn(Rank) + Sync) {
    let members: Vec<usize> = (0..size).collect();
    std::thread::scope(|scope| {
        for (index, mut exchange) in exchanges(size).into_iter().enumerate() {
            let (members, body) = (&members, &body);
            scope.spawn(move || {
                let deadline = Deadline::after(PATIENCE);
                let group = Group::connect(&mut exchange, members, index, size, None, &deadline).unwrap();
                body(Rank { index, group, exchange, deadline });
            });
        }
    });
}

/// Returns where a segment begins.
fn base(segment: Segment) -> (Storage, *mut u8) {
    let storage = Storage::Window(segment);
    let base = storage.base().as_ptr();
    (storage, base)
}

#[test]
#[expect(unsafe_code, reason = "reads and writes what windows hand out")]
fn a_place_is_the_same_bytes_on_every_rank() {
    on_threads(3, |mut rank| {
        let me = rank.index;
        for (bytes, align) in [(1, 1), (5000, 8192), ((2 << 20) + 1, 8)] {
            let (storage, start) = base(rank.open(bytes, align));
            assert_eq!(start.addr() % align, 0);
            let place = rank.group.find_window(start.wrapping_add(bytes - 1), 1).unwrap();
            // SAFETY: inside the segment, which the others read only after the meeting.
            unsafe { start.add(bytes - 1).write(me as u8 + 1) };
            rank.meet();
            for peer in 0..3 {
                let theirs = rank.group.in_window(peer, place, 1).unwrap();
                assert_eq!(theirs == start.wrapping_add(bytes - 1), peer == me);
                // SAFETY: mapped; written before the meeting.
                assert_eq!(unsafe { theirs.read() }, peer as u8 + 1, "{bytes} B of rank {peer} on rank {me}");
            }
            rank.meet();
            drop(storage);
        }
    });
}

#[test]
fn only_what_lies_in_a_window_has_a_place() {
    on_threads(2, |mut rank| {
        assert_eq!(rank.group.find_window(std::ptr::dangling(), 0), None);
        let segments: Vec<_> = [10, 70_000, 3 << 20].map(|bytes| (base(rank.open(bytes, 1)), bytes)).into_iter().collect();
        for (number, ((_, start), bytes)) in (1..).zip(&segments) {
            let place = |offset: usize, length: usize| rank.group.find_window(start.wrapping_add(offset), length);
            assert_eq!(place(0, *bytes), Some(WindowOffset { window: number, offset: 0 }));
            assert_eq!(place(3, bytes - 3), Some(WindowOffset { window: number, offset: 3 }));
            assert_eq!(place(*bytes, 0), Some(WindowOffset { window: number, offset: *bytes }));
            assert_eq!([place(0, bytes + 1), place(1, *bytes), place(bytes + 1, 0), place(1, usize::MAX)], [None; 4]);
            let fits = |rank_: usize, offset: usize, length: usize| {
                rank.group.in_window(rank_, WindowOffset { window: number, offset }, length).is_some()
            };
            assert!(fits(0, 0, *bytes) && fits(1, *bytes, 0));
            assert!(!fits(0, 1, *bytes) && !fits(2, 0, 1) && !fits(0, usize::MAX, 2) && !fits(0, 0, usize::MAX));
        }
        let elsewhere = [0_u8; 10];
        assert_eq!(rank.group.find_window(elsewhere.as_ptr(), 10), None);
        assert_eq!(rank.group.in_window(0, WindowOffset { window: 4, offset: 0 }, 1), None);
    });
}

#[test]
#[expect(unsafe_code, reason = "reads what windows hand out")]
fn a_dropped_window_is_gone_here_and_stays_with_the_others() {
    on_threads(2, |mut rank| {
        let kept = base(rank.open(5000, 1));
        let place = rank.group.find_window(kept.1, 5000).unwrap();
        // SAFETY: inside this rank's own segment.
        unsafe { kept.1.write(7) };
        rank.meet();
        let mut kept = Some(kept);
        if rank.index == 0 {
            drop(kept.take());
            assert_eq!(rank.group.in_window(1, place, 1), None);
            rank.group.forget_dropped();
            assert_eq!(rank.group.in_window(1, place, 1), None);
        }
        rank.meet();
        if rank.index == 1 {
            rank.group.forget_dropped();
            let read = |peer| {
                rank.group.in_window(peer, place, 1).map(|at| {
                    // SAFETY: this rank still has the window.
                    unsafe { at.read() }
                })
            };
            assert_eq!([read(0), read(1)], [Some(0), Some(7)], "rank 0's memory was given back, and rank 1's was not");
        }
        let again = base(rank.open(5000, 1));
        assert_eq!(rank.group.find_window(again.1, 1).unwrap().window, 2);
    });
}

#[test]
#[expect(unsafe_code, reason = "reads and writes what windows hand out")]
fn a_private_segment_is_its_own_ranks_and_the_others_see_what_was_there() {
    if cfg!(one_mapping) {
        return println!("skipped: ranks share one mapping");
    }
    // Ordinary pages, and huge ones.
    for bytes in [5000, (4 << 20) + 1] {
        on_threads(3, |mut rank| {
            let me = rank.index;
            let (storage, start) = base(rank.open(bytes, 1));
            let place = rank.group.find_window(start, bytes).unwrap();
            // SAFETY: inside this rank's own segment, as in all that follows; the others read it only after the
            // meetings.
            let write = |at: usize, byte: u8| unsafe { start.add(at).write(byte) };
            write(0, me as u8 + 1);
            write(bytes - 1, me as u8 + 1);
            rank.meet();
            if me == 1 {
                rank.group.windows.keep_own(place.window).unwrap();
                // SAFETY: inside this rank's own segment.
                assert_eq!(unsafe { (start.read(), start.add(bytes - 1).read()) }, (2, 2), "the rank finds what was there");
                assert_eq!(rank.group.find_window(start, 1), None, "nothing of it is lent again");
                rank.group.windows.keep_own(place.window).unwrap();
                write(0, 99);
                // SAFETY: inside this rank's own segment.
                assert_eq!(unsafe { start.read() }, 99);
            }
            let seen = |rank: &Rank, peer| {
                let read = |offset| {
                    let at = rank.group.in_window(peer, WindowOffset { offset, ..place }, 1).unwrap();
                    // SAFETY: mapped; since the first meeting, nothing has written there except rank 1 to its private
                    // segment.
                    unsafe { at.read() }
                };
                [read(0), read(bytes - 1)]
            };
            rank.meet();
            if me != 1 {
                assert_eq!([0, 1, 2].map(|peer| seen(&rank, peer)), [[1; 2], [2; 2], [3; 2]], "{bytes} B");
            }
            rank.meet();
            let mut storage = Some(storage);
            if me == 1 {
                drop(storage.take());
                rank.group.forget_dropped();
            }
            rank.meet();
            if me != 1 {
                assert_eq!(seen(&rank, 1), [2; 2], "the pages stay for those who may be reading");
            }
            rank.meet();
        });
    }
}

/// A fold that reads its inputs, and writes nothing.
struct Looks<F>(F);

#[expect(unsafe_code, reason = "a fold works on raw memory")]
impl<F: Fn(&[*const u8])> Fold for Looks<F> {
    fn element_bytes(&self) -> usize {
        1
    }

    fn is_commutative(&self) -> bool {
        true
    }

    unsafe fn fold(&self, _into: *mut u8, inputs: &[*const u8], _bytes: usize, _last: bool) {
        (self.0)(inputs);
    }
}

#[test]
#[expect(unsafe_code, reason = "reads and writes what windows hand out")]
fn a_rank_whose_segment_cannot_be_made_private_waits_for_who_reads_it() {
    const BLOCK: usize = 4096;
    let has_returned = &AtomicBool::new(false);
    on_threads(2, |mut rank| {
        let (_storage, start) = base(rank.open(2 * BLOCK, 1));
        rank.group.windows.lose_view(1);
        // SAFETY: this rank's own segment, which the other one reads in the call below.
        unsafe { start.write_bytes(7, 2 * BLOCK) };
        rank.meet();
        let (health, region) = (Health::default(), Arc::clone(&rank.group.region));
        let fold = Looks(|inputs: &[*const u8]| {
            if rank.index == 1 {
                // Rank 1 waits for rank 0 in the last step, without success.
                return health.end(AbortReason::Aborted { by: 1 });
            }
            while !region.member(1).has_left_since(1) {
                std::thread::yield_now();
            }
            // A test cannot wait for a call not to return. By now it probably would have.
            for _ in 0..if cfg!(miri) { 10 } else { 10_000 } {
                std::thread::yield_now();
            }
            // SAFETY: rank 1's buffer, lent for this call.
            assert_eq!(unsafe { inputs[1].read() }, 7);
            assert!(!has_returned.load(Ordering::Acquire), "rank 1 has its buffer back while this fold reads it");
        });
        let mut block = vec![0_u8; BLOCK];
        let memory = Memory { source: start, destination: block.as_mut_ptr() };
        let context = CallContext {
            call: &call(Collective::ReduceScatter, 1),
            deadline: &rank.deadline,
            health: &health,
            recorder: &crate::flight::Flight::default(),
        };
        // SAFETY: a source of two blocks, and room for one.
        let result = unsafe { rank.group.reduce_scatter(memory, Blocks::Equal(BLOCK), &fold, true, &context) };
        assert_eq!(result.unwrap_err().abort_reason, AbortReason::Aborted { by: 1 });
        if rank.index == 1 {
            has_returned.store(true, Ordering::Release);
            // SAFETY: this rank's own segment, which no rank reads now.
            unsafe { start.write_bytes(9, 2 * BLOCK) };
        }
    });
}

#[test]
fn windows_come_and_go_in_any_order() {
    const SEED: u64 = 77;
    on_threads(2, |mut rank| {
        let mut random = Random(SEED);
        let mut open: Vec<(u32, Storage, *mut u8, usize)> = Vec::new();
        for number in 1..if cfg!(miri) { 20 } else { 200 } {
            let bytes = 1 + random.below(20_000);
            let (storage, start) = base(rank.open(bytes, 1));
            open.push((number, storage, start, bytes));
            while open.len() > 20 || !open.is_empty() && random.below(3) == 0 {
                open.swap_remove(random.below(open.len()));
            }
            rank.group.forget_dropped();
            assert_eq!(rank.group.windows.count(), open.len(), "seed {SEED}, window {number}");
            for (number, _, start, bytes) in &open {
                assert_eq!(rank.group.find_window(*start, *bytes), Some(WindowOffset { window: *number, offset: 0 }), "seed {SEED}");
                assert!(rank.group.in_window(1, WindowOffset { window: *number, offset: 0 }, *bytes).is_some(), "seed {SEED}");
            }
        }
    });
}

#[test]
fn more_than_there_is_is_refused_to_everyone() {
    on_threads(2, |mut rank| {
        for bytes in [1 << 45, isize::MAX as usize, usize::MAX] {
            let site = rank.group.site().unwrap();
            let refused = match site.open(&mut rank.exchange, Size { bytes, align: 1 }, &rank.deadline) {
                Err(ShareError::Here(error)) => (rank.index, error.to_string()),
                Err(ShareError::There(culprit, reason)) => (culprit, reason),
                _ => panic!("{bytes} B were given"),
            };
            assert!(refused.1.contains("available") || refused.1.contains("address space"), "{refused:?}");
            assert!(bytes != 1 << 45 || refused.0 == 0, "{refused:?}");
        }
        rank.open(1, 1);
    });
}
