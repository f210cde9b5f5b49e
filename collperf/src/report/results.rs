//! The results of a run so far, and the files that are written as a whole: at the end, or when the run ends early.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::{emulate_default_handler, signal_name};

use super::output::say;
use super::{html, json, plot, prometheus};
use crate::facts::RunFacts;
use crate::failure::Failure;
use crate::launch;
use crate::output_file::OutputFile;
use crate::row::Row;
use crate::settings::Settings;

/// The rows, and their destinations.
pub(super) struct Results {
    settings: Settings,
    facts: RunFacts,
    files: Vec<(Form, OutputFile)>,
    rows: Vec<Row>,
    /// The totals of all rows.
    pub(super) total: Tally,
    errors: Vec<String>,
    refused: Vec<String>,
    is_written: bool,
}

/// The meaning of the columns of single calls in an HTML page. In a sweep, they describe other calls than the columns
/// before them.
const OF_CALLS: &str = "The columns \"time\", \"algbw\" and \"busbw\" describe consecutive calls, from the start of the first to the end \
    of the last. The columns from \"mean\" to \"most\" describe as many further calls. Each of these calls was timed separately, on its \
    slowest rank. Calls that are timed separately do not overlap, so they take longer.";
const OF_CELLS: &str = "The columns from \"mean\" to \"most\" describe samples. Each sample consists of several consecutive calls after a \
    barrier. The columns \"time\" and \"p50\" have the same values.";

/// The format of a file.
#[derive(Debug, Clone, Copy)]
enum Form {
    Json,
    Prometheus,
    Plot,
    Html,
}

/// Totals of rows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    pub(super) failed_checks: usize,
    busbw_sum: f64,
    halves: usize,
}

impl Tally {
    pub(super) fn add(&mut self, row: &Row) {
        for (half, _) in row.halves() {
            self.failed_checks += usize::from(half.wrong.is_some_and(|wrong| wrong > 0));
            self.busbw_sum += half.busbw;
            self.halves += 1;
        }
    }

    pub(super) fn mean_busbw(&self) -> f64 {
        self.busbw_sum / self.halves.max(1) as f64
    }

    /// Whether the required bandwidth was reached; nine tenths of it are enough, as in nccl-tests.
    pub(super) fn reached(&self, settings: &Settings) -> Option<bool> {
        settings.least_busbw.map(|least| self.mean_busbw() >= least * 0.9)
    }
}

/// The results, shared with the thread that writes them on a signal.
pub(super) type Shared = Arc<Mutex<Results>>;

