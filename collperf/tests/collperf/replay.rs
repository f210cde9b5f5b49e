//! `collperf replay`: recorded jobs are replayed, and their calls compared with the recorded ones.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, CustomOp, Envelope, ReduceOp};
use serde_json::{Value, json};

use crate::common::limit::Limit;
use crate::common::ranks::{Wiring, patience, run_ranks, threads_with};
use crate::peer::absent;
use crate::trace_files::{read, write_three};

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    command
}

fn collperf(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let child = command(folder, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Replays a record, and returns the file that was written.
#[track_caller]
fn replay(folder: &Path, record: &str, flags: &[&str]) -> Value {
    let (code, said, complaint) = collperf(folder, &[&["replay", record, "-J", "replay.json"], flags].concat());
    assert_eq!(code, Some(0), "{record} {flags:?}: {complaint}{said}");
    read(&folder.join("replay.json"))
}

/// Returns a rank's calls in a replay: kind, type, count and communicator's name.
fn replayed(replay: &Value, rank: u64) -> Vec<(String, String, u64, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let name = |call: &Value| text(&replay["communicators"][call["communicator"].as_u64().unwrap() as usize]["name"]);
    let of_rank = replay["calls"].as_array().unwrap().iter().filter(|call| call["rank"] == rank);
    of_rank.map(|call| (text(&call["kind"]), text(&call["dtype"]), call["count"].as_u64().unwrap(), name(call))).collect()
}

/// Returns a rank's calls in its trace, in the same form.
fn recorded(trace: &Value) -> Vec<(String, String, u64, String)> {
    let mut events: Vec<&Value> =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| ["X", "b"].contains(&event["ph"].as_str().unwrap())).collect();
    events.sort_by(|a, b| a["ts"].as_f64().unwrap().total_cmp(&b["ts"].as_f64().unwrap()));
    let name = |event: &Value| trace["otherData"]["communicators"][(event["tid"].as_u64().unwrap() as usize - 1) / 4]["pg_name"].clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    events
        .iter()
        .map(|event| (text(&event["name"]), text(&event["args"]["dtype"]), event["args"]["count"].as_u64().unwrap(), text(&name(event))))
        .collect()
}

/// Returns the ranks' files in a folder, in rank order.
fn traces(folder: &Path) -> Vec<Value> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

/// Runs a job of threads whose traces go to `folder`.
fn trace(folder: &Path, ranks: usize, program: impl Fn(&Communicator) + Sync) {
    let mut config = Config::default();
    config.trace_dir = Some(folder.to_owned());
    threads_with(ranks, |rank| Wiring::Shm.builder_with(rank, config.clone()), |comm| program(comm));
}

#[test]
fn a_traced_job_is_replayed_with_its_communicators_over_any_transport() {
    let folder = tempfile::tempdir().unwrap();
    write_three(&folder.path().join("traces"));
    let (code, ..) = collperf(folder.path(), &["trace", "traces", "-o", "merged.json"]);
    assert_eq!(code, Some(0));
    let ranks: Vec<_> = traces(&folder.path().join("traces")).iter().map(recorded).collect();
    assert!(ranks[0].iter().any(|call| call.0 == "broadcast" && call.3 == "world/0 from rank 0"), "{ranks:?}");
    for (record, flags) in
        [("traces", &["--transport", "tcp"][..]), ("traces", &["--gaps", "none", "--repeat", "3"]), ("merged.json", &["-g", "3"])]
    {
        let replay = replay(folder.path(), record, flags);
        for (rank, calls) in ranks.iter().enumerate() {
            assert_eq!(&replayed(&replay, rank as u64), calls, "{record} {flags:?}, rank {rank}");
        }
        let calls = replay["calls"].as_array().unwrap();
        assert!(calls.iter().all(|call| call["recorded_us"].as_f64().unwrap() >= 0.0 && call["replayed_us"].as_f64().unwrap() > 0.0));
    }
}

/// Makes calls of every kind, some of them at the same time.
fn all_kinds(comm: &Communicator) {
    let (me, n) = (comm.rank(), comm.world_size());
    let other = comm.duplicate().unwrap();
    for _ in 0..3 {
        // Overlaps the calls of `comm` on every rank.
        let works = [other.start_all_reduce(vec![1_u32; 100_000], ReduceOp::BitOr), other.start_broadcast(vec![1_u32; 9], 2)];
        comm.all_gather_into(&[me as u16; 5], &mut vec![0; 5 * n]).unwrap();
        comm.reduce(&mut [1_i64; 3], 1, ReduceOp::Prod).unwrap();
        works.into_iter().for_each(|work| drop(work.unwrap().wait().unwrap()));
    }
    let counts: Vec<usize> = (1..=n).collect();
    let total: usize = counts.iter().sum();
    comm.all_gather_v(&mut vec![0_u8; total], &counts).unwrap();
    comm.reduce_scatter_v(&mut vec![1.0_f64; total], &counts, ReduceOp::Max).unwrap();
    let mut all = vec![0_u8; total];
    comm.gather_v_into(&vec![7_u8; me + 1], (me == 1).then_some((&mut all, &counts[..])), 1).unwrap();
    comm.scatter_v_into((me == 0).then_some((&all, &counts[..])), &mut vec![0; me + 1], 0).unwrap();
    let send = vec![1; n];
    comm.all_to_all_v_into(&vec![1_u16; n], &send, &mut vec![0; n], &send).unwrap();
    comm.all_gather_list(&vec![1_u8; me + 1], &mut counts.iter().map(|count| vec![0_u8; *count]).collect::<Vec<_>>()).unwrap();
    comm.gather(&mut vec![1_u8; if me == 2 { 2 * n } else { 2 }], 2).unwrap();
    comm.scatter(&mut vec![1_u8; if me == 2 { 2 * n } else { 2 }], 2).unwrap();
    comm.all_to_all(&mut vec![1.0_f32; 4 * n]).unwrap();
    comm.reduce_scatter(&mut vec![1.0_f32; 4 * n], ReduceOp::Avg).unwrap();
    comm.all_reduce_many(&mut [vec![1.0_f32; 3], vec![2.0; 70_000]], ReduceOp::Sum).unwrap();
    comm.broadcast_many(&mut [vec![1_u8; 3], vec![2; 5]], 1).unwrap();
    let op = CustomOp::new("first", |one: &mut [[u8; 3]], _: &[[u8; 3]]| one.iter_mut().for_each(|it| it[0] = 1));
    comm.all_reduce(&mut [[1_u8; 3]; 4], op).unwrap();
    comm.all_reduce(&mut [0_f32; 0], ReduceOp::Sum).unwrap();
    let (next, last) = ((me + 1) % n, (me + n - 1) % n);
    let received = comm.start_recv(vec![0_u8; 3000], Envelope::any().tag(4)).unwrap();
    comm.send_recv(&[me as u64], next, &mut [0_u64], last).unwrap();
    comm.send(&vec![1_u8; 1000 * (me + 1)], Envelope::rank(next).tag(4)).unwrap();
    received.wait().unwrap();
    comm.monitored_barrier(patience(20)).unwrap();
}

#[test]
fn calls_of_every_kind_are_replayed_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    trace(&folder.path().join("traces"), 3, all_kinds);
    let names: Vec<Vec<(String, String)>> = traces(&folder.path().join("traces"))
        .iter()
        .map(|trace| recorded(trace).into_iter().map(|(kind, .., name)| (kind, name)).collect())
        .collect();
    for flags in [&["--transport", "tcp"][..], &["--gaps", "none"], &["--repeat", "2", "--csv", "calls.csv"]] {
        let replay = replay(folder.path(), "traces", flags);
        for (rank, calls) in names.iter().enumerate() {
            assert_eq!(
                &replayed(&replay, rank as u64).into_iter().map(|(kind, .., name)| (kind, name)).collect::<Vec<_>>(),
                calls,
                "rank {rank}"
            );
        }
        let said = replay["not_recorded"].to_string();
        for part in ["functions of custom ops", "counts per rank", "buffers of a call on several buffers", "own messages"] {
            assert!(said.contains(part), "{part} is not in {said}");
        }
        let of = |rank: u64, kind: &str| {
            replay["calls"].as_array().unwrap().iter().find(|call| call["rank"] == rank && call["kind"] == kind).unwrap().clone()
        };
        assert_eq!(of(1, "gather_v")["bytes"], 6, "the root's counts are known from the other ranks");
        assert_eq!(of(2, "gather_v")["bytes"], 3);
    }
    let lines = std::fs::read_to_string(folder.path().join("calls.csv")).unwrap();
    assert_eq!(lines.lines().count(), 1 + names.iter().map(Vec::len).sum::<usize>());
}

