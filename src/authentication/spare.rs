//! A descriptor that a listener keeps for telling who comes that there is no other.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

/// The descriptor, unless it is in use.
#[derive(Debug)]
pub(crate) struct Spare(Option<OwnedFd>);

impl Spare {
    /// One more descriptor of this process.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Some(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Gives the descriptor up for who has come, to be told why and dropped; `None` where nobody has, or another thread was faster.
    pub(crate) fn accept<S>(&mut self, accept: impl FnOnce() -> io::Result<S>) -> Option<S> {
        // The last one's is free by now.
        self.0 = self.0.take().or_else(|| eventfd(0, EventfdFlags::CLOEXEC).ok());
        drop(self.0.take()?);
        accept().ok()
    }
}
