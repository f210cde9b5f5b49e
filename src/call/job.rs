//! One checked collective with its buffers, ready for the backend that their memory belongs to. The backends address
//! and fold buffers in different ways; everything else is common.

#![expect(unsafe_code, reason = "a job contains the addresses of its buffers, and is sent to the thread that runs it")]

use std::fmt;

use crate::call::{BlockLayout, Call, Collective};

/// An address of memory, in the form that a backend uses.
pub(crate) trait Address: Copy + fmt::Debug {
    /// Returns the address that is `bytes` bytes further on.
    fn advanced(self, bytes: usize) -> Self;
}

impl Address for *const u8 {
    fn advanced(self, bytes: usize) -> Self {
        self.wrapping_add(bytes)
    }
}

impl Address for *mut u8 {
    fn advanced(self, bytes: usize) -> Self {
        self.wrapping_add(bytes)
    }
}

/// An address in the memory of a device.
impl Address for u64 {
    fn advanced(self, bytes: usize) -> Self {
        self.wrapping_add(bytes as u64)
    }
}

/// The caller's two buffers, in bytes; they may be the same memory. An absent buffer has length 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<S, D> {
    /// The memory that is read.
    pub(crate) source: S,
    pub(crate) source_len: usize,
    /// The memory that is written.
    pub(crate) destination: D,
    pub(crate) destination_len: usize,
}

// SAFETY: they are addresses, which are not dereferenced here. The backend that runs a job dereferences them, while its
// caller borrows the buffers (a blocking call) or the call owns them beside the job (a background call); their contents
// are `Send` (`Data: Send`).
unsafe impl<S: Address, D: Address> Send for Operands<S, D> {}

/// A buffer that is a list of separate blocks, one for each rank. Offsets count as if the blocks were contiguous, in
/// the order of ranks.
#[derive(Debug)]
pub(crate) struct List<A> {
    /// Each block's offset, its number of bytes, and its address. There is at least one.
    blocks: Vec<(usize, usize, A)>,
}

impl<A: Address> List<A> {
    /// Creates a list from each rank's address and bytes.
    pub(crate) fn new(given: impl Iterator<Item = (A, usize)>) -> Self {
        let place = |start: &mut usize, (address, len)| Some((std::mem::replace(start, *start + len), len, address));
        Self { blocks: given.scan(0, place).collect() }
    }

    /// Returns the block that contains the byte at an offset.
    fn of(&self, offset: usize) -> &(usize, usize, A) {
        // The last of the blocks that begin there: the others are empty. The first begins at 0.
        &self.blocks[self.blocks.partition_point(|(start, ..)| *start <= offset) - 1]
    }

    /// Returns the address of the byte at an offset.
    pub(crate) fn at(&self, offset: usize) -> A {
        let (start, _, address) = self.of(offset);
        address.advanced(offset - start)
    }

    /// Returns whether a range lies in one block.
    pub(crate) fn holds(&self, offset: usize, len: usize) -> bool {
        let (start, block, _) = self.of(offset);
        len == 0 || offset - start <= *block && len <= *block - (offset - start)
    }

    /// Returns every block's address and bytes.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (A, usize)> {
        self.blocks.iter().map(|(_, len, address)| (*address, *len))
    }
}

/// The buffers of a job that are lists.
#[derive(Debug)]
pub(crate) struct Lists<S, D> {
    pub(crate) source: Option<List<S>>,
    pub(crate) destination: Option<List<D>>,
}

// SAFETY: as for `Operands`: addresses, which are not dereferenced here. The backend that runs the job dereferences
// them, while its caller borrows the blocks or the call owns them beside it; their contents are `Send` (`Data: Send`).
unsafe impl<S: Address, D: Address> Send for Lists<S, D> {}

/// A checked collective, whose elements are folded by an `R`.
#[derive(Debug)]
pub(crate) struct Job<S, D, R> {
    /// The values that the ranks must agree on. The backend sets the sequence number.
    pub(crate) call: Call,
    /// The caller's buffers.
    pub(crate) memory: Operands<S, D>,
    /// How the buffers are divided between the ranks.
    pub(crate) layout: BlockLayout,
    /// How elements are folded, for calls that reduce.
    pub(crate) reduction: Option<R>,
    /// The size of one element in bytes.
    pub(crate) element_bytes: usize,
    /// Whether the caller passed one buffer as source and destination. Both parts of `memory` are then this whole
    /// buffer, unless the contribution was multiplied first and is therefore in other memory.
    pub(crate) in_place: bool,
    /// The buffers that are lists. For those, `memory` has the length and no address. Only for `gather_v`, `scatter_v`
    /// and `all_to_all_v`, and never in place.
    pub(crate) lists: Option<Box<Lists<S, D>>>,
}