#[test]
fn what_collperf_measured_is_replayed_and_two_replays_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let measured = command(folder.path(), &["all_reduce", "-g", "2", "--backend", "host", "-n", "5", "--sizes", "64,4K"])
        .env("COLLECTIVES_TRACE", "traces")
        .output()
        .unwrap();
    assert!(measured.status.success(), "{measured:?}");
    for file in ["a.json", "b.json"] {
        let (code, said, complaint) = collperf(folder.path(), &["replay", "traces", "--json", file]);
        assert_eq!(code, Some(0), "{complaint}");
        assert!(
            said.contains("# replay of a trace: 2 ranks")
                && said.contains("\nall_reduce ")
                && said.contains("# not in the record: the contents"),
            "{said}"
        );
    }
    let (code, said, complaint) = collperf(folder.path(), &["report", "a.json", "b.json", "--threshold", "1000000"]);
    assert_eq!(code, Some(0), "{complaint}");
    assert!(said.contains("# A: a.json: replay of a trace, 2 ranks") && said.contains("The calls whose times differ most"), "{said}");
    // Slower by far: every time of B is multiplied.
    let mut slower = read(&folder.path().join("b.json"));
    for call in slower["calls"].as_array_mut().unwrap() {
        call["replayed_us"] = json!(call["replayed_us"].as_f64().unwrap() * 1000.0);
    }
    std::fs::write(folder.path().join("slow.json"), slower.to_string()).unwrap();
    assert_eq!(collperf(folder.path(), &["report", "b.json", "slow.json", "--threshold", "10"]).0, Some(7));
    std::fs::write(folder.path().join("other.json"), "{}").unwrap();
    for (arguments, expected, part) in [
        (&["report", "a.json", "other.json"][..], 1, "a.json is a replay, but other.json is not"),
        (&["report", "a.json", "b.json", "--plot", "p.svg"], 6, "not for replays"),
    ] {
        let (code, _, complaint) = collperf(folder.path(), arguments);
        assert!(code == Some(expected) && complaint.contains(part), "{complaint}");
    }
}

