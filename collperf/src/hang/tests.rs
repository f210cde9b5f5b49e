//! Records made by hand, for each possible finding.

use std::path::Path;

use serde_json::{Value, json};

use super::explain;

/// Returns the record of a collective.
fn call(number: u64, name: &str, state: &str) -> Value {
    json!({
        "record_id": number, "backend": "host", "is_p2p": false, "collective_seq_id": number, "p2p_seq_id": null, "profiling_name": name,
        "op": if name == "all_reduce" { json!("sum") } else { json!(null) }, "dtype": "f32", "count": 4, "counts_hash": null,
        "root": if name == "broadcast" { json!(0) } else { json!(null) }, "peer": null, "tag": null, "state": state,
        "time_created_ns": 1_000_000_000_u64 * number, "time_discovered_started_ns": null, "time_discovered_completed_ns": null,
        "waiting_for": [], "error": null, "error_kind": null, "error_ranks": []
    })
}

/// Returns the entry with some keys changed.
fn with(mut entry: Value, keys: Value) -> Value {
    entry.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    entry
}

fn message(name: &str, peer: usize, tag: u64, state: &str) -> Value {
    with(call(0, name, state), json!({"is_p2p": true, "collective_seq_id": null, "peer": peer, "tag": tag, "op": null}))
}

/// Returns a rank's record of a communicator.
fn record(name: &str, rank: usize, world_size: usize, entries: &[Value]) -> Value {
    let peer = |rank: usize| json!({"rank": rank, "host_name": "a", "pid": 100 + rank});
    json!({
        "format": "collectives flight record", "version": 1, "reason": "asked for", "time_written_ns": 60_000_000_000_u64, "rank": rank,
        "world_size": world_size, "host_name": "a", "pid": 100 + rank, "pg_id": format!("id of {name}"), "pg_name": name,
        "wiring": "shared memory", "timeout_ms": 1000, "pg_status": {}, "ranks": (0..world_size).map(peer).collect::<Vec<_>>(),
        "entries": entries, "something new": 7
    })
}

fn write(folder: &Path, records: &[Value]) {
    for (index, record) in records.iter().enumerate() {
        std::fs::write(folder.join(format!("flight-{index}.json")), record.to_string()).unwrap();
    }
}

fn verdict(records: &[Value]) -> String {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), records);
    explain(folder.path()).unwrap()
}

/// Panics if one of the parts is missing.
#[track_caller]
fn says(verdict: &str, parts: &[&str]) {
    for part in parts {
        assert!(verdict.contains(part), "{part:?} is not in:\n{verdict}");
    }
}

#[test]
fn a_rank_that_is_behind_is_named_with_its_last_call() {
    let waits = with(call(41, "all_reduce", "started"), json!({"waiting_for": [2]}));
    let there = [call(40, "barrier", "completed"), waits];
    let verdict = verdict(&[record("world", 0, 3, &there), record("world", 1, 3, &there), record("world", 2, 3, &there[..1])]);
    says(
        &verdict,
        &[
            "rank 2 (host a, pid 102) is behind: it has not reached all_reduce(sum, f32, count 4) number 41",
            "ranks 0, 1 waited for 19.0 s",
            "its last call, barrier number 40, has ended, and the rank has started no other call",
        ],
    );
}

#[test]
fn calls_that_differ_are_named_with_who_made_them() {
    let failed = json!({"error": "mismatch", "error_kind": "mismatch", "error_ranks": [0, 1]});
    let mine = [call(6, "barrier", "completed"), with(call(7, "all_reduce", "failed"), failed.clone())];
    let theirs = [call(6, "barrier", "completed"), with(call(7, "broadcast", "failed"), failed)];
    let verdict = verdict(&[record("world", 0, 3, &mine), record("world", 1, 3, &theirs), record("world", 2, 3, &mine)]);
    says(
        &verdict,
        &[
            "starting at collective number 7, the calls differ: ranks 0, 2 called all_reduce(sum, f32, count 4); rank 1 called broadcast(f32, count 4, root 0)",
        ],
    );
    assert!(!verdict.contains("behind") && !verdict.contains("every rank has started"), "{verdict}");
}

#[test]
fn a_count_a_type_and_a_hash_that_differ_are_differences() {
    for (key, value) in [("count", json!(5)), ("dtype", json!("f64")), ("counts_hash", json!(77)), ("op", json!("max")), ("root", json!(2))]
    {
        let mine = call(3, "all_reduce", "started");
        let theirs = with(mine.clone(), json!({key: value}));
        let verdict = verdict(&[record("world", 0, 2, &[mine]), record("world", 1, 2, &[theirs])]);
        says(&verdict, &["starting at collective number 3, the calls differ"]);
    }
}

