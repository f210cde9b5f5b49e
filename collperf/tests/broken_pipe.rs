//! `collperf … | head`: when nobody reads any more it ends without a word, and with all its ranks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use limit::Limit;

#[path = "../../tests/common/limit.rs"]
#[allow(dead_code, unreachable_pub, reason = "tests of other packages share it")]
mod limit;

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");
/// The number of SIGPIPE.
const SIGPIPE: i32 = 13;

/// As a shell shows it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
}

#[test]
fn a_reader_that_goes_ends_all_ranks_without_a_word() {
    for flags in ["-g 3", "-g 3 --transport tcp", "-t 3", "-g 1", "-g 3 --csv -"] {
        let mut command = Command::new(COLLPERF);
        command.args("all_reduce --sizes 8 -N 0 -n 1 --plane host".split(' ')).args(flags.split(' '));
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _limit = Limit::on(&child);
        let reader = BufReader::new(child.stdout.take().unwrap());
        let lines: Vec<String> = reader.lines().take(12).map(Result::unwrap).collect();
        let pid = |line: &String| line.split_once(" Pid ")?.1.split_whitespace().next().map(str::to_owned);
        let pids: Vec<String> = lines.iter().filter_map(pid).collect();
        assert_eq!((lines.len(), pids.is_empty()), (12, flags.contains("--csv")), "{flags}: {lines:?}");
        let (mut said, status) = (String::new(), child.wait().unwrap());
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((code(status), &*said), (128 + SIGPIPE, ""), "{flags}");
        let left: Vec<&String> = pids.iter().filter(|pid| Path::new("/proc").join(pid).exists()).collect();
        assert!(left.is_empty(), "{flags}: {left:?} of {pids:?}");
    }
}

#[test]
fn what_is_printed_in_one_piece_ends_alike() {
    let folder = tempfile::tempdir().unwrap();
    let result = r#"{"version": 3, "results": []}"#;
    std::fs::write(folder.path().join("a.json"), result).unwrap();
    for line in [
        "report a.json a.json",
        "report a.json a.json --markdown",
        "doctor",
        "doctor -g 3",
        "pairs -g 3 --of ranks",
        "--help",
        "install-links .",
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(COLLPERF);
        command.args(line.split(' ')).current_dir(folder.path()).stdin(Stdio::null()).stdout(writer);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let _limit = Limit::on(&child);
        let output = child.wait_with_output().unwrap();
        assert_eq!((code(output.status), &*String::from_utf8_lossy(&output.stderr)), (128 + SIGPIPE, ""), "{line}");
    }
}
