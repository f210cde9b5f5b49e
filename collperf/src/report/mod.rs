//! What rank 0 says: the table, the files, the progress on a terminal, and the verdict.

mod accuracy;
mod axis;
mod csv;
mod html;
mod json;
mod markdown;
pub(crate) mod plot;
mod prometheus;

use std::fs::File;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

use crate::arguments::IS_ONE_RANK;
use crate::collective::Collective;
use crate::facts::{Gpu, On, RankFacts, RunFacts};
use crate::failure::{CHECK, Failure};
use crate::launch;
use crate::machine::now;
use crate::row::Row;
use crate::settings::{Blocking, Destination, Settings};
use crate::sizes::human;
use crate::table;
use accuracy::Accuracy;
use prometheus::Textfile;

/// Everything that goes out.
pub(crate) struct Report<'a> {
    settings: &'a Settings,
    facts: RunFacts,
    /// Whether the table is printed; it is not where CSV takes its place.
    has_table: bool,
    csv: Option<Box<dyn Write>>,
    json: Option<File>,
    prometheus: Option<Textfile>,
    bar: ProgressBar,
    /// Kept for the files that are written at the end.
    rows: Vec<Row>,
    errors: Vec<String>,
    refused: Vec<String>,
    /// Of the collective that is being measured.
    here: Tally,
    /// Of all.
    total: Tally,
    /// How good the predictions were.
    accuracy: Accuracy,
}

/// What rows add up to.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    failed_checks: usize,
    busbw_sum: f64,
    halves: usize,
}

impl Tally {
    fn add(&mut self, row: &Row) {
        for (half, _) in row.halves() {
            self.failed_checks += usize::from(half.wrong.is_some_and(|wrong| wrong > 0));
            self.busbw_sum += half.busbw;
            self.halves += 1;
        }
    }

    fn mean_busbw(&self) -> f64 {
        self.busbw_sum / self.halves.max(1) as f64
    }

    /// Whether the floor was reached; nine tenths of it are enough, as nccl-tests has it.
    fn reached(&self, settings: &Settings) -> Option<bool> {
        settings.least_busbw.map(|least| self.mean_busbw() >= least * 0.9)
    }
}

impl<'a> Report<'a> {
    /// Opens the files and says how many rows there will be.
    pub(crate) fn open(settings: &'a Settings, facts: RunFacts, row_count: usize) -> Result<Self, Failure> {
        let has_table = settings.csv != Some(Destination::Stdout) && settings.cell.is_none() && !settings.markdown;
        let mut report = Self {
            settings,
            facts,
            has_table,
            csv: None,
            json: None,
            prometheus: None,
            bar: progress(row_count, settings.cycles),
            rows: vec![],
            errors: vec![],
            refused: settings.refused.clone(),
            here: Tally::default(),
            total: Tally::default(),
            accuracy: Accuracy::default(),
        };
        if let Some(path) = &settings.json {
            let (file, path) = json::create(path).map_err(|error| Failure::io(format!("creating {}", path.display()), &error))?;
            report.json = Some(file);
            if has_table {
                report.print(&format!("# Writing JSON output to {}\n", path.display()))?;
            }
        }
        for path in settings.plot.iter().chain(&settings.html) {
            // Found out now rather than at the end.
            File::create(path).map_err(|error| Failure::io(format!("creating {}", path.display()), &error))?;
        }
        if let Some(path) = &settings.prometheus {
            let file = Textfile::open(path).map_err(|error| Failure::io(format!("creating {}", path.display()), &error))?;
            report.prometheus = Some(file);
        }
        report.csv = match &settings.csv {
            None => None,
            Some(Destination::Stdout) => Some(Box::new(io::stdout())),
            Some(Destination::File(path)) => {
                Some(Box::new(File::create(path).map_err(|error| Failure::io(format!("creating {}", path.display()), &error))?))
            }
        };
        let columns = if settings.cell.is_some() { csv::CELL_HEADER } else { csv::SWEEP_HEADER };
        report.write_csv(&csv::header(columns, settings.columns.predictions))?;
        Ok(report)
    }

    /// Prints what stands above the rows of a collective.
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

