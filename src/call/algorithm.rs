//! The algorithms of collectives, their names, and the list in which a program requests them by size:
//! `doubling:0-16K,ring:16K-`.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;

use crate::error::{Error, Result};

/// The algorithm of a collective. [`Communicator::algorithm`](crate::Communicator::algorithm) returns the algorithm
/// that a call uses.
///
/// Calls between hosts, and calls under [`Transport::Tcp`](crate::Transport::Tcp), use one of the first six algorithms,
/// which [`AlgorithmRanges`] can request. The others cannot be requested. Their names say how data moves in calls that
/// have no choice of algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `doubling`: each rank exchanges data with the ranks at distances 1, 2, 4 …. After log₂ n exchanges, every rank
    /// has data from all other ranks.
    Doubling,
    /// `binomial`: data moves along a tree of log₂ n levels.
    Binomial,
    /// `ring`: data moves from neighbour to neighbour, in both directions, in segments.
    Ring,
    /// `chain`: data moves from the root to its neighbour, and from each rank to the next, in segments.
    Chain,
    /// `scatter_gather`: a ring reduces the data, so that each rank has the result for one share. The shares then go to
    /// the root.
    ScatterGather,
    /// `direct`: every rank exchanges data with every other rank. Each rank then reduces all contributions in one pass,
    /// in rank order.
    Direct,
    /// `flags`, in shared memory: for calls without data, in which ranks exchange only flags.
    Flags,
    /// `mailboxes`, in shared memory: ranks put small data next to their flags.
    Mailboxes,
    /// `slots`, in shared memory: data moves in steps through the ranks' slots, which are larger than mailboxes.
    Slots,
    /// `shares`, in shared memory: like `slots`, but each rank reduces one share for all ranks.
    Shares,
    /// `links`, in shared memory: pairs of ranks exchange messages, as between hosts.
    Links,
    /// `copy`: there is only one rank, which copies its data.
    Copy,
    /// `hierarchical`, for several hosts of which at least one has several ranks: data moves through shared memory
    /// inside a host, and over links between the hosts.
    Hierarchical,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 13] = [
        Algorithm::Doubling,
        Algorithm::Binomial,
        Algorithm::Ring,
        Algorithm::Chain,
        Algorithm::ScatterGather,
        Algorithm::Direct,
        Algorithm::Flags,
        Algorithm::Mailboxes,
        Algorithm::Slots,
        Algorithm::Shares,
        Algorithm::Links,
        Algorithm::Copy,
        Algorithm::Hierarchical,
    ];

    /// The algorithms for calls between hosts, which can be requested.
    pub(crate) const BETWEEN_HOSTS: [Algorithm; 6] =
        [Algorithm::Doubling, Algorithm::Binomial, Algorithm::Ring, Algorithm::Chain, Algorithm::ScatterGather, Algorithm::Direct];

    /// Returns the name used in [`AlgorithmRanges`], in reports and in messages: `scatter_gather`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Doubling => "doubling",
            Algorithm::Binomial => "binomial",
            Algorithm::Ring => "ring",
            Algorithm::Chain => "chain",
            Algorithm::ScatterGather => "scatter_gather",
            Algorithm::Direct => "direct",
            Algorithm::Flags => "flags",
            Algorithm::Mailboxes => "mailboxes",
            Algorithm::Slots => "slots",
            Algorithm::Shares => "shares",
            Algorithm::Links => "links",
            Algorithm::Copy => "copy",
            Algorithm::Hierarchical => "hierarchical",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    /// Parses the name.
    fn from_str(text: &str) -> Result<Self> {
        named(text, &Algorithm::ALL).ok_or_else(|| {
            let known = Algorithm::ALL.map(Algorithm::name).join(", ");
            Error::config(format!("algorithm {text:?}"), format!("not known; one of {known}"))
        })
    }
}

fn named(name: &str, among: &[Algorithm]) -> Option<Algorithm> {
    among.iter().copied().find(|algorithm| algorithm.name() == name)
}

