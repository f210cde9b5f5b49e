//! The calls of a job, as a record contains them.

use std::collections::HashMap;
use std::fmt;

use collectives::observe::CallKind;
use collectives::{Collective, DType};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kind(&'static str);

impl Kind {
    pub(super) const SEND: Kind = Kind("send");
    pub(super) const RECV: Kind = Kind("recv");
    pub(super) const ALL_GATHER_LIST: Kind = Kind("all_gather_list");
    /// The calls on several buffers.
    const MANY: [(&str, Collective); 4] = [
        ("all_reduce_many", Collective::AllReduce),
        ("broadcast_many", Collective::Broadcast),
        ("all_gather_many", Collective::AllGather),
        ("reduce_scatter_many", Collective::ReduceScatter),
    ];

    /// Returns the kind with this name, which records and reports use.
    pub(super) fn named(name: &str) -> Option<Self> {
        let many = Self::MANY.iter().map(|(name, _)| *name);
        let others = [Self::SEND.0, Self::RECV.0, Self::ALL_GATHER_LIST.0];
        Collective::ALL.iter().map(|collective| collective.name()).chain(many).chain(others).find(|known| *known == name).map(Self)
    }

    /// Returns the kind of a reported call.
    pub(super) fn of(kind: CallKind) -> Self {
        Self(kind.name())
    }

    pub(super) fn collective(collective: Collective) -> Self {
        Self(collective.name())
    }

    /// Returns the same kind on several buffers, if there is one.
    pub(super) fn many(self) -> Option<Self> {
        let found = Self::MANY.iter().find(|(_, collective)| collective.name() == self.0);
        found.map(|(name, _)| Self(name))
    }

    pub(super) fn name(self) -> &'static str {
        self.0
    }

    pub(super) fn is_message(self) -> bool {
        self == Self::SEND || self == Self::RECV
    }

    /// Whether the call has a list of buffers.
    pub(super) fn is_many(self) -> bool {
        Self::MANY.iter().any(|(name, _)| *name == self.0)
    }

    /// Returns the collective that decides who gets which data; `None` for a message.
    pub(super) fn data(self) -> Option<Collective> {
        if self == Self::ALL_GATHER_LIST {
            return Some(Collective::AllGatherV);
        }
        let many = Self::MANY.iter().find(|(name, _)| *name == self.0).map(|(_, collective)| *collective);
        many.or_else(|| Collective::ALL.into_iter().find(|collective| collective.name() == self.0))
    }

    /// Whether the ranks of one call may have counts that differ.
    pub(super) fn has_counts(self) -> bool {
        use Collective::{AllGatherV, AllToAllV, GatherV, ReduceScatterV, ScatterV};
        matches!(self.data(), Some(AllGatherV | AllToAllV | GatherV | ReduceScatterV | ScatterV))
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| D::Error::custom(format!("{name:?} is not the name of a call")))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

/// One call of one rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    /// The number of its communicator in [`Recording::groups`].
    pub(super) group: usize,
    pub(super) kind: Kind,
    /// The number by which ranks compare collectives. It may start at any value.
    pub(super) sequence: Option<u64>,
    pub(super) op: Option<String>,
    /// The element type, as records name it.
    pub(super) element: String,
    /// The number of elements: of each block, of the whole vector, or of the message. 0 if ranks may differ.
    pub(super) count: u64,
    /// The number of bytes of the larger of the rank's buffers.
    pub(super) bytes: Option<u64>,
    /// The counts that the rank sends to and receives from each rank, or its list of counts for all ranks, if known.
    pub(super) counts: Option<Counts>,
    pub(super) root: Option<usize>,
    /// The other end of a message, by its rank in the communicator.
    pub(super) peer: Option<usize>,
    pub(super) tag: u64,
    /// The place of the call in time if its start is not known: the start of a call before it.
    pub(super) not_before_ns: u64,
    /// Nanoseconds since a moment that is the same for all calls of the rank.
    pub(super) start_ns: Option<u64>,
    pub(super) duration_ns: Option<u64>,
    /// Whether the call ended without an error.
    pub(super) is_complete: bool,
    /// Whether the record says that the call ran in the background.
    pub(super) is_background: bool,
}

/// Known counts of a call whose blocks may differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Counts {
    /// One count for each rank, the same list on all ranks.
    Blocks(Vec<u64>),
    /// The counts that this rank sends and receives.
    Pairs { send: Vec<u64>, receive: Vec<u64> },
}

