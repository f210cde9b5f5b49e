//! Runs a job in attempts: all ranks are started, and if one fails on any host, all are stopped and started again.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};

use super::arrivals::Place;
use super::elastic::{Coordinator, Member, Message, Start};
use super::event::Event;
use super::guardian::Guardian;
use super::hosts::{Hosts, Watch};
use super::signals::{ends_jobs, on_signals, signal_name};
use super::supervisor::{Outcome, Supervisor, Waited};
use super::terminal::say;
use super::{Elastic, End, Job, Output, Refused, Store, child, limits, output};
use collectives::Secret;
use signal_hook::consts::{SIGPIPE, SIGTERM};

/// How many hosts are named; the others are counted.
const NAMED: usize = 8;

/// Returns the folder for temporary files. A `TMPDIR` without text counts as unset.
pub fn temporary_folder() -> PathBuf {
    Some(std::env::temp_dir()).filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| "/tmp".into())
}

/// The folder of a job's files: the user's, or one that is removed after the job.
struct Files {
    folder: PathBuf,
    _removed: Option<tempfile::TempDir>,
}

impl Files {
    /// Creates a folder in the one that the user gave.
    fn kept(job: &Job, base: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(base)?;
        let run = job.run_id.as_deref().unwrap_or("collrun").replace('/', "_");
        let folder = tempfile::Builder::new().prefix(&format!("{run}_")).tempdir_in(base)?.keep();
        Ok(Self { folder, _removed: None })
    }

    /// Creates a folder for error files alone, if there is a writable place. A job can run without one, as in a
    /// container with a read-only file system. If the folder is not in the usual place, the returned text says where it
    /// is, or why there is none.
    fn removed() -> (Option<Self>, Option<String>) {
        let (usual, shared) = (temporary_folder(), Path::new("/dev/shm"));
        let made = |base: &Path| {
            let folder = tempfile::Builder::new().prefix("collrun-").tempdir_in(base)?;
            Ok::<_, std::io::Error>(Self { folder: folder.path().to_owned(), _removed: Some(folder) })
        };
        let error = match made(&usual) {
            Ok(files) => return (Some(files), None),
            Err(error) => error,
        };
        let why = format!("no folder can be created in {} ({error}; set TMPDIR to another folder)", usual.display());
        match made(shared) {
            Ok(files) => {
                let said = format!("{why}: the ranks' error files are in {} while the ranks run", files.folder.display());
                (Some(files), Some(said))
            }
            Err(_) => {
                (None, Some(format!("{why}, nor in {}: ranks have no error files in which to write why they failed", shared.display())))
            }
        }
    }
}

/// The state that all attempts of a job share.
struct Attempts<'a> {
    name: &'a str,
    job: &'a Job,
    store: &'a Store,
    hosts: Option<Hosts>,
    files: Option<&'a Files>,
    guardian: Option<&'a Guardian>,
    sender: Sender<Event>,
}

/// What ends the wait for the next attempt of an elastic job.
enum Next {
    Message(Message),
    /// This signal ends the job on this host.
    Interrupted(i32),
    /// The host that serves the store is lost.
    Lost(String),
}

