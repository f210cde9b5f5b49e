//! Results made by hand.

use serde_json::{Value, json};

use super::*;
use crate::report::plot::compared;

fn row(size: u64, time: f64, wrong: u64) -> Value {
    json!({
        "size": size, "count": size / 4, "type": "float", "redop": "sum", "root": "-1",
        "out_of_place": {"time": time, "alg_bw": 1.0, "bus_bw": 2.0, "nwrong": wrong},
        "out_of_place_per_iter": {"p50_us": time / 2.0, "something new": 1},
        "in_place": null, "actual_iterations": 20, "experiment_name": "all_reduce"
    })
}

fn results(name: &str, rows: &[Value]) -> Results {
    let document = json!({"version": 3, "start_time": "noon", "results": rows, "args": []});
    Results::parse(name.to_owned(), document.to_string().as_bytes()).unwrap()
}

#[test]
fn cells_of_both_are_compared_and_others_listed() {
    let a = results("a.json", &[row(8, 1.0, 0), row(16, 2.0, 0), row(32, 3.0, 0)]);
    let b = results("b.json", &[row(64, 1.0, 0), row(16, 2.5, 0), row(8, 0.5, 0)]);
    let comparison = Comparison::new(a, b);
    let text = comparison.text(Some(10.0));
    for part in [
        "# A: a.json (noon)\n",
        "# \"p50\": median time of a row's calls if each call was timed separately, else \"-\"\n",
        "# all_reduce sum float\n",
        "           8       1.00       0.50  0.500          0.50        0.25  0.500      2.000      2.000\n",
        "          16       2.00       2.50  1.250          1.00        1.25  1.250      2.000      2.000  over 10 %\n",
        "# Only in A:\n#   32 B all_reduce sum float\n",
        "# Only in B:\n#   64 B all_reduce sum float\n",
        "# Cells in both: 2. Ratio of the times, B/A: median 0.875, least 0.500, largest 1.250\n",
        "# 1 of these cells took more than 10 % longer in B than in A\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(comparison.is_worse(10.0) && comparison.is_worse(24.9) && !comparison.is_worse(25.0));
    let picture = compared("two results", &comparison.heading(), "", &comparison.series());
    assert_eq!(picture.matches("<polyline").count(), 2 * 2 + 2, "two lines in two panels, and in the legend");
    assert!(picture.contains(">all_reduce sum float: B<"));
}

/// Returns the cells of each line of a table, without its rule.
fn cells(text: &str) -> Vec<Vec<&str>> {
    let lines = text.lines().filter(|line| line.starts_with('|') && !line.contains("---"));
    lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

#[test]
fn comparisons_are_tables_of_markdown() {
    let (a, b) = (results("a.json", &[row(8, 1.0, 0), row(32, 3.0, 0)]), results("b.json", &[row(8, 1.25, 0), row(64, 1.0, 0)]));
    let text = Comparison::new(a, b).markdown(Some(10.0));
    let heads = ["size (B)", "A (us)", "B (us)", "B/A", "A p50 (us)", "B p50 (us)", "p50 B/A", "A busbw (GB/s)", "B busbw (GB/s)", ""];
    let figures = ["8", "1.00", "1.25", "1.250", "0.50", "0.62", "1.250", "2.000", "2.000", "over 10 %"];
    assert_eq!(cells(&text), [heads, figures], "{text}");
    for part in [
        "A: a.json (noon)  \n",
        "\n### all_reduce sum float\n\n|",
        "Only in A: 32 B all_reduce",
        "Cells in both: 1. Ratio of the times, B/A",
        "\"p50\": median",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(!text.lines().any(|line| line.starts_with("# ")), "{text}");
    let text = "peer,transport,collective,op,dtype,nranks,bytes,lat_p50_us\nours,shm,all_reduce,sum,f32,2,8,2.0\na|b,shm,all_reduce,sum,f32,2,16,4\n";
    let text = Peers::parse("cells.csv".to_owned(), text).unwrap().markdown();
    assert_eq!(cells(&text), [["size (B)", "ours (us)", "a/b (us)"], ["8", "2.00", "-"], ["16", "-", "4.00"]], "{text}");
}

#[test]
fn of_repeated_cells_the_medians_count() {
    let repeated = results("a.json", &[row(8, 9.0, 0), row(8, 1.0, 2), row(8, 2.0, 0)]);
    assert_eq!(repeated.cells.len(), 1);
    let figures = repeated.cells[0].1;
    assert_eq!((figures.time_us, figures.p50_us, figures.wrong), (2.0, Some(1.0), 2));
    let comparison = Comparison::new(results("b.json", &[row(8, 2.0, 0)]), repeated);
    assert!(comparison.is_worse(100.0) && comparison.text(None).contains("2 wrong elements in B"));
}

#[test]
fn nothing_in_common_is_said() {
    let comparison = Comparison::new(results("a.json", &[]), results("b.json", &[row(8, 1.0, 0)]));
    assert!(comparison.is_empty() && comparison.text(None).contains("No cell is in both"));
}

#[test]
fn what_is_no_result_is_said_to_be_none() {
    let mut timeless = row(8, 1.0, 0);
    timeless["out_of_place"] = json!({"alg_bw": 1.0, "bus_bw": 1.0});
    let timeless = json!({"version": 3, "results": [timeless]}).to_string();
    for (text, reason) in [
        ("", "does not contain results that collperf wrote with -J"),
        ("[1, 2]", "does not contain results"),
        (r#"{"version": 3}"#, "missing field `results`"),
        (r#"{"version": 4, "results": []}"#, "version 4, but this collperf reads only version 3"),
        (&timeless, "8 B all_reduce sum float: it has no time"),
    ] {
        let error = Results::parse("x".to_owned(), text.as_bytes()).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    assert!(percent("-1").is_err() && percent("x").is_err() && percent("nan").is_err());
    assert_eq!(percent("5%"), Ok(5.0));
}

#[test]
fn cells_of_several_peers_stand_beside_each_other() {
    let text = "peer,more,transport,collective,op,dtype,nranks,bytes,lat_p50_us\n\
        ours,x,shm,all_reduce,sum_inplace,f32,2,1024,2.0\nours,x,tcp,all_reduce,sum_inplace,f32,2,1024,8\n\
        MPI,x,shm,all_reduce,sum_inplace,f32,2,1024,4.0\nMPI,x,shm,all_reduce,sum_inplace,f32,2,4,1\n";
    let peers = Peers::parse("cells.csv".to_owned(), text).unwrap();
    assert_eq!(
        peers.text(),
        "# cells.csv\n\
         #\n# \"size\": bytes of the larger of a rank's source and destination buffers. \"(us)\": median time of a call, in microseconds. \"-\": not measured.\n\
         #\n# all_reduce sum f32, in place, 2 ranks, shm\n\
         #   size (B)       ours (us)        MPI (us)\n           4               -            1.00\n        1024            2.00            4.00\n\
         #\n# all_reduce sum f32, in place, 2 ranks, tcp\n#   size (B)       ours (us)\n        1024            8.00\n"
    );
    let lines: Vec<_> = peers.series().into_iter().map(|line| (line.label, line.colour, line.dashed, line.points.len())).collect();
    let expected = [("ours, shm", 0, false, 1), ("ours, tcp", 0, true, 1), ("MPI, shm", 1, false, 2)];
    assert_eq!(lines, expected.map(|(label, colour, dashed, points)| (label.to_owned(), colour, dashed, points)));
    assert!((peers.series()[0].points[0].busbw.middle - 0.512).abs() < 1e-9, "2 (n - 1) / n times bytes over time");
}

#[test]
fn what_are_no_cells_is_said_to_be_none() {
    let head = "peer,transport,collective,op,dtype,nranks,bytes,lat_p50_us";
    for (lines, reason) in [
        ("", "it has no cells"),
        ("a,shm,all_reduce,sum,f32,2,8", "line 2: too few columns"),
        ("a,shm,all_reduce,sum,f32,2,8,0", "line 2: \"0\" is not a time above 0"),
        ("a,shm,all_reduce,sum,f32,two,8,1", "line 2: \"two\" is not a number"),
        ("a,shm,all_reduc,sum,f32,2,8,1", "line 2: "),
    ] {
        let error = Peers::parse("x".to_owned(), &format!("{head}\n{lines}\n")).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let quoted = format!("{head}\r\n\r\n\"MPI, 4.1\",shm,all_reduce,sum,f32,2,8,1\r\n");
    assert!(Peers::parse("x".to_owned(), &quoted).unwrap().text().contains("MPI, 4.1 (us)"));
    assert!(Peers::parse("x".to_owned(), "{}").unwrap_err().contains("the file has no column peer"));
}

#[test]
fn what_takes_from_the_worth_of_results_is_told() {
    let with = |name: &str, document: Value| Results::parse(name.to_owned(), document.to_string().as_bytes()).unwrap();
    let busy = json!({"version": 3, "results": [], "config": {"notes": ["other programs keep 1.4 of 2 cores busy"]}});
    let cut = json!({"version": 3, "results": [], "errors": ["ended by SIGINT"]});
    let comparison = Comparison::new(with("a", busy), with("b", cut));
    for text in [comparison.text(None), comparison.markdown(None)] {
        for part in ["ote: A: other programs keep 1.4 of 2 cores busy", "ote: B: the run ended early: ended by SIGINT"] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}

#[test]
fn a_difference_of_single_measurements_may_be_chance() {
    let run = |times: usize| results("r", &vec![row(8, 1.0, 0); times]);
    for (a, b, is_told) in [(1, 5, true), (5, 2, true), (3, 5, false)] {
        let text = Comparison::new(run(a), run(b)).text(None);
        assert_eq!(text.contains("# note: some cells were measured fewer than 3 times"), is_told, "{text}");
    }
}
