//! Runs a job on several hosts, started from one of them: ssh starts a launcher on each host, which reads its order
//! from standard input. The launcher's output is sent back, and signals are sent to it. It stops its ranks if the
//! connection breaks.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use collectives::Secret;
use collectives_launch::{Failure, Interrupts, Job, Refused, Request, Stream, explained, on_signals, say, signal_name, wait_for_end};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGKILL, SIGTERM};

use crate::arguments::{Arguments, PORT};
use crate::carrier::{Carrier, Report};
use crate::control::Control;
use crate::failures::{tell_user, usage};
use crate::host_list::{self, Host};
use crate::order::{self, Order};

/// How much longer than its ranks a launcher may take to end before its connection is cut. After the same time again,
/// the launcher is killed.
const BEYOND: Duration = Duration::from_secs(5);
/// How long it may take to forward the remaining output after a connection has ended.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// The most hosts that are named.
const NAMED: usize = 8;

/// An event that a launcher's thread or a signal reports.
enum Event {
    Ended(usize),
    Reported(usize, Report),
    /// Output of a host could not be written.
    Unwritten(usize, io::Error),
    Signal(i32),
}

/// Starts a job on the hosts that the flags name, and returns its exit code; `None` if they name none.
pub(crate) fn run(arguments: &Arguments, words: &[OsString]) -> Result<Option<u8>, Refused> {
    if arguments.controlled.is_some() {
        return Ok(None);
    }
    let Some(hosts) = host_list::named(arguments).map_err(|reason| usage(arguments.named(reason)))? else { return Ok(None) };
    // Other errors in the flags are reported once, here.
    arguments.place().map_err(usage)?;
    let failed = |doing: &str, error: io::Error| Refused { message: format!("{doing}: {}", explained(&error)), code: 1 };
    let folder = std::env::current_dir().map_err(|error| failed("finding the folder to start in", error))?;
    let own = std::env::current_exe().map_err(|error| failed("finding collrun", error))?;
    let variables = variables(arguments)?;
    let (sender, events) = channel();
    let signals = sender.clone();
    on_signals(&arguments.signals_to_handle, move |signal| signals.send(Event::Signal(signal)).is_ok())
        .map_err(|error| failed("waiting for signals", error))?;
    let mut launchers = Launchers::new(arguments, &hosts, own);
    for node in 0..hosts.len() {
        let order = Order { folder: folder.clone(), arguments: flags(arguments, &hosts, node, words), variables: variables.clone() };
        if let Err(error) = launchers.start(node, &order, &sender) {
            say("collrun", &format!("starting {} for {}: {}", arguments.ssh, hosts[node].name, explained(&error)));
            launchers.give_up(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 });
            break;
        }
    }
    Ok(Some(launchers.wait(&events)))
}

/// Returns the variables for all hosts, including a new secret if one is requested.
fn variables(arguments: &Arguments) -> Result<Vec<(OsString, OsString)>, Refused> {
    let mut variables = order::variables(&arguments.env).map_err(usage)?;
    if arguments.secret && Secret::from_env().map_err(|error| usage(error.to_string()))?.is_none() {
        let secret = Secret::random().map_err(|error| Refused { message: format!("making a secret: {error}"), code: 1 })?;
        variables.push(("COLLECTIVES_SECRET".into(), String::from_utf8_lossy(secret.expose()).into_owned().into()));
    }
    Ok(variables)
}

/// Returns the command line of a host's launcher: the host's place, followed by this launcher's command line.
fn flags(arguments: &Arguments, hosts: &[Host], node: usize, words: &[OsString]) -> Vec<OsString> {
    // There are at most 4096 hosts.
    let number = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
    let control = Control {
        node: number(node),
        nodes: number(hosts.len()),
        address: arguments.master_addr.clone().unwrap_or_else(|| hosts[0].address().to_owned()),
        port: arguments.master_port.unwrap_or(PORT),
        ranks: hosts[node].ranks,
        name: hosts[node].address().to_owned(),
    };
    let first = ["--controlled".into(), control.to_string().into()];
    first.into_iter().chain(words.iter().cloned()).collect()
}

