//! Which algorithm a call takes: the cheapest by a table of latency and bandwidth, unless the user says otherwise.

use std::fmt;

use crate::call::Kind;
use crate::error::{Error, Result};

/// How a collective is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// Recursive doubling: log₂ n exchanges of everything.
    Doubling,
    /// Round a ring, in segments.
    Ring,
    /// Between each pair at once, folded in rank order.
    Direct,
    /// A binomial tree.
    Tree,
    /// A chain in segments.
    Chain,
}

impl Algorithm {
    const ALL: [Algorithm; 5] = [Algorithm::Doubling, Algorithm::Ring, Algorithm::Direct, Algorithm::Tree, Algorithm::Chain];

    const fn name(self) -> &'static str {
        match self {
            Algorithm::Doubling => "doubling",
            Algorithm::Ring => "ring",
            Algorithm::Direct => "direct",
            Algorithm::Tree => "tree",
            Algorithm::Chain => "chain",
        }
    }

    /// Those that a collective has.
    fn of(kind: Kind) -> &'static [Algorithm] {
        match kind {
            Kind::AllReduce => &[Algorithm::Doubling, Algorithm::Ring, Algorithm::Direct],
            Kind::Reduce => &[Algorithm::Tree, Algorithm::Ring, Algorithm::Direct],
            Kind::ReduceScatter | Kind::ReduceScatterV => &[Algorithm::Direct, Algorithm::Ring],
            Kind::AllGather | Kind::AllGatherV => &[Algorithm::Direct, Algorithm::Ring],
            Kind::Broadcast => &[Algorithm::Tree, Algorithm::Chain],
            _ => &[Algorithm::Direct],
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a message costs between two hosts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Costs {
    /// From sending a small message to having it, in seconds.
    pub(crate) latency: f64,
    /// Seconds per byte on the way.
    pub(crate) per_byte: f64,
    /// Seconds per byte that is folded.
    pub(crate) per_folded_byte: f64,
}

impl Default for Costs {
    /// Ten-gigabit-class TCP.
    fn default() -> Self {
        Self { latency: 20e-6, per_byte: 0.5e-9, per_folded_byte: 0.1e-9 }
    }
}

impl Costs {
    /// The estimated time of an algorithm among `n`, in seconds; `bytes` as in the call's whole vector.
    fn estimate(&self, kind: Kind, algorithm: Algorithm, bytes: f64, n: f64) -> f64 {
        let hops = n.log2().ceil();
        let share = bytes / n;
        let (latency, moved, folded) = match (kind, algorithm) {
            (_, Algorithm::Doubling) => (hops + 1.0, hops * bytes, hops * bytes),
            (Kind::AllReduce, Algorithm::Ring) => (2.0 * (n - 1.0), 2.0 * (n - 1.0) * share, (n - 1.0) * share),
            (Kind::AllReduce, _) => (2.0 + n / 8.0, 2.0 * (n - 1.0) * share, (n - 1.0) * share),
            (Kind::Reduce, Algorithm::Tree) => (2.0 * hops, hops * bytes, hops * bytes),
            (Kind::Reduce, _) => (hops + n, 2.0 * (n - 1.0) * share, (n - 1.0) * share),
            (Kind::Broadcast, Algorithm::Tree) => (2.0 * hops, hops * bytes, 0.0),
            (Kind::Broadcast, _) => (hops + n, bytes, 0.0),
            // One hop, but all at once: what a ring spreads out meets at the receivers here.
            (_, Algorithm::Direct) => (1.0 + n / 8.0, 1.5 * (n - 1.0) * share, (n - 1.0) * share),
            _ => (hops + n - 1.0, (n - 1.0) * share, (n - 1.0) * share),
        };
        latency * self.latency + moved * self.per_byte + folded * self.per_folded_byte
    }
}

/// A range of sizes for which the user chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chosen {
    algorithm: Algorithm,
    from: u64,
    to: u64,
}

/// Chooses algorithms.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Choice {
    costs: Costs,
    chosen: Vec<Chosen>,
}