/// Runs a job to its end.
pub(super) fn run(name: &str, job: &Job, store: &Store, secret: Option<&Secret>) -> Result<End, Refused> {
    let failed =
        |doing: String| move |error: std::io::Error| Refused { message: format!("{doing}: {}", limits::explained(&error)), code: 1 };
    // Signals first: from here on no signal can end this process before it is passed on to the ranks.
    let (sender, events) = std::sync::mpsc::channel();
    let signals = sender.clone();
    on_signals(&job.signals, move |signal| signals.send(Event::Signal(signal)).is_ok())
        .map_err(failed("waiting for signals".to_owned()))?;
    if job.controlled {
        super::control::listen(&sender).map_err(failed("starting to read from the launcher that started this one".to_owned()))?;
    }
    if job.output == Output::FirstRank {
        super::broken_pipe::listen(&sender).map_err(failed("waiting for SIGPIPE from ranks".to_owned()))?;
    }
    let (files, said) = match &job.log_folder {
        Some(base) => {
            let doing = format!("making a folder for the ranks' files in {}", base.display());
            let files = Files::kept(job, base).map_err(failed(doing))?;
            let said = format!("the ranks' files are in {}", files.folder.display());
            (Some(files), Some(said))
        }
        None => Files::removed(),
    };
    if let (None, Some(said), 1..) = (&files, &said, job.replacements) {
        let message = format!("ranks cannot be replaced, because they have no files in which to write their join addresses: {said}");
        return Err(Refused { message, code: 1 });
    }
    said.iter().for_each(|said| say(name, said));
    let guardian = Guardian::start().inspect_err(|error| {
        let why = limits::explained(error);
        say(
            name,
            &format!("cannot start the process that watches {name}: {why}; if {name} is killed, the ranks' programs may keep running"),
        );
    });
    let hosts = (job.nodes > 1 || job.elastic.is_some()).then(|| Hosts {
        name: name.to_owned(),
        place: Place { address: store.address.clone(), port: store.port, secret: secret.cloned() },
        count: job.nodes,
        node: job.node,
        patience: job.patience,
        server: "the launcher that serves the store".to_owned(),
        names_missing: job.elastic.is_none(),
    });
    let attempts = Attempts { name, job, store, hosts, files: files.as_ref(), guardian: guardian.as_ref().ok(), sender };
    match (&job.elastic, attempts.hosts.clone()) {
        (Some(elastic), Some(hosts)) => attempts.run_elastic(elastic, &hosts, events),
        _ => attempts.run(events),
    }
}

/// Says to the other hosts why this one leaves.
fn ended_by(signal: i32) -> String {
    format!("its collrun was ended by {}", signal_name(signal))
}

