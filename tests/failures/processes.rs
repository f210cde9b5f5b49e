//! Ranks that are processes of their own, so that they can be killed and stopped.

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::common::ranks::{free_port, spawn_rank};

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// The processes of a test, none of which outlives it, and what they print behind an @, with who printed it.
pub(crate) struct Ranks {
    pub(crate) children: Vec<Child>,
    lines: Receiver<(usize, String)>,
}

impl Ranks {
    pub(crate) fn spawn(name: &str, world_size: usize) -> Self {
        let port = free_port();
        let mut children: Vec<Child> = (0..world_size).map(|rank| spawn_rank(name, rank, world_size, port, &[])).collect();
        let (sender, lines) = channel();
        for (rank, child) in children.iter_mut().enumerate() {
            let (out, sender) = (BufReader::new(child.stdout.take().unwrap()), sender.clone());
            std::thread::spawn(move || {
                for line in out.lines().map_while(std::io::Result::ok) {
                    match line.split_once('@') {
                        Some((_, line)) => drop(sender.send((rank, line.to_owned()))),
                        None => println!("rank {rank}: {line}"),
                    }
                }
            });
        }
        Self { children, lines }
    }

    /// The next line of any rank.
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

    /// Waits for the end of a rank; what it said where it failed.
    pub(crate) fn outcome(&mut self, rank: usize) -> std::result::Result<(), String> {
        let child = &mut self.children[rank];
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