#[test]
fn flight_records_are_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let records = folder.path().join("records");
    let mut config = Config::default();
    config.flight_recorder_calls = 16;
    threads_with(
        3,
        |rank| Wiring::Shm.builder_with(rank, config.clone()),
        |comm| {
            for _ in 0..20 {
                comm.all_reduce(&mut [1.0_f32; 6], ReduceOp::Min).unwrap();
            }
            let pair = comm.subgroup(&[2, 0]).unwrap();
            pair.iter().for_each(|pair| pair.broadcast(&mut [1_u8; 7], 1).unwrap());
            comm.barrier().unwrap();
            comm.flight_recorder().write(&records).unwrap();
            pair.iter().for_each(|pair| drop(pair.flight_recorder().write(&records).unwrap()));
        },
    );
    let replay = replay(folder.path(), "records", &[]);
    let world = |rank: u64| replayed(&replay, rank).into_iter().filter(|call| call.3 == "world").map(|call| call.0).collect::<Vec<_>>();
    assert!(world(0).len() >= 4 && world(0).last().unwrap() == "barrier" && world(0).contains(&"all_reduce".to_owned()), "{:?}", world(0));
    assert_eq!(world(0), world(1));
    let pair: Vec<Vec<String>> =
        [0, 1, 2].map(|rank| replayed(&replay, rank).into_iter().filter(|call| call.3 != "world").map(|call| call.0).collect()).to_vec();
    assert_eq!(pair, [vec!["barrier".to_owned(), "broadcast".to_owned()], vec![], vec!["barrier".to_owned(), "broadcast".to_owned()]]);
    assert_eq!(
        replay["communicators"].as_array().unwrap().iter().find(|group| group["name"] != "world").unwrap()["world_ranks"],
        json!([2, 0])
    );
}

