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

/// The command line of the launcher on a host: this one's, behind what says which host it is. Of a flag that comes twice the last one counts.
fn flags(arguments: &Arguments, hosts: &[Host], node: usize, words: &[std::ffi::OsString]) -> Vec<std::ffi::OsString> {
    let first = hosts[0].name.rsplit_once('@').map_or(&*hosts[0].name, |(_, host)| host);
    let mut flags = vec!["--controlled".to_owned(), "--nnodes".to_owned(), hosts.len().to_string()];
    flags.extend(["--node-rank".to_owned(), node.to_string(), "--master-addr".to_owned(), first.to_owned()]);
    flags.extend(["--master-port".to_owned(), arguments.master_port.unwrap_or(PORT).to_string()]);
    flags.extend(["--log-line-prefix-template".to_owned(), "[${hostname} ${rank}] ".to_owned()]);
    if let Some(ranks) = hosts[node].ranks {
        flags.extend(["--nproc-per-node".to_owned(), ranks.to_string()]);
    }
    flags.into_iter().map(Into::into).chain(words.iter().cloned()).collect()
}

fn listen(signals: &[i32], events: &Sender<Event>) -> std::io::Result<()> {
    let (mut signals, events) = (Signals::new(signals)?, events.clone());
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// The launchers of all hosts, by their connections.
struct Launchers<'a> {
    hosts: &'a [Host],
    inputs: Vec<Option<ChildStdin>>,
    children: Vec<u32>,
    /// The first failure of a rank that one of them told.
    failure: Option<Failure>,
    /// The exit code of the one that failed first.
    code: u8,
    /// When connections are cut.
    ends: Option<Instant>,
    grace: Option<Duration>,
}

/// Whether a name is this host's.
fn is_here(host: &str) -> bool {
    host == "localhost" || host == rustix::system::uname().nodename().to_string_lossy()
}

impl Launchers<'_> {
    fn start(&mut self, arguments: &Arguments, host: &Host, collrun: &std::path::Path, order: &Order, events: &Sender<Event>) -> std::io::Result<()> {
        let mut command = if is_here(&host.name) {
            Command::new(collrun)
        } else {
            let mut words = arguments.ssh.split_whitespace();
            let mut command = Command::new(words.next().unwrap_or("ssh"));
            // The one word that a shell reads there.
            let path = collrun.to_string_lossy().replace('\'', r"'\''");
            command.args(words).arg(&host.name).arg(format!("'{path}' --read-order"));
            command
        };
        if is_here(&host.name) {
            command.arg("--read-order");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut input = child.stdin.take();
        // A connection that breaks at once is told by its end.
        if input.as_mut().is_some_and(|input| input.write_all(&order.encode()).is_err()) {
            input = None;
        }
        self.inputs.push(input);
        self.children.push(child.id());
        let number = self.children.len() - 1;
        let carriers = [
            child.stdout.take().map(|pipe| carry(pipe, std::io::stdout, events)),
            child.stderr.take().map(|pipe| carry(pipe, std::io::stderr, events)),
        ];
        let events = events.clone();
        thread::Builder::new().name(host.name.clone()).spawn(move || {
            carriers.into_iter().flatten().for_each(|carrier| drop(carrier.join()));
            let _ = events.send(Event::Ended(number, Child::wait(&mut child)));
        })?;
        Ok(())
    }

    fn wait(&mut self, events: &Receiver<Event>) -> u8 {
        let mut left = self.children.len();
        while left > 0 {
            let event = match self.ends {
                None => events.recv().ok(),
                Some(until) => events.recv_timeout(until.saturating_duration_since(Instant::now())).ok(),
            };
            match event {
                Some(Event::Ended(host, status)) => {
                    left -= 1;
                    self.ended(host, status, left);
                }
                Some(Event::Failed(failure)) => self.failure = Some(failure),
                Some(Event::Signal(signal)) => self.tell(signal),
                None => self.cut(),
            }
        }
        if let Some(failure) = &self.failure {
            eprintln!("collrun: first failure: {failure}");
        }
        self.code
    }

    fn ended(&mut self, host: usize, status: std::io::Result<ExitStatus>, left: usize) {
        use std::os::unix::process::ExitStatusExt;
        self.inputs[host] = None;
        let (code, words) = match status {
            Ok(status) if status.success() => return,
            Ok(status) => (status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1), status.to_string()),
            Err(error) => (1, error.to_string()),
        };
        if self.code != 0 {
            return;
        }
        self.code = u8::try_from(code).unwrap_or(1);
        if self.failure.is_none() {
            let stopping = if left > 0 { "; stopping the others" } else { "" };
            eprintln!("collrun: the connection to {} ended with {words}: can it be reached, and is collrun there?{stopping}", self.hosts[host].name);
        }
        self.tell(SIGTERM);
        self.ends = Some(Instant::now() + self.grace.unwrap_or(Duration::from_secs(30)) + BEYOND);
    }

    /// Passes a signal on to the ranks of all hosts.
    fn tell(&mut self, signal: i32) {
        for input in &mut self.inputs {
            let is_gone = input.as_mut().is_some_and(|input| input.write_all(&[signal as u8]).is_err());
            if is_gone {
                *input = None;
            }
        }
    }

    /// Cuts the connections of those that do not end: their launchers stop their ranks then.
    fn cut(&mut self) {
        self.ends = None;
        self.inputs.iter_mut().for_each(|input| *input = None);
        for child in &self.children {
            if let Some(pid) = rustix::process::Pid::from_raw(*child as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
    }
}

/// Carries lines from a host to a stream of ours; a failure that its launcher tells is an event.
fn carry<W: Write + 'static>(pipe: impl Read + Send + 'static, stream: fn() -> W, events: &Sender<Event>) -> thread::JoinHandle<()> {
    let events = events.clone();
    thread::spawn(move || {
        let mut lines = BufReader::new(pipe);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            match line.split_first() {
                Some((&FAILURE, text)) => {
                    if let Ok(failure) = Failure::from_json(text) {
                        let _ = events.send(Event::Failed(failure));
                    }
                }
                _ => {
                    let mut stream = stream();
                    if stream.write_all(&line).and_then(|()| stream.flush()).is_err() {
                        return;
                    }
                }
            }
            line.clear();
        }
    })
}
