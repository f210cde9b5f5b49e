//! Lets this program be called by the names of nccl-tests' programs, to run the tests of these names.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Parser;

use crate::arguments::IS_ONE_RANK;
use crate::collective::Collective;
use crate::failure::Failure;
use crate::report::answer;

/// The names of OSU's benchmarks that this program has.
const OSU: [&str; 5] = ["osu_latency", "osu_bw", "osu_bibw", "osu_mbw_mr", "osu_iallreduce"];

/// Returns the command line, with this program's name instead of a test's: `all_reduce_perf -g 2` becomes `collperf
/// --nccl-tests-defaults all_reduce -g 2`.
pub(crate) fn words() -> Vec<OsString> {
    renamed(std::env::args_os().collect())
}

fn renamed(words: Vec<OsString>) -> Vec<OsString> {
    // A rank started by a copy with such a name already has a converted command line.
    let is_made = words.get(1).is_some_and(|word| word == IS_ONE_RANK);
    if let Some(benchmark) = words.first().and_then(|program| benchmark_of(program)).filter(|_| !is_made) {
        return ["collperf", benchmark].into_iter().map(OsString::from).chain(words.into_iter().skip(1)).collect();
    }
    match words.first().and_then(|program| test_of(program)).filter(|_| !is_made) {
        Some(test) => {
            ["collperf", "--nccl-tests-defaults", test.name()].into_iter().map(OsString::from).chain(words.into_iter().skip(1)).collect()
        }
        None => words,
    }
}

/// Returns nccl-tests' tests and their collectives.
fn tests() -> impl Iterator<Item = (&'static str, Collective)> {
    Collective::known().filter_map(|collective| Some((collective.nccl_test()?, collective)))
}

/// Returns the test that a program's name stands for. The text after `_perf`, nccl-tests' `NAME_SUFFIX`, must begin
/// with `_`.
fn test_of(program: &OsStr) -> Option<Collective> {
    let name = Path::new(program).file_name()?.to_str()?;
    let is_it = |known: &str| name.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'));
    tests().find(|(known, _)| is_it(known)).map(|(_, collective)| collective)
}

/// Returns OSU's benchmark that a program's name stands for.
fn benchmark_of(program: &OsStr) -> Option<&'static str> {
    let name = Path::new(program).file_name()?.to_str()?;
    OSU.into_iter().find(|known| *known == name)
}

/// Makes links with the names of nccl-tests' programs (all_reduce_perf, alltoall_perf and so on), so that scripts find
/// them.
///
/// Called by one of these names, collperf runs that test with nccl-tests' defaults.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf install-links", bin_name = "collperf install-links", max_term_width = 110)]
pub(crate) struct Arguments {
    /// An existing folder for the links. Older links are replaced; other files with these names are an error
    folder: PathBuf,
    /// Text at the end of each name, like nccl-tests' NAME_SUFFIX: for example _mpi
    #[arg(long, value_name = "TEXT", default_value = "")]
    suffix: String,
    /// Make links with the names of OSU's benchmarks instead: osu_latency, osu_bw, osu_bibw, osu_mbw_mr, osu_iallreduce
    #[arg(long, conflicts_with = "suffix")]
    osu: bool,
}

/// Makes the links.
pub(crate) fn install(arguments: &Arguments) -> Result<u8, Failure> {
    let Arguments { folder, suffix, osu } = arguments;
    if !suffix.is_empty() && (!suffix.starts_with('_') || suffix.contains('/')) {
        return Err(Failure::usage(format!("--suffix {suffix}: the suffix must begin with _ and must not contain /")));
    }
    if !folder.is_dir() {
        return Err(Failure::usage(format!("{}: there is no such folder; create it first", folder.display())));
    }
    let program = std::env::current_exe().map_err(|error| Failure::io("finding the path of this program, to link to it", &error))?;
    let names: Vec<&str> = if *osu { OSU.to_vec() } else { tests().map(|(name, _)| name).collect() };
    let paths: Vec<PathBuf> = names.iter().map(|name| folder.join(format!("{name}{suffix}"))).collect();
    // All or none: obstacles are found first.
    if let Some(taken) = paths.iter().find(|path| fs::symlink_metadata(path).is_ok_and(|there| !there.is_symlink())) {
        return Err(Failure::usage(format!("{}: this file exists and is not a link; move it away first", taken.display())));
    }
    for path in &paths {
        link(&program, path).map_err(|error| Failure::io(format!("linking {}", path.display()), &error))?;
    }
    answer(&format!("{}: {} links to {}\n", folder.display(), paths.len(), program.display()))?;
    Ok(0)
}

/// Makes one link, and replaces an existing one.
fn link(program: &Path, path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::os::unix::fs::symlink(program, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> String {
        let words = renamed(text.split(' ').map(OsString::from).collect());
        words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn names_of_tests_are_understood() {
        assert_eq!(line("./build/all_reduce_perf -b 8 -g 8"), "collperf --nccl-tests-defaults all_reduce -b 8 -g 8");
        assert_eq!(line("/opt/alltoallv_perf_mpi"), "collperf --nccl-tests-defaults all_to_all_v");
        assert_eq!(line("./build/osu_bw -m 8"), "collperf osu_bw -m 8");
        for text in [
            "osu_bw --is-one-rank osu_bw",
            "osu_bw_perf",
            "all_reduce_perf --is-one-rank --nccl-tests-defaults all_reduce",
            "collperf all_reduce",
            "all_reduce_performance",
            "my_all_reduce_perf",
            "all_reduce_perf.bak",
            "perf",
            "",
        ] {
            assert_eq!(line(text), text);
        }
    }
}
