//! Elastic jobs: hosts that come late, that are killed, stopped, signalled or cut off, and what the others do then. Each
//! host is a collrun on this machine, or in its own network namespace. All ranks are shells, except in one test.
//!
//! A host that answers late on a busy machine may be given up for a while, which adds attempts. So tests wait for what
//! must come, and do not count attempts.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::hosts::{Hosts, skip};
use crate::common::limit::{Limit, PATIENCE};
use crate::common::ports::free_port;
use crate::common::programs::example;

/// One collrun, and what it prints.
struct Launcher {
    child: Child,
    lines: Receiver<String>,
    read: Vec<String>,
    _limit: Limit,
}

impl Launcher {
    fn start(mut command: Command) -> Self {
        let (out, write) = std::io::pipe().unwrap();
        command.stdin(Stdio::null()).stdout(write.try_clone().unwrap()).stderr(write);
        let child = command.spawn().unwrap();
        // The command holds the ends of the pipe for writing.
        drop(command);
        Self { lines: lines(out), read: vec![], _limit: Limit::on(&child), child }
    }

    /// Waits for a line with these words, and returns it.
    #[track_caller]
    fn line(&mut self, words: &str) -> String {
        let until = Instant::now() + PATIENCE;
        while let Ok(line) = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            self.read.push(line.clone());
            if line.contains(words) {
                return line;
            }
        }
        panic!("{words:?} is not in {:#?}", self.read)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end. Returns the exit code, and the lines that were not read yet.
    fn end(&mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        (code, self.lines.iter().collect::<Vec<_>>().join("\n"))
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads lines from a separate thread.
fn lines(out: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || BufReader::new(out).lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
    lines
}

/// A job at a port of this machine. Its ranks print their places, and end once a file exists.
struct Job {
    flags: String,
    folder: tempfile::TempDir,
}

impl Job {
    fn new(nnodes: &str, more: &str, conf: &str) -> Self {
        let conf = format!("--rdzv-conf last_call_timeout=0.2,keep_alive_interval=1,keep_alive_max_attempt=3,{conf}");
        let flags = format!("--nnodes {nnodes} --rdzv-endpoint 127.0.0.1:{} --grace 1 {conf} {more}", free_port());
        Self { flags, folder: tempfile::tempdir().unwrap() }
    }

    fn go(&self) -> std::path::PathBuf {
        self.folder.path().join("go")
    }

    fn host(&self) -> Launcher {
        self.host_with(Command::new(env!("CARGO_BIN_EXE_collrun")), "")
    }

    fn host_with(&self, mut command: Command, more: &str) -> Launcher {
        let script = format!(
            "echo place $GROUP_RANK/$GROUP_WORLD_SIZE rank $RANK/$WORLD_SIZE; while [ ! -e {} ]; do sleep 0.01; done; echo succeeded",
            self.go().display()
        );
        command.args(self.flags.split_whitespace()).args(more.split_whitespace()).args(["--", "sh", "-c", &script]);
        Launcher::start(command)
    }
}

/// Starts a job on two hosts. The first of the result serves the store.
fn two_hosts(job: &Job) -> [Launcher; 2] {
    let (mut one, mut other) = (job.host(), job.host());
    let serves = one.line("/2 rank").contains("place 0/2");
    other.line("/2 rank");
    if serves { [one, other] } else { [other, one] }
}

#[test]
fn hosts_come_late_are_killed_and_stopped_and_the_others_go_on() {
    let job = Job::new("1:3", "--max-restarts 100 --nproc-per-node 2", "");
    let mut first = job.host();
    first.line("rank 1/2");
    let mut second = job.host();
    first.line("place 0/2 rank 1/4");
    second.line("place 1/2 rank 3/4");
    let mut third = job.host();
    first.line("place 0/3 rank 1/6");
    third.line("place 2/3 rank 5/6");
    // The numbers of those behind the lost host move up.
    second.signal(Signal::KILL);
    first.line("lost node 1 (");
    first.line("place 0/2 rank 1/4");
    third.line("place 1/2 rank 3/4");
    // A stopped host is left out, although its ranks run, and comes back when it runs again.
    third.signal(Signal::STOP);
    let said = first.line("lost node 1 (");
    assert!(said.contains("its collrun has not answered for 3 s"), "{said}");
    first.line("place 0/1 rank 1/2");
    third.signal(Signal::CONT);
    third.line("the job goes on without this host");
    first.line("place 0/2 rank 1/4");
    third.line("place 1/2 rank 3/4");
    std::fs::write(job.go(), "").unwrap();
    for host in [&mut first, &mut third] {
        host.line("succeeded");
        assert_eq!(host.end().0, Some(0));
    }
}

#[test]
fn a_host_that_is_asked_to_end_leaves_at_once_and_is_named() {
    crate::interrupts::heed();
    let job = Job::new("1:2", "--max-restarts 1", "");
    let [mut server, mut other] = two_hosts(&job);
    other.signal(Signal::TERM);
    assert_eq!(other.end().0, Some(143));
    let said = server.line("lost node 1 (");
    assert!(said.contains("its collrun was ended by SIGTERM"), "{said}");
    server.line("place 0/1");
    // No restart is left: the next loss ends the job.
    let mut third = job.host();
    server.line("place 0/2");
    third.line("place 1/2");
    third.signal(Signal::TERM);
    let (code, _) = third.end();
    assert_eq!(code, Some(143));
    server.line("lost node 1 (");
    assert_eq!(server.end().0, Some(1));
}

#[test]
fn the_end_of_the_host_that_serves_the_store_ends_the_job_and_names_it() {
    crate::interrupts::heed();
    for (signal, words) in [(Signal::KILL, "lost"), (Signal::STOP, "lost"), (Signal::TERM, "its collrun was ended by SIGTERM")] {
        let job = Job::new("2:3", "--max-restarts 100", "");
        let [mut first, mut second] = two_hosts(&job);
        first.signal(signal);
        let said = second.line("node 0 (");
        assert!(said.contains("which serves the store") && said.contains(words), "{said}");
        assert_eq!(second.end().0, Some(1), "{signal:?}");
        if signal == Signal::TERM {
            assert_eq!(first.end().0, Some(143));
        }
    }
}

#[test]
fn a_failed_rank_restarts_all_hosts_as_often_as_it_may() {
    let job = Job::new("1:2", "--max-restarts 1", "");
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS $WORLD_SIZE; if [ $RANK = 1 ]; then exit 7; fi; exec sleep 600";
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(job.flags.split_whitespace()).args(["--", "sh", "-c", script]);
        Launcher::start(command)
    };
    let mut hosts = [start(), start()];
    for host in &mut hosts {
        host.line("first failure: rank 1 ");
        let (code, _) = host.end();
        let text = host.read.join("\n");
        assert!(code == Some(7) && text.contains("restarts after failures: 1 of 1; reason: a failure: rank 1 "), "{text}");
        assert!(text.contains(" of 1 2"), "{text}");
    }
}

#[test]
fn spares_wait_and_too_few_hosts_do_not_wait_for_ever() {
    let job = Job::new("1:2", "--max-restarts 100", "");
    let (mut first, mut second) = (job.host(), job.host());
    let places = [first.line("place "), second.line("place ")];
    let mut spare = job.host();
    std::fs::write(job.go(), "").unwrap();
    for host in [&mut first, &mut second] {
        assert_eq!(host.end().0, Some(0), "{places:?}");
    }
    let (code, said) = spare.end();
    assert!(matches!(code, Some(0 | 1)), "{said}");
    let job = Job::new("2:3", "", "join_timeout=1");
    let (code, said) = job.host().end();
    assert!(code == Some(1) && said.contains("the job needs at least 2 hosts, and has 1 after 1 s"), "{said}");
}

#[test]
fn a_host_that_waits_for_others_says_so_and_ends_by_ctrl_c() {
    crate::interrupts::heed();
    // The first line comes after a quarter of the time in which hosts must join.
    let job = Job::new("2:3", "", "join_timeout=8");
    let mut host = job.host();
    host.line("waiting for hosts: 1 there, at least 2 and at most 3 take part");
    host.signal(Signal::INT);
    assert_eq!(host.end().0, Some(130));
}

#[test]
fn hosts_of_other_jobs_and_with_other_numbers_of_ranks_are_refused() {
    let job = Job::new("1:3", "", "");
    let mut first = job.host();
    first.line("place 0/1");
    let mut other = job.host_with(Command::new(env!("CARGO_BIN_EXE_collrun")), "--nproc-per-node 2");
    let (code, said) = other.end();
    assert!(code == Some(2) && said.contains("starts 2 ranks, and the other hosts start 1"), "{said}");
    let mut stranger = job.host_with(Command::new(env!("CARGO_BIN_EXE_collrun")), "--rdzv-id other");
    let (code, said) = stranger.end();
    assert!(code == Some(1) && said.contains("--rdzv-id other: the store at 127.0.0.1:") && said.contains("serves another job"), "{said}");
}

/// Runs real ranks, whose store is the one that collrun serves, with a secret.
#[test]
fn ranks_of_an_elastic_job_communicate() {
    let hello = match example("hello") {
        Ok(hello) => hello,
        Err(why) => skip!("{why}"),
    };
    let job = Job::new("2:3", "--nproc-per-node 2", "");
    let start = |program: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(job.flags.split_whitespace()).arg("--").arg(program).env("COLLECTIVES_SECRET", "the secret of this elastic job");
        Launcher::start(command)
    };
    let mut hosts = [start(&hello), start(&hello)];
    for host in &mut hosts {
        host.line("of 4: the mean of all ranks is 1.5");
        assert_eq!(host.end().0, Some(0));
    }
}

/// A host that is cut off from the network: each side is named to the other in time.
#[test]
fn a_host_that_is_cut_off_is_left_behind() {
    let hosts = match Hosts::up(7, 3) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let conf = "last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3";
    let flags = format!("--nnodes 2:3 --max-restarts 100 --rdzv-endpoint 10.99.7.1:29517 --grace 1 --rdzv-conf {conf}");
    let job = Job { flags, folder };
    let mut launchers: Vec<Launcher> = (0..3).map(|host| job.host_with(hosts.command(host, env!("CARGO_BIN_EXE_collrun")), "")).collect();
    for launcher in &mut launchers {
        launcher.line("/3 rank");
    }
    hosts.cut(2);
    let said = launchers[0].line("lost node ");
    assert!(said.contains("its collrun has not answered for 3 s"), "{said}");
    launchers[0].line("place 0/2");
    launchers[1].line("place 1/2");
    launchers[2].line("node 0 (");
    assert_eq!(launchers[2].end().0, Some(1));
    std::fs::write(job.go(), "").unwrap();
    for launcher in &mut launchers[..2] {
        assert_eq!(launcher.end().0, Some(0));
    }
}
