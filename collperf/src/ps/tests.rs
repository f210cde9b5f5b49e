//! Answers made by hand, and what they say together.

use serde_json::{Value, json};

use super::document::{Absent, Document, Process, Ras};
use super::process::State;
use super::table;
use super::view::View;
use crate::random::Random;

const SECOND: u64 = 1_000_000_000;

/// The time of all records.
const NOW: u64 = 1000 * SECOND;

/// Returns the record of a call that began this many nanoseconds ago.
fn call(number: u64, name: &str, state: &str, age: u64, waiting_for: &[usize]) -> Value {
    json!({
        "backend": "host", "collective_seq_id": number, "profiling_name": name, "op": "sum", "dtype": "f32", "count": 4, "counts_hash": null,
        "root": null, "peer": null, "tag": null, "state": state, "time_created_ns": NOW - age, "waiting_for": waiting_for, "error": null,
        "error_kind": null, "error_ranks": []
    })
}

fn on_device(mut entry: Value) -> Value {
    entry["backend"] = "device".into();
    entry
}

/// Returns the process of one rank of the world. Ranks 0 and 1 are on host `a`, ranks 2 and 3 on host `b`.
fn process(rank: usize, entries: &[Value]) -> Process {
    let peer = |rank: usize| json!({"rank": rank, "host_name": host(rank), "pid": 100 + rank});
    let record = json!({
        "format": "collectives flight record", "version": 1, "reason": "asked for", "time_written_ns": NOW, "rank": rank, "world_size": 4,
        "pg_id": "7", "pg_name": "world", "wiring": "2 hosts", "ranks": (0..4).map(peer).collect::<Vec<_>>(), "entries": entries
    });
    let strange = json!({"format": "collectives flight record", "version": 99});
    let status =
        json!({"format": "collectives status", "version": 1, "pid": 100 + rank, "host_name": host(rank), "records": [record, strange]});
    Process { status: Some(status), ..silent(rank, State::Sleeping, None) }
}

/// Returns the process of a rank that gave no answer.
fn silent(rank: usize, state: State, error: Option<&str>) -> Process {
    let (host_name, pid, program) = (host(rank).to_owned(), 100 + rank as u32, "train".to_owned());
    Process { host_name, pid, user: Some(0), program, state, status: None, error: error.map(str::to_owned) }
}

fn host(rank: usize) -> &'static str {
    if rank < 2 { "a" } else { "b" }
}

fn document(hosts: &[&str], processes: Vec<Process>) -> Document {
    Document::new(NOW, hosts.iter().map(|host| (*host).to_owned()).collect(), processes, Vec::new())
}

fn said(document: &Document) -> String {
    table::to_text(document, &View::new(document))
}

/// Panics if one of the parts is missing.
#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn a_job_that_runs_is_not_called_stuck_and_one_that_waits_for_a_second_is() {
    let waits = |age: u64| -> Vec<Process> {
        let ended = call(6, "barrier", "completed", 5 * SECOND, &[]);
        (0..4)
            .map(|rank| {
                if rank == 3 {
                    process(3, std::slice::from_ref(&ended))
                } else {
                    process(rank, &[ended.clone(), call(7, "all_reduce", "started", age, &[3])])
                }
            })
            .collect()
    };
    let text = said(&document(&["a", "b"], waits(SECOND / 2)));
    says(
        &text,
        &[
            "communicator world (7): 4 ranks; 2 hosts",
            "no call has waited for longer than 1 s",
            "all_reduce(sum, f32, count 4) number 7, for rank 3",
        ],
    );
    assert!(!text.contains("behind"), "{text}");
    let text = said(&document(&["a", "b"], waits(2 * SECOND)));
    says(
        &text,
        &[
            "rank 3 (host b, pid 103) is behind: it has not reached all_reduce(sum, f32, count 4) number 7, in which ranks 0-2 waited for 2.0 s",
        ],
    );
    let row = text.lines().find(|line| line.contains(" 102 ")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().take(7).collect();
    assert_eq!(cells, ["2", "b", "102", "sleeping", "waits", "2.0", "s"]);
}

#[test]
fn a_process_without_an_answer_is_named_with_the_reason_and_who_waits_for_it() {
    let waits = |rank| process(rank, &[call(7, "all_reduce", "started", 3 * SECOND, &[1, 2, 3])]);
    let stopped = silent(1, State::Stopped, Some("stopped by a signal, such as SIGSTOP"));
    let mut all = document(&["a", "b"], vec![waits(0), stopped, silent(3, State::Uninterruptible, Some("no answer within 1.0 s"))]);
    all.absent.push(Absent { host_name: "b".to_owned(), pid: 102, state: State::Gone });
    let text = said(&all);
    says(
        &text,
        &[
            "rank 1 (host a, pid 101): stopped by a signal, such as SIGSTOP; rank 0 waits for it",
            "rank 2 (host b, pid 102): gone: there is no such process any more; rank 0 waits for it",
            "rank 3 (host b, pid 103): no answer within 1.0 s; its process is in a wait that no signal ends, often for storage; rank 0 waits for it",
        ],
    );
    // A job of which nothing but a stopped process is known.
    let text = said(&document(&["a"], vec![silent(1, State::Stopped, Some("stopped by a signal"))]));
    assert_eq!(text, "process 101 (train) on host a: stopped by a signal\n");
    assert_eq!(said(&document(&["a"], vec![])), "no ranks of this user were found on a\n");
}

