//! Figures over size, as SVG: time and bus bandwidth side by side.
//!
//! Written without a plotting library: panels with logarithmic axes are little more than lines and text. The ticks can
//! be placed as readers of such figures expect: powers of two across, decades up.

use std::fmt::Write as _;

use super::axis::{Axis, Tick};

const WIDTH: f64 = 1200.0;
const PANEL_WIDTH: f64 = 490.0;
/// The height of a single pair of panels, and of each of several pairs.
const PANEL_HEIGHT: f64 = 380.0;
const SMALL_HEIGHT: f64 = 200.0;
const FIRST_PANEL: f64 = 112.0;
const PANEL_LEFT: [f64; 2] = [76.0, 676.0];
/// The distance from the bottom of a pair of panels to its legend, and from the end of the legend to the next pair.
const TO_LEGEND: f64 = 74.0;
const TO_NEXT: f64 = 44.0;
const LEGEND_LINE: f64 = 22.0;
/// The most series that remain readable; the legend mentions those that are left out.
const MOST_SERIES: usize = 30;
/// Colours that remain distinct for colour-blind readers and on paper. No two lines of a pair of panels have the same.
const COLOURS: [&str; 10] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a4fa3", "#8c6d31", "#444444", "#b3003c"];
/// The same colours on a dark ground.
const DARK_COLOURS: [&str; 10] =
    ["#4aa8ee", "#ff8c42", "#2fc79a", "#e79bc6", "#f2b632", "#8fd3ff", "#b48ae0", "#c9a95a", "#bbbbbb", "#ff6b8e"];
/// The colours of texts, lines and grounds, and the same on a dark ground.
const GREYS: [(&str, &str); 10] = [
    ("white", "#16181d"),
    ("#222", "#e2e2e2"),
    ("#555", "#b4b4b4"),
    ("#777", "#999"),
    ("#888", "#777"),
    ("#dcdcdc", "#3a3d45"),
    ("#e4e4e4", "#34373e"),
    ("#f2f2f2", "#26292f"),
    ("#eefaf6", "#12302a"),
    ("#fdeef2", "#3d1522"),
];
/// The colours of a banner's text and ground: the machine was quiet, or it was not.
const GOOD: [&str; 2] = ["#009e73", "#eefaf6"];
const BAD: [&str; 2] = ["#b3003c", "#fdeef2"];
/// The height of the banner, with the space below it.
const BANNER: f64 = 42.0;

/// One line in each panel.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) label: String,
    /// The group: each group gets its own pair of panels if there are too many series for one.
    pub(crate) group: String,
    /// The colour's number; series with the same number have the same colour.
    pub(crate) colour: usize,
    pub(crate) dashed: bool,
    pub(crate) points: Vec<Point>,
}

/// One size of a series.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    pub(crate) bytes: f64,
    pub(crate) time_us: Figure,
    pub(crate) busbw: Figure,
}

/// The values of one or several measurements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) middle: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl From<f64> for Figure {
    fn from(value: f64) -> Self {
        Self { middle: value, least: value, most: value }
    }
}

impl Figure {
    /// Whether it can be shown on a logarithmic axis.
    fn is_shown(&self) -> bool {
        [self.least, self.middle, self.most].iter().all(|value| *value > 0.0 && value.is_finite())
    }
}

/// The text above a picture.
pub(super) struct Title<'a> {
    pub(super) heading: &'a str,
    pub(super) below: &'a str,
    /// The state of the machine, if it is known.
    pub(super) banner: Option<Banner>,
}

/// What readers must know of the machine before they trust the figures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Banner {
    pub(crate) text: String,
    /// Whether the figures are less reliable.
    pub(crate) is_bad: bool,
}

/// The figure of a point that a panel shows.
type Value = fn(&Point) -> Figure;

const VALUES: [(&str, Value); 2] = [("time per call (µs)", |point| point.time_us), ("bus bandwidth (GB/s)", |point| point.busbw)];