/// Whether a name is this host's.
fn is_here(host: &str) -> bool {
    host == "localhost" || host == rustix::system::uname().nodename().to_string_lossy()
}

/// A host's launcher, or the ssh that runs it.
struct Launcher {
    child: Child,
    /// The queue of a thread that writes to its standard input: until the connection is open, writing could block.
    input: Option<Sender<Vec<u8>>>,
    /// Whether it has read its order.
    has_begun: bool,
    /// Whether it ended with exit code 0.
    succeeded: bool,
    /// Whether it has ended. If so, its process number may belong to another process.
    ended: bool,
}

/// The launchers of all hosts.
struct Launchers<'a> {
    arguments: &'a Arguments,
    hosts: &'a [Host],
    own: PathBuf,
    started: Vec<Launcher>,
    /// The first failure of a rank that launchers have reported.
    failure: Option<Failure>,
    /// The exit code of the launcher that failed first.
    code: Option<u8>,
    /// The hosts whose ranks had all succeeded before a failure was reported.
    done: Vec<usize>,
    interrupts: Interrupts,
    /// The first signal that requested the job's end.
    asked: Option<i32>,
    /// When connections are cut, and then when the remaining launchers are killed.
    ends: Option<Instant>,
    cut: bool,
}

impl<'a> Launchers<'a> {
    fn new(arguments: &'a Arguments, hosts: &'a [Host], own: PathBuf) -> Self {
        Self {
            arguments,
            hosts,
            own,
            started: vec![],
            failure: None,
            code: None,
            done: vec![],
            interrupts: Interrupts::default(),
            asked: None,
            ends: None,
            cut: false,
        }
    }

