//! Chooses the processors to which each rank of this host is bound.
//!
//! Two ranks that may run anywhere can share one core permanently: each sleeps while the other works, so the system
//! sees no reason to separate them. Ranks are therefore bound if there is a core for each of them. The names are
//! mpirun's.

use std::fmt;
use std::io;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_setaffinity};

use super::topology::{Core, Topology, listed, permitted};

/// The kind of processors to which a rank is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bind {
    /// Nothing: the rank may use every processor that this process may use.
    None,
    /// The rank's own cores, with all hardware threads of these cores.
    Core,
    /// All cores that share a last-level cache.
    Cache,
    /// All cores of a NUMA node.
    Numa,
}

impl FromStr for Bind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "core" => Ok(Self::Core),
            "cache" | "l3cache" => Ok(Self::Cache),
            "numa" => Ok(Self::Numa),
            _ => Err("expected none, core, cache (or l3cache) or numa".to_owned()),
        }
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Core => "core",
            Self::Cache => "cache",
            Self::Numa => "numa",
        })
    }
}

/// The binding that the command line asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The command line does not mention a binding. Ranks are bound to cores if there are enough cores.
    Nothing,
    /// This kind of binding. If it is impossible, the result is an error: no other kind is tried.
    For(Bind),
    /// One core for each rank. If there are too few cores, several ranks share a core.
    CoresInTurns,
}

/// How many cores each rank gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// One: for ranks that compute on one thread.
    One,
    /// An equal share of the host's cores: for ranks that compute on several threads.
    Share,
}

/// The processors to which the ranks of this host are bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The kind of binding.
    pub to: Bind,
    /// The processors of each rank, in ascending order; empty if ranks are not bound.
    pub processors: Vec<Vec<usize>>,
    /// Why ranks are not bound. `None` if they are bound, or if the command line asked for no binding.
    pub why_none: Option<String>,
    /// Whether the command line asked for the binding. If so, a rank that cannot be bound fails.
    pub is_asked: bool,
}

impl Binding {
    /// Returns a value that binds no rank. `why` is the reason, or `None` if the command line asked for no binding.
    pub fn none(why: Option<String>) -> Self {
        Self { to: Bind::None, processors: vec![], is_asked: why.is_none(), why_none: why }
    }

    /// Chooses processors for each of `ranks` ranks of this host, among the processors that the calling thread may use.
    ///
    /// # Errors
    ///
    /// If the requested binding is impossible. The error is a sentence that gives the reason.
    pub fn here(asked: Asked, width: Width, ranks: usize) -> Result<Self, String> {
        if asked == Asked::For(Bind::None) {
            return Ok(Self::none(None));
        }
        let permitted = permitted().map_err(|error| format!("reading which processors this process may use: {error}"));
        match (permitted, asked) {
            (Err(why), Asked::Nothing) => Ok(Self::none(Some(why))),
            (Err(why), _) => Err(why),
            // Each core has at least one processor, so the topology need not be read.
            (Ok(permitted), Asked::Nothing) if permitted.len() < ranks => {
                Ok(Self::none(Some(too_few(permitted.len(), "processor", ranks))))
            }
            (Ok(permitted), _) => Self::of(&Topology::of(&permitted), asked, width, ranks),
        }
    }

