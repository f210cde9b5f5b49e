//! Measures collectives in the manner of nccl-tests.

mod arguments;
mod collective;
mod compare;
mod contradictions;
mod environment;
mod facts;
mod failure;
mod gpus;
mod hang;
mod inputs;
mod layout;
mod links;
mod machine;
mod process;
mod report;
mod row;
mod run;
mod settings;
mod sizes;
mod start;
mod statistics;
mod subset;
mod table;
mod trace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use collectives_launch as launch;

fn main() -> ExitCode {
    let words = links::words();
    if hang::Arguments::are_meant() {
        return perform(words, hang::run);
    }
    match words.get(1).and_then(|word| word.to_str()) {
        Some("report") => perform_after_name(words, compare::run),
        Some("trace") => perform_after_name(words, trace::run),
        Some("install-links") => perform_after_name(words, links::install),
        _ => perform(words, start::start),
    }
}

/// As [`perform`], without the task's name, which is no argument of it.
fn perform_after_name<A: Parser>(mut words: Vec<OsString>, program: impl FnOnce(&A) -> Result<u8, failure::Failure>) -> ExitCode {
    words.remove(1);
    perform(words, program)
}

/// Does what the command line asks for, or says what is wrong with it.
fn perform<A: Parser>(words: Vec<OsString>, program: impl FnOnce(&A) -> Result<u8, failure::Failure>) -> ExitCode {
    let arguments = match A::try_parse_from(words) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are errors too, in clap's way of thinking.
            let is_usage = error.use_stderr();
            return match error.print() {
                Ok(()) if !is_usage => ExitCode::SUCCESS,
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
