//! Tests of every collective, at every size at which its algorithm changes, in place and not, against an oracle.

#![expect(unsafe_code, reason = "collectives take raw memory")]

use super::{Random, Rank, on_threads};
use crate::call::Collective;
use crate::host::fold::Fold;
use crate::host::shm::layout::RegionLayout;
use crate::host::shm::{Blocks, Memory};

/// The value of bytes to which nothing was written.
const UNTOUCHED: u8 = 0xa5;

/// A buffer aligned to 16 bytes, with bytes after its end that must not change.
struct Buffer {
    words: Vec<u128>,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Self {
        Self { words: vec![u128::from_ne_bytes([UNTOUCHED; 16]); len / 16 + 1], len }
    }

    fn of(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    fn at(&mut self, offset: usize) -> *mut u8 {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add(offset)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the words have at least that many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }

    /// Returns the bytes, after checking that nothing was written behind them.
    fn checked(&mut self) -> &[u8] {
        // SAFETY: the words have at least that many bytes.
        let all = unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), self.words.len() * 16) };
        assert!(all[self.len..].iter().all(|byte| *byte == UNTOUCHED), "written beyond {} bytes", self.len);
        &all[..self.len]
    }
}

/// Folds for the tests. The last fold adds one to each element's first byte, so that each omission or repetition shows.
enum TestFold {
    /// The sum of bytes, with elements of this many bytes.
    Sum(usize),
    /// Maps `x -> a x + b` of 32-bit words, applied one after the other: associative, not commutative.
    Chain,
}

impl TestFold {
    /// Computes `into op= from` for one element.
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        match self {
            TestFold::Sum(_) => into.iter_mut().zip(from).for_each(|(a, b)| *a = a.wrapping_add(*b)),
            TestFold::Chain => {
                let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
                let (a, b, c, d) = (word(into, 0), word(into, 4), word(from, 0), word(from, 4));
                into[..4].copy_from_slice(&a.wrapping_mul(c).to_le_bytes());
                into[4..].copy_from_slice(&b.wrapping_mul(c).wrapping_add(d).to_le_bytes());
            }
        }
    }

    /// Returns the fold of all inputs, computed in the plainest way.
    fn expected(&self, inputs: &[Vec<u8>], last: bool) -> Vec<u8> {
        let element = self.element_bytes();
        let mut result = inputs[0].clone();
        for input in &inputs[1..] {
            result.chunks_mut(element).zip(input.chunks(element)).for_each(|(into, from)| self.combine(into, from));
        }
        result.chunks_mut(element).for_each(|into| into[0] = into[0].wrapping_add(last.into()));
        result
    }
}

impl Fold for TestFold {
    fn element_bytes(&self) -> usize {
        match self {
            TestFold::Sum(element) => *element,
            TestFold::Chain => 8,
        }
    }

    fn is_commutative(&self) -> bool {
        matches!(self, TestFold::Sum(_))
    }

    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize, last: bool) {
        let element = self.element_bytes();
        assert_eq!(bytes % element, 0);
        let alignment = (element & element.wrapping_neg()).min(16);
        assert!(
            inputs.iter().all(|input| input.addr().is_multiple_of(alignment)) && into.addr().is_multiple_of(alignment),
            "elements of {element} B"
        );
        // SAFETY: that many bytes each, which nothing writes now, as the caller has promised.
        let inputs: Vec<_> = inputs.iter().map(|input| unsafe { std::slice::from_raw_parts(*input, bytes) }.to_vec()).collect();
        let result = self.expected(&inputs, last);
        // SAFETY: that many bytes, as the caller has promised; the result is a vector of its own.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), into, bytes) };
    }
}