    /// Returns the command for a host: a launcher here, or ssh with one word that a shell reads there.
    fn command(&self, host: &Host) -> Command {
        if is_here(&host.name) {
            let mut command = Command::new(&self.own);
            command.arg("--read-order");
            return command;
        }
        let mut words = self.arguments.ssh.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or("ssh"));
        command.args(words).arg(&host.name).arg(format!("{} --read-order", quoted(self.remote_collrun())));
        command
    }

    fn remote_collrun(&self) -> &Path {
        self.arguments.remote_collrun.as_deref().unwrap_or(&self.own)
    }

    fn start(&mut self, node: usize, order: &Order, events: &Sender<Event>) -> io::Result<()> {
        let mut command = self.command(&self.hosts[node]);
        // In its own process group, so that a terminal's signals arrive only at this process, which passes them on.
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()?;
        let (input, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let pid = Pid::from_child(&child);
        // From here on its end is waited for, even if a later step fails.
        self.started.push(Launcher { child, input: None, has_begun: false, succeeded: false, ended: false });
        let (carrying, carried) = channel::<()>();
        let ended = events.clone();
        in_thread(move || {
            wait_for_end(pid);
            // The channel is closed once all output has been forwarded.
            let _ = carried.recv_timeout(LAST_WORDS);
            let _ = ended.send(Event::Ended(node));
        })
        .inspect_err(|_| self.abandon(node))?;
        if let (Some(pipe), Some(launcher)) = (input, self.started.get_mut(node)) {
            let input = write_to(pipe)?;
            // An error means that the launcher has ended, which is reported elsewhere.
            let _ = input.send(order.encode());
            launcher.input = Some(input);
        }
        let continued = format!("[{}] ", self.hosts[node].name);
        if let Some(pipe) = stdout {
            carry(Carrier::new(Stream::Output, &continued, None), pipe, carrying.clone(), node, events.clone())?;
        }
        if let Some(pipe) = stderr {
            let (events, unwritten) = (events.clone(), events.clone());
            let hear = Box::new(move |report| drop(events.send(Event::Reported(node, report))));
            carry(Carrier::new(Stream::Error, &continued, Some(hear)), pipe, carrying, node, unwritten)?;
        }
        Ok(())
    }

    /// Ends a launcher whose end no thread will report.
    fn abandon(&mut self, node: usize) {
        let Some(launcher) = self.started.get_mut(node) else { return };
        let _ = launcher.child.kill();
        let _ = launcher.child.wait();
        launcher.ended = true;
    }

    fn wait(&mut self, events: &Receiver<Event>) -> u8 {
        while self.started.iter().any(|launcher| !launcher.ended) {
            let event = match self.ends {
                None => events.recv().ok(),
                Some(until) => events.recv_timeout(until.saturating_duration_since(Instant::now())).ok(),
            };
            match event {
                Some(Event::Ended(node)) => self.ended(node),
                Some(Event::Reported(node, Report::Started)) => self.started[node].has_begun = true,
                Some(Event::Reported(_, Report::Failed(failure))) => self.failed(failure),
                Some(Event::Unwritten(node, error)) => self.unwritten(node, &error),
                Some(Event::Signal(signal)) => self.pass_on(signal),
                None => self.lose_patience(),
            }
        }
        if let Some(failure) = &self.failure {
            tell_user(failure);
            self.say_done();
        }
        if self.arguments.keep_going && self.started.iter().any(|launcher| launcher.succeeded) { 0 } else { self.code.unwrap_or(0) }
    }

    /// Prints which hosts had finished before the failure: the other hosts may have lost the ranks of the finished
    /// hosts.
    fn say_done(&self) {
        let names: Vec<&str> = self.done.iter().take(NAMED).map(|node| &*self.hosts[*node].name).collect();
        if !names.is_empty() {
            let more = if self.done.len() > NAMED { format!(" and {} more", self.done.len() - NAMED) } else { String::new() };
            say("collrun", &format!("all ranks of {}{more} had ended with exit code 0 before this failure", names.join(", ")));
        }
    }

    /// Keeps the earliest failure: each host reports the first one that it knows of.
    fn failed(&mut self, failure: Failure) {
        self.failure = Some(match self.failure.take() {
            None => failure,
            Some(first) if failure.time < first.time => failure.and_done_before(first.done_before),
            Some(first) => first.and_done_before(failure.done_before),
        });
    }

    /// The launcher there ends, because its output has no reader any more.
    fn unwritten(&mut self, node: usize, error: &io::Error) {
        self.code.get_or_insert(1);
        say("collrun", &format!("the output of {} could not be written: {error}", self.hosts[node].name));
    }

    fn ended(&mut self, node: usize) {
        let Some(launcher) = self.started.get_mut(node) else { return };
        (launcher.ended, launcher.input) = (true, None);
        let (code, ended) = match launcher.child.wait() {
            Ok(status) if status.success() && launcher.has_begun => {
                launcher.succeeded = true;
                return self.done.extend(self.failure.is_none().then_some(node));
            }
            Ok(status) => (status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1), status.to_string()),
            Err(error) => (1, error.to_string()),
        };
        if self.code.is_some() {
            return;
        }
        // A launcher whose connection was cut has not failed.
        let of_signal = self.asked.filter(|_| self.cut).map(|signal| 128 + signal);
        // A command that ended with 0, and started no launcher, has failed, too.
        self.code = Some(u8::try_from(of_signal.unwrap_or(code)).unwrap_or(1).max(1));
        if self.failure.is_none() && self.asked.is_none() {
            self.say_ended(node, code, &ended);
        }
        if !self.arguments.keep_going {
            self.stop();
        }
    }

    /// Prints what is known of a launcher that ended without reporting a failure of a rank.
    fn say_ended(&self, node: usize, code: i32, ended: &str) {
        let host = &self.hosts[node].name;
        let collrun = self.remote_collrun().display();
        let what = match code {
            0 => {
                format!(
                    "{} ended on {host} with exit code 0, but collrun did not start there: check --ssh and --remote-collrun",
                    self.arguments.ssh
                )
            }
            // ssh's own exit code.
            255 => format!("the connection to {host} ended ({ended}): check that ssh can connect to the host without a password"),
            127 => format!(
                "collrun on {host} ended ({ended}): {collrun} or the program is missing there; give collrun's path with --remote-collrun"
            ),
            _ => format!("collrun on {host} ended ({ended})"),
        };
        let others = self.started.iter().any(|launcher| !launcher.ended);
        let then = match (others, self.arguments.keep_going) {
            (false, _) => "",
            (true, true) => "; the others continue",
            (true, false) => "; stopping the others",
        };
        say("collrun", &format!("{what}{then}"));
    }

    /// Stops all launchers because one could not be started.
    fn give_up(&mut self, code: u8) {
        self.code.get_or_insert(code);
        self.stop();
    }

    fn stop(&mut self) {
        self.tell(SIGTERM);
        self.ends.get_or_insert(Instant::now() + self.arguments.grace.unwrap_or(Job::GRACE) + BEYOND);
    }

    fn pass_on(&mut self, signal: i32) {
        let grace = self.arguments.grace.unwrap_or(Job::GRACE_AFTER_SIGNAL);
        match self.interrupts.heard(signal, Instant::now()) {
            Request::Nothing => self.tell(signal),
            Request::Stop => {
                self.asked = Some(signal);
                self.tell(signal);
                self.ends.get_or_insert(Instant::now() + grace + BEYOND);
            }
            Request::Kill => {
                self.tell(SIGKILL);
                let soon = Instant::now() + BEYOND;
                self.ends = Some(self.ends.map_or(soon, |until| until.min(soon)));
                // Last, because standard error may have no reader.
                say("collrun", &format!("second request to end ({}); killing all ranks", signal_name(signal)));
            }
        }
    }

    /// Makes the launchers pass a signal on to the ranks of all hosts.
    fn tell(&mut self, signal: i32) {
        let Ok(signal) = u8::try_from(signal) else { return };
        for launcher in &mut self.started {
            launcher.input = launcher.input.take().filter(|input| input.send(vec![signal]).is_ok());
        }
    }

    /// Cuts the connections of launchers that do not end, which makes them stop their ranks. The second time, kills
    /// those that remain.
    fn lose_patience(&mut self) {
        let mut late = Vec::new();
        let left = self.started.iter_mut().enumerate().filter(|(_, launcher)| !launcher.ended);
        for (node, launcher) in left {
            launcher.input = None;
            if self.cut {
                let _ = launcher.child.kill();
                continue;
            }
            // It has not been reaped, so its number is still its own.
            let _ = kill_process(Pid::from_child(&launcher.child), Signal::TERM);
            late.push(&*self.hosts[node].name);
        }
        self.ends = (!self.cut).then(|| Instant::now() + BEYOND);
        self.cut = true;
        // Last, because standard error may have no reader.
        late.iter().for_each(|host| say("collrun", &format!("the launcher on {host} does not end; closing the connection")));
    }
}

