//! Ranks that are separate processes, so that they can be killed and stopped.

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::limit::Limit;
use crate::common::ranks::{free_port, patience, spawn_rank};

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(60);

/// The processes of a test, which end with it, and the lines that they print after an @, with their ranks.
pub(crate) struct Ranks {
    pub(crate) children: Vec<Child>,
    lines: Receiver<(usize, String)>,
    sender: Sender<(usize, String)>,
    /// The threads that read what each rank prints.
    readers: Vec<Option<JoinHandle<()>>>,
    /// The lines that were read while waiting for a rank's end.
    heard: Vec<(usize, String)>,
}

impl Ranks {
    #[allow(dead_code, reason = "each test program uses what it needs")]
    pub(crate) fn spawn(name: &str, world_size: usize) -> Self {
        Self::spawn_with(name, world_size, &[])
    }

    /// Does the same as [`Ranks::spawn`], with more variables.
    pub(crate) fn spawn_with(name: &str, world_size: usize, variables: &[(&str, String)]) -> Self {
        let port = free_port();
        Self::of((0..world_size).map(|rank| spawn_rank(name, rank, world_size, port, variables)).collect())
    }

    /// Takes over processes that were already started.
    pub(crate) fn of(children: Vec<Child>) -> Self {
        let (sender, lines) = channel();
        let mut ranks = Self { children: Vec::new(), lines, sender, readers: Vec::new(), heard: Vec::new() };
        children.into_iter().for_each(|child| ranks.add(child));
        ranks
    }

    /// Takes over another process, as the next rank.
    pub(crate) fn add(&mut self, mut child: Child) {
        let (rank, out, sender) = (self.children.len(), BufReader::new(child.stdout.take().unwrap()), self.sender.clone());
        self.children.push(child);
        self.readers.push(Some(std::thread::spawn(move || {
            for line in out.lines().map_while(std::io::Result::ok) {
                match line.split_once('@') {
                    Some((_, line)) => drop(sender.send((rank, line.to_owned()))),
                    None => println!("rank {rank}: {line}"),
                }
            }
        })));
    }

    /// Returns the next line of any rank.
    pub(crate) fn next(&mut self, what: &str) -> (usize, String) {
        let line = self.lines.recv_timeout(PATIENCE).inspect(|(rank, line)| println!("rank {rank}: {line}"));
        line.unwrap_or_else(|_| {
            self.children.iter_mut().for_each(|child| child.kill().unwrap());
            for rank in 0..self.children.len() {
                let outcome = self.outcome(rank);
                println!("{}", outcome.err().unwrap_or_default());
            }
            panic!("no rank says any more that {what}")
        })
    }

    /// Waits until a rank ends, which must be successful, and returns the lines that it printed.
    pub(crate) fn last_words(&mut self, rank: usize, limit: Duration) -> std::result::Result<Vec<String>, String> {
        let deadline = Instant::now() + limit;
        while self.children[rank].try_wait().unwrap().is_none() {
            if Instant::now() >= deadline {
                self.children.iter_mut().for_each(|child| child.kill().unwrap());
                let what: Vec<_> = (0..self.children.len()).map(|rank| self.outcome(rank).err().unwrap_or_default()).collect();
                return Err(format!(
                    "rank {rank} does not end; all said {:?}\n{}",
                    self.lines.try_iter().collect::<Vec<_>>(),
                    what.join("\n")
                ));
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
        self.outcome(rank).map_err(|error| format!("{error}\nall said {:?}", self.lines.try_iter().collect::<Vec<_>>()))?;
        if let Some(reader) = self.readers[rank].take() {
            reader.join().unwrap();
        }
        self.heard.extend(self.lines.try_iter());
        Ok(self.heard.iter().filter(|(who, _)| *who == rank).map(|(_, line)| line.clone()).collect())
    }

    /// Waits until a rank ends, and kills it if it is stuck. Returns its errors if it failed.
    pub(crate) fn outcome(&mut self, rank: usize) -> std::result::Result<(), String> {
        let child = &mut self.children[rank];
        let _limit = child.try_wait().unwrap().is_none().then(|| Limit::on(child));
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let status = child.wait().unwrap();
        if status.success() { Ok(()) } else { Err(format!("rank {rank}: {status}\n{errors}")) }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
