//! The figures of all pairs, and which of them are out of line.

use std::fmt;

use crate::statistics::standing_out;

/// Figures of every pair, in both directions.
pub(super) struct Matrix {
    /// The name of each host, and the rank that was measured.
    names: Vec<(String, usize)>,
    bandwidth: Figures,
    latency: Figures,
    /// The fraction by which a figure must be worse to be out of line.
    threshold: f64,
}

/// One kind of figure: the medians of all measurements, and the measurements that were repeated because something
/// looked out of line.
struct Figures {
    median: Table,
    again: Vec<Table>,
}

/// A value for each ordered pair.
struct Table {
    count: usize,
    values: Vec<f64>,
}

/// A kind of figure, and how it is described.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    unit: &'static str,
    /// Whether a larger value is worse.
    is_time: bool,
}

const BANDWIDTH: Kind = Kind { name: "bandwidth", unit: "MB/s", is_time: false };
const LATENCY: Kind = Kind { name: "latency", unit: "us", is_time: true };

impl Table {
    fn at(&self, from: usize, to: usize) -> f64 {
        self.values[from * self.count + to]
    }

    /// Returns the upper median of the pairs that `is_meant` selects; `None` if it selects none.
    fn median(&self, is_meant: impl Fn(usize, usize) -> bool) -> Option<f64> {
        let pairs = (0..self.count).flat_map(|from| (0..self.count).map(move |to| (from, to)));
        median(pairs.filter(|(from, to)| from != to && is_meant(*from, *to)).map(|(from, to)| self.at(from, to)).collect())
    }
}

/// Returns the upper median; `None` if there are no values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

impl Matrix {
    /// Creates the matrix. Each of `measured` has a row for each member, with that member's bandwidth to, and latency
    /// with, every member. The first measurement shows what must be checked again, and the others show whether it
    /// recurs.
    pub(super) fn new(names: Vec<(String, usize)>, measured: &[Vec<[f64; 2]>], threshold: f64) -> Self {
        let count = names.len();
        let figures = |which: usize| {
            let table = |values: Vec<f64>| Table { count, values };
            let one = |measured: &Vec<[f64; 2]>| table(measured.iter().map(|figures| figures[which]).collect());
            let middle = |place: usize| median(measured.iter().map(|measured| measured[place][which]).collect()).unwrap_or(0.0);
            Figures { median: table((0..count * count).map(middle).collect()), again: measured.iter().skip(1).map(one).collect() }
        };
        Self { bandwidth: figures(0), latency: figures(1), names, threshold }
    }

    fn kinds(&self) -> [(&Figures, Kind); 2] {
        [(&self.bandwidth, BANDWIDTH), (&self.latency, LATENCY)]
    }

    /// Whether something looks out of line, and should be measured again.
    pub(super) fn is_suspicious(&self) -> bool {
        self.kinds().into_iter().any(|(figures, kind)| !self.lines(figures, kind, false).is_empty())
    }

    /// Returns a line for each host and pair that is repeatedly out of line: its figure, that of the others, and the
    /// difference.
    pub(super) fn findings(&self) -> Vec<String> {
        self.kinds().into_iter().flat_map(|(figures, kind)| self.lines(figures, kind, true)).collect()
    }

