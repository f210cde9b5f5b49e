//! Output to this program's standard streams.

use std::io::{self, Write};

use crate::arguments::IS_ONE_RANK;
use crate::failure::Failure;
use crate::launch;
use crate::settings::{Destination, Settings};

/// Prints where results were written: below the table, or on standard error if no table is printed.
pub(crate) fn tell_written(settings: &Settings, file: &str) -> Result<(), Failure> {
    let text = format!("wrote {file}");
    if has_table(settings) {
        return answer(&format!("# {text}\n"));
    }
    say(&text);
    Ok(())
}

/// Whether the table is printed; CSV or Markdown can take its place.
pub(super) fn has_table(settings: &Settings) -> bool {
    settings.csv != Some(Destination::Stdout) && settings.cell.is_none() && !settings.markdown
}

/// Writes a task's answer to standard output.
pub(crate) fn answer(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| unwritten("writing to standard output", &error))
}

/// Returns the failure for text that could not be written. If the reader is gone, as after `head`, the program ends
/// here.
pub(super) fn unwritten(doing: &str, error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        end_unread();
    }
    Failure::io(doing, error)
}

/// Ends this program and the ranks of its job because the reader of its output is gone.
pub(crate) fn end_unread() -> ! {
    launch::end_unread(std::env::args_os().nth(1).is_some_and(|word| word == IS_ONE_RANK))
}

/// Writes a message to standard error in one piece: other processes write there too.
pub(crate) fn say(text: &str) {
    // A closed standard error cannot be reported anywhere.
    let _ = io::stderr().write_all(format!("collperf: {text}\n").as_bytes());
}
