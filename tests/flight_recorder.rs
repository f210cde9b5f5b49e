//! The flight recorder, from stuck and dying ranks to the verdict of `collperf --explain-hang`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, FlightState, ReduceOp, Transport};
use common::ranks::{Wiring, alone_in_a_process, communicators_with, each, free_port, is_rank_of, patience, spawn_rank, threads};

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(20);

/// What `collperf --explain-hang` says of a folder.
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

/// Waits for the ranks, which all end by themselves.
fn reap(children: Vec<Child>) {
    for child in children {
        let output = child.wait_with_output().unwrap();
        println!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    }
}

/// Does nothing until it is killed.
fn stop() -> ! {
    loop {
        std::thread::park();
    }
}

/// Some calls that all ranks make, more than the ring of these tests keeps.
fn warm_up(comm: &Communicator) {
    for _ in 0..10 {
        comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap();
    }
}

#[test]
fn a_rank_that_dies_is_named() {
    const NAME: &str = "a_rank_that_dies_is_named";
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
        &["communicator world", "rank 1 (host ", "died: it left no record, and ranks 0, 2 lost it", "all_reduce(max, u8, count 1)"],
    );
}

#[test]
fn a_rank_that_makes_another_call_is_named() {
    const NAME: &str = "a_rank_that_makes_another_call_is_named";
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
    says(&verdict, &["the calls differ from collective number 11 on", differ]);
}

#[test]
fn a_rank_that_stops_is_named_by_those_whose_deadline_passes() {
    const NAME: &str = "a_rank_that_stops_is_named_by_those_whose_deadline_passes";
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
    await_records(folder.path(), 2);
    let verdict = verdict(folder.path());
    children[2].kill().unwrap();
    reap(children);
    says(&verdict, &["no record of rank 2 (host ", "ranks 0, 1 waited for it"]);
}

#[test]
fn a_hang_is_explained_by_what_ranks_write_on_a_signal() {
    const NAME: &str = "a_hang_is_explained_by_what_ranks_write_on_a_signal";
    if is_rank_of(NAME) {
        let folder = std::env::var("COLLECTIVES_FLIGHT_RECORDER_DIR").unwrap();
        collectives::write_flight_records_on_sigusr1(&folder).unwrap();
        // Asked again, it goes on as before.
        collectives::write_flight_records_on_sigusr1(&folder).unwrap();
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
    let began = Instant::now();
    while (0..2).any(|rank| !folder.path().join(format!("ready {rank}")).exists()) {
        assert!(began.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    // Rank 1 says whom it waits for once it has waited a moment.
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
            "is behind: it has not come to all_reduce(min, f64, count 2) number 11, in which rank 1 waited",
            "its last call, all_reduce(sum, f32, count 4) number 10, is over, and it makes no other",
        ],
    );
}

#[test]
#[expect(unsafe_code, reason = "stands for a program with a handler of its own")]
fn a_signal_that_the_program_handles_itself_is_left_alone() {
    alone_in_a_process("a_signal_that_the_program_handles_itself_is_left_alone", || {
        extern "C" fn own(_: libc::c_int) {}
        let own: extern "C" fn(libc::c_int) = own;
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(libc::SIGUSR1, own as libc::sighandler_t) };
        let error = collectives::write_flight_records_on_sigusr1("nowhere").unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("handler of its own"), "{error}");
    });
}

#[test]
fn a_stuck_call_is_seen_from_another_thread_on_every_wiring() {
    for wiring in Wiring::ALL {
        let comms = communicators_with(3, |rank| wiring.builder(rank));
        let stuck = comms[0].flight_recorder();
        let (go, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        std::thread::scope(|scope| {
            let ranks = scope.spawn(|| {
                each(comms, |comm| {
                    if comm.rank() == 1 {
                        wait.lock().unwrap().recv().unwrap();
                    }
                    comm.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum).unwrap();
                    comm.flight_records().last().map(|record| record.state)
                })
            });
            let began = Instant::now();
            let seen = loop {
                assert!(began.elapsed() < PATIENCE, "{:?}", stuck.records());
                let last = stuck.records().pop().filter(|last| last.kind == "all_reduce" && !last.waiting_for.is_empty());
                if let Some(last) = last {
                    break last;
                }
                std::thread::yield_now();
            };
            assert_eq!((seen.state, seen.sequence, seen.count), (FlightState::Started, Some(1), 9), "{wiring:?}");
            assert!(seen.started_ns.is_some() && seen.finished_ns.is_none());
            go.send(()).unwrap();
            assert_eq!(ranks.join().unwrap(), [Some(FlightState::Finished); 3]);
        });
    }
}

