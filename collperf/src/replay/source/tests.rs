//! Records made by hand.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::replay::agreement;
use crate::replay::recording::{Call, Counts, Group, Kind};

/// Returns the trace of a rank whose calls are in communicator `world`, or in the second one of its list.
pub(super) fn trace(rank: usize, world_size: usize, events: &[Value]) -> Value {
    let everyone: Vec<usize> = (0..world_size).collect();
    json!({
        "otherData": {
            "format": "collectives trace", "version": 1, "base_time_ns": 1_700_000_000_000_000_000_u64, "rank": rank, "world_size": world_size,
            "host_name": "a", "pid": 7, "pg_id": "job", "dropped": 0,
            "communicators": [{"pg_name": "world", "world_ranks": everyone}, {"pg_name": "one", "world_ranks": [rank]}]
        },
        "traceEvents": events
    })
}

/// Returns a call of a trace.
pub(super) fn event(name: &str, communicator: u64, start_us: f64, arguments: Value) -> Value {
    json!({"ph": "X", "name": name, "cat": "collective", "pid": 0, "tid": 4 * communicator + 1, "ts": start_us, "dur": 2.5, "args": arguments})
}

pub(super) fn sum(sequence: u64, start_us: f64) -> Value {
    event("all_reduce", 0, start_us, json!({"sequence": sequence, "count": 4, "bytes": 16, "op": "sum", "dtype": "f32"}))
}

/// Returns PyTorch's record of a rank of two.
pub(super) fn dump(entries: &[Value]) -> Value {
    json!({
        "version": "2.10", "comm_lib_version": "2.27", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {}, "entries": entries
    })
}

pub(super) fn entry(number: u64, name: &str, inputs: Value, outputs: Value) -> Value {
    let is_p2p = name.contains("send") || name.contains("recv");
    json!({
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": name, "time_created_ns": 1_000_000 * (number + 1), "input_sizes": inputs, "input_dtypes": ["Float"],
        "output_sizes": outputs, "output_dtypes": ["Float"], "state": "completed", "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 1_000_000 * (number + 1) + 5000, "retired": true, "timeout_ms": 600_000, "is_p2p": is_p2p,
        "frames": [{"name": "main", "filename": "a.py", "line": 3}]
    })
}

/// Reads files with these names and contents.
fn read_all(files: &[(&str, String)]) -> Result<Recording, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    read(&[folder.path().to_owned()]).map_err(|failure| failure.message)
}

fn traces(ranks: &[Vec<Value>]) -> Result<Recording, String> {
    let names: Vec<String> = (0..ranks.len()).map(|rank| format!("trace-{rank}.json")).collect();
    let text = |rank: usize| trace(rank, ranks.len(), &ranks[rank]).to_string();
    read_all(&(0..ranks.len()).map(|rank| (&*names[rank], text(rank))).collect::<Vec<_>>())
}

fn dumps(ranks: [Vec<Value>; 2]) -> Result<Recording, String> {
    let [first, second] = ranks.map(|entries| dump(&entries).to_string());
    read_all(&[("nccl_trace_rank_0", first), ("nccl_trace_rank_1", second)])
}

#[test]
fn traces_are_put_together() {
    let messages = [
        json!({"ph": "b", "name": "recv", "pid": 0, "tid": 4, "ts": 30.0, "id": 7, "args": {"count": 3, "peer": 1, "tag": 5, "dtype": "u8"}}),
        json!({"ph": "e", "name": "recv", "pid": 0, "tid": 4, "ts": 34.0, "id": 7}),
    ];
    let first = [vec![sum(1, 10.25), event("barrier", 1, 20.0, json!({"sequence": 0, "count": 0}))], messages.to_vec()].concat();
    let recording = traces(&[first, vec![sum(1, 11.0)]]).unwrap();
    let group = |name: &str, members: &[usize]| Group { name: name.to_owned(), members: members.to_vec() };
    assert_eq!(recording.groups, [group("world", &[0, 1]), group("one", &[0])]);
    let [sum, barrier, recv] = &recording.ranks[0][..] else { panic!("{recording:?}") };
    assert_eq!((sum.in_words(), sum.start_ns, sum.duration_ns), ("all_reduce(sum, f32, count 4)".to_owned(), Some(10_250), Some(2500)));
    assert_eq!((barrier.group, barrier.in_words()), (1, "barrier".to_owned()));
    assert_eq!((recv.kind, recv.peer, recv.tag, recv.duration_ns), (Kind::RECV, Some(1), 5, Some(4000)));
}

