//! Results for Prometheus and as Markdown, and the locations of result files.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

fn collperf(arguments: &str, folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args(arguments.split_whitespace()).args(["--backend", "host", "-g", "2", "-n", "2"]).current_dir(folder).output().unwrap()
}

#[test]
fn prometheus_gets_one_value_for_each_series() {
    let folder = tempfile::tempdir().unwrap();
    let output = collperf("all -N 2 -r -1 --sizes 8,1000 --prometheus out.prom", folder.path());
    assert!(output.status.success(), "{output:?}");
    let text = std::fs::read_to_string(folder.path().join("out.prom")).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let series: BTreeSet<&str> = lines.iter().map(|line| line.rsplit_once(' ').unwrap().0).collect();
    assert!(series.len() == lines.len() && lines.len() > 100, "{text}");
    assert!(lines.iter().all(|line| line.starts_with("collperf_") && line.rsplit_once(' ').unwrap().1.parse::<f64>().is_ok()), "{text}");
    let wanted = "collperf_wrong_elements{collective=\"reduce\",op=\"sum\",type=\"float\",bytes=\"1000\",root=\"1\",in_place=\"true\",ranks=\"2\",backend=\"host\",transport=\"auto\"} 0";
    assert!(series.contains("collperf_busy_cores"), "{text}");
    assert!(lines.contains(&wanted) && lines.contains(&"collperf_success 1") && lines.contains(&"collperf_ranks 2"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn a_file_that_cannot_be_is_found_out_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    for path in ["absent/out.prom", "/", "/proc/out.prom"] {
        let output = collperf(&format!("all_reduce --sizes 8 --prometheus {path}"), folder.path());
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true), "{output:?}");
    }
}

#[test]
fn a_mean_below_nine_tenths_of_what_is_asked_for_fails() {
    let folder = tempfile::tempdir().unwrap();
    let run = |least: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
        command.args(["all_reduce", "--backend", "host", "-g", "2", "--sizes", "4K", "-n", "2", "--prometheus", "out.prom"]);
        let output = command.env("NCCL_TESTS_MIN_BW", least).current_dir(folder.path()).output().unwrap();
        let line = String::from_utf8_lossy(&output.stdout).lines().find(|line| line.contains("Avg bus bandwidth")).map(str::to_owned);
        (output.status.code(), line.unwrap_or_default().split_whitespace().last().unwrap_or_default().to_owned())
    };
    let success = || std::fs::read_to_string(folder.path().join("out.prom")).unwrap().contains("collperf_success 1");
    assert_eq!((run("0.0000001"), success()), ((Some(0), "OK".to_owned()), true));
    assert_eq!((run("1000000"), success()), ((Some(7), "FAILED".to_owned()), false));
    assert_eq!(run("fast").0, Some(6));
}

#[test]
fn markdown_takes_the_place_of_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let output = collperf("all --colls reduce,sendrecv,barrier --sizes 8,64 --markdown", folder.path());
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{output:?}");
    let titles: Vec<&str> = text.lines().filter(|line| line.starts_with('#')).collect();
    assert_eq!(titles, ["## reduce", "## sendrecv", "## barrier"]);
    let cells: BTreeSet<usize> = text.lines().filter(|line| line.starts_with('|')).map(|line| line.matches('|').count()).collect();
    assert_eq!(cells.into_iter().collect::<Vec<_>>(), [14], "{text}");
    for other in ["-I 1", "-S 1", "--explain", "--cell-ms 5", "--csv -"] {
        let output = collperf(&format!("all_reduce --sizes 8 --markdown {other}"), folder.path());
        assert!(output.status.code() == Some(6) && String::from_utf8_lossy(&output.stderr).contains("--markdown"), "{output:?}");
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

#[test]
fn results_go_where_they_are_sent_also_the_second_time() {
    let folder = tempfile::tempdir().unwrap();
    let all = "-J r.json --csv r.csv --prometheus r.prom --html r.html --plot r.svg --trace r.trace";
    let names = ["r.csv", "r.html", "r.json", "r.prom", "r.svg", "r.trace"];
    for (size, older) in [(8, ""), (64, ", replacing an older one")] {
        let output = collperf(&format!("all_reduce --sizes {size} {all}"), folder.path());
        assert!(output.status.success(), "{output:?}");
        let files = files(folder.path());
        assert_eq!(files.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), names);
        assert!(files.iter().all(|(_, text)| !text.is_empty()));
        assert_eq!(results(&files[2].1)["results"][0]["size"], size);
        let said = String::from_utf8_lossy(&output.stdout);
        names.iter().for_each(|name| assert!(said.contains(&format!("# wrote {name}{older}\n")), "{name}: {said}"));
    }
    // If standard output is used for something else, the files are named on standard error.
    let output = collperf("all_reduce --sizes 8 --csv - -J r.json", folder.path());
    let said = String::from_utf8_lossy(&output.stderr);
    // There may be a note that the machine is busy.
    let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("collperf: note: ")).collect();
    assert_eq!(said, ["collperf: wrote r.json, replacing an older one"]);
}

#[test]
fn two_kinds_of_results_have_two_files() {
    let folder = tempfile::tempdir().unwrap();
    for (flags, words) in [
        ("--html r --plot r", "--html and --plot name the same file, r"),
        ("-J r.json --trace r.json", "-J and --trace name the same file, r.json"),
        ("-J r.json --csv ./r.json", "-J and --csv name the same file, r.json"),
        ("--trace r -N 0", "--trace -N 0"),
    ] {
        let output = collperf(&format!("all_reduce --sizes 8 {flags}"), folder.path());
        assert!(output.status.code() == Some(6) && String::from_utf8_lossy(&output.stderr).contains(words), "{output:?}");
    }
    let output = collperf("all_reduce --sizes 8 --trace absent/r", folder.path());
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true), "before anything is measured: {output:?}");
    assert!(files(folder.path()).is_empty());
}
