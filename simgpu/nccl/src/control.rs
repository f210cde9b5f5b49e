//! Faults that tests plant, and calls that tests count.

use crate::abi::Code;
use crate::operation::Verb;
use crate::report::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::thread::ThreadId;
use std::time::Duration;

/// Planted failures of calls of one function.
struct Planted {
    /// The thread whose calls count; `None` for any thread.
    thread: Option<ThreadId>,
    /// The number of calls that succeed before.
    before: u64,
    code: Code,
}

struct Plan {
    version: i32,
    failures: HashMap<String, Vec<Planted>>,
    polls: HashMap<String, u32>,
    /// Ranks that hang, each after this many launches.
    hangs: HashMap<usize, u64>,
    calls: HashMap<(&'static str, Option<ThreadId>), u64>,
    /// Bytes sent by verb and rank.
    sent: HashMap<(Verb, usize), u64>,
    linger: Duration,
    /// Whether deaths are hidden from peers.
    silent: bool,
    /// Whether a rank's abort ends the calls that it has begun for other ranks.
    goes_on: bool,
    /// Whether the first collective of a communicator connects it.
    lazy: bool,
    /// Whether windows are memory that all ranks map, which not every allocation can be.
    symmetric: bool,
}

static PLAN: Mutex<Option<Plan>> = Mutex::new(None);

/// The default version: 2.32.3.
pub(crate) const NEWEST: i32 = 23203;

/// How often making a communicator reports "in progress" by default.
const POLLS_TO_MAKE: u32 = 2;

fn with<T>(act: impl FnOnce(&mut Plan) -> T) -> T {
    act(lock(&PLAN).get_or_insert_with(|| Plan {
        version: NEWEST,
        failures: HashMap::new(),
        polls: HashMap::new(),
        hangs: HashMap::new(),
        calls: HashMap::new(),
        sent: HashMap::new(),
        linger: Duration::ZERO,
        silent: false,
        goes_on: false,
        lazy: false,
        symmetric: true,
    }))
}

/// Counts a call, and returns the code with which it must fail, if any.
pub(crate) fn enter(name: &'static str) -> Option<Code> {
    let thread = std::thread::current().id();
    with(|plan| {
        for caller in [None, Some(thread)] {
            *plan.calls.entry((name, caller)).or_default() += 1;
        }
        let planted = plan.failures.get_mut(name);
        let mut fails = None;
        if let Some(planted) = planted {
            let applies = |planted: &Planted| planted.thread.is_none_or(|only| only == thread);
            fails = planted.iter().position(|planted| applies(planted) && planted.before == 0).map(|found| planted.remove(found).code);
            planted.iter_mut().filter(|planted| applies(planted)).for_each(|planted| planted.before = planted.before.saturating_sub(1));
        }
        fails
    })
}

/// Returns the extra time that a call stays inside.
pub(crate) fn linger() -> Duration {
    with(|plan| plan.linger)
}

/// Makes the `nth` call of a function from now on (1 is the next) fail.
pub(crate) fn fail(name: &str, nth: u64, code: Code, thread: Option<ThreadId>) {
    let planted = Planted { thread, before: nth.saturating_sub(1), code };
    with(|plan| plan.failures.entry(name.to_owned()).or_default().push(planted));
}

/// Returns how often a communicator reports "in progress" after a call of a function.
pub(crate) fn polls(name: &str) -> u32 {
    const MAKING: [&str; 6] =
        ["ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommSplit", "ncclCommShrink", "ncclCommGrow", "ncclCommFinalize"];
    with(|plan| plan.polls.get(name).copied()).unwrap_or(if MAKING.contains(&name) { POLLS_TO_MAKE } else { 0 })
}

pub(crate) fn set_polls(name: &str, polls: u32) {
    with(|plan| plan.polls.insert(name.to_owned(), polls));
}

/// Whether a launch of a rank hangs.
pub(crate) fn hangs(rank: usize) -> bool {
    with(|plan| match plan.hangs.get_mut(&rank) {
        Some(0) => true,
        Some(before) => {
            *before -= 1;
            false
        }
        None => false,
    })
}

/// Makes a rank hang after `after` launches; `None` ends that.
pub(crate) fn set_hang(rank: usize, after: Option<u64>) {
    with(|plan| match after {
        Some(after) => plan.hangs.insert(rank, after),
        None => plan.hangs.remove(&rank),
    });
}

pub(crate) fn version() -> i32 {
    with(|plan| plan.version)
}

pub(crate) fn set_version(version: i32) {
    with(|plan| plan.version = version);
}

pub(crate) fn set_linger(linger: Duration) {
    with(|plan| plan.linger = linger);
}

/// Whether the death of a process is hidden from its peers.
pub(crate) fn deaths_are_silent() -> bool {
    with(|plan| plan.silent)
}

/// Whether the first collective of a communicator waits, inside the call, until all ranks have come to connect.
pub(crate) fn connects_lazily() -> bool {
    with(|plan| plan.lazy)
}

/// Whether windows are memory that all ranks map.
pub(crate) fn has_symmetric_memory() -> bool {
    with(|plan| plan.symmetric)
}

pub(crate) fn set_symmetric_memory(there: bool) {
    with(|plan| plan.symmetric = there);
}

pub(crate) fn connect_lazily() {
    with(|plan| plan.lazy = true);
}

/// Whether a rank's abort ends the calls that it has begun for other ranks.
pub(crate) fn aborted_kernels_go_on() -> bool {
    with(|plan| plan.goes_on)
}

pub(crate) fn let_aborted_kernels_go_on() {
    with(|plan| plan.goes_on = true);
}

pub(crate) fn silence_deaths() {
    with(|plan| plan.silent = true);
}

/// Returns how often a function was called, by any thread or by one.
pub(crate) fn calls(name: &str, thread: Option<ThreadId>) -> u64 {
    with(|plan| plan.calls.iter().filter(|((called, caller), _)| *called == name && *caller == thread).map(|(_, count)| count).sum())
}

pub(crate) fn count_sent(verb: Verb, rank: usize, bytes: usize) {
    with(|plan| *plan.sent.entry((verb, rank)).or_default() += bytes as u64);
}

/// Returns the bytes that ranks of this process sent, by one verb or all, by one rank or all.
pub(crate) fn sent(verb: Option<Verb>, rank: Option<usize>) -> u64 {
    let asked = |&(of, by): &(Verb, usize)| verb.is_none_or(|verb| verb == of) && rank.is_none_or(|rank| rank == by);
    with(|plan| plan.sent.iter().filter(|(key, _)| asked(key)).map(|(_, bytes)| bytes).sum())
}

/// Clears everything planted and counted; the version stays.
pub(crate) fn reset() {
    let version = version();
    *lock(&PLAN) = None;
    set_version(version);
}
