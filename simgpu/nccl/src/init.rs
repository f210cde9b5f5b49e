//! Makes communicators: from a unique id, or from another communicator. The work for a child belongs to its parent;
//! the child blocks by its own configuration, as in all releases that split.

use crate::abi::{Code, Config, UniqueId};
use crate::comm::Comm;
use crate::control;
use crate::driver::Device;
use crate::fault::{Fault, Outcome};
use crate::group::{self, Task};
use crate::hub::Place;
use crate::link::Link;
use crate::report::{lock, report};
use crate::wire::{Frame, Parser};
use std::sync::{Arc, OnceLock};

/// The variable that receives the handle of a new communicator.
#[derive(Clone, Copy)]
pub(crate) struct Target(pub(crate) *mut crate::abi::Handle);

// SAFETY: NCCL has the same rule: the variable has to live until the call is complete. Only the thread of the group
// writes to it, and a caller that ends the call early waits for that thread.
#[expect(unsafe_code, reason = "the caller's variable is written when the call is complete, by the thread that completes it")]
unsafe impl Send for Target {}

impl Target {
    /// # Safety
    /// The caller's variable must still exist.
    #[expect(unsafe_code, reason = "the caller's variable is written by its address")]
    pub(crate) unsafe fn set(self, comm: &Arc<Comm>) {
        // SAFETY: promised by the caller.
        unsafe { self.0.write(comm.publish()) };
    }
}

/// The data that a rank sends to its peers when it joins.
struct Introduction {
    version: i32,
    host: String,
    uuid: [u8; 16],
    device: i32,
    shares_device: bool,
}

fn host() -> &'static str {
    // As with NCCL, it is read once per process.
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(|| std::env::var("NCCL_HOSTID").unwrap_or_default())
}

/// Whether the user and the version allow several ranks on one device.
pub(crate) fn may_share_device() -> bool {
    control::version() >= 23003 && std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value.trim() == "1")
}

fn introduce(device: &Device) -> Vec<u8> {
    let numbers = Frame::default().number(control::version() as u64).number(device.ordinal as u64).number(u64::from(may_share_device()));
    numbers.bytes(host().as_bytes()).bytes(&device.uuid).into_bytes()
}

fn meet(words: &[u8]) -> Option<Introduction> {
    let mut parser = Parser(words);
    let (version, device, shares) = (parser.number()? as i32, parser.number()? as i32, parser.number()?);
    let host = parser.text()?;
    let uuid = parser.bytes()?.try_into().ok()?;
    Some(Introduction { version, host, uuid, device, shares_device: shares != 0 })
}

/// Waits for all ranks and checks that they are compatible; all come to the same result.
fn greet(link: &Link, size: usize, device: &Device) -> Outcome<()> {
    let everyone: Vec<usize> = (0..size).collect();
    let heard = link.confer(&everyone, "hello", introduce(device))?;
    let ranks: Option<Vec<_>> = heard.iter().map(|words| meet(words)).collect();
    let ranks = ranks.ok_or_else(|| Fault::remote("a rank joined with something else than an introduction"))?;
    let ours = ranks[0].version;
    if let Some(other) = ranks.iter().position(|rank| rank.version != ours) {
        let theirs = ranks[other].version;
        return Err(Fault::usage(format!("Mismatched NCCL version detected : rank 0 has {ours}, rank {other} has {theirs}")));
    }
    check_devices(&ranks, link.rank)
}

/// Fails a rank that shares its device; the others then fail too, and learn only that peers are lost.
fn check_devices(ranks: &[Introduction], me: usize) -> Outcome<()> {
    let same = |a: &Introduction, b: &Introduction| a.uuid == b.uuid && a.host == b.host && !(a.shares_device && b.shares_device);
    let twin = |of: usize| (0..ranks.len()).find(|&other| other != of && same(&ranks[of], &ranks[other]));
    let Some(first) = (0..ranks.len()).find(|&rank| twin(rank).is_some()) else { return Ok(()) };
    // From 2.30.3 until 2.30.7 only the first rank of the host noticed.
    if (23003..23007).contains(&ranks[0].version) && me != first {
        return Ok(());
    }
    match twin(me) {
        Some(twin) => {
            let device = ranks[me].device;
            Err(Fault::usage(format!("Duplicate GPU detected : rank {me} and rank {twin} both on CUDA device {device}")))
        }
        None => Err(Fault::remote(format!("rank {first} is gone before the communicator was made"))),
    }
}