/// An algorithm for a range of sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    algorithm: Algorithm,
    from: usize,
    /// The first size above the range; `None` if there is no limit.
    to: Option<usize>,
}

impl Rule {
    /// Creates a rule, or returns the reason why it is invalid.
    fn new(algorithm: Algorithm, from: usize, to: Option<usize>) -> std::result::Result<Self, String> {
        if !Algorithm::BETWEEN_HOSTS.contains(&algorithm) {
            let known = Algorithm::BETWEEN_HOSTS.map(Algorithm::name).join(", ");
            return Err(format!(
                "{:?} cannot be requested: whether a call uses it depends on the number of ranks and their hosts; request one of {known}",
                algorithm.name()
            ));
        }
        match to {
            Some(to) if to <= from => Err(format!("the range \"{}\" is empty: its end must be above its start", Sizes(from, Some(to)))),
            _ => Ok(Self { algorithm, from, to }),
        }
    }

    /// Parses `name:from-to`.
    fn parse(part: &str) -> std::result::Result<Self, String> {
        let expected = "expected NAME:FROM-TO or NAME:FROM-, for example ring:16K-";
        let (name, range) = part.split_once(':').ok_or(expected)?;
        let algorithm = named(name, &Algorithm::ALL).ok_or_else(|| {
            let known = Algorithm::BETWEEN_HOSTS.map(Algorithm::name).join(", ");
            format!("unknown algorithm {name:?}; expected one of {known}")
        })?;
        let (from, to) = range.split_once('-').ok_or(expected)?;
        let from = parse_size(from)?;
        let to = if to.is_empty() { None } else { Some(parse_size(to)?) };
        Self::new(algorithm, from, to)
    }
}

/// The algorithms that a program requests with [`Config::algorithms`](crate::Config::algorithms), each for a range of
/// sizes. A size is the number of bytes of the whole vector. If several ranges cover a size, the first of them applies.
/// For a size that no range covers, a call uses the algorithm with the shortest estimated time.
///
/// The text form is a list of `name:from-to` parts, separated by commas. The size `from` belongs to the range, and the
/// size `to` does not. Without `to`, the range has no upper limit. Each of the two numbers may have a binary suffix: K,
/// M or G.
///
/// ```
/// # use collectives::{Algorithm, AlgorithmRanges};
/// let ranges = AlgorithmRanges::new().with(Algorithm::Doubling, ..16 << 10)?.with(Algorithm::Ring, 16 << 10..)?;
/// assert_eq!(ranges, "doubling:0-16K,ring:16K-".parse()?);
/// assert_eq!(ranges.to_string(), "doubling:0-16K,ring:16K-");
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AlgorithmRanges {
    rules: Vec<Rule>,
}

impl AlgorithmRanges {
    /// Creates an empty list, which requests no algorithm.
    #[must_use]
    pub const fn new() -> Self {
        Self { rules: Vec::new() }
    }

    /// Adds an algorithm for a range of sizes in bytes, after the ranges already in the list.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an empty range, and for an algorithm that cannot be requested: `copy`, `hierarchical`, or
    /// an algorithm in shared memory.
    pub fn with(mut self, algorithm: Algorithm, sizes: impl RangeBounds<usize>) -> Result<Self> {
        let refused = |reason: String| Error::argument("AlgorithmRanges::with", reason);
        let too_large = || refused(format!("{algorithm} is requested for sizes above {}, but no size is that large", usize::MAX));
        let from = match sizes.start_bound() {
            Bound::Included(from) => *from,
            Bound::Excluded(before) => before.checked_add(1).ok_or_else(too_large)?,
            Bound::Unbounded => 0,
        };
        let to = match sizes.end_bound() {
            Bound::Included(last) => last.checked_add(1),
            Bound::Excluded(to) => Some(*to),
            Bound::Unbounded => None,
        };
        self.rules.push(Rule::new(algorithm, from, to).map_err(refused)?);
        Ok(self)
    }

