//! Records with changed bytes. None of them may make `collperf replay` panic.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::read;
use super::tests::{dump, entry, event, pickled, sum, trace};
use crate::random::Random;
use crate::replay::{agreement, order, script};

/// The number of records that each test changes.
const TRIES: usize = 1000;

/// Reads and checks a record as `collperf replay` does before it makes a call. Returns whether it could be replayed.
fn is_replayable(folder: &Path) -> bool {
    let Ok(mut recording) = read(&[PathBuf::from(folder)]) else { return false };
    agreement::check(&mut recording).is_ok()
        && script::write(&recording).is_ok_and(|(mut scripts, _)| order::arrange(&recording, &mut scripts).is_ok())
}

/// Changes bytes: digits to digits, so that JSON stays JSON; a number to a huge one; or any bytes to any.
fn spoil(text: &mut Vec<u8>, random: &mut Random) {
    let manner = random.below(6);
    for _ in 0..=random.below(6) {
        let place = random.below(text.len());
        let digit = text[place..].iter().position(u8::is_ascii_digit).map(|ahead| place + ahead);
        match (manner, digit) {
            (0..=2, Some(digit)) => text[digit] = b'0' + random.below(10) as u8,
            (3, Some(digit)) => drop(text.splice(digit..=digit, b"99999999999999".iter().copied())),
            (4, _) => drop(text.drain(place..(place + random.below(20)).min(text.len()))),
            _ => text[place] = random.next() as u8,
        }
        if text.is_empty() {
            return;
        }
    }
}

/// Changes one of these files again and again, and reads all of them. `least` is how many changed records can be replayed at
/// least, so that the later checks get records, too.
fn none_panics(files: &[(&str, Vec<u8>)], least: usize) {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
    files.iter().for_each(|(name, text)| write(name, text));
    assert!(is_replayable(folder.path()), "the unchanged record");
    let seed = std::env::var("COLLECTIVES_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_128);
    println!("COLLECTIVES_TEST_SEED={seed}");
    let (mut random, mut replayable) = (Random(seed), 0);
    for _ in 0..TRIES {
        let (name, text) = &files[random.below(files.len())];
        let mut changed = text.clone();
        spoil(&mut changed, &mut random);
        write(name, &changed);
        replayable += usize::from(is_replayable(folder.path()));
        write(name, text);
    }
    assert!(replayable >= least && replayable < TRIES, "{replayable} of {TRIES} changed records can be replayed");
}

#[test]
fn no_trace_makes_collperf_panic() {
    let sends = |to: usize| event("send", 0, 9.0, json!({"peer": to, "tag": 3, "count": 2, "bytes": 8, "dtype": "f32"}));
    let receives = |from: usize| event("recv", 0, 9.0, json!({"peer": from, "tag": 3, "count": 2, "bytes": 8, "dtype": "f32"}));
    let calls = |last: Value| vec![sum(1, 1.0), sum(2, 5.0), last];
    let text = |rank: usize, last| trace(rank, 2, &calls(last)).to_string().into_bytes();
    none_panics(&[("trace-0.json", text(0, sends(1))), ("trace-1.json", text(1, receives(0)))], 50);
}

/// Returns the flight record of a rank of two.
fn flight(rank: usize) -> Vec<u8> {
    let call = |number: u64, name: &str| {
        json!({
            "record_id": number, "backend": "host", "collective_seq_id": number, "profiling_name": name, "op": "sum", "dtype": "f32", "count": 4,
            "counts_hash": null, "root": null, "peer": null, "tag": null, "is_p2p": false, "state": "completed",
            "time_created_ns": 1_000_000 * number, "time_discovered_completed_ns": 1_000_000 * number + 5000, "waiting_for": [], "error": null,
            "error_kind": null, "error_ranks": []
        })
    };
    let peers = [0, 1].map(|rank| json!({"rank": rank, "host_name": "a", "pid": 100 + rank}));
    let record = json!({
        "format": "collectives flight record", "version": 1, "reason": "asked for", "time_written_ns": 9_000_000, "rank": rank, "world_size": 2,
        "pg_id": "7", "pg_name": "world", "world_ranks": [0, 1], "wiring": "shared memory", "timeout_s": 60.0, "ranks": peers,
        "entries": [call(1, "all_reduce"), call(2, "all_reduce")]
    });
    record.to_string().into_bytes()
}

#[test]
fn no_flight_record_makes_collperf_panic() {
    none_panics(&[("flight-0.json", flight(0)), ("flight-1.json", flight(1))], 50);
}

/// Returns the calls of PyTorch's record.
fn of_pytorch() -> Value {
    dump(&[entry(0, "nccl:broadcast", json!([[2, 2]]), json!([[2, 2]])), entry(1, "nccl:all_reduce", json!([[3]]), json!([[3]]))])
}

#[test]
fn no_json_of_pytorch_makes_collperf_panic() {
    let text = of_pytorch().to_string().into_bytes();
    none_panics(&[("rank_0.json", text.clone()), ("rank_1.json", text)], 50);
}

#[test]
fn no_pickle_of_pytorch_makes_collperf_panic() {
    let text = pickled(&of_pytorch());
    none_panics(&[("nccl_trace_rank_0", text.clone()), ("nccl_trace_rank_1", text)], 20);
}
