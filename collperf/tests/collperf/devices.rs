//! `collperf` on devices as a user runs it: started as a program, on the simulated GPU or, with
//! `COLLECTIVES_TEST_GPU=real`, on real ones.

use std::process::{Command, Output, Stdio};

use crate::common::ranks::run_ranks;
use serde_json::Value;

fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

fn is_real() -> bool {
    std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real")
}

/// Prepares a command for devices.
fn on_devices(mut command: Command) -> Command {
    if is_real() {
        // Ranks may have to share a device.
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1").env("NCCL_NVLS_ENABLE", "0");
    } else {
        command.envs(simgpu::environment());
    }
    command
}

/// Runs `collperf` on devices.
fn run(arguments: &str) -> Output {
    on_devices(command(arguments)).output().unwrap()
}

/// Returns the rows of a successful run, each split at blanks, and the whole output. All checks passed.
#[track_caller]
fn rows(arguments: &str) -> (Vec<Vec<String>>, String) {
    let output = run(arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments}\n{text}\n{errors}");
    assert!(text.contains("# Out of bounds values : 0 OK"), "{arguments}\n{text}");
    assert!(!text.contains(" [host] "), "{arguments} did not run on devices\n{text}");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let rows: Vec<Vec<String>> = lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
    for row in &rows {
        // With -I, each half has four more columns.
        let halves = if text.contains("i_cv%") { [8, 16] } else { [8, 12] };
        assert!(halves.iter().all(|column| row[*column] == "0" || row[*column] == "N/A"), "{arguments}: {row:?}");
    }
    (rows, text)
}

#[test]
fn every_collective_is_right() {
    let (rows, text) = rows("all -g 2 -b 1 -e 4K -f 64 -n 2");
    let started: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# Collective test starting: ")).collect();
    assert_eq!(started.len(), 15, "{started:?}");
    // Three sizes each (the first two of an even split are one row if blocks are one element), and one row for the
    // barrier.
    assert!(rows.len() > 2 * 14, "{} rows", rows.len());
    assert!(rows.iter().all(|row| row.len() == 13), "{rows:?}");
    assert!(text.contains("# A barrier runs on the host backend, even with --backend device"));
}

#[test]
fn every_op_and_type_is_right() {
    let (rows, text) = rows("all_reduce -g 2 -o all -d all --sizes 1000 -n 1 -w 0");
    assert_eq!(rows.len(), 15 * 9 - 1 - 3 * 6 - 9, "{text}");
    assert!(text.contains("# These calls were not made, because they are not supported:\n#   avg of bool"), "{text}");
    for kind in ["reduce", "reduce_scatter", "reduce_scatter_v"] {
        for op in ["bxor -d u16", "avg -d bf16", "mulsum -d half", "max -d i8", "sum -d bool", "avg -d f8e4m3"] {
            self::rows(&format!("{kind} -g 3 -o {op} --sizes 30,999 -n 1 -w 0 --ranks thread"));
        }
    }
}

#[test]
fn data_larger_than_the_pattern_is_right() {
    // Inputs repeat after 65488 elements.
    for line in ["all_gather -d u8", "all_reduce -d u16 -o bor", "all_to_all_v -d i16", "reduce_scatter -d f16", "sendrecv -d u8"] {
        rows(&format!("{line} -g 2 --sizes 300001 -n 1 -w 0 -u 3"));
    }
}

#[test]
fn graphs_are_launched() {
    let (rows, text) = rows("all_reduce -g 2 -o bxor -d u16 --sizes 8,1K -n 4 -G 3");
    assert_eq!((rows.len(), text.contains(" graph: 3 ")), (2, true), "{text}");
    self::rows("all_to_all -g 2 --sizes 64 -n 2 -G 1 -z 1 -C 1 -c 0");
}

#[test]
fn calls_are_made_in_groups() {
    let (all, text) = rows("all -g 2 --sizes 8,1K -n 2 -m 5 --ranks thread");
    assert!(all.len() > 2 * 13 && text.contains(" agg iters: 5 "), "{text}");
    rows("all_reduce -g 2 --sizes 64 -n 3 -m 2 -G 2");
    rows("reduce -g 2 -o mulsum --sizes 64 -n 3 -m 2 -I 1 -z 1 -r all");
}

#[test]
fn groups_run_at_the_same_time() {
    let mut command = on_devices(command("all -g 4 --sizes 8,1000 -n 2 -c 1 --ranks thread"));
    let output = command.env("NCCL_TESTS_SPLIT", "DIV 2").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains(" FAILED") && text.contains("#  Rank  3 Group  1 "), "{output:?}");
    assert!(!text.contains(" [host] "), "{text}");
}

#[test]
fn a_hypercube_is_right() {
    let (all, _) = rows("hypercube -g 4 --sizes 8,1K,100000 -n 2 --ranks thread -d u8");
    assert_eq!(all.len(), 3, "{all:?}");
}

