//! Replaces ranks that have failed, while the others continue.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process_group};

use super::{Supervisor, Watched};
use crate::replacement;

impl Supervisor<'_> {
    /// Schedules a replacement of a rank that has failed, if it may have one. Returns the words for it.
    pub(super) fn replacement_of(&mut self, place: usize) -> String {
        let Some(watched) = self.ranks.get(place).filter(|_| self.replacements.are_allowed()) else { return String::new() };
        if !self.runs() {
            return "; no rank runs that a replacement could join (after a failure, the others must call Communicator::admit)".to_owned();
        }
        let (ran, most) = (watched.started.elapsed(), self.replacements.most());
        match self.replacements.schedule(watched.local_rank, ran, Instant::now()) {
            Some((number, delay)) => format!("; its replacement ({number} of {most}) starts in {} s", delay.as_secs()),
            None => format!("; it is not replaced, because {most} of {most} replacements are used"),
        }
    }

    /// Returns the addresses at which a replacement can join, or `None` if no rank that runs has written one yet.
    pub(in super::super) fn join_addresses(&mut self, local_rank: usize) -> Option<Vec<SocketAddr>> {
        let running = self.ranks.iter().filter(|watched| watched.exit.is_none());
        let addresses: Vec<SocketAddr> =
            running.filter_map(|watched| watched.join_file.as_deref()).filter_map(replacement::address).collect();
        if addresses.is_empty() {
            self.replacements.postpone(local_rank, Instant::now());
            return None;
        }
        Some(addresses)
    }

    /// Prepares the replacement of a rank: kills the processes that its last process has left behind. Returns how often
    /// the rank has been replaced, this time included.
    pub(in super::super) fn begin_replacement(&mut self, local_rank: usize) -> u32 {
        for watched in self.ranks.iter().filter(|watched| watched.local_rank == local_rank) {
            // The group exists until its leader is reaped. They may hold ports and devices.
            let _ = kill_process_group(watched.group, Signal::KILL);
        }
        self.replacements.begin(local_rank)
    }

    /// Schedules another replacement in the place of one that could not be started.
    pub(in super::super) fn not_started(&mut self, local_rank: usize, why: &str) {
        if let Some(watched) = self.ranks.iter().find(|watched| watched.local_rank == local_rank && watched.exit.is_none()) {
            // Its end schedules the next replacement.
            let _ = kill_process_group(watched.group, Signal::KILL);
            return self.say(why);
        }
        let most = self.replacements.most();
        let next = match self.replacements.schedule(local_rank, Duration::ZERO, Instant::now()) {
            Some((number, delay)) => format!("the next replacement ({number} of {most}) starts in {} s", delay.as_secs()),
            None => format!("{most} of {most} replacements are used"),
        };
        self.say(&format!("{why}; {next}"));
    }

    /// Stops the ranks that run if a replacement waits for them and none of them can let it in.
    pub(super) fn check_replacements(&mut self) {
        let running = || self.ranks.iter().filter(|watched| watched.exit.is_none());
        let is_member = |watched: &Watched| watched.join_file.as_deref().and_then(replacement::address).is_some();
        let waits = self.replacements.are_pending() || running().all(|watched| watched.is_replacement);
        if !self.runs() || self.stopping || self.is_interrupted() || !waits || running().any(is_member) {
            return;
        }
        self.say(&format!(
            "stopping rank {}: no rank that runs is a member of the job, so no other process can join it (ranks that can be replaced call Communicator::from_env, and admit after a failure)",
            self.running()
        ));
        self.replacements.cancel();
        self.stop();
    }

    /// Says how many ranks were replaced.
    pub(super) fn say_replaced(&self) {
        match (self.replacements.started(), self.replacements.most()) {
            (0, _) => {}
            (1, most) => self.say(&format!("1 failed process was replaced (at most {most})")),
            (started, most) => self.say(&format!("{started} failed processes were replaced (at most {most})")),
        }
    }
}