/// Returns PyTorch's record of a rank of two: an all-reduce, a gather to rank 1, and a message from rank 0.
fn pytorch(rank: usize) -> Value {
    let entry = |number: u64, name: &str, inputs: Value, outputs: Value| {
        json!({
            "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1, "p2p_seq_id": 0,
            "op_id": number, "profiling_name": name, "time_created_ns": 1_000_000_000 + 1_000_000 * number, "duration_ms": 0.25,
            "input_sizes": inputs, "input_dtypes": ["BFloat16"], "output_sizes": outputs, "output_dtypes": ["BFloat16"], "state": "completed",
            "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": true, "timeout_ms": 600_000,
            "is_p2p": name.contains(' ')
        })
    };
    let gathered = if rank == 1 { json!([[3], [3]]) } else { json!([]) };
    json!({
        "version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "pg_status": {},
        "entries": [
            entry(0, "nccl:all_reduce", json!([[8, 4]]), json!([[8, 4]])),
            entry(1, "nccl:gather", json!([[3]]), gathered),
            entry(2, if rank == 0 { "nccl:send 0->1" } else { "nccl:recv 1<-0" }, json!([[5]]), json!([[5]])),
        ]
    })
}

#[test]
fn records_of_pytorch_are_replayed() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        std::fs::write(folder.path().join(format!("nccl_trace_rank_{rank}.json")), pytorch(rank).to_string()).unwrap();
    }
    let (code, said, complaint) = collperf(folder.path(), &["replay", "nccl_trace_rank_0.json", "nccl_trace_rank_1.json", "-J", "out"]);
    assert_eq!(code, Some(0), "{complaint}");
    for part in ["replay of a PyTorch flight record", "not in the record: the op: sum", "not in the record: the tags of messages: 0"] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
    let replay = read(&folder.path().join("out"));
    let of =
        |rank| replayed(&replay, rank).into_iter().map(|(kind, dtype, count, _)| format!("{kind} {dtype} {count}")).collect::<Vec<_>>();
    assert_eq!(
        [of(0), of(1)],
        [["all_reduce bf16 32", "gather bf16 3", "send bf16 5"], ["all_reduce bf16 32", "gather bf16 3", "recv bf16 5"]]
    );
    assert_eq!(replay["calls"][1]["root"], 1);
    assert!(replay["calls"].as_array().unwrap().iter().all(|call| call["recorded_us"] == 250.0));
}

/// Checks that Python's own pickles of such records are read.
#[test]
fn pickles_are_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let script = "import json, pickle, sys\nfor rank in range(2):\n    dump = json.load(open(f'{rank}.json'))\n    pickle.dump(dump, open(f'dump_{rank}', 'wb'), protocol=int(sys.argv[1]))";
    for rank in 0..2 {
        std::fs::write(folder.path().join(format!("{rank}.json")), pytorch(rank).to_string()).unwrap();
    }
    for protocol in ["2", "4"] {
        match Command::new("python3").args(["-c", script, protocol]).current_dir(folder.path()).status() {
            Ok(status) => assert!(status.success()),
            Err(error) => return println!("skipped: there is no python3: {error}"),
        }
        let (code, said, complaint) = collperf(folder.path(), &["replay", "dump_0", "dump_1"]);
        assert_eq!(code, Some(0), "{complaint}");
        assert!(said.contains("\nall_reduce "), "{said}");
    }
}

/// Returns the trace of a rank with an all-reduce of `count` elements after `gap_us`.
fn one_sum(rank: usize, ranks: usize, count: u64, gap_us: f64) -> Value {
    let sum = |sequence: u64, at: f64| {
        json!({"ph": "X", "name": "all_reduce", "cat": "collective", "pid": rank, "tid": 1, "ts": at, "dur": 1.0,
               "args": {"sequence": sequence, "count": count, "op": "sum", "dtype": "f32"}})
    };
    json!({
        "otherData": {"format": "collectives trace", "version": 1, "base_time_ns": 1, "rank": rank, "world_size": ranks, "pid": 1, "pg_id": "j",
                      "dropped": 0, "communicators": [{"pg_name": "world", "world_ranks": (0..ranks).collect::<Vec<_>>()}]},
        "traceEvents": [sum(0, 1.0), sum(1, 2.0 + gap_us)]
    })
}

fn write_traces(folder: &Path, name: &str, traces: &[Value]) {
    std::fs::create_dir(folder.join(name)).unwrap();
    traces
        .iter()
        .enumerate()
        .for_each(|(rank, trace)| std::fs::write(folder.join(name).join(format!("trace-{rank}.json")), trace.to_string()).unwrap());
}

