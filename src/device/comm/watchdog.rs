//! The threads that notice calls that do not end, and abort their communicators.
//!
//! For each device of the process, a *prober* queries the driver and NCCL. A prober may get stuck in the driver: a call
//! of another thread (free, module or synchronisation) can hold the driver's locks while a kernel waits for other
//! ranks. One *timekeeper* queries neither the driver nor NCCL. It relies on the values that the probers have published
//! and that calls record themselves. So deadlines take effect even if the driver does not answer.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use super::state::Inner;
use crate::base::tuning::device::ROUNDS;
use crate::device::driver;

/// The task of a watchdog thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Timekeeper,
    /// The prober of the device with this number.
    Prober(usize),
}

#[derive(Debug)]
struct Watch {
    communicators: Vec<Weak<Inner>>,
    /// Communicators to be aborted, for which no thread could be started.
    aborts: Vec<Arc<Inner>>,
    /// The tasks of the running threads.
    roles: Vec<Role>,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { communicators: Vec::new(), aborts: Vec::new(), roles: Vec::new() });
/// Signals that a communicator was added: the next round may be due earlier.
static CAME: Condvar = Condvar::new();

/// Watches a communicator until it ends. The threads run as long as there is a communicator for them.
pub(super) fn watch(communicator: &Arc<Inner>) -> io::Result<()> {
    let mut watch = lock();
    for role in [Role::Timekeeper, Role::Prober(communicator.device.number)] {
        if !watch.roles.contains(&role) {
            thread::Builder::new().name(role.name().to_owned()).spawn(move || role.run())?;
            watch.roles.push(role);
        }
    }
    watch.communicators.push(Arc::downgrade(communicator));
    drop(watch);
    CAME.notify_all();
    Ok(())
}

/// Makes the timekeeper start an abort in its next rounds; returns `false` if there is no timekeeper.
pub(super) fn abort_later(communicator: &Arc<Inner>) -> bool {
    let mut watch = lock();
    let there = watch.roles.contains(&Role::Timekeeper);
    if there {
        watch.aborts.push(Arc::clone(communicator));
    }
    there
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Timekeeper => "collectives-timekeeper",
            Self::Prober(_) => "collectives-prober",
        }
    }

    /// Runs rounds until there is no communicator to look after.
    fn run(self) {
        if self != Self::Timekeeper {
            driver::ignore_captures();
        }
        let mut watch = lock();
        loop {
            let (living, others) = self.upgraded(&mut watch);
            let aborts = if self == Self::Timekeeper { std::mem::take(&mut watch.aborts) } else { Vec::new() };
            let is_over = living.is_empty() && aborts.is_empty();
            if is_over {
                watch.roles.retain(|role| *role != self);
            }
            drop(watch);
            aborts.iter().for_each(Inner::start_abort);
            others.into_iter().chain(aborts).for_each(let_go);
            if is_over {
                return;
            }
            let rest = self.round(living);
            let waited = CAME.wait_timeout(lock(), rest.clamp(ROUNDS.0, ROUNDS.1));
            watch = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Checks each communicator once. Returns how long to rest afterwards.
    fn round(self, communicators: Vec<Arc<Inner>>) -> Duration {
        let mut rest = ROUNDS.1;
        for communicator in communicators {
            match self {
                Self::Timekeeper => communicator.keep_time(Instant::now()),
                Self::Prober(_) => communicator.probe(Instant::now()),
            }
            rest = rest.min(communicator.limit() / 10);
            let_go(communicator);
        }
        rest
    }

    /// Returns the communicators to look after, and others that must not be dropped under the lock. Ended ones are
    /// forgotten.
    fn upgraded(self, watch: &mut Watch) -> (Vec<Arc<Inner>>, Vec<Arc<Inner>>) {
        let is_mine = |inner: &Arc<Inner>| matches!(self, Self::Timekeeper) || self == Self::Prober(inner.device.number);
        let known: Vec<_> = watch.communicators.iter().filter_map(Weak::upgrade).collect();
        watch.communicators = known.iter().filter(|inner| !inner.is_ended()).map(Arc::downgrade).collect();
        known.into_iter().partition(|inner| is_mine(inner) && !inner.is_ended())
    }
}

/// Drops a reference. If it is the last one, another thread drops it: streams, events and the context go with it, and
/// the driver may delay that.
fn let_go(communicator: Arc<Inner>) {
    if let Some(inner) = Arc::into_inner(communicator) {
        let inner = ManuallyDrop::new(inner);
        let drop_it = move || drop(ManuallyDrop::into_inner(inner));
        // If no thread can be started, the communicator is leaked: all deadlines would have to wait for a drop here.
        if let Err(error) = thread::Builder::new().name("collectives-drop".to_owned()).spawn(drop_it) {
            crate::base::event::error!(%error, "no thread could be started to drop the rest of a communicator: its streams are leaked");
        }
    }
}

/// Returns the number of timekeepers, and the number of probers of a device.
#[cfg(all(test, simgpu))]
pub(super) fn threads(device: usize) -> (usize, usize) {
    let watch = lock();
    let count = |role: Role| watch.roles.iter().filter(|known| **known == role).count();
    (count(Role::Timekeeper), count(Role::Prober(device)))
}

fn lock() -> MutexGuard<'static, Watch> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}
