//! A descriptor that a listener reserves, to refuse a connection with a reason when no other descriptor is left.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

/// The descriptor, unless it is in use.
#[derive(Debug)]
pub(crate) struct Spare(Option<OwnedFd>);

impl Spare {
    /// Reserves one descriptor of this process.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Some(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Frees the descriptor and accepts a connection with it, to be refused and dropped. Returns `None` if none is
    /// pending or another thread took the descriptor.
    pub(crate) fn accept<S>(&mut self, accept: impl FnOnce() -> io::Result<S>) -> Option<S> {
        // The descriptor of the previous connection is free by now.
        self.0 = self.0.take().or_else(|| eventfd(0, EventfdFlags::CLOEXEC).ok());
        drop(self.0.take()?);
        accept().ok()
    }
}
