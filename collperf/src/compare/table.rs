//! Two results side by side.

use std::fmt::Write as _;

use super::file::{Cell, Figures, Results, median};
use crate::report::plot::{Point, Series};

/// Two results, and the cells of both.
#[derive(Debug)]
pub(super) struct Comparison {
    a: Results,
    b: Results,
    /// The cells of both, ordered by collective, op, type and root, then by size.
    both: Vec<(Cell, Figures, Figures)>,
    only_a: Vec<Cell>,
    only_b: Vec<Cell>,
}

impl Comparison {
    pub(super) fn new(a: Results, b: Results) -> Self {
        let find = |results: &Results, cell: &Cell| results.cells.iter().find(|(other, _)| other == cell).map(|(_, figures)| *figures);
        let mut both: Vec<_> = a.cells.iter().filter_map(|(cell, of_a)| Some((cell.clone(), *of_a, find(&b, cell)?))).collect();
        both.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        let missing = |from: &Results, other: &Results| {
            let missing = from.cells.iter().filter(|(cell, _)| find(other, cell).is_none());
            missing.map(|(cell, _)| cell.clone()).collect()
        };
        let (only_a, only_b) = (missing(&a, &b), missing(&b, &a));
        Self { a, b, both, only_a, only_b }
    }

    /// Whether nothing can be compared.
    pub(super) fn is_empty(&self) -> bool {
        self.both.is_empty()
    }

    /// Whether a cell took more than `threshold` percent longer, or has wrong elements.
    pub(super) fn is_worse(&self, threshold: f64) -> bool {
        self.both.iter().any(|(_, a, b)| is_slower(a, b, threshold) || b.wrong > 0)
    }

    /// Returns both files in one line.
    pub(super) fn heading(&self) -> String {
        format!("A: {} · B: {}", named(&self.a), named(&self.b))
    }

    /// Returns what makes either file less reliable.
    pub(super) fn notes(&self) -> Vec<String> {
        let of = |(whose, results): (&str, &Results)| results.notes.iter().map(|note| format!("{whose}: {note}")).collect::<Vec<_>>();
        [("A", &self.a), ("B", &self.b)].into_iter().flat_map(of).collect()
    }

    /// Returns in what the conditions of the two files differ.
    fn differences(&self) -> Option<String> {
        let both = self.a.conditions.iter().zip(&self.b.conditions);
        let differ: Vec<_> = both.filter_map(|(a, b)| a.as_ref().zip(b.as_ref())).filter(|(a, b)| a != b).collect();
        let list = |of: &dyn Fn(&(&String, &String)) -> String| differ.iter().map(of).collect::<Vec<_>>().join(", ");
        let differs = || format!("the conditions differ: A {}; B {}", list(&|(a, _)| (*a).clone()), list(&|(_, b)| (*b).clone()));
        (!differ.is_empty()).then(differs)
    }

    /// Returns the notes of both files, and what makes their comparison less reliable.
    fn warnings(&self) -> Vec<String> {
        let few = self.both.iter().any(|(_, a, b)| a.times.min(b.times) < ENOUGH);
        let chance = format!(
            "some cells were measured fewer than {ENOUGH} times, so a difference may be due to chance; -N 5 measures each cell five times"
        );
        self.differences().into_iter().chain(self.notes()).chain(few.then_some(chance)).collect()
    }

    /// Returns everything as text.
    pub(super) fn text(&self, threshold: Option<f64>) -> String {
        let mut text = format!("# A: {}\n# B: {}\n#\n", named(&self.a), named(&self.b));
        text.extend(self.warnings().iter().map(|note| format!("# note: {note}\n")));
        text.extend(LEGEND.map(|line| format!("# {line}\n")));
        let mut line = String::new();
        for (cell, a, b) in &self.both {
            if cell.line() != line {
                line = cell.line();
                let _ = writeln!(text, "#\n# {line}\n{HEADER}");
            }
            let line = format!("{}  {}", row(cell, a, b), mark(a, b, threshold));
            let _ = writeln!(text, "{}", line.trim_end());
        }
        for (cells, whose) in [(&self.only_a, "A"), (&self.only_b, "B")] {
            if !cells.is_empty() {
                let _ = writeln!(text, "#\n# Only in {whose}:");
                text.extend(cells.iter().map(|cell| format!("#   {cell}\n")));
            }
        }
        text + &self.summary(threshold)
    }

    /// Returns everything as Markdown tables.
    pub(super) fn markdown(&self, threshold: Option<f64>) -> String {
        let mut text = format!("A: {}  \nB: {}\n", plain(&named(&self.a)), plain(&named(&self.b)));
        text.extend(self.warnings().iter().map(|note| format!("\nNote: {note}.\n")));
        let mut line = String::new();
        for (cell, a, b) in &self.both {
            if cell.line() != line {
                line = cell.line();
                let _ = write!(text, "\n### {line}\n\n{}|{}\n", markdown_row(MARKDOWN), " ---: |".repeat(MARKDOWN.len()));
            }
            let [of_a, of_b] = [a, b].map(|figures| format!("{:.3}", figures.busbw));
            let times = [Some(a.time_us), Some(b.time_us), a.p50_us, b.p50_us].map(|time| microseconds(time, 0));
            let [time_a, time_b, p50_a, p50_b] = times;
            let ratios = [ratio(Some(a.time_us), Some(b.time_us)), ratio(a.p50_us, b.p50_us)];
            let [of_times, of_medians] = ratios;
            let mark = mark(a, b, threshold);
            let cells = [cell.bytes.to_string(), time_a, time_b, of_times, p50_a, p50_b, of_medians, of_a, of_b, mark];
            text += &markdown_row(cells.each_ref().map(String::as_str));
        }
        for (cells, whose) in [(&self.only_a, "A"), (&self.only_b, "B")] {
            if !cells.is_empty() {
                let cells: Vec<String> = cells.iter().map(Cell::to_string).collect();
                let _ = write!(text, "\nOnly in {whose}: {}.\n", cells.join("; "));
            }
        }
        let summary = self.summary(threshold);
        let lines = summary.lines().map(|line| line.trim_start_matches('#').trim()).filter(|line| !line.is_empty());
        text + "\n" + &lines.chain(LEGEND).collect::<Vec<_>>().join("  \n") + "\n"
    }

