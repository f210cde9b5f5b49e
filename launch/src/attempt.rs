//! A job as one attempt after another: all ranks are started, and where one fails on any host, all are stopped and started anew.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};

use super::arrivals::Place;
use super::hosts::{Hosts, Watch};
use super::supervisor::{self, Event, Outcome, Supervisor};
use super::{End, Job, Output, Refused, Store, child, output};
use collectives::Secret;

/// Where the files of a job lie: the user's folder, or one that goes with the job.
struct Files {
    folder: PathBuf,
    _removed: Option<tempfile::TempDir>,
}

impl Files {
    fn new(job: &Job) -> std::io::Result<Self> {
        if let Some(base) = &job.log_folder {
            std::fs::create_dir_all(base)?;
            let run = job.run_id.as_deref().unwrap_or("collrun").replace('/', "_");
            let folder = tempfile::Builder::new().prefix(&format!("{run}_")).tempdir_in(base)?.keep();
            return Ok(Self { folder, _removed: None });
        }
        let removed = tempfile::Builder::new().prefix("collrun-").tempdir()?;
        Ok(Self { folder: removed.path().to_owned(), _removed: Some(removed) })
    }
}

/// All that the attempts of a job have in common.
struct Attempts<'a> {
    name: &'a str,
    job: &'a Job,
    store: &'a Store,
    hosts: Option<Hosts>,
    files: Files,
    sender: Sender<Event>,
}

/// Runs a job to its end.
pub(super) fn run(name: &str, job: &Job, store: &Store, secret: Option<&Secret>) -> Result<End, Refused> {
    let failed = |doing: String| move |error: std::io::Error| Refused { message: format!("{doing}: {error}"), code: 1 };
    // Signals first: from here on none of them can end this process before its ranks have heard of it.
    let (sender, events) = std::sync::mpsc::channel();
    let signals = sender.clone();
    supervisor::on_signals(&job.signals, move |signal| signals.send(Event::Signal(signal)).is_ok())
        .map_err(failed("waiting for signals".to_owned()))?;
    if job.controlled {
        super::control::listen(&sender).map_err(failed("listening to the launcher that started this one".to_owned()))?;
    }
    if job.output == Output::FirstRank {
        super::broken_pipe::listen(&sender).map_err(failed("waiting for ranks whose output nobody reads".to_owned()))?;
    }
    let base = job.log_folder.as_deref().map_or_else(std::env::temp_dir, Path::to_path_buf);
    let files = Files::new(job).map_err(failed(format!("making a folder for the ranks' files in {}", base.display())))?;
    if job.log_folder.is_some() {
        supervisor::say(name, &format!("the ranks' files are in {}", files.folder.display()));
    }
    let hosts = (job.nodes > 1).then(|| Hosts {
        name: name.to_owned(),
        place: Place { address: store.address.clone(), port: store.port, secret: secret.cloned() },
        count: job.nodes,
        node: job.node,
        patience: job.patience,
    });
    Attempts { name, job, store, hosts, files, sender }.run(events)
}

impl Attempts<'_> {
    fn run(&self, mut events: Receiver<Event>) -> Result<End, Refused> {
        for attempt in 0..=self.job.most_restarts {
            let (outcome, left) = self.attempt(attempt, events)?;
            events = left;
            let may_restart = attempt < self.job.most_restarts && outcome.code != 0 && !outcome.interrupted;
            if may_restart {
                let cause = outcome.failure.as_ref().map_or_else(String::new, |failure| format!(", since failed {failure}"));
                let next = attempt + 1;
                supervisor::say(self.name, &format!("starting all ranks anew, {next} of {}{cause}", self.job.most_restarts));
                continue;
            }
            return Ok(End { code: outcome.code, failure: outcome.failure });
        }
        Ok(End { code: 0, failure: None })
    }

    /// Starts all ranks of this host and waits until the attempt is over for this host; for all hosts where they may be started anew.
    fn attempt(&self, attempt: u32, events: Receiver<Event>) -> Result<(Outcome, Receiver<Event>), Refused> {
        let watch = self.watch(attempt)?;
        let mut supervisor = Supervisor::new(self.name, self.job, attempt, self.hosts.clone(), self.sender.clone(), events);
        let mut forwarders = output::Forwarders::default();
        for local_rank in 0..self.job.local_world_size {
            let rank = self.job.node * self.job.local_world_size + local_rank;
            let refused = |doing: &str, error: std::io::Error| Refused { message: format!("{doing} rank {rank}: {error}"), code: 1 };
            let folder = self.files.folder.join(format!("attempt_{attempt}")).join(local_rank.to_string());
            std::fs::create_dir_all(&folder).map_err(|error| refused("making a folder for", error))?;
            let ends = output::Ends::open(self.job.output, &self.job.logs, local_rank, &folder);
            let ends = ends.map_err(|error| refused("making log files for", error))?;
            let place = child::Place { local_rank, attempt, error_file: folder.join("error.json") };
            let (mut child, copies) =
                child::spawn(self.job, self.store, &place, ends).map_err(|error| child::refused(&self.job.program, rank, &error))?;
            forwarders.attach(&child::prefix(self.job, local_rank), copies, &mut child);
            supervisor.watch(rank, local_rank, place.error_file, child).map_err(|error| refused("watching", error))?;
        }
        let outcome = supervisor.wait();
        let events = supervisor.close();
        drop(watch);
        forwarders.finish();
        Ok((outcome, events))
    }

    fn watch(&self, attempt: u32) -> Result<Option<Watch>, Refused> {
        let watch = self.hosts.as_ref().map(|hosts| hosts.watch(attempt, &self.sender)).transpose();
        watch.map_err(|error| Refused { message: format!("watching the other hosts: {error}"), code: 1 })
    }
}