/// Joins a clique: opens the link to it, takes the rank's place and meets the others.
fn join(comm: &Arc<Comm>, place: Place, rank: usize, size: usize) -> Outcome<()> {
    let link = Link::open(place, rank, size, comm.listener())?;
    comm.settle(rank, size, link.clone())?;
    greet(&link, size, &comm.device)
}

/// Checks a rank and a number of ranks.
pub(crate) fn check_rank(rank: i32, size: i32) -> Outcome<(usize, usize)> {
    match (usize::try_from(rank), usize::try_from(size)) {
        (Ok(rank), Ok(size)) if rank < size => Ok((rank, size)),
        _ => Err(Fault::argument(format!("Invalid rank requested : {rank}/{size}"))),
    }
}

/// Joins the communicator of a unique id. The handle is valid at once, the communicator only later.
///
/// # Safety
/// The target is valid for writes.
#[expect(unsafe_code, reason = "the caller's variable is written by its address")]
pub(crate) unsafe fn from_id(
    target: Target,
    name: &'static str,
    id: &UniqueId,
    (rank, size): (usize, usize),
    device: Device,
    config: Config,
) -> Outcome<Code> {
    let place = Place::of(id)?;
    let comm = Comm::new(device, config);
    // SAFETY: promised by the caller.
    unsafe { target.set(&comm) };
    let joining = comm.clone();
    let work = move || join(&joining, place, rank, size).inspect_err(|_| joining.never_made());
    group::add_task(Task { comm, name, ends: false, work: Box::new(work) })
}

/// Returns the number of a child: the n-th child is the same on all ranks.
fn next_child(parent: &Comm) -> usize {
    let mut resources = lock(&parent.resources);
    resources.children += 1;
    resources.children
}

/// Makes a communicator from a parent, on the parent's hub. As with NCCL, the handle exists in the end even if making
/// it failed; it can then only be aborted.
fn bear(parent: &Arc<Comm>, child: Arc<Comm>, place: Place, rank: usize, size: usize, target: Target) -> Outcome<()> {
    let outcome = connect_child(parent, &child, place, rank, size);
    if outcome.is_err() {
        child.never_made();
    }
    hand_out(&child, target);
    outcome
}

/// Returns to the caller a child that could not be made.
fn lose(child: Option<&Arc<Comm>>, target: Target) {
    if let Some(child) = child {
        child.never_made();
        hand_out(child, target);
    }
}

fn hand_out(child: &Arc<Comm>, target: Target) {
    #[expect(unsafe_code, reason = "the caller's variable is written by its address")]
    // SAFETY: the call is complete only when its job ends, and an abort of the parent waits for that, so the caller
    // still keeps the variable.
    unsafe {
        target.set(child);
    }
}

fn connect_child(parent: &Arc<Comm>, child: &Arc<Comm>, place: Place, rank: usize, size: usize) -> Outcome<()> {
    let link = Link::open(place, rank, size, child.listener())?;
    parent.expect_child(&link)?;
    child.settle(rank, size, link.clone())?;
    let everyone: Vec<usize> = (0..size).collect();
    link.confer(&everyone, "hello", Vec::new())?;
    parent.child_born(&link);
    Ok(())
}