/// Locks the results, even if a thread has panicked while it held the lock: each row is complete.
pub(super) fn locked(shared: &Shared) -> MutexGuard<'_, Results> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Results {
    /// Checks that all files can be written.
    pub(super) fn new(settings: &Settings, facts: RunFacts) -> Result<Self, Failure> {
        let Settings { json, prometheus, plot, html, .. } = settings;
        let paths = [(Form::Json, json), (Form::Prometheus, prometheus), (Form::Plot, plot), (Form::Html, html)];
        let wanted = paths.into_iter().filter_map(|(form, path)| path.as_ref().map(|path| (form, path)));
        let files = wanted.map(|(form, path)| Ok((form, OutputFile::new(path)?))).collect::<Result<Vec<_>, Failure>>()?;
        let refused = settings.refused.clone();
        let settings = settings.clone();
        Ok(Self { settings, facts, files, rows: vec![], total: Tally::default(), errors: vec![], refused, is_written: false })
    }

    pub(super) fn add(&mut self, row: &Row) {
        self.total.add(row);
        if !self.files.is_empty() {
            self.rows.push(row.clone());
        }
    }

    /// Records a combination that the library refused.
    pub(super) fn refuse(&mut self, reason: String) {
        if !self.refused.contains(&reason) {
            self.refused.push(reason);
        }
    }

    pub(super) fn refused(&self) -> &[String] {
        &self.refused
    }

    /// Whether elements were wrong, or the bandwidth is below the required one.
    pub(super) fn is_bad(&self) -> bool {
        self.total.failed_checks > 0 || self.total.reached(&self.settings) == Some(false)
    }

    /// Writes all files; returns a description of each.
    pub(super) fn write(&mut self) -> Result<Vec<String>, Failure> {
        self.is_written = true;
        // One file that cannot be written does not keep the others from being written.
        let written: Vec<_> = self.files.iter().map(|(form, file)| file.write(&self.text(*form)?).map(|()| file.told())).collect();
        written.into_iter().collect()
    }

    /// Writes the results so far after a call has failed.
    pub(super) fn abandon(&mut self, failure: &Failure) -> Result<Vec<String>, Failure> {
        self.errors.push(failure.message.clone());
        self.write()
    }

    /// Writes the results so far when a signal or a closed pipe ends the run. If nothing was measured, the files stay
    /// as they were.
    pub(super) fn interrupt(&mut self, by: &str) -> Result<Vec<String>, Failure> {
        if self.is_written || self.rows.is_empty() {
            return Ok(vec![]);
        }
        self.errors.push(by.to_owned());
        self.write()
    }

    fn text(&self, form: Form) -> Result<String, Failure> {
        let Self { settings, facts, rows, errors, .. } = self;
        let transport = facts.on.links(settings);
        Ok(match form {
            Form::Json => {
                let document = json::Document::new(settings, facts, &facts.start_time, rows, &self.totals(), errors);
                document.text().map_err(|error| Failure::internal(format!("writing JSON: {error}")))?
            }
            Form::Prometheus => prometheus::text(settings, facts, rows, errors.is_empty() && !self.is_bad()),
            Form::Plot => plot::draw(rows, facts, transport),
            Form::Html => self.page(transport),
        })
    }

    fn totals(&self) -> json::Totals {
        let Self { total, settings, .. } = self;
        json::Totals { failed_checks: total.failed_checks, mean_busbw: total.mean_busbw(), reached: total.reached(settings) }
    }

    fn page(&self, transport: &str) -> String {
        let words = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        let page = html::Page {
            facts: &self.facts,
            transport,
            rows: &self.rows,
            totals: &self.totals(),
            errors: &self.errors,
            refused: &self.refused,
            singles: if self.settings.cell.is_some() { OF_CELLS } else { OF_CALLS },
            command: &html::command(std::env::args_os().map(words)),
            variables: &html::variables(std::env::vars_os().map(|(name, value)| (words(name), words(value)))),
        };
        page.document()
    }
}

/// How long it may take to print that results were written, after a signal.
const TELLS_WITHIN: Duration = Duration::from_secs(1);

/// Makes a signal that ends this process write the results so far first.
pub(super) fn write_when_interrupted(results: &Shared, bar: &ProgressBar) {
    if locked(results).files.is_empty() {
        return;
    }
    let (results, bar) = (Arc::clone(results), bar.clone());
    let listens = launch::on_signals(&[SIGINT, SIGTERM, SIGHUP], move |signal| {
        let name = signal_name(signal).unwrap_or("a signal");
        // Locked until the process ends: the run adds nothing more.
        let mut results = locked(&results);
        let outcome = results.interrupt(&format!("ended by {name}"));
        let bar = bar.clone();
        let tells = thread::spawn(move || {
            bar.abandon();
            match outcome {
                Ok(written) => written.iter().for_each(|file| say(&format!("{name}: wrote the results so far to {file}"))),
                Err(failure) => say(&failure.message),
            }
        });
        // The output may have no reader that reads.
        let until = Instant::now() + TELLS_WITHIN;
        while !tells.is_finished() && Instant::now() < until {
            thread::sleep(TELLS_WITHIN / 100);
        }
        let _ = emulate_default_handler(signal);
        true
    });
    if let Err(error) = listens {
        say(&format!("waiting for signals: {error}; if the run is interrupted, it leaves no results"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Collective;

    #[test]
    fn the_mean_is_over_all_rows_and_both_halves() {
        let half = |busbw, wrong| Some(crate::row::Half { busbw, wrong, ..crate::row::Half::new(Collective::AllReduce, 2, 8, 1.0) });
        let row = |out_of_place, in_place| Row {
            collective: Collective::AllReduce,
            op: None,
            dtype: None,
            root: None,
            ranks: 2,
            count: 2,
            bytes: 8,
            iterations: 1,
            out_of_place,
            in_place,
        };
        let mut tally = Tally::default();
        tally.add(&row(half(1.0, Some(0)), half(2.0, Some(5))));
        tally.add(&row(half(6.0, None), None));
        assert_eq!((tally.mean_busbw(), tally.failed_checks), (3.0, 1));
    }
}