#[test]
fn a_rank_that_others_have_lost_is_gone() {
    let lost = json!({"error": "all_reduce: lost rank 1", "error_kind": "peer_lost", "error_ranks": [1]});
    let entries = [with(call(9, "all_reduce", "failed"), lost)];
    let verdict = verdict(&[record("world", 0, 3, &entries), record("world", 2, 3, &entries)]);
    says(&verdict, &["rank 1 (host a, pid 101) is gone: it left no record, and ranks 0, 2 lost it (all_reduce: lost rank 1)"]);
    assert!(!verdict.contains("no record of"), "{verdict}");
}

#[test]
fn a_rank_without_a_record_that_others_wait_for_is_said_to_be_one() {
    let late = json!({"error": "timed out", "error_kind": "timeout", "error_ranks": [1, 3]});
    let entries = [with(call(9, "all_reduce", "failed"), late)];
    let verdict = verdict(&[record("world", 0, 4, &entries), record("world", 2, 4, &entries)]);
    says(&verdict, &["no record of rank 1 (host a, pid 101), rank 3 (host a, pid 103)", "ranks 0, 2 waited for it"]);
}

#[test]
fn rings_that_have_wrapped_are_compared_where_they_overlap() {
    let entries = |numbers: std::ops::Range<u64>, last: &str| {
        let done = numbers.clone().map(|number| call(number, "barrier", "completed"));
        done.chain([call(numbers.end, last, "started")]).collect::<Vec<_>>()
    };
    let verdict =
        verdict(&[record("world", 0, 2, &entries(3000..4000, "all_reduce")), record("world", 1, 2, &entries(3990..4000, "broadcast"))]);
    says(&verdict, &["compared: collectives 3990 to 4000", "starting at collective number 4000, the calls differ"]);
}

#[test]
fn a_rank_that_is_stuck_on_another_communicator_is_found_there() {
    let first = [call(5, "barrier", "completed"), with(call(6, "all_reduce", "started"), json!({"waiting_for": [1]}))];
    let second = with(call(2, "broadcast", "started"), json!({"waiting_for": [0]}));
    let verdict = verdict(&[
        record("world", 0, 2, &first),
        record("world", 1, 2, &first[..1]),
        record("world/1 from rank 0", 1, 2, &[second]),
        record("world/1 from rank 0", 0, 2, &[]),
    ]);
    says(
        &verdict,
        &[
            "its process is in broadcast(f32, count 4, root 0) number 2 of communicator world/1 from rank 0",
            "communicator world/1 from rank 0 (id of world/1 from rank 0): 2 ranks",
            "rank 0 (host a, pid 100) is behind: it has not reached broadcast(f32, count 4, root 0) number 2",
            "it has made no call yet; its process is in all_reduce(sum, f32, count 4) number 6 of communicator world",
        ],
    );
}

#[test]
fn a_call_that_everybody_is_in_says_who_waits_for_whom() {
    let waits = |rank: usize| [with(call(8, "all_reduce", "started"), json!({"waiting_for": [rank]}))];
    let verdict = verdict(&[record("world", 0, 2, &waits(1)), record("world", 1, 2, &waits(0))]);
    says(&verdict, &["every rank has started all_reduce(sum, f32, count 4) number 8", "rank 0 waits for rank 1; rank 1 waits for rank 0"]);
}

#[test]
fn a_call_started_in_the_background_is_not_taken_for_made() {
    let behind = [call(7, "barrier", "started"), call(8, "all_reduce", "scheduled")];
    let there = [call(7, "barrier", "completed"), call(8, "all_reduce", "started")];
    let verdict = verdict(&[record("world", 0, 2, &there), record("world", 1, 2, &behind)]);
    let queued = "it is still in barrier number 7; the call that it has not reached is queued behind other background calls";
    says(&verdict, &["rank 1 (host a, pid 101) is behind", queued]);
}

#[test]
fn messages_that_wait_are_named_with_whether_their_other_end_is_there() {
    let verdict = verdict(&[
        record("world", 0, 3, &[message("recv", 1, 5, "started")]),
        record("world", 1, 3, &[message("send", 0, 6, "started"), message("recv", 2, 0, "completed")]),
    ]);
    says(
        &verdict,
        &[
            "rank 0 (host a, pid 100) waited in recv from rank 1, tag 5 (f32, count 4); rank 1 (host a, pid 101) has not started the matching call",
            "rank 1 (host a, pid 101) waited in send to rank 0, tag 6",
            "no record of rank 2",
        ],
    );
    assert!(!verdict.contains("recv from rank 2"), "{verdict}");
}

