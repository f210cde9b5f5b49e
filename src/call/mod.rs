//! One checked call, how its buffers are divided, and the 32 bytes by which ranks agree that they make the same call.

pub(crate) mod algorithm;
pub(crate) mod buffer;
pub(crate) mod element;
pub(crate) mod float8;
pub(crate) mod job;
pub(crate) mod op;

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::call::element::TypeTag;
use crate::call::op::ReduceOp;
use crate::error::{Error, Result};

/// A collective. All forms of a collective (`all_reduce`, `all_reduce_into`, `start_all_reduce` …) have the same value.
/// The value of `gather_list` is `GatherV`, that of `scatter_list` is `ScatterV`, and that of `all_to_all_list` is
/// `AllToAllV`.
///
/// ```
/// # use collectives::Collective;
/// assert_eq!("all_gather_v".parse::<Collective>()?, Collective::AllGatherV);
/// assert_eq!(Collective::AllReduce.name(), "all_reduce");
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Collective {
    /// `barrier`.
    Barrier = 1,
    /// `broadcast`.
    Broadcast,
    /// `all_reduce`.
    AllReduce,
    /// `reduce`.
    Reduce,
    /// `all_gather`.
    AllGather,
    /// `all_gather_v`: every rank knows all counts.
    AllGatherV,
    /// `reduce_scatter`.
    ReduceScatter,
    /// `reduce_scatter_v`: every rank knows all counts.
    ReduceScatterV,
    /// `gather`.
    Gather,
    /// `gather_v`: the root knows all counts.
    GatherV,
    /// `scatter`.
    Scatter,
    /// `scatter_v`: the root knows all counts.
    ScatterV,
    /// `all_to_all`.
    AllToAll,
    /// `all_to_all_v`: every rank knows its own counts.
    AllToAllV,
}

impl Collective {
    /// All collectives, in the order of their numbers.
    pub const ALL: [Collective; 14] = [
        Collective::Barrier,
        Collective::Broadcast,
        Collective::AllReduce,
        Collective::Reduce,
        Collective::AllGather,
        Collective::AllGatherV,
        Collective::ReduceScatter,
        Collective::ReduceScatterV,
        Collective::Gather,
        Collective::GatherV,
        Collective::Scatter,
        Collective::ScatterV,
        Collective::AllToAll,
        Collective::AllToAllV,
    ];

