//! The answer: one JSON object about the process, with a flight record of each communicator.
//!
//! `format` is [`FORMAT`]. `version` is incremented when a key is removed or changes its meaning. Readers skip keys that
//! they do not know.

use std::sync::Arc;

use crate::base::event;
use crate::base::tuning::status::{BYTES, RECORDS, UNFINISHED};
use crate::flight::{Flight, Json, living};

/// The value of `format`.
const FORMAT: &str = "collectives status";
const VERSION: u32 = 1;

/// Returns the answer of this process, with about [`BYTES`] at most.
pub(super) fn to_text() -> String {
    let flights: Vec<Arc<Flight>> = living().into_iter().filter(|flight| flight.answers()).collect();
    // An error in a record may be the program's own, and its text the program's code.
    let text = event::caught("the text of an error", || describe(&flights, BYTES));
    // So may be its drop.
    event::tell("the destructor of records", move || drop(flights));
    text.unwrap_or_else(|| describe(&[], BYTES))
}

/// Describes the process. Communicators with calls that have not ended come first. If the text exceeds `limit`, only the
/// number of the remaining communicators is given.
fn describe(flights: &[Arc<Flight>], limit: usize) -> String {
    let (busy, idle): (Vec<_>, Vec<_>) = flights.iter().partition(|flight| flight.is_busy());
    let mut omitted = 0;
    let mut json = Json::default();
    json.object(|json| {
        json.key("format").text(FORMAT);
        json.key("version").number(VERSION);
        json.key("library_version").text(env!("CARGO_PKG_VERSION"));
        json.key("pid").number(std::process::id());
        json.key("host_name").text(&rustix::system::uname().nodename().to_string_lossy());
        json.key("records").array(busy.into_iter().chain(idle), |json, flight| {
            if json.len() < limit {
                flight.describe(json, RECORDS, UNFINISHED);
            } else {
                omitted += 1;
            }
        });
        json.key("omitted").number(omitted);
    });
    json.into_text()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::call::element::{DType, TypeTag};
    use crate::call::op::ReduceOp;
    use crate::call::{Call, Collective};
    use crate::error::Peer;
    use crate::flight::{About, Message, Orders};

    fn call(sequence: u64) -> Call {
        let element = TypeTag::Scalar(DType::F32);
        Call { kind: Collective::AllReduce, op: ReduceOp::Sum.code().into(), element, count: 7, root: None, counts_hash: 0, sequence }
    }

    /// Returns the recorder of a communicator that has made `calls` calls, and is in another one if `is_busy`.
    fn recorder(id: u64, calls: u64, is_busy: bool) -> Arc<Flight> {
        let flight = Flight::new(Orders { calls: 1024, answers: true, ..Orders::default() });
        let peers = (0..2).map(|rank| Peer { rank, host: "host".to_owned(), pid: 7 }).collect();
        let (name, world_ranks) = ("world".to_owned(), (0..2).collect());
        flight.introduce(About { id, name, rank: 1, peers, world_ranks, wiring: String::new(), timeout: Duration::from_secs(9) });
        let message = Message { sends: false, peer: Some(0), tag: 5, count: 3, element: TypeTag::Plain(12) };
        flight.begin_message(&message);
        (0..calls).for_each(|number| {
            flight.end(&call(number), false);
            flight.note_message(&message);
        });
        if is_busy {
            flight.begin(&call(calls));
        }
        Arc::new(flight)
    }

    fn read(text: &str) -> serde_json::Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn an_answer_has_the_last_calls_and_all_that_have_not_ended() {
        let said = read(&describe(&[recorder(1, 1000, true)], BYTES));
        let known = (&said["format"], &said["version"], &said["omitted"], &said["pid"]);
        assert_eq!(known, (&FORMAT.into(), &VERSION.into(), &0.into(), &std::process::id().into()));
        let entries = said["records"][0]["entries"].as_array().unwrap();
        let (messages, collectives): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry["is_p2p"] == true);
        assert_eq!((collectives.len(), messages.len()), (RECORDS, RECORDS + 1));
        assert_eq!((&collectives[RECORDS - 1]["collective_seq_id"], &collectives[RECORDS - 1]["state"]), (&1000.into(), &"started".into()));
        assert_eq!((&messages[0]["record_id"], &messages[0]["state"]), (&0.into(), &"started".into()), "it is old, and has not ended");
    }

    #[test]
    fn an_answer_is_bounded_and_begins_with_what_hangs() {
        let flights: Vec<_> = (0..50).map(|id| recorder(id, 300, id == 40)).collect();
        let text = describe(&flights, 500_000);
        let said = read(&text);
        let records = said["records"].as_array().unwrap();
        assert_eq!(records.len() as u64 + said["omitted"].as_u64().unwrap(), 50);
        // One more communicator of 300 records fits into the difference.
        assert!(records.len() > 1 && records.len() < 50 && text.len() < 700_000, "{} records, {} B", records.len(), text.len());
        assert_eq!(records[0]["pg_id"], format!("{:016x}", 40));
    }

    #[test]
    fn a_process_without_communicators_has_an_answer() {
        assert_eq!(read(&describe(&[], BYTES))["records"], serde_json::json!([]));
    }
}
