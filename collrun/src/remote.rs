//! A job on several hosts that is started from one: a launcher on each by ssh, which is told what to do on standard input. Its output comes back,
//! signals go there, and when the connection breaks its ranks stop.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use collectives::Secret;
use collectives_launch::{Failure, Refused};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::arguments::Arguments;
use crate::order::{self, Order};
use crate::usage;

/// Stands before a failure that a launcher tells the one that started it.
pub(crate) const FAILURE: u8 = 0x1e;
/// How long launchers may take beyond their own patience before their connections are cut.
const BEYOND: Duration = Duration::from_secs(5);
/// torchrun's port.
const PORT: u16 = 29500;

/// A host, and how many ranks it gets where that is said.
#[derive(Debug, PartialEq, Eq)]
struct Host {
    name: String,
    ranks: Option<u16>,
}

/// `a,b:4`.
fn listed(text: &str) -> Result<Vec<Host>, String> {
    let host = |word: &str| {
        let (name, ranks) = match word.rsplit_once(':').filter(|(name, _)| !name.contains(':') || name.ends_with(']')) {
            Some((name, ranks)) => (name, Some(count(ranks).ok_or_else(|| format!("--hosts {word}: {ranks:?} is no number of ranks"))?)),
            None => (word, None),
        };
        if name.is_empty() || name.starts_with('-') {
            return Err(format!("--hosts {text}: {name:?} is no host"));
        }
        Ok(Host { name: name.to_owned(), ranks })
    };
    text.split(',').map(|word| host(word.trim())).collect()
}

/// Lines of `host`, `host slots=4` and `host:4`; what stands behind # is a comment.
fn of_file(path: &PathBuf) -> Result<Vec<Host>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("--hostfile {}: {error}", path.display()))?;
    let mut hosts = Vec::new();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty()) {
        let wrong = || format!("--hostfile {}: {line:?} is none of: host, host:4, host slots=4", path.display());
        let mut words = line.split_whitespace();
        let mut host = listed(words.next().unwrap_or("")).ok().filter(|hosts| hosts.len() == 1).and_then(|mut hosts| hosts.pop()).ok_or_else(wrong)?;
        for word in words {
            let slots = word.strip_prefix("slots=").and_then(count).ok_or_else(wrong)?;
            host.ranks = Some(slots);
        }
        hosts.push(host);
    }
    if hosts.is_empty() { Err(format!("--hostfile {}: there is no host in it", path.display())) } else { Ok(hosts) }
}

fn count(text: &str) -> Option<u16> {
    text.parse().ok().filter(|count| (1..=4096).contains(count))
}

/// The hosts that were named, if any were.
fn named(arguments: &Arguments) -> Result<Option<Vec<Host>>, String> {
    let hosts = match (&arguments.hosts, &arguments.hostfile) {
        (Some(list), _) => listed(list)?,
        (None, Some(path)) => of_file(path)?,
        (None, None) => return Ok(None),
    };
    if let Some(other) = hosts.iter().find(|host| host.ranks != hosts[0].ranks) {
        return Err(format!("{} and {}: every host gets as many ranks", hosts[0].name, other.name));
    }
    Ok(Some(hosts))
}

/// What happens on the way.
enum Event {
    Ended(usize, std::io::Result<ExitStatus>),
    Failed(Failure),
    Signal(i32),
}

/// Starts a job on the hosts that were named, and returns its exit code; `None` where none were.
pub(crate) fn run(arguments: &Arguments, words: &[std::ffi::OsString]) -> Result<Option<u8>, Refused> {
    if arguments.controlled {
        return Ok(None);
    }
    let Some(hosts) = named(arguments).map_err(usage)? else { return Ok(None) };
    let failed = |doing: &str, error: std::io::Error| Refused { message: format!("{doing}: {error}"), code: 1 };
    let folder = std::env::current_dir().map_err(|error| failed("finding the folder to start in", error))?;
    let collrun = match &arguments.remote_collrun {
        Some(path) => path.clone(),
        None => std::env::current_exe().map_err(|error| failed("finding collrun", error))?,
    };
    let mut variables = order::variables(&arguments.env).map_err(usage)?;
    if arguments.secret && Secret::from_env().map_err(|error| usage(error.to_string()))?.is_none() {
        let secret = Secret::random().map_err(|error| Refused { message: format!("making a secret: {error}"), code: 1 })?;
        variables.push(("COLLECTIVES_SECRET".into(), String::from_utf8_lossy(secret.expose()).into_owned().into()));
    }
    let (sender, events) = channel();
    listen(&arguments.signals_to_handle, &sender).map_err(|error| failed("waiting for signals", error))?;
    let mut job = Launchers { hosts: &hosts, inputs: vec![], children: vec![], failure: None, code: 0, ends: None, grace: arguments.grace };
    for (node, host) in hosts.iter().enumerate() {
        let order = Order { folder: folder.clone(), arguments: flags(arguments, &hosts, node, words), variables: variables.clone() };
        job.start(arguments, host, &collrun, &order, &sender).map_err(|error| failed(&format!("starting {} for {}", arguments.ssh, host.name), error))?;
    }
    Ok(Some(job.wait(&events)))
}
