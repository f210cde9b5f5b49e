//! What this program writes to its standard streams.

use std::io::{self, Write};

use crate::arguments::IS_ONE_RANK;
use crate::failure::Failure;
use crate::launch;
use crate::settings::{Destination, Settings};

/// Says where results went: below the table, or on standard error where something else is printed.
pub(crate) fn tell_written(settings: &Settings, file: &str) -> Result<(), Failure> {
    let text = format!("wrote {file}");
    if has_table(settings) {
        return answer(&format!("# {text}\n"));
    }
    say(&text);
    Ok(())
}

/// Whether the table is printed; it is not where CSV or Markdown takes its place.
pub(super) fn has_table(settings: &Settings) -> bool {
    settings.csv != Some(Destination::Stdout) && settings.cell.is_none() && !settings.markdown
}

/// Writes a task's answer to standard output.
pub(crate) fn answer(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| unwritten("writing to standard output", &error))
}

/// Why something was not written. Where nobody reads any more, as behind `head`, this program ends here, as others do.
pub(super) fn unwritten(doing: &str, error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        end_unread();
    }
    Failure::io(doing, error)
}

/// Ends this program, and all ranks that it is one of, as nobody reads what it prints.
pub(crate) fn end_unread() -> ! {
    launch::end_unread(std::env::args_os().nth(1).is_some_and(|word| word == IS_ONE_RANK))
}

/// Says something on standard error, in one piece: other processes write there too.
pub(crate) fn say(text: &str) {
    // There is nobody to tell that nobody listens.
    let _ = io::stderr().write_all(format!("collperf: {text}\n").as_bytes());
}
