//! Writes the reason why a rank failed to a file that its launcher reads.

use std::any::Any;
use std::fmt::Display;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::base::event;
use crate::base::regular_file;
use crate::config;
use crate::flight::Json;

/// Runs a rank's program. If the program fails, writes the reason to the file that the launcher names, so that the
/// launcher can report it when the job has ended.
///
/// `collrun` and torchrun's agent name this file in `TORCHELASTIC_ERROR_FILE`, and expect the format that PyTorch's
/// `@record` writes. If no file is named, the function writes nothing. It returns the program's error unchanged, and
/// lets a panic continue.
///
/// ```no_run
/// use collectives::{Communicator, ReduceOp};
///
/// fn main() -> collectives::Result<()> {
///     collectives::record_failure(train)
/// }
///
/// fn train() -> collectives::Result<()> {
///     let comm = Communicator::from_env()?;
///     comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum)?;
///     comm.close()
/// }
/// ```
///
/// # Errors
///
/// The program's own errors. If the file cannot be written, that error is reported only to `tracing`, so that it does
/// not hide the program's own error.
pub fn record_failure<T, E: Display>(program: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    match catch_unwind(AssertUnwindSafe(program)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            record(&error.to_string());
            Err(error)
        }
        Err(panic) => {
            record(&format!("panicked: {}", words(&*panic)));
            resume_unwind(panic)
        }
    }
}

/// Returns the message of a panic.
fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

fn record(message: &str) {
    let Some(path) = config::error_file() else { return };
    if let Err(error) = write(&path, message) {
        event::warn!(path = %path.display(), %error, "the error of this rank cannot be written to the file that its launcher reads");
    }
}

fn write(path: &Path, message: &str) -> io::Result<()> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut json = Json::default();
    json.object(|json| {
        json.key("message").object(|json| {
            json.key("message").text(message);
            json.key("extraInfo").object(|json| {
                json.key("py_callstack").text(message);
                json.key("timestamp").text(&since.as_secs().to_string());
                // Not in PyTorch's format: collrun uses it to find out which rank failed first.
                json.key("timestamp_ns").number(since.as_nanos());
            });
        });
    });
    regular_file::create(path)?.write_all(json.into_text().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_form_that_agents_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        write(&path, "lost rank 3:\n\t\"gone\"").unwrap();
        let found: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(found["message"]["message"], "lost rank 3:\n\t\"gone\"");
        assert!(found["message"]["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000);
    }

    #[test]
    fn errors_and_panics_come_back() {
        assert_eq!(record_failure(|| Ok::<_, String>(3)), Ok(3));
        assert_eq!(record_failure(|| Err::<(), _>("lost")), Err("lost"));
        let panic = catch_unwind(|| record_failure(|| -> Result<(), String> { panic!("no {}", 1) })).unwrap_err();
        assert_eq!(words(&*panic), "no 1");
        assert_eq!(words(&7), "without a message");
    }

    #[test]
    fn a_pipe_in_place_of_the_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(write(&path, "lost rank 3").is_err());
        // Text from an earlier attempt is gone.
        std::fs::remove_file(&path).unwrap();
        ["a long reason", "short"].iter().for_each(|reason| write(&path, reason).unwrap());
        assert!(!std::fs::read_to_string(&path).unwrap().contains("long"));
    }
}
