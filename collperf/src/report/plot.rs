//! The rows of a run as lines of a picture.

use std::fmt::Write as _;

use super::picture::{Banner, Title, panels, picture};
pub(crate) use super::picture::{Figure, Point, Series};
use crate::facts::RunFacts;
use crate::row::Row;
use crate::statistics::Spread;

/// Draws the rows.
pub(super) fn draw(rows: &[Row], facts: &RunFacts, transport: &str) -> String {
    let (heading, below) = title(rows, facts, transport);
    picture(&Title { heading: &heading, below: &below, banner: banner(facts) }, &series(rows))
}

/// Draws the rows as parts of a page.
pub(super) fn draw_panels(rows: &[Row]) -> String {
    panels(&series(rows))
}

/// Draws results of several runs side by side.
pub(crate) fn compared(heading: &str, below: &str, warning: &str, series: &[Series]) -> String {
    let banner = (!warning.is_empty()).then(|| Banner { text: warning.to_owned(), is_bad: true });
    picture(&Title { heading, below, banner }, series)
}

/// Returns the state of the machine: what makes the figures less reliable, or that nothing does.
pub(super) fn banner(facts: &RunFacts) -> Option<Banner> {
    let warnings: Vec<String> = facts.notes().into_iter().filter(|note| note.is_warning).map(|note| note.text).collect();
    if !warnings.is_empty() {
        return Some(Banner { text: warnings.join("; "), is_bad: true });
    }
    let load = facts.machine.load?;
    let text = format!("before the run, other programs kept {:.1} of {} cores busy: there was a core for each rank", load.busy, load.cores);
    Some(Banner { text, is_bad: false })
}

/// The most lines of a collective that each have a colour of their own.
const MOST_COLOURS: usize = 10;

/// Returns the rows as lines over size. If a collective has few lines, each has its own colour; otherwise out of place
/// and in place share one. A size that was measured several times is one point, the median, with the range of all
/// measurements around it.
fn series(rows: &[Row]) -> Vec<Series> {
    let mut lines: Vec<Line> = Vec::new();
    let mut colours: Vec<String> = Vec::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        for (half, in_place) in row.halves() {
            let subject = subject(row);
            let colour = place_of(&mut colours, |known| *known == subject, || subject.clone());
            let group = row.collective.name();
            let line = place_of(
                &mut lines,
                |line| (line.colour, line.in_place) == (colour, in_place),
                || {
                    let label = if in_place { format!("{subject}, in place") } else { subject.clone() };
                    Line { label, group, colour, in_place, sizes: vec![] }
                },
            );
            let sizes = &mut lines[line].sizes;
            let size = place_of(sizes, |(bytes, ..)| *bytes == row.bytes, || (row.bytes, vec![], vec![]));
            sizes[size].1.push(half.time_us);
            sizes[size].2.push(half.busbw);
        }
    }
    let crowd = lines.iter().map(|line| lines.iter().filter(|other| other.group == line.group).count()).max().unwrap_or(0);
    if crowd <= MOST_COLOURS {
        lines.iter_mut().enumerate().for_each(|(number, line)| line.colour = number);
    }
    lines.into_iter().map(Line::drawn).collect()
}

/// The measurements of one line.
struct Line {
    label: String,
    group: &'static str,
    colour: usize,
    in_place: bool,
    /// Bytes, times and bandwidths.
    sizes: Vec<(usize, Vec<f64>, Vec<f64>)>,
}

impl Line {
    fn drawn(mut self) -> Series {
        self.sizes.sort_by_key(|(bytes, ..)| *bytes);
        let figure = |values: &[f64]| {
            Spread::of(values).map_or(Figure::from(0.0), |spread| Figure { middle: spread.p50, least: spread.min, most: spread.max })
        };
        let point = |(bytes, times, busbws): &(usize, Vec<f64>, Vec<f64>)| Point {
            bytes: *bytes as f64,
            time_us: figure(times),
            busbw: figure(busbws),
        };
        let points = self.sizes.iter().map(point).collect();
        Series { label: self.label, group: self.group.to_owned(), colour: self.colour, dashed: self.in_place, points }
    }
}

