//! How much each rank sends to each other rank in `all_to_all_v`, as nccl-tests' variables for `alltoallv` say.

use std::path::Path;

use crate::failure::Failure;
use crate::input_file;

/// Blocks are rounded down to a multiple of this, as in nccl-tests.
const ALIGNMENT: u64 = 16;

/// The blocks of an exchange.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Traffic {
    /// A matrix from a file: in row i and column j, the bytes from rank i to rank j.
    Matrix { side: usize, bytes: Vec<u64> },
    /// Blocks that grow with the distance of the ranks: 0: all are even; 1: in proportion to the distance.
    Spread(f64),
}

/// Elements from each rank to each rank: the row of a rank has what it sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exchange {
    ranks: usize,
    counts: Vec<usize>,
}

impl Traffic {
    /// Reads a matrix, and multiplies it by `scale`.
    pub(crate) fn read(path: &Path, scale: f64) -> Result<Self, Failure> {
        let bytes = input_file::read(path).map_err(|error| Failure::io(format!("reading {}", path.display()), &error))?;
        let text = String::from_utf8(bytes).map_err(|_| Failure::usage(format!("{}: the matrix of traffic is no text", path.display())))?;
        parse(&text, scale).map_err(|reason| Failure::usage(format!("{}: {reason}", path.display())))
    }

    /// Whether the sizes of calls come from a file.
    pub(crate) fn is_matrix(&self) -> bool {
        matches!(self, Traffic::Matrix { .. })
    }

    /// Returns the exchange among `ranks` ranks, in elements. `total` is the bytes that each rank sends, unless a
    /// matrix says it.
    pub(crate) fn exchange(&self, ranks: usize, total: usize, element_bytes: usize) -> Result<Exchange, String> {
        if let Traffic::Matrix { side, .. } = self
            && *side < ranks
        {
            return Err(format!("the matrix of traffic has {side} rows, but there are {ranks} ranks; start fewer, or add rows"));
        }
        let block = |from: usize, to: usize| match self {
            Traffic::Matrix { side, bytes } => bytes[from * side + to],
            Traffic::Spread(spread) => by_distance(*spread, ranks, total as f64, (to + ranks - from) % ranks),
        };
        let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let counts = pairs.map(|(from, to)| (block(from, to) / ALIGNMENT * ALIGNMENT) as usize / element_bytes).collect();
        Ok(Exchange { ranks, counts })
    }
}

/// Returns the bytes to the rank at a distance.
fn by_distance(spread: f64, ranks: usize, total: f64, distance: usize) -> u64 {
    if ranks < 2 {
        return total as u64;
    }
    let distances = (ranks * (ranks - 1) / 2) as f64;
    ((1.0 - spread) * total / ranks as f64 + spread * total * distance as f64 / distances) as u64
}

/// Reads rows of numbers, separated by blanks.
fn parse(text: &str, scale: f64) -> Result<Traffic, String> {
    let rows = || text.lines().filter(|line| !line.trim().is_empty());
    let side = rows().count();
    if side == 0 {
        return Err("the matrix of traffic is empty; expected a line of numbers for each rank".to_owned());
    }
    let mut bytes = Vec::new();
    for (number, row) in rows().enumerate() {
        let before = bytes.len();
        for word in row.split_whitespace() {
            let value = word.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
            let value = value.ok_or_else(|| format!("row {number}: {word:?} is not a number of bytes"))? * scale;
            if value > isize::MAX as f64 {
                return Err(format!("row {number}: {word} times {scale} bytes are too many"));
            }
            bytes.push(value as u64);
        }
        let columns = bytes.len() - before;
        if columns != side {
            return Err(format!("row {number} has {columns} numbers, but there are {side} rows; expected a square matrix"));
        }
    }
    Ok(Traffic::Matrix { side, bytes })
}

impl Exchange {
    /// Returns the exchange in which `sends` gives the elements that a rank sends to each rank.
    pub(crate) fn of(ranks: usize, sends: impl Fn(usize) -> Vec<usize>) -> Self {
        Self { ranks, counts: (0..ranks).flat_map(sends).collect() }
    }

    /// Returns the elements that a rank sends to each rank.
    pub(crate) fn sends(&self, rank: usize) -> Vec<usize> {
        self.counts[rank * self.ranks..(rank + 1) * self.ranks].to_vec()
    }

    /// Returns the elements that a rank receives from each rank.
    pub(crate) fn receives(&self, rank: usize) -> Vec<usize> {
        (0..self.ranks).map(|from| self.counts[from * self.ranks + rank]).collect()
    }