    fn summary(&self, threshold: Option<f64>) -> String {
        let ratios: Vec<f64> = self.both.iter().map(|(_, a, b)| b.time_us / a.time_us).collect();
        let (least, most) =
            ratios.iter().fold((f64::INFINITY, 0.0), |(least, most), ratio| (f64::min(least, *ratio), f64::max(most, *ratio)));
        let Some(middle) = median(ratios) else { return "#\n# No cell is in both.\n".to_owned() };
        let mut text = format!(
            "#\n# Cells in both: {}. Ratio of the times, B/A: median {middle:.3}, least {least:.3}, largest {most:.3}\n",
            self.both.len()
        );
        if let Some(threshold) = threshold {
            let over = self.both.iter().filter(|(_, a, b)| is_slower(a, b, threshold)).count();
            let _ = writeln!(text, "# {over} of these cells took more than {threshold} % longer in B than in A");
        }
        text
    }

    /// Returns the lines of a picture: one for each result of a pair, in the same colour.
    pub(super) fn series(&self) -> Vec<Series> {
        let mut lines: Vec<(String, [Series; 2])> = Vec::new();
        for (cell, a, b) in self.both.iter().filter(|(cell, ..)| cell.bytes > 0) {
            let line = cell.line();
            let place = lines.iter().position(|(known, _)| *known == line).unwrap_or_else(|| {
                let colour = lines.len();
                let group = cell.collective.clone();
                let one = |whose: &str, dashed| Series {
                    label: format!("{line}: {whose}"),
                    group: group.clone(),
                    colour,
                    dashed,
                    points: vec![],
                };
                lines.push((line.clone(), [one("A", false), one("B", true)]));
                colour
            });
            for (series, figures) in lines[place].1.iter_mut().zip([a, b]) {
                series.points.push(Point { bytes: cell.bytes as f64, time_us: figures.time_us.into(), busbw: figures.busbw.into() });
            }
        }
        lines.into_iter().flat_map(|(_, both)| both).collect()
    }
}

/// The fewest measurements whose median a single outlier does not change.
const ENOUGH: usize = 3;

const HEADER: &str = "#   size (B)     A (us)     B (us)    B/A    A p50 (us)  B p50 (us)    B/A    A busbw  B busbw (GB/s)";

/// The meaning of the columns.
const LEGEND: [&str; 4] = [
    "\"size\": bytes of the larger of a rank's source and destination buffers",
    "\"A\" and \"B\": time of a call in microseconds, or the median if the call was measured several times. If \"B/A\" is above 1, \
     B is slower",
    "\"p50\": median time of a row's calls if each call was timed separately, else \"-\"",
    "\"busbw\": data that a link carries, in 10^9 bytes per second. Values for different numbers of ranks can be compared. Higher \
     is better",
];

/// The same headings for Markdown.
const MARKDOWN: [&str; 10] =
    ["size (B)", "A (us)", "B (us)", "B/A", "A p50 (us)", "B p50 (us)", "p50 B/A", "A busbw (GB/s)", "B busbw (GB/s)", ""];

fn markdown_row(cells: [&str; MARKDOWN.len()]) -> String {
    format!("|{}\n", cells.map(|cell| format!(" {cell} |")).concat())
}

/// Returns a name that cannot end a cell.
fn plain(name: &str) -> String {
    name.replace('|', "/")
}

/// Returns what is wrong with a cell.
fn mark(a: &Figures, b: &Figures, threshold: Option<f64>) -> String {
    match threshold {
        _ if b.wrong > 0 => format!("{} wrong elements in B", b.wrong),
        Some(threshold) if is_slower(a, b, threshold) => format!("over {threshold} %"),
        _ => String::new(),
    }
}

fn microseconds(time: Option<f64>, width: usize) -> String {
    time.map_or_else(|| format!("{:>width$}", "-"), |time| format!("{time:>width$.2}"))
}

fn ratio(a: Option<f64>, b: Option<f64>) -> String {
    match (a, b) {
        (Some(a), Some(b)) if a > 0.0 => format!("{:.3}", b / a),
        _ => "-".to_owned(),
    }
}

fn row(cell: &Cell, a: &Figures, b: &Figures) -> String {
    format!(
        "{:>12} {} {} {:>6}  {} {} {:>6} {:>10.3} {:>10.3}",
        cell.bytes,
        microseconds(Some(a.time_us), 10),
        microseconds(Some(b.time_us), 10),
        ratio(Some(a.time_us), Some(b.time_us)),
        microseconds(a.p50_us, 12),
        microseconds(b.p50_us, 11),
        ratio(a.p50_us, b.p50_us),
        a.busbw,
        b.busbw
    )
}

fn is_slower(a: &Figures, b: &Figures, threshold: f64) -> bool {
    b.time_us > a.time_us * (1.0 + threshold / 100.0)
}

fn named(results: &Results) -> String {
    results.start_time.as_ref().map_or_else(|| results.name.clone(), |time| format!("{} ({time})", results.name))
}
