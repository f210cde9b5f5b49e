//! The processors that `collperf`'s ranks may use, and what it prints about them.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use crate::common::limit::Limit;
use crate::common::ranks::run_ranks;
use crate::processors::{Processors, allowed, allowed_here, core_count, on_one_processor, read_list};

fn collperf(flags: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args(["all_reduce", "--backend", "host", "--sizes", "8", "-n", "2"]).args(flags.split_whitespace()).stdin(Stdio::null());
    command
}

/// Returns the line that reports what ranks are bound to.
#[track_caller]
fn told(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find_map(|line| line.strip_prefix("# bound to: ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// Returns the kind of binding, and the processors of each rank, as in the results.
#[track_caller]
fn results(flags: &str) -> (String, Vec<Processors>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.json");
    let output = collperf(flags).arg("-J").arg(&path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let config = &json["config"];
    let lists = config["devices"].as_array().unwrap().iter().map(|device| read_list(device["processors"].as_str().unwrap()));
    (config["bound_to"].as_str().unwrap().to_owned(), lists.collect())
}

/// Returns the processors of this machine, if they belong to at least two cores.
fn of_two_cores() -> Option<Processors> {
    let here = allowed_here();
    if core_count(&here) < 2 {
        println!("skipped in part: two cores are needed, and {} may be used", core_count(&here));
        return None;
    }
    Some(here)
}

#[test]
fn two_ranks_have_a_core_each() {
    let Some(here) = of_two_cores() else { return };
    for flags in ["-g 2", "-g 2 --bind core", "-g 2 --pin", "-t 2", "-g 2 --ranks thread --bind core"] {
        let (to, masks) = results(flags);
        assert_eq!((&*to, masks.len()), ("core", 2), "{flags}");
        assert!(masks[0].is_disjoint(&masks[1]), "{flags}: {masks:?}");
        assert!(masks.iter().all(|mask| core_count(mask) == 1 && mask.is_subset(&here)), "{flags}: {masks:?}");
    }
}

#[test]
fn the_kernel_says_the_same() {
    let mut running = collperf("-g 2 -N 0").stdout(Stdio::piped()).spawn().unwrap();
    let limit = Limit::on(&running);
    // The output is read until the end of the test: a process without a reader ends.
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines().map(Result::unwrap);
    let rank = |line: &str| line.split_whitespace().skip_while(|word| *word != "Pid").nth(1)?.parse::<u32>().ok();
    let ranks: Vec<u32> = lines.by_ref().filter_map(|line| rank(&line)).take(2).collect();
    // Ranks are bound before they are listed, and run until they are stopped.
    let masks: Vec<_> = ranks.iter().map(|pid| allowed(&format!("/proc/{pid}/status"))).collect();
    rustix::process::kill_process(rustix::process::Pid::from_child(&running), rustix::process::Signal::TERM).unwrap();
    running.wait().unwrap();
    drop((limit, lines));
    match of_two_cores() {
        Some(_) => assert!(masks[0].is_disjoint(&masks[1]) && masks.iter().all(|mask| core_count(mask) == 1), "{masks:?}"),
        None => assert_eq!(masks, vec![allowed_here(); 2]),
    }
}

#[test]
fn ranks_that_are_more_than_the_cores_are_not_bound() {
    let many = allowed_here().len() + 1;
    let (to, masks) = results(&format!("-g {many}"));
    assert_eq!((&*to, masks), ("none", vec![allowed_here(); many]));
    let refused = collperf(&format!("-g {many} --bind core")).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(6), "{refused:?}");
    assert!(said.starts_with(&format!("collperf: --bind core: {many} ranks, but only ")) && said.lines().count() == 1, "{said}");
    // With the older flag, ranks are bound to cores in rotation.
    let (to, masks) = results(&format!("-g {many} --pin"));
    assert!(to == "core" && masks.iter().all(|mask| core_count(mask) == 1), "{masks:?}");
    assert_eq!(masks.last(), masks.get(masks.len() - 1 - core_count(&allowed_here())));
    assert_eq!(collperf("--pin --bind none").output().unwrap().status.code(), Some(6));
}

#[test]
fn why_there_is_no_binding_is_said() {
    let (one, crowded) = on_one_processor(|| told(&collperf("-g 2").output().unwrap()));
    assert_eq!(crowded, format!("none (2 ranks, but only 1 processor may be used, rank 0: cpu {one}, rank 1: cpu {one})"));
    let (one, alone) = on_one_processor(|| told(&collperf("-g 1").output().unwrap()));
    assert_eq!(alone, format!("core (rank 0: cpu {one})"));
    assert!(told(&collperf("-g 2 --bind none").output().unwrap()).starts_with("none (rank 0: cpu"));
}

#[test]
fn another_launcher_decides_unless_it_is_asked_for() {
    let ended = run_ranks(2, || collperf(""));
    let line = told(&ended[0]);
    assert!(line.starts_with("none (left to the launcher, which has set RANK, rank 0: cpu"), "{line}");
    if of_two_cores().is_some() {
        let line = told(&run_ranks(2, || collperf("--bind core"))[0]);
        assert!(line.starts_with("core (rank 0: cpu"), "{line}");
    }
    let many = allowed_here().len() + 1;
    for ended in run_ranks(many, || collperf("--bind core")) {
        assert!(ended.status.code() == Some(6) && String::from_utf8_lossy(&ended.stderr).contains("--bind core: "), "{ended:?}");
    }
}

#[test]
fn caches_and_nodes_are_shared() {
    for bind in ["cache", "numa"] {
        let (to, masks) = results(&format!("-g 3 --bind {bind}"));
        assert!(to == bind && masks.iter().all(|mask| !mask.is_empty() && mask.is_subset(&allowed_here())), "{bind}: {masks:?}");
    }
}
