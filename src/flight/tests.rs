//! Tests of a recorder's reports about the calls that it has recorded.

use std::sync::Arc;

use super::record::Message;
use super::*;
use crate::call::element::{DType, TypeTag};
use crate::call::op::ReduceOp;
use crate::call::{CallKind, Collective};
use crate::error::Peer;

fn call(sequence: u64) -> Call {
    let element = TypeTag::Scalar(DType::F32);
    Call { kind: Collective::Reduce, op: ReduceOp::Max.code().into(), element, count: 7, root: Some(2), counts_hash: 0, sequence }
}

fn recorder(calls: usize) -> Arc<Flight> {
    let flight = Arc::new(Flight::new(Orders { calls, stall_warning: Duration::from_secs(30), folder: None, answers: true }));
    let peer = |rank| Peer { rank, host: "höst \"a\"".to_owned(), pid: 40 + rank as u32 };
    let peers = (0..3).map(peer).collect();
    let (name, wiring) = ("world".to_owned(), "3 ranks of one host: shared memory".to_owned());
    flight.introduce(About { id: 0xabc, name, rank: 1, peers, world_ranks: (0..3).collect(), wiring, timeout: Duration::from_secs(9) });
    flight
}

fn lost() -> Error {
    let (doing, reason) = ("reduce".to_owned(), "it died".to_owned());
    Error::PeerLost { doing, peer: Peer::unknown(2), elapsed: Duration::ZERO, reason }
}

#[test]
fn collectives_are_on_record_as_far_as_they_are() {
    let flight = recorder(8);
    flight.begin(&call(0));
    flight.end(&call(0), false);
    flight.begin(&call(1));
    flight.end(&call(1), true);
    flight.end(&call(2), false);
    flight.begin(&call(3));
    flight.fail(&call(3), &lost());
    flight.begin(&call(4));
    flight.begin(&call(4));
    flight.waits(&call(4), &Deadline::after(Duration::from_secs(60)), [0, 2]);
    let records = flight.records();
    let states: Vec<_> = records.iter().map(|record| (record.sequence, record.state)).collect();
    let (finished, failed, started) = (State::Finished, State::Failed, State::Started);
    assert_eq!(states, [(Some(0), finished), (Some(1), finished), (Some(2), finished), (Some(3), failed), (Some(4), started)]);
    assert!(records[0].finished_ns.is_none() && records[1].finished_ns >= records[1].started_ns);
    assert!(records[3].error.as_ref().is_some_and(Error::is_peer_lost) && records[2].error.is_none());
    assert_eq!((records[4].waiting_for.as_slice(), records[3].waiting_for.as_slice()), (&[0, 2][..], &[][..]));
    let Record { kind, op, element, count, root, .. } = &records[4];
    assert_eq!(
        (*kind, op.as_deref(), element.as_str(), *count, *root),
        (CallKind::Collective(Collective::Reduce), Some("max"), "f32", 7, Some(2))
    );
    flight.end(&call(4), false);
    assert!(flight.records()[4].finished_ns.is_some(), "a call that waited is timed to its end");
}

#[test]
fn calls_that_no_thread_has_taken_up_have_the_numbers_that_they_will_have() {
    let flight = recorder(8);
    flight.end(&call(41), false);
    flight.queue(&call(0));
    flight.queue(&call(0));
    flight.queue(&call(0));
    flight.take_up();
    let records = flight.records();
    let queued: Vec<_> = records.iter().filter(|record| record.state == State::Queued).collect();
    assert_eq!(queued.iter().map(|record| (record.sequence, record.number)).collect::<Vec<_>>(), [(Some(42), 1), (Some(43), 2)]);
}

#[test]
fn messages_are_on_record_by_themselves() {
    let flight = recorder(2);
    let message = Message { sends: false, peer: None, tag: 5, count: 3, element: TypeTag::Plain(12) };
    flight.note_message(&Message { sends: true, peer: Some(0), ..message });
    let (first, second) = (flight.begin_message(&message), flight.begin_message(&message));
    flight.fail_message(second, &lost());
    let records = flight.records();
    assert_eq!(records.iter().map(|record| record.state).collect::<Vec<_>>(), [State::Started, State::Failed]);
    assert_eq!((records[0].number, records[0].kind, records[0].peer, records[0].tag), (first, CallKind::Recv, None, Some(5)));
    assert_eq!((records[1].element.as_str(), records[1].sequence), ("plain data of 12 B", None));
    flight.end_message(first);
    assert_eq!(flight.records()[0].state, State::Finished);
}

