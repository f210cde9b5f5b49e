//! Reads the flight records of a job's ranks, and reports in which calls the ranks were stuck.

mod circle;
mod file;
mod finding;
mod group;
#[cfg(test)]
mod tests;
mod words;

use std::path::{Path, PathBuf};

use clap::Parser;

use crate::failure::Failure;
use crate::report::answer;

pub(crate) use file::{Backend, Entry, Peer, Record, State};
pub(crate) use finding::list;
pub(crate) use group::Group;

/// The command line of this task, which takes no other flags.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf", max_term_width = 110)]
pub(crate) struct Arguments {
    /// Read the flight records in this folder, and report which rank is behind, where calls differ, and which ranks are
    /// gone
    #[arg(long, value_name = "FOLDER")]
    explain_hang: PathBuf,
}

impl Arguments {
    /// Whether the command line asks for this task.
    pub(crate) fn are_meant() -> bool {
        let is_flag = |word: &[u8]| word == b"--explain-hang" || word.starts_with(b"--explain-hang=");
        std::env::args_os().any(|word| is_flag(word.as_encoded_bytes()))
    }
}

/// Prints the findings.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    answer(&explain(&arguments.explain_hang)?)?;
    Ok(0)
}

/// Describes the findings in a folder's records.
pub(crate) fn explain(folder: &Path) -> Result<String, Failure> {
    let (files, skipped) = file::read_all(folder).map_err(|error| Failure::io(format!("reading {}", folder.display()), &error))?;
    let skipped: String = skipped.iter().map(|(path, reason)| format!("skipped {}: {reason}\n", path.display())).collect();
    if files.is_empty() {
        return Err(Failure::internal(format!("{skipped}{}: no flight records in this folder", folder.display())));
    }
    let groups = Group::all(files);
    let circles: String = circles(&groups).concat();
    let said: String = groups.iter().map(|group| group.explain(&groups)).collect();
    Ok(format!("{skipped}{circles}{said}"))
}

/// Describes the cycles of calls in which each waits for the process of the next.
pub(crate) fn circles<'a>(groups: impl IntoIterator<Item = &'a Group>) -> Vec<String> {
    circle::all(groups)
}