    /// Returns whether no algorithm is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the algorithm of the first range that covers this size and requests one of `candidates`.
    pub(crate) fn find(&self, bytes: usize, candidates: &[Algorithm]) -> Option<Algorithm> {
        let fits = |rule: &&Rule| rule.from <= bytes && rule.to.is_none_or(|to| bytes < to) && candidates.contains(&rule.algorithm);
        self.rules.iter().find(fits).map(|rule| rule.algorithm)
    }

    /// Returns every size at which a range begins or ends.
    pub(crate) fn borders(&self) -> impl Iterator<Item = usize> {
        self.rules.iter().flat_map(|rule| [Some(rule.from), rule.to]).flatten()
    }
}

impl FromStr for AlgorithmRanges {
    type Err = Error;

    /// Parses `doubling:0-16K,ring:16K-`. The `Config` error quotes every part that cannot be parsed.
    fn from_str(text: &str) -> Result<Self> {
        let (mut rules, mut complaints) = (Vec::new(), Vec::new());
        for part in text.split(',').map(str::trim) {
            match Rule::parse(part) {
                Ok(rule) => rules.push(rule),
                Err(complaint) => complaints.push(format!("{part:?}: {complaint}")),
            }
        }
        if complaints.is_empty() { Ok(Self { rules }) } else { Err(Error::config(format!("algorithm {text:?}"), complaints.join("; "))) }
    }
}

impl fmt::Display for AlgorithmRanges {
    /// Prints the text form; nothing if no algorithm is requested.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, rule) in self.rules.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}:{}", rule.algorithm, Sizes(rule.from, rule.to))?;
        }
        Ok(())
    }
}

/// A range of sizes: `16K-1M`, `16K-`.
struct Sizes(usize, Option<usize>);

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-", Size(self.0))?;
        self.1.map_or(Ok(()), |to| write!(f, "{}", Size(to)))
    }
}

/// A number of bytes, written with the largest suffix that leaves it an integer.
pub(crate) struct Size(pub(crate) usize);