    /// Returns the method's name: `all_reduce`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Collective::Barrier => "barrier",
            Collective::Broadcast => "broadcast",
            Collective::AllReduce => "all_reduce",
            Collective::Reduce => "reduce",
            Collective::AllGather => "all_gather",
            Collective::AllGatherV => "all_gather_v",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::ReduceScatterV => "reduce_scatter_v",
            Collective::Gather => "gather",
            Collective::GatherV => "gather_v",
            Collective::Scatter => "scatter",
            Collective::ScatterV => "scatter_v",
            Collective::AllToAll => "all_to_all",
            Collective::AllToAllV => "all_to_all_v",
        }
    }

    /// Returns whether the collective reduces: `all_reduce`, `reduce`, `reduce_scatter`, `reduce_scatter_v`.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter | Collective::ReduceScatterV)
    }

    /// Returns whether the collective takes a root: `broadcast`, `reduce`, `gather`, `gather_v`, `scatter`,
    /// `scatter_v`.
    #[must_use]
    pub const fn is_rooted(self) -> bool {
        use Collective::{Broadcast, Gather, GatherV, Reduce, Scatter, ScatterV};
        matches!(self, Broadcast | Reduce | Gather | GatherV | Scatter | ScatterV)
    }

    /// Returns the name of the call on several buffers, if there is one.
    pub(crate) const fn name_of_many(self) -> Option<&'static str> {
        match self {
            Collective::Broadcast => Some("broadcast_many"),
            Collective::AllReduce => Some("all_reduce_many"),
            Collective::AllGather => Some("all_gather_many"),
            Collective::ReduceScatter => Some("reduce_scatter_many"),
            _ => None,
        }
    }

    /// Returns whether every rank passes the counts of all ranks, so that these must be the same everywhere.
    pub(crate) const fn lists_counts(self) -> bool {
        matches!(self, Collective::AllGatherV | Collective::ReduceScatterV)
    }

    /// Returns whether only the two ends of a transfer know its count.
    #[inline]
    pub(crate) const fn is_pairwise(self) -> bool {
        matches!(self, Collective::GatherV | Collective::ScatterV | Collective::AllToAllV)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Collective {
    type Err = Error;

    /// Parses the name.
    fn from_str(text: &str) -> Result<Self> {
        Collective::ALL.into_iter().find(|collective| collective.name() == text).ok_or_else(|| {
            let known = Collective::ALL.map(Collective::name).join(", ");
            Error::config(format!("collective {text:?}"), format!("not known; one of {known}"))
        })
    }
}

/// The kind of a reported or recorded call: a collective, or one end of a message. A `CallKind` can be compared with a
/// [`Collective`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallKind {
    /// A collective, in any form.
    Collective(Collective),
    /// A collective on several buffers in one call, such as `all_reduce_many`. A call with large buffers may be
    /// reported as several calls. `CallKind::Collective(AllReduce)` is equal to `Collective::AllReduce`, but
    /// `Many(AllReduce)` is not.
    Many(Collective),
    /// `all_gather_list`.
    AllGatherList,
    /// The sender's end of a message, in any form.
    Send,
    /// The receiver's end of a message, in any form.
    Recv,
}

impl CallKind {
    /// Returns the method's name, without `_into`: `all_reduce`, `send`, `recv`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            CallKind::Collective(collective) => collective.name(),
            CallKind::Many(collective) => match collective.name_of_many() {
                Some(name) => name,
                None => collective.name(),
            },
            CallKind::AllGatherList => "all_gather_list",
            CallKind::Send => "send",
            CallKind::Recv => "recv",
        }
    }
}

impl From<Collective> for CallKind {
    fn from(collective: Collective) -> Self {
        CallKind::Collective(collective)
    }
}

impl PartialEq<Collective> for CallKind {
    fn eq(&self, other: &Collective) -> bool {
        *self == CallKind::Collective(*other)
    }
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How the bytes of a buffer are divided between ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BlockLayout {
    /// Every rank's block has this many bytes. In a call without blocks, the whole vector has this many bytes.
    Equal(usize),
    /// There is one block per rank, and this rank knows the number of bytes of each block.
    Blocks(Vec<usize>),
    /// This rank knows only the number of bytes of its own block, because it is not the root of a `gather_v` or
    /// `scatter_v`.
    Own(usize),
    /// The number of bytes that this rank sends to each rank, and the number that it receives from each rank.
    Pairs { send: Vec<usize>, receive: Vec<usize> },
}

impl BlockLayout {
    /// Converts a layout in elements to one in bytes.
    #[inline(always)]
    pub(crate) fn in_bytes(mut self, element_bytes: usize) -> Self {
        // Handled first, and not in the match below, which goes through memory: the smallest calls have this layout.
        if let BlockLayout::Equal(count) = self {
            return BlockLayout::Equal(count * element_bytes);
        }
        match &mut self {
            BlockLayout::Equal(count) | BlockLayout::Own(count) => *count *= element_bytes,
            BlockLayout::Blocks(counts) => counts.iter_mut().for_each(|count| *count *= element_bytes),
            BlockLayout::Pairs { send, receive } => send.iter_mut().chain(receive).for_each(|count| *count *= element_bytes),
        }
        self
    }

