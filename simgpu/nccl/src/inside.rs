//! Tracks the threads inside the library: NCCL allows one at a time per communicator, and per device. From 2.26 on it
//! reports the latter as "host threads racing to launch", if it notices. A launch that runs in the background counts
//! like a call.

use crate::comm::Comm;
use crate::control;
use crate::report::{lock, report};
use std::collections::HashMap;
use std::sync::Mutex;
use std::thread::ThreadId;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Communicator(usize),
    Device(i32),
}

struct Visit {
    thread: ThreadId,
    name: &'static str,
    /// Calls of one thread may be nested.
    depth: usize,
}

static VISITS: Mutex<Option<HashMap<Place, Visit>>> = Mutex::new(None);

/// A guard that marks a thread as inside until it is dropped.
pub(crate) struct Inside(Vec<Place>);

impl Inside {
    /// Enters for a call that only queries a communicator.
    pub(crate) fn asking(comm: &Comm, name: &'static str) -> Inside {
        Inside::enter(&[Place::Communicator(comm.handle)], name)
    }

    /// Enters for a call that makes a communicator or its device do something.
    pub(crate) fn acting(comm: &Comm, name: &'static str) -> Inside {
        Inside::enter(&[Place::Communicator(comm.handle), Place::Device(comm.device.ordinal)], name)
    }

    /// Enters for a launch on any communicator: NCCL reports two at a time on one device as racing host threads.
    pub(crate) fn launching(comm: &Comm, name: &'static str) -> Inside {
        Inside::enter(&[Place::Device(comm.device.ordinal)], name)
    }

    fn enter(places: &[Place], name: &'static str) -> Inside {
        let thread = std::thread::current().id();
        let mut guard = lock(&VISITS);
        let visits = guard.get_or_insert_default();
        let entered = places.iter().filter(|&&place| {
            let visit = visits.entry(place).or_insert(Visit { thread, name, depth: 0 });
            if visit.thread != thread {
                report(format!("two threads inside NCCL on {}: {} and {name}", describe(place), visit.name));
                return false;
            }
            visit.depth += 1;
            true
        });
        let inside = Inside(entered.copied().collect());
        let outermost = places.iter().all(|place| visits[place].depth == 1);
        drop(guard);
        // A test may want calls to overlap.
        if outermost {
            std::thread::sleep(control::linger());
        }
        inside
    }

    /// Records an abort while another thread is inside the same communicator.
    pub(crate) fn aborting(comm: &Comm) {
        let visits = lock(&VISITS);
        let visit = visits.as_ref().and_then(|visits| visits.get(&Place::Communicator(comm.handle)));
        if let Some(visit) = visit
            && visit.thread != std::thread::current().id()
        {
            report(format!("ncclCommAbort while another thread is inside {} on the same communicator", visit.name));
        }
    }
}

fn describe(place: Place) -> String {
    match place {
        Place::Communicator(_) => "one communicator".to_owned(),
        Place::Device(device) => format!("device {device}"),
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut visits = lock(&VISITS);
        let visits = visits.get_or_insert_default();
        for place in &self.0 {
            if let Some(visit) = visits.get_mut(place) {
                visit.depth -= 1;
                if visit.depth == 0 {
                    visits.remove(place);
                }
            }
        }
    }
}