#[test]
fn calls_on_devices_have_a_communicator_of_their_own() {
    let device = json!({"ph": "X", "name": "barrier", "cat": "device", "pid": 0, "tid": 3, "ts": 1.0, "dur": 1.0, "args": {"count": 0}});
    let recording = traces(&[vec![sum(1, 10.0), device]]).unwrap();
    assert_eq!(recording.groups.iter().map(|group| &*group.name).collect::<Vec<_>>(), ["world", "world (device calls)"]);
}

#[test]
fn traces_that_do_not_make_a_job_are_refused() {
    let (good, other) = (trace(0, 2, &[sum(1, 1.0)]), trace(1, 2, &[sum(1, 1.0)]));
    let with = |pointer: &str, value: Value| {
        let mut trace = other.clone();
        *trace.pointer_mut(pointer).unwrap() = value;
        trace.to_string()
    };
    for (text, reason) in [
        (with("/otherData/rank", json!(0)), "two traces of rank 0"),
        (with("/otherData/rank", json!(3)), "the trace of rank 1 is missing"),
        (with("/otherData/pg_id", json!("x")), "several jobs"),
        (with("/otherData/version", json!(2)), "has version 2"),
        (with("/otherData/communicators/0/world_ranks", json!([0, 1_u64 << 60])), "but the job has only 2 ranks"),
        (with("/otherData/communicators/0/world_ranks", json!([1, 1])), "lists rank 1 twice"),
        (with("/otherData/communicators/0/world_ranks", json!([])), "has no ranks"),
        (with("/otherData/communicators", json!(null)), "record the job again"),
        (with("/traceEvents/0/tid", json!(90)), "track 90 belongs to no communicator"),
        (with("/traceEvents/0/ts", json!(-1.0)), "has no time"),
        (with("/traceEvents/0/ts", json!(null)), "has no time"),
        (with("/traceEvents/0/args/count", json!(-4)), "not a readable trace"),
        (other.to_string()[..300].to_owned(), "neither JSON nor a pickle"),
        (String::new(), "neither JSON nor a pickle"),
        ("{}".to_owned(), "neither a trace nor a flight record"),
    ] {
        let error = read_all(&[("a.json", good.to_string()), ("b.json", text)]).unwrap_err();
        assert!(error.contains(reason), "{reason:?} is not in {error}");
    }
    let huge = trace(0, 1, &[]).to_string().replace("\"world_size\":1", "\"world_size\":9999999999999");
    assert!(read_all(&[("a", huge)]).unwrap_err().contains("has 9999999999999 ranks, but there are traces of 1"));
    assert!(read(&[PathBuf::from("absent")]).unwrap_err().message.contains("reading absent"));
}

#[test]
fn a_record_cut_anywhere_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank_0");
    let whole = dump(&[entry(0, "nccl:all_reduce", json!([[2]]), json!([[2]]))]).to_string();
    for text in [trace(0, 1, &[sum(1, 1.0)]).to_string(), whole] {
        for length in 0..text.len() {
            std::fs::write(&path, &text[..length]).unwrap();
            assert!(read(std::slice::from_ref(&path)).is_err(), "cut to {length} bytes");
        }
    }
}

/// The entry of a call that NCCL makes together with others.
fn scheduled(mut entry: Value) -> Value {
    entry["state"] = json!("scheduled");
    entry["duration_ms"] = Value::Null;
    entry
}

#[test]
fn calls_of_pytorch_have_their_kinds_and_sizes() {
    let two = json!([[2, 3], [2, 3]]);
    let calls = |rank: usize| {
        let gather = if rank == 1 { two.clone() } else { json!([]) };
        let message = if rank == 0 { "nccl:send 0->1" } else { "nccl:recv 1<-0" };
        vec![
            entry(0, "nccl:all_reduce", json!([[4, 5]]), json!([[4, 5]])),
            entry(1, "nccl:_all_gather_base", json!([[7]]), json!([[14]])),
            entry(2, "nccl:gather", json!([[2, 3]]), gather),
            entry(3, "nccl:all_reduce_barrier", json!([[1]]), json!([[1]])),
            entry(4, "nccl:all_to_all", json!([[rank], [5]]), json!([[if rank == 0 { 0 } else { 5 }], [if rank == 0 { 1 } else { 5 }]])),
            scheduled(entry(5, message, json!([[9]]), json!([[9]]))),
            entry(6, "nccl:coalesced", json!([]), json!([])),
            entry(7, "nccl:reduce_scatter_tensor_coalesced", json!([[4], [8]]), json!([[2], [4]])),
        ]
    };
    let mut recording = dumps([calls(0), calls(1)]).unwrap();
    agreement::check(&mut recording).unwrap();
    let words: Vec<String> = recording.ranks[0].iter().map(Call::in_words).collect();
    assert_eq!(
        words,
        [
            "all_reduce(sum, f32, count 20)",
            "all_gather(f32, count 7)",
            "gather(f32, count 6, root 1)",
            "barrier",
            "all_to_all_v(f32)",
            "send(f32, count 9)",
            "reduce_scatter_many(sum, f32, count 6)"
        ]
    );
    assert_eq!(recording.ranks[0][4].counts, Some(Counts::Pairs { send: vec![0, 5], receive: vec![0, 1] }));
    assert_eq!((recording.ranks[1][5].kind, recording.ranks[1][5].peer, recording.ranks[1][5].tag), (Kind::RECV, Some(0), 0));
    assert_eq!((recording.ranks[0][0].start_ns, recording.ranks[0][0].duration_ns), (Some(1_000_000), Some(5000)));
    let message = &recording.ranks[0][5];
    assert!(message.is_complete && message.is_background && message.duration_ns > Some(0), "the entry after it has its end: {message:?}");
    assert_eq!(recording.notes, [""; 0]);
}

