//! `collperf trace`, which merges the ranks' trace files, and `collperf … --trace`.

use std::process::Command;

use crate::trace_files::{lanes, names, read, write_three};

fn collperf(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_collperf")).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_files_of_all_ranks_are_put_together() {
    let folder = tempfile::tempdir().unwrap();
    let traces = folder.path().join("traces");
    write_three(&traces);
    let merged = folder.path().join("all.json");
    let (code, said, complaint) = collperf(&["trace", &traces.display().to_string(), "-o", &merged.display().to_string()]);
    assert_eq!((code, said), (Some(0), format!("{}: 3 ranks\n", merged.display())), "{complaint}");
    let trace = read(&merged);
    assert_eq!(names(&trace, "process_name").len(), 3);
    let lanes = lanes(&trace);
    // No rank leaves a sum before the last one has entered it.
    for number in 0..3 {
        let of_rank = |rank: u64| lanes[&(rank, 1)].iter().filter(|call| call.2 == "all_reduce").nth(number).unwrap();
        let sums: Vec<_> = (0..3).map(of_rank).collect();
        let (last, first) = (sums.iter().map(|sum| sum.0).max().unwrap(), sums.iter().map(|sum| sum.0 + sum.1).min().unwrap());
        // Each thread reads its two clocks one after the other, so their offset is inexact.
        assert!(last <= first + 1_000_000_000, "{sums:?}");
    }
}

#[test]
fn collperf_traces_what_it_measures() {
    let folder = tempfile::tempdir().unwrap();
    for kind in ["process", "thread"] {
        let file = folder.path().join(kind);
        let path = file.display().to_string();
        let flags =
            ["broadcast", "-g", "2", "--backend", "host", "--sizes", "64,4096", "-n", "5", "-c", "0", "--ranks", kind, "--trace", &path];
        let (code, _, complaint) = collperf(&flags);
        assert_eq!(code, Some(0), "{complaint}");
        let trace = read(&file);
        assert_eq!(names(&trace, "process_name").len(), 2);
        let lanes = lanes(&trace);
        for rank in 0..2 {
            let of_size = |bytes: u64| lanes[&(rank, 1)].iter().filter(|call| call.2 == "broadcast" && call.3["bytes"] == bytes).count();
            assert!(of_size(64) >= 10 && of_size(4096) >= 10, "timed in place and out of place");
        }
    }
}

#[test]
fn a_folder_without_traces_is_an_error_in_words() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("trace-x.json"), "{").unwrap();
    let (code, _, complaint) = collperf(&["trace", &folder.path().display().to_string()]);
    assert_eq!(code, Some(1));
    assert!(complaint.contains("not JSON") && complaint.contains("no traces in this folder"), "{complaint}");
    let (code, _, complaint) = collperf(&["trace", &folder.path().join("none").display().to_string()]);
    assert!(code == Some(1) && complaint.contains("reading"), "{complaint}");
}