#[test]
fn records_that_cannot_be_replayed_are_refused_before_any_call() {
    let folder = tempfile::tempdir().unwrap();
    let sums = |counts: &[u64]| counts.iter().enumerate().map(|(rank, count)| one_sum(rank, counts.len(), *count, 5.0)).collect::<Vec<_>>();
    write_traces(folder.path(), "good", &sums(&[4, 4]));
    write_traces(folder.path(), "differ", &sums(&[4, 4, 5]));
    write_traces(folder.path(), "half", &sums(&[4, 4])[..1]);
    write_traces(folder.path(), "huge", &sums(&[1 << 45, 1 << 45]));
    write_traces(folder.path(), "none", &[]);
    // Two communicators in different orders.
    let mut circle = sums(&[4, 4]);
    for (rank, trace) in circle.iter_mut().enumerate() {
        trace["otherData"]["communicators"] = json!([{"pg_name": "one", "world_ranks": [0, 1]}, {"pg_name": "two", "world_ranks": [0, 1]}]);
        trace["traceEvents"][rank]["tid"] = json!(5);
        trace["traceEvents"].as_array_mut().unwrap().iter_mut().for_each(|event| event["args"]["sequence"] = json!(0));
    }
    write_traces(folder.path(), "circle", &circle);
    let cases: [(&[&str], i32, &str); 9] = [
        (&["differ"], 1, "ranks 0, 1 called all_reduce(sum, f32, count 4) number 0; rank 2 called all_reduce(sum, f32, count 5) number 0"),
        (&["half"], 1, "the trace of rank 1 is missing"),
        (&["none"], 1, "there is no trace and no flight record"),
        (&["absent"], 1, "reading absent"),
        (&["huge"], 5, "the largest call of the record"),
        (&["circle"], 1, "the recorded calls wait for each other: rank 0 in its call 0, all_reduce of communicator two; rank 1"),
        (&["good", "-g", "3"], 6, "-g 3: the record has 2 ranks, but this job has 3: start 2 ranks"),
        (&["good", "--repeat", "0"], 6, "--repeat"),
        (&[], 6, "RECORD"),
    ];
    for (arguments, expected, part) in cases {
        let (code, said, complaint) = collperf(folder.path(), &[&["replay"], arguments].concat());
        assert_eq!(code, Some(expected), "{arguments:?}: {complaint}");
        assert!(complaint.contains(part) && !said.contains("\nall_reduce "), "{arguments:?}: {complaint}");
    }
}

#[test]
fn a_time_far_in_the_future_is_announced_and_its_gap_shortened() {
    let folder = tempfile::tempdir().unwrap();
    write_traces(folder.path(), "far", &[one_sum(0, 2, 4, 1e15), one_sum(1, 2, 4, 1e15)]);
    let (code, said, complaint) = collperf(folder.path(), &["replay", "far", "--gaps", "none"]);
    assert_eq!(code, Some(0), "{complaint}");
    assert!(said.contains("# expected: the gaps of a rank take up to 0.0 s") && !said.contains("shortened"), "{said}");
    // The line comes before the gap, so a reader that waits for it can end the replay.
    let mut child =
        command(folder.path(), &["replay", "far", "--gaps", "sleep"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "# expected: the gaps of a rank take up to 60.0 s, in addition to its calls\n");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn background_calls_that_need_more_memory_than_there_is_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free: u64 = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse().ok()).unwrap();
    // Each of 60 calls that overlap needs a fortieth of the memory: 4 B for each element, of free / 160 KiB.
    let rank = |rank: usize| {
        let mut trace = one_sum(rank, 2, free * 1024 / 160, 5.0);
        let call = trace["traceEvents"][0].clone();
        let number = |number: u64| {
            let mut call = call.clone();
            (call["ts"], call["dur"], call["args"]["sequence"]) = (json!(number + 1), json!(1000.0), json!(number));
            call
        };
        trace["traceEvents"] = (0..60).map(number).collect();
        trace
    };
    write_traces(folder.path(), "many", &[rank(0), rank(1)]);
    let (code, _, complaint) = collperf(folder.path(), &["replay", "many", "--gaps", "none"]);
    assert_eq!(code, Some(5), "{complaint}");
    assert!(complaint.contains("that run at the same time") && complaint.contains("this host's 2 ranks need"), "{complaint}");
}

