//! Measures collectives in the manner of nccl-tests.

mod arguments;
mod collective;
mod compare;
mod facts;
mod failure;
mod gpus;
mod hang;
mod inputs;
mod layout;
mod machine;
mod report;
mod row;
mod run;
mod settings;
mod sizes;
mod start;
mod statistics;
mod table;
mod trace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use collectives_launch as launch;

fn main() -> ExitCode {
    if hang::Arguments::are_meant() {
        return perform(hang::run);
    }
    match std::env::args().nth(1).as_deref() {
        Some("report") => perform_after_name(compare::run),
        Some("trace") => perform_after_name(trace::run),
        _ => perform(start::start),
    }
}

/// As [`perform`], without the task's name, which is no argument of it.
fn perform_after_name<A: Parser>(program: impl FnOnce(&A) -> Result<u8, failure::Failure>) -> ExitCode {
    perform_with(std::env::args_os().enumerate().filter(|(place, _)| *place != 1).map(|(_, argument)| argument), program)
}

/// Does what the command line asks for, or says what is wrong with it.
fn perform<A: Parser>(program: impl FnOnce(&A) -> Result<u8, failure::Failure>) -> ExitCode {
    perform_with(std::env::args_os(), program)
}

fn perform_with<A: Parser>(words: impl Iterator<Item = OsString>, program: impl FnOnce(&A) -> Result<u8, failure::Failure>) -> ExitCode {
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
