//! Records as a file of JSON.
//!
//! The names are those of PyTorch's flight recorder where they mean the same. `format` is [`FORMAT`], and `version` counts up when
//! something is taken away or comes to mean something else; readers skip keys that they do not know.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::about::About;
use super::json::Json;
use super::record::{FlightPlane, FlightRecord, FlightState};
use crate::error::{Error, Peer, Result};

/// What the files say that they are.
const FORMAT: &str = "collectives flight record";
const VERSION: u32 = 1;

/// Writes the file of one rank and communicator, whole or not at all; where it is.
pub(super) fn write(folder: &Path, about: &About, reason: &str, records: &[FlightRecord]) -> Result<PathBuf> {
    let name = format!("flight-{:016x}-rank{}.json", about.id, about.rank);
    write_whole(folder, &name, &to_json(about, reason, records), "the flight record")
}

/// Writes `text`, which is `what`, as a file of a folder that need not be there, whole or not at all; where it is.
pub(crate) fn write_whole(folder: &Path, name: &str, text: &str, what: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    // Of a name that no other writer has, thread or process: one that died may have left its own half written.
    let half = folder.join(format!(".{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
    let written = fs::create_dir_all(folder).and_then(|()| {
        let mut file = fs::File::create(&half)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&half, &path)
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&half);
        return Err(Error::io(format!("writing {what} {}", path.display()), error));
    }
    Ok(path)
}

/// The file's text.
pub(super) fn to_json(about: &About, reason: &str, records: &[FlightRecord]) -> String {
    let mut json = Json::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json.object(|json| {
        json.key("format").text(FORMAT);
        json.key("version").number(VERSION);
        json.key("reason").text(reason);
        json.key("time_written_ns").number(now.as_nanos());
        json.key("rank").number(about.rank);
        json.key("world_size").number(about.peers.len());
        let me = about.peers.get(about.rank);
        json.key("host_name").text(me.map_or("", |me| &me.host));
        json.key("pid").number(me.map_or(0, |me| me.pid));
        json.key("pg_id").text(&format!("{:016x}", about.id));
        json.key("pg_name").text(&about.name);
        json.key("wiring").text(&about.wiring);
        json.key("timeout_ms").number(about.timeout.as_millis());
        json.key("pg_status").object(|json| status(json, records));
        json.key("ranks").array(about.peers.iter(), peer);
        json.key("entries").array(records, entry);
    });
    json.into_text()
}

/// The numbers of the last collectives of the host.
fn status(json: &mut Json, records: &[FlightRecord]) {
    let last = |states: &[FlightState]| {
        let fitting = records.iter().filter(|record| record.plane == FlightPlane::Host && states.contains(&record.state));
        fitting.filter_map(|record| record.sequence).max()
    };
    let (started, finished) = ([FlightState::Started, FlightState::Finished, FlightState::Failed], [FlightState::Finished]);
    json.key("last_enqueued_collective").number_or_null(last(&[FlightState::Queued]).or_else(|| last(&started)));
    json.key("last_started_collective").number_or_null(last(&started));
    json.key("last_completed_collective").number_or_null(last(&finished));
}

fn peer(json: &mut Json, peer: &Peer) {
    json.object(|json| {
        json.key("rank").number(peer.rank);
        json.key("host_name").text(&peer.host);
        json.key("pid").number(peer.pid);
    });
}

fn entry(json: &mut Json, record: &FlightRecord) {
    json.object(|json| {
        json.key("record_id").number(record.number);
        json.key("plane").text(if record.plane == FlightPlane::Device { "device" } else { "host" });
        json.key("is_p2p").boolean(record.sequence.is_none());
        json.key("collective_seq_id").number_or_null(record.sequence);
        json.key("p2p_seq_id").number_or_null(record.sequence.is_none().then_some(record.number));
        json.key("profiling_name").text(record.kind);
        json.key("op").text_or_null(record.op.as_deref());
        json.key("dtype").text(&record.element);
        json.key("count").number(record.count);
        json.key("counts_hash").number_or_null(record.counts_hash);
        json.key("root").number_or_null(record.root);
        json.key("peer").number_or_null(record.peer);
        json.key("tag").number_or_null(record.tag);
        json.key("state").text(word(record.state));
        json.key("time_created_ns").number_or_null(record.started_ns);
        let is_queued = record.state == FlightState::Queued;
        json.key("time_discovered_started_ns").number_or_null(record.started_ns.filter(|_| !is_queued));
        json.key("time_discovered_completed_ns").number_or_null(record.finished_ns);
        json.key("waiting_for").array(&record.waiting_for, |json, rank| json.number(rank));
        json.key("error").text_or_null(record.error.as_ref().map(Error::to_string).as_deref());
        let (kind, ranks) = record.error.as_ref().map_or((None, Vec::new()), kind_of);
        json.key("error_kind").text_or_null(kind);
        json.key("error_ranks").array(ranks, |json, rank| json.number(rank));
    });
}

/// PyTorch's words for how far a call is, and one for what it has none for.
fn word(state: FlightState) -> &'static str {
    match state {
        FlightState::Queued => "scheduled",
        FlightState::Started => "started",
        FlightState::Finished => "completed",
        FlightState::Failed => "failed",
    }
}

/// An error in one word, and the ranks that it is about.
fn kind_of(error: &Error) -> (Option<&'static str>, Vec<usize>) {
    let (kind, ranks) = match error.root() {
        Error::Timeout { missing, .. } => ("timeout", missing.iter().map(|peer| peer.rank).collect()),
        Error::PeerLost { peer, .. } => ("peer_lost", vec![peer.rank]),
        Error::Mismatch { first, second, .. } => ("mismatch", vec![first.rank, second.rank]),
        Error::Aborted { by, .. } => ("aborted", vec![by.rank]),
        _ => ("other", Vec::new()),
    };
    (Some(kind), ranks)
}