impl Choice {
    /// The table's choice, overridden by ranges as `doubling:0-16K,ring:16K-` (bytes; the upper end is not in the range; K, M and G
    /// are binary). An algorithm that a collective does not have leaves that collective to the table.
    pub(crate) fn new(ranges: Option<&str>) -> Result<Self> {
        let chosen = ranges.unwrap_or_default().split(',').map(str::trim).filter(|range| !range.is_empty());
        Ok(Self { costs: Costs::default(), chosen: chosen.map(parse_range).collect::<Result<_>>()? })
    }

    /// The algorithm for `bytes` (the whole vector) among `n`.
    pub(crate) fn choose(&self, kind: Kind, bytes: usize, n: usize) -> Algorithm {
        let offered = Algorithm::of(kind);
        let fits = |chosen: &&Chosen| (chosen.from..chosen.to).contains(&(bytes as u64)) && offered.contains(&chosen.algorithm);
        if let Some(chosen) = self.chosen.iter().find(fits) {
            return chosen.algorithm;
        }
        let cost = |algorithm: Algorithm| self.costs.estimate(kind, algorithm, bytes as f64, n as f64);
        let cheaper = |best: Algorithm, other: Algorithm| if cost(other) < cost(best) { other } else { best };
        // Never `Direct` for an all-reduce of many: it is there for those who want rank order.
        let candidates = offered
            .iter()
            .copied()
            .filter(|algorithm| !(matches!(kind, Kind::AllReduce | Kind::Reduce) && *algorithm == Algorithm::Direct));
        candidates.reduce(cheaper).unwrap_or(Algorithm::Direct)
    }
}

/// A number of bytes with an optional K, M or G.
fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// `ring:16K-` or `ring:16K-1M` or `ring`.
fn parse_range(text: &str) -> Result<Chosen> {
    let wrong = |reason: String| Error::config(format!("algorithm range {text:?}"), reason);
    let (name, range) = text.split_once(':').unwrap_or((text, "0-"));
    let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
        let known: Vec<_> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
        wrong(format!("{name:?} is no algorithm; one of {}", known.join(", ")))
    })?;
    let (from, to) = range.split_once('-').ok_or_else(|| wrong(format!("{range:?} is no range; write from-to, as 0-16K or 16K-")))?;
    let from = parse_bytes(from).ok_or_else(|| wrong(format!("{from:?} is no number of bytes")))?;
    let to = if to.is_empty() { u64::MAX } else { parse_bytes(to).ok_or_else(|| wrong(format!("{to:?} is no number of bytes")))? };
    Ok(Chosen { algorithm, from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_calls_take_few_hops_and_large_ones_few_bytes() {
        let choice = Choice::new(None).unwrap();
        for n in [2, 3, 8, 64] {
            assert_eq!(choice.choose(Kind::AllReduce, 8, n), Algorithm::Doubling);
            assert_eq!(choice.choose(Kind::Broadcast, 8, n), Algorithm::Tree);
        }
        for n in [3, 8, 64] {
            assert_eq!(choice.choose(Kind::AllReduce, 64 << 20, n), Algorithm::Ring);
            assert_eq!(choice.choose(Kind::Broadcast, 64 << 20, n), Algorithm::Chain);
        }
    }

    #[test]
    fn ranges_override_the_table_where_the_collective_has_the_algorithm() {
        let choice = Choice::new(Some("ring:0-16K, doubling:16K-")).unwrap();
        assert_eq!(choice.choose(Kind::AllReduce, 16 * 1024 - 1, 4), Algorithm::Ring);
        assert_eq!(choice.choose(Kind::AllReduce, 16 * 1024, 4), Algorithm::Doubling);
        assert_eq!(choice.choose(Kind::Broadcast, 8, 4), Algorithm::Tree);
    }

    #[test]
    fn malformed_ranges_are_quoted() {
        for (text, part) in
            [("ringo:0-", "ringo"), ("ring:5", "5"), ("ring:x-", "x"), ("ring:0-1T", "1T"), ("ring:99999999999G-", "99999999999G")]
        {
            let error = Choice::new(Some(text)).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(text), "{error}");
        }
    }
}
