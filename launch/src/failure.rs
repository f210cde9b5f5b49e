//! Describes how a rank failed and why. Ranks write the reason to error files, in the format of PyTorch's agents.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use collectives::__private::regular_file;
use serde::{Deserialize, Serialize};

/// The most bytes that are read of an error file.
const LONGEST: u64 = 64 << 10;

/// The failure that caused all other failures, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The name of the failed rank's host.
    pub host: String,
    /// The failed rank's number in the job.
    pub rank: usize,
    /// The failed rank's local rank on its host.
    pub local_rank: usize,
    /// The failed rank's process id.
    pub pid: u32,
    /// How the rank ended: an exit code, or a signal.
    pub ended: String,
    /// The exit code, or 128 plus the signal, as shells report it.
    pub code: u8,
    /// When the rank failed, in nanoseconds since 1970 by its host's clock. This is the time at which the rank wrote its
    /// error file. If the rank wrote no error file, it is the time at which the launcher noticed the rank's end.
    pub time: u64,
    /// The reason that the rank wrote into its error file, if any.
    pub cause: Option<String>,
    /// Ranks that had succeeded before this failure, as far as is known. A rank that returned too early can be the cause
    /// of this failure.
    #[serde(default)]
    pub done_before: Vec<usize>,
}

/// How many ranks are named; the others are counted.
const NAMED: usize = 8;

impl Failure {
    /// Returns the failure as one line of JSON, without the line end.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        // Text and numbers can always be serialized.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Adds more ranks that had succeeded before this failure.
    #[must_use]
    pub fn and_done_before(mut self, ranks: impl IntoIterator<Item = usize>) -> Self {
        self.done_before.extend(ranks);
        self.done_before.sort_unstable();
        self.done_before.dedup();
        self
    }

    /// Reads the text that [`Failure::to_json`] returned; returns `None` for any other text.
    #[must_use]
    pub fn from_json(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, rank, local_rank, pid, ended, time, cause, done_before, .. } = self;
        write!(f, "rank {rank} (local rank {local_rank}) on {host}, pid {pid}, at {}: {ended}", time_of_day(*time))?;
        if let Some(cause) = cause {
            cause.trim_end().lines().try_for_each(|line| write!(f, "\n  {line}"))?;
        }
        if done_before.is_empty() {
            return Ok(());
        }
        let (ranks, them) = if let [_] = done_before[..] { ("rank", "it") } else { ("ranks", "them") };
        let mut names = done_before.iter().take(NAMED).map(usize::to_string).collect::<Vec<_>>().join(", ");
        if done_before.len() > NAMED {
            names += &format!(" and {} more", done_before.len() - NAMED);
        }
        write!(f, "\n  {ranks} {names} had ended with exit code 0 before this failure: if the failed rank needed {them}, that is the cause")
    }
}

/// Formats a time of day: `17:46:01 UTC`.
fn time_of_day(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000 % 86_400;
    format!("{:02}:{:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Returns nanoseconds since 1970: 0 for an earlier time, the maximum after 2554.
pub(super) fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The content of a rank's error file.
#[derive(Debug, Deserialize)]
struct ErrorFile {
    message: Message,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Message {
    Plain(String),
    #[serde(rename_all = "camelCase")]
    Whole {
        message: String,
        extra_info: Option<ExtraInfo>,
    },
}

#[derive(Debug, Default, Deserialize)]
struct ExtraInfo {
    py_callstack: Option<String>,
    /// Not in PyTorch's files. A file's modification time is accurate to some milliseconds only.
    timestamp_ns: Option<u64>,
}

/// Returns the cause in an error file and when it was written; `None` if there is no such file. Text in another format
/// than PyTorch's is returned as it is.
pub(super) fn read(path: &Path) -> Option<(String, u64)> {
    let written = std::fs::metadata(path).and_then(|file| file.modified()).ok()?;
    let mut bytes = Vec::new();
    regular_file::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes)).ok()?;
    let (cause, precisely) = match serde_json::from_slice(&bytes) {
        Ok(ErrorFile { message: Message::Plain(message) }) => (message, None),
        Ok(ErrorFile { message: Message::Whole { message, extra_info } }) => {
            let ExtraInfo { py_callstack, timestamp_ns } = extra_info.unwrap_or_default();
            (py_callstack.filter(|stack| !stack.trim().is_empty()).unwrap_or(message), timestamp_ns)
        }
        Err(_) => (String::from_utf8_lossy(&bytes).into_owned(), None),
    };
    (!cause.trim().is_empty()).then(|| (cause, precisely.unwrap_or_else(|| nanoseconds(written))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_files_of_every_form_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        let cause = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path).map(|(cause, _)| cause)
        };
        assert_eq!(
            cause(r#"{"message": {"message": "lost", "extraInfo": {"py_callstack": "", "timestamp": "7"}}}"#).as_deref(),
            Some("lost")
        );
        let python = r#"{"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback\n  x\n", "timestamp": "7"}}}"#;
        assert_eq!(cause(python).as_deref(), Some("Traceback\n  x\n"));
        assert_eq!(cause(r#"{"message": "plain", "timestamp": 7}"#).as_deref(), Some("plain"));
        let precise = r#"{"message": {"message": "x", "extraInfo": {"timestamp": "7", "timestamp_ns": 7000000001}}}"#;
        assert_eq!(cause(precise).as_deref(), Some("x"));
        assert_eq!(read(&path), Some(("x".to_owned(), 7_000_000_001)));
        assert_eq!(cause("no JSON").as_deref(), Some("no JSON"));
        assert_eq!(cause(" "), None);
        assert_eq!(read(&folder.path().join("absent")), None);
    }

    #[test]
    fn failures_name_host_rank_time_and_cause() {
        let cause = Some("all_reduce: lost rank 2\nand more\n".to_owned());
        let ended = "exit code 3".to_owned();
        let time = (17 * 3600 + 46 * 60 + 1) * 1_000_000_000;
        let failure = Failure { host: "a".into(), rank: 5, local_rank: 1, pid: 7, ended, code: 3, time, cause, done_before: vec![] };
        let words = "rank 5 (local rank 1) on a, pid 7, at 17:46:01 UTC: exit code 3\n  all_reduce: lost rank 2\n  and more";
        assert_eq!(failure.to_string(), words);
        assert_eq!(Failure::from_json(&failure.to_json()), Some(failure));
        assert_eq!(Failure::from_json(b"{}"), None);
    }

    #[test]
    fn an_error_file_that_never_ends_is_not_waited_for() {
        assert_eq!(read(Path::new("/dev/zero")), None);
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("error.json");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert_eq!(read(&pipe), None);
    }

    #[test]
    fn ranks_that_had_succeeded_before_are_named() {
        let failure = |done_before| Failure { done_before, ..Failure::from_json(WITHOUT_LATER_FIELDS).unwrap() };
        let last = |done| failure(done).to_string().lines().last().unwrap().to_owned();
        assert_eq!(
            last(vec![2]),
            "  rank 2 had ended with exit code 0 before this failure: if the failed rank needed it, that is the cause"
        );
        let many = last((0..20).collect());
        assert!(many.starts_with("  ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more had ended with exit code 0 before this failure: "), "{many}");
        assert_eq!(failure(vec![4, 2]).and_done_before([3, 2]).done_before, [2, 3, 4]);
    }

    const WITHOUT_LATER_FIELDS: &[u8] =
        br#"{"host": "a", "rank": 1, "local_rank": 1, "pid": 7, "ended": "exit code 3", "code": 3, "time": 0, "cause": null}"#;
}
