//! The guide's table of nccl-tests' flags, row by row: supported flags must run, and refused flags must fail with the
//! documented error. nccl-tests' own command lines are tested too.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::ranks::run_ranks;

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");

/// nccl-tests' flags, of version 2.19.6, and its variables.
const FLAGS: &str = "t nthreads g ngpus b minbytes e maxbytes i stepbytes f stepfactor n iters m agg_iters w warmup_iters N run_cycles \
    p parallel_init c check o op d datatype r root z blocking y stream_null T timeout G cudagraph C report_cputime S report_timestamps \
    J output_file a average R local_register x cta_policy D device_implementation V device_cta_count M memory u unalign \
    I per_iter_timing K per_iter_skip h help";
const VARIABLES: &str =
    "MIN_BW SPLIT SPLIT_MASK DEVICE ALLTOALLV_MATRIX_FILE ALLTOALLV_MATRIX_SCALE ALLTOALLV_SPREAD ALLTOALLV_PRINT_SUMMARY";

/// A row of the guide's table.
struct Entry {
    names: Vec<String>,
    here: String,
    value: Option<String>,
}

fn guide() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/from-nccl-tests.md")).unwrap()
}

/// Returns the texts between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn cells(line: &str) -> Vec<&str> {
    line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('|').trim()).collect()
}

fn entries() -> Vec<Entry> {
    let guide = guide();
    let (_, table) = guide.split_once("| nccl-tests 2.19 |").unwrap();
    let lines = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let entry = |line: &str| match cells(line)[..] {
        [names, _, here, value] => Entry { names: quoted(names), here: here.to_owned(), value: quoted(value).pop() },
        _ => panic!("not four cells: {line}"),
    };
    lines.map(entry).collect()
}

/// Returns a command for a row, with the backend that it needs and few calls.
fn command(folder: &Path, entry: &Entry, name: &str) -> Command {
    let mut command = Command::new(COLLPERF);
    command.current_dir(folder).stdin(Stdio::null()).arg(if name.contains("ALLTOALLV") { "alltoallv" } else { "reduce" });
    // The sizes of a matrix come from its file.
    let most = if name.contains("MATRIX") { "64" } else { "1K" };
    command.args(["-b", "64", "-e", most, "-n", "2", "-g", "2"]);
    if name.ends_with("MATRIX_SCALE") {
        command.env("NCCL_TESTS_ALLTOALLV_MATRIX_FILE", "traffic.txt");
    }
    if entry.here.contains("on devices") {
        command.envs(simgpu::environment()).args(["--backend", "device"]);
    } else {
        command.args(["--backend", "host"]);
    }
    if entry.here.contains("needs `-I 1`") {
        command.args(["-I", "1"]);
    }
    match (&entry.value, name.starts_with('-')) {
        (None, _) => command.arg(name),
        (Some(value), true) => command.args([name, value]),
        (Some(value), false) => command.env(name, value),
    };
    command
}

#[test]
fn every_flag_is_in_the_table() {
    let mut names: Vec<String> = entries().into_iter().flat_map(|entry| entry.names).collect();
    let dashed = |flag: &str| if flag.len() == 1 { format!("-{flag}") } else { format!("--{flag}") };
    let mut expected: Vec<String> = FLAGS.split_whitespace().map(dashed).collect();
    expected.extend(VARIABLES.split_whitespace().map(|name| format!("NCCL_TESTS_{name}")));
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn every_row_of_the_table_is_true() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("traffic.txt"), "0 64\n32 16\n").unwrap();
    for entry in entries() {
        for name in &entry.names {
            let output = command(folder.path(), &entry, name).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            if let Some(refused) = entry.here.strip_prefix("refused: ") {
                let words = &quoted(refused)[0];
                assert!(output.status.code() == Some(6) && said.contains(words), "{name} should be refused: {output:?}");
            } else {
                assert!(entry.here.starts_with("served"), "{name}: {}", entry.here);
                let is_quiet = said.lines().all(|line| line.contains("SIMULATED GPU"));
                assert!(output.status.success() && is_quiet && !output.stdout.is_empty(), "{name} should be served: {output:?}");
            }
        }
    }
    assert!(folder.path().join("out.json").exists());
}

#[test]
fn every_test_is_what_the_table_says() {
    let guide = guide();
    let rows: Vec<_> = guide.lines().map(cells).filter(|cells| cells.len() == 2 && cells[0].ends_with("_perf`")).collect();
    assert_eq!(rows.len(), 11);
    let folder = tempfile::tempdir().unwrap();
    for row in rows {
        let link = folder.path().join(&quoted(row[0])[0]);
        std::os::unix::fs::symlink(COLLPERF, &link).unwrap();
        let text = succeeded(Command::new(link).args(["-b", "8", "-e", "8", "-g", "2", "--backend", "host"]).output().unwrap());
        assert!(text.contains(&format!("# Collective test starting: {}\n", quoted(row[0])[0])), "{text}");
    }
}

#[track_caller]
fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the command lines of nccl-tests' README, with another path of the program, and without the largest size, which
/// takes minutes here.
#[test]
fn their_command_lines_run() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("all_reduce_perf");
    std::os::unix::fs::symlink(COLLPERF, &program).unwrap();
    let on_one = "-b 8 -e 64K -f 2 -g 8";
    let on_many = "-b 8 -e 64K -f 2 -g 1";
    for has_devices in [false, true] {
        let made = |line: &str| {
            let mut command = Command::new(&program);
            command.args(line.split_whitespace());
            if has_devices {
                command.envs(simgpu::environment());
            }
            command
        };
        let check = |text: &str| {
            assert_eq!(text.lines().filter(|line| line.starts_with("#  Rank ")).count(), 8, "{text}");
            assert_eq!(text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count(), 14, "{text}");
            assert_eq!(text.contains(" nGpus 0 "), !has_devices, "{text}");
        };
        check(&succeeded(made(on_one).output().unwrap()));
        let ended = run_ranks(8, || made(on_many));
        check(&succeeded(ended.into_iter().next().unwrap()));
    }
}

/// Checks the divisions that nccl-tests' README names, on hosts of eight, by the groups of sixteen ranks.
#[test]
fn their_divisions_are_what_they_say() {
    let group_of = |rank: usize, split: &str| match split {
        "AND 0x7" | "MOD 8" => rank % 8,
        "OR 0x7" => rank / 8 * 8 + 7,
        "DIV 8" => rank / 8,
        _ => rank % 2,
    };
    for split in ["AND 0x7", "MOD 8", "OR 0x7", "DIV 8", "AND 0x1", "MOD 2"] {
        let mut command = Command::new(COLLPERF);
        command.args(["all_reduce", "-t", "16", "-b", "1K", "-e", "1K", "-n", "2", "--backend", "host"]).env("NCCL_TESTS_SPLIT", split);
        let text = succeeded(command.output().unwrap());
        for rank in 0..16 {
            assert!(text.contains(&format!("#  Rank {rank:>2} Group {:>2} ", group_of(rank, split))), "{split}\n{text}");
        }
    }
}

#[test]
fn words_that_are_not_utf8_are_paths_or_errors() {
    use std::os::unix::ffi::OsStrExt;
    let word = std::ffi::OsStr::from_bytes(b"/absent/\xff");
    for before in [&[][..], &["all_reduce", "-J"], &["replay"], &["ps", "--merge"], &["report"]] {
        let output = Command::new(COLLPERF).args(before).arg(word).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 6)) && !said.contains("panicked"), "{before:?}: {output:?}");
    }
}
