//! `collrun --replace`: new processes take the place of ranks that have failed, and the others continue.
//!
//! The ranks are processes of this test program, which count steps. Before each step, rank 0 adds an increment to the
//! count, and all ranks get the sum over all ranks. So the count after a number of steps does not depend on the failures.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use collectives::{Communicator, Error, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::limit::{Limit, PATIENCE};

/// The variable that makes a process a rank. It has the file that ends the ranks.
const STOP: &str = "COLLECTIVES_TEST_STOP";
/// Set if the ranks never admit others, and end after a failure.
const NO_ADMIT: &str = "COLLECTIVES_TEST_NO_ADMIT";

fn never_admits() -> bool {
    std::env::var_os(NO_ADMIT).is_some()
}

/// Gives every rank the highest number of steps.
fn synchronise(comm: &Communicator, steps: &mut u64) -> Result<()> {
    let mut newest = *steps;
    comm.all_reduce(&mut newest, ReduceOp::Max)?;
    *steps = newest;
    println!("at step {steps}: {} ranks, pid {}", comm.world_size(), std::process::id());
    Ok(())
}

/// Counts until the ranks change, and returns the new communicator. Returns `None` once the file exists.
fn count(comm: &Communicator, steps: &mut u64, stop: &std::path::Path) -> Result<Option<Communicator>> {
    synchronise(comm, steps)?;
    loop {
        let mut sum = comm.rank() as u64 + *steps;
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        let ranks = comm.world_size() as u64;
        assert_eq!(sum, ranks * (ranks - 1) / 2 + ranks * *steps, "the ranks are at one step");
        *steps += 1;
        let mut stops = u8::from(comm.is_main() && stop.exists());
        comm.broadcast(&mut stops, 0)?;
        if stops == 1 {
            return Ok(None);
        }
        if never_admits() {
            continue;
        }
        let membership = comm.admit()?;
        if !membership.newcomers.is_empty() || membership.communicator.world_size() != comm.world_size() {
            return Ok(Some(membership.communicator));
        }
    }
}

fn rank(stop: &std::path::Path) -> Result<()> {
    let mut comm = Communicator::from_env()?;
    let mut steps = 0;
    loop {
        comm = match count(&comm, &mut steps, stop) {
            Ok(Some(changed)) => changed,
            Ok(None) => break,
            Err(error) if never_admits() => return Err(error),
            Err(error) if error.is_peer_lost() || matches!(error, Error::Aborted { .. }) => comm.admit()?.communicator,
            Err(error) => return Err(error),
        };
    }
    println!("result {steps}, pid {}", std::process::id());
    comm.close()
}

/// Makes this process a rank if a test below has started it as one.
#[test]
fn is_a_rank() {
    if let Some(stop) = std::env::var_os(STOP) {
        collectives::record_failure(|| rank(std::path::Path::new(&stop))).unwrap();
    }
}

/// A job with `--replace`, and what it prints.
struct Job {
    child: Child,
    lines: Receiver<String>,
    read: Vec<String>,
    folder: tempfile::TempDir,
    _limit: Limit,
}

impl Job {
    fn start(flags: &str, variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(flags.split_whitespace()).arg("--").arg(std::env::current_exe().unwrap());
        command.args(["replace::is_a_rank", "--exact", "--nocapture"]).env(STOP, folder.path().join("stop"));
        command.envs(variables.iter().copied()).env("TMPDIR", folder.path());
        Self::of(command, folder)
    }

