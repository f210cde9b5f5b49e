//! `collperf install-links`, and collperf started under nccl-tests' names.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::hosts::skip;
use crate::peer::absent;

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");

fn run(program: impl AsRef<Path>, arguments: &str) -> Output {
    Command::new(program.as_ref()).args(arguments.split_whitespace()).output().unwrap()
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[track_caller]
fn refused(output: &Output, code: i32, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), said.contains(words)), (Some(code), true), "{words:?} is not in {output:?}");
}

#[test]
fn every_test_has_a_link_and_is_itself() {
    let folder = tempfile::tempdir().unwrap();
    let said = succeeded(&run(COLLPERF, &format!("install-links {}", folder.path().display())));
    assert!(said.contains(": 11 links to "), "{said}");
    // A second time: links are replaced.
    succeeded(&run(COLLPERF, &format!("install-links {}", folder.path().display())));
    let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 11);
    for name in names {
        let text = succeeded(&run(folder.path().join(&name), "-b 8 -e 1K -f 8 -g 2 --backend host -n 2"));
        assert!(text.contains(&format!("# Collective test starting: {name}\n# nThread ")), "{text}");
    }
}

#[test]
fn a_link_has_the_defaults_of_nccl_tests() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("all_reduce_perf_mpi");
    symlink(COLLPERF, &link).unwrap();
    let text = succeeded(&run(&link, "--backend host -n 1 -c 0"));
    assert!(text.contains("minBytes 33554432 maxBytes 33554432 step: 1048576(bytes)") && !text.contains("#  Rank  1 "), "{text}");
    // A smallest size above the largest is an error in nccl-tests too.
    refused(&run(&link, "-b 64M"), 6, "invalid sizes for 'minbytes' and 'maxbytes'");
    // Ranks that are separate processes run the test of this name too.
    let text = succeeded(&run(&link, "--backend host -n 1 -g 3 -b 4 -e 12 -i 4"));
    assert_eq!(text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count(), 3, "{text}");
}

#[test]
fn links_that_cannot_be_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &Path, more: &str| run(COLLPERF, &format!("install-links {} {more}", path.display()));
    refused(&at(&folder.path().join("absent"), ""), 6, "there is no such folder");
    refused(&at(folder.path(), "--suffix mpi"), 6, "must begin with _");
    refused(&at(folder.path(), "--suffix _a/b"), 6, "must begin with _");
    refused(&run(COLLPERF, "install-links"), 6, "FOLDER");
    // A file that is no link is kept, and no link is created.
    fs::write(folder.path().join("gather_perf"), "mine").unwrap();
    refused(&at(folder.path(), ""), 6, "gather_perf: this file exists and is not a link");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    // No user can write there, not even root.
    refused(&at(Path::new("/proc"), ""), 1, "linking /proc/");
}

#[test]
fn a_name_that_is_no_test_is_collperf() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("broadcasts_perf");
    symlink(COLLPERF, &link).unwrap();
    refused(&run(&link, "-b 8"), 6, "COLLECTIVE");
    refused(&run(COLLPERF, "broadcasts_perf"), 6, "collective \"broadcasts_perf\": not known");
}

/// Runs a command line of nccl-tests' README in a folder in which `./build` has our links. Sets these variables and
/// those that Open MPI needs for root and for a machine with few processors.
fn as_in_the_readme(line: &str, variables: &[(&str, OsString)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let build = folder.path().join("build");
    fs::create_dir(&build).unwrap();
    succeeded(&run(COLLPERF, &format!("install-links {}", build.display())));
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words).current_dir(folder.path()).env("TMPDIR", folder.path()).stdin(Stdio::null());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1").env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    command.envs(variables.iter().cloned()).output().unwrap()
}

/// Returns the table of a run, after a check that all elements are right and that it has this many ranks and sizes.
#[track_caller]
fn is_whole(output: &Output, ranks: usize, sizes: usize) -> String {
    let text = succeeded(output);
    assert!(text.contains("# Out of bounds values : 0 OK") && text.contains("# Collective test concluded: all_reduce_perf\n"), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("#  Rank ")).count(), ranks, "{text}");
    assert_eq!(text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()).count(), sizes, "{text}");
    text
}

/// Runs the README's first example, on one host with 8 GPUs, with a smaller largest size to save time.
#[test]
fn their_command_line_for_one_host_runs() {
    let line = "./build/all_reduce_perf -b 8 -e 8K -f 2 -g 8";
    is_whole(&as_in_the_readme(line, &[]), 8, 11);
    let text = is_whole(&as_in_the_readme(line, &simgpu::environment()), 8, 11);
    assert!(!text.contains(" [host] "), "{text}");
}

/// Returns Open MPI's launcher, whose usual name may belong to another MPI.
fn mpirun() -> Result<&'static str, String> {
    let is_open = |name: &&str| {
        let output = Command::new(name).arg("--version").output();
        output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("open-mpi.org"))
    };
    let found = ["mpirun", "mpirun.openmpi"].into_iter().find(is_open);
    found.map_or_else(|| absent("launchers", "no mpirun of Open MPI (tests/interop/setup installs it)".to_owned()), Ok)
}

/// Runs the README's second example, there with `-np 64 -N 8`.
#[test]
fn their_command_line_under_mpirun_runs() {
    let mpirun = match mpirun() {
        Ok(mpirun) => mpirun,
        Err(why) => skip!("{why}"),
    };
    let line = |more: &str| format!("{mpirun} {more} -np 4 -N 4 ./build/all_reduce_perf -b 8 -e 8K -f 2 -g 1");
    is_whole(&as_in_the_readme(&line(""), &[]), 4, 11);
    // mpirun itself needs no driver.
    let given = simgpu::environment();
    let names: String = given.iter().map(|(name, value)| format!(" -x {name}={}", value.display())).collect();
    let text = is_whole(&as_in_the_readme(&line(&names), &[]), 4, 11);
    assert!(!text.contains(" [host] "), "{text}");
    // Groups by MPI's ranks.
    let text = succeeded(&as_in_the_readme(&line(""), &[("NCCL_TESTS_SPLIT_MASK", "0x1".into())]));
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
}
