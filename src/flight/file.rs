//! Writes records as a JSON file, with a small JSON writer.
//!
//! A user who builds this crate builds 35 crates in total. serde_json would add five more, to replace the ninety lines
//! below. These lines read nothing, and write only text, whole numbers, `true`, `false` and `null`. Tests read the
//! result back with serde_json.
//!
//! If a value has the same meaning as in PyTorch's flight recorder, its key has the name that PyTorch uses. `format` is
//! [`FORMAT`]. `version` is incremented when a key is removed or changes its meaning. Readers skip keys that they do
//! not know.

use std::fmt::{Display, Write};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::clock::since_1970;
use super::record::{About, Backend, Record, State};
use crate::error::{Error, Peer, Result};

/// The value of `format`.
const FORMAT: &str = "collectives flight record";
const VERSION: u32 = 1;

/// Writes the file of one rank and communicator, completely or not at all, and returns its path.
pub(super) fn write(folder: &Path, about: &About, reason: &str, records: &[Record]) -> Result<PathBuf> {
    let name = format!("flight-{:016x}-rank{}.json", about.id, about.rank);
    write_whole(folder, &name, &to_json(about, reason, records), "the flight record")
}

/// Writes `text` as a file in `folder`, completely or not at all, and returns its path. Creates the folder if needed.
/// `what` describes the text in errors.
pub(crate) fn write_whole(folder: &Path, name: &str, text: &str, what: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    // No other process or thread uses this temporary name. A writer that died may have left its file incomplete.
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

/// Returns the text of the file.
fn to_json(about: &About, reason: &str, records: &[Record]) -> String {
    let mut json = Json::default();
    add(&mut json, about, reason, records);
    json.into_text()
}

/// Writes the records of one rank and communicator as an object.
pub(super) fn add(json: &mut Json, about: &About, reason: &str, records: &[Record]) {
    json.object(|json| {
        json.key("format").text(FORMAT);
        json.key("version").number(VERSION);
        json.key("reason").text(reason);
        json.key("time_written_ns").number(since_1970().as_nanos());
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
        json.key("world_ranks").array(about.world_ranks.iter(), |json, rank| json.number(rank));
        json.key("entries").array(records, entry);
    });
}

/// Writes the numbers of the last collectives on the host.
fn status(json: &mut Json, records: &[Record]) {
    let last = |states: &[State]| {
        let fitting = records.iter().filter(|record| record.backend == Backend::Host && states.contains(&record.state));
        fitting.filter_map(|record| record.sequence).max()
    };
    let (started, finished) = ([State::Started, State::Finished, State::Failed], [State::Finished]);
    json.key("last_enqueued_collective").number_or_null(last(&[State::Queued]).or_else(|| last(&started)));
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

fn entry(json: &mut Json, record: &Record) {
    json.object(|json| {
        json.key("record_id").number(record.number);
        json.key("backend").text(if record.backend == Backend::Device { "device" } else { "host" });
        json.key("is_p2p").boolean(record.sequence.is_none());
        json.key("collective_seq_id").number_or_null(record.sequence);
        json.key("p2p_seq_id").number_or_null(record.sequence.is_none().then_some(record.number));
        json.key("profiling_name").text(record.kind.name());
        json.key("op").text_or_null(record.op.as_deref());
        json.key("dtype").text(&record.element);
        json.key("count").number(record.count);
        json.key("counts_hash").number_or_null(record.counts_hash);
        json.key("root").number_or_null(record.root);
        json.key("peer").number_or_null(record.peer);
        json.key("tag").number_or_null(record.tag);
        json.key("state").text(word(record.state));
        json.key("time_created_ns").number_or_null(record.started_ns);
        let is_queued = record.state == State::Queued;
        json.key("time_discovered_started_ns").number_or_null(record.started_ns.filter(|_| !is_queued));
        json.key("time_discovered_completed_ns").number_or_null(record.finished_ns);
        json.key("waiting_for").array(&record.waiting_for, |json, rank| json.number(rank));
        json.key("error").text_or_null(record.error.as_ref().map(Error::to_string).as_deref());
        let (kind, ranks) = record.error.as_ref().map(kind_of).unzip();
        json.key("error_kind").text_or_null(kind);
        json.key("error_ranks").array(ranks.unwrap_or_default(), |json, rank| json.number(rank));
    });
}

/// Returns PyTorch's word for a call's state. PyTorch has none for a call that failed.
fn word(state: State) -> &'static str {
    match state {
        State::Queued => "scheduled",
        State::Started => "started",
        State::Finished => "completed",
        State::Failed => "failed",
    }
}

/// Returns an error's kind as one word, and the ranks that the error names.
fn kind_of(error: &Error) -> (&'static str, Vec<usize>) {
    match error.root() {
        Error::Timeout { missing, .. } => ("timeout", missing.iter().map(|peer| peer.rank).collect()),
        Error::PeerLost { peer, .. } => ("peer_lost", vec![peer.rank]),
        Error::Mismatch { first, second, .. } => ("mismatch", vec![first.rank, second.rank]),
        Error::Aborted { by, .. } => ("aborted", vec![by.rank]),
        _ => ("other", Vec::new()),
    }
}

/// JSON text under construction. Commas are inserted automatically.
#[derive(Debug, Default)]
pub(crate) struct Json {
    text: String,
}

impl Json {
    /// Returns the text written so far.
    pub(crate) fn into_text(mut self) -> String {
        self.text.push('\n');
        self.text
    }

    /// Returns the number of bytes written so far.
    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    fn separate(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with(['{', '[', ':', '\n']) {
            self.text.push(',');
        }
    }

    /// Writes a key of the open object. Its value must follow.
    pub(crate) fn key(&mut self, name: &str) -> &mut Self {
        self.text(name);
        self.text.push(':');
        self
    }

    /// Writes a string.
    pub(crate) fn text(&mut self, value: &str) {
        self.separate();
        self.text.push('"');
        for char in value.chars() {
            match char {
                '"' | '\\' => self.text.extend(['\\', char]),
                control if control < ' ' => {
                    let _ = write!(self.text, "\\u{:04x}", u32::from(control));
                }
                other => self.text.push(other),
            }
        }
        self.text.push('"');
    }

    /// Writes a number.
    pub(crate) fn number(&mut self, value: impl Display) {
        self.separate();
        let _ = write!(self.text, "{value}");
    }

    /// Writes `true` or `false`.
    pub(crate) fn boolean(&mut self, value: bool) {
        self.number(value);
    }

    /// Writes a number, or `null`.
    pub(crate) fn number_or_null(&mut self, value: Option<impl Display>) {
        match value {
            Some(value) => self.number(value),
            None => self.number("null"),
        }
    }

    /// Writes a string, or `null`.
    pub(crate) fn text_or_null(&mut self, value: Option<&str>) {
        match value {
            Some(value) => self.text(value),
            None => self.number("null"),
        }
    }

    /// Writes an object with the content that `inside` writes.
    pub(crate) fn object(&mut self, inside: impl FnOnce(&mut Self)) {
        self.separate();
        self.text.push('{');
        inside(self);
        self.text.push('}');
    }

    /// Writes an array of the values that `each` writes.
    pub(crate) fn array<T>(&mut self, items: impl IntoIterator<Item = T>, mut each: impl FnMut(&mut Self, T)) {
        self.separate();
        self.text.push('[');
        for item in items {
            each(self, item);
        }
        self.text.push(']');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let mut json = Json::default();
        json.object(|json| {
            json.key("a \"b\"\n").text("c\\d\u{1}é:");
            json.key("n").number(7);
            json.key("none").number_or_null(None::<u64>);
            json.key("some").text_or_null(Some(""));
            json.key("list").array([1, 2], |json, item| json.object(|json| json.key("x").number(item)));
            json.key("empty").array([], |json, item: u8| json.number(item));
            json.key("is").boolean(true);
        });
        let read: serde_json::Value = serde_json::from_str(&json.into_text()).unwrap();
        let expected = serde_json::json!({
            "a \"b\"\n": "c\\d\u{1}é:", "n": 7, "none": null, "some": "", "list": [{"x": 1}, {"x": 2}], "empty": [], "is": true
        });
        assert_eq!(read, expected);
    }
}
