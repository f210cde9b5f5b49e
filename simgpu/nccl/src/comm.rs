//! A communicator: one rank's state, its life and its errors. As of 2.28.9 there are two sorts of errors: what a group of it ended with, which
//! only one that does not block remembers, and what became of its connections, which nothing takes back.

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

/// Who a communicator is among its peers.
pub(crate) struct Member {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) link: Link,
}

pub(crate) struct Comm {
    pub(crate) handle: usize,
    pub(crate) device: Device,
    pub(crate) config: Config,
    /// Its own, or shared with its parent.
    pub(crate) flags: Arc<Flags>,
    /// Known as soon as the rank has taken its place.
    member: OnceLock<Member>,
    state: Mutex<State>,
    changed: Condvar,
    /// The group that it is part of in the background.
    progress: Mutex<Option<Arc<Progress>>>,
    pub(crate) resources: Mutex<Resources>,
}

#[derive(Default)]
struct State {
    /// What a call or a group failed with. Revoking clears it.
    error: Option<Fault>,
    /// What became of the connections to the peers. Nothing clears it.
    broken: Option<Fault>,
    finalized: bool,
    revoked: bool,
    /// Its operations were aborted in order to shrink it: what the ranks would do next has no order.
    interrupted: bool,
    suspended: bool,
    /// Making it failed: it can be finalized, destroyed and aborted.
    never_made: bool,
    /// The abort flags are raised: kernels end, and calls that wait for peers fail.
    halted: bool,
    /// Aborted or destroyed: the handle is dead.
    stopped: bool,
    /// Launches that a stream has not begun, those of graphs apart.
    queued: usize,
    running: usize,
    /// Captured launches that live graphs hold.
    held: usize,
    /// Places taken for communicators that are being made from this one.
    unborn: Vec<Link>,
    /// The flags of the child that is being made, where it has its own.
    child_flags: Option<Arc<Flags>>,
}

/// What a communicator owns that its user has to give back.
#[derive(Default)]
pub(crate) struct Resources {
    /// Splits, shrinks and the like so far: the n-th one of each rank is the same.
    pub(crate) children: usize,
    /// Windows so far, with the same rule.
    pub(crate) registered: usize,
    pub(crate) scalars: BTreeMap<i32, Scalar>,
    pub(crate) registrations: BTreeMap<usize, (usize, usize)>,
    pub(crate) windows: BTreeMap<usize, (usize, usize)>,
    /// The stream of the last launch and an event behind it.
    pub(crate) order: Option<(usize, Event)>,
    /// The connections that collectives use are there.
    pub(crate) connected: bool,
    /// Those that messages use.
    pub(crate) directions: HashSet<Direction>,
    /// An id made for growing that no one has used yet.
    pub(crate) growing: bool,
}

/// A scalar of `ncclRedOpCreatePreMulSum`.
#[derive(Clone, Copy)]
pub(crate) struct Scalar {
    pub(crate) kind: Kind,
    /// The value, or where it will be when the collective runs.
    pub(crate) value: Result<u64, usize>,
}

mod ending;

static LIVE: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());
static DEAD: Mutex<BTreeMap<usize, &'static str>> = Mutex::new(BTreeMap::new());

/// The live communicators of this process.
pub(crate) fn live() -> Vec<Arc<Comm>> {
    lock(&LIVE).values().cloned().collect()
}

/// The communicator of a handle.
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
    /// A communicator that has no place yet.
    pub(crate) fn new(device: Device, config: Config) -> Arc<Comm> {
        Comm::with_flags(device, config, Arc::default())
    }

    /// A communicator that is made from this one, and shares its abort flags or has its own, which are this one's to raise while it is
    /// being made.
    pub(crate) fn child(&self, config: Config, shares: bool) -> Arc<Comm> {
        let flags = if shares { self.flags.clone() } else { Arc::default() };
        lock(&self.state).child_flags = (!shares).then(|| flags.clone());
        Comm::with_flags(self.device, config, flags)
    }

    fn with_flags(device: Device, config: Config, flags: Arc<Flags>) -> Arc<Comm> {
        static ISSUED: Mutex<usize> = Mutex::new(0);
        let mut issued = lock(&ISSUED);
        *issued += 1;
        // Far from any address, so that a user who follows the pointer crashes at once.
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

    /// Told when the clique breaks.
    pub(crate) fn listener(self: &Arc<Self>) -> Notify {
        let comm: Weak<Comm> = Arc::downgrade(self);
        Box::new(move |fault| {
            if let Some(comm) = comm.upgrade() {
                comm.break_off(fault);
            }
        })
    }

    /// Takes its place. Fails where it was aborted in the meantime.
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

    /// Its place, once it has one.
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

    /// The child is made: from now on it looks after itself.
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

    /// As with NCCL a call that fails is a blocking communicator's own affair, and the end of another.
    pub(crate) fn fail_unless_blocking(&self, fault: &Fault) {
        if !self.is_blocking() {
            self.fail(fault);
        }
    }

    /// The peers cannot be reached any more.
    fn break_off(&self, fault: &Fault) {
        let mut state = lock(&self.state);
        if !state.stopped && !state.halted && state.broken.is_none() {
            warn(&fault.text);
            state.broken = Some(fault.clone());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// What `ncclCommGetAsyncError` says. The poll that sees a group's success joins its thread; after a failure that is left to the abort.
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

    /// Whether a group of it goes on in the background, or nobody has seen its end.
    pub(crate) fn is_in_background(&self) -> bool {
        lock(&self.progress).is_some()
    }

    /// Is in progress until a group ends.
    pub(crate) fn follow(&self, group: &Arc<Progress>) {
        *lock(&self.progress) = Some(group.clone());
    }

    /// What every call but a few begins with.
    pub(crate) fn ensure_ready(&self) -> Outcome<()> {
        if lock(&self.state).suspended {
            return Err(Fault::usage("the communicator is suspended"));
        }
        // As with NCCL what is called under raised flags goes ahead, and its kernels end at once.
        if lock(&self.state).halted {
            return Ok(());
        }
        match self.poll(false) {
            Code::SUCCESS => Ok(()),
            Code::IN_PROGRESS => Err(Fault::argument("Attempt to use communicator before the previous operation returned ncclSuccess")),
            code => Err(self.error().unwrap_or_else(|| Fault::new(code, ""))),
        }
    }

    /// Whether collectives may still be called.
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

    /// Making it has failed.
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

    /// A launch was not taken by its stream.
    pub(crate) fn withdrawn(&self) {
        lock(&self.state).queued -= 1;
        self.changed.notify_all();
    }

    /// A graph has captured a launch.
    pub(crate) fn hold(&self) {
        lock(&self.state).held += 1;
    }

    /// That graph, and all that was made of it, is destroyed.
    pub(crate) fn release(&self) {
        lock(&self.state).held -= 1;
        self.changed.notify_all();
    }

    /// A stream begins a launch, which waits first where a fault was planted. Says whether it may go on.
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

    /// A stream is done with a launch.
    pub(crate) fn end(&self, captured: bool) {
        let mut state = lock(&self.state);
        state.running -= 1;
        state.queued -= usize::from(!captured);
        drop(state);
        self.changed.notify_all();
    }
}

/// How many things of each sort are alive, for tests that look for leaks.
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
