//! A picture of time and bus bandwidth over size, as SVG.
//!
//! Written by hand: two panels with logarithmic axes are little more than lines and words, and the ticks (powers of two
//! across, decades up) come out as a reader of such figures wants them.

use std::fmt::Write as _;

use super::axis::{Axis, Tick};
use crate::facts::RunFacts;
use crate::row::Row;

const WIDTH: f64 = 1200.0;
const PANEL_WIDTH: f64 = 490.0;
const PANEL_HEIGHT: f64 = 380.0;
const TITLE_HEIGHT: f64 = 72.0;
const PANEL_TOP: f64 = 112.0;
const PANEL_LEFT: [f64; 2] = [76.0, 676.0];
const LEGEND_TOP: f64 = PANEL_TOP + PANEL_HEIGHT + 74.0;
const LEGEND_LINE: f64 = 22.0;
/// More series than this make a carpet; those beyond are left out, and the legend says so.
const MOST_SERIES: usize = 30;
/// Colours that stay apart also for the colour-blind, and on paper.
const COLOURS: [&str; 10] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a4fa3", "#8c6d31", "#444444", "#b3003c"];

/// One line in each panel.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) label: String,
    /// Series of the same number have the same colour.
    pub(crate) colour: usize,
    pub(crate) dashed: bool,
    pub(crate) points: Vec<Point>,
}

/// One size of a series.
#[derive(Debug)]
pub(crate) struct Point {
    pub(crate) bytes: f64,
    pub(crate) time_us: f64,
    pub(crate) busbw: f64,
}

/// What of a point a panel shows.
type Value = fn(&Point) -> f64;

/// Draws the rows.
pub(super) fn draw(rows: &[Row], facts: &RunFacts, transport: &str) -> String {
    let (heading, below) = title(rows, facts, transport);
    picture(Some((&heading, &below)), &series(rows))
}

/// Draws the rows without a title.
pub(super) fn draw_panels(rows: &[Row]) -> String {
    picture(None, &series(rows))
}

/// Draws results of several runs beside each other.
pub(crate) fn compared(heading: &str, below: &str, series: &[Series]) -> String {
    picture(Some((heading, below)), series)
}

fn picture(title: Option<(&str, &str)>, series: &[Series]) -> String {
    let left_out = series.len().saturating_sub(MOST_SERIES);
    let series = &series[..series.len() - left_out];
    let legend_lines = (series.len() + usize::from(left_out > 0)).div_ceil(legend_columns(series.len()));
    let height = LEGEND_TOP + LEGEND_LINE * legend_lines as f64 + 12.0;
    // Without a title the picture begins below it.
    let top = if title.is_some() { 0.0 } else { TITLE_HEIGHT };
    let height = height - top;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 {top} {WIDTH} {height}\" \
         font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"16\" fill=\"#222\">\n\
         <rect y=\"{top}\" width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    if let Some((heading, below)) = title {
        let _ = writeln!(svg, "<text x=\"{}\" y=\"38\" font-size=\"22\" font-weight=\"bold\">{}</text>", PANEL_LEFT[0], escaped(heading));
        let _ = writeln!(svg, "<text x=\"{}\" y=\"62\" font-size=\"14\" fill=\"#555\">{}</text>", PANEL_LEFT[0], escaped(below));
    }
    let panels: [(&str, Value); 2] = [("time per call (µs)", |point| point.time_us), ("bus bandwidth (GB/s)", |point| point.busbw)];
    for (left, (name, value)) in PANEL_LEFT.into_iter().zip(panels) {
        panel(&mut svg, left, name, series, value);
    }
    legend(&mut svg, series, left_out);
    svg + "</svg>\n"
}

/// The rows as lines: sizes that belong together, out of place and in place apart.
fn series(rows: &[Row]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        for (half, in_place) in row.halves() {
            let label = label(row, in_place);
            let place = all.iter().position(|series| series.label == label).unwrap_or_else(|| {
                all.push(Series { label, colour: all.len(), dashed: in_place, points: vec![] });
                all.len() - 1
            });
            all[place].points.push(Point { bytes: row.bytes as f64, time_us: half.time_us, busbw: half.busbw });
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
    }
    all
}

fn label(row: &Row, in_place: bool) -> String {
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
    if in_place { label + ", in place" } else { label }
}

