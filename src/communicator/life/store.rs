//! The job's store, for the program's own keys.

use std::sync::Arc;

use crate::base::event;
use crate::communicator::Communicator;
use crate::communicator::handle::kept_store::KeptStore;
use crate::error::{Error, Result};
use crate::host::health::forked;
use crate::rendezvous::PrefixStore;

impl Communicator {
    /// A handle on the store at which the job's ranks met, for keys of the program's own: all ranks of this communicator see the same ones, no
    /// other communicator does, and none of the crate's own is among them. Needs [`Config::keep_store`](crate::Config::keep_store).
    ///
    /// Where the store is served over TCP each handle is a connection of its own, so threads that wait for each other's keys take one each. On
    /// a store in a file, or one that was handed to the builder, handles share what is there. Communicators made of this one (by splits,
    /// subgroups, duplicates and shrinks) have keys of their own in the same store. A handle may outlive its communicator.
    ///
    /// The store lives as long as whoever serves it: rank 0 of the job, until it has closed or dropped its communicators of the job; then
    /// handles of other ranks get errors that say so, and nobody waits. A launcher's store ends with the launcher.
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
    /// `Unsupported` where the communicator was made without `Config::keep_store`, `Closed` once it is closed, `Io` where the server does not
    /// answer any more, `Unauthorized` as at the start. A communicator that an error has ended still gives handles.
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

    /// The store, while this communicator keeps it.
    pub(in crate::communicator) fn kept_store(&self) -> Option<Arc<KeptStore>> {
        event::lock(&self.core.shared.store).clone()
    }

    /// Keeps a store, for as long as this communicator lives.
    pub(in crate::communicator) fn keep_store(&self, store: Option<Arc<KeptStore>>) {
        let before = std::mem::replace(&mut *event::lock(&self.core.shared.store), store);
        // Without the lock: a store may be the program's.
        drop(before);
    }
}