/// Returns the index of the matching element; appends a new one if there is none.
fn place_of<T>(all: &mut Vec<T>, is_meant: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> usize {
    all.iter().position(is_meant).unwrap_or_else(|| {
        all.push(new());
        all.len() - 1
    })
}

/// Names what a row is about, except its size and its buffers.
fn subject(row: &Row) -> String {
    let mut label = row.collective.name().to_owned();
    if let Some(op) = row.op {
        let _ = write!(label, " {op}");
    }
    if let Some(dtype) = row.dtype {
        let _ = write!(label, " {dtype}");
    }
    if let Some(root) = row.root.filter(|root| *root != 0) {
        let _ = write!(label, ", root {root}");
    }
    label
}

/// Returns what was measured, and on what, in two lines.
pub(super) fn title(rows: &[Row], facts: &RunFacts, transport: &str) -> (String, String) {
    let mut names: Vec<_> = rows.iter().map(|row| row.collective.name()).collect();
    names.dedup();
    let what = match names.as_slice() {
        [] => "nothing measured".to_owned(),
        [name] => (*name).to_owned(),
        names => format!("{} collectives", names.len()),
    };
    let plural = |count: usize, one: &str| if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") };
    let ranks = plural(facts.ranks.len(), "rank");
    let hosts = plural(facts.hosts(), "host");
    let heading = format!("{what} over {ranks} on {hosts}");
    let machine = &facts.machine;
    let cores = machine.told_cores();
    let encrypted = if facts.is_encrypted { ", encrypted" } else { "" };
    let below = format!(
        "{}, {cores}, {} · {} backend, transport {transport}{encrypted} · collectives {} · {} UTC",
        machine.processor,
        machine.kernel,
        facts.on.name(),
        env!("CARGO_PKG_VERSION"),
        facts.start_time
    );
    (heading, below)
}

#[cfg(test)]
mod tests {
    use collectives::{DType, ReduceOp};

    use super::*;
    use crate::collective::Collective;
    use crate::row::Half;

    fn row(collective: Collective, dtype: DType, bytes: usize, time_us: f64) -> Row {
        let half = |slower: f64| Some(Half::new(collective, 2, bytes, time_us * slower));
        let op = collective.reduces().then_some(ReduceOp::Sum);
        let (out_of_place, in_place) = (half(1.0), half(1.3));
        Row { collective, op, dtype: Some(dtype), root: None, ranks: 2, count: bytes / 4, bytes, iterations: 20, out_of_place, in_place }
    }

    fn count(svg: &str, what: &str) -> usize {
        svg.matches(what).count()
    }

    #[test]
    fn every_series_is_a_line_in_both_panels_and_in_the_legend() {
        let rows: Vec<Row> = (3..28).map(|power| row(Collective::AllReduce, DType::F32, 1 << power, f64::from(1 << (power / 2)))).collect();
        let svg = draw(&rows, &RunFacts::example(2), "shm");
        assert_eq!(count(&svg, "<polyline"), 2 * 2 + 2);
        assert_eq!(count(&svg, "<circle"), 2 * 2 * 25 + 2 * 2);
        assert_eq!(count(&svg, ">all_reduce sum f32<"), 1);
        assert_eq!(count(&svg, ">all_reduce sum f32, in place<"), 1);
        assert!(svg.contains("all_reduce over 2 ranks on 1 host") && svg.contains("1 MiB"));
    }

    #[test]
    fn names_cannot_break_the_picture() {
        let mut facts = RunFacts::example(1);
        facts.machine.processor = "<a> & \"b\"".to_owned();
        assert!(draw(&[], &facts, "shm").contains("&lt;a&gt; &amp; \"b\""));
    }

    #[test]
    fn one_point_no_point_and_too_many_series_are_drawn() {
        let empty = draw(&[], &RunFacts::example(1), "shm");
        assert_eq!(count(&empty, "nothing above zero"), 2);
        let one = draw(&[row(Collective::Broadcast, DType::F32, 8, 1.0)], &RunFacts::example(1), "shm");
        assert!(!one.contains("NaN") && !one.contains("inf"), "{one}");
        // A single rank has no bus.
        let alone = draw(&[Row { ranks: 1, ..row(Collective::AllReduce, DType::F32, 0, 1.0) }], &RunFacts::example(1), "shm");
        assert_eq!(count(&alone, "nothing above zero"), 2);
        let many: Vec<Row> =
            DType::ALL.into_iter().flat_map(|dtype| [Collective::AllReduce, Collective::Reduce].map(|c| row(c, dtype, 8, 1.0))).collect();
        let svg = draw(&many, &RunFacts::example(2), "tcp");
        assert_eq!(
            (count(&svg, "and 10 more lines that are not drawn"), count(&svg, "all_reduce: time"), count(&svg, "reduce: time")),
            (2, 1, 2)
        );
    }

    #[test]
    fn no_two_lines_of_a_panel_look_alike() {
        let rows: Vec<Row> = Collective::ALL.into_iter().map(|collective| row(collective, DType::F32, 8, 1.0)).collect();
        for rows in [&rows[..3], &rows[..10], &rows[..]] {
            let svg = draw(rows, &RunFacts::example(2), "shm");
            // A line is drawn in both panels, and in the legend, with its colour and dashes.
            for panel in svg.split("<rect ").skip(2) {
                let panel = panel.split("font-weight=\"bold\"").next().unwrap();
                let lines = panel.lines().filter(|line| line.starts_with("<polyline")).map(|line| line.split_once("stroke=").unwrap().1);
                let drawn: Vec<&str> = lines.collect();
                let mut kinds = drawn.clone();
                kinds.sort_unstable();
                kinds.dedup();
                // The last panel of a pair is followed by the legend.
                assert!(drawn.len() == kinds.len() || drawn.len() == 2 * kinds.len(), "{drawn:?}");
            }
        }
        // Few lines have a colour each, and many have one for both places.
        assert_eq!(
            series(&rows[..3]).iter().map(|line| (line.colour, line.dashed)).collect::<Vec<_>>(),
            [(0, false), (1, true), (2, false), (3, true), (4, false), (5, true)]
        );
    }

    #[test]
    fn what_was_measured_several_times_is_one_line_in_a_band() {
        let cycle = |slower: f64| [8, 64, 512].map(|bytes| row(Collective::AllReduce, DType::F32, bytes, slower * bytes as f64));
        let rows: Vec<Row> = [1.0, 3.0, 2.0].into_iter().flat_map(cycle).collect();
        let line = &series(&rows)[0];
        let figures: Vec<_> =
            line.points.iter().map(|point| (point.bytes, point.time_us.least, point.time_us.middle, point.time_us.most)).collect();
        assert_eq!(figures, [(8.0, 8.0, 16.0, 24.0), (64.0, 64.0, 128.0, 192.0), (512.0, 512.0, 1024.0, 1536.0)]);
        let svg = draw(&rows, &RunFacts::example(2), "shm");
        assert_eq!((count(&svg, "<polygon"), count(&svg, "<polyline")), (4, 6));
        assert_eq!(count(&draw(&rows[..3], &RunFacts::example(2), "shm"), "<polygon"), 0);
    }

    #[test]
    fn a_busy_machine_is_told_in_the_picture() {
        let mut facts = RunFacts::example(2);
        assert!(!draw(&[], &facts, "shm").contains("busy"));
        facts.machine.load = Some(crate::machine::Load { busy: 1.4, cores: 2 });
        assert!(
            draw(&[], &facts, "shm").contains("fill=\"#b3003c\">other programs keep 1.4 of 2 cores busy, so times will be too high</text>")
        );
        facts.machine.load = Some(crate::machine::Load { busy: 0.1, cores: 2 });
        assert!(draw(&[], &facts, "shm").contains("fill=\"#009e73\">before the run, other programs kept 0.1 of 2 cores busy"));
    }
}
