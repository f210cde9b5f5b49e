//! A single-file page for a ticket or an archive: verdict, pictures, table, ranks and environment. It loads no other
//! files. Its only script compares results that the reader drops on the page.

use std::fmt::Write as _;

use super::json::Totals;
use super::picture::{Banner, dark_style, escaped};
use super::plot;
use crate::arguments::IS_ONE_RANK;
use crate::facts::{Gpu, Note, RankFacts, RunFacts};
use crate::row::{Half, Row};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The content of a page.
pub(super) struct Page<'a> {
    pub(super) facts: &'a RunFacts,
    pub(super) transport: &'a str,
    pub(super) rows: &'a [Row],
    pub(super) totals: &'a Totals,
    /// The errors that ended the run early.
    pub(super) errors: &'a [String],
    /// Combinations that were left out, with the reasons.
    pub(super) refused: &'a [String],
    /// The meaning of the columns of single calls, if there are any.
    pub(super) singles: &'a str,
    /// The command that repeats the measurement.
    pub(super) command: &'a str,
    /// The variables that affect the measurement, without secrets.
    pub(super) variables: &'a [(String, String)],
}

impl Page<'_> {
    /// Returns the whole page.
    pub(super) fn document(&self) -> String {
        let (heading, below) = plot::title(self.rows, self.facts, self.transport);
        let (heading, below) = (escaped(&heading), escaped(&below));
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{heading}</title>\n<style>\n{STYLE}{}\n</style>\n</head>\n\
             <body>\n<h1>{heading}</h1>\n<p class=\"below\">{below}</p>\n",
            dark_style(":is(.chart, .legend)")
        );
        self.notes(&mut page);
        self.verdict(&mut page);
        page += &plot::draw_panels(self.rows);
        self.comparison(&mut page);
        self.results(&mut page);
        self.ranks(&mut page);
        let _ = writeln!(page, "<h2>Command</h2>\n<pre>{}</pre>", escaped(self.command));
        self.environment(&mut page);
        page + "</body>\n</html>\n"
    }

    fn notes(&self, page: &mut String) {
        if let Some(Banner { text, is_bad }) = plot::banner(self.facts) {
            let class = if is_bad { "bad" } else { "good" };
            let _ = writeln!(page, "<p class=\"verdict {class}\">{}</p>", escaped(&sentence(&text)));
        }
        for Note { text, .. } in self.facts.notes().into_iter().filter(|note| !note.is_warning) {
            let _ = writeln!(page, "<p class=\"below\">{}</p>", escaped(&sentence(&text)));
        }
    }

    /// Adds the place for other results, this page's own results in the form of -J, and the script that compares them.
    fn comparison(&self, page: &mut String) {
        let half = |half: &Half| serde_json::json!({ "time": half.time_us, "bus_bw": half.busbw });
        let row = |row: &Row| {
            serde_json::json!({
                "size": row.bytes, "experiment_name": row.collective.name(), "redop": row.op_name(), "type": row.type_name(),
                "root": row.root.map_or("-1".to_owned(), |root| root.to_string()),
                "out_of_place": row.out_of_place.as_ref().map(half), "in_place": row.in_place.as_ref().map(half),
            })
        };
        let own = serde_json::json!({
            "start_time": self.facts.start_time, "results": self.rows.iter().map(row).collect::<Vec<_>>(),
        });
        // No text can end the element.
        let own = own.to_string().replace('<', "\\u003c");
        *page += "<h2>Compare</h2>\n<div id=\"drop\" tabindex=\"0\">Drop one result of <code>-J</code> here to compare it with this page, \
                  or two results to compare them with each other. <label>Or choose files: <input type=\"file\" multiple \
                  accept=\".json\"></label></div>\n<div id=\"compared\"></div>\n";
        let _ = writeln!(page, "<script type=\"application/json\" id=\"own\">{own}</script>\n<script>\n{SCRIPT}</script>");
    }

    fn verdict(&self, page: &mut String) {
        let mut paragraph = |good: bool, text: &str| {
            let class = if good { "good" } else { "bad" };
            let _ = writeln!(page, "<p class=\"verdict {class}\">{}</p>", escaped(text));
        };
        self.errors.iter().for_each(|error| paragraph(false, &format!("The run ended early: {error}")));
        let Totals { failed_checks, mean_busbw, reached } = *self.totals;
        match failed_checks {
            _ if !self.halves().any(|(_, half, _)| half.wrong.is_some()) => paragraph(true, "No result was checked."),
            0 => paragraph(true, "All results that were checked are correct."),
            count => paragraph(false, &format!("Wrong elements in {count} of the results below.")),
        }
        let floor = match reached {
            None => "",
            Some(true) => ", which is enough for NCCL_TESTS_MIN_BW",
            Some(false) => ", less than nine tenths of NCCL_TESTS_MIN_BW",
        };
        paragraph(reached != Some(false), &format!("Mean bus bandwidth {mean_busbw:.4} GB/s{floor}."));
        self.refused
            .iter()
            .for_each(|refusal| paragraph(false, &format!("These calls were not made, because they are not supported: {refusal}")));
    }

    fn halves(&self) -> impl Iterator<Item = (&Row, &Half, bool)> {
        self.rows.iter().flat_map(|row| row.halves().map(move |(half, in_place)| (row, half, in_place)))
    }

    fn results(&self, page: &mut String) {
        let spread = self.halves().any(|(_, half, _)| half.spread.is_some());
        let mut names = vec!["collective", "op", "type", "root", "buffers"];
        let words = names.len();
        names.extend(["bytes", "elements", "time (µs)", "algbw (GB/s)", "busbw (GB/s)", "wrong"]);
        names.extend(
            spread.then_some(["mean (µs)", "least (µs)", "p50 (µs)", "p95 (µs)", "p99 (µs)", "p99.9 (µs)", "most (µs)"]).iter().flatten(),
        );
        let singles = if spread { format!("<p class=\"below\">{}</p>\n", self.singles) } else { String::new() };
        let _ = writeln!(page, "<h2>Results</h2>\n{singles}<div class=\"wide\"><table>\n{}", heads(&names, words));
        for (row, half, in_place) in self.halves() {
            let _ = writeln!(page, "{}", result(row, half, in_place, spread));
        }
        *page += "</table></div>\n";
    }

    fn ranks(&self, page: &mut String) {
        let _ = writeln!(
            page,
            "<h2>Ranks</h2>\n<div class=\"wide\"><table>\n{}",
            heads(&["rank", "host", "process", "on its host", "processor or GPU"], 5)
        );
        for RankFacts { peer, local_rank, processor, gpu, .. } in &self.facts.ranks {
            let device = match gpu {
                Some(Gpu { ordinal, bus, name }) => format!("{name}, device {ordinal} at {bus}"),
                None => processor.clone(),
            };
            let cells = [peer.rank.to_string(), peer.host.clone(), peer.pid.to_string(), local_rank.to_string(), device];
            let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect();
            let _ = writeln!(page, "<tr>{cells}</tr>");
        }
        *page += "</table></div>\n";
    }

    fn environment(&self, page: &mut String) {
        if self.variables.is_empty() {
            return;
        }
        *page += "<h2>Environment</h2>\n<pre>";
        for (name, value) in self.variables {
            let _ = writeln!(page, "{}={}", escaped(name), escaped(value));
        }
        *page += "</pre>\n";
    }
}