    /// Says on a terminal what is being measured.
    pub(crate) fn working_on(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    /// Takes a row.
    pub(crate) fn row(&mut self, row: Row) -> Result<(), Failure> {
        self.here.add(&row);
        self.total.add(&row);
        self.accuracy.add(&row);
        self.bar.inc(1);
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
        self.write_csv(&lines)?;
        if self.keeps_rows() {
            self.rows.push(row);
        }
        Ok(())
    }

    /// Whether a file is written at the end that shows all rows.
    fn keeps_rows(&self) -> bool {
        let Settings { json, plot, html, prometheus, .. } = self.settings;
        [json, plot, html, prometheus].iter().any(|file| file.is_some())
    }

    /// Remembers a combination that the library refused.
    pub(crate) fn refuse(&mut self, reason: String) {
        if !self.refused.contains(&reason) {
            self.refused.push(reason);
        }
    }

    /// Prints what stands below the rows of a collective.
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

    /// Says how much of a device's memory a rank's buffers take, how much is in use there, and how much there is.
    pub(crate) fn memory(&mut self, bytes: [usize; 3]) -> Result<(), Failure> {
        let [buffers, used, total] = bytes.map(human);
        let text = format!("{buffers} in buffers, {used} of {total} in use");
        self.print(&if self.settings.markdown { format!("GPU memory: {text}.\n") } else { format!("# GPU memory usage     : {text}\n#\n") })
    }

    /// Writes the files and returns the exit code.
    pub(crate) fn finish(mut self) -> Result<u8, Failure> {
        self.bar.finish_and_clear();
        if !self.refused.is_empty() {
            let mut text = String::from("# Not run, since it cannot be:\n");
            self.refused.iter().for_each(|refusal| text += &format!("#   {refusal}\n"));
            if self.has_table { self.print(&text)? } else { say(text.trim_end()) }
        }
        if self.settings.columns.predictions {
            let text = self.accuracy.to_string();
            if self.has_table { self.print(&format!("# {text}\n"))? } else { say(&text) }
        }
        self.write_files()?;
        Ok(if self.is_bad() { CHECK } else { 0 })
    }

    /// Whether elements were wrong, or the bandwidth is below the floor.
    fn is_bad(&self) -> bool {
        self.total.failed_checks > 0 || self.total.reached(self.settings) == Some(false)
    }

    /// Writes what there is when a run ends early.
    pub(crate) fn abandon(mut self, failure: &Failure) {
        self.bar.abandon();
        self.errors.push(failure.message.clone());
        if let Err(error) = self.write_files() {
            say(&error.message);
        }
    }

    fn write_files(&mut self) -> Result<(), Failure> {
        let totals = json::Totals {
            failed_checks: self.total.failed_checks,
            mean_busbw: self.total.mean_busbw(),
            reached: self.total.reached(self.settings),
        };
        if let Some(file) = &mut self.json {
            let document = json::Document::new(self.settings, &self.facts, &self.facts.start_time, &self.rows, &totals, &self.errors);
            document.write(file).map_err(|error| Failure::io("writing JSON", &error))?;
        }
        if let Some(file) = &self.prometheus {
            let succeeded = self.errors.is_empty() && !self.is_bad();
            let text = prometheus::text(self.settings, &self.facts, &self.rows, succeeded);
            file.write(&text).map_err(|error| Failure::io("writing for Prometheus", &error))?;
        }
        if let Some(path) = &self.settings.plot {
            let picture = plot::draw(&self.rows, &self.facts, self.facts.on.links(self.settings));
            std::fs::write(path, picture).map_err(|error| Failure::io(format!("writing {}", path.display()), &error))?;
        }
        if let Some(path) = &self.settings.html {
            std::fs::write(path, self.page(&totals)).map_err(|error| Failure::io(format!("writing {}", path.display()), &error))?;
        }
        Ok(())
    }

    fn page(&self, totals: &json::Totals) -> String {
        let words = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        let page = html::Page {
            facts: &self.facts,
            transport: self.facts.on.links(self.settings),
            rows: &self.rows,
            totals,
            errors: &self.errors,
            refused: &self.refused,
            command: &html::command(std::env::args_os().map(words)),
            variables: &html::variables(std::env::vars_os().map(|(name, value)| (words(name), words(value)))),
        };
        page.document()
    }

    fn write_csv(&mut self, text: &str) -> Result<(), Failure> {
        let Some(csv) = &mut self.csv else { return Ok(()) };
        let written = self.bar.suspend(|| csv.write_all(text.as_bytes()).and_then(|()| csv.flush()));
        written.map_err(|error| unwritten("writing CSV", &error))
    }

    /// Prints to standard output, above the progress bar.
    fn print(&self, text: &str) -> Result<(), Failure> {
        let written = self.bar.suspend(|| {
            let mut out = io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        });
        written.map_err(|error| unwritten("writing to standard output", &error))
    }
}

/// Writes a task's answer to standard output.
pub(crate) fn answer(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| unwritten("writing to standard output", &error))
}

