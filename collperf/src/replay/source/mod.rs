//! The files of a record: traces, flight records, or PyTorch's flight records.

mod flight;
mod groups;
mod pickle;
#[cfg(test)]
mod spoiled;
#[cfg(test)]
mod tests;
mod torch;
mod trace;

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::recording::{Origin, Recording};
use crate::failure::Failure;
use crate::input_file;

/// The most files of a folder that are read.
const MOST_FILES: usize = 65_536;

/// The parts of a JSON file that show its format.
#[derive(Deserialize)]
struct Signs {
    format: Option<String>,
    #[serde(rename = "otherData")]
    about: Option<TraceSigns>,
    pg_config: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct TraceSigns {
    format: Option<String>,
}

/// The contents of all files, by format.
#[derive(Default)]
struct Files {
    traces: Vec<trace::Trace>,
    flights: Vec<crate::hang::Record>,
    dumps: Vec<torch::Dumped>,
    skipped: Vec<String>,
}

/// Reads the record of a job: a folder with the files of all ranks, or the files themselves.
pub(super) fn read(paths: &[PathBuf]) -> Result<Recording, Failure> {
    let mut files = Files::default();
    for path in paths {
        let failed = |error| Failure::io(format!("reading {}", path.display()), &error);
        if !fs::metadata(path).map_err(failed)?.is_dir() {
            files.add(path).map_err(|reason| Failure::internal(format!("{}: {reason}", path.display())))?;
            continue;
        }
        for path in of_folder(path)? {
            if let Err(reason) = files.add(&path) {
                files.skipped.push(format!("skipped {}: {reason}", path.display()));
            }
        }
    }
    let named = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    files.merge().map_err(|reason| Failure::internal(format!("{named}: {reason}")))
}

/// Returns the files of a folder that may be records.
fn of_folder(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |error| Failure::io(format!("reading {}", folder.display()), &error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if !is_hidden && path.is_file() {
            paths.push(path);
        }
        if paths.len() > MOST_FILES {
            return Err(Failure::internal(format!("{}: the folder has more than {MOST_FILES} files", folder.display())));
        }
    }
    paths.sort();
    Ok(paths)
}

impl Files {
    /// Reads a file of any format, or returns why it is no record.
    fn add(&mut self, path: &Path) -> Result<(), String> {
        let text = input_file::read(path).map_err(|error| error.to_string())?;
        let rank = rank_in_name(path);
        match origin(&text)? {
            Origin::Trace => self.traces.extend(trace::parse(&text)?),
            Origin::FlightRecord => self.flights.push(flight::parse(&text)?),
            Origin::PyTorch => self.dumps.push(torch::parse(&text, rank)?),
        }
        Ok(())
    }

    /// Makes the recording. Traces come first, because they hold the most.
    fn merge(self) -> Result<Recording, String> {
        let Self { traces, flights, dumps, skipped } = self;
        let counts = [(traces.len(), Origin::Trace), (flights.len(), Origin::FlightRecord), (dumps.len(), Origin::PyTorch)];
        let mut recording = match counts.iter().find(|(count, _)| *count > 0) {
            Some((_, Origin::Trace)) => trace::merge(traces),
            Some((_, Origin::FlightRecord)) => flight::merge(flights),
            Some((_, Origin::PyTorch)) => torch::merge(dumps),
            None => Err("there is no trace and no flight record".to_owned()),
        }
        .map_err(|reason| [&[reason], &skipped[..]].concat().join("\n"))?;
        let unused = counts.iter().filter(|(count, origin)| *count > 0 && *origin != recording.origin);
        let unused = unused.map(|(count, origin)| {
            format!("{count} files were not used, because the {} holds more: {}s", recording.origin.name(), origin.name())
        });
        let all: Vec<String> = skipped.into_iter().chain(unused).collect();
        recording.notes.splice(0..0, all);
        Ok(recording)
    }
}

/// Returns the format of a file.
fn origin(text: &[u8]) -> Result<Origin, String> {
    if pickle::is_pickle(text) {
        return Ok(Origin::PyTorch);
    }
    let signs: Signs = serde_json::from_slice(text).map_err(|error| format!("neither JSON nor a pickle: {error}"))?;
    let traced = signs.about.and_then(|about| about.format);
    if traced.as_deref() == Some(trace::FORMAT) {
        return Ok(Origin::Trace);
    }
    match signs.format {
        Some(_) => Ok(Origin::FlightRecord),
        None if signs.pg_config.is_some() => Ok(Origin::PyTorch),
        None => Err("neither a trace nor a flight record".to_owned()),
    }
}

/// Returns the number with which the name of PyTorch's file ends: `nccl_trace_rank_3`, `rank3.json`.
fn rank_in_name(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let stem = [".json", ".pickle", ".pkl"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    let digits = stem.len() - stem.trim_end_matches(|char: char| char.is_ascii_digit()).len();
    stem[stem.len() - digits..].parse().ok()
}
