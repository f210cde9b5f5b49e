//! The recorders of this process's communicators.

use std::sync::{Arc, Mutex, Weak};

use super::Flight;
use crate::base::event;

static LIVING: Mutex<Vec<Weak<Flight>>> = Mutex::new(Vec::new());

/// Registers a recorder, so that it is read together with the others.
pub(crate) fn enlist(flight: &Arc<Flight>) {
    let mut living = event::lock(&LIVING);
    living.retain(|flight| flight.strong_count() > 0);
    living.push(Arc::downgrade(flight));
}

/// Returns all recorders. The caller may hold the last reference, and dropping an error in a record may run the
/// program's code.
pub(crate) fn living() -> Vec<Arc<Flight>> {
    let living: Vec<_> = event::lock(&LIVING).iter().filter_map(Weak::upgrade).collect();
    living.into_iter().filter(|flight| !flight.is_foreign()).collect()
}