/// What was measured, and on what, in two lines.
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
    let cores = plural(machine.cores, "core");
    let below = format!(
        "{}, {cores}, {} · {} plane, transport {transport} · collectives {} · {} UTC",
        machine.processor,
        machine.kernel,
        facts.on.name(),
        env!("CARGO_PKG_VERSION"),
        facts.start_time
    );
    (heading, below)
}

fn panel(svg: &mut String, left: f64, name: &str, series: &[Series], value: Value) {
    let (right, bottom) = (left + PANEL_WIDTH, PANEL_TOP + PANEL_HEIGHT);
    let _ = writeln!(svg, "<text x=\"{left}\" y=\"{}\" font-size=\"17\" font-weight=\"bold\">{name}</text>", PANEL_TOP - 14.0);
    let points = || series.iter().flat_map(|series| &series.points).filter(|point| value(point) > 0.0 && value(point).is_finite());
    let (Some(across), Some(up)) =
        (Axis::of(points().map(|point| point.bytes), left, right), Axis::of(points().map(value), bottom, PANEL_TOP))
    else {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#777\">nothing above zero to show</text>",
            left + PANEL_WIDTH / 2.0,
            PANEL_TOP + PANEL_HEIGHT / 2.0
        );
        return;
    };
    for Tick { at, label } in across.sizes() {
        let _ = writeln!(svg, "<path d=\"M{at:.1} {PANEL_TOP}V{bottom}\" stroke=\"#e4e4e4\"/>");
        let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 20.0);
    }
    for Tick { at, label } in up.decades() {
        let shade = if label.is_empty() { "#f2f2f2" } else { "#dcdcdc" };
        let _ = writeln!(svg, "<path d=\"M{left} {at:.1}H{right}\" stroke=\"{shade}\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 8.0, at + 5.5);
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{left}\" y=\"{PANEL_TOP}\" width=\"{PANEL_WIDTH}\" height=\"{PANEL_HEIGHT}\" fill=\"none\" stroke=\"#888\"/>"
    );
    let _ =
        writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">size</text>", left + PANEL_WIDTH / 2.0, bottom + 42.0);
    for series in series {
        let places: Vec<_> = series
            .points
            .iter()
            .filter(|point| value(point) > 0.0 && value(point).is_finite())
            .map(|point| (across.place(point.bytes), up.place(value(point))))
            .collect();
        line(svg, series, &places);
    }
}

/// One series: a line through its points.
fn line(svg: &mut String, series: &Series, places: &[(f64, f64)]) {
    let colour = COLOURS[series.colour % COLOURS.len()];
    let points: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{}/>",
        points.join(" "),
        dashes(series.dashed)
    );
    let fill = if series.dashed { "white" } else { colour };
    for (x, y) in places {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\"/>");
    }
}

fn dashes(dashed: bool) -> &'static str {
    if dashed { " stroke-dasharray=\"7 4\"" } else { "" }
}

/// Three columns, but two where that leaves no line half empty.
fn legend_columns(series: usize) -> usize {
    if matches!(series, 2 | 4) { 2 } else { 3 }
}

fn legend(svg: &mut String, series: &[Series], left_out: usize) {
    let columns = legend_columns(series.len());
    let spot = |number: usize| {
        let (column, line) = (number % columns, number / columns);
        (PANEL_LEFT[0] + column as f64 * 1095.0 / columns as f64, LEGEND_TOP + line as f64 * LEGEND_LINE)
    };
    for (number, series) in series.iter().enumerate() {
        let (x, y) = spot(number);
        line(svg, series, &[(x, y - 4.5), (x + 34.0, y - 4.5)]);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{y}\" font-size=\"15\">{}</text>", x + 46.0, escaped(&series.label));
    }
    if left_out > 0 {
        let (x, y) = spot(series.len());
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" fill=\"#777\">and {left_out} more that are not drawn</text>");
    }
}

/// Text as XML has it.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
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
        // One rank has no bus.
        let alone = draw(&[Row { ranks: 1, ..row(Collective::AllReduce, DType::F32, 0, 1.0) }], &RunFacts::example(1), "shm");
        assert_eq!(count(&alone, "nothing above zero"), 2);
        let many: Vec<Row> =
            DType::ALL.into_iter().flat_map(|dtype| [Collective::AllReduce, Collective::Reduce].map(|c| row(c, dtype, 8, 1.0))).collect();
        assert!(draw(&many, &RunFacts::example(2), "tcp").contains("and 30 more that are not drawn"));
    }
}