#[test]
fn a_recorder_that_is_off_records_nothing() {
    let flight = recorder(0);
    flight.begin(&call(0));
    flight.waits(&call(0), &Deadline::after(Duration::from_secs(60)), [0]);
    flight.end(&call(0), true);
    flight.fail(&call(1), &lost());
    flight.queue(&call(2));
    let message = Message { sends: true, peer: Some(0), tag: 0, count: 3, element: TypeTag::Plain(12) };
    let number = flight.begin_message(&message);
    flight.note_message(&message);
    flight.end_message(number);
    assert!(flight.records().is_empty());
}

#[test]
fn a_stall_is_warned_of_before_the_deadline_and_once_a_minute() {
    let flight = recorder(4);
    assert_eq!(flight.stall_after(Duration::from_secs(10)), Duration::from_secs(5));
    assert_eq!(flight.stall_after(Duration::from_secs(1000)), Duration::from_secs(30));
    assert_eq!(Flight::default().stall_after(Duration::from_secs(10)), Duration::MAX);
    flight.begin(&call(3));
    let warned = |flight: &Flight| flight.slowly().warned.map(|(sequence, _)| sequence);
    flight.waits(&call(3), &Deadline::after(Duration::from_secs(60)), [0]);
    assert_eq!(warned(&flight), None);
    flight.waits(&call(3), &Deadline::after(Duration::ZERO), [0]);
    assert_eq!(warned(&flight), Some(3));
    let seconds = Duration::from_secs;
    let mut last = None;
    let times = (0..300).filter(|second| {
        let warns = flight.warns_after(seconds(*second), seconds(1000), last);
        last = if warns { Some(seconds(*second)) } else { last };
        warns
    });
    assert_eq!(times.collect::<Vec<_>>(), [30, 90, 150, 210, 270]);
}

#[test]
fn files_are_json_with_the_names_of_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    let flight = recorder(8);
    flight.end(&call(0), false);
    flight.begin(&call(1));
    flight.fail(&call(1), &lost());
    flight.begin_message(&Message { sends: true, peer: Some(0), tag: 5, count: 3, element: TypeTag::Plain(12) });
    flight.write(folder.path(), "asked for").unwrap();
    let path = flight.write(&folder.path().join("."), "again").unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half written is left over");
    assert!(path.ends_with("flight-0000000000000abc-rank1.json"), "{path:?}");
    let read: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!((&read["format"], &read["version"], &read["reason"]), (&"collectives flight record".into(), &1.into(), &"again".into()));
    assert_eq!((&read["rank"], &read["world_size"], &read["pid"]), (&1.into(), &3.into(), &41.into()));
    assert_eq!(read["ranks"][2], serde_json::json!({"rank": 2, "host_name": "höst \"a\"", "pid": 42}));
    assert_eq!(read["pg_status"]["last_started_collective"], 1);
    assert_eq!(read["pg_status"]["last_completed_collective"], 0);
    let entries = read["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 3);
    assert_eq!((&entries[0]["state"], &entries[0]["profiling_name"]), (&"completed".into(), &"reduce".into()));
    assert!(entries[0]["time_created_ns"].as_u64() > Some(1_600_000_000_000_000_000) && entries[0]["error"].is_null());
    assert_eq!(
        (&entries[1]["state"], &entries[1]["error_kind"], &entries[1]["error_ranks"][0]),
        (&"failed".into(), &"peer_lost".into(), &2.into())
    );
    assert_eq!((&entries[2]["is_p2p"], &entries[2]["peer"], &entries[2]["tag"]), (&true.into(), &0.into(), &5.into()));
}

#[test]
fn a_folder_that_cannot_be_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = recorder(4).write(&file, "asked for").unwrap_err().to_string();
    assert!(error.contains("flight-0000000000000abc-rank1.json"), "{error}");
}