#[test]
fn threads_of_a_process_have_devices_of_their_own() {
    if is_real() {
        println!("skipped: the simulated GPU has eight devices, a real machine as many as it has");
        return;
    }
    let (_, text) = rows("all_reduce -t 2 -g 2 --sizes 64 -n 1");
    assert!(text.contains("# nThread 2 nGpus 2 ") && text.contains("#  Rank  3 ") && !text.contains("#  Rank  4 "), "{text}");
    let chosen = |device: &str, arguments: &str| on_devices(command(arguments)).env("NCCL_TESTS_DEVICE", device).output().unwrap();
    for kind in ["process", "thread"] {
        let output = chosen("5", &format!("all_reduce -g 3 --sizes 64 -n 1 --ranks {kind}"));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && [" device  5 ", " device  6 ", " device  7 "].iter().all(|part| text.contains(part)),
            "{output:?}"
        );
    }
    let output = chosen("6", "all_reduce -g 3 --sizes 64");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("NCCL_TESTS_DEVICE=6: 3 ranks of a process need devices 6 to 8, but there are only 8"), "{said}");
}

#[test]
fn calls_can_be_waited_for_each() {
    for blocking in 0..4 {
        let (rows, text) = rows(&format!("all_reduce -g 2 --sizes 64 -n 3 -z {blocking} -I 1 -K 1 -S 1"));
        assert_eq!((rows[0].len(), text.contains("# Blocking Enabled")), (5 + 8 + 8 + 2, blocking > 0), "{text}");
    }
}

#[test]
fn buffers_are_registered() {
    for register in [1, 2] {
        let (_, text) = rows(&format!("all_reduce -g 2 --sizes 64,4K -n 2 -R {register} -x 1 -M 1"));
        assert!(text.contains("# GPU memory usage     : 8.0 KiB in buffers") || text.contains("# GPU memory usage     : 8 KiB"), "{text}");
    }
    rows("broadcast -g 2 -r -1 --sizes 64 -n 2 -y 1");
}

#[test]
fn times_to_issue_have_a_column_and_a_field_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    let (_, text) = rows(&format!("reduce -g 2 --sizes 64 -n 2 -C 1 -J {}", path.display()));
    assert_eq!(text.matches(" cputime ").count(), 2, "{text}");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(json["nccl_version"].as_u64().unwrap() > 21800, "{json}");
    assert_eq!((&json["config"]["backend"], &json["config"]["ngpus"]), (&"device".into(), &1.into()), "{json}");
    let device = &json["config"]["devices"][1];
    let bus = device["device_hex"].as_str().unwrap();
    assert!(bus.len() == 10 && bus.matches(':').count() == 2, "{device}");
    let half = &json["results"][0]["out_of_place"];
    assert!(half["cpu_time"].as_f64().unwrap() > 0.0 && half.get("time").is_none(), "{json}");
}

#[test]
fn cells_are_sampled() {
    let output = run("all -g 2 --colls all_reduce,broadcast,sendrecv --cell-ms 5 --sizes 8,1K");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(
        text.contains("\nours,nccl,sendrecv,none,f32,2,8,") && text.contains("\nours,nccl,all_reduce,sum_inplace,bf16,2,1024,"),
        "{text}"
    );
}

#[test]
fn ranks_are_as_many_as_devices() {
    if is_real() {
        println!("skipped: the simulated GPU has eight devices, a real machine as many as it has");
        return;
    }
    let (_, text) = rows("all_reduce --sizes 64 -n 1 --ranks thread");
    assert_eq!(text.lines().filter(|line| line.starts_with("#  Rank ")).count(), 8, "{text}");
}

#[test]
fn without_a_driver_auto_is_the_host() {
    let output = command("all_reduce --sizes 64 -n 2").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    if text.contains("nGpus 1") {
        println!("skipped: this machine has a driver");
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(text.contains("# Measured on the host backend, because there is no device backend: ") && text.contains("libcuda"), "{text}");
    for (flags, code) in [("--backend device", 5), ("--backend device -g 1 --ranks thread", 5), ("-G 2", 5), ("-M 1 --backend host", 5)] {
        let output = command(&format!("all_reduce --sizes 64 {flags}")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags}: {output:?}");
        assert!(said.starts_with(&format!("collperf: {}", &flags[..2])), "{flags}: {said}");
        assert!(flags.contains("host") || said.contains("libcuda"), "{flags}: {said}");
    }
}

#[test]
fn ranks_of_a_launcher_use_devices_too() {
    let call = || command("all_reduce --backend device --sizes 64");
    if !is_real() {
        let without = run_ranks(2, call);
        let has_driver = without.iter().all(|rank| rank.status.success());
        let said = |rank: &Output| String::from_utf8_lossy(&rank.stderr).contains("there is no device backend: rank 0");
        assert!(has_driver || without.iter().all(|rank| rank.status.code() == Some(5) && said(rank)), "{without:?}");
    }
    let ended = run_ranks(2, || on_devices(call()));
    let text = String::from_utf8_lossy(&ended[0].stdout);
    assert!(ended.iter().all(|rank| rank.status.success()), "{ended:?}");
    assert!(text.contains(" nGpus 1 ") && text.contains("Out of bounds values : 0 OK"), "{ended:?}");
}
