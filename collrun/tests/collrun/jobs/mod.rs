//! Tests of `collrun` from a user's view: started as a program, with shells as ranks.

mod ends;
mod given;
mod live;
mod scarce;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::common::limit::Limit;

/// Returns a `collrun` command with flags (split at blanks) and a shell script for every rank.
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

/// Returns whether the process ends within some seconds, or has already ended.
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
    // The first host serves the store, so this launcher starts nothing that another test could have taken.
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
    let last = message.lines().last().unwrap();
    assert!(last.starts_with("collrun: first failure: rank 1 (local rank 1) on ") && last.ends_with(": exit code 7"), "{message}");
    assert_eq!(message.lines().count(), 2, "the ranks that were stopped are no news: {message}");
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
    // Rank 0 fails only after rank 1 has reported, through a file, that it ignores signals.
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let script = format!(
        "if [ $RANK = 1 ]; then trap '' TERM; touch {0}; while :; do sleep 60; done; fi; while [ ! -e {0} ]; do sleep 0.01; done; exit 3",
        ready.display()
    );
    let run = output("--nproc-per-node 2 --grace 0.2", &script);
    assert_eq!(run.status.code(), Some(3), "{run:?}");
    let message = String::from_utf8_lossy(&run.stderr);
    assert!(message.contains("killing rank 1: still running 0.2 s after SIGTERM"), "{message}");
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
    // A name that resolves to the loopback interface.
    for flags in [
        "--node-rank 0 --master-addr 127.1 --master-port 7",
        "--node-rank 1 --master-addr 127.1 --master-port 7",
        "--rdzv-endpoint 127.1:7",
    ] {
        let run = output(&format!("--nnodes 2 {flags}"), "true");
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.code() == Some(1) && said.contains("127.1: on this host the name resolves to 127.0.0.1"), "{flags}: {run:?}");
        assert!(said.contains("/etc/hosts"), "{said}");
    }
    let run = output("--nnodes 2 --node-rank 0 --master-port 7", "true");
    assert_eq!(run.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&run.stderr).contains("--master-addr"), "{run:?}");
}