impl Call {
    /// Returns a call without times, of which only the kind and the communicator are known.
    pub(super) fn new(group: usize, kind: Kind) -> Self {
        Self {
            group,
            kind,
            sequence: None,
            op: None,
            element: "u8".to_owned(),
            count: 0,
            bytes: None,
            counts: None,
            root: None,
            peer: None,
            tag: 0,
            not_before_ns: 0,
            start_ns: None,
            duration_ns: None,
            is_complete: true,
            is_background: false,
        }
    }

    /// Returns the end of the call; the start, if the end was not timed.
    pub(super) fn end_ns(&self) -> Option<u64> {
        Some(self.start_ns?.saturating_add(self.duration_ns.unwrap_or(0)))
    }

    /// Describes the values on which the ranks of a collective must agree.
    pub(super) fn in_words(&self) -> String {
        if self.kind == Kind::collective(Collective::Barrier) {
            return "barrier".to_owned();
        }
        let op = self.op.as_ref().map(|op| format!("{op}, ")).unwrap_or_default();
        let count = if self.kind.has_counts() && self.count == 0 { String::new() } else { format!(", count {}", self.count) };
        let root = self.root.map(|root| format!(", root {root}")).unwrap_or_default();
        format!("{}({op}{}{count}{root})", self.kind, self.element)
    }
}

/// A communicator of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) name: String,
    /// Its ranks in the job, in the order of their ranks in the communicator.
    pub(super) members: Vec<usize>,
}

/// The program whose record it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Trace,
    FlightRecord,
    PyTorch,
}

impl Origin {
    pub(super) fn name(self) -> &'static str {
        match self {
            Origin::Trace => "trace",
            Origin::FlightRecord => "flight record",
            Origin::PyTorch => "PyTorch flight record",
        }
    }
}

/// The record of a job.
#[derive(Debug, Clone)]
pub(super) struct Recording {
    pub(super) origin: Origin,
    pub(super) groups: Vec<Group>,
    /// The calls of each rank, in the order in which the rank made them.
    pub(super) ranks: Vec<Vec<Call>>,
    /// Whether the oldest calls may be missing.
    pub(super) is_cut: bool,
    /// Remarks about the files: calls that were left out, and why.
    pub(super) notes: Vec<String>,
}

impl Recording {
    /// Returns the communicators of each rank of the job, by their numbers, with its rank in each.
    pub(super) fn memberships(&self) -> Vec<HashMap<usize, usize>> {
        let mut memberships = vec![HashMap::new(); self.ranks.len()];
        for (number, group) in self.groups.iter().enumerate() {
            for (me, member) in group.members.iter().enumerate() {
                memberships[*member].insert(number, me);
            }
        }
        memberships
    }
}

/// The type of elements in a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Scalar(DType),
    /// Data of other types, moved as this many bytes for each element.
    Bytes(u64),
}

impl Element {
    /// Reads the name of an element type; `None` if the size of the type is not known.
    pub(super) fn named(name: &str) -> Option<Self> {
        if let Some(dtype) = DType::ALL.into_iter().find(|dtype| dtype.name() == name) {
            return Some(Self::Scalar(dtype));
        }
        if name == "an object" {
            return Some(Self::Bytes(1));
        }
        if let Some(size) = name.strip_prefix("plain data of ").and_then(|rest| rest.strip_suffix(" B")) {
            return size.parse().ok().map(Self::Bytes);
        }
        let (dtype, length) = name.strip_prefix('[')?.strip_suffix(']')?.split_once("; ")?;
        let size = DType::ALL.into_iter().find(|known| known.name() == dtype)?.size_bytes() as u64;
        length.parse::<u64>().ok()?.checked_mul(size).map(Self::Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_names_of_records() {
        for name in ["all_reduce", "all_reduce_many", "all_gather_list", "send", "recv", "barrier", "all_to_all_v"] {
            assert_eq!(Kind::named(name).unwrap().name(), name);
        }
        assert_eq!(Kind::named("allreduce"), None);
        assert_eq!(Kind::collective(Collective::Broadcast).many(), Kind::named("broadcast_many"));
        assert!(Kind::named("reduce_scatter_many").unwrap().is_many() && !Kind::SEND.is_many());
        assert_eq!(Kind::SEND.data(), None);
    }

    #[test]
    fn types_that_are_no_scalars_are_moved_as_bytes() {
        assert_eq!(Element::named("bf16"), Some(Element::Scalar(DType::Bf16)));
        assert_eq!(Element::named("[u16; 3]"), Some(Element::Bytes(6)));
        assert_eq!(Element::named("plain data of 12 B"), Some(Element::Bytes(12)));
        for unknown in ["", "[u16; x]", "[u16; 99999999999999999999]", "plain data of many B", "string"] {
            assert_eq!(Element::named(unknown), None, "{unknown}");
        }
    }
}
