//! One checked call, how its buffers are shared out, and the 32 bytes by which ranks agree that they make the same one.

use std::fmt;

use crate::element::TypeTag;
use crate::op::ReduceOp;

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Kind {
    Barrier = 1,
    Broadcast,
    AllReduce,
    Reduce,
    AllGather,
    AllGatherV,
    ReduceScatter,
    ReduceScatterV,
    Gather,
    GatherV,
    Scatter,
    ScatterV,
    AllToAll,
    AllToAllV,
}

impl Kind {
    /// Every collective, in the order of their numbers.
    pub(crate) const ALL: [Kind; 14] = [
        Kind::Barrier,
        Kind::Broadcast,
        Kind::AllReduce,
        Kind::Reduce,
        Kind::AllGather,
        Kind::AllGatherV,
        Kind::ReduceScatter,
        Kind::ReduceScatterV,
        Kind::Gather,
        Kind::GatherV,
        Kind::Scatter,
        Kind::ScatterV,
        Kind::AllToAll,
        Kind::AllToAllV,
    ];

    /// As the method is named.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Barrier => "barrier",
            Kind::Broadcast => "broadcast",
            Kind::AllReduce => "all_reduce",
            Kind::Reduce => "reduce",
            Kind::AllGather => "all_gather",
            Kind::AllGatherV => "all_gather_v",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::ReduceScatterV => "reduce_scatter_v",
            Kind::Gather => "gather",
            Kind::GatherV => "gather_v",
            Kind::Scatter => "scatter",
            Kind::ScatterV => "scatter_v",
            Kind::AllToAll => "all_to_all",
            Kind::AllToAllV => "all_to_all_v",
        }
    }
}

/// How the bytes of a buffer are shared out between ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Every rank's block has this many bytes; for calls without blocks, the whole vector.
    Equal(usize),
    /// One block per rank, of these many bytes, known to this rank.
    Blocks(Vec<usize>),
    /// Only this rank's own block is known here (`gather_v`, `scatter_v` on other ranks than the root).
    Own(usize),
    /// What this rank sends to each rank, and what it gets from each.
    Pairs { send: Vec<usize>, receive: Vec<usize> },
}

impl Layout {
    /// Where a rank's block begins and how long it is, in bytes.
    pub(crate) fn block(&self, rank: usize) -> (usize, usize) {
        match self {
            Layout::Equal(bytes) => (rank * bytes, *bytes),
            Layout::Blocks(blocks) => (blocks[..rank].iter().sum(), blocks[rank]),
            Layout::Own(bytes) => (0, *bytes),
            Layout::Pairs { send, .. } => (send[..rank].iter().sum(), send[rank]),
        }
    }
}

/// A call whose arguments have been checked on this rank. What all ranks must agree on, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    /// Which collective.
    pub(crate) kind: Kind,
    /// `Reduction::code`, 0 where nothing is reduced.
    pub(crate) op: u32,
    /// The element type.
    pub(crate) element: TypeTag,
    /// Elements per block (or of the whole vector), 0 where ranks may differ.
    pub(crate) count: u64,
    /// The root, where there is one.
    pub(crate) root: Option<u32>,
    /// 24 bits of hash over the counts that every rank passes (`all_gather_v`, `reduce_scatter_v`), else 0.
    pub(crate) counts_hash: u32,
    /// The how-manieth collective of its communicator.
    pub(crate) sequence: u64,
}

/// The root field's value where there is no root.
const NO_ROOT: u32 = u32::MAX;

impl Call {
    /// Length of the encoded form in bytes.
    pub(crate) const FINGERPRINT_BYTES: usize = 32;

    /// The encoded form: little-endian sequence, count, op, element, root, then kind and the counts' hash in one word.
    pub(crate) fn fingerprint(&self) -> [u64; 4] {
        [
            self.sequence,
            self.count,
            u64::from(self.op) | u64::from(self.element.to_code()) << 32,
            u64::from(self.root.unwrap_or(NO_ROOT)) | u64::from(self.kind as u8) << 32 | u64::from(self.counts_hash & 0xff_ffff) << 40,
        ]
    }