#[test]
fn records_of_pytorch_that_are_wrong_are_refused() {
    let good = entry(0, "nccl:all_reduce", json!([[2]]), json!([[2]]));
    let with = |key: &str, value: Value| {
        let mut entry = good.clone();
        entry[key] = value;
        dumps([vec![good.clone()], vec![entry]])
    };
    for (outcome, reason) in [
        (with("process_group", json!(["9", "x"])), "process group 9 (x) is not in pg_config"),
        (with("input_sizes", json!([[u64::MAX, 3]])), "are too large"),
        (with("input_sizes", json!([["two"]])), "not a readable PyTorch flight record"),
        (with("profiling_name", json!("nccl:send")), "does not name the other rank"),
    ] {
        let error = outcome.unwrap_err();
        assert!(error.contains(reason), "{reason:?} is not in {error}");
    }
    let named = |name: &str, text: Value| read_all(&[(name, text.to_string())]);
    assert!(named("dump", dump(&[])).unwrap_err().contains("must end with the rank"));
    assert!(named("rank1.json", dump(&[])).unwrap_err().contains("no flight record of rank 0"));
    let mut old = dump(&[]);
    old["version"] = json!("1.5");
    assert!(named("rank0", old).unwrap_err().contains("version \"1.5\""));
    let mut strange = dump(&[]);
    strange["pg_config"]["0"]["ranks"] = json!("[0, 99999999999]");
    assert!(named("rank0", strange).unwrap_err().contains("ranks up to 99999999999, but there is no flight record of rank 1"));
}

#[test]
fn the_rank_in_a_file_counts_and_its_name_must_not_contradict() {
    let calls = [entry(0, "nccl:barrier", json!([]), json!([]))];
    let of = |rank: usize| {
        let mut dump = dump(&calls);
        dump["rank"] = json!(rank);
        dump.to_string()
    };
    for names in [["first", "second"], ["rank_0", "second.json"]] {
        let recording = read_all(&[(names[0], of(0)), (names[1], of(1))]).unwrap();
        assert_eq!(recording.ranks.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1], "{names:?}");
    }
    let error = read_all(&[("rank_1", of(0)), ("rank_0", of(1))]).unwrap_err();
    assert!(error.contains("the file is of rank 0, but its name ends with 1: rename it, as in nccl_trace_rank_0"), "{error}");
    // With and without white space before it, a file without a rank has the one in its name.
    for space in ["", "\n", " \t\r\n  "] {
        let text = || format!("{space}{}", dump(&calls));
        assert_eq!(read_all(&[("rank_0", text()), ("rank_1", text())]).unwrap().ranks.len(), 2, "{space:?}");
        let with_rank = |rank| format!("{space}{}", of(rank));
        assert_eq!(read_all(&[("a", with_rank(0)), ("b", with_rank(1))]).unwrap().ranks.len(), 2, "{space:?}");
    }
}

/// Writes a pickle as PyTorch does.
pub(super) fn pickled(value: &Value) -> Vec<u8> {
    fn put(value: &Value, out: &mut Vec<u8>) {
        match value {
            Value::Null => out.push(b'N'),
            Value::Bool(is) => out.push(if *is { 0x88 } else { 0x89 }),
            Value::Number(number) => {
                out.extend([0x8a, 8]);
                out.extend(number.as_i64().unwrap().to_le_bytes());
            }
            Value::String(text) => {
                out.push(b'X');
                out.extend((text.len() as u32).to_le_bytes());
                out.extend(text.as_bytes());
            }
            Value::Array(items) => {
                out.extend(b"](");
                items.iter().for_each(|item| put(item, out));
                out.push(b'e');
            }
            Value::Object(map) => {
                out.extend(b"}(");
                for (key, value) in map {
                    put(&json!(key), out);
                    put(value, out);
                }
                out.push(b'u');
            }
        }
    }
    let mut out = vec![0x80, 2];
    put(value, &mut out);
    out.push(b'.');
    out
}

