//! A file of cells that programs of several libraries have measured. It has the columns of `--csv` with `--cell-ms`,
//! and a first column that names the program.

use std::fmt::Write as _;
use std::path::Path;

use crate::collective::Collective;
use crate::failure::Failure;
use crate::input_file;
use crate::report::plot::{Point, Series};
use crate::row::Half;

/// The suffix of the op of an all-reduce with one buffer.
const IN_PLACE: &str = "_inplace";

/// One figure.
#[derive(Debug)]
struct Cell {
    peer: String,
    transport: String,
    /// Collective, op, type and ranks, which are the same for all figures in a table.
    call: String,
    bytes: usize,
    time_us: f64,
    busbw: f64,
}

/// The meaning of the columns.
const LEGEND: &str = "\"size\": bytes of the larger of a rank's source and destination buffers. \"(us)\": median time of a call, in microseconds. \"-\": not measured.";

/// The figures of the same call, by size and peer.
struct Table<'a> {
    title: String,
    peers: Vec<&'a str>,
    /// Bytes, and each peer's time as text.
    rows: Vec<(usize, Vec<String>)>,
}

/// One file.
#[derive(Debug)]
pub(super) struct Peers {
    name: String,
    cells: Vec<Cell>,
}

impl Peers {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let bytes = input_file::read(path).map_err(|error| Failure::io(format!("reading {}", path.display()), &error))?;
        let text = String::from_utf8_lossy(&bytes);
        let name = path.file_name().unwrap_or(path.as_os_str()).display().to_string();
        Self::parse(name, &text).map_err(|reason| Failure::usage(format!("{}: {reason}", path.display())))
    }

    /// Reads the cells in a file's text, or returns why there are none.
    pub(super) fn parse(name: String, text: &str) -> Result<Self, String> {
        // Errors name the number of a line with too few fields; quoted fields may contain commas.
        let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(text.as_bytes());
        let names = reader.headers().map_err(|error| error.to_string())?.clone();
        let column = |wanted: &str| {
            let place = names.iter().position(|name| name == wanted);
            place.ok_or_else(|| {
                format!("the file has no column {wanted}; give two files written with -J, or one file written with --csv and --cell-ms")
            })
        };
        let wanted = ["peer", "transport", "collective", "op", "dtype", "nranks", "bytes", "lat_p50_us"];
        let places = wanted.into_iter().map(column).collect::<Result<Vec<_>, _>>()?;
        let cells = reader.records().map(|record| {
            let record = record.map_err(|error| error.to_string())?;
            let fields: Option<Vec<&str>> = places.iter().map(|place| record.get(*place)).collect();
            let read = fields.ok_or_else(|| "too few columns".to_owned()).and_then(|fields| cell(&fields));
            read.map_err(|reason| format!("line {}: {reason}", record.position().map_or(0, csv::Position::line)))
        });
        let cells = cells.collect::<Result<Vec<_>, _>>()?;
        if cells.is_empty() { Err("it has no cells".to_owned()) } else { Ok(Self { name, cells }) }
    }

    pub(super) fn heading(&self) -> String {
        match self.calls().as_slice() {
            [call] => (*call).to_owned(),
            calls => format!("{} calls", calls.len()),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns a table for each call and transport, with a column for each peer.
    pub(super) fn text(&self) -> String {
        let mut text = format!("# {}\n#\n# {LEGEND}\n", self.name);
        for Table { title, peers, rows } in self.tables() {
            let heads: Vec<String> = peers.iter().map(|peer| format!("{peer} (us)")).collect();
            let padded = |words: &[String]| -> String {
                words.iter().zip(&heads).map(|(word, head)| format!("  {word:>0$}", head.len().max(14))).collect()
            };
            let _ = writeln!(text, "#\n# {title}\n#   size (B){}", padded(&heads));
            for (bytes, times) in rows {
                let _ = writeln!(text, "{bytes:>12}{}", padded(&times));
            }
        }
        text
    }

    /// Returns the tables in Markdown.
    pub(super) fn markdown(&self) -> String {
        let cell = |text: &str| format!(" {} |", text.replace('|', "/"));
        let mut text = format!("{}\n", self.name);
        for Table { title, peers, rows } in self.tables() {
            let heads: String = peers.iter().map(|peer| cell(&format!("{peer} (us)"))).collect();
            let _ = write!(text, "\n### {title}\n\n| size (B) |{heads}\n| ---: |{}\n", " ---: |".repeat(peers.len()));
            for (bytes, times) in rows {
                let _ = writeln!(text, "| {bytes} |{}", times.iter().map(|time| cell(time)).collect::<String>());
            }
        }
        text + "\n" + LEGEND + "\n"
    }

    /// Returns a table for each call and transport.
    fn tables(&self) -> Vec<Table<'_>> {
        let pairs = self.calls().into_iter().flat_map(|call| self.transports().into_iter().map(move |transport| (call, transport)));
        pairs.filter_map(|(call, transport)| self.table(call, transport)).collect()
    }

    fn table(&self, call: &str, transport: &str) -> Option<Table<'_>> {
        let here: Vec<&Cell> = self.cells.iter().filter(|cell| cell.call == call && cell.transport == transport).collect();
        let (mut sizes, peers) = (distinct(here.iter().map(|cell| cell.bytes)), distinct(here.iter().map(|cell| &*cell.peer)));
        sizes.sort_unstable();
        let time = |bytes: usize, peer: &str| {
            let cell = here.iter().find(|cell| cell.bytes == bytes && cell.peer == peer);
            cell.map_or_else(|| "-".to_owned(), |cell| format!("{:.2}", cell.time_us))
        };
        let rows: Vec<_> = sizes.into_iter().map(|bytes| (bytes, peers.iter().map(|peer| time(bytes, peer)).collect())).collect();
        (!rows.is_empty()).then(|| Table { title: format!("{call}, {transport}"), peers, rows })
    }

    /// Returns the lines of a picture: a colour for each call and peer, dashed for all transports but the first.
    pub(super) fn series(&self) -> Vec<Series> {
        let (calls, transports) = (self.calls(), self.transports());
        let peers = distinct(self.cells.iter().map(|cell| &*cell.peer));
        let mut all = Vec::new();
        for (colour, (call, peer)) in calls.iter().flat_map(|call| peers.iter().map(move |peer| (*call, *peer))).enumerate() {
            for (number, transport) in transports.iter().enumerate() {
                let here = self.cells.iter().filter(|cell| cell.call == call && cell.peer == peer && cell.transport == *transport);
                let mut points: Vec<Point> = here
                    .filter(|cell| cell.bytes > 0)
                    .map(|cell| Point { bytes: cell.bytes as f64, time_us: cell.time_us.into(), busbw: cell.busbw.into() })
                    .collect();
                points.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
                let label = if calls.len() == 1 { format!("{peer}, {transport}") } else { format!("{call}: {peer}, {transport}") };
                if !points.is_empty() {
                    all.push(Series { label, group: call.to_owned(), colour, dashed: number > 0, points });
                }
            }
        }
        all
    }

    fn calls(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| &*cell.call))
    }

    fn transports(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| &*cell.transport))
    }
}

/// Returns each value once, in order of first occurrence.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for value in values {
        if !all.contains(&value) {
            all.push(value);
        }
    }
    all
}

/// Reads the cell in a line's fields.
fn cell(fields: &[&str]) -> Result<Cell, String> {
    let [peer, transport, collective, op, dtype, ranks, bytes, time] = fields else { return Err("too few columns".to_owned()) };
    let known: Collective = collective.parse()?;
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("{text:?} is not a number"));
    let (ranks, bytes) = (number(ranks)?, number(bytes)?);
    let time_us = time.parse::<f64>().ok().filter(|time| time.is_finite() && *time > 0.0);
    let time_us = time_us.ok_or_else(|| format!("{time:?} is not a time above 0"))?;
    let (op, place) = op.strip_suffix(IN_PLACE).map_or((*op, ""), |op| (op, ", in place"));
    let words: Vec<&str> = [collective, op, *dtype].into_iter().filter(|word| *word != "none").collect();
    let call = format!("{}{place}, {ranks} ranks", words.join(" "));
    let busbw = Half::new(known, ranks, bytes, time_us).busbw;
    Ok(Cell { peer: (*peer).to_owned(), transport: (*transport).to_owned(), call, bytes, time_us, busbw })
}
