//! The store at which the ranks of a job met, kept for the program's own keys if `Config::keep_store` is set.
//!
//! If a server provides the store, a rank keeps only the server's address, and no connection. Each handle has its own
//! connection, so that one thread may wait for a key that another thread sets. Rank 0 keeps its server as long as one
//! of its communicators of the job lives.

use std::sync::Arc;
use std::time::Duration;

use crate::base::event;
use crate::error::{Error, Result};
use crate::rendezvous::{Store, StoreAddress, TcpStoreServer};

/// The way to reach the store.
pub(in crate::communicator) enum Reach {
    /// Each handle opens its own connection.
    Address(StoreAddress),
    /// All handles share this store.
    Shared(Arc<dyn Store>),
}

/// A store that all communicators of a job share.
pub(in crate::communicator) struct KeptStore {
    /// `Some` until the drop.
    reach: Option<Reach>,
    server: Option<TcpStoreServer>,
}

impl KeptStore {
    pub(in crate::communicator) fn new(reach: Reach, server: Option<TcpStoreServer>) -> Self {
        Self { reach: Some(reach), server }
    }

    /// Returns the store, for one handle.
    pub(in crate::communicator) fn open(&self, timeout: Duration) -> Result<Arc<dyn Store>> {
        match &self.reach {
            Some(Reach::Address(address)) => address.open(timeout),
            Some(Reach::Shared(store)) => Ok(Arc::clone(store)),
            None => Err(Error::argument("store", "the store has been dropped")),
        }
    }
}

impl Drop for KeptStore {
    fn drop(&mut self) {
        // Waits for no rank: handles of other ranks may stay open for any length of time.
        if let Some(server) = self.server.take() {
            server.end_within(Duration::ZERO);
        }
        // The store, and so its drop, may be the program's code.
        let reach = self.reach.take();
        event::tell("the destructor of a store", move || drop(reach));
    }
}