#[test]
fn every_kind_of_call_is_on_record() {
    let kinds = threads(Wiring::Shm, 2, |comm| {
        let other = 1 - comm.rank();
        comm.broadcast(&mut [0_u8; 3], 1).unwrap();
        comm.all_gather_v_into(&[1_u16][..], &mut [0_u16; 2], &[1, 1]).unwrap();
        comm.start_reduce(vec![1_i64; 5], 0, ReduceOp::Sum).unwrap().wait().unwrap();
        comm.send_recv(&[1_u8], other, &mut [0_u8], other).unwrap();
        let half = comm.split(Some(comm.rank() as u32), 0).unwrap().unwrap();
        half.barrier().unwrap();
        let (all, alone) = (comm.flight_records(), half.flight_records());
        assert!(all.iter().chain(&alone).all(|record| record.state == FlightState::Finished), "{all:?} {alone:?}");
        let sequences: Vec<_> = all.iter().filter_map(|record| record.sequence).collect();
        assert!(sequences.is_sorted_by(|a, b| a + 1 == *b));
        (all.iter().map(|record| record.kind).collect::<Vec<_>>(), alone.iter().map(|record| record.kind).collect::<Vec<_>>())
    });
    for (all, alone) in kinds {
        assert_eq!(all[..4], ["barrier", "broadcast", "all_gather_v", "reduce"]);
        assert_eq!(all[all.len() - 2..], ["recv", "send"]);
        assert_eq!(alone, ["barrier", "barrier"]);
    }
}

#[test]
fn a_recorder_that_is_switched_off_keeps_nothing() {
    let mut config = Config::default();
    config.flight_recorder_calls = 0;
    let kept = Communicator::builder().config(config).run_local(2, |comm| {
        comm.barrier()?;
        Ok(comm.flight_records().len())
    });
    assert_eq!(kept.unwrap(), [0, 0]);
}

/// What a thread was warned of.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_call_that_does_not_end_is_warned_of_once_before_its_deadline() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let builder = |_| Communicator::builder().transport(transport).timeout(Duration::from_secs(20));
        let comms = communicators_with(2, builder);
        let (come, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let come = Mutex::new(Some(come));
        each(comms, |comm| {
            if comm.rank() == 1 {
                wait.lock().unwrap().recv().unwrap_err();
                drop(comm.barrier());
                return;
            }
            comm.set_timeout(Duration::from_millis(800));
            let warnings = Warnings::default();
            tracing::subscriber::with_default(warnings.clone(), || {
                assert!(comm.barrier().unwrap_err().is_timeout());
                assert!(comm.recv(&mut [0_u8], 1).is_err());
            });
            drop(come.lock().unwrap().take());
            // That the calls failed in the end is told as well.
            let said: Vec<_> = warnings.0.lock().unwrap().iter().filter(|said| said.contains("still waiting")).cloned().collect();
            let of_barrier: Vec<_> = said.iter().filter(|said| said.contains("barrier() number 1")).collect();
            assert_eq!(of_barrier.len(), 1, "{transport:?}: {said:?}");
            assert!(of_barrier[0].contains("rank 1 (host ") && of_barrier[0].contains("communicator=\"world\""), "{of_barrier:?}");
            if transport == Transport::Shm {
                assert!(said.iter().any(|said| said.contains("call=recv from rank 1")), "{said:?}");
            }
        });
    }
}
