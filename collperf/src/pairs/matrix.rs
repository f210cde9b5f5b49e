//! What was measured between all pairs, and what of it is out of line.

use std::fmt;

/// Figures of every pair, in both directions.
pub(super) struct Matrix {
    /// The host's name, and the rank that was measured.
    names: Vec<(String, usize)>,
    bandwidth: Table,
    latency: Table,
    /// The part by which something has to be worse.
    threshold: f64,
}

/// One kind of figure, from each to each.
struct Table {
    count: usize,
    values: Vec<f64>,
}

/// A kind of figure, and how it is told.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    unit: &'static str,
    /// Whether more is worse.
    is_time: bool,
}

const BANDWIDTH: Kind = Kind { name: "bandwidth", unit: "MB/s", is_time: false };
const LATENCY: Kind = Kind { name: "latency", unit: "us", is_time: true };

impl Table {
    fn at(&self, from: usize, to: usize) -> f64 {
        self.values[from * self.count + to]
    }

    /// The upper median of the pairs that `is_meant` picks; `None` where there are none.
    fn median(&self, is_meant: impl Fn(usize, usize) -> bool) -> Option<f64> {
        let pairs = (0..self.count).flat_map(|from| (0..self.count).map(move |to| (from, to)));
        let mut values: Vec<f64> =
            pairs.filter(|(from, to)| from != to && is_meant(*from, *to)).map(|(from, to)| self.at(from, to)).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

impl Matrix {
    /// `measured` has a row for each member, of bandwidth to and latency with every other.
    pub(super) fn new(names: Vec<(String, usize)>, measured: &[[f64; 2]], threshold: f64) -> Self {
        let count = names.len();
        let table = |which: usize| Table { count, values: measured.iter().map(|figures| figures[which]).collect() };
        Self { bandwidth: table(0), latency: table(1), names, threshold }
    }

    /// A line for each host and pair that is out of line: what it is, what the others have, and by how much.
    pub(super) fn findings(&self) -> Vec<String> {
        [(&self.bandwidth, BANDWIDTH), (&self.latency, LATENCY)]
            .into_iter()
            .flat_map(|(table, kind)| self.findings_in(table, kind))
            .collect()
    }

    fn findings_in(&self, table: &Table, kind: Kind) -> Vec<String> {
        let (slow_to, slow_from) = (self.slow_hosts(table, kind, true), self.slow_hosts(table, kind, false));
        let mut lines = Vec::new();
        for host in 0..table.count {
            let (to, from) = (slow_to[host], slow_from[host]);
            let what = match (to, from) {
                (Some(_), Some(_)) => "to and from others",
                (Some(_), None) => "to others",
                (None, Some(_)) => "from others",
                (None, None) => continue,
            };
            if let Some((found, rest)) = to.or(from) {
                lines.push(format!("{}: {what} {}", self.name(host), difference(kind, found, rest, "what the rest has among itself")));
            }
        }
        let is_clear = |from: usize, to: usize| slow_to[from].is_none() && slow_from[to].is_none();
        let Some(rest) = table.median(is_clear) else { return lines };
        for (from, to) in (0..table.count).flat_map(|from| (0..table.count).map(move |to| (from, to))) {
            // A time is that of both directions.
            let is_told = from == to || !is_clear(from, to) || (kind.is_time && from > to);
            if !is_told && self.is_worse(kind, table.at(from, to), rest) {
                let arrow = if kind.is_time { "<->" } else { "->" };
                let difference = difference(kind, table.at(from, to), rest, "the median");
                lines.push(format!("{} {arrow} {}: {difference}", self.name(from), self.name(to)));
            }
        }
        lines
    }

    /// For each host, what most of its pairs have in one direction, and what the rest has among itself, where the former is out of line.
    /// Nothing with one pair, which has no rest.
    fn slow_hosts(&self, table: &Table, kind: Kind, sends: bool) -> Vec<Option<(f64, f64)>> {
        let slow = |host: usize| {
            let rest = table.median(|from, to| from != host && to != host)?;
            let found = table.median(|from, to| if sends { from == host } else { to == host })?;
            self.is_worse(kind, found, rest).then_some((found, rest))
        };
        (0..table.count).map(slow).collect()
    }

    fn is_worse(&self, kind: Kind, found: f64, rest: f64) -> bool {
        let kept = 1.0 - self.threshold;
        if kind.is_time { found * kept > rest } else { found < rest * kept }
    }

    fn name(&self, host: usize) -> String {
        let (name, rank) = &self.names[host];
        format!("{host} ({name}, rank {rank})")
    }
}

/// Two figures, and how far they are apart.
fn difference(kind: Kind, found: f64, rest: f64, of: &str) -> String {
    let Kind { name, unit, is_time } = kind;
    let (worse, word) = if is_time { (found / rest, "times") } else { ((1.0 - found / rest) * 100.0, "% less than") };
    let worse = if is_time { format!("{worse:.1} {word}") } else { format!("{worse:.0}{word}") };
    format!("{name} {found:.2} {unit}, {worse} {of}, {rest:.2} {unit}")
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, rank)) in self.names.iter().enumerate() {
            writeln!(f, "# {number}: {name}, rank {rank}")?;
        }
        write_table(f, &self.bandwidth, "Bandwidth from row to column, in MB/s")?;
        write_table(f, &self.latency, "Latency, half a round trip, in us")?;
        let everything = |_, _| true;
        let medians = [self.bandwidth.median(everything), self.latency.median(everything)].map(|median| median.unwrap_or(0.0));
        writeln!(f, "#\n# Median: {:.2} MB/s, {:.2} us", medians[0], medians[1])?;
        if self.names.len() == 2 {
            writeln!(f, "# One pair: its directions are compared with each other alone")?;
        }
        let findings = self.findings();
        let percent = self.threshold * 100.0;
        match findings.is_empty() {
            true => writeln!(f, "# Nothing is out of line by more than {percent:.0}%"),
            false => writeln!(f, "# Out of line by more than {percent:.0}%:"),
        }?;
        findings.iter().try_for_each(|line| writeln!(f, "#   {line}"))
    }
}