impl Attempts<'_> {
    fn run(&self, mut events: Receiver<Event>) -> Result<End, Refused> {
        for attempt in 0..=self.job.most_restarts {
            let (outcome, left) = self.attempt(attempt, events)?;
            events = left;
            let may_restart = attempt < self.job.most_restarts && outcome.code != 0 && outcome.interrupted.is_none();
            if may_restart {
                let cause = outcome.failure.as_ref().map_or_else(String::new, |failure| format!(", after a failure: {failure}"));
                let next = attempt + 1;
                say(self.name, &format!("restarting all ranks, {next} of {}{cause}", self.job.most_restarts));
                continue;
            }
            return Ok(End { code: outcome.code, failure: outcome.failure });
        }
        Ok(End { code: 0, failure: None })
    }

    /// Takes part in an elastic job, in which the host that serves the store decides on the attempts.
    fn run_elastic(&self, elastic: &Elastic, hosts: &Hosts, events: Receiver<Event>) -> Result<End, Refused> {
        let refused = |error: std::io::Error| Refused { message: format!("joining the job: {}", limits::explained(&error)), code: 1 };
        let member = Member::start(self.name, &hosts.place, self.job, elastic, &self.sender).map_err(refused)?;
        let coordinator = elastic.serves.then(|| Coordinator::start(self.name, &hosts.place, self.job, elastic, member.id(), &self.sender));
        let coordinator = coordinator.transpose().map_err(refused)?;
        let mut by = "its collrun has ended".to_owned();
        let ended = self.take_part(&member, hosts, events, &mut by);
        match coordinator {
            Some(coordinator) => coordinator.finish(&format!("lost node 0 ({}), which serves the store: {by}", child::host_name())),
            None => member.leave(&by),
        }
        ended
    }

    /// Takes part in the attempts in which this host has a place. Sets `by` to the reason if a signal ends the job here.
    fn take_part(&self, member: &Member, hosts: &Hosts, mut events: Receiver<Event>, by: &mut String) -> Result<End, Refused> {
        let (mut last, mut server) = (End { code: 0, failure: None }, hosts.server.clone());
        loop {
            let start = match self.next(member, &events) {
                Next::Message(Message::Start(start)) => start,
                Next::Message(Message::LeftOut(_)) => continue,
                Next::Message(Message::Over { code, why }) => {
                    why.iter().for_each(|why| say(self.name, why));
                    let code = if last.code == 0 { code } else { last.code };
                    return Ok(End { code, ..last });
                }
                Next::Interrupted(signal) => {
                    *by = ended_by(signal);
                    return Ok(End { code: 128_u8.saturating_add(u8::try_from(signal).unwrap_or(0)), failure: None });
                }
                Next::Lost(words) => {
                    let doing = if member.has_joined() { format!("lost {server}") } else { "joining the job".to_owned() };
                    say(self.name, &format!("{doing}: {words}"));
                    return Ok(End { code: if last.code == 0 { 1 } else { last.code }, ..last });
                }
            };
            if let Some(name) = start.names.first() {
                server = format!("node 0 ({name}), which serves the store");
            }
            self.say_start(&start);
            let job = Job { nodes: start.names.len(), node: start.node, ..self.job.clone() };
            let hosts = Hosts { count: job.nodes, node: job.node, server: server.clone(), ..hosts.clone() };
            let round = Attempts { job: &job, hosts: Some(hosts), sender: self.sender.clone(), ..*self };
            let (outcome, left) = round.attempt(start.attempt, events)?;
            (events, last) = (left, End { code: outcome.code, failure: outcome.failure });
            if let Some(signal) = outcome.interrupted {
                *by = ended_by(signal);
            }
            if outcome.interrupted.is_some() || outcome.is_last {
                return Ok(last);
            }
            member.is_free();
        }
    }

    /// Waits for the next message of an elastic job. The host that serves the store sends one, or is lost.
    fn next(&self, member: &Member, events: &Receiver<Event>) -> Next {
        loop {
            match member.next() {
                Some(Ok(message)) => return Next::Message(message),
                Some(Err(words)) => return Next::Lost(words),
                None => {}
            }
            match events.recv() {
                Ok(Event::Signal(signal)) if ends_jobs(signal) => return Next::Interrupted(signal),
                Ok(Event::Orphaned) => return Next::Interrupted(SIGTERM),
                Ok(Event::Unread) => return Next::Interrupted(SIGPIPE),
                Ok(_) => {}
                // This struct holds a sender, so the channel cannot be closed.
                Err(error) => return Next::Lost(error.to_string()),
            }
        }
    }

    /// Prints which hosts take part, and why ranks start again if they do.
    fn say_start(&self, start: &Start) {
        let Start { attempt, node, names, failures, why } = start;
        let named = names.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = if names.len() > NAMED { format!(" and {} more", names.len() - NAMED) } else { String::new() };
        let hosts = if names.len() == 1 { "host" } else { "hosts" };
        let place = format!("{} {hosts} ({named}{more}); this host is node {node}", names.len());
        let most = self.job.most_restarts;
        say(
            self.name,
            &match why {
                None => format!("starting the ranks of {place}"),
                Some(why) => format!(
                    "restarting the ranks of {place}; attempt {attempt}, restarts after failures: {failures} of {most}; reason: {why}"
                ),
            },
        );
    }

    /// Starts all ranks of this host and waits until the attempt is over here, or on all hosts if ranks may be
    /// restarted.
    fn attempt(&self, attempt: u32, events: Receiver<Event>) -> Result<(Outcome, Receiver<Event>), Refused> {
        let watch = self.watch(attempt)?;
        let mut supervisor = Supervisor::new(self.name, self.job, attempt, self.hosts.clone(), self.guardian, self.sender.clone(), events);
        let mut forwarders = output::Forwarders::default();
        for local_rank in 0..self.job.local_world_size {
            self.start(attempt, local_rank, vec![], &mut supervisor, &mut forwarders)?;
        }
        let mut outcome = loop {
            match supervisor.wait() {
                Waited::Over(outcome) => break outcome,
                Waited::Replace(local_rank) => self.replace(local_rank, &mut supervisor, &mut forwarders),
            }
        };
        let events = supervisor.close();
        drop(watch);
        if let Some(error) = forwarders.finish() {
            say(self.name, &format!("the output of a rank could not be written: {error}"));
            outcome.code = outcome.code.max(1);
        }
        Ok((outcome, events))
    }

    /// Starts a process in the place of a rank that has failed, if a rank that runs has an address at which the process
    /// can join.
    fn replace(&self, local_rank: usize, supervisor: &mut Supervisor<'_>, forwarders: &mut output::Forwarders) {
        let Some(addresses) = supervisor.join_addresses(local_rank) else { return };
        let number = supervisor.begin_replacement(local_rank);
        let started = self.start(number, local_rank, addresses.clone(), supervisor, forwarders);
        match started {
            Ok(pid) => say(self.name, &format!("rank {local_rank} is replaced: pid {pid} joins at {}", child::listed(&addresses))),
            Err(refused) => supervisor.not_started(local_rank, &refused.message),
        }
    }

    /// Starts a process of a rank, and returns its number. If that fails, the supervisor ends the ranks started before
    /// it.
    fn start(
        &self,
        attempt: u32,
        local_rank: usize,
        joins: Vec<SocketAddr>,
        supervisor: &mut Supervisor<'_>,
        forwarders: &mut output::Forwarders,
    ) -> Result<u32, Refused> {
        let rank = self.job.node * self.job.local_world_size + local_rank;
        let refused = |doing: &str, error: std::io::Error| Refused {
            message: format!("{doing} rank {rank}: {}", limits::explained(&error)),
            code: 1,
        };
        let folder = self.folder(attempt, local_rank).map_err(|error| refused("making a folder for", error))?;
        let ends = output::Ends::open(self.job.output, &self.job.logs, local_rank, folder.as_deref());
        let ends = ends.map_err(|error| refused("making log files for", error))?;
        let file = |name: &str| folder.as_ref().map(|folder| folder.join(name));
        let join_file = file("join_address").filter(|_| self.job.replacements > 0);
        let place = child::Place { local_rank, attempt, error_file: file("error.json"), join_file, joins };
        let line = self.guardian.map(Guardian::line);
        let (mut child, copies) =
            child::spawn(self.job, self.store, &place, ends, line).map_err(|error| child::refused(&self.job.program, rank, &error))?;
        let pipes = (child.stdout.take(), child.stderr.take());
        let pid = child.id();
        supervisor.watch(rank, place, child).map_err(|error| refused("watching", error))?;
        let attached = forwarders.attach(&child::prefix(self.job, local_rank), copies, pipes);
        attached.map_err(|error| refused("forwarding the output of", error)).map(|()| pid)
    }

    /// Makes the folder of a rank's files. Without one the rank has no error file, and still runs, unless it needs other
    /// files too.
    fn folder(&self, attempt: u32, local_rank: usize) -> std::io::Result<Option<PathBuf>> {
        let Some(files) = self.files else { return Ok(None) };
        let folder = files.folder.join(format!("attempt_{attempt}")).join(local_rank.to_string());
        match std::fs::create_dir_all(&folder) {
            Ok(()) => Ok(Some(folder)),
            Err(error) if self.job.log_folder.is_some() || self.job.replacements > 0 => Err(error),
            Err(_) => Ok(None),
        }
    }

    fn watch(&self, attempt: u32) -> Result<Option<Watch>, Refused> {
        let watch = self.hosts.as_ref().map(|hosts| hosts.watch(attempt, &self.sender)).transpose();
        watch.map_err(|error| Refused { message: format!("watching the other hosts: {}", limits::explained(&error)), code: 1 })
    }
}
