//! A communicator: one rank's state, its life and its errors. As of 2.28.9 there are two sorts of errors. The error of
//! a group is remembered only by a communicator that does not block. The error of its connections is permanent.

use crate::abi::{Code, Config, Handle, Kind};
use crate::clique::{Departure, Notify};
use crate::connection::Direction;
use crate::driver::{Device, Event};
use crate::fault::{Fault, Outcome};
use crate::flags::Flags;
use crate::link::Link;
use crate::progress::Progress;
use crate::report::{lock, report, warn};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};

/// A communicator's place among its peers.
pub(crate) struct Member {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) link: Link,
}

pub(crate) struct Comm {
    pub(crate) handle: usize,
    pub(crate) device: Device,
    pub(crate) config: Config,
    /// The abort flags: its own, or shared with its parent.
    pub(crate) flags: Arc<Flags>,
    /// Set when the rank has taken its place.
    member: OnceLock<Member>,
    state: Mutex<State>,
    changed: Condvar,
    /// The background group that it is part of.
    progress: Mutex<Option<Arc<Progress>>>,
    pub(crate) resources: Mutex<Resources>,
}

#[derive(Default)]
struct State {
    /// The error of a call or a group. Revoking clears it.
    error: Option<Fault>,
    /// The error of the connections to the peers. It is never cleared.
    broken: Option<Fault>,
    finalized: bool,
    revoked: bool,
    /// Its operations were aborted in order to shrink it: the ranks' next calls would have no common order.
    interrupted: bool,
    suspended: bool,
    /// Making it failed: it can only be finalized, destroyed and aborted.
    never_made: bool,
    /// The abort flags are raised: kernels end, and calls that wait for peers fail.
    halted: bool,
    /// Aborted or destroyed: the handle is dead.
    stopped: bool,
    /// Launches that a stream has not begun, without those of graphs.
    queued: usize,
    running: usize,
    /// Captured launches that live graphs hold.
    held: usize,
    /// Places taken for communicators that are being made from this one.
    unborn: Vec<Link>,
    /// The flags of the child that is being made, if it has its own.
    child_flags: Option<Arc<Flags>>,
}

/// The resources that a communicator owns and its user has to give back.
#[derive(Default)]
pub(crate) struct Resources {
    /// The number of children made so far (splits, shrinks and so on): the n-th child is the same on each rank.
    pub(crate) children: usize,
    /// The number of windows so far, numbered in the same way.
    pub(crate) registered: usize,
    pub(crate) scalars: BTreeMap<i32, Scalar>,
    pub(crate) registrations: BTreeMap<usize, (usize, usize)>,
    pub(crate) windows: BTreeMap<usize, (usize, usize)>,
    /// The stream of the last launch and an event recorded after it.
    pub(crate) order: Option<(usize, Event)>,
    /// Whether the connections that collectives use exist.
    pub(crate) connected: bool,
    /// The connected directions that messages use.
    pub(crate) directions: HashSet<Direction>,
    /// Whether an id made for growing is still unused.
    pub(crate) growing: bool,
}

/// A scalar of `ncclRedOpCreatePreMulSum`.
#[derive(Clone, Copy)]
pub(crate) struct Scalar {
    pub(crate) kind: Kind,
    /// The value, or the address where it will be when the collective runs.
    pub(crate) value: Result<u64, usize>,
}

mod ending;

static LIVE: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());
static DEAD: Mutex<BTreeMap<usize, &'static str>> = Mutex::new(BTreeMap::new());

/// Returns the live communicators of this process.
pub(crate) fn live() -> Vec<Arc<Comm>> {
    lock(&LIVE).values().cloned().collect()
}

/// Returns the communicator of a handle.
pub(crate) fn find(handle: Handle, name: &str) -> Outcome<Arc<Comm>> {
    if handle.is_null() {
        return Err(Fault::argument(format!("{name} : comm argument is NULL")));
    }
    if let Some(comm) = lock(&LIVE).get(&(handle as usize)) {
        return Ok(comm.clone());
    }
    let end = lock(&DEAD).get(&(handle as usize)).copied();
    report(format!("{name} called with a communicator that {}", end.unwrap_or("never was")));
    Err(Fault::argument(format!("{name} : Error: corrupted comm object detected")))
}

impl Comm {
    /// Makes a communicator that has no place yet.
    pub(crate) fn new(device: Device, config: Config) -> Arc<Comm> {
        Comm::with_flags(device, config, Arc::default())
    }

