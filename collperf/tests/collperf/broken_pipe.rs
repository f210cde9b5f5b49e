//! Runs that end early. `collperf … | head` ends silently with all ranks, and an interrupted run keeps its results.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use crate::common::limit::Limit;
use rustix::process::{Pid, Signal, kill_process};

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");
/// The number of SIGPIPE.
const SIGPIPE: i32 = 13;

/// Returns the exit code as a shell shows it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
}

#[test]
fn a_reader_that_goes_ends_all_ranks_without_a_word() {
    for flags in ["-g 3", "-g 3 --transport tcp", "-t 3", "-g 1", "-g 3 --csv -"] {
        let mut command = Command::new(COLLPERF);
        command.args("all_reduce --sizes 8 -N 0 -n 1 --backend host".split(' ')).args(flags.split(' '));
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _limit = Limit::on(&child);
        let reader = BufReader::new(child.stdout.take().unwrap());
        let lines: Vec<String> = reader.lines().take(12).map(Result::unwrap).collect();
        let pid = |line: &String| line.split_once(" Pid ")?.1.split_whitespace().next().map(str::to_owned);
        let pids: Vec<String> = lines.iter().filter_map(pid).collect();
        assert_eq!((lines.len(), pids.is_empty()), (12, flags.contains("--csv")), "{flags}: {lines:?}");
        let (mut said, status) = (String::new(), child.wait().unwrap());
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        // With CSV output, the note about a busy machine is on standard error.
        let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("collperf: note: ")).collect();
        assert_eq!((code(status), said), (128 + SIGPIPE, vec![]), "{flags}");
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

/// Returns the files in a folder and their contents.
fn files(folder: &Path) -> Vec<(String, String)> {
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), text(&entry.path())))
        .collect();
    files.sort();
    files
}

fn results(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
}

/// Starts an endless run, and waits until it has printed some rows. Returns the process and a reader of its output.
fn endless(flags: &str, folder: &Path) -> (Child, BufReader<ChildStdout>) {
    crate::interrupts::heed();
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args("all_reduce --sizes 8,64 -N 0 -n 2 --backend host -J r.json --html r.html --plot r.svg --prometheus r.prom".split(' '));
    command.args(flags.split(' ')).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut rows = 0;
    while rows < 4 {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "it ended early: {:?}", child.wait_with_output());
        rows += usize::from(!line.starts_with('#') && !line.trim().is_empty());
    }
    (child, reader)
}

/// Checks that all files exist and are complete, with the printed rows and the reason why there are no more.
#[track_caller]
fn assert_kept(folder: &Path, why: &str) {
    let files = files(folder);
    assert_eq!(files.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), ["r.html", "r.json", "r.prom", "r.svg"]);
    let json = results(&files[1].1);
    assert!(json["results"].as_array().unwrap().len() >= 4 && json["errors"][0].as_str().unwrap().contains(why), "{json}");
    assert!(files[0].1.contains("The run ended early: ") && files[0].1.ends_with("</html>\n"), "{}", files[0].1);
    assert!(files[2].1.contains("collperf_success 0\n") && files[3].1.ends_with("</svg>\n"));
}

#[test]
fn an_interrupted_run_leaves_what_it_has() {
    for (flags, signal) in [("-g 2", Signal::INT), ("-t 2", Signal::INT), ("-g 1", Signal::TERM), ("-t 2", Signal::HUP)] {
        let folder = tempfile::tempdir().unwrap();
        let (child, reader) = endless(flags, folder.path());
        let _limit = Limit::on(&child);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let read = std::thread::spawn(move || reader.lines().for_each(drop));
        let output = child.wait_with_output().unwrap();
        read.join().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(code(output.status), 128 + signal.as_raw(), "{flags}: {said}");
        assert!(said.contains("wrote the results so far to r.json\n"), "{flags}: {said}");
        assert_kept(folder.path(), "ended by SIG");
    }
}

#[test]
fn a_run_whose_reader_goes_leaves_what_it_has() {
    for flags in ["-g 2", "-t 2"] {
        let folder = tempfile::tempdir().unwrap();
        let (child, reader) = endless(flags, folder.path());
        let _limit = Limit::on(&child);
        drop(reader);
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{flags}");
        assert_kept(folder.path(), "no process reads collperf's output");
    }
}

#[test]
fn a_run_that_has_nothing_yet_leaves_older_results_alone() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("r.json"), "older").unwrap();
    crate::interrupts::heed();
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args("all_reduce --sizes 64M -n 100000 --backend host -t 2 -J r.json --html r.html".split(' ')).current_dir(folder.path());
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut line = String::new();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    while !line.contains("(us)") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0);
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::INT.as_raw()));
    assert_eq!(files(folder.path()), [("r.json".to_owned(), "older".to_owned())]);
}