    /// Returns the offset and the length of a rank's block, in bytes.
    pub(crate) fn block(&self, rank: usize) -> (usize, usize) {
        match self {
            BlockLayout::Equal(bytes) => (rank * bytes, *bytes),
            BlockLayout::Blocks(blocks) => (blocks[..rank].iter().sum(), blocks[rank]),
            BlockLayout::Own(bytes) => (0, *bytes),
            BlockLayout::Pairs { send, .. } => (send[..rank].iter().sum(), send[rank]),
        }
    }
}

/// A call whose arguments have been checked on this rank: exactly the values that all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    /// The collective.
    pub(crate) kind: Collective,
    /// `Reduction::code`, or 0 if nothing is reduced: 56 bits, or 32 if counts are listed, whose digest has the rest.
    pub(crate) op: u64,
    /// The element type.
    pub(crate) element: TypeTag,
    /// Elements per block (or of the whole vector), 0 if ranks may differ. If counts are listed it is their sum, for
    /// this rank's own records only: ranks compare the digest.
    pub(crate) count: u64,
    /// The root, if there is one.
    pub(crate) root: Option<u32>,
    /// [`Call::hash_counts`] if counts are listed (`all_gather_v`, `reduce_scatter_v`, and, with [`Call::MANY`], calls
    /// on several buffers), else 0.
    pub(crate) counts_hash: u128,
    /// Its number among the collectives of its communicator.
    pub(crate) sequence: u64,
}

/// The root field's value if there is no root.
const NO_ROOT: u32 = u32::MAX;

/// The position, in the last word, of the rest of the op or of the digest (above the root and the kind), and its mask.
const REST_AT: u32 = 40;
const REST_MASK: u64 = (1 << (u64::BITS - REST_AT)) - 1;

/// Set in the byte of the kind if the call is one on several buffers.
const MANY_KIND: u8 = 1 << 7;

/// The bits of a digest that fit in a fingerprint.
const DIGEST_MASK: u128 = (1 << 120) - 1;

impl Call {
    /// The op of the crate's own calls by which ranks compare their device calls. No call of a program has it.
    pub(crate) const COMPARISON: u64 = 252;

    /// The op of an `all_to_all_v` that is an `all_gather_list`: each rank's blocks for the others are the same.
    pub(crate) const SAME_FOR_ALL: u64 = 251;

    /// The bit that is set in the digest of a call on several buffers (`all_reduce_many` …), and in that of each
    /// collective that the call consists of. The digest covers the root and all lengths, in order.
    pub(crate) const MANY: u128 = 1 << 127;

    /// The length of the encoded form in bytes.
    pub(crate) const FINGERPRINT_BYTES: usize = 32;

    /// Encodes the call: little-endian sequence, count, op, element, root, then kind and the rest of the op in one
    /// word. If counts are listed, 120 bits of their digest replace the count, the root and the rest of the op.
    #[inline]
    pub(crate) fn fingerprint(&self) -> [u64; 4] {
        let (count, root, rest) = match self.lists_counts() {
            false => (self.count, self.root.unwrap_or(NO_ROOT), self.op >> 32),
            true => (self.counts_hash as u64, (self.counts_hash >> 64) as u32, (self.counts_hash >> 96) as u64),
        };
        self.words(count, root, rest)
    }

    /// Encodes the call for records: the fingerprint, but with the sum of listed counts and 24 bits of their digest.
    #[inline]
    pub(crate) fn record(&self) -> [u64; 4] {
        let rest = if self.lists_counts() { self.counts_hash as u64 } else { self.op >> 32 };
        self.words(self.count, self.root.unwrap_or(NO_ROOT), rest)
    }

    #[inline]
    fn words(&self, count: u64, root: u32, rest: u64) -> [u64; 4] {
        let op_and_element = self.op & 0xffff_ffff | u64::from(self.element.to_code()) << 32;
        let kind = self.kind as u8 | if self.is_many() { MANY_KIND } else { 0 };
        [self.sequence, count, op_and_element, u64::from(root) | u64::from(kind) << 32 | (rest & REST_MASK) << REST_AT]
    }

    /// Returns whether this is a call on several buffers.
    #[inline]
    pub(crate) fn is_many(&self) -> bool {
        self.counts_hash & Self::MANY != 0
    }

