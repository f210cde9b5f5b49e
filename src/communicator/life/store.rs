//! The job's store, for the program's own keys.

use std::sync::Arc;

use crate::base::event;
use crate::communicator::Communicator;
use crate::communicator::handle::kept_store::KeptStore;
use crate::error::{Error, Result};
use crate::host::health::forked;
use crate::rendezvous::PrefixStore;

impl Communicator {
    /// Returns a handle to the store at which the job's ranks met, for the program's own keys. All ranks of this
    /// communicator see the same keys, but no other communicator sees them. They are separate from the crate's own
    /// keys. Needs [`Config::keep_store`](crate::Config::keep_store).
    ///
    /// If the store is served over TCP, each handle has its own connection, so threads that wait for each other's keys
    /// should each take their own handle. If the store is in a file, or was passed to the builder, all handles share
    /// it. Communicators made from this one (by splits, subgroups, duplicates and shrinks) have their own keys in the
    /// same store. A handle can outlive its communicator.
    ///
    /// The store lives as long as its server. If rank 0 of the job serves the store, it does so until it has closed or
    /// dropped all its communicators of the job. After that, calls on the other ranks' handles do not wait, but return
    /// errors that report the end of the server. A launcher's store ends with the launcher.
    ///
    /// ```
    /// # use collectives::{Communicator, Config, store::Store};
    /// # use std::time::Duration;
    /// let mut config = Config::default();
    /// config.keep_store = true;
    /// let got = Communicator::builder().config(config).run_local(2, |comm| {
    ///     let store = comm.store()?;
    ///     if comm.rank() == 0 {
    ///         store.set("checkpoint", b"epoch 7")?;
    ///     }
    ///     store.get("checkpoint", Duration::from_secs(10))
    /// })?;
    /// assert_eq!(got[1], b"epoch 7");
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - `Unsupported` if the communicator was made without `Config::keep_store`.
    /// - `Closed` once the communicator is closed.
    /// - `Io` if the server no longer answers.
    /// - `Unauthorized` if this rank and the server of the store differ in their secrets, or in whether they encrypt.
    ///
    /// If an error has ended the communicator, `store` still returns handles.
    #[doc(alias("get_default_store", "_get_default_store"))]
    pub fn store(&self) -> Result<PrefixStore> {
        let shared = &self.core.shared;
        if shared.health.is_foreign() {
            return Err(forked("store".to_owned()));
        }
        let Some(kept) = self.kept_store() else {
            if shared.health.is_closed() {
                return Err(Error::Closed { call: "store".to_owned() });
            }
            let reason = "this communicator was made without Config::keep_store; set it on every rank";
            return Err(Error::unsupported("store", reason));
        };
        let id: String = shared.id.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(PrefixStore::new(format!("program/{id}"), kept.open(self.timeout())?))
    }

    /// Returns the store, while this communicator keeps it.
    pub(in crate::communicator) fn kept_store(&self) -> Option<Arc<KeptStore>> {
        event::lock(&self.core.shared.store).clone()
    }

    /// Keeps a store for as long as this communicator lives.
    pub(in crate::communicator) fn keep_store(&self, store: Option<Arc<KeptStore>>) {
        let before = std::mem::replace(&mut *event::lock(&self.core.shared.store), store);
        // Without the lock: the store may be the program's code.
        drop(before);
    }
}
