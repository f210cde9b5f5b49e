//! The recorders of this process's communicators.

use std::sync::{Arc, Mutex, Weak};

use super::Flight;
use crate::base::event;

static LIVING: Mutex<Vec<Weak<Flight>>> = Mutex::new(Vec::new());

/// Adds a recorder to those that others may read.
pub(crate) fn enlist(flight: &Arc<Flight>) {
    let mut living = event::lock(&LIVING);
    living.retain(|flight| flight.strong_count() > 0);
    living.push(Arc::downgrade(flight));
}

/// All of them. Whoever drops them may be the last to hold one, and an error on record may run the program's code when it is dropped.
pub(super) fn living() -> Vec<Arc<Flight>> {
    let living: Vec<_> = event::lock(&LIVING).iter().filter_map(Weak::upgrade).collect();
    living.into_iter().filter(|flight| !flight.is_foreign()).collect()
}
