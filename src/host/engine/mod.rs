//! Runs one rank's part of a collective over links.
//!
//! All links progress together, in both directions, so nothing blocks on full buffers. Folds and copies are done in
//! between. Payload moves directly between the links and the memory of the plan. Repeating a run of the same shape
//! allocates nothing.
//!
//! Each direction of a link is a stream of [messages](wire). The first message of every call contains the call, so
//! ranks detect a mismatch before they accept any payload. If a run ends early on one rank, that rank sends the reason
//! over every open link. Every rank that receives it forwards it once.

#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod memory;
mod peer;
mod schedule;
mod shutdown;
mod stream;
#[cfg(test)]
mod tests;
mod waiting;
mod wire;

use std::os::fd::AsRawFd;

use rustix::event::PollFlags;

pub(crate) use self::memory::{CheckedPlan, Lists, Memory};
use self::memory::{Context, Spaces};
use self::peer::PeerState;
use self::schedule::{Local, Schedule};
use self::waiting::Waiting;
use super::abort_reason::{AbortReason, Interrupted};
use super::fold::Fold;
use super::health::Health;
use super::link::ByteLink;
use super::plan::{Action, Plan};
use super::scratch::Scratch;
use super::waiting::{Pause, Sleep};
use crate::base::deadline::Deadline;
use crate::base::tuning::engine::ROUNDS_PER_CHECK;
use crate::call::Call;
use crate::config;
use crate::flight::Flight;

/// The links of one rank.
pub(crate) trait Links {
    /// One link.
    type Link: ByteLink;

    /// Returns the link to a rank. If there is none yet, returns one that is being opened. Nothing moves on that link
    /// until it is open, and this function does not wait for that.
    fn link(&mut self, rank: usize) -> Result<&mut Self::Link, Interrupted>;

    /// Calls `visit` for every open link, with its rank.
    fn for_each_open(&mut self, visit: &mut dyn FnMut(usize, &mut Self::Link));

    /// Closes the link to a rank, if there is one. This is used after a message was cut off, because no other message
    /// can follow it on the same link.
    fn drop_link(&mut self, rank: usize);
}

/// One collective to run.
pub(crate) struct Execution<'a> {
    /// This rank's part.
    pub(crate) plan: &'a CheckedPlan,
    /// The rank of each of the plan's participants.
    pub(crate) participants: &'a [usize],
    /// The caller's buffers.
    pub(crate) memory: Memory<'a>,
    /// What every rank must agree on.
    pub(crate) call: &'a Call,
    /// The reduction, if the plan has folds.
    pub(crate) fold: Option<&'a dyn Fold>,
    /// The time limit of the call.
    pub(crate) deadline: &'a Deadline,
    /// The record of whether and why the communicator ended.
    pub(crate) health: &'a Health,
    /// The flight recorder, which records which ranks this rank waits for.
    pub(crate) recorder: &'a Flight,
    /// A function called now and then. It returns a reason if the communicator ended in a way that neither `health` nor
    /// the links report.
    pub(crate) interrupted: &'a mut dyn FnMut() -> Option<AbortReason>,
}

/// The reason why a run ends early, and the peer that sent it.
struct End {
    stop: Interrupted,
    told_by: Option<usize>,
}

impl From<Interrupted> for End {
    fn from(stop: Interrupted) -> Self {
        Self { stop, told_by: None }
    }
}

impl From<AbortReason> for End {
    fn from(abort_reason: AbortReason) -> Self {
        Interrupted::from(abort_reason).into()
    }
}

/// Runs plans, one at a time, and keeps the state that outlives a run: bytes that arrived early, and memory for reuse.
#[derive(Debug)]
pub(crate) struct Engine {
    rank: usize,
    peers: Vec<PeerState>,
    /// The ranks that this run sends to or receives from.
    active: Vec<usize>,
    schedule: Schedule,
    local: Local,
    scratch: Scratch,
    waiting: Waiting,
    /// Set while a run is in progress. If it is already set when a run begins, the previous run ended in a panic.
    is_running: bool,
    /// Whether the final message has been sent.
    has_told: bool,
}

impl Engine {
    /// Creates the engine of `rank` in a world of `world_size`. `is_crowded`: its host has more ranks than processors
    /// for them.
    pub(crate) fn new(rank: usize, world_size: usize, is_crowded: bool) -> Self {
        Self {
            rank,
            peers: (0..world_size).map(|rank| PeerState::new(rank as u32)).collect(),
            active: Vec::new(),
            schedule: Schedule::default(),
            local: Local::default(),
            scratch: Scratch::default(),
            waiting: Waiting::new(is_crowded),
            is_running: false,
            has_told: false,
        }
    }