    /// Places the ranks like [`Binding::here`], on a given topology.
    pub(super) fn of(topology: &Topology, asked: Asked, width: Width, ranks: usize) -> Result<Self, String> {
        let cores = topology.core_count();
        let is_enough = cores >= ranks && ranks > 0;
        let (to, processors) = match asked {
            Asked::For(Bind::None) => return Ok(Self::none(None)),
            Asked::Nothing if !is_enough => return Ok(Self::none(Some(too_few(cores, "core", ranks)))),
            Asked::For(Bind::Core) if !is_enough => {
                let few = too_few(cores, "core", ranks);
                return Err(format!("--bind core: {few}; start fewer ranks, or give --bind none"));
            }
            Asked::For(Bind::Cache) => (Bind::Cache, groups(topology.cores(), ranks, |core| (core.node, core.cache))),
            Asked::For(Bind::Numa) => (Bind::Numa, groups(topology.cores(), ranks, |core| (core.node, 0))),
            Asked::CoresInTurns if !is_enough => (Bind::Core, in_turns(topology.cores(), ranks)),
            Asked::Nothing | Asked::For(Bind::Core) | Asked::CoresInTurns => {
                let count = if width == Width::One { 1 } else { cores / ranks };
                (Bind::Core, blocks(topology.cores(), ranks, count))
            }
        };
        Ok(Self { to, processors, why_none: None, is_asked: asked != Asked::Nothing })
    }

    /// Returns the processors of a rank, by its local rank; `None` if it is not bound.
    pub(super) fn of_rank(&self, local_rank: usize) -> Option<&[usize]> {
        self.processors.get(local_rank).filter(|processors| !processors.is_empty()).map(Vec::as_slice)
    }

    /// Binds the calling thread to the processors of this local rank. Threads and processes that the calling thread
    /// starts later inherit the binding.
    ///
    /// # Errors
    ///
    /// If the system refuses the binding.
    pub fn apply(&self, local_rank: usize) -> io::Result<()> {
        self.of_rank(local_rank).map_or(Ok(()), |processors| Ok(sched_setaffinity(None, &set_of(processors))?))
    }

    /// Describes the binding, for ranks that are numbered from `first`.
    pub fn told(&self, first: usize) -> String {
        let lists: Vec<String> = self.processors.iter().map(|processors| listed(processors)).collect();
        told(&self.to.to_string(), self.why_none.as_deref(), first, &lists)
    }
}

/// Lists the processors that the calling thread may use, in the kernel's format: `0-3,8`.
pub fn processors_here() -> String {
    permitted().map_or_else(|_| String::new(), |processors| listed(&processors))
}

/// The most ranks that are named individually.
const MOST_NAMED: usize = 8;

/// Describes what ranks are bound to: `core (rank 0: cpu 0, rank 1: cpus 1,3)`.
pub fn told(to: &str, why_none: Option<&str>, first: usize, lists: &[String]) -> String {
    let named = |(place, list): (usize, &String)| {
        let is_one = list.chars().all(|letter| letter.is_ascii_digit());
        format!("rank {}: cpu{} {list}", first + place, if is_one { "" } else { "s" })
    };
    let ranks: Vec<String> = lists.iter().enumerate().filter(|(_, list)| !list.is_empty()).map(named).collect();
    let mut parts: Vec<&str> = why_none.into_iter().collect();
    match &ranks[..] {
        [few @ .., last] if few.len() >= MOST_NAMED => {
            parts.extend(few[..MOST_NAMED - 2].iter().map(String::as_str));
            parts.extend(["…", last]);
        }
        all => parts.extend(all.iter().map(String::as_str)),
    }
    if parts.is_empty() { to.to_owned() } else { format!("{to} ({})", parts.join(", ")) }
}

fn too_few(count: usize, what: &str, ranks: usize) -> String {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    format!("{ranks} rank{}, but only {count} {what}{} may be used", plural(ranks), plural(count))
}

/// Gives each rank `count` cores. As few ranks as possible get cores of several caches.
fn blocks(cores: &[Core], ranks: usize, count: usize) -> Vec<Vec<usize>> {
    let mut whole: Vec<Vec<usize>> = Vec::new();
    let mut left: Vec<usize> = Vec::new();
    let places: Vec<usize> = (0..cores.len()).collect();
    for of_cache in places.chunk_by(|one, other| (cores[*one].node, cores[*one].cache) == (cores[*other].node, cores[*other].cache)) {
        let chunks = of_cache.chunks_exact(count);
        left.extend(chunks.remainder());
        whole.extend(chunks.map(<[usize]>::to_vec));
    }
    whole.extend(left.chunks_exact(count).map(<[usize]>::to_vec));
    whole.truncate(ranks);
    // Neighbouring ranks share caches and nodes if possible.
    whole.sort_unstable();
    whole.iter().map(|block| together(block.iter().map(|place| &cores[*place]))).collect()
}

