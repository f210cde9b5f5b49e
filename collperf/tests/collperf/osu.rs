//! `collperf osu_latency` and the other benchmarks with OSU's names: columns, checked data, and what they refuse.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::ranks::run_ranks;

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");

fn run(program: impl AsRef<Path>, arguments: &str) -> Output {
    Command::new(program.as_ref()).args(arguments.split_whitespace()).stdin(Stdio::null()).output().unwrap()
}

/// Returns the output of a run that succeeds.
#[track_caller]
fn said(arguments: &str) -> String {
    let output = run(COLLPERF, arguments);
    assert!(output.status.success(), "{arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the words of the lines with figures.
fn rows(text: &str) -> Vec<Vec<&str>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split_whitespace().collect()).collect()
}

#[track_caller]
fn number(word: &str) -> f64 {
    word.parse().unwrap_or_else(|_| panic!("{word:?} is no number"))
}

/// Checks that there is a row for each size, with positive figures and, at the end, a passed check.
#[track_caller]
fn check_rows(text: &str, sizes: &[&str], figures: usize) {
    let rows = rows(text);
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), sizes, "{text}");
    for row in &rows {
        assert_eq!((row.len(), row[figures + 1]), (figures + 2, "Pass"), "{text}");
        assert!(row[1..=figures].iter().all(|word| number(word) > 0.0), "{text}");
    }
}

#[test]
fn latency_has_the_columns_of_osu() {
    let text = said("osu_latency -m 1:4K -i 20 -x 2");
    assert!(text.contains("\n# Size       Avg Latency(us)\n"), "{text}");
    let rows = rows(&text);
    assert_eq!(rows.len(), 13, "{text}");
    assert!(rows.iter().all(|row| row.len() == 2 && number(row[1]) > 0.0), "{text}");
    check_rows(&said("osu_latency -m 3:13 -i 5 -x 0 -c"), &["3", "6", "12"], 1);
    check_rows(&said("osu_latency -m 300000: -i 3 -x 1 -c --transport tcp"), &["300000", "600000", "1200000", "2400000"], 1);
}

#[test]
fn bandwidths_have_the_columns_of_osu() {
    let flags = "-m 1:128K -i 2 -x 1";
    for (benchmark, header) in [
        ("osu_bw", "# Size      Bandwidth (MB/s)\n"),
        ("osu_bibw", "# Size      Bandwidth (MB/s)\n"),
        ("osu_mbw_mr", "# Size                  MB/s        Messages/s\n"),
    ] {
        let text = said(&format!("{benchmark} {flags}"));
        assert!(text.contains(header), "{text}");
        assert_eq!(rows(&text).len(), 18, "{text}");
    }
    for benchmark in ["osu_bw", "osu_bw -b multiple", "osu_bibw", "osu_bw --transport tcp", "osu_bibw --transport tcp -W 3"] {
        check_rows(&said(&format!("{benchmark} -m 7:200K -i 2 -x 1 -c")), &SEVENS, 1);
    }
    for ranks in [2, 4, 6] {
        let text = said(&format!("osu_mbw_mr -g {ranks} -m 7:200K -i 2 -x 0 -c -W 9 -T 60"));
        assert!(text.contains(&format!("# [ pairs: {} ] [ window size: 9 ]\n", ranks / 2)), "{text}");
        check_rows(&text, &SEVENS, 2);
        // Both figures are the same rate; they are printed with two decimals.
        for row in rows(&text) {
            let (bandwidth, messages) = (number(row[1]), number(row[2]));
            assert!((bandwidth - messages * number(row[0]) / 1e6).abs() <= 0.006 + bandwidth * 1e-3, "{text}");
        }
    }
}

/// The sizes from 7 to 200K.
const SEVENS: [&str; 15] = ["7", "14", "28", "56", "112", "224", "448", "896", "1792", "3584", "7168", "14336", "28672", "57344", "114688"];

#[test]
fn messages_of_no_bytes_are_measured_too() {
    for benchmark in ["osu_latency", "osu_bw", "osu_bw -b multiple", "osu_bibw", "osu_mbw_mr"] {
        let text = said(&format!("{benchmark} -m 0:1 -i 3 -x 1 -c"));
        let rows = rows(&text);
        assert_eq!(rows.iter().map(|row| (row[0], row[row.len() - 1])).collect::<Vec<_>>(), [("0", "Pass"), ("1", "Pass")], "{text}");
    }
}