/// Returns what a rank contributes: bytes that differ by rank, position and round.
fn input(rank: usize, len: usize, round: u64) -> Vec<u8> {
    let mut random = Random(round * 100 + rank as u64 + 1);
    (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(len).collect()
}

/// Returns the contributions of all ranks.
fn inputs(ranks: usize, len: usize, round: u64) -> Vec<Vec<u8>> {
    (0..ranks).map(|rank| input(rank, len, round)).collect()
}

/// Returns sizes around every limit, as multiples of an element. The largest are left out if there are many ranks.
fn sizes(ranks: usize, element: usize) -> Vec<usize> {
    let slot = RegionLayout::new(ranks).unwrap().slot_bytes();
    let all = [0, 1, 3, 24, 25, 4095, 4096, 4097, 16 << 10, (16 << 10) + 1, slot - 1, slot, slot + 1, 3 * slot + 5];
    // Under Miri, only the small ones.
    let all = if cfg!(miri) { &all[..if ranks > 2 { 5 } else { 8 }] } else { &all };
    let mut sizes: Vec<_> = all.iter().map(|bytes| bytes.next_multiple_of(element)).collect();
    sizes.dedup();
    sizes.truncate(sizes.len() - usize::from(ranks > 4));
    sizes
}

/// One case: its round (which seeds its bytes), and whether it is in place.
struct Case {
    round: u64,
    in_place: bool,
}

/// Runs `check` for each case of each size, with pauses of random length, so that ranks run ahead of each other.
fn for_cases(rank: &mut Rank, sizes: &[usize], mut check: impl FnMut(&mut Rank, usize, Case)) {
    let mut random = Random(rank.index as u64 + 77);
    for bytes in sizes {
        for in_place in [false, true] {
            let case = Case { round: rank.sequence, in_place };
            for _ in 0..random.below(3) {
                std::thread::yield_now();
            }
            check(rank, *bytes, case);
        }
    }
}

/// Returns source and destination: one buffer in place, else two.
fn memory(source: &mut Buffer, destination: &mut Buffer, in_place: bool) -> Memory {
    let from = if in_place { destination.at(0) } else { source.at(0) };
    Memory { source: from, destination: destination.at(0) }
}

const RANKS: &[usize] = if cfg!(miri) { &[2, 3] } else { &[1, 2, 3, 4, 5, 6, 7, 8, 13] };

fn all_reduces(rank: &mut Rank, fold: &TestFold, sizes: &[usize]) {
    for_cases(rank, sizes, |rank, bytes, case| {
        let all = inputs(rank.size, bytes, case.round);
        let (mut source, mut destination) = (Buffer::of(&all[rank.index]), Buffer::new(bytes));
        if case.in_place {
            destination = Buffer::of(&all[rank.index]);
        }
        let memory = memory(&mut source, &mut destination, case.in_place);
        let last = case.round % 3 != 0;
        // SAFETY: both buffers have that many bytes.
        rank.make(Collective::AllReduce, |group, context| unsafe { group.all_reduce(memory, bytes, fold, last, context) }).unwrap();
        assert!(destination.checked() == fold.expected(&all, last), "{bytes} B, rank {} of {}", rank.index, rank.size);
        assert!(source.checked() == all[rank.index]);
    });
}

#[test]
fn all_reduce_folds_in_rank_order() {
    for &ranks in RANKS {
        on_threads(ranks, |mut rank| {
            all_reduces(&mut rank, &TestFold::Sum(1), &sizes(ranks, 1));
            all_reduces(&mut rank, &TestFold::Chain, &sizes(ranks, 8));
        });
    }
}

#[test]
fn elements_of_any_size_are_folded() {
    for &ranks in if cfg!(miri) { &[2][..] } else { &[2, 3, 5] } {
        on_threads(ranks, |mut rank| {
            for &element in if cfg!(miri) { &[3, 24][..] } else { &[3, 16, 24, 128, 5000, 64 << 10] } {
                let sizes = [1, 2, 7].map(|count| count * element);
                all_reduces(&mut rank, &TestFold::Sum(element), &sizes);
                reduce_scatters(&mut rank, &TestFold::Sum(element), &sizes);
            }
        });
    }
}

#[test]
fn an_element_larger_than_a_slot_is_refused() {
    on_threads(2, |mut rank| {
        let mut buffer = Buffer::new(70_000);
        let memory = Memory { source: buffer.at(0), destination: buffer.at(0) };
        // SAFETY: the buffer has that many bytes.
        let refused = rank.make(Collective::AllReduce, |group, context| unsafe {
            group.all_reduce(memory, 70_000, &TestFold::Sum(70_000), true, context)
        });
        assert!(refused.is_err() && buffer.checked().iter().all(|byte| *byte == UNTOUCHED));
    });
}

#[test]
fn reduce_touches_the_root_alone() {
    for &ranks in RANKS {
        let fold = TestFold::Chain;
        on_threads(ranks, |mut rank| {
            for_cases(&mut rank, &sizes(ranks, 8), |rank, bytes, case| {
                let root = case.round as usize % rank.size;
                let all = inputs(rank.size, bytes, case.round);
                let in_place = case.in_place && rank.index == root;
                let (mut source, mut destination) = (Buffer::of(&all[rank.index]), Buffer::new(bytes));
                if in_place {
                    destination = Buffer::of(&all[rank.index]);
                }
                let memory = memory(&mut source, &mut destination, in_place);
                // SAFETY: both buffers have that many bytes.
                rank.make(Collective::Reduce, |group, context| unsafe { group.reduce(memory, bytes, root, &fold, true, context) }).unwrap();
                let expected = if rank.index == root { fold.expected(&all, true) } else { vec![UNTOUCHED; bytes] };
                assert!(destination.checked() == expected, "{bytes} B, rank {} of {ranks}, root {root}", rank.index);
                assert!(source.checked() == all[rank.index]);
            });
        });
    }
}

/// Returns lengths that differ by rank, some zero, each a multiple of an element, and where the blocks begin when laid
/// side by side.
fn uneven(ranks: usize, bytes: usize, element: usize) -> (Vec<usize>, Vec<usize>) {
    let lengths: Vec<usize> = (0..ranks).map(|rank| if rank % 3 == 1 { 0 } else { bytes + rank * element }).collect();
    let offsets = lengths.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len))).collect();
    (lengths, offsets)
}