impl<S: Address, D: Address, R> Job<S, D, R> {
    /// Returns the buffers as backends expect them: for a call in place, a buffer that is one block of the other is cut
    /// down to that block.
    pub(crate) fn narrowed(&self, rank: usize) -> Operands<S, D> {
        let mut memory = self.memory;
        match self.call.kind {
            _ if !self.in_place => {}
            Collective::AllGather | Collective::AllGatherV | Collective::Gather => {
                let (offset, length) = self.layout.block(rank);
                (memory.source, memory.source_len) = (memory.source.advanced(offset), length);
            }
            Collective::ReduceScatter | Collective::ReduceScatterV | Collective::Scatter => {
                let (offset, length) = self.layout.block(rank);
                (memory.destination, memory.destination_len) = (memory.destination.advanced(offset), length);
            }
            _ => {}
        }
        memory
    }

    /// Returns the address of a part of the source, for calls that are not in place.
    pub(crate) fn source_at(&self, offset: usize) -> S {
        match self.lists.as_deref() {
            Some(Lists { source: Some(list), .. }) => list.at(offset),
            _ => self.memory.source.advanced(offset),
        }
    }

    /// Returns the address of a part of the destination, for calls that are not in place.
    pub(crate) fn destination_at(&self, offset: usize) -> D {
        match self.lists.as_deref() {
            Some(Lists { destination: Some(list), .. }) => list.at(offset),
            _ => self.memory.destination.advanced(offset),
        }
    }

    /// Returns the destination if it is a list.
    pub(crate) fn listed_destination(&self) -> Option<&List<D>> {
        self.lists.as_deref().and_then(|lists| lists.destination.as_ref())
    }

    /// Returns the bytes that this rank sends to `peer` and expects from it, for calls whose counts only pairs of ranks
    /// know. To itself, a rank sends what it expects: this has been checked.
    pub(crate) fn pair(&self, me: usize, peer: usize) -> [u64; 2] {
        let is_root = |rank: usize| self.call.root == Some(rank as u32);
        let bytes = match (self.call.kind, &self.layout) {
            (_, BlockLayout::Pairs { send, receive }) => [send[peer], receive[peer]],
            (Collective::GatherV, BlockLayout::Blocks(blocks)) if peer != me => [0, blocks[peer]],
            (Collective::ScatterV, BlockLayout::Blocks(blocks)) if peer != me => [blocks[peer], 0],
            (Collective::GatherV, BlockLayout::Own(own)) if is_root(peer) => [*own, 0],
            (Collective::ScatterV, BlockLayout::Own(own)) if is_root(peer) => [0, *own],
            _ => [0, 0],
        };
        bytes.map(|bytes| bytes as u64)
    }

    /// Returns the root, for calls that have one.
    #[cfg(feature = "cuda")]
    pub(crate) fn root(&self) -> usize {
        self.call.root.unwrap_or_default() as usize
    }

    /// Returns the number of bytes it moves, as reported to listeners.
    #[cfg(feature = "cuda")]
    pub(crate) fn bytes(&self) -> usize {
        self.memory.source_len.max(self.memory.destination_len)
    }

    /// Describes a call in words. If the call itself has no count, or a digest, the text gives this rank's own number
    /// of elements.
    pub(crate) fn in_words(&self, call: &Call) -> String {
        let elements = |bytes: usize| bytes / self.element_bytes.max(1);
        let sum = |blocks: &[usize]| elements(blocks.iter().sum());
        match &self.layout {
            BlockLayout::Equal(_) if call.is_many() => call.with_amount(format_args!("count {}", call.count)),
            BlockLayout::Equal(_) => call.to_string(),
            BlockLayout::Blocks(blocks) => call.with_amount(format_args!("count {} in {} blocks", sum(blocks), blocks.len())),
            BlockLayout::Own(bytes) => call.with_amount(format_args!("count {} on this rank", elements(*bytes))),
            BlockLayout::Pairs { send, receive } => {
                call.with_amount(format_args!("count {} to send and {} to receive", sum(send), sum(receive)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_finds_the_block_of_an_offset() {
        let list = List::new([(100_u64, 0), (200, 3), (300, 0), (400, 2), (500, 0)].into_iter());
        assert_eq!((0..5).map(|offset| list.at(offset)).collect::<Vec<_>>(), [200, 201, 202, 400, 401]);
        assert!(list.holds(0, 3) && list.holds(1, 2) && list.holds(3, 2) && list.holds(5, 0) && list.holds(2, 0));
        assert!(!list.holds(0, 4) && !list.holds(2, 2) && !list.holds(4, 2) && !list.holds(5, 1) && !list.holds(9, 1));
        assert!(!list.holds(1, usize::MAX) && !list.holds(usize::MAX, 2));
        assert_eq!(list.blocks().map(|(address, _)| address).collect::<Vec<_>>(), [100, 200, 300, 400, 500]);
    }
}