    /// Returns whether a digest represents its counts.
    #[inline]
    pub(crate) fn lists_counts(&self) -> bool {
        self.kind.lists_counts() || self.is_many()
    }

    /// Returns the method that made the call, regardless of its form.
    pub(crate) fn call_kind(&self) -> CallKind {
        match self.kind {
            Collective::AllToAllV if self.op == Self::SAME_FOR_ALL => CallKind::AllGatherList,
            kind if self.is_many() => CallKind::Many(kind),
            kind => CallKind::Collective(kind),
        }
    }

    /// Returns the method's name, without `_into`.
    pub(crate) fn name(&self) -> &'static str {
        self.call_kind().name()
    }

    /// Returns the same call as one on several buffers with these counts.
    pub(crate) fn of_many(self, counts: &[usize]) -> Self {
        let root = self.root.unwrap_or(NO_ROOT) as usize;
        let counts: Vec<usize> = std::iter::once(root).chain(counts.iter().copied()).collect();
        Self { op: self.op & 0xffff_ffff, counts_hash: Self::MANY | Self::hash_counts(self.op, &counts), ..self }
    }

    /// Returns the encoded form as bytes.
    pub(crate) fn to_bytes(self) -> [u8; Self::FINGERPRINT_BYTES] {
        let mut bytes = [0; Self::FINGERPRINT_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.fingerprint()) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reverses [`Call::fingerprint`]. Returns `None` for words that encode no call.
    pub(crate) fn from_fingerprint(words: [u64; 4]) -> Option<Self> {
        let call = Self::from_record(words)?;
        if !call.lists_counts() {
            return Some(call);
        }
        let digest = u128::from(words[1]) | u128::from(words[3] as u32) << 64 | u128::from(words[3] >> REST_AT) << 96;
        Some(Self { count: 0, root: None, counts_hash: digest | call.counts_hash & Self::MANY, ..call })
    }

    /// Reverses [`Call::record`], as far as the record contains the call. Returns `None` for words that encode no call.
    pub(crate) fn from_record(words: [u64; 4]) -> Option<Self> {
        let (root, rest) = (words[3] as u32, words[3] >> REST_AT);
        let (kind, many) = ((words[3] >> 32) as u8 & !MANY_KIND, (words[3] >> 32) as u8 & MANY_KIND != 0);
        let kind = *Collective::ALL.get(usize::from(kind).checked_sub(1)?)?;
        if many && kind.name_of_many().is_none() {
            return None;
        }
        let lists_counts = many || kind.lists_counts();
        Some(Self {
            sequence: words[0],
            count: words[1],
            op: words[2] & 0xffff_ffff | if lists_counts { 0 } else { rest << 32 },
            element: TypeTag::from_code((words[2] >> 32) as u32)?,
            root: (root != NO_ROOT).then_some(root),
            kind,
            counts_hash: if lists_counts { rest.into() } else { 0 } | if many { Self::MANY } else { 0 },
        })
    }

    /// Reverses [`Call::to_bytes`].
    pub(crate) fn from_bytes(bytes: &[u8; Self::FINGERPRINT_BYTES]) -> Option<Self> {
        let mut words = [0; 4];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        Self::from_fingerprint(words)
    }

    /// Returns the op in words, if there is one.
    pub(crate) fn op_name(&self) -> Option<String> {
        match (self.op as u8, ReduceOp::ALL.iter().find(|op| u64::from(op.code()) == self.op)) {
            (0, _) => None,
            _ if self.op == Self::SAME_FOR_ALL => None,
            _ if self.op == Self::COMPARISON => Some("comparing device calls".to_owned()),
            (_, Some(op)) => Some(op.to_string()),
            // The beginning of the name's hash, which every form of a call has.
            (254, _) => Some(format!("custom op #{:06x} in rank order", self.op as u32 >> 8)),
            _ => Some(format!("custom op #{:06x}", self.op as u32 >> 8)),
        }
    }

    /// Describes the call in words, with this rank's counts in place of the values that ranks compare.
    pub(crate) fn with_amount(&self, amount: impl fmt::Display) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut text, Some(&amount));
        text
    }

    fn write(&self, f: &mut impl fmt::Write, amount: Option<&dyn fmt::Display>) -> fmt::Result {
        write!(f, "{}(", self.name())?;
        if let Some(op) = self.op_name() {
            write!(f, "{op}, ")?;
        }
        match (self.kind, amount) {
            (Collective::Barrier, _) => {}
            (_, Some(amount)) => write!(f, "{}, {amount}", self.element)?,
            // Other ranks do not know the sum, and both sides of a mismatch should read alike. Records have the last 6
            // digits.
            _ if self.lists_counts() => {
                let what = match self.kind {
                    _ if !self.is_many() => "counts",
                    Collective::Broadcast => "root and lengths",
                    _ => "lengths",
                };
                write!(f, "{}, {what} #{:016x}", self.element, self.counts_hash as u64)?
            }
            _ => write!(f, "{}, count {}", self.element, self.count)?,
        }
        // Other ranks do not know the root either, if it is in the digest.
        if let Some(root) = self.root.filter(|_| amount.is_some() || !self.is_many()) {
            write!(f, ", root {root}")?;
        }
        write!(f, ") number {}", self.sequence)
    }

    /// Returns 120 bits of SHA-256 over per-rank counts and the op that reduces them. Ranks fold and move as the counts
    /// specify, so digests of different counts must differ, even if an attacker searches for counts with equal digests.
    pub(crate) fn hash_counts(op: u64, counts: &[usize]) -> u128 {
        let mut hash = Sha256::new_with_prefix(op.to_le_bytes());
        counts.iter().for_each(|count| hash.update((*count as u64).to_le_bytes()));
        let digest: [u8; 32] = hash.finalize().into();
        digest.first_chunk().map_or(0, |first| u128::from_le_bytes(*first)) & DIGEST_MASK
    }
}