    /// Describes what each rank sends and receives in a call of this time, as nccl-tests does.
    pub(crate) fn summary(&self, element_bytes: usize, time_us: f64) -> String {
        let line = |rank: usize| {
            let [sent, received] = [self.sends(rank), self.receives(rank)].map(|counts| counts.iter().sum::<usize>() * element_bytes);
            let bandwidth = sent.max(received) as f64 / time_us.max(1e-3) / 1e3;
            let bus = bandwidth * (self.ranks - 1) as f64 / self.ranks as f64;
            format!("#   rank={rank} send_bytes={sent} recv_bytes={received} alg_bw={bandwidth:.2} bus_bw={bus:.2}\n")
        };
        let heading = format!("# NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY: nranks={} time_usec={time_us:.2}\n", self.ranks);
        heading + &(0..self.ranks).map(line).collect::<String>()
    }

    /// Returns the most elements that any rank sends or receives; `None` if they cannot be counted.
    pub(crate) fn largest(&self) -> Option<usize> {
        let sum = |counts: Vec<usize>| counts.into_iter().try_fold(0_usize, usize::checked_add);
        (0..self.ranks)
            .map(|rank| Some(sum(self.sends(rank))?.max(sum(self.receives(rank))?)))
            .try_fold(0, |most, sum| Some(most.max(sum?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_read_as_nccl_tests_reads_them() {
        let traffic = parse("100 200 150\n\n 50\t100   75\n3e2 150 200.9\n", 1.0).unwrap();
        assert_eq!(traffic, Traffic::Matrix { side: 3, bytes: vec![100, 200, 150, 50, 100, 75, 300, 150, 200] });
        let exchange = traffic.exchange(3, 0, 4).unwrap();
        // Rounded down to 16 bytes: 96 192 144, 48 96 64, 288 144 192.
        assert_eq!((exchange.sends(0), exchange.receives(0)), (vec![24, 48, 36], vec![24, 12, 72]));
        assert_eq!(exchange.largest(), Some(72 + 36 + 48));
        // The first rows and columns serve fewer ranks.
        assert_eq!(traffic.exchange(2, 0, 1).unwrap().sends(1), [48, 96]);
        assert!(traffic.exchange(4, 0, 1).unwrap_err().contains("has 3 rows, but there are 4 ranks"));
        assert_eq!(parse("10", 3.5).unwrap(), Traffic::Matrix { side: 1, bytes: vec![35] });
    }

    #[test]
    fn what_is_no_matrix_is_refused() {
        for (text, words) in [
            ("", "is empty"),
            (" \n\n", "is empty"),
            ("1 2\n3", "row 1 has 1 numbers, but there are 2 rows"),
            ("1 2", "row 0 has 2 numbers, but there are 1 rows"),
            ("1 x\n2 3", "row 0: \"x\" is not a number"),
            ("1 -1\n2 3", "\"-1\" is not a number"),
            ("nan", "not a number"),
            ("inf", "not a number"),
            ("1e300", "too many"),
        ] {
            let found = parse(text, 1.0).unwrap_err();
            assert!(found.contains(words), "{text:?}: {found}");
        }
        let huge = parse("9e18 9e18\n0 0", 1.0).unwrap().exchange(2, 0, 1).unwrap();
        assert!(huge.largest().is_some_and(|largest| largest as u64 > 1 << 63));
        let beyond = parse("9e18 9e18 9e18\n0 0 0\n0 0 0", 1.0).unwrap().exchange(3, 0, 1).unwrap();
        assert_eq!(beyond.largest(), None);
    }

    #[test]
    fn a_summary_has_a_line_for_each_rank() {
        let exchange = parse("0 64\n32 0", 1.0).unwrap().exchange(2, 0, 4).unwrap();
        let text = exchange.summary(4, 0.5);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.contains("nranks=2 time_usec=0.50\n#   rank=0 send_bytes=64 recv_bytes=32 alg_bw=0.13 bus_bw=0.06\n"), "{text}");
    }

    #[test]
    fn a_spread_goes_from_even_to_distant() {
        let sends = |spread, rank| Traffic::Spread(spread).exchange(4, 960, 1).unwrap().sends(rank);
        assert_eq!(sends(0.0, 1), [240; 4]);
        assert_eq!(sends(1.0, 0), [0, 160, 320, 480]);
        assert_eq!(sends(1.0, 3), [160, 320, 480, 0]);
        assert_eq!(sends(0.5, 0), [112, 192, 272, 352]);
        assert_eq!(Traffic::Spread(1.0).exchange(1, 100, 4).unwrap().sends(0), [24]);
    }
}
