//! What rank 0 says: the table, the files, the progress on a terminal, and the verdict.

mod accuracy;
mod axis;
mod csv;
mod html;
mod json;
mod markdown;
mod picture;
pub(crate) mod plot;
mod prometheus;
mod results;

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::arguments::IS_ONE_RANK;
use crate::collective::Collective;
use crate::facts::{Gpu, Note, RankFacts, RunFacts};
use crate::failure::{CHECK, Failure};
use crate::launch;
use crate::machine::now;
use crate::output_file::OutputFile;
use crate::row::Row;
use crate::settings::{Blocking, Destination, Settings};
use crate::sizes::human;
use crate::table;
use accuracy::Accuracy;
use results::{Results, Shared, Tally, locked, write_when_interrupted};

/// How long after another rank's end a signal that ended both may come.
const SIGNALS_COME: Duration = Duration::from_millis(200);

/// Everything that goes out.
pub(crate) struct Report<'a> {
    settings: &'a Settings,
    facts: RunFacts,
    has_table: bool,
    csv: Option<Csv>,
    bar: ProgressBar,
    /// What is written to files at the end.
    results: Shared,
    /// Of the collective that is being measured.
    here: Tally,
    /// How good the predictions were.
    accuracy: Accuracy,
}

/// Where lines of CSV go as rows come.
struct Csv {
    to: Box<dyn Write>,
    /// What the file is called; `None` for standard output.
    file: Option<String>,
}

impl<'a> Report<'a> {
    /// Opens the files and says how many rows there will be.
    pub(crate) fn open(settings: &'a Settings, facts: RunFacts, row_count: usize) -> Result<Self, Failure> {
        let has_table = has_table(settings);
        let bar = progress(row_count, settings.cycles);
        let results = Arc::new(Mutex::new(Results::new(settings, facts.clone())?));
        if let Some(path) = &settings.trace {
            OutputFile::new(path)?;
        }
        let csv = settings.csv.as_ref().map(Csv::open).transpose()?;
        write_when_interrupted(&results, &bar);
        let mut report = Self { settings, facts, has_table, csv, bar, results, here: Tally::default(), accuracy: Accuracy::default() };
        if let Some(path) = settings.json.as_ref().filter(|_| has_table) {
            report.print(&format!("# Writing JSON output to {}\n", path.display()))?;
        }
        if !has_table && !settings.markdown {
            // What takes the place of the table has no room for them.
            report.facts.notes().iter().filter(|note| note.is_warning).for_each(|note| say(&format!("note: {}", note.text)));
        }
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
        // First: what is printed is kept, whatever ends the run.
        locked(&self.results).add(&row);
        self.here.add(&row);
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
        self.write_csv(&lines)
    }

    /// Remembers a combination that the library refused.
    pub(crate) fn refuse(&mut self, reason: String) {
        locked(&self.results).refuse(reason);
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
    pub(crate) fn finish(self) -> Result<u8, Failure> {
        self.bar.finish_and_clear();
        let refused = locked(&self.results).refused().to_vec();
        if !refused.is_empty() {
            let mut text = String::from("# Not run, since it cannot be:\n");
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

    /// Writes what there is when a run ends early.
    pub(crate) fn abandon(self, failure: &Failure) {
        if failure.lost_a_peer {
            // The signal that ended that rank may be on its way to this one, and is the better reason.
            thread::sleep(SIGNALS_COME);
        }
        self.bar.abandon();
        match locked(&self.results).abandon(failure) {
            Ok(written) => written.iter().for_each(|file| say(&format!("wrote what there was to {file}"))),
            Err(error) => say(&error.message),
        }
    }

    fn write_csv(&mut self, text: &str) -> Result<(), Failure> {
        let Some(csv) = &mut self.csv else { return Ok(()) };
        let written = self.bar.suspend(|| csv.to.write_all(text.as_bytes()).and_then(|()| csv.to.flush()));
        written.map_err(|error| self.unwritten("writing CSV", &error))
    }

    /// Prints to standard output, above the progress bar.
    fn print(&self, text: &str) -> Result<(), Failure> {
        let written = self.bar.suspend(|| {
            let mut out = io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        });
        written.map_err(|error| self.unwritten("writing to standard output", &error))
    }

    /// Why something was not written. Where nobody reads any more the results that are to be kept are written before this program ends.
    fn unwritten(&self, doing: &str, error: &io::Error) -> Failure {
        if error.kind() == io::ErrorKind::BrokenPipe
            && let Err(failure) = locked(&self.results).interrupt("ended as nobody read its output any more")
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
fn has_table(settings: &Settings) -> bool {
    settings.csv != Some(Destination::Stdout) && settings.cell.is_none() && !settings.markdown
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
    for Note { text: note, is_warning } in facts.notes() {
        *text += &format!("# {}{note}\n", if is_warning { "note: " } else { "" });
    }
    if facts.on.is_device() && collective == Collective::Barrier {
        *text += "# A barrier is the host plane's, whatever the plane\n";
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
    use crate::facts::{Bound, On};

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
        facts.machine.load = Some(crate::machine::Load { busy: 1.4, cores: 2 });
        facts.bound = Some(Bound { to: "core".to_owned(), why_none: None, processors: vec!["0".to_owned(), "1,3".to_owned()] });
        let text = heading(&settings("collperf broadcast --explain"), &facts, Collective::Broadcast);
        for line in [
            "bound to: core (rank 0: cpu 0, rank 1: cpus 1,3)",
            "Links between hosts are encrypted",
            "note: others keep 1.4 of 2 cores busy: times will be too high",
            "ratio: predicted over measured time",
        ] {
            assert!(text.contains(&format!("# {line}\n")), "{line:?} is not in\n{text}");
        }
        let text = heading(&settings("collperf broadcast"), &RunFacts::example(2), Collective::Broadcast);
        assert!(!text.contains("encrypted") && !text.contains("note:") && !text.contains("ratio:"), "{text}");
        let text = markdown::heading(&settings("collperf broadcast --markdown"), &facts, Collective::Broadcast);
        assert!(text.contains("\nNote: others keep 1.4 of 2 cores busy") && text.contains("encrypted"), "{text}");
    }
}
