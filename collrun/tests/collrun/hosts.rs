//! Several hosts with their own addresses: network namespaces joined by a bridge. Needs root and `ip`; if something is
//! missing, the test prints a line and counts as skipped.

use std::path::Path;
use std::process::Output;

use crate::common::hosts::{Hosts, run, skip};
use crate::common::programs::{example, program};

fn printed(what: &str, output: Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{what}: {}\n{out}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    out
}

/// Runs a program under one collrun on each host.
fn on_hosts(hosts: &Hosts, net: u8, per_host: usize, program: &Path, arguments: &[&str]) -> Vec<String> {
    on_hosts_that_meet_at(&format!("10.99.{net}.1"), hosts, per_host, program, arguments)
}

/// Does the same, with this address of the first host.
fn on_hosts_that_meet_at(address: &str, hosts: &Hosts, per_host: usize, program: &Path, arguments: &[&str]) -> Vec<String> {
    let launchers: Vec<_> = (0..hosts.count)
        .map(|host| {
            hosts
                .command(host, env!("CARGO_BIN_EXE_collrun"))
                .args(["--nproc-per-node", &per_host.to_string(), "--nnodes", &hosts.count.to_string()])
                .args(["--node-rank", &host.to_string(), "--master-addr", address, "--master-port", "29511"])
                .args(["--rdzv-conf", "join_timeout=60", "--"])
                .arg(program)
                .args(arguments)
                .spawn()
                .unwrap()
        })
        .collect();
    launchers.into_iter().map(|launcher| printed(&program.to_string_lossy(), launcher.wait_with_output().unwrap())).collect()
}

#[test]
fn gradient_averaging_learns_on_two_hosts_under_two_launchers() {
    let averaging = match example("gradient_averaging") {
        Ok(averaging) => averaging,
        Err(why) => skip!("{why}"),
    };
    let hosts = match Hosts::up(1, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let output = on_hosts(&hosts, 1, 2, &averaging, &[]);
    assert!(output[0].contains("parameters alike on all 4 ranks, bit for bit: true"), "{output:?}");
}

#[test]
fn hosts_meet_at_an_address_of_their_link() {
    let averaging = match example("gradient_averaging") {
        Ok(averaging) => averaging,
        Err(why) => skip!("{why}"),
    };
    let hosts = match Hosts::up(3, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    for host in 0..2 {
        let address = format!("fe80::99:{host}/64");
        if let Err(why) = run("ip", &["-n", &hosts.space(host), "addr", "add", &address, "dev", "eth0", "nodad"]) {
            skip!("no address of a link can be had: {why}");
        }
    }
    let output = on_hosts_that_meet_at("fe80::99:0%eth0", &hosts, 2, &averaging, &[]);
    assert!(output[0].contains("parameters alike on all 4 ranks, bit for bit: true"), "{output:?}");
}

#[test]
fn every_collective_is_right_on_three_hosts() {
    let collperf = match program("collperf") {
        Ok(collperf) => collperf,
        Err(why) => skip!("{why}"),
    };
    let hosts = match Hosts::up(2, 3) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    for per_host in [1, 2] {
        let output = on_hosts(&hosts, 2, per_host, &collperf, &["all", "-b", "8", "-e", "64K", "-f", "64", "-n", "2", "-w", "1"]);
        assert!(output[0].contains("Out of bounds values : 0 OK"), "{}", output[0]);
    }
}