    fn of(mut command: Command, folder: tempfile::TempDir) -> Self {
        let (out, write) = std::io::pipe().unwrap();
        command.stdin(Stdio::null()).stdout(write.try_clone().unwrap()).stderr(write);
        let child = command.spawn().unwrap();
        // The command holds the ends of the pipe for writing.
        drop(command);
        let (sender, lines) = channel();
        std::thread::spawn(move || BufReader::new(out).lines().map_while(std::result::Result::ok).all(|line| sender.send(line).is_ok()));
        Self { _limit: Limit::on(&child), child, lines, read: vec![], folder }
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

    /// Waits until `count` ranks say that there are so many, and returns their pids by the number before their lines.
    #[track_caller]
    fn ranks(&mut self, count: usize) -> Vec<i32> {
        let mut pids = vec![0; count];
        while pids.contains(&0) {
            let line = self.line(&format!(": {count} ranks, pid "));
            pids[number_of(&line)] = pid_of(&line);
        }
        pids
    }

    fn stop(&self) {
        std::fs::write(self.folder.path().join("stop"), "").unwrap();
    }

    /// Waits for the end. Returns the exit code, and all lines.
    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let code = self.child.wait().unwrap().code();
        self.read.extend(self.lines.iter());
        let left = std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with("collrun")).collect();
        assert!(left.is_empty(), "collrun has left {left:?}");
        (code, std::mem::take(&mut self.read))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the number in brackets at the beginning of a line.
fn number_of(line: &str) -> usize {
    line.strip_prefix('[').and_then(|line| line.split_once(']')).unwrap().0.parse().unwrap()
}

fn pid_of(line: &str) -> i32 {
    line.rsplit_once("pid ").unwrap().1.parse().unwrap()
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// Returns the results, which must be equal, with the pids of the processes.
fn results(lines: &[String]) -> Vec<i32> {
    let results: Vec<&String> = lines.iter().filter(|line| line.contains("result ")).collect();
    let steps = |line: &str| line.split_once("result ").unwrap().1.split_once(',').unwrap().0.to_owned();
    assert!(results.iter().all(|line| steps(line) == steps(results[0])), "{results:?}");
    results.into_iter().map(|line| pid_of(line)).collect()
}

/// Returns the lines of collrun itself.
fn said(lines: &[String]) -> Vec<&str> {
    lines.iter().filter_map(|line| line.strip_prefix("collrun: ")).collect()
}

#[test]
fn a_killed_rank_is_replaced_and_the_others_keep_their_processes() {
    for (killed, more) in [(2, ""), (0, "--secret")] {
        let mut job = Job::start(&format!("--replace --max-restarts 2 --nproc-per-node 3 {more}"), &[]);
        let before = job.ranks(3);
        kill(before[killed]);
        let failed = job.line("failed with signal 9 (SIGKILL)");
        let expected = format!(
            "collrun: rank {killed} (pid {}) failed with signal 9 (SIGKILL); the others continue; its replacement (1 of 2) starts in 1 s",
            before[killed]
        );
        assert_eq!(failed, expected);
        let after = job.ranks(3);
        assert!((0..3).all(|rank| (after[rank] == before[rank]) == (rank != killed)), "{before:?} {after:?}");
        job.stop();
        let (code, lines) = job.end();
        assert_eq!(code, Some(0), "{lines:#?}");
        let mut ended = results(&lines);
        ended.sort_unstable();
        let mut expected = after;
        expected.sort_unstable();
        assert_eq!(ended, expected);
        let said = said(&lines);
        assert!(said[1].starts_with(&format!("rank {killed} is replaced: pid ")) && said[1].contains(" joins at 127.0.0.1:"), "{said:?}");
        assert_eq!((said[2], said.len()), ("1 failed process was replaced (at most 2)", 3), "{said:?}");
    }
}

#[test]
fn replacements_are_replaced_until_none_is_left_and_the_others_end_well() {
    let mut job = Job::start("--replace --max-restarts 2 --nproc-per-node 2", &[]);
    let first = job.ranks(2);
    kill(first[1]);
    let second = job.ranks(2);
    // The process that was there from the beginning is lost too: the job has only newcomers.
    kill(second[0]);
    let third = job.ranks(2);
    assert!(third[0] != first[0] && third[1] == second[1], "{first:?} {second:?} {third:?}");
    kill(third[0]);
    job.line("the others continue; it is not replaced, because 2 of 2 replacements are used");
    job.line(": 1 ranks, pid ");
    job.stop();
    let (code, lines) = job.end();
    assert_eq!((code, results(&lines)), (Some(0), vec![third[1]]), "{lines:#?}");
    assert_eq!(said(&lines).last(), Some(&"2 failed processes were replaced (at most 2)"));
}

#[test]
fn a_job_whose_ranks_are_all_dead_has_failed() {
    let mut job = Job::start("--replace --max-restarts 9 --nproc-per-node 2", &[]);
    let pids = job.ranks(2);
    pids.iter().for_each(|pid| kill(*pid));
    let (code, lines) = job.end();
    assert_eq!(code, Some(137), "{lines:#?}");
    let said = said(&lines);
    assert!(said.iter().any(|line| line.contains("no rank runs that a replacement could join")), "{said:?}");
    assert!(said.last().unwrap().starts_with("first failure: rank "), "{said:?}");
}

#[test]
fn ranks_that_do_not_admit_end_with_words() {
    let mut job = Job::start("--replace --max-restarts 9 --nproc-per-node 3", &[(NO_ADMIT, "1")]);
    let pids = job.ranks(3);
    kill(pids[1]);
    let (code, lines) = job.end();
    // The time at which rank 0 or 2 wrote its error may be earlier than the time at which collrun noticed the end of rank 1.
    assert!([Some(137), Some(101)].contains(&code), "{lines:#?}");
    let said = said(&lines);
    assert!(said.iter().any(|line| line.ends_with("(after a failure, the others must call Communicator::admit)")), "{said:?}");
    assert!(said.iter().any(|line| line.starts_with("first failure: rank ")), "{said:?}");
}

/// Starts shells as ranks.
fn shells(flags: &str, script: &str) -> Job {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.args(flags.split_whitespace()).args(["--", "sh", "-c", script]).env("TMPDIR", folder.path());
    Job::of(command, folder)
}

#[test]
fn a_rank_that_fails_before_any_is_a_member_ends_the_job() {
    let job = shells("--replace --max-restarts 9 --nproc-per-node 2", "test $RANK = 0 || exit 7; exec sleep 600");
    let (code, lines) = job.end();
    assert_eq!(code, Some(7), "{lines:#?}");
    let said = said(&lines);
    assert!(said.iter().any(|line| line.starts_with("stopping rank 0: no rank that runs is a member of the job, so ")), "{said:?}");
}

/// The shell of a rank that is a member until a file exists, and of one that replaces a rank.
const MEMBER: &str = "test -z \"$COLLECTIVES_JOIN\" || { echo asks at $COLLECTIVES_JOIN; exec sleep 600; }; \
                      echo 127.0.0.1:$((RANK + 1)) >$COLLECTIVES_JOIN_FILE; echo member; ";

#[test]
fn a_replacement_that_no_member_has_admitted_before_the_end_is_stopped() {
    let mut job = shells(
        "--replace --max-restarts 9 --nproc-per-node 3",
        &format!("{MEMBER} test $RANK = 2 && exit 3; while [ ! -e $TMPDIR/stop ]; do sleep 0.05; done"),
    );
    assert_eq!(job.line("asks at"), "[2] asks at 127.0.0.1:1,127.0.0.1:2");
    job.stop();
    let (code, lines) = job.end();
    assert_eq!(code, Some(0), "the members have succeeded: {lines:#?}");
    let said = said(&lines);
    assert!(said.iter().any(|line| line.starts_with("stopping rank 2: no rank that runs is a member of the job")), "{said:?}");
}

#[test]
fn replacements_that_fail_at_once_come_ever_later_and_count() {
    let mut job = shells(
        "--replace --max-restarts 2 --nproc-per-node 2",
        "test $RANK = 1 && exit 3; echo 127.0.0.1:1 >$COLLECTIVES_JOIN_FILE; while [ ! -e $TMPDIR/stop ]; do sleep 0.05; done",
    );
    job.line("exit code 3; the others continue; its replacement (1 of 2) starts in 1 s");
    job.line("exit code 3; the others continue; its replacement (2 of 2) starts in 2 s");
    job.line("exit code 3; the others continue; it is not replaced");
    job.stop();
    assert_eq!(job.end().0, Some(0));
}

#[test]
fn a_signal_ends_the_job_and_nothing_is_replaced() {
    crate::interrupts::heed();
    let mut job = shells("--replace --max-restarts 9 --nproc-per-node 2", &format!("{MEMBER} test $RANK = 1 && exit 3; exec sleep 600"));
    job.line("asks at");
    kill_process(Pid::from_child(&job.child), Signal::INT).unwrap();
    let (code, lines) = job.end();
    assert_eq!(code, Some(130), "{lines:#?}");
    assert_eq!(said(&lines).last(), Some(&"1 failed process was replaced (at most 9)"), "{lines:#?}");
}

#[test]
fn what_a_failed_rank_has_started_ends_before_its_replacement_starts() {
    let mut job = shells(
        "--replace --max-restarts 1 --nproc-per-node 2",
        &format!("{MEMBER} if [ $RANK = 1 ]; then sleep 600 >/dev/null 2>&1 & echo left $!; exit 3; fi; exec sleep 600"),
    );
    let left = job.line("left ");
    let pid: i32 = left.rsplit_once(' ').unwrap().1.parse().unwrap();
    let process = rustix::process::pidfd_open(Pid::from_raw(pid).unwrap(), rustix::process::PidfdFlags::empty());
    job.line("asks at");
    if let Ok(process) = process {
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let mut waits = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut waits, Some(&limit)).unwrap(), 1, "pid {pid} still runs");
    }
}

#[test]
fn commands_that_cannot_replace_are_refused_in_words() {
    for (flags, words) in [
        ("--replace", "--replace: give --max-restarts N"),
        ("--replace --max-restarts 0", "--replace: give --max-restarts N"),
        ("--replace --max-restarts 1 --nnodes 2 --node-rank 0 --master-addr a --master-port 7", "only in jobs of one host"),
        ("--replace --max-restarts 1 --nnodes 1:2 --rdzv-endpoint a", "only in jobs of one host"),
        ("--replace --max-restarts 1 --hosts localhost", "only in jobs of one host"),
        ("--replace --keep-going", "cannot be used with"),
    ] {
        let run = Command::new(env!("CARGO_BIN_EXE_collrun")).args(flags.split_whitespace()).arg("true").output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.code() == Some(2) && said.contains(words), "{flags}: {said}");
    }
    let help = Command::new(env!("CARGO_BIN_EXE_collrun")).arg("--help").output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("--replace"));
}