/// The suffixes and the number of bits that each shifts.
const SUFFIXES: [(char, u32); 3] = [('G', 30), ('M', 20), ('K', 10)];

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SUFFIXES.iter().find(|(_, bits)| self.0 > 0 && self.0.trailing_zeros() >= *bits) {
            Some((suffix, bits)) => write!(f, "{}{suffix}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Parses a number of bytes with an optional binary suffix.
fn parse_size(text: &str) -> std::result::Result<usize, String> {
    let suffix = SUFFIXES.iter().find_map(|(suffix, bits)| {
        let digits = text.strip_suffix(*suffix).or_else(|| text.strip_suffix(suffix.to_ascii_lowercase()))?;
        Some((digits, *bits))
    });
    let (digits, bits) = suffix.unwrap_or((text, 0));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{text:?} is not a size: expected digits and at most one of K, M, G"));
    }
    let scaled = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(1 << bits));
    scaled.ok_or_else(|| format!("{text:?} is too large for a number of bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(text: &str) -> AlgorithmRanges {
        text.parse().expect("ranges")
    }

    fn complaint(text: &str) -> String {
        text.parse::<AlgorithmRanges>().expect_err(text).to_string()
    }

    #[test]
    fn names_are_understood() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse::<Algorithm>().expect("a name"), algorithm);
            assert_eq!(Algorithm::ALL.iter().filter(|other| other.name() == algorithm.name()).count(), 1, "{algorithm}");
        }
        let error = "rings".parse::<Algorithm>().expect_err("no name").to_string();
        assert!(error.contains("algorithm \"rings\"") && error.contains("doubling, ") && error.contains(", hierarchical"), "{error}");
    }

    #[test]
    fn ranges_are_half_open_and_the_first_that_fits_decides() {
        let ranges = ranges("doubling:0-16K, ring:16k-1M,direct:512K-");
        let all = Algorithm::BETWEEN_HOSTS;
        for (bytes, algorithm) in [(0, "doubling"), (16383, "doubling"), (16384, "ring"), (1 << 20, "direct"), (usize::MAX, "direct")] {
            assert_eq!(ranges.find(bytes, &all).map(Algorithm::name), Some(algorithm), "{bytes}");
        }
        assert_eq!(ranges.find(20_000, &[Algorithm::Direct]), None);
        assert_eq!(ranges.find(600 << 10, &[Algorithm::Direct]), Some(Algorithm::Direct));
    }

    #[test]
    fn every_form_of_a_range_is_the_text_that_says_it() {
        let with =
            |sizes: (Bound<usize>, Bound<usize>)| AlgorithmRanges::new().with(Algorithm::Ring, sizes).map(|ranges| ranges.to_string());
        use Bound::{Excluded, Included, Unbounded};
        for (sizes, text) in [
            ((Unbounded, Unbounded), "ring:0-"),
            ((Included(3), Excluded(5)), "ring:3-5"),
            ((Included(3), Included(5)), "ring:3-6"),
            ((Excluded(3), Unbounded), "ring:4-"),
            ((Included(1 << 10), Included(usize::MAX)), "ring:1K-"),
        ] {
            assert_eq!(with(sizes).expect("a range"), text);
        }
        for sizes in [(Included(5), Excluded(5)), (Included(5), Excluded(4)), (Excluded(4), Included(4)), (Excluded(usize::MAX), Unbounded)]
        {
            let error = with(sizes).expect_err("nothing in it");
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        assert!(with((Included(5), Excluded(4))).expect_err("nothing in it").to_string().contains("\"5-4\" is empty"));
    }

    #[test]
    fn what_does_not_exist_between_hosts_cannot_be_asked_for() {
        for algorithm in Algorithm::ALL {
            let (typed, text) = (AlgorithmRanges::new().with(algorithm, ..), format!("{algorithm}:0-").parse::<AlgorithmRanges>());
            if Algorithm::BETWEEN_HOSTS.contains(&algorithm) {
                assert_eq!(typed.expect("a range"), text.expect("a range"));
                continue;
            }
            for error in [typed.expect_err("none"), text.expect_err("none")] {
                let words = error.to_string();
                assert!(
                    words.contains(&format!("{:?} cannot be requested", algorithm.name())) && words.contains("scatter_gather"),
                    "{words}"
                );
            }
        }
    }

    #[test]
    fn what_is_printed_can_be_read_again() {
        for text in ["doubling:0-16K,ring:16K-", "chain:1-3,scatter_gather:1M-2G,binomial:1025-"] {
            assert_eq!(ranges(text).to_string(), text);
        }
        assert_eq!(ranges("ring:1024k-").to_string(), "ring:1M-");
        assert!(AlgorithmRanges::default().is_empty() && AlgorithmRanges::new().to_string().is_empty() && !ranges("ring:0-").is_empty());
    }

    #[test]
    fn every_malformed_part_is_quoted() {
        let words = complaint("ring:5-3,slots:0-,doubling:0-1K,rung:0-,ring,direct:1X-,direct:-5,ring:99999999999G-,");
        for part in
            ["\"ring:5-3\"", "\"slots:0-\"", "\"rung:0-\"", "\"ring\"", "\"direct:1X-\"", "\"direct:-5\"", "\"ring:99999999999G-\"", "\"\""]
        {
            assert!(words.contains(&format!("{part}: ")), "{part} in {words}");
        }
        assert!(words.contains("expected one of doubling, binomial, ring, chain, scatter_gather, direct"), "{words}");
        assert!(!words.contains("\"doubling:0-1K\":"), "{words}");
    }

    #[test]
    fn nonsense_is_an_error_and_no_panic() {
        for text in [
            "",
            ",",
            ":",
            "ring:",
            "ring:-",
            "ring:--",
            "ring:K-",
            "ring:+1-",
            "ring:1-2-3",
            "ring:1é-",
            "ring:0-0",
            "ring:18446744073709551616-",
        ] {
            complaint(text);
        }
    }
}