#[test]
fn a_launcher_starts_as_many_ranks_as_the_record_has() {
    let folder = tempfile::tempdir().unwrap();
    write_traces(folder.path(), "good", &[one_sum(0, 2, 4, 5.0), one_sum(1, 2, 4, 5.0)]);
    let ended = run_ranks(2, || command(folder.path(), &["replay", "good"]));
    assert!(
        ended.iter().all(|rank| rank.status.success()) && String::from_utf8_lossy(&ended[0].stdout).contains("\nall_reduce "),
        "{ended:?}"
    );
    let ended = run_ranks(3, || command(folder.path(), &["replay", "good"]));
    assert_eq!(ended.iter().map(|rank| rank.status.code()).collect::<Vec<_>>(), [Some(6), Some(1), Some(1)]);
    assert!(String::from_utf8_lossy(&ended[0].stderr).contains("the record has 2 ranks, but this job has 3"), "{ended:?}");
}

#[test]
fn a_rank_that_is_killed_ends_the_replay() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 1 pauses for a minute before its second call, in which rank 0 waits.
    write_traces(folder.path(), "long", &[one_sum(0, 2, 4, 0.0), one_sum(1, 2, 4, 60e6)]);
    let child = command(folder.path(), &["replay", "long"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let began = Instant::now();
    let victim = loop {
        let of_rank_1 = |pid: &&str| {
            std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|text| text.split(|byte| *byte == 0).any(|word| word == b"RANK=1"))
        };
        let ranks = std::fs::read_to_string(&children).unwrap_or_default();
        if let Some(pid) = ranks.split_whitespace().find(of_rank_1) {
            break rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
        }
        assert!(began.elapsed() < patience(20), "{ranks}");
        std::thread::yield_now();
    };
    rustix::process::kill_process(victim, rustix::process::Signal::KILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success() && began.elapsed() < Duration::from_secs(50), "{output:?}");
}

/// The training of a small model with DistributedDataParallel over the backend.
const TRAINING: &str = "
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group('collectives', init_method='file://' + os.environ['MEET'], rank=int(os.environ['RANK']), world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
";

/// Returns the Python with PyTorch and the folder of the backend, or why there is none.
fn pytorch_with_backend() -> Result<(PathBuf, PathBuf), String> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let python = std::env::var_os("COLLECTIVES_INTEROP_PYTHON").map_or_else(|| target.join("interop/bin/python"), PathBuf::from);
    let folder = target.join("python/packages");
    match () {
        () if !python.exists() => absent("torch", format!("there is no {} (tests/interop/setup installs it)", python.display())),
        () if !folder.join("collectives_torch").is_dir() => {
            Err(format!("no backend in {} (python/tests/run installs it)", folder.display()))
        }
        () => Ok((python, folder)),
    }
}

#[test]
fn a_training_of_pytorch_is_replayed() {
    let (python, packages) = match pytorch_with_backend() {
        Ok(found) => found,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let rank = |rank: usize| {
        let mut command = Command::new(&python);
        command.args(["-W", "ignore", "-c", TRAINING]).env("PYTHONPATH", &packages).env("RANK", rank.to_string());
        command.env("MEET", folder.path().join("meet")).env("COLLECTIVES_TRACE", folder.path().join("traces")).spawn().unwrap()
    };
    let ranks = [rank(0), rank(1)];
    let _limits = ranks.each_ref().map(Limit::on);
    assert!(ranks.into_iter().all(|mut rank| rank.wait().unwrap().success()));
    let ranks: Vec<_> = traces(&folder.path().join("traces")).iter().map(recorded).collect();
    assert!(ranks[0].iter().filter(|call| call.0 == "all_reduce").count() >= 15, "{ranks:?}");
    let replay = replay(folder.path(), "traces", &[]);
    for (rank, calls) in ranks.iter().enumerate() {
        assert_eq!(&replayed(&replay, rank as u64), calls, "rank {rank}");
    }
}

#[test]
fn files_for_results_are_checked_before_anything_is_replayed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.json"), "a record").unwrap();
    for (flags, code, words) in [
        (&["a.json", "-J", "a.json"][..], 6, "a.json: this file is read"),
        (&[".", "--csv", "./a.json"], 6, "a.json: this file is read"),
        (&["a.json", "-J", "out", "--csv", "./out"], 6, "-J and --csv name the same file"),
        (&["a.json", "-J", "absent/out"], 1, "creating absent/out"),
    ] {
        let (found, _, complaint) = collperf(folder.path(), &[&["replay"], flags].concat());
        assert!(found == Some(code) && complaint.contains(words), "{flags:?}: {found:?}: {complaint}");
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("a.json")).unwrap(), "a record");
}
