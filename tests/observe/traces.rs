//! Trace files. `collperf/tests/collperf/trace.rs` checks what is made of several.

use std::path::{Path, PathBuf};

use collectives::{Communicator, Config, ReduceOp};

use crate::common::ranks::{Wiring, threads_with};
use crate::trace_files::{lanes, names, read, write_three};

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_rank_writes_its_calls_in_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let traces = folder.path().join("traces");
    write_three(&traces);
    let written = files(&traces);
    assert_eq!(written.len(), 3);
    for (rank, file) in written.iter().enumerate() {
        let trace = read(file);
        assert_eq!((&trace["otherData"]["rank"], &trace["otherData"]["world_size"]), (&rank.into(), &3.into()));
        let lanes = lanes(&trace);
        let collectives = &lanes[&(rank as u64, 1)];
        let sums: Vec<_> = collectives.iter().filter(|call| call.2 == "all_reduce").map(|call| call.3["count"].clone()).collect();
        assert_eq!(sums, [1, 2, 3]);
        let sequences: Vec<_> = collectives.iter().map(|call| call.3["sequence"].as_u64().unwrap()).collect();
        assert!(sequences.is_sorted() && sequences[0] == 0, "{sequences:?}");
        let threads = names(&trace, "thread_name");
        let of_child = format!("world/0 from rank {}: collectives", rank / 2 * 2);
        assert_eq!(threads, ["world: collectives", "world: messages", "world: background", &of_child]);
        let half: &[usize] = if rank == 2 { &[2] } else { &[0, 1] };
        let members =
            serde_json::json!([{"pg_name": "world", "world_ranks": [0, 1, 2]}, {"pg_name": &of_child[..19], "world_ranks": half}]);
        assert_eq!(trace["otherData"]["communicators"], members);
        let background = |phase: &str| trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase).count();
        assert_eq!((background("b"), background("e")), (1, 1));
    }
}

#[test]
fn a_trace_is_written_with_the_last_communicator_and_settings_taken_from_it_begin_another() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.trace_dir = Some(folder.path().to_owned());
    let job = |config: &Config| {
        let builder = |rank| Wiring::Shm.builder_with(rank, config.clone());
        threads_with(2, builder, |comm| {
            comm.barrier().unwrap();
            (comm.config().clone(), comm.abort_handle(), comm.start_send(vec![1u8], comm.rank()).unwrap())
        })
    };
    let kept = job(&config);
    let first: Vec<_> = files(folder.path()).iter().map(|file| (file.clone(), std::fs::read(file).unwrap())).collect();
    assert_eq!(first.len(), 2);
    drop(job(&kept[0].0));
    assert_eq!(files(folder.path()).len(), 4);
    drop(kept);
    assert!(first.iter().all(|(file, text)| std::fs::read(file).unwrap() == *text), "the first job's files are as they were");
}

#[test]
fn without_being_asked_beforehand_a_trace_has_what_the_flight_recorder_has() {
    let folder = tempfile::tempdir().unwrap();
    Communicator::run_local(2, |comm| {
        comm.all_reduce(&mut vec![1.0f32; 1 << 16], ReduceOp::Sum)?;
        let trace = read(&comm.write_trace(folder.path())?);
        let lanes = lanes(&trace);
        assert!(lanes[&(comm.rank() as u64, 1)].iter().any(|call| call.2 == "all_reduce" && call.3["count"] == 1 << 16));
        comm.barrier()
    })
    .unwrap();
    assert_eq!(files(folder.path()).len(), 2);
}
