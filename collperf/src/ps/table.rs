//! The answer for people.

use std::fmt::Write;

use super::document::{Document, Process, Ras};
use super::view::{Communicator, Rank, View};

/// The columns of a communicator's table.
const COLUMNS: [&str; 7] = ["rank", "host", "pid", "process", "state", "for", "call"];

/// Describes everything that was found.
pub(super) fn to_text(document: &Document, view: &View) -> String {
    let mut text: String = document.errors.iter().map(|error| format!("not asked: {error}\n")).collect();
    text.extend(view.cycles.iter().map(String::as_str));
    let mut communicators: Vec<&Communicator> = view.communicators.iter().collect();
    // What needs attention first. The order is stable otherwise.
    communicators.sort_by_key(|communicator| communicator.findings.is_empty());
    text.extend(communicators.into_iter().map(of_communicator));
    for process in &document.processes {
        let omitted = process.status.as_ref().and_then(|status| status["omitted"].as_u64()).unwrap_or(0);
        if omitted > 0 {
            let _ = writeln!(text, "{} has {omitted} more communicators, which its answer leaves out", name(process));
        }
    }
    let is_shown = |process: &Process| {
        let is_it = |rank: &Rank| rank.pid == process.pid && rank.host_name == process.host_name;
        process.status.is_some() || view.communicators.iter().any(|communicator| communicator.ranks.iter().any(is_it))
    };
    for process in document.processes.iter().filter(|process| !is_shown(process)) {
        let _ = writeln!(text, "{}: {}", name(process), process.error.as_deref().unwrap_or_default());
    }
    text.extend(document.nccl_ras.iter().map(of_service));
    if text.is_empty() {
        let _ = writeln!(text, "no ranks of this user were found on {}", document.hosts.join(", "));
    }
    // The words come from other processes, and a terminal acts on control characters.
    text.replace(|letter: char| letter.is_control() && letter != '\n', "\u{fffd}")
}

fn name(process: &Process) -> String {
    format!("process {} ({}) on host {}", process.pid, process.program, process.host_name)
}

/// Returns what NCCL's own service says, as it says it.
fn of_service(ras: &Ras) -> String {
    let Ras { host_name, address, text, error } = ras;
    match text {
        Some(text) => {
            let lines: String = text.lines().map(|line| format!("  {line}\n")).collect();
            format!("NCCL's own service (RAS) at {address} on host {host_name} says, without knowing how long calls have waited:\n{lines}")
        }
        None => format!("NCCL's own service (RAS) at {address} on host {host_name}: {}\n", error.as_deref().unwrap_or_default()),
    }
}

/// Describes a communicator: its findings, and a line for each rank.
fn of_communicator(communicator: &Communicator) -> String {
    let Communicator { name, id, wiring, is_held_up, findings, ranks } = communicator;
    let mut text = format!("communicator {name} ({id}): {} ranks; {wiring}\n", ranks.len());
    text.extend(findings.iter().map(|finding| format!("  {finding}\n")));
    if findings.is_empty() {
        text += if *is_held_up { "  no cause was found\n" } else { "  no call has waited for longer than 1 s\n" };
    }
    let rows: Vec<[String; COLUMNS.len()]> = [COLUMNS.map(str::to_owned)].into_iter().chain(ranks.iter().map(row)).collect();
    let widths: Vec<usize> =
        (0..COLUMNS.len()).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "  {}", cells.join("  ").trim_end());
    }
    text
}

fn row(rank: &Rank) -> [String; COLUMNS.len()] {
    let (state, seconds, call) = match (&rank.call, &rank.silent) {
        (Some(call), _) => {
            let seconds = call.seconds.map_or_else(String::new, |seconds| format!("{seconds:.1} s"));
            let place = if call.backend == "device" { " on the device" } else { "" };
            let ranks = if call.state == "waits" { &call.waiting_for[..] } else { &[] };
            let waits = if ranks.is_empty() { String::new() } else { format!(", for {}", crate::hang::list(ranks)) };
            (call.state.to_owned(), seconds, format!("{}{place}{waits}", call.text))
        }
        (None, Some(reason)) => ("silent".to_owned(), String::new(), reason.clone()),
        (None, None) => ("idle".to_owned(), String::new(), "no call yet".to_owned()),
    };
    [rank.rank.to_string(), rank.host_name.clone(), rank.pid.to_string(), rank.process.name().to_owned(), state, seconds, call]
}
