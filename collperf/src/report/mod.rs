//! The output of rank 0: the table, the files, the progress on a terminal, and the verdict.

mod accuracy;
mod axis;
mod csv;
mod heading;
mod html;
mod json;
mod markdown;
mod output;
mod picture;
pub(crate) mod plot;
mod progress;
mod prometheus;
mod results;

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::collective::Collective;
use crate::facts::RunFacts;
use crate::failure::{CHECK, Failure};
use crate::machine::now;
use crate::output_file::OutputFile;
use crate::row::Row;
use crate::settings::{Destination, Settings};
use crate::sizes::human;
use crate::table;
use accuracy::Accuracy;
use heading::heading;
pub(crate) use output::{answer, end_unread, say, tell_written};
use output::{has_table, unwritten};
pub(crate) use progress::Progress;
use results::{Results, Shared, Tally, locked, write_when_interrupted};

/// How long to wait, after another rank was lost, for a signal that may have ended both.
const SIGNALS_COME: Duration = Duration::from_millis(200);

/// All output of a run.
pub(crate) struct Report<'a> {
    settings: &'a Settings,
    facts: RunFacts,
    has_table: bool,
    csv: Option<Csv>,
    progress: Progress,
    /// The results that are written to files at the end.
    results: Shared,
    /// The totals of the current collective.
    here: Tally,
    /// The accuracy of the predictions.
    accuracy: Accuracy,
}

/// The destination of CSV lines, which are written as rows arrive.
struct Csv {
    to: Box<dyn Write>,
    /// The name of the file; `None` for standard output.
    file: Option<String>,
}

impl<'a> Report<'a> {
    /// Opens the files. `rows` are the bytes of the expected rows of one cycle.
    pub(crate) fn open(settings: &'a Settings, facts: RunFacts, rows: &[usize]) -> Result<Self, Failure> {
        let has_table = has_table(settings);
        let progress = Progress::begin(rows.iter().copied(), settings.cycles);
        let results = Arc::new(Mutex::new(Results::new(settings, facts.clone())?));
        if let Some(path) = &settings.trace {
            OutputFile::new(path)?;
        }
        let csv = settings.csv.as_ref().map(Csv::open).transpose()?;
        write_when_interrupted(&results, &progress.bar());
        let mut report = Self { settings, facts, has_table, csv, progress, results, here: Tally::default(), accuracy: Accuracy::default() };
        if let Some(path) = settings.json.as_ref().filter(|_| has_table) {
            report.print(&format!("# Writing JSON output to {}\n", path.display()))?;
        }
        if !has_table && !settings.markdown {
            // The output that replaces the table has no place for notes.
            report.facts.notes().iter().filter(|note| note.is_warning).for_each(|note| say(&format!("note: {}", note.text)));
        }
        let columns = if settings.cell.is_some() { csv::CELL_HEADER } else { csv::SWEEP_HEADER };
        report.write_csv(&csv::header(columns, settings.columns.predictions))?;
        Ok(report)
    }

    /// Prints the text above the rows of a collective.
    pub(crate) fn begin(&mut self, collective: Collective) -> Result<(), Failure> {
        self.here = Tally::default();
        if self.settings.markdown {
            return self.print(&markdown::heading(self.settings, &self.facts, collective));
        }
        if !self.has_table {
            return Ok(());
        }
        let text = format!("{}{}", heading(self.settings, &self.facts, collective), table::header(self.settings.columns));
        self.print(&text)
    }

    /// Shows on a terminal what is being measured.
    pub(crate) fn working_on(&self, what: &str) {
        self.progress.working_on(what);
    }

    /// Records and prints a row.
    pub(crate) fn row(&mut self, row: Row) -> Result<(), Failure> {
        // First, so that a printed row is kept even if the run ends now.
        locked(&self.results).add(&row);
        self.here.add(&row);
        self.accuracy.add(&row);
        self.progress.done(row.bytes);
        if self.settings.markdown {
            self.print(&markdown::row(&row))?;
        }
        if self.has_table {
            let timestamp = if self.settings.columns.timestamps { now() } else { String::new() };
            self.print(&table::row(&row, self.settings.columns, &timestamp))?;
        }
        let transport = self.facts.on.links(self.settings);
        let predictions = self.settings.columns.predictions;
        let lines =
            if self.settings.cell.is_some() { csv::cell(&row, transport, predictions) } else { csv::sweep(&row, transport, predictions) };
        self.write_csv(&lines)
    }