    /// Returns a line for each host and pair that is out of line in the medians; with `is_again`, only for those that
    /// are repeatedly out of line.
    fn lines(&self, figures: &Figures, kind: Kind, is_again: bool) -> Vec<String> {
        let table = &figures.median;
        let [slow_to, slow_from] = [true, false].map(|sends| self.slow_hosts(figures, kind, sends, is_again));
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
                lines.push(format!("{}: {what} {}", self.name(host), difference(kind, found, rest, "the median among the others")));
            }
        }
        let is_clear = |from: usize, to: usize| slow_to[from].is_none() && slow_from[to].is_none();
        let Some(rest) = table.median(is_clear) else { return lines };
        for (from, to) in self.slow_pairs(figures, kind, &is_clear, is_again) {
            let arrow = if kind.is_time { "<->" } else { "->" };
            let difference = difference(kind, table.at(from, to), rest, "the median");
            lines.push(format!("{} {arrow} {}: {difference}", self.name(from), self.name(to)));
        }
        lines
    }

    /// Returns two medians for each host that is out of line in one direction: that of its pairs, and that of the pairs
    /// without it. With only one pair the second does not exist, so no host is out of line.
    fn slow_hosts(&self, figures: &Figures, kind: Kind, sends: bool, is_again: bool) -> Vec<Option<(f64, f64)>> {
        let of = |table: &Table, host: usize| table.median(|from, to| if sends { from == host } else { to == host });
        let slow = |host: usize| {
            let rest = figures.median.median(|from, to| from != host && to != host)?;
            let found = of(&figures.median, host)?;
            self.is_worse(kind, found, rest).then_some((found, rest))
        };
        let mut slow: Vec<Option<(f64, f64)>> = (0..figures.median.count).map(slow).collect();
        if is_again && slow.iter().any(Option::is_some) {
            let rests: Vec<_> =
                figures.again.iter().map(|table| table.median(|from, to| slow[from].is_none() && slow[to].is_none())).collect();
            let mark = |host: usize, table: &Table, rest: Option<f64>| {
                of(table, host).zip(rest).is_some_and(|(found, rest)| self.is_worse(kind, found, rest))
            };
            let marks = |host: usize| figures.again.iter().zip(&rests).map(|(table, rest)| mark(host, table, *rest)).collect();
            let standing_out = standing_out(&(0..slow.len()).map(marks).collect::<Vec<Vec<bool>>>());
            slow.iter_mut().zip(standing_out).filter(|(_, is_named)| !is_named).for_each(|(slow, _)| *slow = None);
        }
        slow
    }

    /// Returns the pairs that are out of line while their hosts are not.
    fn slow_pairs(&self, figures: &Figures, kind: Kind, is_clear: &impl Fn(usize, usize) -> bool, is_again: bool) -> Vec<(usize, usize)> {
        let count = figures.median.count;
        // A time is the same in both directions.
        let is_told = |(from, to): &(usize, usize)| from != to && is_clear(*from, *to) && !(kind.is_time && from > to);
        let pairs: Vec<_> = (0..count).flat_map(|from| (0..count).map(move |to| (from, to))).filter(is_told).collect();
        let is_slow = |table: &Table, rest: Option<f64>, (from, to): (usize, usize)| {
            rest.is_some_and(|rest| self.is_worse(kind, table.at(from, to), rest))
        };
        let rest = figures.median.median(is_clear);
        let slow = |pair: &(usize, usize)| is_slow(&figures.median, rest, *pair);
        if !is_again {
            return pairs.into_iter().filter(slow).collect();
        }
        let rests: Vec<_> = figures.again.iter().map(|table| table.median(is_clear)).collect();
        let marks = |pair: &(usize, usize)| figures.again.iter().zip(&rests).map(|(table, rest)| is_slow(table, *rest, *pair)).collect();
        let standing_out = standing_out(&pairs.iter().map(marks).collect::<Vec<Vec<bool>>>());
        pairs.into_iter().zip(standing_out).filter(|(pair, is_named)| *is_named && slow(pair)).map(|(pair, _)| pair).collect()
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

/// Describes two figures and their difference.
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
        write_table(f, &self.bandwidth.median, "Bandwidth from row to column, in MB/s")?;
        write_table(f, &self.latency.median, "Latency (half a round trip), in us")?;
        let everything = |_, _| true;
        let medians = [&self.bandwidth, &self.latency].map(|figures| figures.median.median(everything).unwrap_or(0.0));
        writeln!(f, "#\n# Median: {:.2} MB/s, {:.2} us", medians[0], medians[1])?;
        if self.names.len() == 2 {
            writeln!(f, "# There is only one pair: its two directions are compared with each other")?;
        }
        let findings = self.findings();
        let percent = self.threshold * 100.0;
        let again = self.bandwidth.again.len();
        match findings.is_empty() {
            true if again == 0 => writeln!(f, "# No host or pair is out of line by more than {percent:.0}%"),
            true => writeln!(
                f,
                "# No host or pair is out of line by more than {percent:.0}%. The first measurement had an outlier, but in {again} \
                 repeats, the outlier did not occur more often than chance explains"
            ),
            false => writeln!(f, "# Out of line by more than {percent:.0}%, in {again} measurements after the first:"),
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
    use crate::random::Random;

    /// Returns hosts whose pairs all have 1 MB/s and 10 us, except for the given ones.
    fn matrix(count: usize, bandwidths: &[(usize, usize, f64)], latencies: &[(usize, usize, f64)]) -> Matrix {
        let mut measured = vec![[1.0, 10.0]; count * count];
        bandwidths.iter().for_each(|(from, to, value)| measured[from * count + to][0] = *value);
        latencies.iter().for_each(|(from, to, value)| measured[from * count + to][1] = *value);
        again_and_again(vec![measured; 13])
    }

    fn again_and_again(measured: Vec<Vec<[f64; 2]>>) -> Matrix {
        let count = measured[0].len().isqrt();
        Matrix::new((0..count).map(|host| (format!("h{host}"), 2 * host)).collect(), &measured, 0.5)
    }

    /// Returns measurements in which figures are sometimes, by chance, several times as bad as the others.
    fn noisy(random: &mut Random, count: usize, percent: usize) -> Vec<[f64; 2]> {
        let mut worse =
            || if random.below(100) < percent { 2.0 + random.below(800) as f64 / 100.0 } else { 1.0 + random.below(50) as f64 / 100.0 };
        (0..count * count).map(|_| [1.0 / worse(), 10.0 * worse()]).collect()
    }

    #[test]
    fn noise_has_no_name() {
        let (seed, runs) = (20_261_126, 150);
        let mut random = Random(seed);
        for count in [2, 3, 4, 9] {
            for percent in [2, 10, 30, 60] {
                let times = if count > 3 { 9 } else { 13 };
                let mut draw = || again_and_again((0..times).map(|_| noisy(&mut random, count, percent)).collect());
                let (mut suspicious, mut named) = (0, 0);
                for _ in 0..runs {
                    let matrix = draw();
                    suspicious += usize::from(matrix.is_suspicious());
                    named += usize::from(!matrix.findings().is_empty());
                }
                println!("seed {seed}: {count} hosts, {percent} % of figures: {suspicious} suspicious, {named} named");
                assert!(named <= runs / 50, "seed {seed}: {count} hosts, {percent} % of figures: {named} of {runs} runs");
            }
        }
    }

    #[test]
    fn a_slow_link_is_found_in_noise() {
        let (seed, runs) = (20_261_127, 100);
        let mut random = Random(seed);
        for count in [2, 4, 9] {
            let mut found = 0;
            for _ in 0..runs {
                let times = if count > 3 { 9 } else { 13 };
                let mut measured: Vec<_> = (0..times).map(|_| noisy(&mut random, count, 10)).collect();
                measured.iter_mut().for_each(|once| once[1][0] *= 0.1);
                let findings = again_and_again(measured).findings();
                found += usize::from(findings.iter().any(|line| line.starts_with("0 (h0, rank 0) -> 1 (h1, rank 2): bandwidth")));
            }
            println!("seed {seed}: {count} hosts: {found} of {runs} runs");
            assert!(found >= runs * 8 / 10, "seed {seed}: {count} hosts: {found} of {runs} runs");
        }
    }

    #[test]
    fn what_was_slow_once_is_not_named() {
        let quiet = vec![[1.0, 10.0]; 16];
        let mut once = quiet.clone();
        once[6] = [0.01, 900.0];
        let first = again_and_again(vec![once.clone()]);
        assert!(first.is_suspicious() && first.findings().is_empty(), "it is measured again before it is named");
        let matrix = again_and_again([vec![once], vec![quiet; 12]].concat());
        assert!(matrix.findings().is_empty());
        assert!(
            matrix.to_string().contains("The first measurement had an outlier, but in 12 repeats, the outlier did not occur more often")
        );
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
        // With one pair, only the worse direction.
        assert_eq!(matrix(2, &[(1, 0, 0.1)], &[]).findings().len(), 1);
    }

    #[test]
    fn a_slow_host_is_named_once() {
        for count in [3, 4, 5, 13] {
            let sends: Vec<_> = (0..count).filter(|other| *other != 2).map(|other| (2, other, 0.01)).collect();
            let findings = matrix(count, &sends, &[]).findings();
            assert_eq!(findings, ["2 (h2, rank 4): to others bandwidth 0.01 MB/s, 99% less than the median among the others, 1.00 MB/s"]);
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
            "# Out of line by more than 50%, in 12 measurements after the first:\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(matrix(2, &[], &[]).to_string().contains("# There is only one pair: "));
    }
}
