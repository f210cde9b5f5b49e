//! The collectives that can be measured, and how nccl-tests counts their bytes and bandwidths.

use std::fmt;
use std::str::FromStr;

/// A kind of call that can be measured: a collective of the library, messages around a ring, or an all-gather made of
/// messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Collective {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
    AllGatherV,
    ReduceScatterV,
    GatherV,
    ScatterV,
    AllToAllV,
    SendRecv,
    Barrier,
    Hypercube,
}

impl Collective {
    /// The collectives of `all`, in its order: all except the hypercube, which is one algorithm of an all-gather.
    pub(crate) const ALL: [Collective; 15] = [
        Collective::AllReduce,
        Collective::Reduce,
        Collective::Broadcast,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::AllGatherV,
        Collective::ReduceScatterV,
        Collective::GatherV,
        Collective::ScatterV,
        Collective::AllToAllV,
        Collective::SendRecv,
        Collective::Barrier,
    ];

    /// Returns every collective that has a name.
    pub(crate) fn known() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain([Collective::Hypercube])
    }

    /// Returns the library's collective; `None` if it is made of messages.
    pub(crate) const fn of_library(self) -> Option<collectives::Collective> {
        use collectives::Collective as Library;
        Some(match self {
            Collective::AllReduce => Library::AllReduce,
            Collective::Reduce => Library::Reduce,
            Collective::Broadcast => Library::Broadcast,
            Collective::AllGather => Library::AllGather,
            Collective::ReduceScatter => Library::ReduceScatter,
            Collective::Gather => Library::Gather,
            Collective::Scatter => Library::Scatter,
            Collective::AllToAll => Library::AllToAll,
            Collective::AllGatherV => Library::AllGatherV,
            Collective::ReduceScatterV => Library::ReduceScatterV,
            Collective::GatherV => Library::GatherV,
            Collective::ScatterV => Library::ScatterV,
            Collective::AllToAllV => Library::AllToAllV,
            Collective::SendRecv | Collective::Hypercube => return None,
            Collective::Barrier => Library::Barrier,
        })
    }

    /// Returns the name on the command line and in every output.
    pub(crate) const fn name(self) -> &'static str {
        match self.of_library() {
            Some(collective) => collective.name(),
            None if matches!(self, Collective::Hypercube) => "hypercube",
            None => "sendrecv",
        }
    }

    /// Returns the name of nccl-tests' test for it, if there is one.
    pub(crate) const fn nccl_test(self) -> Option<&'static str> {
        Some(match self {
            Collective::AllReduce => "all_reduce_perf",
            Collective::AllGather => "all_gather_perf",
            Collective::AllToAll => "alltoall_perf",
            Collective::AllToAllV => "alltoallv_perf",
            Collective::Broadcast => "broadcast_perf",
            Collective::Gather => "gather_perf",
            Collective::Hypercube => "hypercube_perf",
            Collective::Reduce => "reduce_perf",
            Collective::ReduceScatter => "reduce_scatter_perf",
            Collective::Scatter => "scatter_perf",
            Collective::SendRecv => "sendrecv_perf",
            _ => return None,
        })
    }

    /// Returns the name above and below its table: that of nccl-tests' program, which programs that read such tables
    /// expect.
    pub(crate) fn program(self) -> String {
        self.nccl_test().map_or_else(|| format!("{}_perf", self.name()), str::to_owned)
    }

    /// Whether it takes a reduce op.
    pub(crate) fn reduces(self) -> bool {
        self.of_library().is_some_and(collectives::Collective::reduces)
    }

    /// Whether it takes a root.
    pub(crate) fn is_rooted(self) -> bool {
        self.of_library().is_some_and(collectives::Collective::is_rooted)
    }

    /// Whether one rank's buffer is made of one block for each rank.
    pub(crate) const fn is_blocked(self) -> bool {
        use Collective::{AllReduce, Barrier, Broadcast, Reduce, SendRecv};
        !matches!(self, AllReduce | Reduce | Broadcast | SendRecv | Barrier)
    }

    /// Whether the blocks of the ranks differ in length.
    pub(crate) const fn is_uneven(self) -> bool {
        use Collective::{AllGatherV, AllToAllV, GatherV, ReduceScatterV, ScatterV};
        matches!(self, AllGatherV | ReduceScatterV | GatherV | ScatterV | AllToAllV)
    }

    /// Whether source and destination can be one buffer.
    pub(crate) const fn has_in_place(self) -> bool {
        !self.is_uneven() && !matches!(self, Collective::SendRecv | Collective::Barrier)
    }

    /// Returns the ratio of the bus bandwidth to the algorithm's: the share of the bytes that each link must carry if
    /// ranks communicate point to point.
    pub(crate) fn bus_factor(self, world_size: usize) -> f64 {
        let n = world_size as f64;
        match self {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::Hypercube => 1.0,
            _ if self.is_blocked() => (n - 1.0) / n,
            _ => 1.0,
        }
    }

    /// Returns the ratio of the algorithm's bandwidth to bytes over time. nccl-tests excludes a rank's own block only
    /// for the hypercube.
    pub(crate) fn algorithm_factor(self, world_size: usize) -> f64 {
        match self {
            Collective::Hypercube => (world_size as f64 - 1.0) / world_size as f64,
            _ => 1.0,
        }
    }

    /// Checks that this many ranks can run it.
    pub(crate) fn check_ranks(self, ranks: usize) -> Result<(), String> {
        match self {
            Collective::Hypercube if !ranks.is_power_of_two() => {
                Err(format!("hypercube: the number of ranks must be a power of two, but is {ranks}"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of elements per block, or of the whole vector if there are no blocks. `bytes` is the size of
    /// the larger of a rank's two buffers. A row of more than zero bytes moves at least one element per block.
    pub(crate) fn count(self, bytes: usize, element_bytes: usize, world_size: usize) -> usize {
        let blocks = if self.is_blocked() { world_size } else { 1 };
        match self {
            Collective::Barrier => 0,
            _ if bytes == 0 => 0,
            _ => (bytes / element_bytes / blocks).max(1),
        }
    }

    /// Returns the bytes of the larger of a rank's two buffers, the reverse of [`Collective::count`].
    pub(crate) fn bytes(self, count: usize, element_bytes: usize, world_size: usize) -> usize {
        count * element_bytes * if self.is_blocked() { world_size } else { 1 }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Collective {
    type Err = String;

    /// Accepts the crate's names, those of other benchmarks and libraries, and other spellings: `allreduce`,
    /// `AllReduce`, `all-reduce`, `osu_allreduce`, `all_reduce_perf`, `MPI_Allreduce`.
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = plain(text);
        Self::known().find(|collective| self::plain(collective.name()) == plain).ok_or_else(|| {
            let known: Vec<_> = Self::known().map(Self::name).collect();
            let nearest = nearest(&plain, known.iter().copied().chain(COMMANDS));
            let guess = nearest.map_or(String::new(), |name| format!(" (did you mean {name}?)"));
            format!("collective {text:?}: not known{guess}; one of {}, all", known.join(", "))
        })
    }
}

/// Words other than collectives that can be given instead of one.
const COMMANDS: [&str; 12] = [
    "all",
    "report",
    "trace",
    "doctor",
    "pairs",
    "stragglers",
    "install-links",
    "osu_latency",
    "osu_bw",
    "osu_bibw",
    "osu_mbw_mr",
    "osu_iallreduce",
];
/// Beginnings of names of programs and functions; they may also end with `perf`.
const PREFIXES: [&str; 3] = ["osu", "mpi", "nccl"];
const SUFFIX: &str = "perf";

/// Returns a name in lower case, without programs' prefixes and suffixes, and without separators.
fn plain(name: &str) -> String {
    let letters: String = name.chars().filter(|letter| letter.is_alphanumeric()).map(|letter| letter.to_ascii_lowercase()).collect();
    let without = PREFIXES.into_iter().find_map(|prefix| letters.strip_prefix(prefix)).unwrap_or(&letters);
    let plain = without.strip_suffix(SUFFIX).unwrap_or(without);
    // MPI's name for a broadcast is bcast.
    if plain == "bcast" { "broadcast".to_owned() } else { plain.to_owned() }
}

/// Returns the name that differs from `plain` in the fewest letters, if those are few.
fn nearest<'a>(plain: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (name, changes) = names.map(|name| (name, changes(plain, &self::plain(name)))).min_by_key(|(_, changes)| *changes)?;
    (3 * changes <= plain.chars().count()).then_some(name)
}

/// Returns how many letters must be inserted, removed or changed to turn one word into the other (Levenshtein
/// distance).
fn changes(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (place, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], place + 1);
        for (column, theirs) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *theirs);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood() {
        for collective in Collective::known() {
            assert_eq!(collective.name().parse(), Ok(collective));
        }
        let of_library: Vec<_> = Collective::ALL.into_iter().filter_map(Collective::of_library).collect();
        for collective in collectives::Collective::ALL {
            assert_eq!(of_library.iter().filter(|other| **other == collective).count(), 1, "{collective} is measured once");
        }
        for (names, collective) in [
            ("allreduce all-reduce AllReduce ALLREDUCE osu_allreduce all_reduce_perf MPI_Allreduce ncclAllReduce", Collective::AllReduce),
            ("alltoall osu_alltoall alltoall_perf", Collective::AllToAll),
            ("alltoallv AllToAllV all_to_allv", Collective::AllToAllV),
            ("bcast MPI_Bcast osu_bcast broadcast_perf", Collective::Broadcast),
            ("send_recv SendRecv sendrecv_perf", Collective::SendRecv),
            ("reducescatter reduce-scatter", Collective::ReduceScatter),
        ] {
            names.split(' ').for_each(|name| assert_eq!(name.parse(), Ok(collective), "{name}"));
        }
    }

    #[test]
    fn a_name_that_is_not_known_gets_the_nearest() {
        for (text, name) in [
            ("allredcue", "all_reduce"),
            ("all_reduce2", "all_reduce"),
            ("brodcast", "broadcast"),
            ("straggler", "stragglers"),
            ("pair", "pairs"),
            ("osu_latncy", "osu_latency"),
        ] {
            let message = text.parse::<Collective>().unwrap_err();
            assert!(message.contains(&format!("{text:?}: not known (did you mean {name}?); one of all_reduce, ")), "{message}");
        }
        for text in ["x", "", "matmul", "osu_", "_perf"] {
            let message = text.parse::<Collective>().unwrap_err();
            assert!(message.contains(": not known; one of all_reduce, ") && message.contains(", hypercube, all"), "{message}");
        }
        assert_eq!((changes("kitten", "sitting"), changes("", "abc"), changes("abc", "abc")), (3, 3, 0));
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert_eq!(Collective::AllReduce.bus_factor(4), 1.5);
        for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll, Collective::Gather, Collective::Scatter]
        {
            assert_eq!(collective.bus_factor(4), 0.75, "{collective}");
        }
        for collective in [Collective::Broadcast, Collective::Reduce, Collective::SendRecv] {
            assert_eq!(collective.bus_factor(4), 1.0, "{collective}");
        }
        assert_eq!(Collective::AllReduce.bus_factor(1), 0.0);
        assert_eq!((Collective::Hypercube.algorithm_factor(4), Collective::Hypercube.bus_factor(4)), (0.75, 1.0));
    }

    #[test]
    fn a_row_counts_the_larger_buffer() {
        assert_eq!(Collective::AllReduce.count(1024, 4, 3), 256);
        assert_eq!(Collective::AllGather.count(1024, 4, 3), 85);
        assert_eq!(Collective::AllGather.bytes(85, 4, 3), 1020);
        // "4 B" is one element for each rank.
        assert_eq!(Collective::AllToAll.bytes(Collective::AllToAll.count(4, 4, 2), 4, 2), 8);
        assert_eq!(Collective::AllReduce.count(3, 8, 2), 1);
        assert_eq!(Collective::AllReduce.count(0, 8, 2), 0);
        assert_eq!(Collective::Barrier.count(64, 1, 2), 0);
    }
}