#[test]
fn overlap_has_the_columns_of_osu() {
    let text = said("osu_iallreduce -m 4:64K -i 5 -x 1");
    assert!(text.contains("# Size           Overall(us)       Compute(us)    Pure Comm.(us)        Overlap(%)\n"), "{text}");
    for row in rows(&text) {
        let figures: Vec<f64> = row[1..].iter().map(|word| number(word)).collect();
        assert!(figures.len() == 4 && figures[0] >= figures[1] && figures[2] > 0.0 && (0.0..=100.0).contains(&figures[3]), "{text}");
    }
    let text = said("osu_iallreduce -g 3 -m 60:60 -i 4 -x 0 -f -t 2 -c");
    let rows = rows(&text);
    assert!(rows.len() == 1 && rows[0].len() == 11 && rows[0][10] == "Pass", "{text}");
    let figures: Vec<f64> = rows[0][1..10].iter().map(|word| number(word)).collect();
    // The whole is its parts: start, computation, questions, wait.
    assert!((figures[0] - figures[1..5].iter().sum::<f64>()).abs() < 0.05, "{text}");
    assert!(figures[6] <= figures[5] && figures[5] <= figures[7], "{text}");
}

#[test]
fn tails_and_histograms_are_shown_when_asked() {
    let text = said("osu_latency -m 8:8 -i 500 -z 50,99.9,100 --histogram");
    assert!(
        text.contains("P50 Tail Lat(us)") && text.contains("P99.9 Tail Lat(us)") && text.contains("# pauses of the machine: "),
        "{text}"
    );
    let row = &rows(&text)[0];
    let tails: Vec<f64> = row[2..].iter().map(|word| number(word)).collect();
    assert!(tails.len() == 3 && tails[0] <= tails[1] && tails[1] <= tails[2], "{text}");
    let chart = text.lines().filter(|line| line.starts_with("#   ") && line.contains('*'));
    let calls: f64 = chart.map(|line| number(line.split_whitespace().nth(3).unwrap())).sum();
    assert_eq!(calls, 500.0, "{text}");
    let text = said("osu_bw -m 64:64 -i 50 -z");
    let row = &rows(&text)[0];
    assert!(row.len() == 5 && number(row[2]) >= number(row[3]) && number(row[3]) >= number(row[4]), "{text}");
    // Collectives have histograms below their rows, as comments.
    let text = said("all_reduce -g 2 --backend host -b 8 -e 16 -n 30 --histogram");
    assert_eq!((rows(&text).len(), text.matches("#   in-place calls:\n").count()), (2, 2), "{text}");
}

#[test]
fn a_load_lasts_as_long_as_asked() {
    let began = std::time::Instant::now();
    let text = said("osu_latency -m 8:16 -i 10 -D 0.3 --histogram");
    assert!(began.elapsed().as_secs_f64() >= 0.6, "{text}");
    let calls = text.lines().filter(|line| line.starts_with("#   ") && line.contains('*'));
    assert!(calls.map(|line| number(line.split_whitespace().nth(3).unwrap())).sum::<f64>() > 20.0, "{text}");
    assert_eq!(rows(&said("osu_mbw_mr -m 8:8 -i 3 -D 0.1")).len(), 1);
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    for (arguments, words) in [
        ("osu_latency -g 1", "osu_latency: exactly 2 ranks are needed, but there is 1; give -g 2"),
        ("osu_latency -g 3", "but there are 3"),
        ("osu_bw -g 4", "use osu_mbw_mr"),
        ("osu_mbw_mr -g 3", "pairs need an even number of ranks, but there are 3; give -g 4"),
        ("osu_mbw_mr -g 1", "but there is 1; give -g 2"),
        ("osu_iallreduce -g 1", "at least 2 ranks are needed, but there is 1"),
        ("osu_latency -m 8:4", "the smallest size is above the largest"),
        ("osu_latency -m 2G", "at most 1G"),
        ("osu_latency -m x", "expected a number of bytes"),
        ("osu_bw -W 0", "--window-size"),
        ("osu_bw -i 0", "--iterations"),
        ("osu_bw -D 0", "expected a number of seconds"),
        ("osu_latency -z 101", "expected percentiles"),
        ("osu_latency -W 3", "unexpected argument"),
        ("osu_lat", "not known"),
        ("osu_bibw -W 8192 -m 1G", "of memory, but only"),
    ] {
        let output = run(COLLPERF, arguments);
        assert_eq!(output.status.code(), Some(6), "{arguments}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments}: {output:?}");
    }
    // Refused once, before ranks are started.
    assert_eq!(String::from_utf8_lossy(&run(COLLPERF, "osu_bw -g 3").stderr).lines().count(), 1);
}

#[test]
fn ranks_of_a_launcher_measure_too() {
    let start = |arguments: &'static str| {
        run_ranks(2, move || {
            let mut command = Command::new(COLLPERF);
            command.args(arguments.split_whitespace());
            command
        })
    };
    let ended = start("osu_latency -m 8:8 -i 10 -c");
    assert!(ended.iter().all(|rank| rank.status.success()), "{ended:?}");
    check_rows(&String::from_utf8_lossy(&ended[0].stdout), &["8"], 1);
    assert!(ended[1].stdout.is_empty(), "{ended:?}");
    for rank in start("osu_bw -g 2") {
        assert_eq!(rank.status.code(), Some(6), "{rank:?}");
    }
}