#[test]
fn a_pickle_holds_the_same_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let calls = [entry(0, "nccl:broadcast", json!([[2, 2]]), json!([[2, 2]])), entry(1, "nccl:barrier", json!([]), json!([]))];
    for rank in 0..2 {
        std::fs::write(folder.path().join(format!("nccl_trace_rank_{rank}")), pickled(&dump(&calls))).unwrap();
    }
    let recording = read(&[folder.path().to_owned()]).unwrap();
    let same = dumps([calls.to_vec(), calls.to_vec()]).unwrap();
    assert_eq!((recording.groups, &recording.ranks), (same.groups, &same.ranks));
    let path = folder.path().join("nccl_trace_rank_1");
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(read(std::slice::from_ref(&path)).is_err(), "cut to {length} bytes");
    }
}

#[test]
fn the_first_call_that_differs_is_named() {
    let other = event("all_reduce", 0, 3.0, json!({"sequence": 2, "count": 5, "bytes": 20, "op": "sum", "dtype": "f32"}));
    let mut recording = traces(&[vec![sum(1, 1.0), sum(2, 3.0)], vec![sum(1, 1.0), other], vec![sum(1, 1.0), sum(2, 3.0)]]).unwrap();
    let error = agreement::check(&mut recording).unwrap_err();
    let said = "ranks 0, 2 called all_reduce(sum, f32, count 4) number 2; rank 1 called all_reduce(sum, f32, count 5) number 2";
    assert!(error.contains("starting at collective 1 of the record of communicator world") && error.contains(said), "{error}");
}

#[test]
fn calls_that_not_all_ranks_have_are_left_out() {
    let failed = |mut event: Value| {
        event["args"]["error"] = json!("timed out");
        event
    };
    let mut recording = traces(&[vec![sum(1, 1.0), sum(2, 3.0), sum(3, 5.0)], vec![failed(sum(1, 1.0)), sum(2, 3.0)]]).unwrap();
    agreement::check(&mut recording).unwrap();
    assert_eq!(
        recording.ranks.iter().map(|calls| calls.iter().map(|call| call.sequence.unwrap()).collect::<Vec<_>>()).collect::<Vec<_>>(),
        [[2], [2]]
    );
    assert_eq!(recording.notes.len(), 2, "{:?}", recording.notes);
    // The oldest calls of a trace that has lost some.
    let mut cut = traces(&[vec![sum(7, 1.0), sum(8, 3.0)], vec![sum(6, 0.5), sum(7, 1.0), sum(8, 3.0)]]).unwrap();
    cut.is_cut = true;
    agreement::check(&mut cut).unwrap();
    assert_eq!(cut.ranks.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    let strange = event("broadcast", 0, 1.0, json!({"sequence": 1, "count": 1, "root": 9, "dtype": "u8"}));
    let mut recording = traces(&[vec![strange.clone()], vec![strange]]).unwrap();
    assert!(agreement::check(&mut recording).unwrap_err().contains("names rank 9, but the communicator has 2 ranks"));
}

#[test]
fn receives_from_any_rank_get_a_sender() {
    let message =
        |name: &str, at: f64, peer: Value, count: u64| event(name, 0, at, json!({"count": count, "peer": peer, "tag": 3, "dtype": "u8"}));
    let mut recording = traces(&[
        vec![message("recv", 9.0, json!(null), 6), message("recv", 11.0, json!(null), 8)],
        vec![message("send", 1.0, json!(0), 5)],
        vec![message("send", 2.0, json!(0), 6), message("send", 3.0, json!(0), 6)],
    ])
    .unwrap();
    agreement::check(&mut recording).unwrap();
    let received: Vec<_> = recording.ranks[0].iter().map(|call| (call.peer.unwrap(), call.count)).collect();
    assert_eq!(received, [(2, 6), (1, 5)], "the second one has a buffer larger than any message");
    assert_eq!(recording.ranks.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1]);
    assert!(recording.notes.iter().any(|note| note.contains("2 receives from any rank")), "{:?}", recording.notes);
}

#[test]
fn ranks_are_at_the_end_of_names() {
    for (name, rank) in [("nccl_trace_rank_12", Some(12)), ("rank3.json", Some(3)), ("7.pickle", Some(7)), ("rank", None), ("x9y", None)] {
        assert_eq!(rank_in_name(Path::new(name)), rank, "{name}");
    }
}