/// A pair of panels.
struct Block<'a> {
    /// The text before the names of the panels.
    name: String,
    series: Vec<&'a Series>,
    /// The colour of each series.
    colours: Vec<usize>,
    left_out: usize,
    top: f64,
    height: f64,
}

impl Block<'_> {
    fn bottom(&self) -> f64 {
        self.top + self.height
    }

    fn legend_top(&self) -> f64 {
        self.bottom() + TO_LEGEND
    }

    /// Returns the number of columns: three, or two if all lines are then full.
    fn legend_columns(&self) -> usize {
        if matches!(self.series.len(), 2 | 4) { 2 } else { 3 }
    }

    fn legend_height(&self) -> f64 {
        let entries = self.series.len() + usize::from(self.left_out > 0);
        LEGEND_LINE * entries.div_ceil(self.legend_columns()) as f64
    }
}

/// Draws one pair of panels for each group.
pub(super) fn picture(title: &Title<'_>, series: &[Series]) -> String {
    let first = FIRST_PANEL + if title.banner.is_some() { BANNER } else { 0.0 };
    let blocks = blocks(series, first);
    let height = blocks.last().map_or(0.0, |block| block.legend_top() + block.legend_height() + 12.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"16\" fill=\"#222\">\n\
         <style>{}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        dark_style("svg")
    );
    write_title(&mut svg, title);
    for block in &blocks {
        for (left, (name, value)) in PANEL_LEFT.into_iter().zip(VALUES) {
            panel(&mut svg, block, left, name, value, || shown(&blocks));
        }
        legend(&mut svg, block);
    }
    svg + "</svg>\n"
}

/// Returns the series of all pairs: these have the same axes, so that they can be compared.
fn shown<'a>(blocks: &'a [Block<'a>]) -> impl Iterator<Item = &'a &'a Series> {
    blocks.iter().flat_map(|block| &block.series)
}

/// Draws the same panels, each as a picture of its own for a page of any width, and with a legend as text.
pub(super) fn panels(series: &[Series]) -> String {
    let blocks = blocks(series, FIRST_PANEL);
    let mut page = String::new();
    for block in &blocks {
        page += "<div class=\"pair\">\n";
        for (left, (name, value)) in PANEL_LEFT.into_iter().zip(VALUES) {
            let [x, y, width, height] = [left - 70.0, block.top - 36.0, PANEL_WIDTH + 84.0, block.height + 84.0];
            let _ = writeln!(
                page,
                "<svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"{x} {y} {width} {height}\" font-size=\"17\" fill=\"#222\">"
            );
            panel(&mut page, block, left, name, value, || shown(&blocks));
            page += "</svg>\n";
        }
        page += "</div>\n";
        legend_as_text(&mut page, block);
    }
    page
}

/// Writes the names of the lines, each after a piece of the line.
fn legend_as_text(page: &mut String, block: &Block<'_>) {
    *page += "<p class=\"legend\">\n";
    for (series, colour) in block.series.iter().zip(&block.colours) {
        *page += "<span><svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 34 12\">";
        line(page, *colour, series.dashed, &[(4.0, 6.0), (30.0, 6.0)]);
        let _ = writeln!(page, "</svg>{}</span>", escaped(&series.label));
    }
    if block.left_out > 0 {
        let _ = writeln!(page, "<span>and {} more lines that are not drawn</span>", block.left_out);
    }
    *page += "</p>\n";
}

/// Returns the rules that give pictures inside `within` other colours if the reader prefers a dark ground. Presentation
/// attributes stay, for programs that do not know such rules.
pub(super) fn dark_style(within: &str) -> String {
    let colours = COLOURS.iter().zip(DARK_COLOURS).map(|(light, dark)| (*light, dark)).chain(GREYS);
    let rule = |(light, dark): (&str, &str)| {
        let fill = format!("{within}[fill=\"{light}\"],{within} [fill=\"{light}\"]{{fill:{dark}}}");
        fill + &format!("{within} [stroke=\"{light}\"]{{stroke:{dark}}}")
    };
    format!("@media (prefers-color-scheme: dark){{{}}}", colours.map(rule).collect::<String>())
}