fn reduce_scatters(rank: &mut Rank, fold: &TestFold, sizes: &[usize]) {
    for_cases(rank, sizes, |rank, bytes, case| {
        let (lengths, offsets) = uneven(rank.size, bytes, fold.element_bytes());
        let equal = (vec![bytes; rank.size], (0..rank.size).map(|index| index * bytes).collect::<Vec<_>>());
        for (blocks, (lengths, offsets)) in
            [(Blocks::Equal(bytes), &equal), (Blocks::Varied { lengths: &lengths, offsets: &offsets }, &(lengths.clone(), offsets.clone()))]
        {
            let total = lengths.iter().sum();
            let (start, len) = (offsets[rank.index], lengths[rank.index]);
            let all = inputs(rank.size, total, case.round);
            let (mut source, mut destination) = (Buffer::of(&all[rank.index]), Buffer::new(len));
            let into = if case.in_place { source.at(start) } else { destination.at(0) };
            let memory = Memory { source: source.at(0), destination: into };
            // SAFETY: the source holds all blocks, the destination one.
            rank.make(Collective::ReduceScatter, |group, context| unsafe { group.reduce_scatter(memory, blocks, fold, true, context) })
                .unwrap();
            let expected = &fold.expected(&all, true)[start..start + len];
            let mut left = all[rank.index].clone();
            if case.in_place {
                left[start..start + len].copy_from_slice(expected);
            } else {
                assert!(destination.checked() == expected, "{bytes} B, rank {} of {}", rank.index, rank.size);
            }
            assert!(source.checked() == left, "{bytes} B, rank {} of {}", rank.index, rank.size);
        }
    });
}

#[test]
fn reduce_scatter_gives_each_rank_its_block() {
    for &ranks in RANKS {
        let sizes: Vec<_> = sizes(ranks, 8).iter().map(|bytes| (bytes / ranks).next_multiple_of(8)).collect();
        on_threads(ranks, |mut rank| reduce_scatters(&mut rank, &TestFold::Chain, &sizes));
    }
}

#[test]
fn broadcast_reaches_everyone() {
    for &ranks in RANKS {
        on_threads(ranks, |mut rank| {
            for_cases(&mut rank, &sizes(ranks, 1), |rank, bytes, case| {
                let root = case.round as usize % rank.size;
                let sent = input(root, bytes, case.round);
                let (mut source, mut destination) = (Buffer::of(&sent), Buffer::new(bytes));
                if case.in_place && rank.index == root {
                    destination = Buffer::of(&sent);
                }
                let mut memory = memory(&mut source, &mut destination, case.in_place);
                if rank.index != root {
                    memory.source = std::ptr::null();
                }
                // SAFETY: both buffers have that many bytes; the source is the root's alone.
                rank.make(Collective::Broadcast, |group, context| unsafe { group.broadcast(memory, bytes, root, context) }).unwrap();
                assert!(destination.checked() == sent, "{bytes} B, rank {} of {ranks}, root {root}", rank.index);
            });
        });
    }
}

#[test]
fn gathers_bring_every_block() {
    for &ranks in RANKS {
        on_threads(ranks, |mut rank| {
            for_cases(&mut rank, &sizes(ranks, 1), |rank, bytes, case| {
                let bytes = bytes / rank.size.min(4);
                let (lengths, offsets) = uneven(rank.size, bytes, 1);
                let equal: Vec<_> = (0..rank.size).map(|index| index * bytes).collect();
                gathers(rank, &case, Blocks::Equal(bytes), &vec![bytes; rank.size], &equal, Some(case.round as usize % ranks));
                gathers(rank, &case, Blocks::Equal(bytes), &vec![bytes; rank.size], &equal, None);
                gathers(rank, &case, Blocks::Varied { lengths: &lengths, offsets: &offsets }, &lengths, &offsets, None);
            });
        });
    }
}