/// Quotes a word for any shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}

/// Starts a thread; returns an error instead of panicking.
fn in_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("host".into()).spawn(work).map(drop)
}

/// Forwards what arrives through a pipe, from a separate thread. Drops `carrying` at the end.
fn carry(
    carrier: Carrier,
    pipe: impl Read + AsFd + Send + 'static,
    carrying: Sender<()>,
    node: usize,
    events: Sender<Event>,
) -> io::Result<()> {
    in_thread(move || {
        if let Err(error) = carrier.carry(pipe)
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            // An error means that this launcher has ended.
            let _ = events.send(Event::Unwritten(node, error));
        }
        drop(carrying);
    })
}

/// Writes each message from a separate thread, until all senders are dropped or the pipe is closed.
fn write_to(mut pipe: impl Write + Send + 'static) -> io::Result<Sender<Vec<u8>>> {
    let (sender, messages) = channel::<Vec<u8>>();
    in_thread(move || {
        for message in messages {
            if pipe.write_all(&message).is_err() {
                return;
            }
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_one_word_of_a_shell() {
        for path in ["/a b/collrun", "/it's/collrun", "/$HOME/\"x\"/`y`\\z", "/a;b&c|d"] {
            let output = Command::new("sh").args(["-c", &format!("printf %s {}", quoted(Path::new(path)))]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), path);
        }
    }
}
