//! `collperf` in processes that a launcher has started, and in groups of ranks, on the host backend.

use std::process::{Command, Output, Stdio};

use crate::common::ranks::run_ranks;

fn command(arguments: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args(arguments.split_whitespace()).args(["--backend", "host", "-n", "2"]).stdin(Stdio::null()).envs(variables.iter().copied());
    command
}

/// Returns the output of a successful process, whose checks all passed.
#[track_caller]
fn table(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
    text
}

/// Returns the group of each rank, from the table.
fn groups(text: &str) -> Vec<usize> {
    let group = |line: &str| line.split_whitespace().skip_while(|word| *word != "Group").nth(1)?.parse().ok();
    // From the first collective's table; all tables have the same groups.
    let ranks = text.lines().skip_while(|line| !line.starts_with("#  Rank ")).take_while(|line| line.starts_with("#  Rank "));
    ranks.filter_map(group).collect()
}

/// Returns the error for a refused command line.
#[track_caller]
fn refusal(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn ranks_are_processes_times_threads_times_gpus() {
    for (processes, flags, ranks) in [(2, "-g 3", 6), (2, "-t 2 -g 2", 8), (3, "-t 2", 6), (1, "-t 13", 13)] {
        let ended = run_ranks(processes, || command(&format!("all_reduce --sizes 8,1000 {flags}"), &[]));
        let text = table(&ended[0]);
        assert_eq!(groups(&text).len(), ranks, "{flags}: {text}");
        assert!(ended[1..].iter().all(|other| other.status.success() && other.stdout.is_empty()), "{ended:?}");
    }
    let alone = command("all_gather --sizes 64 -t 2 -g 2", &[]).output().unwrap();
    assert_eq!(groups(&table(&alone)).len(), 4);
}

#[test]
fn what_processes_cannot_be_is_refused() {
    for (flags, words) in [
        ("-g 2 --ranks process", "-g 2 --ranks process: RANK is set, so a launcher has started this process"),
        ("-t 2 --ranks process", "-t 2 --ranks process: -t starts ranks as threads"),
        ("-t 4096 -g 4096", "16777216 ranks in one process"),
    ] {
        for ended in run_ranks(2, || command(&format!("all_reduce --sizes 8 {flags}"), &[])) {
            assert_eq!(ended.status.code(), Some(6), "{ended:?}");
            assert!(String::from_utf8_lossy(&ended.stderr).contains(words), "{ended:?}");
        }
    }
    for flags in ["-t 0", "-g 0", "-t 99999", "-m 0", "-p 2", "-t x", "-r -2", "-r x"] {
        refusal(command(&format!("all_reduce {flags}"), &[]));
    }
    // Processes with different numbers of ranks report that.
    let count = std::cell::Cell::new(1);
    let ended = run_ranks(2, || {
        count.set(count.get() + 1);
        command(&format!("all_reduce --sizes 8 -g {}", count.get()), &[])
    });
    assert!(ended.iter().any(|rank| String::from_utf8_lossy(&rank.stderr).contains("has different arguments from rank 0")), "{ended:?}");
}

#[test]
fn groups_run_at_the_same_time() {
    for (split, flags, expected) in [
        ("MOD 2", "all_reduce -g 4", vec![0, 1, 0, 1]),
        ("DIV 3", "all_gather -g 7 --ranks thread", vec![0, 0, 0, 1, 1, 1, 2]),
        ("| 0x1", "alltoall -t 4", vec![1, 1, 3, 3]),
        ("& 0b10", "all -g 4 --ranks thread", vec![0, 0, 2, 2]),
        ("%99", "reduce -r -1 -g 3", vec![0, 1, 2]),
        ("/2", "hypercube -g 4", vec![0, 0, 1, 1]),
    ] {
        let output = command(&format!("{flags} --sizes 8,64,1000 -c 1"), &[("NCCL_TESTS_SPLIT", split)]).output().unwrap();
        assert_eq!(groups(&table(&output)), expected, "{split} {flags}");
    }
    let masked = command("all_reduce -g 4 --sizes 8", &[("NCCL_TESTS_SPLIT_MASK", "1")]).output().unwrap();
    assert_eq!(groups(&table(&masked)), [0, 1, 0, 1]);
    // Under a launcher the number is that of the process, as in nccl-tests.
    let ended = run_ranks(2, || command("all_reduce -t 2 --sizes 8", &[("NCCL_TESTS_SPLIT", "MOD 2")]));
    assert_eq!(groups(&table(&ended[0])), [0, 0, 1, 1]);
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let with = |split: &str, flags: &str| refusal(command(&format!("{flags} --sizes 8 -g 3"), &[("NCCL_TESTS_SPLIT", split)]));
    for split in ["XOR 1", "MOD 0", "DIV", "AND 0x1ffffffff", "7"] {
        assert!(with(split, "all_reduce").contains(&format!("NCCL_TESTS_SPLIT={split:?}: ")));
    }
    assert!(with("MOD 2", "reduce -r -1").contains("differ in size"));
    assert!(with("MOD 2", "reduce -r 1").contains("-r 1: there are 1 ranks"));
    assert!(with("MOD 1", "hypercube").contains("must be a power of two, but is 3"));
    assert!(with("MOD 2", "all_reduce --cell-ms 5").contains("--cell-ms"));
    assert!(refusal(command("all_reduce -g 2", &[("NCCL_TESTS_SPLIT_MASK", "1ffffffff")])).contains("is not a number"));
    assert!(refusal(command("hypercube -g 6", &[])).contains("hypercube: the number of ranks must be a power of two, but is 6"));
    assert!(refusal(command("hypercube -g 4 -m 2", &[])).contains("-m 2: the steps of hypercube"));
    assert!(refusal(command("all_reduce -D 1 -R 2", &[])).contains("-D 1: "));
    assert!(refusal(command("alltoallv", &[("NCCL_TESTS_ALLTOALLV_SPREAD", "2")])).contains("NCCL_TESTS_ALLTOALLV_SPREAD"));
}

#[test]
fn a_device_is_no_choice_on_the_host_backend() {
    let output = command("all_reduce -g 1", &[("NCCL_TESTS_DEVICE", "0")]).output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("NCCL_TESTS_DEVICE=0: the host backend uses no device"), "{output:?}");
}

#[test]
fn several_calls_are_counted_as_one() {
    let output = command("all -g 3 --ranks thread --sizes 8,1000 -m 3 -I 1 -z 3", &[]).output().unwrap();
    assert!(table(&output).contains(" agg iters: 3 "), "{output:?}");
    let output = command("hypercube -g 8 --ranks thread --sizes 1,1000,100000 -c 2 -d i16", &[]).output().unwrap();
    assert_eq!(table(&output).lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count(), 3, "{output:?}");
}