/// Returns a note as a sentence.
fn sentence(note: &str) -> String {
    let mut letters = note.chars();
    letters.next().map_or(String::new(), |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}

/// Returns the headings of columns, the first of which contain words.
fn heads(names: &[&str], words: usize) -> String {
    let head = |(column, name): (usize, &&str)| {
        let class = if column < words { "" } else { " class=\"number\"" };
        format!("<th{class}>{name}</th>")
    };
    let cells: String = names.iter().enumerate().map(head).collect();
    format!("<tr>{cells}</tr>")
}

fn result(row: &Row, half: &Half, in_place: bool, spread: bool) -> String {
    let root = row.root.map_or("–".to_owned(), |root| root.to_string());
    let words = [row.collective.name(), row.op_name(), row.type_name(), &root, if in_place { "one" } else { "two" }];
    let mut cells: String = words.iter().map(|word| format!("<td>{word}</td>")).collect();
    let mut number = |text: String, class: &str| {
        let _ = write!(cells, "<td class=\"number{class}\">{text}</td>");
    };
    number(row.bytes.to_string(), "");
    number(row.count.to_string(), "");
    number(format!("{:.2}", half.time_us), "");
    number(format!("{:.3}", half.algbw), "");
    number(format!("{:.3}", half.busbw), "");
    let is_wrong = half.wrong.is_some_and(|wrong| wrong > 0);
    number(half.wrong.map_or("–".to_owned(), |wrong| wrong.to_string()), if is_wrong { " bad" } else { "" });
    if spread {
        let figures =
            half.spread.as_ref().map(|spread| [spread.mean, spread.min, spread.p50, spread.p95, spread.p99, spread.p999, spread.max]);
        (0..7).for_each(|place| number(figures.map_or("–".to_owned(), |figures| format!("{:.2}", figures[place])), ""));
    }
    format!("<tr>{cells}</tr>")
}

/// Returns a command as the user gave it, quoted for a shell.
pub(super) fn command(words: impl Iterator<Item = String>) -> String {
    let is_plain =
        |word: &str| !word.is_empty() && word.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_./=:,+@%".contains(letter));
    let quoted = |word: String| if is_plain(&word) { word } else { format!("'{}'", word.replace('\'', r"'\''")) };
    let given = words.filter(|word| word != IS_ONE_RANK).enumerate();
    let short = given.map(|(place, word)| if place == 0 { word.rsplit('/').next().map(str::to_owned).unwrap_or(word) } else { word });
    short.map(quoted).collect::<Vec<_>>().join(" ")
}

/// Returns the variables that libraries of collectives read, sorted; for secrets, only that they are set.
pub(super) fn variables(all: impl Iterator<Item = (String, String)>) -> Vec<(String, String)> {
    let prefixes = ["COLLECTIVES_", "NCCL_", "CUDA_", "OMP_NUM_THREADS"];
    let is_secret = |name: &str| ["SECRET", "TOKEN", "PASSWORD", "KEY"].iter().any(|part| name.contains(part));
    let mut kept: Vec<_> = all
        .filter(|(name, _)| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(name, value)| if is_secret(&name) { (name, "(not shown)".to_owned()) } else { (name, value) })
        .collect();
    kept.sort();
    kept
}

#[cfg(test)]
mod tests {
    use collectives::{DType, ReduceOp};

    use super::*;
    use crate::collective::Collective;
    use crate::facts::On;
    use crate::machine::Load;
    use crate::statistics::Spread;

    fn row(wrong: Option<u64>) -> Row {
        let half = Half { wrong, ..Half::new(Collective::AllReduce, 2, 1024, 2.0) };
        Row {
            collective: Collective::AllReduce,
            op: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            root: None,
            ranks: 2,
            count: 256,
            bytes: 1024,
            iterations: 20,
            out_of_place: Some(half),
            in_place: None,
        }
    }

    fn document(rows: &[Row], failed_checks: usize, errors: &[String]) -> String {
        document_of(&RunFacts::example(2), rows, failed_checks, errors)
    }

    fn document_of(facts: &RunFacts, rows: &[Row], failed_checks: usize, errors: &[String]) -> String {
        let totals = Totals { failed_checks, mean_busbw: 0.512, reached: None };
        let variables = [("NCCL_ALGO".to_owned(), "<Ring>".to_owned())];
        Page {
            facts,
            transport: "shm",
            rows,
            totals: &totals,
            errors,
            refused: &[],
            singles: "each by itself",
            command: "collperf all_reduce",
            variables: &variables,
        }
        .document()
    }

    #[test]
    fn a_page_has_all_that_was_measured_and_where() {
        let page = document(&[row(Some(0))], 0, &[]);
        for part in [
            "<title>all_reduce over 2 ranks on 1 host</title>",
            "All results that were checked are correct.",
            "<svg ",
            "<td>all_reduce</td><td>sum</td><td>float</td><td>–</td><td>two</td><td class=\"number\">1024</td>",
            "<td class=\"number\">0.512</td>",
            "<td>desk</td><td>101</td>",
            "<pre>collperf all_reduce</pre>",
            "NCCL_ALGO=&lt;Ring&gt;",
        ] {
            assert!(page.contains(part), "{part:?} is not in\n{page}");
        }
        // It loads nothing.
        assert_eq!(page.matches("http").count(), page.matches("http://www.w3.org/2000/svg").count());
        assert!(!page.contains(" src=") && !page.contains("@import") && !page.contains("fetch("));
        let own = page.split_once("id=\"own\">").unwrap().1.split_once("</script>").unwrap().0;
        let own: serde_json::Value = serde_json::from_str(own).unwrap();
        assert_eq!((&own["results"][0]["size"], &own["results"][0]["out_of_place"]["time"]), (&1024.into(), &2.0.into()));
    }

    #[test]
    fn wrong_answers_and_early_ends_are_seen_first() {
        let page = document(&[row(Some(3))], 1, &["rank 1 of 2 is gone".to_owned()]);
        let at = |part: &str| page.find(part).unwrap_or_else(|| panic!("{part:?} is not in\n{page}"));
        assert!(at("The run ended early: rank 1 of 2 is gone") < at("Wrong elements in 1 of the results below."));
        assert!(at("Wrong elements") < at("<svg ") && at("<svg ") < at("<td class=\"number bad\">3</td>"));
        assert!(document(&[row(None)], 0, &[]).contains("No result was checked."));
        assert!(document(&[], 0, &[]).contains("nothing measured"));
    }

    #[test]
    fn a_page_has_the_notes_that_stand_above_the_table() {
        let why = On::Host { why: Some("no driver".to_owned()) };
        let mut facts = RunFacts { is_encrypted: true, on: why, ..RunFacts::example(2) };
        facts.machine.load = Some(Load { busy: 1.4, cores: 2 });
        let page = document_of(&facts, &[row(None)], 0, &[]);
        for part in [
            "<p class=\"verdict bad\">Other programs keep 1.4 of 2 cores busy, so times will be too high.</p>",
            "<p class=\"below\">Links between hosts are encrypted.</p>",
            "there is no device backend: no driver.</p>",
        ] {
            assert!(page.find(part).is_some_and(|at| at < page.find("<svg ").unwrap()), "{part:?} is not above the picture in\n{page}");
        }
        assert!(!document(&[row(None)], 0, &[]).contains("busy"));
    }

    #[test]
    fn figures_of_single_calls_have_a_mean_of_their_own() {
        let mut with = row(None);
        let half = with.out_of_place.take().unwrap();
        // Consecutive calls overlap, so each one alone may take longer.
        with.out_of_place = Some(Half { spread: Spread::of(&[2.5, 3.5]), ..half });
        let page = document(&[with], 0, &[]);
        assert!(page.contains("<p class=\"below\">each by itself</p>") && page.contains(">mean (µs)</th>"), "{page}");
        let numbers: Vec<&str> = page.split("<td class=\"number\">").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
        assert_eq!((numbers[2], &numbers[6..9]), ("2.00", &["3.00", "2.50", "3.50"][..]), "{numbers:?}");
    }

    #[test]
    fn commands_can_be_pasted_and_secrets_are_not_shown() {
        let words = ["/bin/collperf", "--is-one-rank", "all reduce", "it's", "", "-b", "8"].map(str::to_owned);
        assert_eq!(command(words.into_iter()), r"collperf 'all reduce' 'it'\''s' '' -b 8");
        let pairs = [("PATH", "/bin"), ("NCCL_ALGO", "Ring"), ("COLLECTIVES_SECRET", "5"), ("COLLECTIVES_TIMEOUT", "9")];
        let shown = variables(pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        let expected = [("COLLECTIVES_SECRET", "(not shown)"), ("COLLECTIVES_TIMEOUT", "9"), ("NCCL_ALGO", "Ring")];
        assert_eq!(shown, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
