//! The parts of a file of results that are compared.

use std::fmt;
use std::path::Path;

use serde::Deserialize;

use crate::failure::Failure;
use crate::input_file;

/// The supported version of the format: nccl-tests' third.
const VERSION: u32 = 3;

#[derive(Debug, Deserialize)]
struct Document {
    version: u32,
    start_time: Option<String>,
    results: Vec<ResultRow>,
    #[serde(default)]
    errors: Vec<String>,
    #[serde(default)]
    config: Config,
}

#[derive(Debug, Default, Deserialize)]
struct Config {
    #[serde(default)]
    notes: Vec<String>,
    ranks: Option<usize>,
    backend: Option<String>,
    transport: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ResultRow {
    size: u64,
    #[serde(rename = "type")]
    type_name: String,
    redop: String,
    root: String,
    out_of_place: Option<Half>,
    in_place: Option<Half>,
    out_of_place_per_iter: Option<PerIteration>,
    in_place_per_iter: Option<PerIteration>,
    experiment_name: String,
}

#[derive(Debug, Deserialize)]
struct Half {
    time: Option<f64>,
    cpu_time: Option<f64>,
    bus_bw: f64,
    nwrong: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct PerIteration {
    p50_us: f64,
}

/// The call that was measured.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cell {
    pub(super) collective: String,
    pub(super) op: String,
    pub(super) dtype: String,
    pub(super) root: String,
    pub(super) in_place: bool,
    pub(super) bytes: u64,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.bytes)?;
        write!(f, " {}", self.line())
    }
}

impl Cell {
    /// Returns what cells of all sizes have in common.
    pub(super) fn line(&self) -> String {
        let words = [&self.collective, &self.op, &self.dtype].into_iter().filter(|word| *word != "none");
        let mut line = words.map(String::as_str).collect::<Vec<_>>().join(" ");
        if !["-1", "0"].contains(&&*self.root) {
            line += &format!(", root {}", self.root);
        }
        line + if self.in_place { ", in place" } else { "" }
    }
}

/// The figures of a cell; medians if it was measured several times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figures {
    /// Microseconds per call.
    pub(super) time_us: f64,
    /// The median of single calls, if they were timed.
    pub(super) p50_us: Option<f64>,
    /// The bus bandwidth in 10^9 bytes per second.
    pub(super) busbw: f64,
    /// The total of wrong elements, if they were counted.
    pub(super) wrong: u64,
    /// How many times it was measured.
    pub(super) times: usize,
}

/// One file.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) name: String,
    pub(super) start_time: Option<String>,
    /// The reasons why the results are less reliable: a busy machine, an early end.
    pub(super) notes: Vec<String>,
    /// The number of ranks, the backend and the transport, if the file has them.
    pub(super) conditions: [Option<String>; 3],
    /// In the order in which they were measured.
    pub(super) cells: Vec<(Cell, Figures)>,
}

impl Results {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let text = input_file::read(path).map_err(|error| Failure::io(format!("reading {}", path.display()), &error))?;
        let name = path.display().to_string();
        Self::parse(name, &text).map_err(|reason| Failure::internal(format!("{}: {reason}", path.display())))
    }

    /// Reads the results in a file's text, or returns why there are none.
    pub(super) fn parse(name: String, text: &[u8]) -> Result<Self, String> {
        let document: Document = serde_json::from_slice(text)
            .map_err(|error| format!("the file does not contain results that collperf wrote with -J: {error}"))?;
        if document.version != VERSION {
            return Err(format!("the file's format has version {}, but this collperf reads only version {VERSION}", document.version));
        }
        let mut measured: Vec<(Cell, Vec<Figures>)> = Vec::new();
        for row in document.results {
            for (cell, figures) in row.halves()? {
                match measured.iter_mut().find(|(known, _)| *known == cell) {
                    Some((_, all)) => all.push(figures),
                    None => measured.push((cell, vec![figures])),
                }
            }
        }
        let cells = measured.into_iter().map(|(cell, all)| (cell, medians(&all))).collect();
        let early = document.errors.into_iter().map(|error| format!("the run ended early: {error}"));
        let Config { notes, ranks, backend, transport } = document.config;
        let notes = notes.into_iter().chain(early).collect();
        let conditions = [ranks.map(|ranks| format!("{ranks} ranks")), backend, transport];
        Ok(Self { name, start_time: document.start_time, notes, conditions, cells })
    }
}

impl ResultRow {
    /// Returns the results with two buffers, and with one.
    fn halves(self) -> Result<Vec<(Cell, Figures)>, String> {
        let Self { size, type_name, redop, root, experiment_name, .. } = self;
        let cell = |in_place| Cell {
            collective: experiment_name.clone(),
            op: redop.clone(),
            dtype: type_name.clone(),
            root: root.clone(),
            in_place,
            bytes: size,
        };
        let halves = [(self.out_of_place, self.out_of_place_per_iter, false), (self.in_place, self.in_place_per_iter, true)];
        let there = halves.into_iter().filter_map(|(half, single, in_place)| Some((half?, single, cell(in_place))));
        there
            .map(|(half, single, cell)| {
                let time = half.time.or(half.cpu_time).filter(|time| time.is_finite() && *time > 0.0);
                let time_us = time.ok_or_else(|| format!("{cell}: it has no time above 0"))?;
                let p50_us = single.map(|single| single.p50_us);
                Ok((cell, Figures { time_us, p50_us, busbw: half.bus_bw, wrong: half.nwrong.unwrap_or(0), times: 1 }))
            })
            .collect()
    }
}

/// Returns the medians of one or more measurements.
fn medians(all: &[Figures]) -> Figures {
    let middle = |of: fn(&Figures) -> Option<f64>| median(all.iter().filter_map(of).collect());
    Figures {
        time_us: middle(|figures| Some(figures.time_us)).unwrap_or(f64::NAN),
        p50_us: middle(|figures| figures.p50_us),
        busbw: middle(|figures| Some(figures.busbw)).unwrap_or(0.0),
        wrong: all.iter().map(|figures| figures.wrong).sum(),
        times: all.len(),
    }
}

/// Returns the median: the value in the middle, or the mean of the two there.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}
