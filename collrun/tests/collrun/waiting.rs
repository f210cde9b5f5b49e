//! Launchers that wait for those of other hosts report that; here two run on one host.

use std::io::{BufRead, BufReader, Lines};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use rustix::process::{Pid, Signal, kill_process};

/// One of two launchers, whose rank does nothing. The first line comes after a quarter of the time in which hosts must
/// join.
struct Launcher {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
}

impl Launcher {
    fn start(node: usize, port: u16) -> Self {
        let flags = format!("--node-rank {node} --master-addr 127.0.0.1 --master-port {port} --rdzv-conf join_timeout=1");
        Self::start_with(&flags, &["sleep", "600"])
    }

    fn start_with(flags: &str, program: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(["--nnodes", "2", "--grace", "0"]).args(flags.split_whitespace()).arg("--").args(program);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, said }
    }

    /// Returns the next line with these words. The stream ends with the launcher.
    #[track_caller]
    fn line(&mut self, words: &str) -> String {
        let mut lines = Vec::new();
        for line in self.said.by_ref().map(Result::unwrap) {
            if line.contains(words) {
                return line;
            }
            lines.push(line);
        }
        panic!("{words:?} is not in {lines:?}")
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

#[test]
fn the_first_host_says_who_is_missing_and_when_all_have_come() {
    let port = crate::common::ports::free_port();
    let mut first = Launcher::start(0, port);
    let line = first.line("waiting for");
    let expected = format!("collrun: waiting for node 1 of 2 (numbered from 0): its launcher has not connected to 127.0.0.1:{port} in ");
    assert!(line.starts_with(&expected), "{line}");
    let _second = Launcher::start(1, port);
    assert_eq!(first.line("have connected"), "collrun: all 2 nodes have connected");
}

#[test]
fn another_host_says_what_keeps_it_from_the_first() {
    let mut second = Launcher::start(1, crate::common::ports::free_port());
    let line = second.line("waiting for node 0: ");
    assert!(line.contains("connection refused") && line.contains("no process listens on this port"), "{line}");
}

/// Tests a port at which no process listens and none can: this happens to all launchers of a host that try to listen at
/// the same moment.
#[test]
fn hosts_without_numbers_that_could_not_serve_try_again() {
    let port = crate::common::ports::free_port();
    let taken = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&taken, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
    let flags = format!("--rdzv-endpoint 127.0.0.1:{port} --rdzv-conf join_timeout=12");
    let mut launchers = [(); 2].map(|()| Launcher::start_with(&flags, &["true"]));
    for launcher in &mut launchers {
        let line = launcher.line("waiting for node 0: ");
        assert!(line.contains("connection refused"), "{line}");
    }
    drop(taken);
    for launcher in &mut launchers {
        assert!(launcher.child.wait().unwrap().success());
    }
}

/// Tests a name like that of a pod that has not started yet. No label of a name may be longer than 63 bytes, so no
/// server is asked for this one.
#[test]
fn a_host_whose_name_has_no_address_yet_is_waited_for() {
    let flags = format!("--rdzv-endpoint {}:29500 --rdzv-conf join_timeout=1", "x".repeat(64));
    let mut launcher = Launcher::start_with(&flags, &["true"]);
    let line = launcher.line("waiting for node 0: ");
    assert!(line.contains("failed to lookup address"), "{line}");
}
