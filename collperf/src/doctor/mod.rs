//! Checks what a machine has and lacks for jobs of this library, and prints what to do about each problem.

#[cfg(feature = "cuda")]
mod devices;
mod finding;
mod host;
mod meeting;
mod reach;

use std::collections::BTreeMap;
use std::path::Path;

use clap::Parser;

use crate::failure::{CHECK, Failure};
use crate::job;
use crate::report::answer;
use finding::{Finding, OfHost, State};
use meeting::Meeting;

/// Checks what this machine has and lacks: driver, NCCL, peer access, NVLink, memory, huge pages, limits, MTU, and
/// whether ranks can reach each other. Prints what to do about each problem.
///
/// Without a launcher or -g, checks only this machine. Otherwise one rank of each host also tries to connect to one
/// rank of every other host. For each host after the first, only the differences are printed. The exit code is 7 if a
/// finding is BAD, which means that jobs would fail. Notes do not change it.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf doctor", bin_name = "collperf doctor", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: job::Flags,
}

/// Runs the checks, and prints the findings.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    if arguments.job.are_ranks() { job::run_as(&arguments.job, |_| among_ranks(&arguments.job)) } else { alone() }
}

fn alone() -> Result<u8, Failure> {
    let findings = look();
    answer(&findings.iter().map(Finding::to_string).collect::<String>())?;
    Ok(code(&findings))
}

/// Checks everything that is visible on this machine.
fn look() -> Vec<Finding> {
    let mut findings = host::look(Path::new("/"));
    #[cfg(feature = "cuda")]
    findings.extend(devices::look());
    #[cfg(not(feature = "cuda"))]
    findings.push(Finding::note("device backend", "not in this build of collperf", "for GPUs: build collperf with the feature cuda"));
    findings
}

/// Returns the exit code.
fn code(findings: &[Finding]) -> u8 {
    if findings.iter().any(|finding| finding.state == State::Bad) { CHECK } else { 0 }
}

/// Runs one rank's part: rank 0 prints what all have found.
fn among_ranks(flags: &job::Flags) -> Result<u8, Failure> {
    let meeting = Meeting::join(flags.timeout())?;
    let others = reach::Others::meet(&meeting)?;
    let findings = if others.speaks_for_host() { look().into_iter().chain(others.probe()).collect() } else { vec![] };
    others.gather(&findings)?.map_or(Ok(0), |all| tell(&all))
}

/// Prints the first host's findings, and how those of each other host differ.
fn tell(all: &[OfHost]) -> Result<u8, Failure> {
    let mut text = String::new();
    let first: BTreeMap<&str, &Finding> =
        all.iter().take(1).flat_map(|(_, findings)| findings.iter().map(|finding| (&finding.subject[..], finding))).collect();
    for (number, (host, findings)) in all.iter().enumerate() {
        let is_new = |finding: &&Finding| number == 0 || first.get(&finding.subject[..]) != Some(finding);
        let new: Vec<&Finding> = findings.iter().filter(is_new).collect();
        text += &format!("{host}:{}\n", if new.is_empty() { " same findings as on the first host" } else { "" });
        text.extend(new.iter().map(|finding| finding.to_string()));
    }
    answer(&text)?;
    Ok(all.iter().map(|(_, findings)| code(findings)).max().unwrap_or(0))
}