    /// Makes a communicator from this one. It shares the abort flags of this one, or has its own, which this one may
    /// raise while the child is being made.
    pub(crate) fn child(&self, config: Config, shares: bool) -> Arc<Comm> {
        let flags = if shares { self.flags.clone() } else { Arc::default() };
        lock(&self.state).child_flags = (!shares).then(|| flags.clone());
        Comm::with_flags(self.device, config, flags)
    }

    fn with_flags(device: Device, config: Config, flags: Arc<Flags>) -> Arc<Comm> {
        static ISSUED: Mutex<usize> = Mutex::new(0);
        let mut issued = lock(&ISSUED);
        *issued += 1;
        // An offset far from any address, so that a user who follows the pointer crashes at once.
        let handle = 0x10_0000_0000_0000 + *issued * 16;
        let state = Mutex::default();
        let (member, changed, progress, resources) = (OnceLock::new(), Condvar::new(), Mutex::default(), Mutex::default());
        let comm = Arc::new(Comm { handle, device, config, flags, member, state, changed, progress, resources });
        comm.flags.hold(&comm);
        comm
    }

    /// Makes its handle valid.
    pub(crate) fn publish(self: &Arc<Self>) -> Handle {
        lock(&LIVE).insert(self.handle, self.clone());
        self.handle as Handle
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.config.blocking != 0
    }

    /// Returns the function to call when the clique breaks.
    pub(crate) fn listener(self: &Arc<Self>) -> Notify {
        let comm: Weak<Comm> = Arc::downgrade(self);
        Box::new(move |fault| {
            if let Some(comm) = comm.upgrade() {
                comm.break_off(fault);
            }
        })
    }

    /// Takes its place. Fails if it was aborted in the meantime.
    pub(crate) fn settle(&self, rank: usize, size: usize, link: Link) -> Outcome<()> {
        let over = {
            let state = lock(&self.state);
            let _ = self.member.set(Member { rank, size, link: link.clone() });
            state.stopped || state.halted
        };
        if over {
            link.leave(Departure::Aborted);
            return Err(Fault::new(Code::INTERNAL_ERROR, "the communicator was aborted while it was made"));
        }
        Ok(())
    }

    /// Returns its place, once it has one.
    pub(crate) fn member(&self) -> Outcome<&Member> {
        self.member.get().ok_or_else(|| Fault::argument("Attempt to use communicator before the previous operation returned ncclSuccess"))
    }

    /// Remembers a place taken for a child, so that an abort gives it up.
    pub(crate) fn expect_child(&self, link: &Link) -> Outcome<()> {
        let mut state = lock(&self.state);
        if !state.stopped {
            state.unborn.push(link.clone());
            return Ok(());
        }
        drop(state);
        link.leave(Departure::Aborted);
        Err(Fault::new(Code::INTERNAL_ERROR, "the communicator was aborted while another was made from it"))
    }

    /// Forgets a child that is complete: from now on it manages itself.
    pub(crate) fn child_born(&self, link: &Link) {
        let mut state = lock(&self.state);
        state.unborn.retain(|other| other.place != link.place);
        state.child_flags = None;
    }