/// Gives each rank one core, and begins again with the first core after the last.
fn in_turns(cores: &[Core], ranks: usize) -> Vec<Vec<usize>> {
    (0..ranks).filter_map(|rank| cores.get(rank % cores.len().max(1))).map(|core| core.processors.clone()).collect()
}

/// Gives each rank all cores of one cache or node. Each cache or node gets consecutive ranks, in proportion to its
/// cores.
fn groups(cores: &[Core], ranks: usize, of: impl Fn(&Core) -> (usize, usize)) -> Vec<Vec<usize>> {
    let group = |rank: usize| {
        let mine = cores.get(rank * cores.len() / ranks).map(&of)?;
        Some(together(cores.iter().filter(|core| of(core) == mine)))
    };
    (0..ranks).filter_map(group).collect()
}

/// Returns the processors of several cores.
fn together<'a>(cores: impl Iterator<Item = &'a Core>) -> Vec<usize> {
    let mut processors: Vec<usize> = cores.flat_map(|core| core.processors.iter().copied()).collect();
    processors.sort_unstable();
    processors
}

/// Converts processors to the system's set.
pub(super) fn set_of(processors: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    processors.iter().filter(|processor| **processor < CpuSet::MAX_CPU).for_each(|processor| set.set(*processor));
    set
}

#[cfg(test)]
mod tests {
    use super::super::topology::made_up::{Processor, all, machine, regular};
    use super::*;

    fn bound(topology: &Topology, bind: Bind, width: Width, ranks: usize) -> Vec<Vec<usize>> {
        Binding::of(topology, Asked::For(bind), width, ranks).unwrap().processors
    }

    fn listed_of(topology: &Topology, bind: Bind, width: Width, ranks: usize) -> Vec<String> {
        bound(topology, bind, width, ranks).iter().map(|processors| listed(processors)).collect()
    }

    #[test]
    fn two_ranks_on_two_cores_have_one_each() {
        let topology = regular(2, 1, 2, 1, &all(2));
        let binding = Binding::of(&topology, Asked::Nothing, Width::One, 2).unwrap();
        assert_eq!((binding.to, &binding.processors[..], binding.is_asked), (Bind::Core, &[vec![0], vec![1]][..], false));
        assert_eq!(binding.told(0), "core (rank 0: cpu 0, rank 1: cpu 1)");
        assert_eq!(listed_of(&topology, Bind::Cache, Width::One, 3), ["0-1"; 3]);
    }