fn write_title(svg: &mut String, title: &Title<'_>) {
    let [heading, below] = [title.heading, title.below].map(escaped);
    let _ = writeln!(svg, "<text x=\"{}\" y=\"38\" font-size=\"22\" font-weight=\"bold\">{heading}</text>", PANEL_LEFT[0]);
    let _ = writeln!(svg, "<text x=\"{}\" y=\"62\" font-size=\"14\" fill=\"#555\">{below}</text>", PANEL_LEFT[0]);
    if let Some(Banner { text, is_bad }) = &title.banner {
        let [ink, ground] = if *is_bad { BAD } else { GOOD };
        let (left, width) = (PANEL_LEFT[0], PANEL_LEFT[1] + PANEL_WIDTH - PANEL_LEFT[0]);
        let _ = writeln!(svg, "<rect x=\"{left}\" y=\"74\" width=\"{width}\" height=\"30\" fill=\"{ground}\"/>");
        let _ = writeln!(svg, "<rect x=\"{left}\" y=\"74\" width=\"5\" height=\"30\" fill=\"{ink}\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"94\" font-size=\"15\" fill=\"{ink}\">{}</text>", left + 16.0, escaped(text));
    }
}

/// Returns a pair of panels for each group; the first begins at `top`.
fn blocks(series: &[Series], mut top: f64) -> Vec<Block<'_>> {
    let mut groups: Vec<&str> = Vec::new();
    series.iter().for_each(|series| {
        if !groups.contains(&&*series.group) {
            groups.push(&series.group)
        }
    });
    if groups.len() < 2 {
        let group = groups.first().copied().unwrap_or_default();
        return vec![Block { name: String::new(), height: PANEL_HEIGHT, ..of_group(series, group, top) }];
    }
    let mut blocks = Vec::new();
    for group in groups {
        let block = of_group(series, group, top);
        top = block.legend_top() + block.legend_height() + TO_NEXT;
        blocks.push(block);
    }
    blocks
}

/// Creates the pair of panels of a group, which has its own numbering of colours.
fn of_group<'a>(series: &'a [Series], group: &str, top: f64) -> Block<'a> {
    let mut known: Vec<usize> = Vec::new();
    let mut block = Block { name: format!("{group}: "), series: vec![], colours: vec![], left_out: 0, top, height: SMALL_HEIGHT };
    for series in series.iter().filter(|series| series.group == group) {
        if !known.contains(&series.colour) {
            known.push(series.colour);
        }
        match known.iter().position(|colour| *colour == series.colour) {
            Some(colour) if colour < COLOURS.len() && block.series.len() < MOST_SERIES => {
                block.series.push(series);
                block.colours.push(colour);
            }
            _ => block.left_out += 1,
        }
    }
    block
}