/// Splits a communicator by colour; ranks are ordered by key. Ranks without a colour take part and get no child. The
/// work and its progress belong to the parent, whatever the child's configuration.
pub(crate) fn by_split(parent: &Arc<Comm>, (color, key): (i32, i32), target: Target, child: Option<Arc<Comm>>) -> Outcome<Code> {
    let meeting = format!("split {}", next_child(parent));
    let splitting = parent.clone();
    let work = move || {
        let member = splitting.member()?;
        let everyone: Vec<usize> = (0..member.size).collect();
        let words = Frame::default().number(color as u64).number(key as u64).into_bytes();
        let heard = member.link.confer(&everyone, &meeting, words).inspect_err(|_| lose(child.as_ref(), target))?;
        let chosen = |words: &Vec<u8>| {
            let mut parser = Parser(words);
            Some((parser.number()? as i32, parser.number()? as i32))
        };
        let Some(child) = child else { return Ok(()) };
        let mut ranks: Vec<(i32, usize)> = Vec::new();
        ranks.extend(heard.iter().enumerate().filter_map(|(rank, words)| chosen(words).filter(|c| c.0 == color).map(|c| (c.1, rank))));
        ranks.sort_unstable();
        let rank = ranks.iter().position(|&(_, rank)| rank == member.rank).unwrap_or_default();
        let place = Place { name: format!("{}/{meeting} color {color}", member.link.place.name), ..member.link.place.clone() };
        bear(&splitting, child, place, rank, ranks.len(), target)
    };
    group::add_task(Task { comm: parent.clone(), name: "ncclCommSplit", ends: false, work: Box::new(work) })
}

/// Makes a communicator without some of the parent's ranks, which take no part.
pub(crate) fn by_shrink(parent: &Arc<Comm>, excluded: &[usize], target: Target, child: Arc<Comm>) -> Outcome<Code> {
    let meeting = format!("shrink {}", next_child(parent));
    let excluded = excluded.to_vec();
    let shrinking = parent.clone();
    let work = move || {
        let member = shrinking.member()?;
        let survivors: Vec<usize> = (0..member.size).filter(|rank| !excluded.contains(rank)).collect();
        let words = Frame::default().list(&excluded, |frame, &rank| frame.number(rank as u64)).into_bytes();
        let heard = member.link.confer(&survivors, &meeting, words.clone()).inspect_err(|_| lose(Some(&child), target))?;
        if heard.iter().any(|other| *other != words) {
            report("ranks exclude different ranks in ncclCommShrink");
            lose(Some(&child), target);
            return Err(Fault::argument("ncclCommShrink : ranks exclude different ranks"));
        }
        let rank = survivors.iter().position(|&rank| rank == member.rank).unwrap_or_default();
        let place = Place { name: format!("{}/{meeting}", member.link.place.name), ..member.link.place.clone() };
        bear(&shrinking, child, place, rank, survivors.len(), target)
    };
    group::add_task(Task { comm: parent.clone(), name: "ncclCommShrink", ends: false, work: Box::new(work) })
}

/// Makes a larger communicator that begins with the parent's ranks. The new handle is valid at once, and reports when
/// it is ready.
///
/// # Safety
/// The target is valid for writes.
#[expect(unsafe_code, reason = "the caller's variable is written by its address")]
pub(crate) unsafe fn by_growth(parent: &Arc<Comm>, size: usize, id: Option<UniqueId>, target: Target, config: Config) -> Outcome<Code> {
    let meeting = format!("grow {}", next_child(parent));
    let (parent, comm) = (parent.clone(), Comm::new(parent.device, config));
    // SAFETY: promised by the caller.
    unsafe { target.set(&comm) };
    let growing = comm.clone();
    let work = move || {
        let member = parent.member()?;
        let everyone: Vec<usize> = (0..member.size).collect();
        let words = id.map(|id| id.internal.to_vec()).unwrap_or_default();
        let heard = member.link.confer(&everyone, &meeting, words)?;
        let internal = heard.iter().find_map(|words| words.as_slice().try_into().ok());
        let internal = internal.ok_or_else(|| Fault::argument("ncclCommGrow : no rank passed a unique id"))?;
        lock(&parent.resources).growing = false;
        join(&growing, Place::of(&UniqueId { internal })?, member.rank, size).inspect_err(|_| growing.never_made())
    };
    group::add_task(Task { comm, name: "ncclCommGrow", ends: false, work: Box::new(work) })
}
