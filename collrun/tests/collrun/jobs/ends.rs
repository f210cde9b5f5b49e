//! The ends of jobs: by a key that is pressed twice, by a rank that returned too early, by the death of the launcher.

use std::fs;
use std::path::Path;

use super::*;

/// Returns the rest of a job's standard error, and its exit code.
fn rest(mut child: std::process::Child) -> (String, Option<i32>) {
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (said, child.wait().unwrap().code())
}

/// Sends Ctrl-C until the job has ended.
fn press_until_it_ends(child: &mut std::process::Child) {
    let process = handle(Pid::from_child(child).as_raw_nonzero().get()).unwrap();
    let pause = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    while poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&pause)).unwrap() == 0 {
        kill_process(Pid::from_child(child), Signal::INT).unwrap();
    }
}

#[test]
fn pressing_ctrl_c_twice_ends_ranks_that_are_deaf_at_once() {
    crate::interrupts::heed();
    let script = "trap '' INT; echo $$; while :; do sleep 0.01; done";
    let mut child = collrun("--nproc-per-node 2 --grace 3600", script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..2 {
        lines.read_line(&mut String::new()).unwrap();
    }
    press_until_it_ends(&mut child);
    assert_eq!(rest(child), ("collrun: second request to end (SIGINT); killing rank 0, 1\n".to_owned(), Some(130)));
}

#[test]
fn ranks_that_lose_one_that_died_of_ctrl_c_have_not_failed() {
    crate::interrupts::heed();
    // Rank 1 ends after rank 0, and prints a complaint.
    let folder = folder();
    let script = format!(
        "if [ $RANK = 0 ]; then echo $$ | tee {0}/pid; exec sleep 600; fi; trap '' INT; while [ ! -s {0}/pid ]; do sleep 0.01; done; echo $$; \
         read pid <{0}/pid; while ! grep -q 'State:.Z' /proc/$pid/status; do sleep 0.01; done; \
         echo '{{\"message\": \"lost rank 0\"}}' >$TORCHELASTIC_ERROR_FILE; exit 1",
        folder.path().display()
    );
    let (child, _lines, _, _limit) = started(&script);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(rest(child), (String::new(), Some(130)));
}

#[test]
fn another_host_that_loses_ranks_after_ctrl_c_has_not_failed_first() {
    crate::interrupts::heed();
    let folder = folder();
    let leaves = folder.path().join("leaves");
    let script = format!(
        "if [ $RANK = 1 ]; then while [ ! -e {0} ]; do sleep 0.01; done; exit 9; fi; trap 'touch {0}' INT; echo $$; while :; do sleep 0.01; done",
        leaves.display()
    );
    let port = crate::common::ports::free_port();
    let launchers = [0, 1].map(|node| {
        let flags = format!("--nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port} --grace 3600");
        collrun(&flags, &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let _limits = launchers.each_ref().map(Limit::on);
    let [mut first, second] = launchers;
    BufReader::new(first.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    kill_process(Pid::from_child(&first), Signal::INT).unwrap();
    // It has notified the other launcher by then.
    assert_eq!(rest(second).1, Some(9));
    press_until_it_ends(&mut first);
    assert_eq!(rest(first), ("collrun: second request to end (SIGINT); killing rank 0\n".to_owned(), Some(130)));
}

#[test]
fn a_rank_that_said_why_it_fails_and_had_to_be_killed_is_not_said_to_have_died_of_that() {
    let folder = folder();
    let script = format!(
        "if [ $RANK = 1 ]; then trap '' TERM; echo '{{\"message\": \"no data\"}}' >$TORCHELASTIC_ERROR_FILE; touch {0}/told; exec sleep 600; fi; \
         while [ ! -e {0}/told ]; do sleep 0.01; done; exit 4",
        folder.path().display()
    );
    let run = output("--nproc-per-node 2 --grace 0", &script);
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    let (_, last) = said.split_once("first failure: ").unwrap();
    let expected = ": signal 9 (SIGKILL) when it was stopped\n  no data\n";
    assert!(run.status.code() == Some(1) && last.starts_with("rank 1 ") && last.ends_with(expected), "{run:?}");
}

/// Returns whether the launcher has a thread of this name: each rank has one until its end is reported.
fn has_thread(launcher: &std::process::Child, name: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", launcher.id())).unwrap();
    let name_of = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
    threads.map(|thread| name_of(thread.unwrap())).any(|other| other.trim() == name)
}

#[test]
fn a_rank_that_returned_too_early_is_named_beside_the_one_that_lost_it() {
    let folder = folder();
    let go = folder.path().join("go");
    let script = format!(
        "echo $$; if [ $RANK = 1 ]; then exit 0; fi; while [ ! -e {} ]; do sleep 0.01; done; echo lost rank 1 >$TORCHELASTIC_ERROR_FILE; exit 3",
        go.display()
    );
    let (child, _lines, _, _limit) = started(&script);
    while has_thread(&child, "rank 1") {
        std::thread::yield_now();
    }
    fs::write(&go, "").unwrap();
    let (said, code) = rest(child);
    let (_, last) = said.split_once("first failure: rank 0 ").unwrap();
    let expected = ": exit code 3\n  lost rank 1\n  rank 1 had ended with exit code 0 before this failure: \
                    if the failed rank needed it, that is the cause\n";
    assert!(code == Some(3) && last.ends_with(expected), "{said}");
}

/// Returns the process that watches a launcher, or `None` if this kernel does not list children.
fn guardian(launcher: &std::process::Child) -> Option<i32> {
    let own = format!("/proc/self/task/{}/children", std::process::id());
    if !Path::new(&own).exists() {
        println!("skipped in part: there is no {own}");
        return None;
    }
    let threads = fs::read_dir(format!("/proc/{}/task", launcher.id())).unwrap();
    let listed = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).unwrap_or_default();
    let children: String = threads.map(|thread| listed(thread.unwrap())).collect();
    let found = children.split_whitespace().map(|pid| pid.parse().unwrap()).find(|pid| is_guardian(*pid));
    Some(found.expect("a launcher has a guardian"))
}

fn is_guardian(pid: i32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.starts_with(b"rank-guardian\0"))
}

#[test]
fn nothing_that_ranks_have_started_outlives_a_killed_launcher() {
    // A shell waits for its program, as in `sh -c './train; echo done'`.
    let (mut child, _lines, pids, _limit) = started("sleep 600 & echo $!; wait; echo done");
    let programs: Vec<_> = pids.into_iter().map(|pid| handle(pid).expect("the program runs")).collect();
    let guardian = guardian(&child).and_then(handle);
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    for program in programs {
        assert!(ends(Some(program)), "a program that a rank had started outlived collrun");
    }
    assert!(ends(guardian), "the guardian outlived collrun");
}

#[test]
fn programs_of_ranks_that_were_started_anew_end_with_a_killed_launcher_too() {
    let script = "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 1; sleep 600 & echo $!; wait; echo done";
    let mut child = collrun("--max-restarts 1", script).stdout(Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let program = handle(line.split_whitespace().last().unwrap().parse().unwrap()).expect("the program runs");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ends(Some(program)), "a program that a rank had started outlived collrun");
}

#[test]
fn the_guardian_ends_with_its_job() {
    let folder = folder();
    let go = folder.path().join("go");
    let (mut child, _lines, _, _limit) = started(&format!("echo $$; while [ ! -e {} ]; do sleep 0.01; done", go.display()));
    let guardian = guardian(&child);
    fs::write(&go, "").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(!guardian.is_some_and(is_guardian), "the guardian outlived its job");
}