fn panel<'a, S: Iterator<Item = &'a &'a Series>>(
    svg: &mut String,
    block: &Block<'_>,
    left: f64,
    name: &str,
    value: Value,
    shown: impl Fn() -> S,
) {
    let (top, right, bottom) = (block.top, left + PANEL_WIDTH, block.bottom());
    let name = escaped(&format!("{}{name}", block.name));
    let _ = writeln!(svg, "<text x=\"{left}\" y=\"{}\" font-size=\"17\" font-weight=\"bold\">{name}</text>", top - 14.0);
    let points = || shown().flat_map(|series| &series.points).filter(|point| value(point).is_shown());
    let ends = |point: &Point| [value(point).least, value(point).most];
    let (Some(across), Some(up)) =
        (Axis::of(points().map(|point| point.bytes), left, right), Axis::of(points().flat_map(ends), bottom, top))
    else {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#777\">nothing above zero to show</text>",
            left + PANEL_WIDTH / 2.0,
            top + block.height / 2.0
        );
        return;
    };
    grid(svg, block, left, &across, &up);
    for (series, colour) in block.series.iter().zip(&block.colours) {
        let figures: Vec<_> =
            series.points.iter().map(|point| (point.bytes, value(point))).filter(|(_, figure)| figure.is_shown()).collect();
        let at =
            |of: fn(&Figure) -> f64| figures.iter().map(|(bytes, figure)| (across.place(*bytes), up.place(of(figure)))).collect::<Vec<_>>();
        if figures.iter().any(|(_, figure)| figure.least < figure.most) {
            band(svg, *colour, &at(|figure| figure.least), &at(|figure| figure.most));
        }
        line(svg, *colour, series.dashed, &at(|figure| figure.middle));
    }
}

/// Draws the frame of a panel, its ticks and their labels.
fn grid(svg: &mut String, block: &Block<'_>, left: f64, across: &Axis, up: &Axis) {
    let (top, height, right, bottom) = (block.top, block.height, left + PANEL_WIDTH, block.bottom());
    for Tick { at, label } in across.sizes() {
        let _ = writeln!(svg, "<path d=\"M{at:.1} {top}V{bottom}\" stroke=\"#e4e4e4\"/>");
        let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 20.0);
    }
    for Tick { at, label } in up.decades() {
        let shade = if label.is_empty() { "#f2f2f2" } else { "#dcdcdc" };
        let _ = writeln!(svg, "<path d=\"M{left} {at:.1}H{right}\" stroke=\"{shade}\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 8.0, at + 5.5);
    }
    let _ = writeln!(svg, "<rect x=\"{left}\" y=\"{top}\" width=\"{PANEL_WIDTH}\" height=\"{height}\" fill=\"none\" stroke=\"#888\"/>");
    let _ =
        writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">size</text>", left + PANEL_WIDTH / 2.0, bottom + 42.0);
}

/// Draws the range of all measurements around a line.
fn band(svg: &mut String, colour: usize, least: &[(f64, f64)], most: &[(f64, f64)]) {
    let points: Vec<_> = most.iter().chain(least.iter().rev()).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(svg, "<polygon points=\"{}\" fill=\"{}\" fill-opacity=\"0.15\"/>", points.join(" "), COLOURS[colour % COLOURS.len()]);
}

/// Draws one series: a line through its points.
fn line(svg: &mut String, colour: usize, dashed: bool, places: &[(f64, f64)]) {
    let colour = COLOURS[colour % COLOURS.len()];
    let points: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ =
        writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{}/>", points.join(" "), dashes(dashed));
    let fill = if dashed { "white" } else { colour };
    for (x, y) in places {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\"/>");
    }
}

fn dashes(dashed: bool) -> &'static str {
    if dashed { " stroke-dasharray=\"7 4\"" } else { "" }
}

fn legend(svg: &mut String, block: &Block<'_>) {
    let columns = block.legend_columns();
    let spot = |number: usize| {
        let (column, line) = (number % columns, number / columns);
        (PANEL_LEFT[0] + column as f64 * 1095.0 / columns as f64, block.legend_top() + line as f64 * LEGEND_LINE)
    };
    for (number, (series, colour)) in block.series.iter().zip(&block.colours).enumerate() {
        let (x, y) = spot(number);
        line(svg, *colour, series.dashed, &[(x, y - 4.5), (x + 34.0, y - 4.5)]);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{y}\" font-size=\"15\">{}</text>", x + 46.0, escaped(&series.label));
    }
    if block.left_out > 0 {
        let (x, y) = spot(block.series.len());
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" fill=\"#777\">and {} more lines that are not drawn</text>", block.left_out);
    }
}

/// Escapes text for XML.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