    /// Sets how this rank waits.
    pub(crate) fn waiting(mut self, waiting: config::Waiting) -> Self {
        self.waiting.set_waiting(waiting);
        self
    }

    /// Runs a plan to its end. After an error the communicator has ended: `health` has the reason, and the peers have
    /// been notified.
    pub(crate) fn run<L: Links>(&mut self, mut request: Execution<'_>, links: &mut L) -> Result<(), Interrupted> {
        let was_running = std::mem::replace(&mut self.is_running, true);
        let result = match self.prepare(&request, was_running) {
            Err(abort_reason) => Err(self.fail(abort_reason.into(), None, request.health, links)),
            Ok(context) => {
                let driven = self.drive(&mut request, &context, links);
                driven.map_err(|end| {
                    let end = self.with_own_view(end, &request, links);
                    self.fail(end, Some(&context), request.health, links)
                })
            }
        };
        self.is_running = false;
        self.scratch.trim();
        result
    }

    /// Checks the plan and queues its steps.
    fn prepare<'a>(&mut self, request: &Execution<'a>, was_running: bool) -> Result<Context<'a>, AbortReason> {
        if let Some(abort_reason) = request.health.abort_reason() {
            return Err(*abort_reason);
        }
        let failed = AbortReason::Failed { rank: self.rank as u32 };
        if was_running || self.has_told {
            crate::base::event::error!(rank = self.rank, "the communicator is used after a run that did not finish");
            return Err(failed);
        }
        let plan = request.plan.plan();
        if !self.scratch.reserve(plan.scratch_bytes) {
            crate::base::event::error!(rank = self.rank, "cannot allocate {} bytes of scratch memory", plan.scratch_bytes);
            return Err(failed);
        }
        let spaces = Spaces::new(&request.memory, &mut self.scratch);
        let checked = spaces.check_once(request.plan, request.fold.map(Fold::element_bytes));
        if let Err(reason) = checked.and_then(|()| self.take_up(plan, request.participants)) {
            crate::base::event::error!(rank = self.rank, "the plan for {} cannot be run: {reason}", request.call);
            return Err(failed);
        }
        Ok(Context { rank: self.rank, plan, spaces, call: request.call, fingerprint: request.call.to_bytes() })
    }

    /// Queues the steps of a plan.
    fn take_up(&mut self, plan: &Plan, participants: &[usize]) -> Result<(), String> {
        let Self { rank: own, peers, active, schedule, local, waiting, .. } = self;
        active.drain(..).for_each(|rank| peers[rank].begin());
        local.begin();
        waiting.begin();
        schedule.begin(plan, |step, action| {
            let (Action::Send { to: position, .. } | Action::Receive { from: position, .. }) = action else { return Ok(schedule::NONE) };
            let rank = participants.get(*position).copied().filter(|rank| rank != own);
            let Some((rank, peer)) = rank.and_then(|rank| Some((rank, peers.get_mut(rank)?))) else {
                return Err(format!("step {step} names participant {position}, which is not a peer"));
            };
            if !peer.is_needed() {
                active.push(rank);
            }
            Ok(match action {
                Action::Send { from, .. } => peer.queue_send(step, from.len),
                Action::Receive { into, .. } => peer.queue_receive(step, into.len),
                Action::Fold { .. } | Action::Copy { .. } => schedule::NONE,
            })
        })?;
        // The steps were queued last to first.
        active.reverse();
        Ok(())
    }

    /// Serves links and does local work until all steps are done.
    fn drive<L: Links>(&mut self, request: &mut Execution<'_>, context: &Context<'_>, links: &mut L) -> Result<(), End> {
        for &rank in &self.active {
            links.link(rank)?;
        }
        let mut rounds = 0_u32;
        loop {
            let has_moved = self.round(request, context, links)?;
            if self.schedule.is_done() {
                return Ok(());
            }
            if let Some(abort_reason) = request.health.abort_reason() {
                return Err((*abort_reason).into());
            }
            rounds = rounds.wrapping_add(1);
            if has_moved {
                self.waiting.reset();
            }
            if !has_moved || rounds.is_multiple_of(ROUNDS_PER_CHECK) {
                self.check(request, links)?;
            }
            if !has_moved {
                self.pause(request, context, links)?;
            }
        }
    }

    /// Serves every link and does some of the local work. Returns whether anything moved.
    fn round<L: Links>(&mut self, request: &Execution<'_>, context: &Context<'_>, links: &mut L) -> Result<bool, End> {
        let mut has_moved = self.local.advance(&mut self.schedule, context, request.fold);
        // Sends go first, because a peer can work on the bytes while this rank is still reading.
        for is_send in [true, false] {
            for index in 0..self.active.len() {
                let rank = self.active[index];
                let peer = &mut self.peers[rank];
                let wanted = if is_send { peer.wants_to_write(&self.schedule) } else { peer.wants_to_read(&self.schedule) };
                if !wanted {
                    continue;
                }
                let link = links.link(rank)?;
                let result =
                    if is_send { peer.send(link, &mut self.schedule, context) } else { peer.receive(link, &mut self.schedule, context) };
                match result {
                    Ok(moved) => has_moved |= moved,
                    Err(trouble) => return Err(self.explain(rank, trouble, links)),
                }
            }
        }
        Ok(has_moved)
    }

    /// Checks whether the run should end although the links report nothing.
    fn check<L: Links>(&mut self, request: &mut Execution<'_>, links: &mut L) -> Result<(), End> {
        if let Some(abort_reason) = (request.interrupted)() {
            return Err(abort_reason.into());
        }
        let elapsed = request.deadline.elapsed();
        if elapsed >= request.deadline.limit() {
            return Err(self.timed_out(request, links));
        }
        if self.waiting.is_due(elapsed) {
            let awaited = self.awaited(request, links);
            self.waiting.next_report = request.recorder.waits(request.call, request.deadline, awaited);
        }
        Ok(())
    }

    /// Waits a little because nothing moves.
    fn pause<L: Links>(&mut self, request: &Execution<'_>, context: &Context<'_>, links: &mut L) -> Result<(), End> {
        match self.waiting.pause() {
            Pause::Spin => std::hint::spin_loop(),
            Pause::Yield => self.waiting.yield_now(),
            Pause::Sleep(sleep) => self.sleep(sleep, request, context, links)?,
        }
        Ok(())
    }

    /// Sleeps until any link is ready. Links that this run does not need are included, because a reason to abort may
    /// arrive on them.
    fn sleep<L: Links>(&mut self, sleep: Sleep, request: &Execution<'_>, context: &Context<'_>, links: &mut L) -> Result<(), End> {
        let Self { peers, schedule, waiting, active, .. } = self;
        waiting.clear();
        // Links that matter but are still being opened have no descriptor to sleep on, and are not visited.
        let matters = |peer: &PeerState| peer.wants_to_read(schedule) || peer.wants_to_write(schedule);
        let mut unseen = active.iter().filter(|rank| matters(&peers[**rank])).count();
        let (mut is_blind, mut trouble) = (false, None);
        links.for_each_open(&mut |rank, link| {
            let Some(peer) = peers.get_mut(rank).filter(|_| trouble.is_none()) else { return };
            let (reads, writes) = (peer.wants_to_read(schedule), peer.wants_to_write(schedule));
            unseen -= usize::from(reads || writes);
            is_blind |= (reads || writes) && link.descriptor().is_none();
            let result = match link.descriptor() {
                _ if reads => Ok(true),
                Some(_) => peer.scan(context),
                None => peer.watch(link, context).map(|()| false),
            };
            match (result, link.descriptor()) {
                (Err(found), _) => trouble = Some((rank, found)),
                (Ok(watches), Some(descriptor)) if watches || writes => {
                    let writer = link.write_descriptor().filter(|_| writes);
                    let other = writer.filter(|writer| writer.as_raw_fd() != descriptor.as_raw_fd());
                    let flags = if watches { PollFlags::IN } else { PollFlags::empty() };
                    let flags = if writer.is_some() && other.is_none() { flags | PollFlags::OUT } else { flags };
                    if !flags.is_empty() {
                        waiting.add(descriptor, flags, rank, watches && !reads);
                    }
                    if let Some(writer) = other {
                        waiting.add(writer, PollFlags::OUT, rank, false);
                    }
                }
                (Ok(_), _) => {}
            }
        });
        if let Some((rank, trouble)) = trouble {
            self.waiting.clear();
            return Err(self.explain(rank, trouble, links));
        }
        self.waiting.sleep(sleep, is_blind || unseen > 0, request.deadline.remaining());
        while let Some(rank) = self.waiting.stirred() {
            let link = links.link(rank)?;
            if let Err(trouble) = self.peers[rank].watch(link, context) {
                return Err(self.explain(rank, trouble, links));
            }
        }
        Ok(())
    }
}
