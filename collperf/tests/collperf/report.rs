//! `collperf report`, on files that collperf has written.

use std::path::Path;
use std::process::Command;

fn collperf(arguments: &[&str], folder: &Path) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_collperf")).args(arguments).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn two_measurements_are_compared_in_words_and_in_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    for (file, sizes) in [("a.json", "8,64"), ("b.json", "64,512")] {
        let flags = ["all_reduce", "-g", "2", "--backend", "host", "-n", "5", "-N", "2", "--sizes", sizes, "-J", file];
        let (code, _, complaint) = collperf(&flags, folder.path());
        assert_eq!(code, Some(0), "{complaint}");
    }
    let (code, said, complaint) = collperf(&["report", "a.json", "b.json", "--plot", "c.svg", "--threshold", "1000000"], folder.path());
    assert_eq!(code, Some(0), "{complaint}");
    for part in ["# A: a.json", "# all_reduce sum float\n", "# Only in A:\n#   8 B all", "#   512 B all", "# Cells in both: 2. Ratio of"] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    let picture = std::fs::read_to_string(folder.path().join("c.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("all_reduce sum float, in place: B"));
}

/// Checks that the picture in the README is generated from its record.
#[test]
fn the_picture_of_the_record_is_what_the_record_gives() {
    let record = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/record");
    let folder = tempfile::tempdir().unwrap();
    let cells = record.join("comparison-zen5.csv");
    let (code, said, complaint) = collperf(&["report", cells.to_str().unwrap(), "--plot", "new.svg"], folder.path());
    assert_eq!(code, Some(0), "{complaint}");
    assert!(said.contains("# all_reduce sum f32, in place, 2 ranks, shared memory\n"), "{said}");
    let [new, kept] =
        [folder.path().join("new.svg"), record.join("comparison-zen5.svg")].map(|path| std::fs::read_to_string(path).unwrap());
    assert!(new == kept, "collperf report CSV --plot SVG, for both in benches/record/");
}

#[test]
fn a_threshold_makes_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let result = |time: f64| {
        let half = format!(r#"{{"time": {time}, "alg_bw": 1, "bus_bw": 1, "nwrong": null}}"#);
        let names = r#""type": "none", "redop": "none", "root": "-1", "experiment_name": "barrier""#;
        format!(r#"{{"version": 3, "results": [{{"size": 8, {names}, "out_of_place": {half}, "in_place": null}}]}}"#)
    };
    std::fs::write(folder.path().join("a"), result(1.0)).unwrap();
    std::fs::write(folder.path().join("b"), result(1.2)).unwrap();
    std::fs::write(folder.path().join("c"), "{}").unwrap();
    for (arguments, expected) in [
        (&["a", "b"][..], 0),
        (&["a", "b", "--threshold", "10"], 7),
        (&["a", "b", "--threshold", "30%"], 0),
        (&["b", "a", "--threshold", "0"], 0),
        (&["a", "c"], 1),
        (&["a", "none"], 1),
        (&["a"], 6),
        (&["a", "--threshold", "10"], 6),
        (&["a", "b", "--threshold", "-1"], 6),
    ] {
        let (code, _, complaint) = collperf(&[&["report"], arguments].concat(), folder.path());
        assert_eq!(code, Some(expected), "{arguments:?}: {complaint}");
        assert_eq!(complaint.is_empty(), [0, 7].contains(&expected), "{complaint}");
    }
}

#[test]
fn a_page_of_one_file_tells_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let flags =
        ["all", "--colls", "all_reduce,barrier", "-g", "3", "--backend", "host", "-n", "3", "-b", "8", "-e", "64", "--html", "page.html"];
    let (code, _, complaint) = collperf(&flags, folder.path());
    assert_eq!(code, Some(0), "{complaint}");
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    for part in
        ["2 collectives over 3 ranks on 1 host", "All results that were checked are correct.", "<svg", "<td>barrier</td>", &flags.join(" ")]
    {
        assert!(page.contains(part), "{part:?} is not in\n{page}");
    }
    assert_eq!(page.matches("<td>all_reduce</td>").count(), 4 * 2);
    let (code, _, complaint) = collperf(&["barrier", "-g", "2", "--backend", "host", "--html", "none/page.html"], folder.path());
    assert!(code == Some(1) && complaint.contains("creating none/page.html"), "{complaint}");
}
