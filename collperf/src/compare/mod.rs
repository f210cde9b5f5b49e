//! Compares two results that were written with -J, or those of several libraries in one file.

mod calls;
mod file;
mod peers;
mod table;

use std::path::PathBuf;

use clap::Parser;

use crate::failure::{CHECK, Failure};
use crate::output_file::OutputFile;
use crate::report::answer;
use crate::report::plot::{Series, compared};
use file::Results;
use peers::Peers;
use table::Comparison;

/// Compares two results that collperf wrote with -J: time, median of single calls and bus bandwidth of each cell (a
/// call of one size). Compares two replays, which collperf replay wrote with -J, call by call.
///
/// With one file, shows the times of several libraries (peers) side by side. Such a file is written by --csv with
/// --cell-ms, and may also contain lines from other libraries. For cells that were measured several times (-N), medians
/// are compared. Exit codes: 0 success; 1 a file error; 6 wrong command line; 7 a cell, or
/// the calls of one kind in a replay, took longer than --threshold allows, or a cell has wrong elements in B.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf report", bin_name = "collperf report", max_term_width = 110)]
pub(crate) struct Arguments {
    /// The older results, or CELLS.csv with the cells of several libraries
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The newer results
    #[arg(value_name = "B.json")]
    b: Option<PathBuf>,
    /// Fail if a cell of B, or all calls of one kind in a replay, took more than this many percent longer than in A
    #[arg(long, value_name = "PERCENT", value_parser = percent, requires = "b")]
    threshold: Option<f64>,
    /// Print Markdown tables, for a pull request or a wiki
    #[arg(long)]
    markdown: bool,
    /// Draw time and bus bandwidth over size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

fn percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').parse::<f64>().ok().filter(|percent| percent.is_finite() && *percent >= 0.0);
    percent.ok_or_else(|| "expected a percentage of at least 0".to_owned())
}

/// Prints the comparison.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let Some(b) = &arguments.b else {
        let peers = Peers::read(&arguments.a)?;
        answer(&if arguments.markdown { peers.markdown() } else { peers.text() })?;
        draw(arguments, &peers.heading(), peers.name(), "", &peers.series())?;
        return Ok(0);
    };
    if let Some(replays) = calls::Comparison::read(&arguments.a, b)? {
        if arguments.markdown || arguments.plot.is_some() {
            return Err(Failure::usage("--markdown, --plot: not for replays, which are compared call by call; leave out the flag"));
        }
        answer(&replays.text(arguments.threshold))?;
        let is_slower = arguments.threshold.is_some_and(|threshold| replays.is_slower(threshold));
        return Ok(if is_slower { CHECK } else { 0 });
    }
    let [a, b] = [&arguments.a, b].map(|path| Results::read(path));
    let comparison = Comparison::new(a?, b?);
    let threshold = arguments.threshold;
    answer(&if arguments.markdown { comparison.markdown(threshold) } else { comparison.text(threshold) })?;
    draw(arguments, "two results", &comparison.heading(), &comparison.notes().join("; "), &comparison.series())?;
    if comparison.is_empty() {
        return Err(Failure::internal("the two results have no cell (a call of one size) in common"));
    }
    let is_worse = arguments.threshold.is_some_and(|threshold| comparison.is_worse(threshold));
    Ok(if is_worse { CHECK } else { 0 })
}

/// Draws the series if requested.
fn draw(arguments: &Arguments, heading: &str, below: &str, warning: &str, series: &[Series]) -> Result<(), Failure> {
    let Some(path) = &arguments.plot else { return Ok(()) };
    let file = OutputFile::new(path)?;
    file.is_none_of(std::iter::once(&*arguments.a).chain(arguments.b.as_deref()))?;
    file.write(&compared(heading, below, warning, series))
}

#[cfg(test)]
mod tests;
