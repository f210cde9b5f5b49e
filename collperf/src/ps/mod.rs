//! Asks running jobs where they are: which rank waits in which call, since when, and for whom.

mod document;
mod hosts;
mod process;
mod question;
mod ras;
mod table;
#[cfg(test)]
mod tests;
mod view;

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use serde_json::Value;

use crate::failure::Failure;
use crate::report::answer;
use document::{Absent, Document, Process};
use view::View;

/// Shows in which calls the ranks of running jobs are, and why they wait.
///
/// Asks all ranks of this host that belong to this user (root: to all users). The program needs no preparation. Prints
/// each communicator with a line for each rank, and names what is wrong: the rank that is behind, calls that differ,
/// processes that are stopped or gone, device calls that do not end, ranks that wait for each other in a cycle. A call
/// counts as held up after one second. If NCCL's own service (RAS) answers, its answer is printed, too.
///
/// For a job on several hosts, list the hosts (--hosts), or join the JSON of each host (--merge): srun --overlap --jobid
/// JOB -N NODES --ntasks-per-node 1 --output ps-%n.json collperf ps --json; collperf ps --merge ps-*.json
///
/// The exit code is 1 if a host or a file could not be read. COLLECTIVES_STATUS_SOCKET=0 in a job's environment turns
/// the answers of its ranks off.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf ps", bin_name = "collperf ps", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    /// Print JSON, one document in a line, with the full answers of all ranks
    #[arg(long)]
    json: bool,
    /// Ask again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = seconds)]
    watch: Option<Duration>,
    /// How long a rank may take to answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    timeout: Duration,
    /// Ask these hosts by ssh, instead of this one. collperf must be installed there
    #[arg(long, value_name = "HOST,…", value_delimiter = ',')]
    hosts: Vec<String>,
    /// Command that runs a command on another host. Its arguments are the host and that command, and it must not ask
    /// for a password
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes")]
    ssh: String,
    /// Path of collperf on the other hosts [default: its path on this host]
    #[arg(long, value_name = "PATH")]
    remote_collperf: Option<PathBuf>,
    /// Ask no rank: read what collperf ps --json has printed on each host. - stands for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["hosts", "watch"])]
    merge: Vec<PathBuf>,
}

/// Reads a time of at least a millisecond and at most an hour.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    if (0.001..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("expected 0.001 to 3600 seconds".to_owned())
    }
}

/// Asks, and prints the answer: once, or until the program is interrupted.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    loop {
        let document = collect(arguments)?;
        let text = if arguments.json { to_json(&document)? } else { table::to_text(&document, &View::new(&document)) };
        let Some(pause) = arguments.watch else {
            answer(&text)?;
            return Ok(u8::from(!document.errors.is_empty()));
        };
        // Moves to the top left, and clears what is below.
        let clear = if std::io::stdout().is_terminal() && !arguments.json { "\x1b[H\x1b[J" } else { "" };
        answer(&format!("{clear}{text}"))?;
        sleep(pause);
    }
}

/// Returns the document, and what it says.
fn to_json(document: &Document) -> Result<String, Failure> {
    let failed = |error| Failure::internal(format!("writing JSON: {error}"));
    let mut json = serde_json::to_value(document).map_err(failed)?;
    let view = serde_json::to_value(View::new(document)).map_err(failed)?;
    if let (Value::Object(json), Value::Object(view)) = (&mut json, view) {
        json.extend(view);
    }
    Ok(format!("{json}\n"))
}

/// Asks this host or others, or reads files.
fn collect(arguments: &Arguments) -> Result<Document, Failure> {
    let parts: Vec<Result<Vec<Document>, String>> = if !arguments.merge.is_empty() {
        arguments.merge.iter().map(|path| Document::read_file(path)).collect()
    } else if !arguments.hosts.is_empty() {
        let own = std::env::current_exe().map_err(|error| Failure::io("finding the path of collperf", &error))?;
        let collperf = arguments.remote_collperf.as_ref().unwrap_or(&own);
        hosts::ask_all(&arguments.hosts, hosts::Way { ssh: &arguments.ssh, collperf, limit: arguments.timeout })
    } else {
        vec![Ok(vec![of_this_host(arguments.timeout)?])]
    };
    let mut all = Document::new(now(), Vec::new(), Vec::new(), Vec::new());
    for part in parts {
        match part {
            Ok(documents) => documents.into_iter().for_each(|document| all.add(document)),
            Err(error) => all.errors.push(error),
        }
    }
    Ok(all)
}

/// Asks the ranks of this host.
fn of_this_host(limit: Duration) -> Result<Document, Failure> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let processes = question::ask_all(&host, limit).map_err(|error| Failure::io("asking the ranks of this host", &error))?;
    let (absent, nccl_ras) = (absent(&processes, &host), ras::ask_all(&processes, limit));
    let mut document = Document::new(now(), vec![host], processes, absent);
    document.nccl_ras = nccl_ras;
    Ok(document)
}

/// Returns the ranks of this host that answered ranks name, and that have no socket.
fn absent(processes: &[Process], host: &str) -> Vec<Absent> {
    let found: BTreeSet<u32> = processes.iter().map(|process| process.pid).collect();
    // Ranks in another PID namespace use numbers that mean other processes here.
    let alike = processes.iter().filter(|process| process.has_the_number_of_its_host());
    let peers = alike.flat_map(Process::records).flat_map(|record| record.ranks);
    let pids: BTreeSet<u32> = peers.filter(|peer| peer.host_name == host && !found.contains(&peer.pid)).map(|peer| peer.pid).collect();
    let look = |pid| Absent { host_name: host.to_owned(), pid, state: process::look(pid).1 };
    pids.into_iter().map(look).collect()
}

/// Returns the time since 1970 in nanoseconds.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