fn write_table(f: &mut fmt::Formatter<'_>, table: &Table, title: &str) -> fmt::Result {
    write!(f, "#\n# {title}\n{:>6}", "")?;
    (0..table.count).try_for_each(|to| write!(f, " {to:>9}"))?;
    for from in 0..table.count {
        write!(f, "\n{from:>6}")?;
        for to in 0..table.count {
            if from == to { write!(f, " {:>9}", "-")? } else { write!(f, " {:>9.2}", table.at(from, to))? }
        }
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts whose every pair has 1 MB/s and 10 us, but for what is said.
    fn matrix(count: usize, bandwidths: &[(usize, usize, f64)], latencies: &[(usize, usize, f64)]) -> Matrix {
        let mut measured = vec![[1.0, 10.0]; count * count];
        bandwidths.iter().for_each(|(from, to, value)| measured[from * count + to][0] = *value);
        latencies.iter().for_each(|(from, to, value)| measured[from * count + to][1] = *value);
        Matrix::new((0..count).map(|host| (format!("h{host}"), 2 * host)).collect(), &measured, 0.5)
    }

    #[test]
    fn what_is_alike_is_in_line() {
        for count in 2..6 {
            assert!(matrix(count, &[(0, 1, 0.6)], &[(0, 1, 19.0)]).findings().is_empty());
        }
    }

    #[test]
    fn a_slow_pair_is_named_and_its_hosts_are_not() {
        for count in [4, 13] {
            let findings = matrix(count, &[(1, 2, 0.1)], &[(0, 3, 50.0), (3, 0, 50.0)]).findings();
            let expected = [
                "1 (h1, rank 2) -> 2 (h2, rank 4): bandwidth 0.10 MB/s, 90% less than the median, 1.00 MB/s",
                "0 (h0, rank 0) <-> 3 (h3, rank 6): latency 50.00 us, 5.0 times the median, 10.00 us",
            ];
            assert_eq!(findings, expected);
        }
        // Of one pair the worse direction.
        assert_eq!(matrix(2, &[(1, 0, 0.1)], &[]).findings().len(), 1);
    }

    #[test]
    fn a_slow_host_is_named_once() {
        for count in [3, 4, 5, 13] {
            let sends: Vec<_> = (0..count).filter(|other| *other != 2).map(|other| (2, other, 0.01)).collect();
            let findings = matrix(count, &sends, &[]).findings();
            assert_eq!(
                findings,
                ["2 (h2, rank 4): to others bandwidth 0.01 MB/s, 99% less than what the rest has among itself, 1.00 MB/s"]
            );
            let both: Vec<_> = sends.iter().flat_map(|(from, to, value)| [(*from, *to, *value), (*to, *from, *value)]).collect();
            let findings = matrix(count, &both, &[]).findings();
            assert!(findings.len() == 1 && findings[0].starts_with("2 (h2, rank 4): to and from others "), "{findings:?}");
        }
    }

    #[test]
    fn the_table_has_every_pair() {
        let text = matrix(3, &[(0, 2, 0.25)], &[]).to_string();
        for part in [
            "# 2: h2, rank 4\n",
            "     0         -      1.00      0.25\n",
            "# Median: 1.00 MB/s, 10.00 us\n",
            "# Out of line by more than 50%:\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(matrix(2, &[], &[]).to_string().contains("# One pair: "));
    }
}