    /// The encoded form as bytes.
    pub(crate) fn to_bytes(self) -> [u8; Self::FINGERPRINT_BYTES] {
        let mut bytes = [0; Self::FINGERPRINT_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.fingerprint()) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The reverse of [`Call::fingerprint`]; `None` for words that no call has.
    pub(crate) fn from_fingerprint(words: [u64; 4]) -> Option<Self> {
        let root = words[3] as u32;
        Some(Self {
            sequence: words[0],
            count: words[1],
            op: words[2] as u32,
            element: TypeTag::from_code((words[2] >> 32) as u32)?,
            root: (root != NO_ROOT).then_some(root),
            kind: *Kind::ALL.get(usize::from((words[3] >> 32) as u8).checked_sub(1)?)?,
            counts_hash: (words[3] >> 40) as u32,
        })
    }

    /// The reverse of [`Call::to_bytes`].
    pub(crate) fn from_bytes(bytes: &[u8; Self::FINGERPRINT_BYTES]) -> Option<Self> {
        let mut words = [0; 4];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        Self::from_fingerprint(words)
    }

    /// The op in words, where there is one.
    pub(crate) fn op_name(&self) -> Option<String> {
        match (self.op as u8, ReduceOp::ALL.iter().find(|op| u32::from(op.code()) == self.op)) {
            (0, _) => None,
            (_, Some(op)) => Some(op.to_string()),
            (254, _) => Some(format!("custom op #{:06x} in rank order", self.op >> 8)),
            _ => Some(format!("custom op #{:06x}", self.op >> 8)),
        }
    }

    /// 24 bits of hash over per-rank counts (FNV-1a).
    pub(crate) fn hash_counts(counts: &[usize]) -> u32 {
        let hash = counts
            .iter()
            .flat_map(|count| (*count as u64).to_le_bytes())
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        (hash ^ hash >> 24) & 0xff_ffff
    }
}

impl fmt::Display for Call {
    /// `all_reduce(sum, f32, count 4) number 7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.kind.name())?;
        if self.kind != Kind::Barrier {
            if let Some(op) = self.op_name() {
                write!(f, "{op}, ")?;
            }
            write!(f, "{}, count {}", self.element, self.count)?;
        }
        if self.counts_hash != 0 {
            write!(f, ", counts #{:06x}", self.counts_hash)?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        write!(f, ") number {}", self.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;

    fn example() -> Call {
        Call {
            kind: Kind::Reduce,
            op: ReduceOp::BitXor.code().into(),
            element: TypeTag::Scalar(DType::U16),
            count: 1 << 40,
            root: Some(3),
            counts_hash: 0xab_cdef,
            sequence: 99,
        }
    }

    #[test]
    fn fingerprint_survives_the_wire() {
        for kind in Kind::ALL {
            for root in [None, Some(0), Some(70_000)] {
                let call = Call { kind, root, ..example() };
                assert_eq!(Call::from_bytes(&call.to_bytes()), Some(call));
            }
        }
    }

    #[test]
    fn nonsense_is_no_call() {
        assert_eq!(Call::from_bytes(&[0xff; 32]), None);
        assert_eq!(Call::from_bytes(&[0; 32]), None);
    }

    #[test]
    fn a_call_reads_as_it_was_written() {
        assert_eq!(example().to_string(), "reduce(bxor, u16, count 1099511627776, counts #abcdef, root 3) number 99");
        let custom = Call { op: 0xab_cdef << 8 | 254, counts_hash: 0, root: None, ..example() };
        assert_eq!(custom.to_string(), "reduce(custom op #abcdef in rank order, u16, count 1099511627776) number 99");
    }
}
