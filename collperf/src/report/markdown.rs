//! Results as Markdown tables, for issues and wikis.

use crate::collective::Collective;
use crate::facts::RunFacts;
use crate::row::{Half, Row};
use crate::settings::Settings;
use crate::table::general;

/// Returns the text above the rows of a collective.
pub(super) fn heading(settings: &Settings, facts: &RunFacts, collective: Collective) -> String {
    let count = |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
    let half = " time (us) | algbw (GB/s) | busbw (GB/s) | wrong |";
    let encrypted = if facts.is_encrypted { ", links between hosts encrypted" } else { "" };
    let note = facts.load_note().map_or(String::new(), |note| format!("\nNote: {note}.\n"));
    format!(
        "## {collective}\n\n{} on {}, {} backend ({}{encrypted}), {} timed calls; {}, {}\n{note}\n\
         | size (B) | count | type | op | root |{half} in place:{half}\n|{}\n",
        count(facts.ranks.len(), "rank"),
        count(facts.hosts(), "host"),
        facts.on.name(),
        facts.on.links(settings),
        settings.iterations * settings.aggregated,
        plain(&facts.machine.processor),
        facts.start_time,
        " ---: |".repeat(2) + " --- | --- |" + &" ---: |".repeat(9),
    )
}

/// Formats one row.
pub(super) fn row(row: &Row) -> String {
    let root = row.root.map_or(String::new(), |root| root.to_string());
    let halves = [&row.out_of_place, &row.in_place].map(half).concat();
    format!("| {} | {} | {} | {} | {root} |{halves}\n", row.bytes, row.count, row.type_name(), row.op_name())
}

fn half(half: &Option<Half>) -> String {
    match half {
        Some(half) => {
            let wrong = half.wrong.map_or(String::new(), |wrong| wrong.to_string());
            format!(" {:.2} | {:.3} | {:.3} | {wrong} |", half.time_us, half.algbw, half.busbw)
        }
        None => " |".repeat(4),
    }
}

/// Returns the text below the rows.
pub(super) fn footer(failed_checks: usize, mean_busbw: f64, reached: Option<bool>) -> String {
    let verdict = match reached {
        None => "",
        Some(true) => ", enough for NCCL_TESTS_MIN_BW",
        Some(false) => ", less than nine tenths of NCCL_TESTS_MIN_BW",
    };
    format!("\nMean busbw: {} GB/s{verdict}. Checks that found wrong elements: {failed_checks}.\n\n", general(mean_busbw))
}

/// Returns a name that cannot end a cell.
fn plain(name: &str) -> String {
    name.replace('|', "/")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use collectives::{DType, ReduceOp};

    use super::*;
    use crate::arguments::Arguments;
    use crate::environment::Environment;

    #[test]
    fn every_line_of_a_table_has_as_many_cells() {
        let settings = Settings::new(&Arguments::parse_from(["collperf", "all_reduce", "--markdown"]), &Environment::default()).unwrap();
        let made = Half { wrong: Some(3), ..Half::new(Collective::AllReduce, 2, 8, 4.0) };
        let example = Row {
            collective: Collective::AllReduce,
            op: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            root: None,
            ranks: 2,
            count: 2,
            bytes: 8,
            iterations: 20,
            out_of_place: Some(made),
            in_place: None,
        };
        let text = heading(&settings, &RunFacts::example(2), Collective::AllReduce) + &row(&example) + &footer(1, 2.5, Some(false));
        let cells: Vec<usize> = text.lines().filter(|line| line.starts_with('|')).map(|line| line.matches('|').count()).collect();
        assert_eq!(cells, [14, 14, 14], "{text}");
        assert!(text.starts_with("## all_reduce\n\n2 ranks on 1 host, host backend (auto), 20 timed calls; Abacus 9, "), "{text}");
        assert!(text.contains("| 8 | 2 | float | sum |  | 4.00 | 0.002 | 0.002 | 3 | | | | |\n"), "{text}");
        assert!(
            text.ends_with("Mean busbw: 2.5 GB/s, less than nine tenths of NCCL_TESTS_MIN_BW. Checks that found wrong elements: 1.\n\n"),
            "{text}"
        );
    }
}
