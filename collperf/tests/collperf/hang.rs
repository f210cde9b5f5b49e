//! `collperf --explain-hang`, on the records of stuck and dying ranks.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::common::limit::Limit;
use crate::common::ranks::{free_port, is_rank_of, patience, spawn_rank};
use collectives::{Communicator, ReduceOp};

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(20);

/// Returns the output of `collperf --explain-hang` for a folder.
fn verdict(folder: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_collperf")).arg("--explain-hang").arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn says(verdict: &str, parts: &[&str]) {
    for part in parts {
        assert!(verdict.contains(part), "{part:?} is not in:\n{verdict}");
    }
}

/// Waits until `folder` has this many records.
fn await_records(folder: &Path, count: usize) {
    let began = Instant::now();
    let is_record = |name: &str| name.starts_with("flight-");
    let there = || {
        let entries = std::fs::read_dir(folder).map(|entries| entries.flatten().collect::<Vec<_>>()).unwrap_or_default();
        entries.iter().filter(|entry| is_record(&entry.file_name().to_string_lossy())).count()
    };
    while there() < count {
        assert!(began.elapsed() < PATIENCE, "{} records of {count}", there());
        std::thread::yield_now();
    }
}

/// Starts the ranks of the test `name`, which write into `folder`.
fn spawn(name: &str, world_size: usize, folder: &Path, timeout: f32) -> Vec<Child> {
    let variables = [
        ("COLLECTIVES_FLIGHT_RECORDER_DIR", folder.display().to_string()),
        ("COLLECTIVES_TIMEOUT", timeout.to_string()),
        ("COLLECTIVES_FLIGHT_RECORDER", "4".to_owned()),
    ];
    let port = free_port();
    (0..world_size).map(|rank| spawn_rank(name, rank, world_size, port, &variables)).collect()
}

/// Waits for the ranks to end, and prints their output.
fn reap(children: Vec<Child>) {
    for child in children {
        let output = child.wait_with_output().unwrap();
        println!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    }
}

/// Blocks until the process is killed.
fn stop() -> ! {
    loop {
        std::thread::park();
    }
}

/// Makes some calls on all ranks, more than the ring of these tests keeps.
fn warm_up(comm: &Communicator) {
    for _ in 0..10 {
        comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap();
    }
}

#[test]
fn a_rank_that_dies_is_named() {
    const NAME: &str = "hang::a_rank_that_dies_is_named";
    if is_rank_of(NAME) {
        let comm = Communicator::from_env().unwrap();
        warm_up(&comm);
        if comm.rank() == 1 {
            std::process::abort();
        }
        assert!(comm.all_reduce(&mut [1_u8], ReduceOp::Max).unwrap_err().is_peer_lost());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    reap(spawn(NAME, 3, folder.path(), 20.0));
    let verdict = verdict(folder.path());
    says(
        &verdict,
        &["communicator world", "rank 1 (host ", "is gone: it left no record, and ranks 0, 2 lost it", "all_reduce(max, u8, count 1)"],
    );
}

#[test]
fn a_rank_that_makes_another_call_is_named() {
    const NAME: &str = "hang::a_rank_that_makes_another_call_is_named";
    if is_rank_of(NAME) {
        let comm = Communicator::from_env().unwrap();
        warm_up(&comm);
        let failed = match comm.rank() {
            1 => comm.broadcast(&mut [1.0_f32; 4], 0),
            _ => comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum),
        };
        assert!(failed.unwrap_err().is_mismatch());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    reap(spawn(NAME, 3, folder.path(), 20.0));
    let verdict = verdict(folder.path());
    let differ = "ranks 0, 2 called all_reduce(sum, f32, count 4); rank 1 called broadcast(f32, count 4, root 0)";
    says(&verdict, &["starting at collective number 11, the calls differ", differ]);
}

#[test]
fn a_rank_that_stops_is_named_by_those_whose_deadline_passes() {
    const NAME: &str = "hang::a_rank_that_stops_is_named_by_those_whose_deadline_passes";
    if is_rank_of(NAME) {
        let comm = Communicator::from_env().unwrap();
        warm_up(&comm);
        if comm.rank() == 2 {
            stop();
        }
        assert!(comm.barrier().unwrap_err().is_timeout());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut children = spawn(NAME, 3, folder.path(), 1.0);
    let _limits: Vec<Limit> = children.iter().map(Limit::on).collect();
    await_records(folder.path(), 2);
    let verdict = verdict(folder.path());
    children[2].kill().unwrap();
    reap(children);
    says(&verdict, &["no record of rank 2 (host ", "ranks 0, 1 waited for it"]);
}

#[test]
fn a_hang_is_explained_by_what_ranks_write_on_a_signal() {
    const NAME: &str = "hang::a_hang_is_explained_by_what_ranks_write_on_a_signal";
    if is_rank_of(NAME) {
        let folder = std::env::var("COLLECTIVES_FLIGHT_RECORDER_DIR").unwrap();
        collectives::flight::write_records_on_sigusr1(&folder).unwrap();
        // A second request changes nothing.
        collectives::flight::write_records_on_sigusr1(&folder).unwrap();
        let comm = Communicator::from_env().unwrap();
        warm_up(&comm);
        std::fs::write(Path::new(&folder).join(format!("ready {}", comm.rank())), "").unwrap();
        if comm.rank() == 0 {
            stop();
        }
        drop(comm.all_reduce(&mut [1.0_f64; 2], ReduceOp::Min));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut children = spawn(NAME, 2, folder.path(), 60.0);
    let _limits: Vec<Limit> = children.iter().map(Limit::on).collect();
    let began = Instant::now();
    while (0..2).any(|rank| !folder.path().join(format!("ready {rank}")).exists()) {
        assert!(began.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    // Rank 1 reports which rank it waits for only after it has waited a moment.
    let verdict = loop {
        for child in &children {
            let pid = rustix::process::Pid::from_child(child);
            rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
        }
        await_records(folder.path(), 2);
        let verdict = verdict(folder.path());
        if verdict.contains("is behind") {
            break verdict;
        }
        assert!(began.elapsed() < PATIENCE, "{verdict}");
    };
    children.iter_mut().for_each(|child| child.kill().unwrap());
    reap(children);
    says(
        &verdict,
        &[
            "rank 0 (host ",
            "is behind: it has not reached all_reduce(min, f64, count 2) number 11, in which rank 1 waited",
            "its last call, all_reduce(sum, f32, count 4) number 10, has ended, and the rank has started no other call",
        ],
    );
}
