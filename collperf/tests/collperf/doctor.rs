//! `collperf doctor`: on this machine, with simulated devices, and between hosts, two of which cannot reach each other.

use std::process::{Child, Command, Output, Stdio};

use crate::common::hosts::{Hosts, run, skip};
use crate::common::ranks::free_port;

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");

fn doctor(arguments: &str) -> Command {
    let mut command = Command::new(COLLPERF);
    command.arg("doctor").args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the line about a subject.
#[track_caller]
fn line<'a>(text: &'a str, subject: &str) -> &'a str {
    text.lines().find(|line| line.contains(subject)).unwrap_or_else(|| panic!("nothing about {subject} in\n{text}"))
}

#[test]
fn this_machine_is_looked_at() {
    let output = doctor("").output().unwrap();
    let text = said(&output);
    assert!(output.stderr.is_empty() && [Some(0), Some(7)].contains(&output.status.code()), "{output:?}");
    assert_eq!(output.status.code() == Some(7), text.contains("  BAD   "), "{text}");
    for subject in [
        "processors",
        "load",
        "memory",
        "open files",
        "memlock",
        "/dev/shm",
        "huge pages",
        "congestion control",
        "network",
        "driver",
        "NCCL",
    ] {
        line(&text, subject);
    }
    // Every problem comes with advice.
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.windows(2).filter(|pair| pair[0].starts_with("  note") || pair[0].starts_with("  BAD")) {
        assert!(pair[1].trim_start().starts_with("-> "), "{pair:?}");
    }
}

#[test]
fn a_limit_that_is_too_low_is_bad() {
    let output = Command::new("sh").args(["-c", &format!("ulimit -n 100; exec {COLLPERF} doctor")]).output().unwrap();
    let text = said(&output);
    assert!(output.status.code() == Some(7) && line(&text, "open files").contains("BAD"), "{output:?}");
}

#[test]
fn devices_are_looked_at() {
    let output = doctor("").envs(simgpu::environment()).output().unwrap();
    let text = said(&output);
    assert!(line(&text, "driver").contains("8 devices") && line(&text, "NCCL").contains("ok"), "{text}");
    line(&text, "peer access");
    line(&text, "NVLink");
}

#[test]
fn the_nccl_that_the_environment_names_is_looked_at() {
    let output = doctor("").envs(simgpu::environment()).env("COLLECTIVES_NCCL_LIBRARY", "/none/libnccl.so.2").output().unwrap();
    let text = said(&output);
    assert!(line(&text, "NCCL").contains("note") && line(&text, "NCCL").contains("/none/libnccl.so.2: "), "{text}");
}

#[test]
fn ranks_of_one_host_have_no_others() {
    let output = doctor("-g 3").output().unwrap();
    assert!(line(&said(&output), "other hosts").contains("none in this job"), "{output:?}");
}

#[test]
fn a_rank_that_does_not_come_is_bad() {
    let mut command = doctor("-T 1");
    let port = free_port().to_string();
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
    let output = command.output().unwrap();
    let text = said(&output);
    assert!(output.status.code() == Some(7) && text.contains("1 of 2 joined in 1 s; missing: rank 1"), "{output:?}");
    // Other tasks end with the exit code of this error.
    for task in ["pairs", "stragglers"] {
        let mut command = Command::new(COLLPERF);
        command.args([task, "-T", "1"]).env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
        let output = command.env("MASTER_PORT", free_port().to_string()).output().unwrap();
        assert_eq!(output.status.code(), Some(4), "{output:?}");
    }
}

/// Runs the doctor with a rank on each host, and returns rank 0's output and exit code.
fn on_hosts(hosts: &Hosts, net: u8) -> (String, Option<i32>) {
    let start = |host: usize| {
        let mut command = hosts.command(host, COLLPERF);
        command.args(["doctor", "-T", "20"]).env("RANK", host.to_string()).env("WORLD_SIZE", hosts.count.to_string());
        command.env("MASTER_ADDR", format!("10.99.{net}.1")).env("MASTER_PORT", "29519").spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..hosts.count).map(start).collect();
    let ended: Vec<Output> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    (said(&ended[0]), ended[0].status.code())
}

#[test]
fn hosts_that_do_not_reach_each_other_are_named() {
    let hosts = match Hosts::up(41, 3) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let (text, code) = on_hosts(&hosts, 41);
    assert!(code == Some(0) && line(&text, "other hosts").contains("2 of 2 can be reached"), "{text}");
    // A firewall on host 1 that blocks everything to host 2.
    if let Err(why) = run("ip", &["-n", &hosts.space(1), "route", "add", "prohibit", "10.99.41.3/32"]) {
        skip!("a route cannot be closed: {why}");
    }
    let (text, code) = on_hosts(&hosts, 41);
    assert_eq!(code, Some(7), "{text}");
    assert!(
        text.contains("1 of 2 cannot be reached: rank 2 at 10.99.41.3")
            && text.contains("-> open all TCP ports above 1024 between the hosts"),
        "{text}"
    );
}