    #[test]
    fn a_core_comes_with_its_hardware_threads() {
        let topology = regular(4, 2, 4, 1, &all(8));
        assert_eq!(bound(&topology, Bind::Core, Width::One, 3), [[0, 4], [1, 5], [2, 6]]);
        assert_eq!(bound(&topology, Bind::Core, Width::Share, 2), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        assert_eq!(bound(&topology, Bind::Core, Width::Share, 3), [[0, 4], [1, 5], [2, 6]]);
        assert_eq!(Binding::of(&topology, Asked::Nothing, Width::Share, 1).unwrap().processors, [all(8)]);
    }

    #[test]
    fn one_core_each_fills_a_cache_and_shares_keep_to_caches() {
        let topology = regular(96, 1, 12, 2, &all(96));
        assert_eq!(bound(&topology, Bind::Core, Width::One, 14), (0..14).map(|core| vec![core]).collect::<Vec<_>>());
        assert_eq!(listed_of(&topology, Bind::Core, Width::Share, 2), ["0-47", "48-95"]);
        assert_eq!(listed_of(&topology, Bind::Core, Width::Share, 16)[..3], ["0-5", "6-11", "12-17"]);
        // Eight of nine ranks have cores of one cache alone; the ninth has the remaining cores of five caches.
        let nine = listed_of(&topology, Bind::Core, Width::Share, 9);
        assert_eq!(nine[..3], ["0-9", "10-11,22-23,34-35,46-47,58-59", "12-21"]);
        assert_eq!(nine[8], "84-93");
        assert_eq!(listed_of(&topology, Bind::Core, Width::Share, 6)[..2], ["0-15", "16-31"]);
    }

    #[test]
    fn caches_and_nodes_get_ranks_in_proportion_to_their_cores() {
        let topology = regular(96, 1, 12, 2, &all(96));
        assert_eq!(listed_of(&topology, Bind::Cache, Width::One, 2), ["0-11", "48-59"]);
        assert_eq!(listed_of(&topology, Bind::Numa, Width::One, 4), ["0-47", "0-47", "48-95", "48-95"]);
        let of_caches = listed_of(&topology, Bind::Cache, Width::Share, 192);
        assert!(of_caches.chunks(24).all(|ranks| ranks.iter().all(|rank| *rank == ranks[0])), "{of_caches:?}");
        let part = regular(96, 1, 12, 2, &[0, 1, 2, 3, 4, 5, 95, 94]);
        assert_eq!(listed_of(&part, Bind::Cache, Width::One, 4), ["0-5", "0-5", "0-5", "94-95"]);
        assert_eq!(listed_of(&part, Bind::Numa, Width::One, 1), ["0-5"]);
    }

    #[test]
    fn what_may_not_be_used_is_no_rank_s() {
        let topology = regular(4, 2, 4, 1, &[1, 3, 5, 6]);
        assert_eq!(bound(&topology, Bind::Core, Width::One, 3), [vec![1, 5], vec![6], vec![3]]);
        assert_eq!(listed_of(&topology, Bind::Numa, Width::One, 1), ["1,3,5-6"]);
        let silent = || Processor { siblings: None, shared: None, node: None };
        assert_eq!(bound(&machine(&[silent(), silent()], &all(2)), Bind::Core, Width::One, 2), [[0], [1]]);
    }

    #[test]
    fn too_few_cores_are_no_binding_or_an_error() {
        let topology = regular(4, 2, 4, 1, &[0, 4]);
        let binding = Binding::of(&topology, Asked::Nothing, Width::One, 2).unwrap();
        assert_eq!(binding.told(0), "none (2 ranks, but only 1 core may be used)");
        let refusal = Binding::of(&topology, Asked::For(Bind::Core), Width::Share, 2).unwrap_err();
        assert_eq!(refusal, "--bind core: 2 ranks, but only 1 core may be used; start fewer ranks, or give --bind none");
        let turns = Binding::of(&regular(2, 1, 2, 1, &all(2)), Asked::CoresInTurns, Width::One, 5).unwrap();
        assert_eq!(turns.processors, [[0], [1], [0], [1], [0]]);
        assert_eq!(Binding::of(&topology, Asked::For(Bind::None), Width::One, 9).unwrap().told(0), "none");
    }

    #[test]
    fn many_ranks_are_told_in_short() {
        let lists: Vec<String> = (0..64).map(|core| format!("{core},{}", core + 64)).collect();
        let text = told("core", None, 64, &lists);
        assert_eq!(text.matches("rank ").count(), 7, "{text}");
        assert!(text.starts_with("core (rank 64: cpus 0,64, rank 65: ") && text.ends_with(", …, rank 127: cpus 63,127)"), "{text}");
        assert_eq!(told("core", None, 0, &lists[..8]).matches("rank ").count(), 8);
    }

    #[test]
    fn words_are_those_of_mpirun() {
        for bind in [Bind::None, Bind::Core, Bind::Cache, Bind::Numa] {
            assert_eq!(bind.to_string().parse(), Ok(bind));
        }
        assert_eq!("l3cache".parse(), Ok(Bind::Cache));
        assert!("socket".parse::<Bind>().is_err());
    }
}