impl fmt::Display for Call {
    /// Prints `all_reduce(sum, f32, count 4) number 7`, or `all_gather_v(f32, counts #00beef005d3f2117) number 8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::element::DType;

    fn example() -> Call {
        Call {
            kind: Collective::Reduce,
            op: ReduceOp::BitXor.code().into(),
            element: TypeTag::Scalar(DType::U16),
            count: 1 << 40,
            root: Some(3),
            counts_hash: 0,
            sequence: 99,
        }
    }

    #[test]
    fn names_are_understood() {
        for (number, collective) in (1_u8..).zip(Collective::ALL) {
            assert_eq!(collective as u8, number);
            assert_eq!(collective.to_string().parse::<Collective>().unwrap(), collective);
            assert_eq!((CallKind::from(collective).name(), CallKind::from(collective) == collective), (collective.name(), true));
            assert!(CallKind::Send != collective && CallKind::Recv != collective);
        }
        let error = "allreduce".parse::<Collective>().unwrap_err().to_string();
        assert!(error.contains("\"allreduce\"") && error.contains("all_reduce, "), "{error}");
        assert_eq!(format!("{:>9}|{:<5}|", Collective::Gather, CallKind::Send), "   gather|send |");
    }

    #[test]
    fn fingerprint_survives_the_wire() {
        for kind in Collective::ALL {
            for root in [None, Some(0), Some(70_000)] {
                let call = match kind.lists_counts() {
                    false => Call { kind, root, op: 0xab_cdef_0123_45ff, ..example() },
                    true => Call { kind, root: None, count: 0, counts_hash: Call::hash_counts(1, &[7]), ..example() },
                };
                assert_eq!(Call::from_bytes(&call.to_bytes()), Some(call));
            }
        }
    }