#[test]
fn ranks_of_a_host_that_was_not_asked_are_named_until_the_documents_are_merged() {
    let waits = |rank| process(rank, &[call(7, "barrier", "started", 3 * SECOND, &[2])]);
    let here = document(&["a"], vec![waits(0), waits(1)]);
    says(
        &said(&here),
        &[
            "rank 2 (host b, pid 102), rank 3 (host b, pid 103): not asked: run collperf ps on host b too, or use --hosts; ranks 0, 1 wait for them",
        ],
    );
    let there = document(&["b"], vec![process(2, &[]), waits(3)]);
    let text = format!("{}\n{}", serde_json::to_string(&here).unwrap(), serde_json::to_string(&there).unwrap());
    let mut documents = Document::read_all(text.as_bytes()).unwrap();
    let (second, mut first) = (documents.remove(1), documents.remove(0));
    first.add(second);
    let text = said(&first);
    says(&text, &["rank 2 (host b, pid 102) is behind: it has not reached barrier number 7", "no call yet"]);
    assert!(!text.contains("not asked"), "{text}");
    for (text, reason) in [("", "it is empty"), ("{}", "not what collperf ps --json prints"), ("[", "not what collperf ps --json prints")] {
        let error = Document::read_all(text.as_bytes()).unwrap_err();
        assert!(error.contains(reason), "{text:?}: {error}");
    }
    let newer = serde_json::to_string(&here).unwrap().replace("\"version\":1,\"time_ns\"", "\"version\":2,\"time_ns\"");
    assert!(Document::read_all(newer.as_bytes()).unwrap_err().contains("version 2"));
}

#[test]
fn a_device_call_that_all_have_queued_is_named_with_the_devices_on_which_it_has_not_ended() {
    let queue = |number, state| on_device(call(number, "all_reduce", state, 5 * SECOND, &[]));
    let stuck = |rank| process(rank, &[queue(3, "completed"), queue(4, "scheduled"), queue(5, "scheduled")]);
    let done = |rank| process(rank, &[queue(3, "completed"), queue(4, "completed"), queue(5, "scheduled")]);
    let text = said(&document(&["a", "b"], vec![stuck(0), done(1), stuck(2), done(3)]));
    says(
        &text,
        &[
            "every rank has queued all_reduce(sum, f32, count 4) number 4 on its device, but after 5.0 s the call has not ended on the devices of ranks 0, 2;",
            "queued  5.0 s  all_reduce(sum, f32, count 4) number 4 on the device",
        ],
    );
    // The recorder does not follow the stream of call 4, on which it never ends: later calls have.
    let unfollowed = |rank| process(rank, &[queue(3, "completed"), queue(4, "scheduled"), queue(5, "completed")]);
    let text = said(&document(&["a", "b"], (0..4).map(unfollowed).collect()));
    assert!(!text.contains("every rank has queued"), "{text}");
}

#[test]
fn the_answer_of_nccl_is_shown_beside() {
    let ras = |text: Option<&str>, error: Option<&str>| Ras {
        host_name: "a".to_owned(),
        address: "localhost:28028".to_owned(),
        text: text.map(str::to_owned),
        error: error.map(str::to_owned),
    };
    let mut all = document(&["a"], vec![]);
    all.nccl_ras = vec![ras(Some("NCCL version 2.28\nhealthy"), None), ras(None, Some("no answer in time"))];
    let read = Document::read_all(serde_json::to_string(&all).unwrap().as_bytes()).unwrap();
    assert_eq!(read[0].nccl_ras, all.nccl_ras);
    says(&said(&all), &["waited:\n  NCCL version 2.28\n  healthy\n", "RAS) at localhost:28028 on host a: no answer in time\n"]);
}

#[test]
fn control_characters_of_other_processes_do_not_reach_the_terminal() {
    let mut odd = silent(1, State::Sleeping, Some("no answer"));
    odd.program = "\x1b[2Jx".to_owned();
    assert_eq!(said(&document(&["a"], vec![odd])), "process 101 (\u{fffd}[2Jx) on host a: no answer\n");
}

/// Changes some bytes: digits to digits, so that the text stays JSON, or any bytes to any.
fn spoiled(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut text = text.to_vec();
    let keeps_json = random.below(4) != 0;
    for _ in 0..=random.below(20) {
        let place = random.below(text.len());
        match text[place..].iter().position(u8::is_ascii_digit) {
            Some(ahead) if keeps_json => text[place + ahead] = b'0' + random.below(10) as u8,
            _ if keeps_json => {}
            _ => text[place] = random.next() as u8,
        }
    }
    text
}

#[test]
fn no_answer_makes_collperf_panic() {
    let waits = |rank| process(rank, &[call(6, "barrier", "completed", 9, &[]), call(7, "all_reduce", "started", 3 * SECOND, &[1, 2, 3])]);
    let queued = |rank| process(rank, &[on_device(call(3, "all_reduce", "scheduled", 5 * SECOND, &[]))]);
    let stopped = silent(1, State::Stopped, Some("stopped by a signal"));
    let text = serde_json::to_vec(&document(&["a", "b"], vec![waits(0), stopped, waits(2), queued(3), queued(0)])).unwrap();
    let seed = 20_261_127;
    let (mut random, mut read) = (Random(seed), 0);
    for _ in 0..2000 {
        if let Ok(documents) = Document::read_all(&spoiled(&text, &mut random)) {
            read += documents.iter().map(said).filter(|text| !text.is_empty()).count();
        }
    }
    assert!(read > 500, "seed {seed}: only {read} texts were documents");
}