/// Runs a gather to a root, or an all-gather.
fn gathers(rank: &mut Rank, case: &Case, blocks: Blocks<'_>, lengths: &[usize], offsets: &[usize], root: Option<usize>) {
    let total = lengths.iter().sum();
    let all: Vec<_> = lengths.iter().enumerate().map(|(index, len)| input(index, *len, case.round)).collect();
    let is_root = root.is_none_or(|root| root == rank.index);
    let (mut source, mut destination) = (Buffer::of(&all[rank.index]), Buffer::new(total));
    let mut memory = Memory { source: source.at(0), destination: destination.at(0) };
    if case.in_place && is_root {
        let start = offsets[rank.index];
        destination.bytes_mut()[start..start + lengths[rank.index]].copy_from_slice(&all[rank.index]);
        memory.source = destination.at(start);
    }
    let result = match root {
        // SAFETY: the source holds a block, the destination all of them.
        Some(root) => rank.make(Collective::Gather, |group, context| unsafe { group.gather(memory, lengths[0], root, context) }),
        // SAFETY: the source holds a block, the destination all of them.
        None => rank.make(Collective::AllGather, |group, context| unsafe { group.all_gather(memory, blocks, context) }),
    };
    result.unwrap();
    let expected = if is_root { all.concat() } else { vec![UNTOUCHED; total] };
    assert!(destination.checked() == expected, "{lengths:?}, rank {}, root {root:?}", rank.index);
}

#[test]
fn scatter_and_all_to_all_bring_each_rank_its_blocks() {
    for &ranks in RANKS {
        on_threads(ranks, |mut rank| {
            for_cases(&mut rank, &sizes(ranks, 1), |rank, bytes, case| {
                let block = bytes / rank.size;
                scatters(rank, &case, block, case.round as usize % ranks);
                all_to_alls(rank, &case, block);
            });
        });
    }
}

fn scatters(rank: &mut Rank, case: &Case, block: usize, root: usize) {
    let sent = input(root, block * rank.size, case.round);
    let own = rank.index * block..(rank.index + 1) * block;
    let (mut source, mut destination) = (Buffer::of(&sent), Buffer::new(block));
    let mut memory = Memory { source: source.at(0), destination: destination.at(0) };
    let in_place = case.in_place && rank.index == root;
    if in_place {
        memory.destination = source.at(own.start);
    } else if rank.index != root {
        memory.source = std::ptr::null();
    }
    // SAFETY: the root's source holds a block per rank, the destination one.
    rank.make(Collective::Scatter, |group, context| unsafe { group.scatter(memory, block, root, context) }).unwrap();
    if !in_place {
        assert!(destination.checked() == &sent[own], "{block} B, rank {}, root {root}", rank.index);
    }
    assert!(source.checked() == sent);
}

fn all_to_alls(rank: &mut Rank, case: &Case, block: usize) {
    let all = inputs(rank.size, block * rank.size, case.round);
    let (mut source, mut destination) = (Buffer::of(&all[rank.index]), Buffer::new(block * rank.size));
    if case.in_place {
        destination = Buffer::of(&all[rank.index]);
    }
    let memory = memory(&mut source, &mut destination, case.in_place);
    // SAFETY: both hold a block per rank.
    rank.make(Collective::AllToAll, |group, context| unsafe { group.all_to_all(memory, block, context) }).unwrap();
    let own = rank.index * block..(rank.index + 1) * block;
    let expected: Vec<u8> = all.iter().flat_map(|input| &input[own.clone()]).copied().collect();
    assert!(destination.checked() == expected, "{block} B, rank {}", rank.index);
}

#[test]
fn ranks_may_run_ahead_of_each_other() {
    for ranks in [2, 3, 7] {
        on_threads(ranks, |mut rank| {
            let mut random = Random(rank.index as u64);
            for round in 0..if cfg!(miri) { 40 } else { 400_u64 } {
                // In each round, one rank does not wait.
                if round as usize % ranks != rank.index {
                    for _ in 0..random.below(4) {
                        std::thread::yield_now();
                    }
                }
                let mine = (round << 8) + rank.index as u64;
                let mut buffer = Buffer::of(&mine.to_le_bytes());
                let memory = Memory { source: buffer.at(0), destination: buffer.at(0) };
                let fold = TestFold::Chain;
                // SAFETY: the buffer has eight bytes.
                rank.make(Collective::AllReduce, |group, context| unsafe { group.all_reduce(memory, 8, &fold, false, context) }).unwrap();
                let all: Vec<_> = (0..ranks as u64).map(|index| ((round << 8) + index).to_le_bytes().to_vec()).collect();
                assert!(buffer.checked() == fold.expected(&all, false), "round {round}");
            }
        });
    }
}
