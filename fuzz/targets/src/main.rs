//! Fuzzes on any toolchain; see `fuzz/README.md`.

#![allow(missing_docs, reason = "a program")]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use fuzz_targets::{TARGETS, Target, runner, seeds};

/// Tries targets with mutations of known inputs.
#[derive(Parser)]
struct Arguments {
    /// The target to try; default: all of them, one after another.
    #[arg(long, value_parser = |name: &str| Target::named(name).ok_or(names()))]
    target: Option<&'static Target>,
    /// How long to try each target.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Seed of the generator; default: a different one each time.
    #[arg(long)]
    seed: Option<u64>,
    /// Tries only this input, without catching panics.
    #[arg(long, requires = "target")]
    input: Option<PathBuf>,
    /// Writes the initial inputs to `fuzz/corpus`.
    #[arg(long)]
    write_seeds: bool,
}

fn names() -> String {
    format!("one of {}", TARGETS.map(|target| target.name).join(", "))
}

fn main() -> io::Result<ExitCode> {
    let arguments = Arguments::parse();
    if arguments.write_seeds {
        return write_seeds().map(|()| ExitCode::SUCCESS);
    }
    if let (Some(target), Some(input)) = (arguments.target, &arguments.input) {
        target.check(&fs::read(input)?);
        println!("{}: holds", target.name);
        return Ok(ExitCode::SUCCESS);
    }
    let seed = arguments.seed.unwrap_or_else(any_seed);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../artifacts");
    let mut code = ExitCode::SUCCESS;
    for target in TARGETS.iter().filter(|target| arguments.target.is_none_or(|wanted| wanted.name == target.name)) {
        match runner::run(target, Duration::from_secs(arguments.seconds), seed, &folder)? {
            Ok(tried) => println!("{}: {tried} inputs, seed {seed}", target.name),
            Err(found) => {
                println!("seed {seed}: {found}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// Returns a seed from the clock, so that no two runs are the same.
fn any_seed() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64)
}

/// Writes the initial inputs of each target, numbered. Inputs found by fuzzing have other names and are kept.
fn write_seeds() -> io::Result<()> {
    for target in &TARGETS {
        let folder = runner::corpus(target.name);
        fs::create_dir_all(&folder)?;
        for (number, (_, input)) in seeds().iter().filter(|(name, _)| *name == target.name).enumerate() {
            fs::write(folder.join(format!("seed-{number:02}")), input)?;
        }
    }
    Ok(())
}