/// Why something was not written. Where nobody reads any more, as behind `head`, this program ends here, as others do.
fn unwritten(doing: &str, error: &io::Error) -> Failure {
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

/// The lines from the version down to the ranks.
fn heading(settings: &Settings, facts: &RunFacts, collective: Collective) -> String {
    let (step, kind) = match settings.step {
        Some(crate::sizes::Step::Factor(factor)) => (factor, "factor"),
        Some(crate::sizes::Step::Bytes(bytes)) => (bytes, "bytes"),
        None => (0, "list"),
    };
    let (least, most) = (settings.sizes.iter().min().unwrap_or(&0), settings.sizes.iter().max().unwrap_or(&0));
    let mut text = format!(
        "# collperf version {} nccl-headers={} nccl-library={}\n# Collective test starting: {}\n\
         # nThread {} nGpus {} minBytes {least} maxBytes {most} step: {step}({kind}) warmup iters: {} iters: {} agg iters: {} \
         validation: {} graph: {} unalign: {}\n",
        env!("CARGO_PKG_VERSION"),
        facts.on.headers(),
        facts.on.library(),
        collective.program(),
        settings.threads.unwrap_or(1),
        gpus_of_thread(settings, facts),
        settings.warmup,
        settings.iterations,
        settings.aggregated,
        settings.check,
        settings.device.graph,
        settings.unalign,
    );
    notes(&mut text, settings, facts, collective);
    text += "#\n# Using devices\n";
    for RankFacts { peer, group, local_rank, processor, gpu } in &facts.ranks {
        let (device, bus, name) = match gpu {
            Some(Gpu { ordinal, bus, name }) => (ordinal, &bus[..], name),
            None => (local_rank, "host", processor),
        };
        text += &format!(
            "#  Rank {:>2} Group {:>2} Pid {:>6} on {:>10} device {device:>2} [{bus}] {name}\n",
            peer.rank, group, peer.pid, peer.host
        );
    }
    text
}

/// How many GPUs a thread of rank 0's process has, as nccl-tests counts them; none on the host plane.
pub(super) fn gpus_of_thread(settings: &Settings, facts: &RunFacts) -> usize {
    let same_process = |rank: &&RankFacts| (&rank.peer.host, rank.peer.pid) == (&facts.ranks[0].peer.host, facts.ranks[0].peer.pid);
    match facts.on.is_device() && !facts.ranks.is_empty() {
        true => facts.ranks.iter().filter(same_process).count() / settings.threads.unwrap_or(1),
        false => 0,
    }
}

/// What is unusual about a run.
fn notes(text: &mut String, settings: &Settings, facts: &RunFacts, collective: Collective) {
    match settings.blocking {
        Blocking::No => {}
        Blocking::Wait => *text += "# Blocking Enabled: wait for completion of each call\n",
        Blocking::Barrier => *text += "# Blocking Enabled: wait for completion and barrier after each call, in the time\n",
        Blocking::UntimedBarrier => *text += "# Blocking Enabled: wait for completion and barrier after each call; time excludes barrier\n",
    }
    if settings.columns.predictions {
        *text += PREDICTIONS;
    }
    if facts.is_encrypted {
        let too = if facts.on.is_device() { ", NCCL's too" } else { "" };
        *text += &format!("# Links between hosts are encrypted{too}\n");
    }
    if let Some(note) = facts.load_note() {
        *text += &format!("# note: {note}\n");
    }
    match &facts.on {
        On::Host { why: Some(why) } => *text += &format!("# On the host plane, since there is no device plane: {why}\n"),
        On::Device { .. } if collective == Collective::Barrier => *text += "# A barrier is the host plane's, whatever the plane\n",
        On::Host { why: None } | On::Device { .. } => {}
    }
}

/// What the columns of predictions are.
const PREDICTIONS: &str = "# algorithm: how the library does a call of this size\n\
    # predicted: the time that its cost model gives that, after calls of six sizes that were measured here\n\
    # ratio: predicted over measured time\n";

/// A bar on standard error, where that is a terminal.
fn progress(row_count: usize, cycles: usize) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    if cycles == 0 {
        return ProgressBar::new_spinner();
    }
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:32} {pos}/{len} {wide_msg}");
    ProgressBar::new((row_count * cycles) as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::Arguments;

    #[test]
    fn the_heading_is_that_of_nccl_tests() {
        let settings = Settings::new(
            &Arguments::parse_from(["collperf", "broadcast", "-b", "8", "-e", "1K"]),
            &crate::environment::Environment::default(),
        )
        .unwrap();
        let expected = concat!(
            "# collperf version ",
            env!("CARGO_PKG_VERSION"),
            " nccl-headers=0 nccl-library=0\n",
            "# Collective test starting: broadcast_perf\n",
            "# nThread 1 nGpus 0 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0\n",
            "#\n",
            "# Using devices\n",
            "#  Rank  0 Group  0 Pid    100 on       desk device  0 [host] Abacus 9\n",
            "#  Rank  1 Group  0 Pid    101 on       desk device  1 [host] Abacus 9\n",
        );
        assert_eq!(heading(&settings, &RunFacts::example(2), Collective::Broadcast), expected);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn devices_are_named_as_nccl_tests_names_them() {
        let settings = Settings::new(
            &Arguments::parse_from(["collperf", "broadcast", "-G", "4", "-z", "2"]),
            &crate::environment::Environment::default(),
        )
        .unwrap();
        let text = heading(&settings, &RunFacts::example_on_devices(2), Collective::Broadcast);
        let expected = [
            " nccl-library=22809\n",
            "# nThread 1 nGpus 1 ",
            " graph: 4 ",
            "# Blocking Enabled: wait for completion of each call\n",
            "#  Rank  1 Group  0 Pid    101 on       desk device  1 [0000:01:00] Soroban 2 GPU\n",
        ];
        expected.into_iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in\n{text}"));
        let barrier = heading(&settings, &RunFacts::example_on_devices(1), Collective::Barrier);
        assert!(barrier.contains("# A barrier is the host plane's"), "{barrier}");
    }

    #[test]
    fn a_run_that_fell_back_says_why() {
        let settings =
            Settings::new(&Arguments::parse_from(["collperf", "broadcast"]), &crate::environment::Environment::default()).unwrap();
        let facts = RunFacts { on: On::Host { why: Some("no driver".to_owned()) }, ..RunFacts::example(1) };
        let text = heading(&settings, &facts, Collective::Broadcast);
        assert!(text.contains("# On the host plane, since there is no device plane: no driver\n"), "{text}");
    }

    #[test]
    fn what_a_reader_has_to_know_stands_above_the_table() {
        let settings =
            |line: &str| Settings::new(&Arguments::parse_from(line.split(' ')), &crate::environment::Environment::default()).unwrap();
        let mut facts = RunFacts { is_encrypted: true, ..RunFacts::example(2) };
        facts.machine.load = crate::machine::Load::read("3.14 0 0 5/9 7", "cpu0 1\ncpu1 1\n");
        let text = heading(&settings("collperf broadcast --explain"), &facts, Collective::Broadcast);
        for line in [
            "Links between hosts are encrypted",
            "note: 3.1 of 2 cores are busy: times will be too high",
            "ratio: predicted over measured time",
        ] {
            assert!(text.contains(&format!("# {line}\n")), "{line:?} is not in\n{text}");
        }
        let text = heading(&settings("collperf broadcast"), &RunFacts::example(2), Collective::Broadcast);
        assert!(!text.contains("encrypted") && !text.contains("note:") && !text.contains("ratio:"), "{text}");
        let text = markdown::heading(&settings("collperf broadcast --markdown"), &facts, Collective::Broadcast);
        assert!(text.contains("\nNote: 3.1 of 2 cores are busy") && text.contains("encrypted"), "{text}");
    }

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