/// Starts a job of two ranks and waits until they have printed their process ids (after they trap a signal, if asked).
fn started(script: &str) -> (std::process::Child, BufReader<std::process::ChildStdout>, Vec<i32>, Limit) {
    let mut child = collrun("--nproc-per-node 2", script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let limit = Limit::on(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let pids = (0..2)
        .map(|_| {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            line.split_whitespace().last().unwrap().parse().unwrap()
        })
        .collect();
    (child, lines, pids, limit)
}

#[test]
fn signals_reach_the_ranks() {
    let (mut child, mut lines, _, _limit) = started("trap 'echo heard; exit 0' TERM; echo $$; while :; do sleep 0.01; done");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(sorted_lines(rest.as_bytes()), ["[0] heard", "[1] heard"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn ranks_that_die_of_a_signal_passed_on_are_no_failure_to_report() {
    let (mut child, _lines, _, _limit) = started("echo $$; exec sleep 60");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!((child.wait().unwrap().code(), message.as_str()), (Some(143), ""));
}

#[test]
fn no_rank_outlives_a_killed_launcher() {
    let (mut child, _lines, pids, _limit) = started("echo $$; exec sleep 60");
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

/// Creates a temporary folder.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Returns the files below a folder, by their relative paths without the name of the run.
fn files(folder: &std::path::Path) -> Vec<(String, String)> {
    let run = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let (mut found, mut left) = (vec![], vec![run.clone()]);
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            found.push((path.strip_prefix(&run).unwrap().display().to_string(), std::fs::read_to_string(&path).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn all_ranks_are_started_anew_as_often_as_they_may_be() {
    // Rank 1 fails after rank 0 has reported that it runs.
    let folder = folder();
    let script = format!(
        "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS; touch {0}/$RANK.$TORCHELASTIC_RESTART_COUNT; \
        if [ $TORCHELASTIC_RESTART_COUNT -ge 2 ]; then exit 0; fi; if [ $RANK = 0 ]; then exec sleep 60; fi; \
        while [ ! -e {0}/0.$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.01; done; exit 7",
        folder.path().display()
    );
    let run = output("--nproc-per-node 2 --max-restarts 3", &script);
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert_eq!(sorted_lines(&run.stdout), ["[0] 0/3", "[0] 1/3", "[0] 2/3", "[1] 0/3", "[1] 1/3", "[1] 2/3"]);
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(said.contains("restarting all ranks, 2 of 3, after a failure: rank 1 ") && !said.contains("3 of 3"), "{said}");
    let run = output("--nproc-per-node 2 --max-restarts 1", &script);
    assert_eq!(run.status.code(), Some(7), "{run:?}");
    assert!(String::from_utf8_lossy(&run.stderr).lines().last().unwrap().contains("first failure: rank 1 "), "{run:?}");
}

#[test]
fn a_job_that_is_told_to_stop_is_not_begun_anew() {
    let mut child = collrun("--max-restarts 5", "echo $$; exec sleep 60").stdout(Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn ranks_that_are_deaf_to_a_signal_are_killed_in_the_end() {
    crate::interrupts::heed();
    for (signal, name, code) in [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143)] {
        let script = format!("trap '' {name}; echo $$; while :; do sleep 0.01; done");
        let mut child = collrun("--grace 0.2", &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _limit = Limit::on(&child);
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut String::new()).unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        // The signal ended the job, so the rank did not fail.
        assert_eq!(said, format!("collrun: killing rank 0: still running 0.2 s after SIG{name}\n"));
        assert_eq!(child.wait().unwrap().code(), Some(code));
    }
}

/// Runs two launchers of one job at the same port, each with its own flags, and the same script.
fn two_hosts(flags: [&str; 2], script: &str) -> [Output; 2] {
    let launchers = flags.map(|flags| {
        let flags = format!("--nnodes 2 --nproc-per-node 2 --rdzv-conf join_timeout=60 {flags}");
        collrun(&flags, script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let _limits = launchers.each_ref().map(Limit::on);
    launchers.map(|launcher| launcher.wait_with_output().unwrap())
}

#[test]
fn ranks_of_every_host_are_started_anew_and_all_say_who_failed_first() {
    let port = crate::common::ports::free_port();
    let flags = |node: usize, more: &str| format!("--node-rank {node} --master-addr 127.0.0.1 --master-port {port} {more}");
    let script = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then if [ $RANK = 3 ]; then exit 9; fi; \
        if [ $RANK != 0 ]; then exec sleep 60; fi; fi; echo done $TORCHELASTIC_RESTART_COUNT";
    // Rank 0 succeeds in the first attempt, and still waits for the other ranks of its job.
    let ended = two_hosts([&flags(0, "--max-restarts 2"), &flags(1, "--max-restarts 2")], script);
    assert!(ended.iter().all(|host| host.status.success()), "{ended:?}");
    assert!(sorted_lines(&ended[0].stdout).contains(&"[1] done 1".to_owned()), "{ended:?}");
    for host in &ended {
        assert!(String::from_utf8_lossy(&host.stderr).contains("restarting all ranks, 1 of 2, after a failure: rank 3 "), "{ended:?}");
    }
    let port = crate::common::ports::free_port();
    let flags = |node: usize| format!("--node-rank {node} --master-addr 127.0.0.1 --master-port {port}");
    let ended = two_hosts([&flags(0), &flags(1)], "if [ $RANK = 3 ]; then exit 9; fi; exec sleep 60");
    for host in ended {
        let said = String::from_utf8_lossy(&host.stderr).into_owned();
        let last = said.lines().last().unwrap();
        assert!(host.status.code() == Some(9) && last.contains("first failure: rank 3 (local rank 1) on "), "{said}");
    }
}

#[test]
fn hosts_find_out_their_numbers_where_they_meet() {
    let flags = format!("--rdzv-backend c10d --rdzv-id job-5 --rdzv-endpoint 127.0.0.1:{}", crate::common::ports::free_port());
    // No rank ends before both hosts have joined: the first one serves the store.
    let folder = folder();
    let script = format!(
        "touch {0}/$RANK; while [ $(ls {0} | wc -l) != 4 ]; do sleep 0.01; done; echo $RANK of $WORLD_SIZE in $TORCHELASTIC_RUN_ID",
        folder.path().display()
    );
    let ended = two_hosts([&flags, &flags], &script);
    assert!(ended.iter().all(|host| host.status.success()), "{ended:?}");
    let mut lines: Vec<_> = ended.iter().flat_map(|host| sorted_lines(&host.stdout)).collect();
    lines.sort();
    assert_eq!(lines, [0, 1, 2, 3].map(|rank| format!("[{rank}] {rank} of 4 in job-5")));
}

#[test]
fn output_goes_to_files_and_to_the_terminal_as_it_is_told() {
    let logs = folder();
    let flags = format!("--nproc-per-node 2 --log-dir {} --redirects 0:2 --tee 1:1 --rdzv-id a/b", logs.path().display());
    let run = output(&flags, "echo out $RANK; echo err $RANK >&2");
    assert_eq!(sorted_lines(&run.stdout), ["[0] out 0", "[1] out 1"]);
    let said = sorted_lines(&run.stderr);
    assert!(said.len() == 2 && said[0] == "[1] err 1" && said[1].starts_with("collrun: the ranks' files are in "), "{said:?}");
    let found = files(logs.path());
    let expected = [("attempt_0/0/stderr.log", "err 0\n"), ("attempt_0/1/stdout.log", "out 1\n")];
    assert_eq!(found, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
    let run = std::fs::read_dir(logs.path()).unwrap().next().unwrap().unwrap().file_name();
    assert!(run.to_string_lossy().starts_with("a_b_"), "{run:?}");
}

#[test]
fn ranks_are_shown_by_number_and_named_as_the_template_says() {
    let template = "--log-line-prefix-template ${role_name}${local_rank}/${rank}>";
    let run = output(&format!("--nproc-per-node 3 --role trainer --local-ranks-filter 0,2 {template}"), "echo x; echo y >&2");
    assert_eq!(sorted_lines(&run.stdout), ["trainer0/0>x", "trainer2/2>x"]);
    assert_eq!(sorted_lines(&run.stderr), ["trainer0/0>y", "trainer2/2>y"]);
}

#[test]
fn the_first_failure_is_told_with_what_the_rank_said() {
    // Rank 1 fails first and reports why; rank 0 fails because of that, but ends earlier.
    let folder = folder();
    let script = format!(
        r#"trap '' TERM; if [ $RANK = 1 ]; then printf %s '{{"message": {{"message": "no data:\nshard 7", "extraInfo": {{"timestamp": "1"}}}}}}' \
            >$TORCHELASTIC_ERROR_FILE; touch -d '2020-01-01 00:00:01' $TORCHELASTIC_ERROR_FILE; touch {0}/told; while [ ! -e {0}/ended ]; do sleep 0.01; done; exit 3; fi
        while [ ! -e {0}/told ]; do sleep 0.01; done; echo '{{"message": "lost rank 1"}}' >$TORCHELASTIC_ERROR_FILE;
        touch -d '2020-01-01 00:00:02' $TORCHELASTIC_ERROR_FILE; touch {0}/ended; exit 4"#,
        folder.path().display()
    );
    let run = output("--nproc-per-node 2", &script);
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    let (_, last) = said.split_once("first failure: ").unwrap();
    assert!(last.starts_with("rank 1 (local rank 1) on ") && last.ends_with(": exit code 3\n  no data:\n  shard 7\n"), "{said}");
    assert!(!last.contains("lost rank 1"), "{said}");
}

#[test]
fn scripts_and_modules_of_python_are_run_by_python() {
    let folder = folder();
    std::fs::write(folder.path().join("train.py"), "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n").unwrap();
    let python = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.current_dir(folder.path()).args(flags).stdin(Stdio::null()).output().unwrap()
    };
    if Command::new("python3").arg("--version").output().is_err() {
        return println!("skipped: there is no python3");
    }
    for flags in [&["--nproc_per_node=2", "train.py", "--lr", "1"][..], &["--nproc_per_node=2", "-m", "train", "--lr", "1"]] {
        let run = python(flags);
        assert_eq!(sorted_lines(&run.stdout), ["[0] 0 ['--lr', '1']", "[1] 1 ['--lr', '1']"], "{run:?}");
    }
    assert_eq!(python(&["--no-python", "./train.py"]).status.code(), Some(126), "it is no program");
}
