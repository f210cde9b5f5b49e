//! The lines of OSU's tables: the size in ten places, then columns of eighteen, or more for longer names.

use std::fmt::Write as _;

/// The width of the size, and the least width of the other columns.
const SIZE_WIDTH: usize = 10;
const LEAST_WIDTH: usize = 18;

/// The names of the columns after the size.
#[derive(Debug, Clone)]
pub(super) struct Columns {
    names: Vec<String>,
}

/// One figure of a line.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell {
    Number(f64),
    Word(&'static str),
}

impl Columns {
    pub(super) fn new(names: &[&str]) -> Self {
        Self { names: names.iter().map(|name| (*name).to_owned()).collect() }
    }

    /// Adds a column for each percentile, such as `P99 Tail Lat(us)`, and one for the check, as requested.
    pub(super) fn with(mut self, percentiles: &[f64], of: &str, is_checked: bool) -> Self {
        self.names.extend(is_checked.then(|| "Validation".to_owned()));
        self.names.extend(percentiles.iter().map(|percent| format!("P{percent} Tail {of}")));
        self
    }

    /// Returns the line with the names.
    pub(super) fn header(&self) -> String {
        self.joined("# Size", self.names.iter().cloned())
    }

    /// Returns the line of a size.
    pub(super) fn line(&self, bytes: usize, cells: &[Cell]) -> String {
        let text = |cell: &Cell| match cell {
            Cell::Number(number) => format!("{number:.2}"),
            Cell::Word(word) => (*word).to_owned(),
        };
        self.joined(&bytes.to_string(), cells.iter().map(text))
    }

    fn joined(&self, first: &str, rest: impl Iterator<Item = String>) -> String {
        let mut line = format!("{first:<SIZE_WIDTH$}");
        for (name, text) in self.names.iter().zip(rest) {
            // A text that fills its column still has a blank before it.
            let width = LEAST_WIDTH.max(name.len() + 1).max(text.len() + 1);
            let _ = write!(line, "{text:>width$}");
        }
        line + "\n"
    }
}

/// Returns whether the data was right, in OSU's words.
pub(super) fn verdict(wrong: u64) -> Cell {
    Cell::Word(if wrong == 0 { "Pass" } else { "Fail" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_osu() {
        let latency = Columns::new(&["Avg Latency(us)"]);
        assert_eq!(latency.header(), "# Size       Avg Latency(us)\n");
        assert_eq!(latency.line(1, &[Cell::Number(0.19)]), "1                       0.19\n");
        assert_eq!(Columns::new(&["Bandwidth (MB/s)"]).header(), "# Size      Bandwidth (MB/s)\n");
        let rates = Columns::new(&["MB/s", "Messages/s"]);
        assert_eq!(rates.header(), "# Size                  MB/s        Messages/s\n");
        assert_eq!(
            rates.line(64, &[Cell::Number(641.93), Cell::Number(10_030_200.32)]),
            "64                    641.93       10030200.32\n"
        );
        assert_eq!(
            Columns::new(&["Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)"]).header(),
            "# Size           Overall(us)       Compute(us)    Pure Comm.(us)        Overlap(%)\n"
        );
    }

    #[test]
    fn columns_stay_apart() {
        let columns = Columns::new(&["MB/s", "Messages/s"]).with(&[50.0, 99.9], "BW(MB/s)", true);
        assert!(columns.header().ends_with("        Validation P50 Tail BW(MB/s) P99.9 Tail BW(MB/s)\n"), "{}", columns.header());
        let cells = [Cell::Number(1e22), Cell::Number(1e22), verdict(3), Cell::Number(1.0), Cell::Number(2.0)];
        let line = columns.line(1 << 30, &cells);
        assert_eq!(line.split_whitespace().count(), 6, "{line}");
        assert!(line.contains(" Fail ") && verdict(0) == Cell::Word("Pass"));
    }
}
