//! The store at which the ranks of a job met, kept for the program's own keys where that was asked for (`Config::keep_store`).
//!
//! A rank keeps no connection to a store that is served, only its address. A handle is a connection of its own, so that one thread may wait for
//! a key that another one sets. Rank 0 keeps its server, as long as one of its communicators lives that came of the job.

use std::sync::Arc;
use std::time::Duration;

use crate::base::event;
use crate::error::{Error, Result};
use crate::rendezvous::{Store, StoreAddress, TcpStoreServer};

/// How the store is reached.
pub(in crate::communicator) enum Reach {
    /// One more connection for each handle.
    Address(StoreAddress),
    /// All handles share it.
    Shared(Arc<dyn Store>),
}

/// A store that all communicators of a job share.
pub(in crate::communicator) struct KeptStore {
    /// There until the drop.
    reach: Option<Reach>,
    server: Option<TcpStoreServer>,
}

impl KeptStore {
    pub(in crate::communicator) fn new(reach: Reach, server: Option<TcpStoreServer>) -> Self {
        Self { reach: Some(reach), server }
    }

    /// The store, for one handle.
    pub(in crate::communicator) fn open(&self, timeout: Duration) -> Result<Arc<dyn Store>> {
        match &self.reach {
            Some(Reach::Address(address)) => address.open(timeout),
            Some(Reach::Shared(store)) => Ok(Arc::clone(store)),
            None => Err(Error::argument("store", "the store is gone")),
        }
    }
}

impl Drop for KeptStore {
    fn drop(&mut self) {
        // Nobody is waited for: handles of other ranks may stay open for as long as they like.
        if let Some(server) = self.server.take() {
            server.end_within(Duration::ZERO);
        }
        // A store may be the program's, and so its drop.
        let reach = self.reach.take();
        event::tell("the drop of a store", move || drop(reach));
    }
}