#[test]
fn a_rank_that_is_killed_ends_the_measurement() {
    use rustix::process::{Pid, Signal, kill_process};
    let port = crate::common::ranks::free_port();
    let start = |rank: usize| {
        let mut command = Command::new(COLLPERF);
        command.args(["osu_latency", "-m", "8:8", "-D", "600"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.spawn().unwrap()
    };
    let [mut first, mut second] = [0, 1].map(start);
    // The first line shows that both have met.
    let mut out = std::io::BufReader::new(first.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("# Size") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut out, &mut line).unwrap() > 0);
    }
    kill_process(Pid::from_raw(second.id() as i32).unwrap(), Signal::KILL).unwrap();
    second.wait().unwrap();
    let ended = first.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(3), "{ended:?}");
    assert!(String::from_utf8_lossy(&ended.stderr).contains("rank 1"), "{ended:?}");
}

#[test]
fn links_have_the_names_of_osu() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(COLLPERF, &format!("install-links --osu {}", folder.path().display()));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 5);
    let output = run(folder.path().join("osu_bw"), "-m 8:8 -i 2 -g 2");
    assert!(output.status.success() && rows(&String::from_utf8_lossy(&output.stdout)).len() == 1, "{output:?}");
    symlink(COLLPERF, folder.path().join("osu_bwx")).unwrap();
    assert_eq!(run(folder.path().join("osu_bwx"), "-m 8").status.code(), Some(6));
}

/// Runs `all_to_all_v` with nccl-tests' variables.
fn exchange(variables: &[(&str, &str)], arguments: &str) -> Output {
    let mut command = Command::new(COLLPERF);
    command.args(["all_to_all_v", "--backend", "host", "-n", "2"]).args(arguments.split_whitespace()).stdin(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (format!("NCCL_TESTS_ALLTOALLV_{name}"), *value))).output().unwrap()
}

#[test]
fn a_matrix_says_who_sends_how_much() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("traffic.txt");
    std::fs::write(&path, "0 1024 64\n4096 0 16\n8 32 0\n").unwrap();
    let file = ("MATRIX_FILE", path.to_str().unwrap());
    for (arguments, type_size) in [("-g 3", 4), ("-g 3 -d f64", 8), ("-g 3 -d u8 -c 3 -b 1M -e 1M", 1), ("-g 2 -t 1", 4)] {
        let output = exchange(&[file, ("PRINT_SUMMARY", "1")], arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(": 0 OK"), "{output:?}");
        let largest = if arguments.contains("-g 3") { 4112 } else { 4096 };
        let rows = rows(&text);
        assert!(rows.len() == 1 && number(rows[0][0]) == f64::from(largest) && rows[0][8] == "0", "{type_size} {text}");
        assert!(text.contains("#   rank=1 send_bytes=4"), "{text}");
    }
    let scaled = exchange(&[file, ("MATRIX_SCALE", "2")], "-g 3");
    assert!(rows(&String::from_utf8_lossy(&scaled.stdout))[0][0] == "8224", "{scaled:?}");
    for spread in ["0", "0.5", "1"] {
        let output = exchange(&[("SPREAD", spread)], "-g 3 -b 48 -e 3K -f 4");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && rows(&text).len() == 4 && text.contains(": 0 OK"), "{output:?}");
    }
}

#[test]
fn a_matrix_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (small, ragged, none) = (write("small", "1 2\n3 4\n"), write("ragged", "1 2\n3"), folder.path().join("none").display().to_string());
    for (variables, arguments, code, words) in [
        (&[("MATRIX_FILE", &*small)][..], "-g 3", 6, "has 2 rows, but there are 3 ranks"),
        (&[("MATRIX_FILE", &*ragged)], "-g 2", 6, "row 1 has 1 numbers"),
        (&[("MATRIX_FILE", &*none)], "-g 2", 1, "reading "),
        (&[("MATRIX_FILE", "/dev/zero")], "-g 2", 1, "reading /dev/zero"),
        (&[("MATRIX_FILE", &*small)], "-g 2 -b 8 -e 64", 6, "the sizes come from the file"),
        (&[("MATRIX_FILE", &*small), ("SPREAD", "1")], "-g 2", 6, "unset one"),
        (&[("MATRIX_SCALE", "2")], "-g 2", 6, "no matrix to scale"),
        (&[("SPREAD", "2")], "-g 2", 6, "expected a number from 0 to 1"),
    ] {
        let output = exchange(variables, arguments);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), complaint.contains(words)), (Some(code), true), "{words}: {output:?}");
    }
}
