//! `collrun` as a user meets it: started as a program, with shells as ranks.

#![expect(clippy::unwrap_used, reason = "tests end where something unforeseen happens")]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// `collrun` with flags (split at blanks) and a shell script for every rank.
fn collrun(flags: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.args(flags.split_whitespace()).args(["--", "sh", "-c", script]).stdin(Stdio::null());
    command
}

fn output(flags: &str, script: &str) -> Output {
    collrun(flags, script).output().unwrap()
}

fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn handle(pid: i32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).ok()
}

/// Whether the process ends within some seconds; one that is gone already has.
fn ends(process: Option<OwnedFd>) -> bool {
    let Some(process) = process else { return true };
    let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
    poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

#[test]
fn ranks_know_who_they_are() {
    let script = r#"echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE \
        $MASTER_ADDR $TORCHELASTIC_USE_AGENT_STORE $TORCHELASTIC_RESTART_COUNT; test "$MASTER_PORT" -gt 0; test -n "$TORCHELASTIC_RUN_ID""#;
    let run = output("--nproc-per-node 3", script);
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let expected: Vec<String> = (0..3).map(|rank| format!("[{rank}] {rank} 3 {rank} 3 0 1 {rank} 3 127.0.0.1 True 0")).collect();
    assert_eq!(sorted_lines(&run.stdout), expected);
    assert!(run.stderr.is_empty(), "{run:?}");
}

#[test]
fn the_second_host_counts_on() {
    // The store is the first host's to serve, so this one starts nothing that another test could have taken.
    let run = output(
        "--nproc-per-node 2 --nnodes 3 --node-rank 1 --master-addr head --master-port 7",
        "echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT",
    );
    assert_eq!(sorted_lines(&run.stdout), ["[2] 2/6 head:7", "[3] 3/6 head:7"]);
}

#[test]
fn the_default_is_one_rank() {
    assert_eq!(output("", "echo $RANK/$WORLD_SIZE").stdout, b"[0] 0/1\n");
}

#[test]
fn streams_stay_apart_and_last_lines_are_kept() {
    let run = output("--nproc-per-node 2", "printf 'out\\nno newline'; printf err >&2");
    assert_eq!(sorted_lines(&run.stdout), ["[0] no newline", "[0] out", "[1] no newline", "[1] out"]);
    assert_eq!(sorted_lines(&run.stderr), ["[0] err", "[1] err"]);
}

#[test]
fn without_prefix_output_is_as_it_was() {
    let run = output("--no-prefix", "printf 'a\\nb'");
    assert_eq!(run.stdout, b"a\nb");
}

#[test]
fn rank_0_reads_what_is_piped_in() {
    let mut child = collrun("--nproc-per-node 2", "cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"[0] hello\n");
}

#[test]
fn a_failed_rank_stops_the_others_and_gives_its_code() {
    let began = Instant::now();
    let run = output("--nproc-per-node 3", "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60");
    assert_eq!(run.status.code(), Some(7), "{run:?}");
    let message = String::from_utf8_lossy(&run.stderr);
    assert!(message.contains("rank 1 ") && message.contains("exit code 7") && message.contains("stopping the others"), "{message}");
    assert_eq!(message.lines().count(), 1, "the ranks that were stopped are no news: {message}");
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_killed_rank_gives_its_signal() {
    let run = output("--nproc-per-node 2", "if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 60");
    assert_eq!(run.status.code(), Some(137), "{run:?}");
    assert!(String::from_utf8_lossy(&run.stderr).contains("signal 9 (SIGKILL)"), "{run:?}");
}

#[test]
fn ranks_that_will_not_stop_are_killed() {
    // Rank 0 fails only once rank 1 says that it is deaf, through a file.
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let script = format!(
        "if [ $RANK = 1 ]; then trap '' TERM; touch {0}; while :; do sleep 60; done; fi; while [ ! -e {0} ]; do sleep 0.01; done; exit 3",
        ready.display()
    );
    let run = output("--nproc-per-node 2 --grace 0.2", &script);
    assert_eq!(run.status.code(), Some(3), "{run:?}");
    let message = String::from_utf8_lossy(&run.stderr);
    assert!(message.contains("still running 0.2 s after SIGTERM: rank 1; killing"), "{message}");
}

#[test]
fn a_program_that_is_not_there() {
    let run = Command::new(env!("CARGO_BIN_EXE_collrun")).args(["--nproc-per-node", "2", "/no/such/program"]).output().unwrap();
    assert_eq!(run.status.code(), Some(127));
    assert_eq!(String::from_utf8_lossy(&run.stderr), "collrun: \"/no/such/program\": program not found\n");
    let run = Command::new(env!("CARGO_BIN_EXE_collrun")).arg("/etc/passwd").output().unwrap();
    assert_eq!(run.status.code(), Some(126), "{run:?}");
}

#[test]
fn usage_errors_say_what_is_missing() {
    let run = output("--nnodes 2 --node-rank 0 --master-port 7", "true");
    assert_eq!(run.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&run.stderr).contains("--master-addr"), "{run:?}");
}

/// A job of two ranks that have said who they are (and trap a signal first, if asked).
fn started(script: &str) -> (std::process::Child, BufReader<std::process::ChildStdout>, Vec<i32>) {
    let mut child = collrun("--nproc-per-node 2", script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let pids = (0..2)
        .map(|_| {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            line.split_whitespace().last().unwrap().parse().unwrap()
        })
        .collect();
    (child, lines, pids)
}

#[test]
fn signals_reach_the_ranks() {
    let (mut child, mut lines, _) = started("trap 'echo heard; exit 0' TERM; echo $$; while :; do sleep 0.01; done");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(sorted_lines(rest.as_bytes()), ["[0] heard", "[1] heard"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn ranks_that_die_of_a_signal_passed_on_are_no_failure_to_report() {
    let (mut child, _lines, _) = started("echo $$; exec sleep 60");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!((child.wait().unwrap().code(), message.as_str()), (Some(143), ""));
}

#[test]
fn no_rank_outlives_a_killed_launcher() {
    let (mut child, _lines, pids) = started("echo $$; exec sleep 60");
    let ranks: Vec<_> = pids.into_iter().map(|pid| handle(pid).expect("the rank runs")).collect();
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    for rank in ranks {
        assert!(ends(Some(rank)), "a rank outlived collrun");
    }
}

#[test]
fn what_ranks_leave_behind_is_killed() {
    let run = output("", "sleep 60 >/dev/null 2>&1 & echo $!");
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let text = String::from_utf8(run.stdout).unwrap();
    let left: i32 = text.split_whitespace().last().unwrap().parse().unwrap();
    assert!(ends(handle(left)), "a process of the rank outlived collrun");
}

#[test]
fn a_secret_is_made_for_a_job_or_taken_from_the_environment() {
    let script = "echo ${#COLLECTIVES_SECRET}";
    assert_eq!(sorted_lines(&output("--nproc-per-node 2 --secret", script).stdout), ["[0] 64", "[1] 64"]);
    assert_eq!(sorted_lines(&output("--nproc-per-node 2", script).stdout), ["[0] 0", "[1] 0"]);
    let given = collrun("--secret", script).env("COLLECTIVES_SECRET", "a secret of 23 bytes...").output().unwrap();
    assert_eq!(sorted_lines(&given.stdout), ["[0] 23"]);
    let short = collrun("", script).env("COLLECTIVES_SECRET", "hunter2").output().unwrap();
    let words = String::from_utf8_lossy(&short.stderr).into_owned();
    assert!(short.status.code() == Some(2) && words.contains("COLLECTIVES_SECRET") && !words.contains("hunter2"), "{words}");
    let hosts = output("--secret --nnodes 2 --node-rank 1 --master-addr head --master-port 7", "true");
    assert_eq!(hosts.status.code(), Some(2), "{hosts:?}");
}

#[test]
fn the_others_go_on_without_a_rank_that_fails_where_they_may() {
    let folder = tempfile::tempdir().unwrap();
    let dead = folder.path().join("dead");
    // Rank 1 ends after rank 0 has begun to die.
    let script =
        format!("if [ $RANK = 0 ]; then touch {0}; kill -9 $$; fi; while [ ! -e {0} ]; do sleep 0.01; done; echo went on", dead.display());
    let run = output("--nproc-per-node 2 --keep-going", &script);
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert!(String::from_utf8_lossy(&run.stdout).contains("went on"), "{run:?}");
    assert!(
        String::from_utf8_lossy(&run.stderr).contains("rank 0") && String::from_utf8_lossy(&run.stderr).contains("signal 9 (SIGKILL)"),
        "{run:?}"
    );
    let run = output("--nproc-per-node 2 --keep-going", "exit 4");
    assert_eq!(run.status.code(), Some(4), "nobody succeeded: {run:?}");
}