    /// Prints comment lines below a row, if there is a table.
    pub(crate) fn remark(&mut self, lines: &str) -> Result<(), Failure> {
        if self.has_table { self.print(lines) } else { Ok(()) }
    }

    /// Records a combination that the library refused.
    pub(crate) fn refuse(&mut self, reason: String) {
        locked(&self.results).refuse(reason);
    }

    /// Prints the text below the rows of a collective.
    pub(crate) fn end(&mut self, collective: Collective) -> Result<(), Failure> {
        let here = self.here;
        if self.settings.markdown {
            return self.print(&markdown::footer(here.failed_checks, here.mean_busbw(), here.reached(self.settings)));
        }
        if !self.has_table {
            return Ok(());
        }
        self.print(&table::footer(&collective.program(), here.failed_checks, here.mean_busbw(), here.reached(self.settings)))
    }

    /// Prints three amounts of a device's memory: in a rank's buffers, in use, and in total.
    pub(crate) fn memory(&mut self, bytes: [usize; 3]) -> Result<(), Failure> {
        let [buffers, used, total] = bytes.map(human);
        let text = format!("{buffers} in buffers, {used} of {total} in use");
        self.print(&if self.settings.markdown { format!("GPU memory: {text}.\n") } else { format!("# GPU memory usage     : {text}\n#\n") })
    }

    /// Writes the files and returns the exit code.
    pub(crate) fn finish(self) -> Result<u8, Failure> {
        self.progress.finish();
        let refused = locked(&self.results).refused().to_vec();
        if !refused.is_empty() {
            let mut text = String::from("# These calls were not made, because they are not supported:\n");
            refused.iter().for_each(|refusal| text += &format!("#   {refusal}\n"));
            if self.has_table { self.print(&text)? } else { say(text.trim_end()) }
        }
        if self.settings.columns.predictions {
            let text = self.accuracy.to_string();
            if self.has_table { self.print(&format!("# {text}\n"))? } else { say(&text) }
        }
        let written = locked(&self.results).write()?;
        let csv = self.csv.as_ref().and_then(|csv| csv.file.clone());
        written.iter().chain(&csv).try_for_each(|file| tell_written(self.settings, file))?;
        Ok(if locked(&self.results).is_bad() { CHECK } else { 0 })
    }

    /// Writes the results so far when a run ends early.
    pub(crate) fn abandon(self, failure: &Failure) {
        if failure.lost_a_peer {
            // The signal that ended that rank may be about to reach this one, and would be the better reason.
            thread::sleep(SIGNALS_COME);
        }
        self.progress.bar().abandon();
        match locked(&self.results).abandon(failure) {
            Ok(written) => written.iter().for_each(|file| say(&format!("wrote the results so far to {file}"))),
            Err(error) => say(&error.message),
        }
    }

    fn write_csv(&mut self, text: &str) -> Result<(), Failure> {
        let Some(csv) = &mut self.csv else { return Ok(()) };
        let written = self.progress.suspend(|| csv.to.write_all(text.as_bytes()).and_then(|()| csv.to.flush()));
        written.map_err(|error| self.unwritten("writing CSV", &error))
    }

    /// Prints to standard output, above the progress bar.
    fn print(&self, text: &str) -> Result<(), Failure> {
        let written = self.progress.suspend(|| {
            let mut out = io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        });
        written.map_err(|error| self.unwritten("writing to standard output", &error))
    }

    /// Returns the failure for text that could not be written. If the output has no reader any more, first writes the
    /// files, because this program then ends.
    fn unwritten(&self, doing: &str, error: &io::Error) -> Failure {
        if error.kind() == io::ErrorKind::BrokenPipe
            && let Err(failure) = locked(&self.results).interrupt("no process reads collperf's output any more")
        {
            say(&failure.message);
        }
        unwritten(doing, error)
    }
}

impl Csv {
    fn open(destination: &Destination) -> Result<Self, Failure> {
        let Destination::File(path) = destination else { return Ok(Self { to: Box::new(io::stdout()), file: None }) };
        let told = OutputFile::new(path)?.told();
        let file = File::create(path).map_err(|error| Failure::io(format!("creating {}", path.display()), &error))?;
        Ok(Self { to: Box::new(file), file: Some(told) })
    }
}
