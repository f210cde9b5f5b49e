//! Waiting for requests: briefly on the core, then by giving it up, then asleep on the links' descriptors.

use std::hint;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_yield;

use crate::host::link::ByteLink;
use crate::host::waiting::Pause;

use super::{Connector, Messages};

impl<C: Connector> Messages<C> {
    /// Rounds until something moves or, after a few fruitless ones, one sleep of at most `budget` is over; whether anything
    /// moved. For a thread that shares the engine and must let go of it in between.
    pub(crate) fn wait_step(&mut self, budget: Duration) -> bool {
        loop {
            if self.round() {
                return true;
            }
            let pause = self.patience.next();
            if matches!(pause, Pause::Sleep(_)) {
                self.tell_all_credit();
            }
            self.rest(pause, budget);
            if matches!(pause, Pause::Sleep(_)) {
                return self.progress();
            }
        }
    }

    /// Passes the time after a fruitless round, at most `limit` of it.
    pub(super) fn rest(&self, pause: Pause, limit: Duration) {
        match pause {
            Pause::Spin => hint::spin_loop(),
            Pause::Yield => sched_yield(),
            Pause::Sleep(sleep) => self.sleep(limit.min(sleep.limit), sleep.nap),
        }
    }

    /// Sleeps until a link or the connector has something, at most `limit`; at most `nap` where not all can be slept on.
    fn sleep<'a>(&'a self, limit: Duration, nap: Duration) {
        let mut descriptors = Vec::with_capacity(self.channels.len() + 1);
        let mut all = true;
        let mut add = |descriptor: Option<BorrowedFd<'a>>, events| match descriptor {
            Some(descriptor) => descriptors.push(PollFd::from_borrowed_fd(descriptor, events)),
            None => all = false,
        };
        add(self.connector.descriptor(), PollFlags::IN);
        for channel in self.channels.iter().flatten().filter(|channel| channel.end().is_none()) {
            let write = if channel.outgoing.is_stuck() { PollFlags::OUT } else { PollFlags::empty() };
            add(channel.link.descriptor(), PollFlags::IN | write);
        }
        let limit = if all { limit } else { limit.min(nap) };
        let mut sleep = |limit| if cfg!(miri) { Err(rustix::io::Errno::NOSYS) } else { poll(&mut descriptors, Some(&limit)) };
        let result = Timespec::try_from(limit).map(&mut sleep);
        if !matches!(result, Ok(Ok(_) | Err(rustix::io::Errno::INTR))) {
            // No descriptor to sleep on, for whatever reason: the clock remains.
            thread::sleep(limit.min(nap));
        }
    }
}
