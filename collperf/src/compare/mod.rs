//! Compares two results that were written with -J.

mod file;
mod table;

use std::path::PathBuf;

use clap::Parser;

use crate::failure::{CHECK, Failure};
use crate::report::plot::compared;
use file::Results;
use table::Comparison;

/// Compares two results that collperf wrote with -J: time, median of single calls and bus bandwidth, cell by cell.
///
/// Of cells that were measured several times (-N) the medians count. Exit codes: 0; 1 files; 6 usage; 7 a cell took longer than
/// --threshold allows, or has wrong elements in B.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf report", bin_name = "collperf report", max_term_width = 110)]
pub(crate) struct Arguments {
    /// The older results
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The newer results
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Fail where a cell of B took more than so many percent longer than in A
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    threshold: Option<f64>,
    /// Draw time and bus bandwidth of both over size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

fn percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').parse::<f64>().ok().filter(|percent| percent.is_finite() && *percent >= 0.0);
    percent.ok_or_else(|| "a number of percent, from 0".to_owned())
}

/// Prints the comparison.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let [a, b] = [&arguments.a, &arguments.b].map(|path| Results::read(path));
    let comparison = Comparison::new(a?, b?);
    print!("{}", comparison.text(arguments.threshold));
    if let Some(path) = &arguments.plot {
        let picture = compared(&comparison.heading(), &comparison.series());
        std::fs::write(path, picture).map_err(|error| Failure::io(format!("writing {}", path.display()), &error))?;
    }
    if comparison.is_empty() {
        return Err(Failure::internal("no cell is in both results"));
    }
    let is_worse = arguments.threshold.is_some_and(|threshold| comparison.is_worse(threshold));
    Ok(if is_worse { CHECK } else { 0 })
}

#[cfg(test)]
mod tests;
