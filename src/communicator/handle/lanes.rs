//! The lanes of a communicator, by number.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::base::event;
use crate::base::ticket_lock::TicketLock;
use crate::error::Result;

/// A lane, once it was made or has failed. The lock lets one thread make it, and refuses a thread that asks for it from
/// a callback meanwhile.
type Lane<C> = Arc<TicketLock<Option<Result<C>>>>;

/// The lanes that were asked for.
pub(in crate::communicator) struct Lanes<C>(Mutex<BTreeMap<u32, Lane<C>>>);

impl<C> Default for Lanes<C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<C> fmt::Debug for Lanes<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(event::lock(&self.0).keys()).finish()
    }
}

impl<C> Lanes<C> {
    /// Returns the lane with this number, which may not have been made yet.
    pub(in crate::communicator) fn get(&self, number: u32) -> Lane<C> {
        Arc::clone(event::lock(&self.0).entry(number).or_insert_with(|| Arc::new(TicketLock::new(None))))
    }

    /// Drops the handles of all lanes.
    pub(in crate::communicator) fn clear(&self) {
        // Dropped outside the lock: the drop of a communicator may run the program's code.
        let _lanes = std::mem::take(&mut *event::lock(&self.0));
    }
}