    /// Sets the asynchronous error, the first time.
    pub(crate) fn fail(&self, fault: &Fault) {
        let mut state = lock(&self.state);
        if !state.stopped && !state.halted && state.error.is_none() {
            warn(&fault.text);
            state.error = Some(fault.clone());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Fails a communicator that does not block. As with NCCL, a failed call does not affect a blocking one.
    pub(crate) fn fail_unless_blocking(&self, fault: &Fault) {
        if !self.is_blocking() {
            self.fail(fault);
        }
    }

    /// Records that the peers cannot be reached any more.
    fn break_off(&self, fault: &Fault) {
        let mut state = lock(&self.state);
        if !state.stopped && !state.halted && state.broken.is_none() {
            warn(&fault.text);
            state.broken = Some(fault.clone());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the result of `ncclCommGetAsyncError`. The poll that sees a group's success joins its thread; after a
    /// failure the abort does that.
    pub(crate) fn poll(&self, counts: bool) -> Code {
        if let Some(error) = self.error() {
            return error.code;
        }
        let mut progress = lock(&self.progress);
        let Some(group) = progress.clone() else { return Code::SUCCESS };
        match group.poll(counts) {
            None => Code::IN_PROGRESS,
            Some(Ok(())) => {
                *progress = None;
                group.join();
                Code::SUCCESS
            }
            Some(Err(fault)) => {
                drop(progress);
                self.fail(&fault);
                fault.code
            }
        }
    }

    fn error(&self) -> Option<Fault> {
        let state = lock(&self.state);
        state.error.clone().or_else(|| state.broken.clone())
    }

    /// Whether one of its groups runs in the background, or has ended and no poll has seen it.
    pub(crate) fn is_in_background(&self) -> bool {
        lock(&self.progress).is_some()
    }

    /// Makes it in progress until a group ends.
    pub(crate) fn follow(&self, group: &Arc<Progress>) {
        *lock(&self.progress) = Some(group.clone());
    }

    /// Checks that the communicator is ready, at the beginning of almost every call.
    pub(crate) fn ensure_ready(&self) -> Outcome<()> {
        if lock(&self.state).suspended {
            return Err(Fault::usage("the communicator is suspended"));
        }
        // As with NCCL, a call under raised flags goes ahead, and its kernels end at once.
        if lock(&self.state).halted {
            return Ok(());
        }
        match self.poll(false) {
            Code::SUCCESS => Ok(()),
            Code::IN_PROGRESS => Err(Fault::argument("Attempt to use communicator before the previous operation returned ncclSuccess")),
            code => Err(self.error().unwrap_or_else(|| Fault::new(code, ""))),
        }
    }

    /// Checks that collectives may still be called.
    pub(crate) fn check_open(&self, name: &str) -> Outcome<()> {
        let state = lock(&self.state);
        if state.revoked {
            return Err(Fault::usage(format!("{name}: communicator was revoked")));
        }
        let over = match *state {
            State { finalized: true, .. } => "finalized",
            State { interrupted: true, .. } => "shrunk with NCCL_SHRINK_ABORT",
            State { never_made: true, error: None, .. } => "never made",
            _ => "",
        };
        if !over.is_empty() {
            drop(state);
            report(format!("{name} on a communicator that was {over}"));
            return Err(Fault::usage(format!("{name}: communicator was {over}")));
        }
        Ok(())
    }

    /// Records that making it has failed.
    pub(crate) fn never_made(&self) {
        lock(&self.state).never_made = true;
    }

    /// Marks the communicator as finalized, once.
    pub(crate) fn begin_finalize(&self) -> Outcome<()> {
        let mut state = lock(&self.state);
        if state.finalized || state.revoked {
            return Err(Fault::argument("ncclCommFinalize : the communicator was finalized or revoked before"));
        }
        state.finalized = true;
        Ok(())
    }

    pub(crate) fn set_suspended(&self, suspended: bool) -> Outcome<()> {
        let mut state = lock(&self.state);
        if state.suspended == suspended {
            return Err(Fault::usage(if suspended {
                "the communicator is suspended already"
            } else {
                "the communicator is not suspended"
            }));
        }
        state.suspended = suspended;
        Ok(())
    }

    pub(crate) fn enqueued(&self) {
        lock(&self.state).queued += 1;
    }

    /// Records that the stream refused a launch.
    pub(crate) fn withdrawn(&self) {
        lock(&self.state).queued -= 1;
        self.changed.notify_all();
    }

    /// Records that a graph has captured a launch.
    pub(crate) fn hold(&self) {
        lock(&self.state).held += 1;
    }

    /// Records that this graph, with everything made from it, is destroyed.
    pub(crate) fn release(&self) {
        lock(&self.state).held -= 1;
        self.changed.notify_all();
    }

    /// Records that a stream begins a launch, which first waits if a fault was planted. Returns whether it may go on.
    pub(crate) fn begin(&self, captured: bool, hangs: bool) -> bool {
        let mut state = lock(&self.state);
        while hangs && !state.stopped && !state.revoked && !state.halted {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let goes_on = !state.stopped && !state.revoked && !state.halted;
        state.running += usize::from(goes_on);
        if !goes_on {
            state.queued -= usize::from(!captured);
        }
        drop(state);
        self.changed.notify_all();
        goes_on
    }

    /// Records that a stream has finished a launch.
    pub(crate) fn end(&self, captured: bool) {
        let mut state = lock(&self.state);
        state.running -= 1;
        state.queued -= usize::from(!captured);
        drop(state);
        self.changed.notify_all();
    }
}

/// Counts the live objects of each sort, for tests that look for leaks.
pub(crate) fn census() -> HashMap<&'static str, usize> {
    let live = live();
    let count = |of: fn(&Resources) -> usize| live.iter().map(|comm| of(&lock(&comm.resources))).sum();
    HashMap::from([
        ("communicators", live.len()),
        ("registrations", count(|resources| resources.registrations.len())),
        ("windows", count(|resources| resources.windows.len())),
        ("captured", live.iter().map(|comm| lock(&comm.state).held).sum()),
        ("operations", count(|resources| resources.scalars.len())),
    ])
}
