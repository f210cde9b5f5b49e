//! Measures collectives as nccl-tests does.

mod arguments;
mod collective;
mod compare;
mod contradictions;
mod doctor;
mod environment;
mod facts;
mod failure;
mod gpus;
mod hang;
mod input_file;
mod inputs;
mod job;
mod layout;
mod links;
mod machine;
mod osu;
mod output_file;
mod pairs;
mod process;
mod ps;
#[cfg(test)]
mod random;
mod replay;
mod report;
mod row;
mod run;
mod settings;
mod sizes;
mod start;
mod statistics;
mod stragglers;
mod subset;
mod table;
mod tails;
mod trace;
mod traffic;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use collectives_launch as launch;
use osu::windows::Kind;

fn main() -> ExitCode {
    // Before anything else: this process may be a launcher's guardian, which measures nothing.
    if launch::guard() {
        return ExitCode::SUCCESS;
    }
    let words = links::words();
    if hang::Arguments::are_meant() {
        return perform(words, hang::run);
    }
    // In the ranks that collperf starts, the first argument marks them.
    let place = if words.get(1).is_some_and(|word| word == arguments::IS_ONE_RANK) { 2 } else { 1 };
    let mut others = words.clone();
    let name = if place < words.len() { others.remove(place) } else { OsString::new() };
    match name.to_str() {
        Some("report") => perform(others, compare::run),
        Some("trace") => perform(others, trace::run),
        Some("install-links") => perform(others, links::install),
        Some("doctor") => perform(others, doctor::run),
        Some("ps") => perform(others, ps::run),
        Some("pairs") => perform(others, pairs::run),
        Some("replay") => perform(others, replay::run),
        Some("stragglers") => perform(others, stragglers::run),
        Some("osu_latency") => perform(others, osu::latency::run),
        Some("osu_bw") => perform(others, |arguments| osu::windows::run(Kind::OneWay, arguments)),
        Some("osu_bibw") => perform(others, |arguments| osu::windows::run(Kind::BothWays, arguments)),
        Some("osu_mbw_mr") => perform(others, |arguments| osu::windows::run(Kind::ManyPairs, arguments)),
        Some("osu_iallreduce") => perform(others, osu::overlap::run),
        _ => perform(words, start::start),
    }
}

/// Runs the task that the command line names, or reports what is wrong with it.
fn perform<A: Parser>(words: Vec<OsString>, program: impl FnOnce(&A) -> Result<u8, failure::Failure>) -> ExitCode {
    let arguments = match A::try_parse_from(words) {
        Ok(arguments) => arguments,
        Err(error) => {
            // clap returns help and version as errors, too.
            let is_usage = error.use_stderr();
            return match error.print() {
                Ok(()) if !is_usage => ExitCode::SUCCESS,
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => report::end_unread(),
                Err(_) if !is_usage => ExitCode::FAILURE,
                _ => ExitCode::from(failure::USAGE),
            };
        }
    };
    match program(&arguments) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            report::say(&failure.message);
            ExitCode::from(failure.code)
        }
    }
}