#[test]
fn records_of_different_moments_are_no_hang() {
    let verdict = verdict(&[
        record("world", 0, 2, &[call(7, "barrier", "completed")]),
        record("world", 1, 2, &[call(7, "barrier", "completed"), call(8, "all_reduce", "completed")]),
    ]);
    says(&verdict, &["nothing is stuck: the calls agree up to number 8"]);
}

#[test]
fn files_that_are_none_are_named_and_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let good = record("world", 0, 1, &[call(7, "barrier", "completed")]);
    write(folder.path(), std::slice::from_ref(&good));
    let text = good.to_string();
    for (name, text) in [
        ("cut.json", text[..text.len() / 2].to_owned()),
        ("other.json", with(good.clone(), json!({"format": "something else"})).to_string()),
        ("newer.json", with(good.clone(), json!({"version": 2})).to_string()),
        ("stranger.json", with(good.clone(), json!({"rank": 7})).to_string()),
        (".half.json", "{".to_owned()),
        ("notes.txt", "{".to_owned()),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let verdict = explain(folder.path()).unwrap();
    for name in ["cut.json", "other.json", "newer.json", "stranger.json"] {
        assert!(verdict.lines().any(|line| line.starts_with("skipped") && line.contains(name)), "{verdict}");
    }
    assert!(!verdict.contains("half") && !verdict.contains("notes"), "{verdict}");
    says(&verdict, &["nothing is stuck: the calls agree up to number 7"]);
}

#[test]
fn a_folder_without_records_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    assert!(explain(folder.path()).unwrap_err().message.contains("no flight records in this folder"));
    assert!(explain(&folder.path().join("gone")).unwrap_err().message.contains("gone"));
}

#[test]
fn ranks_that_use_communicators_in_different_orders_are_a_circle() {
    let late = |number, name, rank: usize| {
        with(call(number, name, "failed"), json!({"error": "timed out", "error_kind": "timeout", "error_ranks": [rank]}))
    };
    let waits = |number, name, rank: usize| with(call(number, name, "started"), json!({"waiting_for": [rank]}));
    let (world, split) = (call(6, "barrier", "completed"), call(0, "barrier", "completed"));
    let records = [
        record("world", 0, 2, &[world.clone(), late(7, "all_reduce", 1)]),
        record("world", 1, 2, std::slice::from_ref(&world)),
        record("world/0", 0, 2, std::slice::from_ref(&split)),
        record("world/0", 1, 2, &[split.clone(), waits(1, "broadcast", 0)]),
    ];
    let said = verdict(&records);
    says(
        &said,
        &[
            "each rank waits for the next, and the last rank waits for the first: \
             rank 0 (host a, pid 100) waits in all_reduce(sum, f32, count 4) number 7 of communicator world; \
             rank 1 (host a, pid 101) waits in broadcast(f32, count 4, root 0) number 1 of communicator world/0; \
             use these communicators in the same order on all ranks",
            "rank 1 (host a, pid 101) is behind: it has not reached all_reduce(sum, f32, count 4) number 7",
            "its process is in broadcast(f32, count 4, root 0) number 1 of communicator world/0 (id of world/0)",
        ],
    );
    assert_eq!(said.matches("each rank waits").count(), 1, "{said}");
    // Both late for the same call on each: no cycle.
    let alike = [
        record("world", 0, 2, &[world.clone(), late(7, "all_reduce", 1)]),
        record("world/0", 0, 2, &[split.clone(), waits(1, "broadcast", 1)]),
        record("world/0", 1, 2, &[split]),
    ];
    let said = verdict(&alike);
    assert!(!said.contains("each rank waits"), "{said}");
}

#[test]
fn a_circle_may_go_over_three_communicators() {
    let waits = |rank: usize| [with(call(1, "barrier", "started"), json!({"waiting_for": [rank]}))];
    let records = [record("a", 0, 3, &waits(1)), record("b", 1, 3, &waits(2)), record("c", 2, 3, &waits(0))];
    let said = verdict(&records);
    assert_eq!(said.matches("each rank waits").count(), 1, "{said}");
    says(&said, &["barrier number 1 of communicator a; rank 1", "number 1 of communicator b; rank 2", "of communicator c; use these"]);
}

#[test]
fn a_circle_of_many_ranks_is_described_once() {
    let waits = |rank: usize| {
        [with(call(1, "barrier", "started"), json!({"waiting_for": (0..9).filter(|other| other % 2 != rank % 2).collect::<Vec<_>>()}))]
    };
    let records: Vec<Value> = (0..9).map(|rank| record(if rank % 2 == 0 { "a" } else { "b" }, rank, 9, &waits(rank))).collect();
    let said = verdict(&records);
    assert_eq!(said.matches("each rank waits").count(), 1, "{said}");
}