    #[test]
    fn every_bit_of_the_digest_of_counts_is_compared() {
        let call = |counts_hash| Call { kind: Collective::ReduceScatterV, root: None, counts_hash, ..example() };
        let words = call(0).fingerprint();
        for bit in 0..120 {
            assert_ne!(call(1 << bit).fingerprint(), words, "bit {bit}");
            assert_eq!(Call::from_fingerprint(call(1 << bit).fingerprint()).map(|call| call.counts_hash), Some(1 << bit));
        }
        let digests = [(0, &[690, 3410][..]), (0, &[1225, 2875]), (0, &[3410, 690]), (1, &[690, 3410]), (0, &[690, 3410, 0])]
            .map(|(op, counts)| Call::hash_counts(op, counts));
        assert!((1..digests.len()).all(|at| !digests[..at].contains(&digests[at])), "{digests:?}");
    }

    #[test]
    fn a_record_has_the_sum_of_the_counts() {
        let call = Call { kind: Collective::AllGatherV, op: 0, count: 4100, root: None, counts_hash: u128::MAX >> 8, ..example() };
        let kept = Call::from_record(call.record());
        assert_eq!(kept, Some(Call { counts_hash: 0xff_ffff, ..call }));
        assert_eq!(Call::from_record(example().record()), Some(example()));
    }

    #[test]
    fn a_call_on_several_buffers_is_compared_by_root_op_and_lengths() {
        let of = |op, root, counts: &[usize]| Call { op, root, ..example() }.of_many(counts);
        let calls = [
            Call { kind: Collective::Broadcast, op: 0, root: Some(1), ..example() }.of_many(&[3, 5]),
            Call { kind: Collective::Broadcast, op: 0, root: Some(2), ..example() }.of_many(&[3, 5]),
        ];
        assert_ne!(calls[0].fingerprint(), calls[1].fingerprint());
        for call in calls {
            let heard = Call::from_bytes(&call.to_bytes()).unwrap();
            assert_eq!(heard, Call { root: None, count: 0, ..call });
            assert_eq!(heard.to_string(), call.to_string());
            assert!(call.to_string().starts_with("broadcast_many(u16, root and lengths #"), "{call}");
            assert_eq!(Call::from_record(call.record()).map(|kept| (kept.name(), kept.root)), Some(("broadcast_many", call.root)));
        }
        let lists: [&[usize]; 6] = [&[], &[0], &[8], &[3, 5], &[5, 3], &[3, 5, 0]];
        let reduce = |op, counts: &[usize]| Call { kind: Collective::AllReduce, ..of(op, None, counts) };
        let words: Vec<_> =
            lists.iter().map(|counts| reduce(1, counts).fingerprint()).chain([reduce(1 << 40 | 1, &[8]).fingerprint()]).collect();
        assert!((1..words.len()).all(|at| !words[..at].contains(&words[at])), "{words:?}");
        // No other kind has a form on several buffers.
        let mut words = calls[0].fingerprint();
        words[3] = words[3] & !(0xff << 32) | u64::from(Collective::Barrier as u8 | MANY_KIND) << 32;
        assert_eq!(Call::from_fingerprint(words), None);
    }

    #[test]
    fn nonsense_is_no_call() {
        assert_eq!(Call::from_bytes(&[0xff; 32]), None);
        assert_eq!(Call::from_bytes(&[0; 32]), None);
    }

    #[test]
    fn a_call_reads_as_it_was_written() {
        assert_eq!(example().to_string(), "reduce(bxor, u16, count 1099511627776, root 3) number 99");
        let custom = Call { op: 0x12_3456_abcd_ef00 | 254, root: None, ..example() };
        assert_eq!(custom.to_string(), "reduce(custom op #abcdef in rank order, u16, count 1099511627776) number 99");
        let listed = Call { kind: Collective::AllGatherV, op: 0, counts_hash: 0xab_cdef, root: None, ..example() };
        assert_eq!(listed.to_string(), "all_gather_v(u16, counts #0000000000abcdef) number 99");
    }
}
